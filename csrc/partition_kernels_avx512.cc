#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the deliberately undefined operands inside its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "partition_kernels_generic.h"

namespace trtpu {
namespace {
namespace avx512 {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

// The first n lanes, any n.
inline __mmask16 FirstLanes(std::int64_t n) {
  const u32 lanes = n >= 16 ? 16 : n <= 0 ? 0 : static_cast<u32>(n);
  return static_cast<__mmask16>((1u << lanes) - 1);
}

inline __m128i Count(int bits) { return _mm_cvtsi32_si128(bits); }

inline __m512i Iota() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// Dwords 0, 2, 4, ... and 1, 3, 5, ... of the pair (a, b).
inline __m512i LowHalves(__m512i a, __m512i b) {
  return _mm512_permutex2var_epi32(a, _mm512_slli_epi32(Iota(), 1), b);
}
inline __m512i HighHalves(__m512i a, __m512i b) {
  const __m512i odd = _mm512_add_epi32(_mm512_slli_epi32(Iota(), 1), _mm512_set1_epi32(1));
  return _mm512_permutex2var_epi32(a, odd, b);
}

// Sixteen ids as dwords; `outside` collects those not below the limit.
inline __m512i LoadIds(const std::int32_t* ids, __mmask16 lanes, u64 limit, __mmask16* outside) {
  const __m512i id = _mm512_maskz_loadu_epi32(lanes, ids);
  // A negative id is above 2^31, where no int32 is valid.
  const u32 last = limit > 0x80000000u ? 0x7fffffffu : static_cast<u32>(limit - 1);
  *outside |=
      _mm512_mask_cmpgt_epu32_mask(lanes, id, _mm512_set1_epi32(static_cast<std::int32_t>(last)));
  return id;
}

inline __m512i LoadIds(const std::int64_t* ids, __mmask16 lanes, u64 limit, __mmask16* outside) {
  const __mmask8 low = static_cast<__mmask8>(lanes), high = static_cast<__mmask8>(lanes >> 8);
  const __m512i a = _mm512_maskz_loadu_epi64(low, ids);
  const __m512i b = _mm512_maskz_loadu_epi64(high, ids + 8);
  const __m512i bound = _mm512_set1_epi64(static_cast<std::int64_t>(limit));
  *outside |= _mm512_mask_cmpge_epu64_mask(low, a, bound);
  *outside |= _mm512_mask_cmpge_epu64_mask(high, b, bound);
  return LowHalves(a, b);
}

// Far enough ahead for memory, near enough to stay in the first-level cache.
constexpr std::int64_t kPrefetchBytes = 2048;

template <class Id, RowMapping kMapping>
inline bool FillKeys(const Id* ids, std::int64_t n, const KeyMap& map, u32* keys) {
  const __m128i part_bits = Count(map.part_bits), row_bits = Count(map.row_bits),
                reciprocal_shift = Count(map.reciprocal_shift);
  const __m512i rotation = _mm512_set1_epi32(static_cast<std::int32_t>(map.rotation));
  const __m512i num_parts = _mm512_set1_epi32(static_cast<std::int32_t>(map.num_parts));
  const __m512i part_mask = _mm512_sub_epi32(num_parts, _mm512_set1_epi32(1));
  const __m512i divisor = _mm512_set1_epi32(static_cast<std::int32_t>(map.divisor));
  const __m512i reciprocal = _mm512_set1_epi64(static_cast<std::int64_t>(map.reciprocal));
  __mmask16 outside = 0;
  for (std::int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = FirstLanes(n - i);
    const char* const ahead = reinterpret_cast<const char*>(ids + i) + kPrefetchBytes;
    _mm_prefetch(ahead, _MM_HINT_T0);
    if constexpr (sizeof(Id) == 8) _mm_prefetch(ahead + 64, _MM_HINT_T0);
    const __m512i id = LoadIds(ids + i, lanes, map.num_embeddings, &outside);
    __m512i part, row;
    if constexpr (kMapping == RowMapping::kModPowerOfTwo) {
      part = _mm512_and_si512(_mm512_add_epi32(id, rotation), part_mask);
      row = _mm512_srl_epi32(id, part_bits);
    } else {
      const __m512i even = _mm512_srl_epi64(_mm512_mul_epu32(id, reciprocal), reciprocal_shift);
      const __m512i odd = _mm512_srl_epi64(_mm512_mul_epu32(_mm512_srli_epi64(id, 32), reciprocal),
                                           reciprocal_shift);
      const __m512i quotient = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
      const __m512i remainder = _mm512_sub_epi32(id, _mm512_mullo_epi32(quotient, divisor));
      constexpr bool kBlocks = kMapping == RowMapping::kBlocks;
      row = kBlocks ? remainder : quotient;
      part = _mm512_add_epi32(kBlocks ? quotient : remainder, rotation);
      part = _mm512_min_epu32(part, _mm512_sub_epi32(part, num_parts));
    }
    const __m512i key = _mm512_or_si512(_mm512_sll_epi32(part, row_bits), row);
    _mm512_mask_storeu_epi32(keys + i, lanes, key);
  }
  return outside != 0;
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
  const bool is_outside = FillKeysBy(ids, n, map, keys);
  generic::CountBuckets(keys, n, plan, histogram);
  return is_outside;
}

void FillBuckets(const u32* keys, const u32* low, std::int64_t n, const SortPlan& plan, u32* next,
                 u32* buckets) {
  const __m128i low_bits = Count(plan.low_bits);
  const __m512i rest_mask =
      _mm512_set1_epi32(static_cast<std::int32_t>(generic::LowMask(plan.rest_bits)));
  alignas(64) u32 words_of_block[kBlock];
  u32* const words = plan.bucket_bits == 0 ? buckets + next[0] : words_of_block;
  for (std::int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = FirstLanes(n - i);
    const __m512i key = _mm512_maskz_loadu_epi32(lanes, keys + i);
    _mm512_mask_storeu_epi32(
        words + i, lanes,
        _mm512_or_si512(_mm512_sll_epi32(_mm512_and_si512(key, rest_mask), low_bits),
                        _mm512_maskz_loadu_epi32(lanes, low + i)));
  }
  if (plan.bucket_bits == 0) {
    next[0] += static_cast<u32>(n);
    return;
  }
  const int rest_bits = plan.rest_bits;
  std::int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const u64 a = keys[i], b = keys[i + 1], c = keys[i + 2], d = keys[i + 3];
    buckets[next[a >> rest_bits]++] = words[i];
    buckets[next[b >> rest_bits]++] = words[i + 1];
    buckets[next[c >> rest_bits]++] = words[i + 2];
    buckets[next[d >> rest_bits]++] = words[i + 3];
  }
  for (; i < n; ++i) buckets[next[u64{keys[i]} >> rest_bits]++] = words[i];
}

// As generic::StartsOf; digits have 16 values or more.
void StartsOf(u32* counts, const u32* other, u32 size) {
  if (size < 16) return generic::StartsOf(counts, other, size);
  const __m512i zero = _mm512_setzero_si512(), last = _mm512_set1_epi32(15);
  __m512i sum = zero;  // in every lane
  for (u32 i = 0; i < size; i += 16) {
    const __m512i count =
        _mm512_add_epi32(_mm512_loadu_si512(counts + i), _mm512_loadu_si512(other + i));
    __m512i up_to = count;
    up_to = _mm512_add_epi32(up_to, _mm512_alignr_epi32(up_to, zero, 15));
    up_to = _mm512_add_epi32(up_to, _mm512_alignr_epi32(up_to, zero, 14));
    up_to = _mm512_add_epi32(up_to, _mm512_alignr_epi32(up_to, zero, 12));
    up_to = _mm512_add_epi32(up_to, _mm512_alignr_epi32(up_to, zero, 8));
    up_to = _mm512_add_epi32(up_to, sum);
    _mm512_storeu_si512(counts + i, _mm512_sub_epi32(up_to, count));
    sum = _mm512_permutexvar_epi32(last, up_to);
  }
}

// Bitonic sorting of 16 * kVectors dwords in registers; compare with `partner`, keep the larger
// where kUpper says so.
template <int kUpper>
inline __m512i Exchange(__m512i v, __m512i partner) {
  return _mm512_mask_max_epu32(_mm512_min_epu32(v, partner), static_cast<__mmask16>(kUpper), v,
                               partner);
}

inline __m512i Reverse(__m512i v) {
  return _mm512_permutexvar_epi32(_mm512_sub_epi32(_mm512_set1_epi32(15), Iota()), v);
}
inline __m512i ReverseEights(__m512i v) {
  return _mm512_permutexvar_epi32(_mm512_xor_si512(_mm512_set1_epi32(7), Iota()), v);
}

inline __m512i MergeFours(__m512i v) {
  v = Exchange<0xcccc>(v, _mm512_shuffle_epi32(v, _MM_PERM_BADC));
  return Exchange<0xaaaa>(v, _mm512_shuffle_epi32(v, _MM_PERM_CDAB));
}
inline __m512i MergeEights(__m512i v) {
  return MergeFours(Exchange<0xf0f0>(v, _mm512_shuffle_i32x4(v, v, 0xb1)));
}
inline __m512i MergeSixteen(__m512i v) {
  return MergeEights(Exchange<0xff00>(v, _mm512_shuffle_i32x4(v, v, 0x4e)));
}

inline __m512i SortLanes(__m512i v) {
  v = Exchange<0xaaaa>(v, _mm512_shuffle_epi32(v, _MM_PERM_CDAB));
  v = Exchange<0xcccc>(v, _mm512_shuffle_epi32(v, _MM_PERM_ABCD));
  v = Exchange<0xaaaa>(v, _mm512_shuffle_epi32(v, _MM_PERM_CDAB));
  v = MergeFours(Exchange<0xf0f0>(v, ReverseEights(v)));
  return MergeEights(Exchange<0xff00>(v, Reverse(v)));
}

// Sorts v[0, kSize), of which both halves are sorted.
template <int kSize>
inline void Merge(__m512i* v) {
  __m512i larger[kSize / 2];
#pragma GCC unroll 16
  for (int i = 0; i < kSize / 2; ++i) {
    const __m512i a = v[i], b = Reverse(v[kSize - 1 - i]);
    v[i] = _mm512_min_epu32(a, b);
    larger[i] = _mm512_max_epu32(a, b);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kSize / 2; ++i) v[kSize / 2 + i] = larger[i];
#pragma GCC unroll 4
  for (int distance = kSize / 4; distance > 0; distance /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kSize; ++i) {
      if ((i & distance) != 0) continue;
      const __m512i a = v[i], b = v[i + distance];
      v[i] = _mm512_min_epu32(a, b);
      v[i + distance] = _mm512_max_epu32(a, b);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kSize; ++i) v[i] = MergeSixteen(v[i]);
}

template <int kVectors>
inline void SortVectors(u32* data, std::int64_t n) {
  __m512i v[kVectors];
  const __m512i largest = _mm512_set1_epi32(-1);
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    v[i] = SortLanes(_mm512_mask_loadu_epi32(largest, FirstLanes(n - 16 * i), data + 16 * i));
  }
  if constexpr (kVectors >= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i += 2) Merge<2>(v + i);
  }
  if constexpr (kVectors >= 4) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i += 4) Merge<4>(v + i);
  }
  if constexpr (kVectors >= 8) {
#pragma GCC unroll 2
    for (int i = 0; i < kVectors; i += 8) Merge<8>(v + i);
  }
  if constexpr (kVectors >= 16) Merge<16>(v);
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    _mm512_mask_storeu_epi32(data + 16 * i, FirstLanes(n - 16 * i), v[i]);
  }
}

constexpr std::int64_t kNetworkSize = 256;

void SortSmall(u32* data, std::int64_t n) {
  if (n <= 16) return SortVectors<1>(data, n);
  if (n <= 32) return SortVectors<2>(data, n);
  if (n <= 64) return SortVectors<4>(data, n);
  if (n <= 128) return SortVectors<8>(data, n);
  SortVectors<16>(data, n);
}

// Quicksort by whole words: rest, then low, which has risen from the start. What equals the pivot
// in rest is in order already, so that the rows everybody asks for cost one pass. `other` has room
// for n. After too many bad pivots the radix sort takes over.
void QuickSort(u32* data, std::int64_t n, const SortPlan& plan, u32* histogram, u32* other,
               int depth) {
  while (n > kNetworkSize) {
    if (depth-- == 0) {
      return generic::SortBucket<StartsOf>(data, n, plan, histogram, other);
    }
    const u32 a = data[n / 4], b = data[n / 2], c = data[n / 4 * 3];
    const u32 low_ab = a < b ? a : b, high_ab = a < b ? b : a;
    const u32 pivot = c < low_ab ? low_ab : c > high_ab ? high_ab : c;
    const u32 low_mask = generic::LowMask(plan.low_bits);
    const __m512i first = _mm512_set1_epi32(static_cast<std::int32_t>(pivot & ~low_mask));
    const __m512i last = _mm512_set1_epi32(static_cast<std::int32_t>(pivot | low_mask));
    // All three parts keep their order. Less stays in data, behind what was read.
    u32* const greater_part = other + n + 16;
    std::int64_t num_less = 0, num_equal = 0, num_greater = 0;
    for (std::int64_t i = 0; i < n; i += 16) {
      const __mmask16 lanes = FirstLanes(n - i);
      const __m512i v = _mm512_maskz_loadu_epi32(lanes, data + i);
      const __mmask16 less = _mm512_mask_cmplt_epu32_mask(lanes, v, first);
      const __mmask16 greater = _mm512_mask_cmpgt_epu32_mask(lanes, v, last);
      const __mmask16 equal = static_cast<__mmask16>(lanes & ~(less | greater));
      _mm512_mask_storeu_epi32(data + num_less, lanes, _mm512_maskz_compress_epi32(less, v));
      _mm512_storeu_si512(other + num_equal, _mm512_maskz_compress_epi32(equal, v));
      _mm512_storeu_si512(greater_part + num_greater, _mm512_maskz_compress_epi32(greater, v));
      num_less += __builtin_popcount(less);
      num_equal += __builtin_popcount(equal);
      num_greater += __builtin_popcount(greater);
    }
    std::memcpy(data + num_less, other, sizeof(u32) * static_cast<u64>(num_equal));
    u32* const above = data + num_less + num_equal;
    std::memcpy(above, greater_part, sizeof(u32) * static_cast<u64>(num_greater));
    // The smaller side by recursion: the stack stays shallow.
    if (num_less < num_greater) {
      QuickSort(data, num_less, plan, histogram, other, depth);
      data = above;
      n = num_greater;
    } else {
      QuickSort(above, num_greater, plan, histogram, other, depth);
      n = num_less;
    }
  }
  if (n > 1) SortSmall(data, n);
}

void SortBucket(u32* bucket, std::int64_t n, const SortPlan& plan, u32* histogram, u32* other) {
  QuickSort(bucket, n, plan, histogram, other, 24);
}

void ResolveBucket(u32* bucket, std::int64_t n, std::int32_t low_bits, const u64* occurrences,
                   float* gains) {
  const __m512i low_mask = _mm512_set1_epi32(static_cast<std::int32_t>(generic::LowMask(low_bits)));
  const __m512i zero = _mm512_setzero_si512();
  for (std::int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = FirstLanes(n - i);
    const __m512i word = _mm512_maskz_loadu_epi32(lanes, bucket + i);
    const __m512i index = _mm512_and_si512(word, low_mask);
    const __m512i a = _mm512_mask_i32gather_epi64(zero, static_cast<__mmask8>(lanes),
                                                  _mm512_castsi512_si256(index), occurrences, 8);
    const __m512i b =
        _mm512_mask_i32gather_epi64(zero, static_cast<__mmask8>(lanes >> 8),
                                    _mm512_extracti64x4_epi64(index, 1), occurrences, 8);
    _mm512_mask_storeu_epi32(bucket + i, lanes,
                             _mm512_or_si512(_mm512_andnot_si512(low_mask, word), LowHalves(a, b)));
    _mm512_mask_storeu_epi32(gains + i, lanes, HighHalves(a, b));
  }
}

// Sixteen words from bucket[0] on, the words before them, and which of them differ.
struct Words {
  __m512i word, before;
  __mmask16 is_new;

  // `last`: sixteen words, of which the last is the one before bucket[0]; it moves on.
  Words(const u32* bucket, __mmask16 lanes, __m512i* last)
      : word(_mm512_maskz_loadu_epi32(lanes, bucket)),
        before(_mm512_alignr_epi32(word, *last, 15)),
        is_new(_mm512_mask_cmpneq_epu32_mask(lanes, word, before)) {
    *last = word;
  }
};

// What stands before the first word: all bits of the key differ.
inline __m512i BeforeFirst(const u32* bucket) {
  return _mm512_set1_epi32(static_cast<std::int32_t>(~bucket[0]));
}

void CountBucket(const u32* bucket, std::int64_t n, std::int32_t low_bits, std::int32_t* num_words,
                 std::int32_t* num_keys) {
  const __m512i key_bits =
      _mm512_set1_epi32(static_cast<std::int32_t>(~generic::LowMask(low_bits)));
  __m512i last = BeforeFirst(bucket);
  std::int32_t words = 0, keys = 0;
  for (std::int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = FirstLanes(n - i);
    const Words w(bucket + i, lanes, &last);
    words += __builtin_popcount(w.is_new);
    keys += __builtin_popcount(
        _mm512_mask_test_epi32_mask(lanes, _mm512_xor_si512(w.word, w.before), key_bits));
  }
  *num_words += words;
  *num_keys += keys;
}

constexpr std::int64_t kSlotsAhead = 256;

// Writes rows and samples; calls body(i, lanes, is_new, low of every lane, slot of the first new
// word, lanes to store there). Returns the number of new words.
template <class Body>
inline std::int64_t WriteRows(const u32* bucket, std::int64_t n, const Slots& slots, Body body) {
  const __m512i low_mask =
      _mm512_set1_epi32(static_cast<std::int32_t>(generic::LowMask(slots.low_bits)));
  const __m512i first_row = _mm512_set1_epi32(static_cast<std::int32_t>(slots.first_row));
  const __m512i first_sample = _mm512_set1_epi32(static_cast<std::int32_t>(slots.first_sample));
  const __m128i low_bits = Count(slots.low_bits);
  __m512i last = BeforeFirst(bucket);
  std::int64_t slot = 0;
  for (std::int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = FirstLanes(n - i);
    __builtin_prefetch(slots.row_ids + slot + kSlotsAhead, 1);
    __builtin_prefetch(slots.samples + slot + kSlotsAhead, 1);
    __builtin_prefetch(slots.gains + slot + kSlotsAhead, 1);
    __builtin_prefetch(bucket + i + kSlotsAhead);
    const Words w(bucket + i, lanes, &last);
    const int count = __builtin_popcount(w.is_new);
    const __m512i low = _mm512_and_si512(w.word, low_mask);
    const __m512i row = _mm512_add_epi32(_mm512_srl_epi32(w.word, low_bits), first_row);
    const __m512i sample = _mm512_add_epi32(low, first_sample);
    // Whole vectors while there is room: what is too much is overwritten by the next.
    const __mmask16 store = FirstLanes(slot + 16 <= slots.room ? 16 : count);
    _mm512_mask_storeu_epi32(slots.row_ids + slot, store,
                             _mm512_maskz_compress_epi32(w.is_new, row));
    _mm512_mask_storeu_epi32(slots.samples + slot, store,
                             _mm512_maskz_compress_epi32(w.is_new, sample));
    body(i, lanes, w.is_new, low, slot, store);
    slot += count;
  }
  return slot;
}

std::int64_t WriteOnes(const u32* bucket, std::int64_t n, const Slots& slots) {
  // First where each word starts in the bucket; then the distances are the gains.
  const std::int64_t num_words =
      WriteRows(bucket, n, slots,
                [&](std::int64_t i, __mmask16, __mmask16 is_new, __m512i, std::int64_t slot,
                    __mmask16 store) {
                  const __m512i at =
                      _mm512_add_epi32(Iota(), _mm512_set1_epi32(static_cast<std::int32_t>(i)));
                  _mm512_mask_storeu_epi32(slots.gains + slot, store,
                                           _mm512_maskz_compress_epi32(is_new, at));
                });
  // Adding 1 to a float32 changes nothing from 2^24 on.
  const __m512i most = _mm512_set1_epi32(1 << 24);
  const __m512i end = _mm512_set1_epi32(static_cast<std::int32_t>(n));
  for (std::int64_t slot = 0; slot < num_words; slot += 16) {
    const __mmask16 lanes = FirstLanes(num_words - slot);
    const __m512i start = _mm512_maskz_loadu_epi32(lanes, slots.gains + slot);
    const __m512i next =
        _mm512_mask_loadu_epi32(end, FirstLanes(num_words - slot - 1), slots.gains + slot + 1);
    const __m512i count = _mm512_min_epi32(_mm512_sub_epi32(next, start), most);
    _mm512_mask_storeu_ps(slots.gains + slot, lanes, _mm512_cvtepi32_ps(count));
  }
  return num_words;
}

// Stores the gains of new entries, then adds those of repeated ones in order.
inline void StoreGains(__m512 gain, __mmask16 lanes, __mmask16 is_new, std::int64_t slot,
                       __mmask16 store, float* gains) {
  _mm512_mask_storeu_ps(gains + slot, store, _mm512_maskz_compress_ps(is_new, gain));
  u32 repeated = static_cast<u32>(lanes & ~is_new);
  if (repeated == 0) return;
  alignas(64) float gain_of[16];
  _mm512_store_ps(gain_of, gain);
  for (; repeated != 0; repeated &= repeated - 1) {
    const int lane = __builtin_ctz(repeated);
    // The new entries up to this lane; none of them: the entry began in an earlier vector.
    const int up_to = __builtin_popcount(static_cast<u32>(is_new) & ((1u << lane) - 1));
    gains[slot + up_to - 1] += gain_of[lane];
  }
}

std::int64_t WritePerSample(const u32* bucket, std::int64_t n, const Slots& slots,
                            const float* sample_gains) {
  return WriteRows(bucket, n, slots,
                   [&](std::int64_t, __mmask16 lanes, __mmask16 is_new, __m512i low,
                       std::int64_t slot, __mmask16 store) {
                     const __m512 gain =
                         _mm512_mask_i32gather_ps(_mm512_setzero_ps(), lanes, low, sample_gains, 4);
                     StoreGains(gain, lanes, is_new, slot, store, slots.gains);
                   });
}

std::int64_t WritePerId(const u32* bucket, std::int64_t n, const Slots& slots,
                        const float* gains_of_words) {
  return WriteRows(bucket, n, slots,
                   [&](std::int64_t i, __mmask16 lanes, __mmask16 is_new, __m512i,
                       std::int64_t slot, __mmask16 store) {
                     StoreGains(_mm512_maskz_loadu_ps(lanes, gains_of_words + i), lanes, is_new,
                                slot, store, slots.gains);
                   });
}

}  // namespace avx512
}  // namespace

extern const PartitionKernels kPartitionKernelsAvx512;
const PartitionKernels kPartitionKernelsAvx512 = {
    .name = "avx512",
    .make_keys_i32 = avx512::MakeKeys<std::int32_t>,
    .make_keys_i64 = avx512::MakeKeys<std::int64_t>,
    .fill_buckets = avx512::FillBuckets,
    .sort_bucket = avx512::SortBucket,
    .bucket_size = 192,
    .resolve_bucket = avx512::ResolveBucket,
    .count_bucket = avx512::CountBucket,
    .write_ones = avx512::WriteOnes,
    .write_per_sample = avx512::WritePerSample,
    .write_per_id = avx512::WritePerId,
};

}  // namespace trtpu

#endif
