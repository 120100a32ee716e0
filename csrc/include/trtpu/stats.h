// What one batch asks of the buffers.
#ifndef TRTPU_STATS_H_
#define TRTPU_STATS_H_

#include <cstdint>

#include "trtpu/layout.h"
#include "trtpu/thread_pool.h"

namespace trtpu {

// Partitions start on multiples of this many slots.
inline constexpr std::int64_t kSlotAlignment = 8;

// Distinct (row, sample) pairs and distinct rows that each table sends from each local core to each
// partition, and where they go.
struct Counts {
  std::int32_t* ids;         // (T, C, P)
  std::int32_t* unique_ids;  // (T, C, P)
  std::int32_t* slots;       // (T, C, P) first slot in the core's buffer
};

// Filled for the caller, in arrays it owns.
struct Stats {
  std::int64_t* samples_per_core;      // (F)
  std::int64_t* num_samples;           // (F)
  std::int32_t* ids;                   // (num_stacks, C, P)
  std::int32_t* unique_ids;            // (num_stacks, C, P)
  std::int32_t* table_max_ids;         // (T) maximum over cores and partitions
  std::int32_t* table_max_unique_ids;  // (T)
  std::int64_t* num_invalid;           // (F) ids clamped or dropped
};

// Sums `counts` into stats and lays the partitions of each (stack, local core) out: fills
// counts.slots and `num_slots` (num_stacks, C), the aligned end. Values of num_slots above
// 2^31 - 1 mean that the buffer is impossible and `slots` useless.
void SumCounts(const Layout& layout, const Counts& counts, ThreadPool& pool, const Stats& stats,
               std::int64_t* num_slots);

}  // namespace trtpu

#endif  // TRTPU_STATS_H_
