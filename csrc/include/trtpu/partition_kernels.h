// The inner loops of partition and pack, one set per instruction set, chosen at run time.
// All sets give the same bits.
//
// How an item (the ids of one table on one core) is sorted by key = partition << row_bits | row:
// one scatter by the top `bucket_bits` of the key makes buckets that fit the first-level cache; in
// them the rest of the key and the low part (sample or index) share 32 bits, and a least
// significant digit radix sort finishes. Occurrences arrive in order of the low part, and every
// pass is stable.
//
// The result is a run: a sorted array of entries `key << 32 | sample`.
#ifndef TRTPU_PARTITION_KERNELS_H_
#define TRTPU_PARTITION_KERNELS_H_

#include <cstdint>
#include <span>

#include "trtpu/layout.h"

namespace trtpu {

inline constexpr std::int32_t kMaxBucketBits = 12;
inline constexpr std::int32_t kMaxDigitBits = 10;
inline constexpr std::int32_t kMaxDigits = 4;
// For the digits of a bucket, in two copies.
inline constexpr std::int64_t kHistogramSize = 2 * kMaxDigits << kMaxDigitBits;

// Scratch that a vector may run past the end.
inline constexpr std::int64_t kSpill = 32;

// Ids are handled in blocks that stay in the first-level cache.
inline constexpr std::int32_t kBlock = 1024;

struct SortPlan {
  std::int32_t bucket_bits;  // top bits of the key
  std::int32_t rest_bits;    // the others
  std::int32_t low_bits;     // of sample or index; rest_bits + low_bits <= 32
  std::int32_t num_digits;   // that rest_bits are cut into
  std::int32_t digit_bits;
};

struct PartitionKernels {
  const char* name;  // "baseline", "avx2", "avx512"

  // Keys of a block of ids; adds their buckets to histogram (2, 2^bucket_bits), in two copies to
  // be added. Returns whether an id is outside the table; its key is then meaningless.
  // `map.is_narrow` holds.
  bool (*make_keys_i32)(const std::int32_t* ids, std::int64_t n, const KeyMap& map,
                        const SortPlan& plan, std::uint32_t* keys, std::uint32_t* histogram);
  bool (*make_keys_i64)(const std::int64_t* ids, std::int64_t n, const KeyMap& map,
                        const SortPlan& plan, std::uint32_t* keys, std::uint32_t* histogram);

  // Moves a block to its buckets, as rest << low_bits | low; next[b] is where bucket b goes on.
  void (*fill_buckets)(const std::uint32_t* keys, const std::uint32_t* low, std::int64_t n,
                       const SortPlan& plan, std::uint32_t* next, std::uint32_t* buckets);

  // Sorts a bucket by rest, stably; returns `bucket` or `other`, whichever holds the result.
  // `histogram` (kHistogramSize) and `other` (2 * n + kSpill) are scratch.
  std::uint32_t* (*sort_bucket)(std::uint32_t* bucket, std::int64_t n, const SortPlan& plan,
                                std::uint32_t* histogram, std::uint32_t* other);
  std::int64_t bucket_size;  // the mean size that suits sort_bucket

  // Appends a sorted bucket to the run: low is a sample, counted from first_sample.
  void (*emit)(const std::uint32_t* sorted, std::int64_t n, const SortPlan& plan,
               std::uint32_t bucket, std::uint32_t first_sample, std::uint64_t* run);
  // The same where low is an index: occurrences[index] = bits of a gain << 32 | sample.
  void (*emit_with_gains)(const std::uint32_t* sorted, std::int64_t n, const SortPlan& plan,
                          std::uint32_t bucket, const std::uint64_t* occurrences,
                          std::uint64_t* run, float* gains);

  // Distinct entries and distinct keys of a sorted run.
  void (*count_distinct)(const std::uint64_t* run, std::int64_t n, std::int32_t* num_entries,
                         std::int32_t* num_keys);

  // Writes the distinct entries of one partition of a run: row_ids = (key & row_mask) +
  // row_offset, samples, and gains added up in order over equal entries. Nothing outside the
  // first `num_distinct` slots is written.
  // All gains 1:
  void (*write_ones)(const std::uint64_t* run, std::int64_t n, std::uint32_t row_mask,
                     std::uint32_t row_offset, std::int64_t num_distinct, std::int32_t* row_ids,
                     std::int32_t* samples, float* gains);
  // sample_gains[sample - first_sample]:
  void (*write_per_sample)(const std::uint64_t* run, std::int64_t n, std::uint32_t row_mask,
                           std::uint32_t row_offset, std::int64_t num_distinct,
                           const float* sample_gains, std::uint32_t first_sample,
                           std::int32_t* row_ids, std::int32_t* samples, float* gains);
  // run_gains[i] belongs to run[i]:
  void (*write_per_id)(const std::uint64_t* run, std::int64_t n, std::uint32_t row_mask,
                       std::uint32_t row_offset, std::int64_t num_distinct, const float* run_gains,
                       std::int32_t* row_ids, std::int32_t* samples, float* gains);
};

// The sets that this processor can run, the best last.
[[nodiscard]] std::span<const PartitionKernels* const> AvailablePartitionKernels();

}  // namespace trtpu

#endif  // TRTPU_PARTITION_KERNELS_H_
