// Vectors of fp32 for kernels.cpp: 16 lanes with AVX-512, 8 with AVX2. The command that compiles (kernels.py) says which
// (LANES), and whether bf16 numbers are multiplied in pairs (PAIRS); without that they become fp32 on the way in.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

using bf16 = uint16_t;

constexpr int kLanes = LANES;

#if LANES == 16

constexpr int kColumns = 4;  // registers across a register tile, of which 6 rows of it fill the register file
using Floats = __m512;
using Units = __m512i;  // each lane one float, or a pair of bf16
using Which = __mmask16;

inline Which lanes(int64_t from, int64_t to) {  // lanes [from, to), cut to those there are
  auto low = [](int64_t n) { return n <= 0 ? 0u : n >= 16 ? 0xffffu : (1u << n) - 1; };
  return static_cast<Which>(low(to) & ~low(from));
}
inline bool none(Which which) { return !which; }

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Units all_units(int32_t x) { return _mm512_set1_epi32(x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
inline Floats absolute(Floats x) { return _mm512_abs_ps(x); }
inline Floats by_sign(Floats x, Floats positive, Floats negative) {
  return _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(x)), positive, negative);
}
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b, if either is NaN
inline Floats max(Floats a, Floats b, Which which) { return _mm512_mask_max_ps(a, which, a, b); }
inline Floats only(Floats x, Which which) { return _mm512_maskz_mov_ps(which, x); }
inline float highest(Floats x) { return _mm512_reduce_max_ps(x); }
inline float total(Floats x) { return _mm512_reduce_add_ps(x); }
inline Floats nearest(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats times_power(Floats x, Floats power) { return _mm512_scalef_ps(x, power); }  // x * 2 ** power, whole

inline Floats load(const float *from) { return _mm512_loadu_ps(from); }
inline void store(float *to, Floats x) { _mm512_storeu_ps(to, x); }
inline void store(float *to, Floats x, Which which) { _mm512_mask_storeu_ps(to, which, x); }
inline Floats widen(const float *from, Which which) { return _mm512_maskz_loadu_ps(which, from); }

inline Units load_units(const int32_t *from) { return _mm512_load_si512(from); }
inline void store_units(int32_t *to, Units x) { _mm512_store_si512(to, x); }
inline Units units(const float *from, Which which) { return _mm512_castps_si512(widen(from, which)); }
inline Floats floats(Units x) { return _mm512_castsi512_ps(x); }
inline Units units(Floats x) { return _mm512_castps_si512(x); }
inline __m512i raw(const bf16 *from, Which which) {
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(which, from));
}
inline Floats widen(const bf16 *from, Which which) { return floats(_mm512_slli_epi32(raw(from, which), 16)); }
inline __m256i narrow(Floats x) {  // to the nearest bf16, the even one of two
#ifdef PAIRS
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  __m512i bits = units(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), all_units(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, all_units(0x7fff))), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, all_units(0x7fc0)));
#endif
}
inline void store(bf16 *to, Floats x, Which which) { _mm256_mask_storeu_epi16(to, which, narrow(x)); }
inline Floats rounded(Floats x, bf16) { return floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(x)), 16)); }

#ifdef PAIRS
inline Units pairs(const bf16 *from, Which which) { return _mm512_maskz_loadu_epi32(which, from); }
inline Units pairs(const bf16 *from, int64_t row, bool second, Which which) {  // of numbers a row apart
  __m512i low = raw(from, which);
  return second ? _mm512_or_si512(low, _mm512_slli_epi32(raw(from + row, which), 16)) : low;
}
inline Floats dot(Floats sum, Units a, Units b, bf16) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
#endif

inline void interleave(Units a, Units b, Units &low, Units &high) {  // a0 b0 a1 b1 ... in two registers
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  low = _mm512_permutex2var_epi32(a, first, b);
  high = _mm512_permutex2var_epi32(a, _mm512_add_epi32(first, all_units(8)), b);
}

// 16 x 16 units: rows become columns. Each round moves the highest bit of the row's number behind the column's.
inline void transpose(Units *x) {
  for (int round = 1; round < kLanes; round *= 2) {
    Units y[kLanes];
    for (int i = 0; i < kLanes / 2; i++) interleave(x[i], x[i + kLanes / 2], y[2 * i], y[2 * i + 1]);
    std::copy_n(y, kLanes, x);
  }
}

#else

constexpr int kColumns = 2;
using Floats = __m256;
using Units = __m256i;
struct Which {
  int from, to;
};

inline Which lanes(int64_t from, int64_t to) {
  if (from <= 0 && to >= kLanes) return {0, kLanes};  // nearly always, and found out at once
  auto cut = [](int64_t n) { return static_cast<int>(std::clamp<int64_t>(n, 0, kLanes)); };
  return {cut(from), cut(to)};
}
inline bool none(Which which) { return which.from >= which.to; }
inline bool whole(Which which) { return which.from == 0 && which.to == kLanes; }
inline __m256i bits(Which which) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(which.from), lane),
                             _mm256_cmpgt_epi32(_mm256_set1_epi32(which.to), lane));
}

inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Units all_units(int32_t x) { return _mm256_set1_epi32(x); }
inline Floats floats(Units x) { return _mm256_castsi256_ps(x); }
inline Units units(Floats x) { return _mm256_castps_si256(x); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
inline Floats absolute(Floats x) { return _mm256_andnot_ps(all(-0.f), x); }
inline Floats by_sign(Floats x, Floats positive, Floats negative) { return _mm256_blendv_ps(positive, negative, x); }
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats max(Floats a, Floats b, Which which) {
  return whole(which) ? max(a, b) : _mm256_blendv_ps(a, max(a, b), floats(bits(which)));
}
inline Floats only(Floats x, Which which) { return whole(which) ? x : _mm256_and_ps(x, floats(bits(which))); }
inline float highest(Floats x) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline float total(Floats x) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline Floats nearest(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats times_power(Floats x, Floats power) {  // power in [-127, 0]; 2 ** -127 is taken for 0
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), all_units(127));
  return mul(x, floats(_mm256_slli_epi32(exponent, 23)));
}

inline Floats load(const float *from) { return _mm256_loadu_ps(from); }
inline void store(float *to, Floats x) { _mm256_storeu_ps(to, x); }
inline void store(float *to, Floats x, Which which) {
  whole(which) ? _mm256_storeu_ps(to, x) : _mm256_maskstore_ps(to, bits(which), x);
}
inline Floats widen(const float *from, Which which) {
  return whole(which) ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, bits(which));
}
inline Units load_units(const int32_t *from) { return _mm256_load_si256(reinterpret_cast<const __m256i *>(from)); }
inline void store_units(int32_t *to, Units x) { _mm256_store_si256(reinterpret_cast<__m256i *>(to), x); }
inline Floats widen(const bf16 *from, Which which) {
  bf16 part[kLanes] = {};
  if (!whole(which)) {
    if (!none(which)) std::copy(from + which.from, from + which.to, part + which.from);
    from = part;
  }
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
  return floats(_mm256_slli_epi32(wide, 16));
}
inline Units nearest_bf16(Floats x) {  // the even one of two, in the upper half of each lane
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(units(x), 16), all_units(1));
  __m256i sum = _mm256_add_epi32(units(x), _mm256_add_epi32(odd, all_units(0x7fff)));
  __m256i kept = _mm256_and_si256(sum, all_units(static_cast<int32_t>(0xffff0000)));
  return units(_mm256_blendv_ps(floats(kept), floats(all_units(0x7fc00000)), _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
inline Floats rounded(Floats x, bf16) { return floats(nearest_bf16(x)); }
inline void store(bf16 *to, Floats x, Which which) {
  __m256i low = _mm256_srli_epi32(nearest_bf16(x), 16);
  __m128i eight = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  if (whole(which)) return _mm_storeu_si128(reinterpret_cast<__m128i *>(to), eight);
  bf16 part[kLanes];
  _mm_storeu_si128(reinterpret_cast<__m128i *>(part), eight);
  if (!none(which)) std::copy(part + which.from, part + which.to, to + which.from);
}

// 8 x 8 units: rows become columns. Two rounds within the halves of the registers, then halves change places.
inline void transpose(Units *x) {
  Floats two[8], four[8];
  for (int i = 0; i < 8; i += 2) {
    two[i] = _mm256_unpacklo_ps(floats(x[i]), floats(x[i + 1]));
    two[i + 1] = _mm256_unpackhi_ps(floats(x[i]), floats(x[i + 1]));
  }
  for (int i = 0; i < 8; i += 4)
    for (int k = 0; k < 2; k++) {
      four[i + 2 * k] = _mm256_shuffle_ps(two[i + k], two[i + 2 + k], 0x44);
      four[i + 2 * k + 1] = _mm256_shuffle_ps(two[i + k], two[i + 2 + k], 0xee);
    }
  for (int i = 0; i < 4; i++) {
    x[i] = units(_mm256_permute2f128_ps(four[i], four[i + 4], 0x20));
    x[i + 4] = units(_mm256_permute2f128_ps(four[i], four[i + 4], 0x31));
  }
}

#endif

inline Floats rounded(Floats x, float) { return x; }
inline Floats dot(Floats sum, Units a, Units b, float) { return fma(floats(a), floats(b), sum); }

constexpr float kLog2E = 1.44269504f;  // exp(x) = 2 ** (x kLog2E)

// 2 ** x for x <= 0; the polynomial is exact to 2e-7, and to 4e-6 for what becomes bf16 anyway.
template <typename T> Floats exp2(Floats x) {
  x = max(all(-127.f), x);  // in this order a NaN stays one
  Floats whole = nearest(x), rest = sub(x, whole), sum;
  if constexpr (sizeof(T) == 4) {
    sum = all(1.535336188e-4f);
    sum = fma(sum, rest, all(1.339887440e-3f));
    sum = fma(sum, rest, all(9.618437357e-3f));
    sum = fma(sum, rest, all(5.550332548e-2f));
    sum = fma(sum, rest, all(2.402264791e-1f));
  } else {
    sum = all(9.570100e-3f);
    sum = fma(sum, rest, all(5.592203e-2f));
    sum = fma(sum, rest, all(2.402377e-1f));
  }
  sum = fma(sum, rest, all(6.931472028e-1f));
  sum = fma(sum, rest, all(1.f));
  return times_power(sum, whole);
}

}  // namespace
