// Sixteen float lanes with one meaning on every machine: one AVX-512 register, two of AVX2, four of
// SSE2 or NEON, or a plain array. No operation fuses or reorders, so all of them give the same
// bits.
//
// Everything lives in an unnamed namespace of the including file's instruction set: nothing
// compiled here for wide vectors can be picked by the linker for code that runs everywhere.
#ifndef TRTPU_SIMD_H_
#define TRTPU_SIMD_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#include "row_kernels.h"

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace trtpu {
namespace {

#if defined(__AVX512F__)

struct Register {
  using Raw = __m512;
  static constexpr int kLanes = 16;
  static Raw Broadcast(float x) { return _mm512_set1_ps(x); }
  static Raw Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, Raw a) { _mm512_storeu_ps(p, a); }
  static void Stream(float* p, Raw a) { _mm512_stream_ps(p, a); }
  static Raw Add(Raw a, Raw b) { return _mm512_add_ps(a, b); }
  static Raw Sub(Raw a, Raw b) { return _mm512_sub_ps(a, b); }
  static Raw Mul(Raw a, Raw b) { return _mm512_mul_ps(a, b); }
  static Raw Div(Raw a, Raw b) { return _mm512_div_ps(a, b); }
  // With a full mask, which costs nothing: GCC 12 warns inside its header for the maskless forms.
  static Raw Sqrt(Raw a) { return _mm512_maskz_sqrt_ps(0xFFFF, a); }
  static Raw Max(Raw a, Raw b) { return _mm512_maskz_max_ps(0xFFFF, a, b); }
  static Raw Min(Raw a, Raw b) { return _mm512_maskz_min_ps(0xFFFF, a, b); }
  static Raw WhereEqual(Raw a, Raw b, Raw then, Raw otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), otherwise, then);
  }
};

#elif defined(__AVX2__)

struct Register {
  using Raw = __m256;
  static constexpr int kLanes = 8;
  static Raw Broadcast(float x) { return _mm256_set1_ps(x); }
  static Raw Load(const float* p) { return _mm256_loadu_ps(p); }
  static void Store(float* p, Raw a) { _mm256_storeu_ps(p, a); }
  static void Stream(float* p, Raw a) { _mm256_stream_ps(p, a); }
  static Raw Add(Raw a, Raw b) { return _mm256_add_ps(a, b); }
  static Raw Sub(Raw a, Raw b) { return _mm256_sub_ps(a, b); }
  static Raw Mul(Raw a, Raw b) { return _mm256_mul_ps(a, b); }
  static Raw Div(Raw a, Raw b) { return _mm256_div_ps(a, b); }
  static Raw Sqrt(Raw a) { return _mm256_sqrt_ps(a); }
  static Raw Max(Raw a, Raw b) { return _mm256_max_ps(a, b); }
  static Raw Min(Raw a, Raw b) { return _mm256_min_ps(a, b); }
  static Raw WhereEqual(Raw a, Raw b, Raw then, Raw otherwise) {
    return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, b, _CMP_EQ_OQ));
  }
};

#elif defined(__SSE2__)

struct Register {
  using Raw = __m128;
  static constexpr int kLanes = 4;
  static Raw Broadcast(float x) { return _mm_set1_ps(x); }
  static Raw Load(const float* p) { return _mm_loadu_ps(p); }
  static void Store(float* p, Raw a) { _mm_storeu_ps(p, a); }
  static void Stream(float* p, Raw a) { _mm_stream_ps(p, a); }
  static Raw Add(Raw a, Raw b) { return _mm_add_ps(a, b); }
  static Raw Sub(Raw a, Raw b) { return _mm_sub_ps(a, b); }
  static Raw Mul(Raw a, Raw b) { return _mm_mul_ps(a, b); }
  static Raw Div(Raw a, Raw b) { return _mm_div_ps(a, b); }
  static Raw Sqrt(Raw a) { return _mm_sqrt_ps(a); }
  static Raw Max(Raw a, Raw b) { return _mm_max_ps(a, b); }
  static Raw Min(Raw a, Raw b) { return _mm_min_ps(a, b); }
  static Raw WhereEqual(Raw a, Raw b, Raw then, Raw otherwise) {
    const Raw is_equal = _mm_cmpeq_ps(a, b);
    return _mm_or_ps(_mm_and_ps(is_equal, then), _mm_andnot_ps(is_equal, otherwise));
  }
};

#elif defined(__ARM_NEON) && defined(__aarch64__)

struct Register {
  using Raw = float32x4_t;
  static constexpr int kLanes = 4;
  static Raw Broadcast(float x) { return vdupq_n_f32(x); }
  static Raw Load(const float* p) { return vld1q_f32(p); }
  static void Store(float* p, Raw a) { vst1q_f32(p, a); }
  static void Stream(float* p, Raw a) { vst1q_f32(p, a); }
  static Raw Add(Raw a, Raw b) { return vaddq_f32(a, b); }
  static Raw Sub(Raw a, Raw b) { return vsubq_f32(a, b); }
  static Raw Mul(Raw a, Raw b) { return vmulq_f32(a, b); }
  static Raw Div(Raw a, Raw b) { return vdivq_f32(a, b); }
  static Raw Sqrt(Raw a) { return vsqrtq_f32(a); }
  static Raw Max(Raw a, Raw b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  static Raw Min(Raw a, Raw b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
  static Raw WhereEqual(Raw a, Raw b, Raw then, Raw otherwise) {
    return vbslq_f32(vceqq_f32(a, b), then, otherwise);
  }
};

#else

struct Register {
  using Raw = float;
  static constexpr int kLanes = 1;
  static Raw Broadcast(float x) { return x; }
  static Raw Load(const float* p) { return *p; }
  static void Store(float* p, Raw a) { *p = a; }
  static void Stream(float* p, Raw a) { *p = a; }
  static Raw Add(Raw a, Raw b) { return a + b; }
  static Raw Sub(Raw a, Raw b) { return a - b; }
  static Raw Mul(Raw a, Raw b) { return a * b; }
  static Raw Div(Raw a, Raw b) { return a / b; }
  static Raw Sqrt(Raw a) { return __builtin_sqrtf(a); }
  static Raw Max(Raw a, Raw b) { return a > b ? a : b; }
  static Raw Min(Raw a, Raw b) { return a < b ? a : b; }
  static Raw WhereEqual(Raw a, Raw b, Raw then, Raw otherwise) { return a == b ? then : otherwise; }
};

#endif

// The bits of float16 and float32 numbers from each other, as the F16C instructions convert: to the
// nearest, ties to even, with subnormals; a NaN keeps its sign and its leading bits and is quiet.
inline std::uint32_t FloatBits(Half half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half.bits & 0x8000u) << 16;
  const std::uint32_t rest = half.bits & 0x7FFFu;
  std::uint32_t bits;
  if (rest >= 0x7C00u) {  // infinity or NaN
    bits = 0x7F800000u | (rest & 0x3FFu) << 13 | (rest > 0x7C00u ? 0x400000u : 0u);
  } else if (rest >= 0x400u) {
    bits = (rest << 13) + ((127u - 15u) << 23);
  } else {  // a multiple of 2^-24, exact in float32
    const float value = static_cast<float>(rest) * 0x1p-24f;
    std::memcpy(&bits, &value, sizeof(bits));
  }
  return sign | bits;
}
inline Half HalfOf(std::uint32_t bits) {
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  const std::uint32_t rest = bits & 0x7FFFFFFFu;
  std::uint32_t half;
  if (rest > 0x7F800000u) {
    half = 0x7E00u | (rest >> 13 & 0x3FFu);
  } else if (rest >= 0x477FF000u) {  // 65520 and above are nearer to 2^16 than to 65504
    half = 0x7C00u;
  } else if (rest >= 0x38800000u) {
    half = (rest - ((127u - 15u) << 23) + 0xFFFu + (rest >> 13 & 1u)) >> 13;
  } else {  // below 2^-14: the sum rounds to multiples of 2^-24, and its last bits count them
    float value;
    std::memcpy(&value, &rest, sizeof(value));
    value += 0.5f;
    std::memcpy(&half, &value, sizeof(half));
    half -= 0x3F000000u;
  }
  return {static_cast<std::uint16_t>(sign | half)};
}

struct Vec {
  static constexpr int kLanes = 16;
  static constexpr int kRegisters = kLanes / Register::kLanes;

  Vec() = default;
  Vec(float x) {  // NOLINT: a constant in a formula means all lanes
    for (auto& r : raw) r = Register::Broadcast(x);
  }

  static Vec Load(const float* p) {
    Vec v;
    for (int i = 0; i < kRegisters; ++i) v.raw[i] = Register::Load(p + i * Register::kLanes);
    return v;
  }
  // The first n lanes from memory, zeros in the others; reads nothing past p[n - 1].
  static Vec LoadN(const float* p, int n) {
#if defined(__AVX512F__)
    Vec v;
    v.raw[0] = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
    return v;
#else
    alignas(64) float lanes[kLanes] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return Load(lanes);
#endif
  }
  static Vec Load(const Half* p) {
#if defined(__AVX512F__)
    Vec v;
    v.raw[0] =
        _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return v;
#elif defined(__F16C__)
    Vec v;
    for (int i = 0; i < kRegisters; ++i)
      v.raw[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i));
    return v;
#else
    return LoadN(p, kLanes);
#endif
  }
  static Vec LoadN(const Half* p, int n) {
#if defined(__AVX512F__)
    Vec v;
    v.raw[0] = _mm512_maskz_cvtph_ps(
        0xFFFF, _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p));
    return v;
#elif defined(__F16C__)
    alignas(16) Half lanes[kLanes] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return Load(lanes);
#else
    alignas(64) std::uint32_t bits[kLanes] = {};
    for (int i = 0; i < n; ++i) bits[i] = FloatBits(p[i]);
    alignas(64) float lanes[kLanes];
    std::memcpy(lanes, bits, sizeof(lanes));
    return Load(lanes);
#endif
  }
  void Store(float* p) const {
    for (int i = 0; i < kRegisters; ++i) Register::Store(p + i * Register::kLanes, raw[i]);
  }
  void StoreN(float* p, int n) const {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), raw[0]);
#else
    alignas(64) float lanes[kLanes];
    Store(lanes);
    for (int i = 0; i < n; ++i) p[i] = lanes[i];
#endif
  }
  void Store(Half* p) const {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_maskz_cvtps_ph(0xFFFF, raw[0], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    for (int i = 0; i < kRegisters; ++i)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p) + i,
                       _mm256_cvtps_ph(raw[i], _MM_FROUND_TO_NEAREST_INT));
#else
    StoreN(p, kLanes);
#endif
  }
  void StoreN(Half* p, int n) const {
#if defined(__AVX512F__)
    _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1),
                             _mm512_maskz_cvtps_ph(0xFFFF, raw[0], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    alignas(16) Half lanes[kLanes];
    Store(lanes);
    for (int i = 0; i < n; ++i) p[i] = lanes[i];
#else
    alignas(64) float lanes[kLanes];
    Store(lanes);
    std::uint32_t bits[kLanes];
    std::memcpy(bits, lanes, sizeof(bits));
    for (int i = 0; i < n; ++i) p[i] = HalfOf(bits[i]);
#endif
  }
  // Past the caches; p is a multiple of 64 bytes. Follow the last one with StreamFence.
  void Stream(float* p) const {
    for (int i = 0; i < kRegisters; ++i) Register::Stream(p + i * Register::kLanes, raw[i]);
  }

  Register::Raw raw[kRegisters];
};

#define TRTPU_VEC_BINARY(name, Operation)                                                         \
  inline Vec name(Vec a, Vec b) {                                                                 \
    Vec v;                                                                                        \
    for (int i = 0; i < Vec::kRegisters; ++i) v.raw[i] = Register::Operation(a.raw[i], b.raw[i]); \
    return v;                                                                                     \
  }
TRTPU_VEC_BINARY(operator+, Add)
TRTPU_VEC_BINARY(operator-, Sub)
TRTPU_VEC_BINARY(operator*, Mul)
TRTPU_VEC_BINARY(operator/, Div)
TRTPU_VEC_BINARY(Max, Max)  // a > b ? a : b, so a NaN in b stays
TRTPU_VEC_BINARY(Min, Min)  // a < b ? a : b
#undef TRTPU_VEC_BINARY

inline Vec Sqrt(Vec a) {
  Vec v;
  for (int i = 0; i < Vec::kRegisters; ++i) v.raw[i] = Register::Sqrt(a.raw[i]);
  return v;
}

inline Vec WhereEqual(Vec a, Vec b, Vec then, Vec otherwise) {
  Vec v;
  for (int i = 0; i < Vec::kRegisters; ++i)
    v.raw[i] = Register::WhereEqual(a.raw[i], b.raw[i], then.raw[i], otherwise.raw[i]);
  return v;
}

// Rounded from double precision, so that it does not depend on the vectors' width.
inline Vec Pow(Vec a, Vec b) {
  alignas(64) float x[Vec::kLanes], y[Vec::kLanes];
  a.Store(x);
  b.Store(y);
  for (int i = 0; i < Vec::kLanes; ++i)
    x[i] = static_cast<float>(std::pow(static_cast<double>(x[i]), static_cast<double>(y[i])));
  return Vec::Load(x);
}

inline Vec operator-(Vec a) { return Vec(-1.0f) * a; }

// The first n lanes, zeros in the others.
inline Vec KeepFirst(Vec a, int n) {
  alignas(64) float lanes[Vec::kLanes];
  a.Store(lanes);
  return Vec::LoadN(lanes, n);
}

// Sum of the lanes as a fixed tree: distances 8, 4, 2, 1.
inline float SumLanes(Vec a) {
#if defined(__SSE2__)
#if defined(__AVX512F__)
  const __m256 half = _mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xFF, a.raw[0], 0),
                                    _mm512_maskz_extractf32x8_ps(0xFF, a.raw[0], 1));
#elif defined(__AVX2__)
  const __m256 half = _mm256_add_ps(a.raw[0], a.raw[1]);
#endif
#if defined(__AVX2__)
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
  const __m128 quarter = _mm_add_ps(_mm_add_ps(a.raw[0], a.raw[2]), _mm_add_ps(a.raw[1], a.raw[3]));
#endif
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
#else
  alignas(64) float lanes[Vec::kLanes];
  a.Store(lanes);
  for (int distance = Vec::kLanes / 2; distance > 0; distance /= 2)
    for (int i = 0; i < distance; ++i) lanes[i] += lanes[i + distance];
  return lanes[0];
#endif
}

inline void StreamFence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace trtpu

#endif  // TRTPU_SIMD_H_
