// The kernels in plain C++. Included by one file per instruction set, so that each gets its own
// copy; hence the anonymous namespace and no standard library templates.
#include <cstdint>
#include <cstring>

#include "trtpu/partition_kernels.h"

namespace trtpu {
namespace {
namespace generic {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

template <class Id, RowMapping kMapping>
inline bool FillKeys(const Id* ids, std::int64_t n, const KeyMap& map, u32* keys) {
  const u64 num_embeddings = map.num_embeddings, rotation = map.rotation;
  const u32 num_parts = static_cast<u32>(map.num_parts), mask = num_parts - 1;
  const u32 divisor = static_cast<u32>(map.divisor);
  const u64 reciprocal = map.reciprocal;
  const int part_bits = map.part_bits, row_bits = map.row_bits,
            reciprocal_shift = map.reciprocal_shift;
  u64 outside = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    // Widening keeps the sign, so a negative id is far outside.
    const u64 id = static_cast<u64>(static_cast<std::int64_t>(ids[i]));
    outside |= static_cast<u64>(id >= num_embeddings);
    u32 part, row;
    if constexpr (kMapping == RowMapping::kModPowerOfTwo) {
      part = static_cast<u32>(id + rotation) & mask;
      row = static_cast<u32>(id >> part_bits);
    } else {
      const u32 quotient = static_cast<u32>((static_cast<u64>(static_cast<u32>(id)) * reciprocal) >>
                                            reciprocal_shift);
      const u32 remainder = static_cast<u32>(id) - quotient * divisor;
      constexpr bool kBlocks = kMapping == RowMapping::kBlocks;
      row = kBlocks ? remainder : quotient;
      part = (kBlocks ? quotient : remainder) + static_cast<u32>(rotation);
      part = part >= num_parts ? part - num_parts : part;
    }
    // In 64 bits: row_bits may be 32.
    keys[i] = static_cast<u32>(u64{part} << row_bits) | row;
  }
  return outside != 0;
}

inline void CountBuckets(const u32* keys, std::int64_t n, const SortPlan& plan, u32* histogram) {
  // Two copies: a popular bucket would make each increment wait for the one before.
  const u32 mask = (1u << plan.bucket_bits) - 1;  // invalid ids have any key
  const int shift = plan.rest_bits;
  u32* const other = histogram + mask + 1;
  std::int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    ++histogram[(u64{keys[i]} >> shift) & mask];
    ++other[(u64{keys[i + 1]} >> shift) & mask];
    ++histogram[(u64{keys[i + 2]} >> shift) & mask];
    ++other[(u64{keys[i + 3]} >> shift) & mask];
  }
  for (; i < n; ++i) ++histogram[(u64{keys[i]} >> shift) & mask];
}

template <class Id>
inline bool FillKeysBy(const Id* ids, std::int64_t n, const KeyMap& map, u32* keys) {
  switch (map.mapping) {
    case RowMapping::kModPowerOfTwo:
      return FillKeys<Id, RowMapping::kModPowerOfTwo>(ids, n, map, keys);
    case RowMapping::kMod:
      return FillKeys<Id, RowMapping::kMod>(ids, n, map, keys);
    default:
      return FillKeys<Id, RowMapping::kBlocks>(ids, n, map, keys);
  }
}

template <class Id>
bool MakeKeys(const Id* ids, std::int64_t n, const KeyMap& map, const SortPlan& plan, u32* keys,
              u32* histogram) {
  const bool outside = FillKeysBy(ids, n, map, keys);
  CountBuckets(keys, n, plan, histogram);
  return outside;
}

inline u32 LowMask(int bits) { return static_cast<u32>((u64{1} << bits) - 1); }

inline void FillBuckets(const u32* keys, const u32* low, std::int64_t n, const SortPlan& plan,
                        u32* next, u32* buckets) {
  const u32 rest_mask = LowMask(plan.rest_bits);
  const int rest_bits = plan.rest_bits, low_bits = plan.low_bits;
  if (plan.bucket_bits == 0) {
    u32* const out = buckets + next[0];
    for (std::int64_t i = 0; i < n; ++i) {
      out[i] = static_cast<u32>(u64{keys[i]} << low_bits) | low[i];
    }
    next[0] += static_cast<u32>(n);
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    const u32 key = keys[i];
    buckets[next[u64{key} >> rest_bits]++] =
        static_cast<u32>(u64{key & rest_mask} << low_bits) | low[i];
  }
}

// Turns two copies of counts into starts, in the first copy.
inline void StartsOf(u32* counts, const u32* other, u32 size) {
  u32 sum = 0;
  for (u32 i = 0; i < size; ++i) {
    const u32 count = counts[i] + other[i];
    counts[i] = sum;
    sum += count;
  }
}

template <int kDigits>
inline void CountDigits(const u32* bucket, std::int64_t n, int first_bit, int bits, u32* counts) {
  const u32 mask = LowMask(bits);
  const u32 size = mask + 1;
  const auto count = [&](u32 value, u32* to) {
    u64 rest = u64{value} >> first_bit;
    for (int digit = 0; digit < kDigits; ++digit, rest >>= bits) {
      ++to[static_cast<u32>(2 * digit) * size + (rest & mask)];
    }
  };
  std::int64_t i = 0;
  for (; i + 2 <= n; i += 2) {
    count(bucket[i], counts);
    count(bucket[i + 1], counts + size);
  }
  if (i < n) count(bucket[i], counts);
}

inline void Scatter(const u32* from, std::int64_t n, int shift, u32 mask, u32* next, u32* to) {
  std::int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const u32 a = from[i], b = from[i + 1], c = from[i + 2], d = from[i + 3];
    to[next[(a >> shift) & mask]++] = a;
    to[next[(b >> shift) & mask]++] = b;
    to[next[(c >> shift) & mask]++] = c;
    to[next[(d >> shift) & mask]++] = d;
  }
  for (; i < n; ++i) {
    const u32 value = from[i];
    to[next[(value >> shift) & mask]++] = value;
  }
}

// Two copies of a bucket this large fit the first-level cache.
constexpr std::int64_t kBucketSize = 2048;

template <void (*kStartsOf)(u32*, const u32*, u32)>
inline void SortBucket(u32* bucket, std::int64_t n, const SortPlan& plan, u32* histogram,
                       u32* other) {
  if (n <= 24) {  // by rest and low together: low rises in input order
    for (std::int64_t i = 1; i < n; ++i) {
      const u32 value = bucket[i];
      std::int64_t k = i;
      for (; k > 0 && bucket[k - 1] > value; --k) bucket[k] = bucket[k - 1];
      bucket[k] = value;
    }
    return;
  }
  static_assert(kMaxDigits == 4);
  const int bits = plan.digit_bits;
  const u32 size = 1u << bits;
  std::memset(histogram, 0, sizeof(u32) * 2 * size * static_cast<u32>(plan.num_digits));
  switch (plan.num_digits) {
    case 1:
      CountDigits<1>(bucket, n, plan.low_bits, bits, histogram);
      break;
    case 2:
      CountDigits<2>(bucket, n, plan.low_bits, bits, histogram);
      break;
    case 3:
      CountDigits<3>(bucket, n, plan.low_bits, bits, histogram);
      break;
    default:
      CountDigits<4>(bucket, n, plan.low_bits, bits, histogram);
  }
  u32* from = bucket;
  for (int digit = 0; digit < plan.num_digits; ++digit) {
    u32* const counts = histogram + static_cast<u32>(2 * digit) * size;
    const int shift = plan.low_bits + digit * bits;
    const u32 first = (from[0] >> shift) & (size - 1);
    if (counts[first] + counts[size + first] == static_cast<u32>(n)) continue;  // all the same
    kStartsOf(counts, counts + size, size);
    Scatter(from, n, shift, size - 1, counts, other);
    u32* const sorted = other;
    other = from;
    from = sorted;
  }
  if (from != bucket) std::memcpy(bucket, from, sizeof(u32) * static_cast<u64>(n));
}

inline float FloatOf(u32 bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline void ResolveBucket(u32* bucket, std::int64_t n, std::int32_t low_bits,
                          const u64* occurrences, float* gains) {
  const u32 low_mask = LowMask(low_bits);
  for (std::int64_t i = 0; i < n; ++i) {
    const u64 occurrence = occurrences[bucket[i] & low_mask];
    bucket[i] = (bucket[i] & ~low_mask) | static_cast<u32>(occurrence);
    gains[i] = FloatOf(static_cast<u32>(occurrence >> 32));
  }
}

inline void CountBucket(const u32* bucket, std::int64_t n, std::int32_t low_bits,
                        std::int32_t* num_words, std::int32_t* num_keys) {
  std::int32_t words = 1, keys = 1;
  for (std::int64_t i = 1; i < n; ++i) {
    const u32 change = bucket[i] ^ bucket[i - 1];
    words += change != 0;
    keys += (change >> low_bits) != 0;
  }
  *num_words += words;
  *num_keys += keys;
}

template <class GainOf>
inline std::int64_t Write(const u32* bucket, std::int64_t n, const Slots& slots, GainOf gain_of) {
  const u32 low_mask = LowMask(slots.low_bits);
  std::int64_t slot = -1;
  u32 before = ~bucket[0];
  float sum = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const u32 word = bucket[i], low = word & low_mask;
    const bool is_new = word != before;
    const float gain = gain_of(i, low);
    before = word;
    slot += is_new;
    sum = is_new ? gain : sum + gain;
    slots.row_ids[slot] = static_cast<std::int32_t>((word >> slots.low_bits) + slots.first_row);
    slots.samples[slot] = static_cast<std::int32_t>(low + slots.first_sample);
    slots.gains[slot] = sum;
  }
  return slot + 1;
}

inline std::int64_t WriteOnes(const u32* bucket, std::int64_t n, const Slots& slots) {
  return Write(bucket, n, slots, [](std::int64_t, u32) { return 1.0f; });
}

inline std::int64_t WritePerSample(const u32* bucket, std::int64_t n, const Slots& slots,
                                   const float* sample_gains) {
  return Write(bucket, n, slots, [=](std::int64_t, u32 low) { return sample_gains[low]; });
}

inline std::int64_t WritePerId(const u32* bucket, std::int64_t n, const Slots& slots,
                               const float* gains_of_words) {
  return Write(bucket, n, slots, [=](std::int64_t i, u32) { return gains_of_words[i]; });
}

}  // namespace generic
}  // namespace
}  // namespace trtpu
