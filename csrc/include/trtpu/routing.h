// What a rank does on the host before and after an exchange with the ranks that own its rows.
#ifndef TRTPU_ROUTING_H_
#define TRTPU_ROUTING_H_

#include <cstdint>
#include <span>
#include <string>

#include "trtpu/thread_pool.h"

namespace trtpu {

// One stack's ids of one source core, as packed: partition p fills the slots from the last pointer,
// rounded up to 8, to row_pointers[p].
struct SourceStack {
  std::span<const std::int32_t> row_pointers;   // (P) or more
  std::span<const std::int32_t> embedding_ids;  // (N), sorted in each partition
  std::span<const std::int32_t> sample_ids;     // (N), in [0, num_samples)
  std::span<const std::int32_t> table_rows;     // (T) first row of each table, ascending
  std::int64_t num_samples;
  std::int64_t num_partitions;  // P
};

// Numbers the distinct samples of each partition, in the order in which its slots name them: all of
// its first table come first. Returns what is wrong with the buffers, "" if nothing.
//
// `numbers` (N) has each slot's number. The samples of partition p are listed in `samples` (N) from
// the partition's first slot on; `counts` (P, T) says how many of them each table has.
[[nodiscard]] std::string NumberSamples(const SourceStack& stack, std::span<std::int32_t> numbers,
                                        std::span<std::int32_t> samples,
                                        std::span<std::int64_t> counts, ThreadPool& pool);

// Vectors that lie packed end to end in one buffer and spread in another: run r has counts[r]
// vectors of widths[r] floats, and vector i starts at float offsets[i] of the spread buffer.
struct VectorRuns {
  std::span<const std::int64_t> offsets;
  std::span<const std::int64_t> counts;
  std::span<const std::int64_t> widths;
};

// Returns what is wrong with runs over buffers of these sizes, "" if nothing.
[[nodiscard]] std::string CheckRuns(const VectorRuns& runs, std::size_t packed_floats,
                                    std::size_t spread_floats);

// packed = spread / divisor, vector by vector. The runs have been checked.
void GatherVectors(const VectorRuns& runs, const float* spread, float divisor, float* packed,
                   ThreadPool& pool);

// spread += packed, vector by vector. The runs have been checked and no two vectors overlap.
void AddVectors(const VectorRuns& runs, const float* packed, float* spread, ThreadPool& pool);

}  // namespace trtpu

#endif  // TRTPU_ROUTING_H_
