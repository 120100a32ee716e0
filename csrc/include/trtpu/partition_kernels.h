// The inner loops of partition and pack, one set per instruction set, chosen at run time.
// All sets give the same bits.
//
// A run is a sorted array of entries `key << 32 | sample`: key = partition << row_bits | row.
#ifndef TRTPU_PARTITION_KERNELS_H_
#define TRTPU_PARTITION_KERNELS_H_

#include <cstdint>
#include <span>

#include "trtpu/layout.h"

namespace trtpu {

// How a key of `key_bits` bits is sorted: least significant digit first.
struct RadixPlan {
  std::int32_t num_digits;
  std::int32_t digit_bits;
};

inline constexpr std::int32_t kMaxDigitBits = 9;
inline constexpr std::int32_t kMaxDigits = 4;
inline constexpr std::int64_t kHistogramSize = kMaxDigits << kMaxDigitBits;

// Ids are handled in blocks that stay in the first-level cache.
inline constexpr std::int32_t kBlock = 1024;
// Row stores may run past a block's end by this much.
inline constexpr std::int32_t kBlockSlack = 16;

struct PartitionKernels {
  const char* name;  // "baseline", "avx2", "avx512"

  // entries[i] = key(ids[i]) << 32 | low[i]. Returns whether an id is outside the table; its entry
  // is then meaningless. `map.narrow` holds.
  bool (*make_entries_i32)(const std::int32_t* ids, const std::uint32_t* low, std::int64_t n,
                           const KeyMap& map, std::uint64_t* entries);
  bool (*make_entries_i64)(const std::int64_t* ids, const std::uint32_t* low, std::int64_t n,
                           const KeyMap& map, std::uint64_t* entries);

  // Adds to histogram[digit << digit_bits | value of the digit].
  void (*count_digits)(const std::uint64_t* entries, std::int64_t n, RadixPlan plan,
                       std::uint32_t* histogram);

  // One stable pass: `next[v]` is where the next entry with digit value v goes.
  void (*scatter)(const std::uint64_t* from, std::int64_t n, std::int32_t shift, std::uint32_t mask,
                  std::uint32_t* next, std::uint64_t* to);

  // Replaces the low half of entries, an index, by the sample of that occurrence; gains[i] is its
  // gain. `occurrences[index]` = bits of the gain << 32 | sample.
  void (*resolve)(std::uint64_t* entries, std::int64_t n, const std::uint64_t* occurrences,
                  float* gains);

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
