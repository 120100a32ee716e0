#include "trtpu/thread_pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <thread>
#include <vector>

namespace trtpu {
namespace {

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spinning this long before sleeping keeps a millisecond job parallel: a sleeping thread takes tens
// of microseconds to come back on a busy machine.
constexpr int kSpins = 4000;

}  // namespace

struct ThreadPool::Workers {
  explicit Workers(int num_workers) {
    for (int worker = 1; worker <= num_workers; ++worker) {
      threads.emplace_back([this, worker] { Loop(worker); });
    }
  }

  ~Workers() {
    {
      std::lock_guard lock(mutex);
      stop = true;
    }
    wake.notify_all();
    for (std::thread& thread : threads) thread.join();
  }

  void Loop(int worker) {
    std::uint64_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < kSpins && generation.load(std::memory_order_acquire) == seen;
           ++spin)
        Pause();
      {
        std::unique_lock lock(mutex);
        if (!is_open) seen = generation.load(std::memory_order_relaxed);  // slept through it
        wake.wait(lock, [&] {
          return stop || (is_open && generation.load(std::memory_order_relaxed) != seen);
        });
        if (stop) return;
        seen = generation.load(std::memory_order_relaxed);
        busy.fetch_add(1, std::memory_order_relaxed);
      }
      Work(worker);
      const std::lock_guard lock(mutex);
      if (busy.fetch_sub(1, std::memory_order_acq_rel) == 1) done.notify_all();
    }
  }

  void Work(int thread) {
    for (;;) {
      const std::int64_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= num_items) return;
      (*body)(item, thread);
    }
  }

  std::vector<std::thread> threads;
  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable done;
  std::atomic<std::uint64_t> generation{0};
  std::atomic<std::int64_t> next{0};
  std::atomic<int> busy{0};  // threads at work on the open job
  std::int64_t num_items = 0;
  const Body* body = nullptr;
  bool is_open = false;  // the job takes threads
  bool stop = false;
};

ThreadPool::ThreadPool(int num_threads) : num_threads_(std::max(1, num_threads)) {}

ThreadPool::~ThreadPool() {
  // The threads of a forked parent are not ours to join.
  if (owner_pid_ != static_cast<int>(getpid())) static_cast<void>(workers_.release());
}

void ThreadPool::Run(std::int64_t num_items, const Body& body) {
  if (num_threads_ == 1 || num_items <= 1) {
    const std::lock_guard turn(run_mutex_);  // scratch indexed by thread 0 has one user at a time
    for (std::int64_t item = 0; item < num_items; ++item) body(item, 0);
    return;
  }
  const std::lock_guard turn(run_mutex_);
  if (const int pid = static_cast<int>(getpid()); owner_pid_ != pid) {
    static_cast<void>(workers_.release());
    workers_ = std::make_unique<Workers>(num_threads_ - 1);
    owner_pid_ = pid;
  }
  Workers& workers = *workers_;
  {
    const std::lock_guard lock(workers.mutex);
    workers.body = &body;
    workers.num_items = num_items;
    workers.next.store(0, std::memory_order_relaxed);
    workers.is_open = true;
    workers.generation.fetch_add(1, std::memory_order_release);
  }
  workers.wake.notify_all();
  workers.Work(0);
  {
    // Who has not come by now need not: on a busy machine waking may take longer than the work.
    const std::lock_guard lock(workers.mutex);
    workers.is_open = false;
  }
  for (int spin = 0; spin < kSpins && workers.busy.load(std::memory_order_acquire) > 0; ++spin)
    Pause();
  std::unique_lock lock(workers.mutex);
  workers.done.wait(lock, [&] { return workers.busy.load(std::memory_order_acquire) == 0; });
}

}  // namespace trtpu
