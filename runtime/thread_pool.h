#pragma once
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace detr {

/// A fixed set of threads for loops whose iterations share no result. The caller's thread works too.
class ThreadPool {
 public:
  /// `threads` >= 1 counts the caller's thread, so 1 starts none.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  /// Calls task(i) for each i in [0, count) once, in any order, on any thread; returns when all are done. The first
  /// exception of a task is thrown here. A call from inside a task runs serially in that task. One caller at a time.
  void parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& task);

 private:
  void work();
  void run_some();

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable start_, done_;
  const std::function<void(std::int64_t)>* task_ = nullptr;
  std::int64_t next_ = 0, count_ = 0, generation_ = 0;
  int active_ = 0;
  std::exception_ptr failure_;
  bool stopping_ = false;
};

/// Threads that suit this machine: the CPUs this process may use.
int default_threads();

}  // namespace detr
