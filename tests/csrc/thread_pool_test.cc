// Every item runs once, on a thread of the pool, whoever calls and however often.
#include "trtpu/thread_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "check.h"

namespace trtpu {
namespace {

void RunOnce(ThreadPool& pool, std::int64_t num_items) {
  std::vector<int> runs(static_cast<std::size_t>(num_items), 0);
  std::vector<std::int64_t> scratch(static_cast<std::size_t>(pool.num_threads()), 0);
  pool.Run(num_items, [&](std::int64_t item, int thread) {
    CHECK(thread >= 0 && thread < pool.num_threads());
    ++runs[static_cast<std::size_t>(item)];
    ++scratch[static_cast<std::size_t>(thread)];  // one user at a time: a race for the sanitizer
  });
  std::int64_t sum = 0;
  for (const int count : runs) CHECK(count == 1);
  for (const std::int64_t count : scratch) sum += count;
  CHECK(sum == num_items);
}

}  // namespace
}  // namespace trtpu

int main() {
  for (const int num_threads : {-1, 1, 2, 5}) {
    trtpu::ThreadPool pool(num_threads);
    CHECK(pool.num_threads() >= 1);
    for (int round = 0; round < 300; ++round) {
      for (const std::int64_t num_items : {0, 1, 2, 3, 40}) trtpu::RunOnce(pool, num_items);
      if (round % 50 == 0) {  // long enough that the threads fall asleep
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
      }
    }
  }
  trtpu::ThreadPool shared(3);
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 100; ++round) trtpu::RunOnce(shared, 20);
    });
  }
  for (std::thread& caller : callers) caller.join();
#if !defined(__SANITIZE_THREAD__)  // it does not follow threads into a forked child
  const pid_t child = fork();
  if (child == 0) {
    trtpu::RunOnce(shared, 50);
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
  trtpu::RunOnce(shared, 50);
}
