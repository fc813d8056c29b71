#include "runtime/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "runtime/error.h"

namespace detr {
namespace {
// A task that starts a loop of its own runs it serially: its siblings keep the other threads busy.
thread_local bool inside_task = false;

void end_all(std::vector<std::thread>& workers, std::mutex& mutex, bool& stopping, std::condition_variable& start) {
  {
    const std::lock_guard lock(mutex);
    stopping = true;
  }
  start.notify_all();
  for (std::thread& worker : workers) worker.join();
}
}  // namespace

int default_threads() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

ThreadPool::ThreadPool(int threads) {
  DETR_CHECK(threads >= 1, "thread pool: threads must be >= 1, got ", threads);
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (...) {   // the system starts no more: those that did start end as well
    end_all(workers_, mutex_, stopping_, start_);
    throw;
  }
}

ThreadPool::~ThreadPool() { end_all(workers_, mutex_, stopping_, start_); }

void ThreadPool::parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& task) {
  if (count <= 0) return;
  if (inside_task || workers_.empty() || count == 1) {
    for (std::int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    task_ = &task;
    next_ = 0;
    count_ = count;
    failure_ = nullptr;
    ++generation_;
  }
  start_.notify_all();
  run_some();
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return active_ == 0; });
  task_ = nullptr;
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void ThreadPool::run_some() {
  std::unique_lock lock(mutex_);
  if (!task_) return;
  ++active_;
  inside_task = true;
  while (next_ < count_) {
    const std::int64_t index = next_++;
    lock.unlock();
    std::exception_ptr failure;
    try {
      (*task_)(index);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    if (failure && !failure_) {
      failure_ = failure;
      next_ = count_;
    }
  }
  inside_task = false;
  if (--active_ == 0) done_.notify_all();
}

void ThreadPool::work() {
  std::int64_t seen = 0;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      start_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) return;
      seen = generation_;
    }
    run_some();
  }
}

}  // namespace detr
