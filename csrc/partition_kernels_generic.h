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

template <class Id, bool kPowerOfTwo>
inline bool MakeEntries(const Id* ids, const u32* low, std::int64_t n, const KeyMap& map,
                        u64* entries) {
  const u64 num_embeddings = map.num_embeddings, num_cores = map.num_cores, mask = num_cores - 1,
            rotation = map.rotation, reciprocal = map.reciprocal;
  const int core_bits = map.core_bits, partition_shift = 32 + map.row_bits,
            reciprocal_shift = map.reciprocal_shift;
  u64 outside = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    // Widening keeps the sign, so a negative id is far outside.
    const u64 id = static_cast<u64>(static_cast<std::int64_t>(ids[i]));
    outside |= static_cast<u64>(id >= num_embeddings);
    u64 partition, row;
    if constexpr (kPowerOfTwo) {
      partition = (id + rotation) & mask;
      row = id >> core_bits;
    } else {
      row = (static_cast<u64>(static_cast<u32>(id)) * reciprocal) >> reciprocal_shift;
      partition = id - row * num_cores + rotation;
      partition = partition >= num_cores ? partition - num_cores : partition;
    }
    entries[i] = partition << partition_shift | row << 32 | low[i];
  }
  return outside != 0;
}

template <class Id>
bool MakeEntries(const Id* ids, const u32* low, std::int64_t n, const KeyMap& map, u64* entries) {
  return map.power_of_two ? MakeEntries<Id, true>(ids, low, n, map, entries)
                          : MakeEntries<Id, false>(ids, low, n, map, entries);
}

template <int kDigits>
inline void CountDigits(const u64* entries, std::int64_t n, int bits, u32* histogram) {
  const u32 mask = (1u << bits) - 1;
  for (std::int64_t i = 0; i < n; ++i) {
    u32 key = static_cast<u32>(entries[i] >> 32);
    for (int digit = 0; digit < kDigits; ++digit, key >>= bits) {
      ++histogram[(static_cast<u32>(digit) << bits) + (key & mask)];
    }
  }
}

inline void CountDigits(const u64* entries, std::int64_t n, RadixPlan plan, u32* histogram) {
  static_assert(kMaxDigits == 4);
  switch (plan.num_digits) {
    case 1:
      return CountDigits<1>(entries, n, plan.digit_bits, histogram);
    case 2:
      return CountDigits<2>(entries, n, plan.digit_bits, histogram);
    case 3:
      return CountDigits<3>(entries, n, plan.digit_bits, histogram);
    case 4:
      return CountDigits<4>(entries, n, plan.digit_bits, histogram);
    default:
      return;
  }
}

inline void Scatter(const u64* from, std::int64_t n, std::int32_t shift, u32 mask, u32* next,
                    u64* to) {
  std::int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const u64 a = from[i], b = from[i + 1], c = from[i + 2], d = from[i + 3];
    to[next[(a >> shift) & mask]++] = a;
    to[next[(b >> shift) & mask]++] = b;
    to[next[(c >> shift) & mask]++] = c;
    to[next[(d >> shift) & mask]++] = d;
  }
  for (; i < n; ++i) {
    const u64 entry = from[i];
    to[next[(entry >> shift) & mask]++] = entry;
  }
}

inline float FloatOf(u32 bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline void Resolve(u64* entries, std::int64_t n, const u64* occurrences, float* gains) {
  for (std::int64_t i = 0; i < n; ++i) {
    const u64 occurrence = occurrences[static_cast<u32>(entries[i])];
    entries[i] = (entries[i] & 0xffffffff00000000u) | static_cast<u32>(occurrence);
    gains[i] = FloatOf(static_cast<u32>(occurrence >> 32));
  }
}

inline void CountDistinct(const u64* run, std::int64_t n, std::int32_t* num_entries,
                          std::int32_t* num_keys) {
  std::int32_t entries = n > 0, keys = n > 0;
  for (std::int64_t i = 1; i < n; ++i) {
    const u64 change = run[i] ^ run[i - 1];
    entries += change != 0;
    keys += (change >> 32) != 0;
  }
  *num_entries = entries;
  *num_keys = keys;
}

template <class GainOf>
inline void Write(const u64* run, std::int64_t n, u32 row_mask, u32 row_offset,
                  std::int32_t* row_ids, std::int32_t* samples, float* gains, GainOf gain_of) {
  std::int64_t slot = -1;
  float sum = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const bool is_new = i == 0 || run[i] != run[i - 1];
    const float gain = gain_of(i);
    slot += is_new;
    sum = is_new ? gain : sum + gain;
    row_ids[slot] =
        static_cast<std::int32_t>((static_cast<u32>(run[i] >> 32) & row_mask) + row_offset);
    samples[slot] = static_cast<std::int32_t>(static_cast<u32>(run[i]));
    gains[slot] = sum;
  }
}

inline void WriteOnes(const u64* run, std::int64_t n, u32 row_mask, u32 row_offset,
                      std::int64_t /*num_distinct*/, std::int32_t* row_ids, std::int32_t* samples,
                      float* gains) {
  Write(run, n, row_mask, row_offset, row_ids, samples, gains, [](std::int64_t) { return 1.0f; });
}

inline void WritePerSample(const u64* run, std::int64_t n, u32 row_mask, u32 row_offset,
                           std::int64_t /*num_distinct*/, const float* sample_gains,
                           u32 first_sample, std::int32_t* row_ids, std::int32_t* samples,
                           float* gains) {
  Write(run, n, row_mask, row_offset, row_ids, samples, gains,
        [&](std::int64_t i) { return sample_gains[static_cast<u32>(run[i]) - first_sample]; });
}

inline void WritePerId(const u64* run, std::int64_t n, u32 row_mask, u32 row_offset,
                       std::int64_t /*num_distinct*/, const float* run_gains, std::int32_t* row_ids,
                       std::int32_t* samples, float* gains) {
  Write(run, n, row_mask, row_offset, row_ids, samples, gains,
        [&](std::int64_t i) { return run_gains[i]; });
}

}  // namespace generic
}  // namespace
}  // namespace trtpu
