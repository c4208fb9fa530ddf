// Products of matrices in registers: what is multiplied is packed into panels that a tile of registers consumes.
//
// A "unit" is 4 bytes: one float, or two bf16 that lie side by side along the axis that is summed over, where the
// processor multiplies such pairs (vdpbf16ps). Elsewhere bf16 numbers are packed as floats.

#pragma once

#include "simd.h"

#include <cstdint>
#include <vector>

namespace {

constexpr int kTile = 6;                   // rows in a register tile
constexpr int kPanel = kColumns * kLanes;  // columns in a panel

#ifdef PAIRS
template <typename T> using Packed = T;  // what numbers of a type are multiplied as
#else
template <typename T> using Packed = float;
#endif

template <typename P> constexpr int kPer = 4 / sizeof(P);  // elements in a unit

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <typename V> V *room(std::vector<V> &kept, int64_t count) {  // of `count` numbers, on a line of the cache
  if (static_cast<int64_t>(kept.size()) < count + 16) kept.resize(count + 16);
  return reinterpret_cast<V *>(up(reinterpret_cast<int64_t>(kept.data()), 64));
}

// c[M][kLanes N] (+)= a[M][units] * b[units][kPanel]. What is there is added last: long sums, made in parts, stay exact.
template <typename P, int M, int N>
void tile(const int32_t *a, int64_t a_row, const int32_t *b, int64_t units, float *c, int64_t c_row, bool plus) {
  Floats sum[M][N];
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) sum[m][n] = zeros();
#pragma GCC unroll 4  // counting takes an eighth of the instructions of one turn
  for (int64_t u = 0; u < units; u++, b += kPanel) {
    Units column[N];
    for (int n = 0; n < N; n++) column[n] = load_units(b + kLanes * n);
    for (int m = 0; m < M; m++) {
      Units row = all_units(a[m * a_row + u]);
      for (int n = 0; n < N; n++) sum[m][n] = dot(sum[m][n], row, column[n], P());
    }
  }
#pragma GCC unroll 6  // the sums never leave the registers
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      float *to = c + m * c_row + kLanes * n;
      store(to, plus ? add(load(to), sum[m][n]) : sum[m][n]);
    }
}

template <typename P, int M, int N = kColumns>
void tile(int n, const int32_t *a, int64_t a_row, const int32_t *b, int64_t units, float *c, int64_t c_row, bool add) {
  if constexpr (N > 1)
    if (n < N) return tile<P, M, N - 1>(n, a, a_row, b, units, c, c_row, add);
  tile<P, M, N>(a, a_row, b, units, c, c_row, add);
}

template <typename P, int M = kTile>
void tile(int m, int n, const int32_t *a, int64_t a_row, const int32_t *b, int64_t units, float *c, int64_t c_row,
          bool add) {
  if constexpr (M > 1)
    if (m < M) return tile<P, M - 1>(m, n, a, a_row, b, units, c, c_row, add);
  tile<P, M>(n, a, a_row, b, units, c, c_row, add);
}

// Units of one row, from numbers that lie side by side; `count` of them.
template <typename T> Units row_units(const T *from, int64_t count) {
  Which which = lanes(0, count);
  if constexpr (sizeof(Packed<T>) == 4) {
    return units(widen(from, which));
  } else {
    return pairs(from, which);
  }
}

// rows x width -> panels of kPanel rows as columns, [panel][unit of the width][kPanel]; rows past the end are 0.
template <typename T> void pack_rows(const T *from, int64_t row, int64_t rows, int64_t width, int32_t *to) {
  constexpr int per = kPer<Packed<T>>;
  int64_t units = width / per;
  for (int64_t panel = 0; panel < rows; panel += kPanel, to += units * kPanel)
    for (int64_t k = 0; k < kPanel; k += kLanes)
      for (int64_t u = 0; u < units; u += kLanes) {
        Units x[kLanes];
        for (int64_t i = 0; i < kLanes; i++)  // the next rows: the processor itself does not follow so many short ones
          __builtin_prefetch(from + (panel + k + kLanes + i) * row + u * per);
        for (int64_t i = 0; i < kLanes; i++)
          x[i] = row_units(from + (panel + k + i) * row + u * per, panel + k + i < rows ? units - u : 0);
        transpose(x);
        for (int64_t i = 0; i < kLanes && u + i < units; i++) store_units(to + (u + i) * kPanel + k, x[i]);
      }
}

}  // namespace
