#include "tests/dist/job.h"

#include <poll.h>

#include <thread>

namespace detr::dist::test {

Job::Job(int size, Milliseconds timeout) {
  seen_->aborts.resize(static_cast<std::size_t>(size));
  const auto warn = [seen = seen_](const std::string& line) {
    const std::lock_guard lock(seen->mutex);
    seen->warnings.push_back(line);
  };
  hub_ = std::make_unique<Hub>(HubOptions{size, "token", Milliseconds(20000), timeout, warn});
  for (int rank = 0; rank < size; ++rank) {
    auto [theirs, ours] = socket_pair();
    hub_->attach(rank, std::move(ours));
    const auto on_abort = [seen = seen_, rank](const Failure& failure) {
      const std::lock_guard lock(seen->mutex);
      seen->aborts[static_cast<std::size_t>(rank)].push_back(failure);
    };
    controls_.push_back(Control::over(std::move(theirs), {rank, size, "token", Milliseconds(20000), timeout, on_abort}));
  }
}

std::map<int, std::string> Job::run(const std::function<void(int, Control&)>& body) {
  std::map<int, std::string> thrown;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < static_cast<int>(controls_.size()); ++rank) {
    threads.emplace_back([&, rank] {
      std::shared_ptr<Control>& control = controls_[static_cast<std::size_t>(rank)];
      try {
        body(rank, *control);
        control->leave();
      } catch (const std::exception& error) {
        control.reset();
        const std::lock_guard lock(mutex);
        thrown[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

bool Job::wait() const {
  pollfd wanted{hub_->descriptor(), POLLIN, 0};
  return ::poll(&wanted, 1, 20000) == 1;
}

std::vector<Failure> Job::aborts(int rank) const {
  const std::lock_guard lock(seen_->mutex);
  return seen_->aborts[static_cast<std::size_t>(rank)];
}

std::vector<std::string> Job::warnings() const {
  const std::lock_guard lock(seen_->mutex);
  return seen_->warnings;
}

}  // namespace detr::dist::test
