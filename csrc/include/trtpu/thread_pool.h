// A fixed set of worker threads that share one list of items at a time.
#ifndef TRTPU_THREAD_POOL_H_
#define TRTPU_THREAD_POOL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace trtpu {

// Runs items on `num_threads` threads, the calling one among them. Calls from several threads take
// turns. After a fork the child's pool starts its own workers at its first use (the parent's do not
// exist there).
class ThreadPool {
 public:
  // (item, thread): `thread` in [0, num_threads) is stable within one Run; scratch may be indexed
  // by it.
  using Body = std::function<void(std::int64_t item, int thread)>;

  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int num_threads() const { return num_threads_; }

  // Calls body for every item in [0, num_items), in increasing order of start. Returns when all are
  // done. `body` must not throw and must not call Run of the same pool.
  void Run(std::int64_t num_items, const Body& body);

 private:
  struct Workers;

  int num_threads_;
  std::mutex run_mutex_;
  int owner_pid_ = 0;
  std::unique_ptr<Workers> workers_;
};

}  // namespace trtpu

#endif  // TRTPU_THREAD_POOL_H_
