// RMS norms: in rows that are read once and stay in the first cache.

#pragma once

#include "simd.h"

#include <cmath>

namespace {

// What is rounded where is transformers' order: x / rms is, before it is scaled; with `offset` (Gemma) it is not, and
// the scale is 1 + weight.
template <typename T>
void normalise(const T *x, const T *weight, T *out, int64_t rows, int64_t width, float eps, int offset, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > 1 << 14)
  for (int64_t row = 0; row < rows; row++) {
    const T *from = x + row * width;
    T *to = out + row * width;
    Floats squares = zeros();
    for (int64_t i = 0; i < width; i += kLanes) {
      Floats part = widen(from + i, lanes(0, width - i));
      squares = fma(part, part, squares);
    }
    Floats factor = all(1 / std::sqrt(total(squares) / width + eps));
    for (int64_t i = 0; i < width; i += kLanes) {
      Which which = lanes(0, width - i);
      Floats part = mul(widen(from + i, which), factor), scale = widen(weight + i, which);
      if (offset) {
        scale = add(scale, all(1.f));
      } else {
        part = rounded(part, T());
      }
      store(to + i, mul(part, scale), which);
    }
  }
}

}  // namespace
