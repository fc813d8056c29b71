#include "dist/flight_record.h"

#include <algorithm>
#include <cstdio>

#include "runtime/error.h"

namespace detr::dist {
namespace {

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(static_cast<unsigned char>(c)));
      out += escape;
    } else {
      out += c;
    }
  }
  return out += '"';
}

/// Microseconds are shown. Digits of integers, so that no locale writes a comma.
std::string seconds(double value) {
  const auto micros = static_cast<long long>(value * 1e6 + 0.5);
  char text[32];
  std::snprintf(text, sizeof text, "%lld.%06lld", micros / 1000000, micros % 1000000);
  return text;
}

}  // namespace

std::uint64_t FlightRecord::issue(std::uint64_t tag, std::string phase, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (flights_.size() == kLength) flights_.pop_front();
  flights_.push_back({next_, tag, std::move(phase), bytes, now(), -1});
  return next_++;
}

void FlightRecord::end(std::uint64_t number) noexcept {
  const std::lock_guard lock(mutex_);
  if (flights_.empty() || number < flights_.front().number || number >= next_) return;
  flights_[static_cast<std::size_t>(number - flights_.front().number)].ended_s = now();
}

std::vector<Flight> FlightRecord::flights() const {
  const std::lock_guard lock(mutex_);
  return {flights_.begin(), flights_.end()};
}

std::string FlightRecord::json(int rank) const {
  std::string text = concat("{\"rank\": ", rank, ", \"started_unix_s\": ", seconds(started_unix_s_), ", \"collectives\": [");
  const char* separator = "\n";
  for (const Flight& flight : flights()) {
    text += concat(separator, "{\"number\": ", flight.number, ", \"tag\": \"", flight.tag, "\", \"phase\": ", quoted(flight.phase), ", \"bytes\": ", flight.bytes,
                   ", \"issued_s\": ", seconds(flight.issued_s), ", \"ended_s\": ", flight.ended_s < 0 ? "null" : seconds(flight.ended_s), "}");
    separator = ",\n";
  }
  return text += "\n]}\n";
}

std::optional<FlightDifference> first_difference(std::span<const Flight> a, std::span<const Flight> b) {
  auto left = a.begin(), right = b.begin();
  if (!a.empty() && !b.empty()) {   // from the first number that neither record has dropped
    const std::uint64_t first = std::max(a.front().number, b.front().number);
    while (left != a.end() && left->number < first) ++left;
    while (right != b.end() && right->number < first) ++right;
  }
  for (; left != a.end() && right != b.end(); ++left, ++right) {
    if (left->tag != right->tag || left->phase != right->phase || left->bytes != right->bytes) return FlightDifference{*left, *right};
  }
  if (left != a.end()) return FlightDifference{*left, std::nullopt};
  if (right != b.end()) return FlightDifference{std::nullopt, *right};
  return std::nullopt;
}

}  // namespace detr::dist
