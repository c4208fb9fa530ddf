// Linear layers, out = x W^T + bias, and what an MLP does to them: an activation, and the product with a second layer.
//
// Weights stay as they are stored: those of a block of outputs are packed, and stay in the cache while blocks of rows run
// over them. What comes out is activated there, before it is written. Layers that share their input share its widening,
// and their blocks are shared out among the threads together. Called where there is AVX2 only (`pipeline/tiled.py`): with
// AVX-512 oneDNN is as fast.

#pragma once

#include "tiles.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t kDepth = 320;        // units of the axis that is summed over, in a block: its panel fits the first cache
constexpr int64_t kHeight = 96;        // rows in a block: of so many units they fit the second
constexpr int64_t kWidth = 64;         // outputs in a block
constexpr int64_t kNarrow = 48;        // fewest of them, unless there are no more
constexpr int64_t kWidened = 4 << 20;  // numbers of the input that are widened at a time
static_assert(kHeight % kTile == 0 && kWidth % kPanel == 0);

enum Activation { kPlain, kGelu, kGeluTanh, kSilu, kRelu };

inline Floats sigmoid(Floats x) {
  Floats small = exp2<float>(mul(absolute(x), all(-kLog2E))), half = div(all(1.f), add(all(1.f), small));
  return by_sign(x, half, mul(small, half));
}

// erfc(|x| / sqrt(2)), to 2e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
inline Floats tails(Floats x) {
  Floats t = div(all(1.f), fma(absolute(x), all(0.3275911f * 0.70710678f), all(1.f)));
  Floats sum = all(1.061405429f);
  for (float part : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) sum = fma(sum, t, all(part));
  return mul(mul(sum, t), exp2<float>(mul(mul(x, x), all(-0.5f * kLog2E))));
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

struct Linear {  // weight [outs, in], bias [outs] or none, the second layer's or none, out [rows, outs]
  const void *weight, *bias, *up, *up_bias;
  void *out;
  int64_t outs;
};

struct Outputs {  // [first, first + width) of rows [row, row + height)
  const Linear *layer;
  int64_t first, width, row, height;
};

struct Product {  // what one thread works in
  std::vector<int32_t> weights;
  std::vector<float> sums;
};

inline int64_t parts(int64_t n, int64_t of) { return (n + of - 1) / of; }
inline int64_t evenly(int64_t n, int64_t most, int64_t to) { return up(parts(n, std::max<int64_t>(1, parts(n, most))), to); }

// One row of what a thread has made: biases, activation, product; rounded where transformers rounds.
template <Activation kind, typename T>
void finish(const float *sums, const float *factors, const T *bias, const T *up_bias, T *out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Which which = lanes(0, count - i);
    auto made = [&](const float *from, const T *plus) {
      Floats x = load(from + i);
      return rounded(plus ? add(x, widen(plus + i, which)) : x, T());
    };
    Floats x = activated<kind>(made(sums, bias));
    if (factors) x = mul(rounded(x, T()), made(factors, up_bias));
    store(out + i, x, which);
  }
}

// One block of outputs; x is rows of units, `units` apart.
template <Activation kind, typename T>
void multiply_block(const int32_t *x, int64_t units, const Outputs &task, Product &kept) {
  using P = Packed<T>;
  const Linear &layer = *task.layer;
  int64_t in = units * kPer<P>, padded = up(task.width, kPanel), depth = evenly(units, kDepth, kLanes);
  int64_t panels = layer.up ? 2 * padded : padded;  // their columns, one layer's behind the other's
  int32_t *weights = room(kept.weights, panels * units);
  float *sums = room(kept.sums, panels * kHeight);
  auto part = [&](const void *of, int64_t step) { return of ? static_cast<const T *>(of) + task.first * step : nullptr; };
  pack_rows(part(layer.weight, in), in, task.width, in, weights);
  if (layer.up) pack_rows(part(layer.up, in), in, task.width, in, weights + padded * units);

  for (int64_t row = task.row, end = task.row + task.height; row < end; row += kHeight) {
    int64_t height = std::min(kHeight, end - row);
    for (int64_t unit = 0; unit < units; unit += depth)
      for (int64_t panel = 0; panel < padded; panel += kPanel) {
        for (int64_t p = panel; p < panels; p += padded)  // the layer's, and the second layer's
          for (int64_t r = 0; r < height; r += kTile)
            tile<P>(std::min<int64_t>(kTile, height - r), kColumns, x + (row + r) * units + unit, units,
                    weights + p * units + unit * kPanel, std::min(depth, units - unit),
                    sums + p * kHeight + r * kPanel, kPanel, unit > 0);
        if (unit + depth < units) continue;
        auto bias = [&](const void *of) { return of ? part(of, 1) + panel : nullptr; };
        for (int64_t r = 0; r < height; r++) {  // while they are in the first cache
          const float *from = sums + panel * kHeight + r * kPanel;
          finish<kind>(from, layer.up ? from + padded * kHeight : nullptr, bias(layer.bias), bias(layer.up_bias),
                       static_cast<T *>(layer.out) + (row + r) * layer.outs + task.first + panel,
                       std::min<int64_t>(kPanel, task.width - panel));
        }
      }
  }
}

// Blocks for a few turns of each thread; where the outputs are few, of rows too.
inline std::vector<Outputs> shared_out(const Linear *layers, int64_t count, int64_t start, int64_t rows, int threads) {
  int64_t wanted = threads > 1 ? 8 * threads : 1, outs = 0, across = 0;
  for (int64_t l = 0; l < count; l++) outs += layers[l].outs;
  int64_t width = up(std::clamp(parts(outs, wanted), kNarrow, kWidth), kPanel);
  for (int64_t l = 0; l < count; l++) across += parts(layers[l].outs, width);
  int64_t down = std::min(parts(wanted, across), parts(rows, kHeight)), height = evenly(rows, parts(rows, down), kTile);
  std::vector<Outputs> tasks;
  for (const Linear *layer = layers; layer < layers + count; layer++)
    for (int64_t first = 0, each = evenly(layer->outs, width, kPanel); first < layer->outs; first += each)
      for (int64_t row = 0; row < rows; row += height)
        tasks.push_back({layer, first, std::min(each, layer->outs - first), start + row, std::min(height, rows - row)});
  return tasks;
}

template <Activation kind, typename T>
void multiply(const T *x, const Linear *layers, int64_t count, int64_t rows, int64_t in, int threads) {
  constexpr bool as_it_is = std::is_same_v<T, Packed<T>>;
  static thread_local std::vector<int32_t> kept;  // the lane's: pages that are touched once
  int64_t most = as_it_is ? rows : std::min(rows, evenly(rows, std::max(kHeight, kWidened / in), kHeight));
  const int32_t *from = reinterpret_cast<const int32_t *>(x);
  float *wide = as_it_is ? nullptr : reinterpret_cast<float *>(room(kept, most * in));
  for (int64_t start = 0; start < rows; start += most) {
    int64_t now = std::min(most, rows - start);
    std::vector<Outputs> tasks = shared_out(layers, count, start, now, threads);
#pragma omp parallel num_threads(threads)
    {
      if constexpr (!as_it_is) {
#pragma omp for
        for (int64_t row = 0; row < now; row++)
          for (int64_t i = 0; i < in; i += kLanes) {
            Which which = lanes(0, in - i);
            store(wide + row * in + i, widen(x + (start + row) * in + i, which), which);
          }
      }
      static thread_local Product product;
      const int32_t *units = as_it_is ? from : reinterpret_cast<int32_t *>(wide) - start * in;
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < tasks.size(); i++) multiply_block<kind, T>(units, in / kPer<Packed<T>>, tasks[i], product);
    }
  }
}

// x [rows, in] contiguous. Returns 1, and does nothing, where `in` is odd and bf16 numbers are multiplied in pairs.
template <typename T>
int multiply(const T *x, const Linear *layers, int64_t count, int64_t rows, int64_t in, int activation, int threads) {
  if (in % kPer<Packed<T>>) return 1;
  switch (activation) {
    case kPlain: multiply<kPlain>(x, layers, count, rows, in, threads); break;
    case kGelu: multiply<kGelu>(x, layers, count, rows, in, threads); break;
    case kGeluTanh: multiply<kGeluTanh>(x, layers, count, rows, in, threads); break;
    case kSilu: multiply<kSilu>(x, layers, count, rows, in, threads); break;
    case kRelu: multiply<kRelu>(x, layers, count, rows, in, threads); break;
    default: return 1;
  }
  return 0;
}

}  // namespace
