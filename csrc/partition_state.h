// What partition.cc computes and pack.cc writes.
#ifndef TRTPU_PARTITION_STATE_H_
#define TRTPU_PARTITION_STATE_H_

#include <cstdint>
#include <vector>

#include "trtpu/buffer.h"
#include "trtpu/kjt_view.h"
#include "trtpu/layout.h"
#include "trtpu/partition.h"
#include "trtpu/partition_kernels.h"
#include "trtpu/thread_pool.h"

namespace trtpu {

enum class GainKind {
  kOnes,       // every gain is 1
  kPerSample,  // one per sample: unweighted mean or sqrtn
  kPerId,      // one per occurrence: weighted
};

// The ids of one table on one local core: sorted in one go.
struct PartitionItem {
  std::int64_t size;           // ids
  std::int64_t begin;          // in words; wide: in wide_runs
  std::int64_t ends_begin;     // in ends: bucket ends, in words from begin; wide: partition ends
  std::int64_t gains_begin;    // in gains: by sample (kPerSample), or beside words (kPerId)
  std::int64_t num_samples;    // rows of the table's samples
  std::uint32_t first_sample;  // the first of them among the core's samples
  GainKind gains;
  SortPlan plan;
  bool is_wide;  // not sorted in buckets
  bool has_invalid;
};

// One feature's bags on one local core. Bag s holds ids [starts[s], starts[s + 1]) and stands in
// row first_sample + s of the core's samples.
struct Slice {
  IntArray ids;
  const float* weights;        // like ids; null: none
  const std::int32_t* starts;  // (num_samples + 1); null: ids [first_id, ...) are one sample each
  std::int64_t first_id;
  std::int64_t num_ids;
  std::int64_t num_samples;
  std::uint32_t first_sample;
  Combiner combiner;
};

// One occurrence with a key of any size.
struct WideEntry {
  std::uint64_t key;
  std::uint32_t low;
};

// Of one thread.
struct PartitionScratch {
  std::vector<Slice> slices;
  Buffer<std::uint32_t> keys;
  Buffer<std::uint32_t> other;
  Buffer<WideEntry> wide, wide_other;  // items that buckets cannot hold
  Buffer<std::uint64_t> occurrences;
  Buffer<std::int64_t> valid_ids;  // what is left of an item with invalid ids
  Buffer<float> valid_weights;
  Buffer<std::int32_t> valid_starts;
  alignas(64) std::uint32_t bucket_counts[2 << kMaxBucketBits];
  alignas(64) std::uint32_t histogram[kHistogramSize];
  alignas(64) std::uint32_t low[kBlock];
};

// Legend: T tables, F features, C local cores, P partitions.
struct PartitionState {
  PartitionState(Layout layout_in, ThreadPool& pool_in, const PartitionKernels& kernels_in);

  const Layout layout;
  ThreadPool& pool;
  const PartitionKernels& kernels;
  std::vector<KeyMap> key_maps;                // (T)
  std::vector<std::int32_t> table_of_feature;  // (F)

  // The last batch; sized by the layout:
  bool has_batch = false;
  std::vector<std::int64_t> samples_per_core;   // (F)
  std::vector<std::int64_t> num_samples;        // (F)
  std::vector<std::uint32_t> first_sample;      // (F) among the core's samples of the stack
  std::vector<PartitionItem> items;             // (T, C)
  std::vector<std::int64_t> samples_of_stack;   // (num_stacks) of one core
  std::vector<std::int64_t> order;              // of items: largest first
  std::vector<std::int64_t> num_invalid;        // (F, C)
  std::vector<std::int64_t> num_slots;          // (num_stacks, C)
  Buffer<std::int32_t> ids, unique_ids, slots;  // (T, C, P) Counts
  std::vector<std::int32_t> stack_ids;          // (num_stacks, C, P) distinct ids
  // sized by the batch:
  Buffer<std::int32_t> starts;      // (num_keys * batch_size + 1)
  Buffer<std::int64_t> key_sums;    // (num_keys)
  Buffer<std::uint32_t> words;      // sorted buckets, item after item
  Buffer<std::uint64_t> wide_runs;  // row << 32 | sample, counted like low
  Buffer<std::uint32_t> ends;
  Buffer<float> gains;
  std::vector<PartitionScratch> scratch;  // (threads)
};

}  // namespace trtpu

#endif  // TRTPU_PARTITION_STATE_H_
