// The inner loops of partition and pack, one set per instruction set, chosen at run time.
// All sets give the same bits.
//
// How an item (the ids of one table on one core) is sorted by key = part << row_bits | row: one
// scatter by the top `bucket_bits` of the key, the part among them, makes buckets that fit
// the first-level cache; in a bucket each occurrence is a word `rest << low_bits | low`, rest being
// the other bits of the key and low its sample, or its index where it has a gain of its own.
// Occurrences come in order of low, so sorting by rest has to be stable, or by the whole word.
#ifndef TRTPU_PARTITION_KERNELS_H_
#define TRTPU_PARTITION_KERNELS_H_

#include <cstdint>
#include <span>

#include "trtpu/layout.h"

namespace trtpu {

// Beyond the second bound buckets do not pay, but may be needed for the rest to fit a word.
inline constexpr std::int32_t kMaxBucketBits = 16;
inline constexpr std::int32_t kMaxWantedBucketBits = 12;
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

// Where a bucket is written.
struct Slots {
  std::int32_t* row_ids;
  std::int32_t* samples;
  float* gains;
  std::int64_t room;
  std::uint32_t first_row;     // of rest 0
  std::uint32_t first_sample;  // of low 0
  std::int32_t low_bits;
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

  // Sorts a bucket. `histogram` (kHistogramSize) and `other` (2 * n + kSpill) are scratch.
  void (*sort_bucket)(std::uint32_t* bucket, std::int64_t n, const SortPlan& plan,
                      std::uint32_t* histogram, std::uint32_t* other);
  std::int64_t bucket_size;  // mean size that suits sort_bucket

  // Puts samples in the place of indices: occurrences[index] = bits of the gain << 32 | sample.
  // gains[i] becomes that of word i.
  void (*resolve_bucket)(std::uint32_t* bucket, std::int64_t n, std::int32_t low_bits,
                         const std::uint64_t* occurrences, float* gains);

  // Adds the distinct words and the distinct keys of a sorted bucket, n > 0.
  void (*count_bucket)(const std::uint32_t* bucket, std::int64_t n, std::int32_t low_bits,
                       std::int32_t* num_words, std::int32_t* num_keys);

  // Writes the distinct words of a sorted bucket, n > 0, with the gains of equal ones added up in
  // order. Returns their number. Nothing is written from slots.room on.
  // All gains 1:
  std::int64_t (*write_ones)(const std::uint32_t* bucket, std::int64_t n, const Slots& slots);
  // sample_gains[low]:
  std::int64_t (*write_per_sample)(const std::uint32_t* bucket, std::int64_t n, const Slots& slots,
                                   const float* sample_gains);
  // gains_of_words[i]:
  std::int64_t (*write_per_id)(const std::uint32_t* bucket, std::int64_t n, const Slots& slots,
                               const float* gains_of_words);
};

// The sets that this processor can run, the best last.
[[nodiscard]] std::span<const PartitionKernels* const> AvailablePartitionKernels();

}  // namespace trtpu

#endif  // TRTPU_PARTITION_KERNELS_H_
