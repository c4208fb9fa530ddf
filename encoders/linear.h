// Linear layers, out = x W^T + bias, and what an MLP does to them: an activation, and the product with a second layer.
//
// Weights stay as they are stored: those of a block of outputs are packed, and stay in the second cache while blocks of
// rows run over them. What comes out is activated there, before it is written.

#pragma once

#include "tiles.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr int64_t kDepth = 256;   // units of the axis that is summed over, in a block: a panel and a tile of them fit the first cache
constexpr int64_t kHeight = 96;   // rows in a block
constexpr int64_t kWidth = 192;   // outputs in a block
constexpr int64_t kNarrow = 96;   // fewest of them, unless there are no more: for each block all rows are widened
static_assert(kHeight % kTile == 0 && kWidth % kPanel == 0 && kDepth % kLanes == 0);

enum Activation { kPlain, kGelu, kGeluTanh, kSilu, kRelu };

inline Floats sigmoid(Floats x) {
  Floats small = exp2<float>(mul(absolute(x), all(-1.44269504f))), half = div(all(1.f), add(all(1.f), small));
  return by_sign(x, half, mul(small, half));
}

// erfc(|x| / sqrt(2)), to 2e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
inline Floats tails(Floats x) {
  Floats t = div(all(1.f), fma(absolute(x), all(0.3275911f * 0.70710678f), all(1.f)));
  Floats sum = all(1.061405429f);
  for (float part : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) sum = fma(sum, t, all(part));
  return mul(mul(sum, t), exp2<float>(mul(mul(x, x), all(-0.5f * 1.44269504f))));
}

template <Activation kind> Floats activated(Floats x) {
  if constexpr (kind == kGelu) {
    Floats half = mul(tails(x), all(0.5f));
    return mul(x, by_sign(x, sub(all(1.f), half), half));
  } else if constexpr (kind == kGeluTanh) {
    Floats cubic = fma(mul(x, x), all(0.044715f), all(1.f));
    return mul(x, sigmoid(mul(mul(x, cubic), all(2 * 0.79788456f))));
  } else if constexpr (kind == kSilu) {
    return mul(x, sigmoid(x));
  } else if constexpr (kind == kRelu) {
    return max(zeros(), x);  // in this order a NaN stays one
  } else {
    return x;
  }
}

struct Linear {  // weight [outs, in] and bias [outs], or no bias; no weight is no layer
  const void *weight, *bias;
};

struct Product {  // what one thread works in
  std::vector<int32_t> weights, rows;
  std::vector<float> sums;
};

template <typename V> V *room(std::vector<V> &kept, int64_t count) {  // of `count` numbers, on a line of the cache
  if (static_cast<int64_t>(kept.size()) < count + 16) kept.resize(count + 16);
  return reinterpret_cast<V *>(up(reinterpret_cast<int64_t>(kept.data()), 64));
}

// Rows of numbers as units, and how many units they are apart: as they lie, or widened.
template <typename T>
std::pair<const int32_t *, int64_t> as_units(const T *from, int64_t row, int64_t rows, int64_t units, int32_t *to) {
  if constexpr (std::is_same_v<T, Packed<T>>) {
    return {reinterpret_cast<const int32_t *>(from), row / kPer<T>};
  } else {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t u = 0; u < units; u += kLanes)
        store(reinterpret_cast<float *>(to) + r * kDepth + u, widen(from + r * row + u, lanes(0, units - u)));
    return {to, kDepth};
  }
}

// One row of what a thread has made: biases, activation, product; rounded where transformers rounds.
template <Activation kind, typename T>
void finish(const float *sums, const float *factors, const T *bias, const T *factor_bias, T *out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Which which = lanes(0, count - i);
    auto made = [&](const float *from, const T *plus) {
      Floats x = load(from + i);
      return rounded(plus ? add(x, widen(plus + i, which)) : x, T());
    };
    Floats x = activated<kind>(made(sums, bias));
    if (factors) x = mul(rounded(x, T()), made(factors, factor_bias));
    store(out + i, x, which);
  }
}

// Outputs [first, first + width) of rows [row, row + height).
template <Activation kind, typename T>
void multiply(const T *x, const Linear *layers, T *out, int64_t row, int64_t height, int64_t in, int64_t outs,
              int64_t first, int64_t width, Product &kept) {
  using P = Packed<T>;
  int64_t units = in / kPer<P>, padded = up(width, kPanel), count = layers[1].weight ? 2 : 1;
  int32_t *weights = room(kept.weights, count * padded * units), *rows = room(kept.rows, kHeight * kDepth);
  float *sums = room(kept.sums, count * kHeight * padded);
  for (int64_t l = 0; l < count; l++)
    pack_rows(static_cast<const T *>(layers[l].weight) + first * in, in, width, in, weights + l * padded * units);
  auto bias = [&](int l) { return layers[l].bias ? static_cast<const T *>(layers[l].bias) + first : nullptr; };
  for (int64_t end = row + height; row < end; row += kHeight) {
    height = std::min(kHeight, end - row);
    for (int64_t unit = 0; unit < units; unit += kDepth) {
      int64_t depth = std::min(kDepth, units - unit);
      auto [a, a_row] = as_units(x + row * in + unit * kPer<P>, in, height, depth, rows);
      for (int64_t panel = 0; panel < count * padded; panel += kPanel)
        for (int64_t r = 0; r < height; r += kTile)
          tile<P>(std::min<int64_t>(kTile, height - r), kColumns, a + r * a_row, a_row,
                  weights + panel * units + unit * kPanel, depth, sums + panel * kHeight + r * kPanel, kPanel, unit > 0);
    }
    for (int64_t r = 0; r < height; r++)
      for (int64_t panel = 0; panel < width; panel += kPanel) {
        const float *from = sums + panel * kHeight + r * kPanel, *factors = count == 2 ? from + padded * kHeight : nullptr;
        auto at = [&](const T *of) { return of ? of + panel : nullptr; };
        finish<kind>(from, factors, at(bias(0)), at(bias(1)), out + (row + r) * outs + first + panel,
                     std::min<int64_t>(kPanel, width - panel));
      }
  }
}

inline int64_t parts(int64_t n, int64_t of) { return (n + of - 1) / of; }

template <Activation kind, typename T>
void multiply(const T *x, const Linear *layers, T *out, int64_t rows, int64_t in, int64_t outs, int threads) {
  // A few tasks for each thread: of outputs, and where these are few of rows too.
  int64_t tasks = threads > 1 ? 2 * threads : 1;
  int64_t width = up(std::clamp(parts(outs, tasks), kNarrow, kWidth), kPanel);
  int64_t down = std::min(parts(tasks, parts(outs, width)), parts(rows, kHeight));
  int64_t height = up(parts(rows, down), kTile);
#pragma omp parallel for num_threads(threads) schedule(dynamic) collapse(2)
  for (int64_t first = 0; first < outs; first += width)
    for (int64_t row = 0; row < rows; row += height) {
      static thread_local Product kept;  // pages that are touched once
      multiply<kind>(x, layers, out, row, std::min(height, rows - row), in, outs, first, std::min(width, outs - first), kept);
    }
}

// x [rows, in] contiguous -> out [rows, outs]; in is even where bf16 numbers are multiplied in pairs. Of two layers the
// second's output is what the first's, activated, is multiplied by.
template <typename T>
void multiply(const T *x, const Linear *layers, T *out, int64_t rows, int64_t in, int64_t outs, int activation, int threads) {
  switch (activation) {
    case kGelu: return multiply<kGelu>(x, layers, out, rows, in, outs, threads);
    case kGeluTanh: return multiply<kGeluTanh>(x, layers, out, rows, in, outs, threads);
    case kSilu: return multiply<kSilu>(x, layers, out, rows, in, outs, threads);
    case kRelu: return multiply<kRelu>(x, layers, out, rows, in, outs, threads);
    default: return multiply<kPlain>(x, layers, out, rows, in, outs, threads);
  }
}

}  // namespace
