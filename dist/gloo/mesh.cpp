#include "dist/gloo/mesh.h"

#include <gloo/transport/tcp/device.h>

#include <algorithm>

#include "runtime/error.h"

namespace detr::dist {

void MeshContext::connect(Control& control, const std::string& host, Clock::time_point deadline) {
  ::gloo::transport::tcp::attr attributes;
  attributes.hostname = host;
  device_ = ::gloo::transport::tcp::CreateDevice(attributes);
  transportContext_ = device_->createContext(rank, size);
  transportContext_->setTimeout(std::max(Milliseconds(1), std::chrono::ceil<Milliseconds>(deadline - Clock::now())));
  std::string own;   // for each peer the address of the socket that waits for it; a block of zeros at our own place
  std::size_t block = 0;
  std::vector<std::string> addresses(static_cast<std::size_t>(size));
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    const std::vector<char> bytes = transportContext_->createPair(peer)->address().bytes();
    block = bytes.size();
    addresses[static_cast<std::size_t>(peer)].assign(bytes.begin(), bytes.end());
  }
  addresses[static_cast<std::size_t>(rank)].assign(block, '\0');
  for (const std::string& address : addresses) own += address;
  const std::vector<std::string> all = control.all_gather(own, "addresses", deadline);
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    const std::string& theirs = all[static_cast<std::size_t>(peer)];
    if (theirs.size() != own.size()) throw CommError("rank ", rank, ": addresses: rank ", peer, " runs another version of Gloo");
    const auto first = theirs.begin() + static_cast<std::ptrdiff_t>(block) * rank;
    transportContext_->getPair(peer)->connect(std::vector<char>(first, first + static_cast<std::ptrdiff_t>(block)));
  }
}

/// Gloo closes all pairs after a wait that timed out, so one is made to. A pair that is closed already refuses, hence every peer is tried.
void MeshContext::poison() noexcept {
  const WithoutSigpipe guard;
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    try {
      char byte = 0;
      const auto buffer = createUnboundBuffer(&byte, 1);
      buffer->recv(peer, ~std::uint64_t{0}, 0, 1);   // a slot that no collective uses
      buffer->waitRecv(Milliseconds(1));
    } catch (const std::exception&) {   // the time that ran out, or a pair that is closed
    }
  }
}

}  // namespace detr::dist
