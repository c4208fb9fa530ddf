// What `kernels.py` calls: kernels for a CPU with AVX-512 or AVX2, for fp32 and bf16.

#include "attention.h"
#include "linear.h"
#include "norm.h"

extern "C" int attend_float(const Segment *segments, int64_t count, const Shape *shape, int threads) {
  return attend<float>(segments, count, *shape, threads);
}

extern "C" int attend_bf16(const Segment *segments, int64_t count, const Shape *shape, int threads) {
  return attend<bf16>(segments, count, *shape, threads);
}

extern "C" int attend_packed_float(float *query, const float *key, const float *value, const float *cos,
                                   const float *sin, float *out, const Piece *pieces, int64_t count, const Shape *shape,
                                   int64_t window, int threads) {
  return attend_packed(query, key, value, cos, sin, out, pieces, count, *shape, window, threads);
}

extern "C" int attend_packed_bf16(bf16 *query, const bf16 *key, const bf16 *value, const bf16 *cos, const bf16 *sin,
                                  bf16 *out, const Piece *pieces, int64_t count, const Shape *shape, int64_t window,
                                  int threads) {
  return attend_packed(query, key, value, cos, sin, out, pieces, count, *shape, window, threads);
}

extern "C" int normalise_float(const float *x, const float *weight, float *out, int64_t rows, int64_t width, float eps,
                               int offset, int threads) {
  normalise(x, weight, out, rows, width, eps, offset, threads);
  return 0;
}

extern "C" int normalise_bf16(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows, int64_t width, float eps,
                              int offset, int threads) {
  normalise(x, weight, out, rows, width, eps, offset, threads);
  return 0;
}

extern "C" int multiply_float(const float *x, const Linear *layers, int64_t count, int64_t rows, int64_t in,
                              int activation, int threads) {
  return multiply(x, layers, count, rows, in, activation, threads);
}

extern "C" int multiply_bf16(const bf16 *x, const Linear *layers, int64_t count, int64_t rows, int64_t in,
                             int activation, int threads) {
  return multiply(x, layers, count, rows, in, activation, threads);
}
