// Kernels for a CPU with AVX-512: fused attention, with what comes before it in a decoder's layer, and RMS norms in one pass.
//
// Attention: scores, softmax and the weighted sum of values never leave the cache.
// A problem is one head's keys and values with every query row that looks at them. Its K is packed once as columns and
// its V as rows, in panels of up to 64 numbers that a register tile of 6 x 64 consumes; then blocks of query rows run
// over blocks of keys with a running maximum and sum, as in FlashAttention. bf16 numbers come in pairs along the axis
// that is summed over (what vdpbf16ps multiplies), so a "unit" below is 4 bytes: two bf16 or one float.
//
//   queries 48 x W  x  K panel W x 64  ->  scores 48 x 256, fp32  ->  weights 48 x 256  x  V panel 256 x 64  ->  out

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace {

constexpr int kTile = 6;             // query rows in a register tile
constexpr int kRows = 8 * kTile;     // query rows in a block
constexpr int kKeys = 256;           // keys in a block: 48 x 256 scores are 48 kB
constexpr int kPanel = 64;           // columns in a panel: 4 registers
constexpr int64_t kScratch = 8 << 20;  // bytes of packed K and V alive at a time, unless one head takes more
constexpr float kNone = -INFINITY;

using bf16 = uint16_t;

// One sequence: rows of queries and the keys they may see. Strides count elements.
struct Segment {
  const void *query, *key, *value;
  void *out;
  int64_t rows, keys;
  int64_t first;   // index among the keys of the first query's own key
  int64_t window;  // keys seen, own one included; 0 is all
  int64_t query_row, query_head, key_row, key_head, value_row, value_head, out_row, out_head;
};

struct Shape {
  int64_t heads, groups, width, value_width;
  float scale;
  int causal;
};

template <typename T> constexpr int kPer = 4 / sizeof(T);  // elements in a unit

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <typename T> __m512 dot(__m512 sum, __m512i a, __m512i b);
template <> inline __m512 dot<float>(__m512 sum, __m512i a, __m512i b) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}
#ifdef __AVX512BF16__
template <> inline __m512 dot<bf16>(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}
#endif

// c[M][16 N] (+)= a[M][units] * b[units][kPanel]
template <typename T, int M, int N>
void tile(const int32_t *a, int64_t a_row, const int32_t *b, int64_t units, float *c, int64_t c_row, bool add) {
  __m512 sum[M][N];
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) sum[m][n] = add ? _mm512_loadu_ps(c + m * c_row + 16 * n) : _mm512_setzero_ps();
  for (int64_t u = 0; u < units; u++, b += kPanel) {
    __m512i column[N];
    for (int n = 0; n < N; n++) column[n] = _mm512_load_si512(b + 16 * n);
    for (int m = 0; m < M; m++) {
      __m512i row = _mm512_set1_epi32(a[m * a_row + u]);
      for (int n = 0; n < N; n++) sum[m][n] = dot<T>(sum[m][n], row, column[n]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) _mm512_storeu_ps(c + m * c_row + 16 * n, sum[m][n]);
}

template <typename T, int M>
void tile(int n, const int32_t *a, int64_t a_row, const int32_t *b, int64_t units, float *c, int64_t c_row, bool add) {
  switch (n) {
    case 1: return tile<T, M, 1>(a, a_row, b, units, c, c_row, add);
    case 2: return tile<T, M, 2>(a, a_row, b, units, c, c_row, add);
    case 3: return tile<T, M, 3>(a, a_row, b, units, c, c_row, add);
    default: return tile<T, M, 4>(a, a_row, b, units, c, c_row, add);
  }
}

template <typename T>
void tile(int m, int n, const int32_t *a, int64_t a_row, const int32_t *b, int64_t units, float *c, int64_t c_row,
          bool add) {
  switch (m) {
    case 1: return tile<T, 1>(n, a, a_row, b, units, c, c_row, add);
    case 2: return tile<T, 2>(n, a, a_row, b, units, c, c_row, add);
    case 3: return tile<T, 3>(n, a, a_row, b, units, c, c_row, add);
    case 4: return tile<T, 4>(n, a, a_row, b, units, c, c_row, add);
    case 5: return tile<T, 5>(n, a, a_row, b, units, c, c_row, add);
    default: return tile<T, 6>(n, a, a_row, b, units, c, c_row, add);
  }
}

// 2 ** x for x <= 0; the polynomial is exact to 2e-7, and to 4e-6 for what becomes bf16 anyway.
template <typename T> __m512 exp2(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-127.f), x);  // in this order a NaN stays one
  __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 rest = _mm512_sub_ps(x, whole);
  __m512 sum;
  if constexpr (sizeof(T) == 4) {
    sum = _mm512_set1_ps(1.535336188e-4f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.339887440e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(9.618437357e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.550332548e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.402264791e-1f));
  } else {
    sum = _mm512_set1_ps(9.570100e-3f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.592203e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.402377e-1f));
  }
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.931472028e-1f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(sum, whole);
}

inline void store(float *to, __m512 x, __mmask16 which) { _mm512_mask_storeu_ps(to, which, x); }
#ifdef __AVX512BF16__
inline void store(bf16 *to, __m512 x, __mmask16 which) {
  _mm256_mask_storeu_epi16(to, which, (__m256i)_mm512_cvtneps_pbh(x));
}
#endif

__mmask16 lanes(int64_t from, int64_t to) {  // lanes [from, to), cut to 0..16
  auto low = [](int64_t n) { return n <= 0 ? 0u : n >= 16 ? 0xffffu : (1u << n) - 1; };
  return static_cast<__mmask16>(low(to) & ~low(from));
}

// Softmax of one row's scores[begin, end) of a block as weights; those around it up to `padded` become 0. Updates the
// running maximum and sum, and returns what the sums so far have to be multiplied by.
template <typename T>
float soften(const float *scores, T *weights, int64_t begin, int64_t end, int64_t padded, float scale, float &most,
             float &total) {
  __m512 highest = _mm512_set1_ps(kNone);
  for (int64_t k = begin & ~15; k < end; k += 16) {
    __mmask16 which = lanes(begin - k, end - k);
    highest = _mm512_mask_max_ps(highest, which, highest, _mm512_loadu_ps(scores + k));
  }
  float now = begin < end ? std::max(most, _mm512_reduce_max_ps(highest) * scale) : most;
  if (now == kNone) now = 0;  // nothing seen yet: all weights are 0
  __m512 factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(now), sum = _mm512_setzero_ps();
  for (int64_t k = 0; k < padded; k += 16) {
    __mmask16 which = lanes(begin - k, end - k);
    if (!which) {
      store(weights + k, _mm512_setzero_ps(), 0xffff);
      continue;
    }
    __m512 weight = exp2<T>(_mm512_fmsub_ps(_mm512_loadu_ps(scores + k), factor, shift));
    weight = _mm512_maskz_mov_ps(which, weight);
    sum = _mm512_add_ps(sum, weight);
    store(weights + k, weight, 0xffff);
  }
  float keep = std::exp2(most - now);
  total = total * keep + _mm512_reduce_add_ps(sum);
  most = begin < end ? now : most;
  return keep;
}

// 16 x 16 units: rows become columns. Each round moves the highest bit of the row's number behind the column's.
inline void transpose(__m512i *x) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int round = 0; round < 4; round++) {
    __m512i y[16];
    for (int i = 0; i < 8; i++) {
      y[2 * i] = _mm512_permutex2var_epi32(x[i], low, x[i + 8]);
      y[2 * i + 1] = _mm512_permutex2var_epi32(x[i], high, x[i + 8]);
    }
    std::copy_n(y, 16, x);
  }
}

// keys x width -> panels of 64 keys, [panel][unit of the width][64]; keys past the end are 0.
template <typename T> void pack_keys(const T *key, int64_t row, int64_t keys, int64_t width, int32_t *to) {
  int64_t units = width / kPer<T>;
  for (int64_t panel = 0; panel < keys; panel += kPanel, to += units * kPanel)
    for (int64_t k = 0; k < kPanel; k += 16)
      for (int64_t u = 0; u < units; u += 16) {
        __m512i x[16];
        for (int64_t i = 0; i < 16; i++) {
          __mmask16 which = panel + k + i < keys ? lanes(0, units - u) : 0;
          x[i] = _mm512_maskz_loadu_epi32(which, key + (panel + k + i) * row + u * kPer<T>);
        }
        transpose(x);
        for (int64_t i = 0; i < 16 && u + i < units; i++) _mm512_store_si512(to + (u + i) * kPanel + k, x[i]);
      }
}

// 16 values of the keys of one unit: of one, or of a pair of which the second may not be there.
inline __m512i unit(const float *from, int64_t, bool, __mmask16 which) {
  return _mm512_castps_si512(_mm512_maskz_loadu_ps(which, from));
}
inline __m512i unit(const bf16 *from, int64_t row, bool second, __mmask16 which) {
  __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(which, from));
  if (!second) return low;
  return _mm512_or_si512(low, _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(which, from + row)), 16));
}

// keys x width of at most 64 -> [unit of the keys][64]; values past the width and keys past the end are 0.
template <typename T> void pack_values(const T *value, int64_t row, int64_t keys, int64_t width, int32_t *to) {
  for (int64_t k = 0, padded = up(keys, 16); k < padded; k += kPer<T>, to += kPanel)
    for (int64_t v = 0; v < kPanel; v += 16)
      _mm512_store_si512(to + v, unit(value + k * row + v, row, k + 1 < keys, k < keys ? lanes(0, width - v) : 0));
}

struct Problem {  // one sequence's K and V of one group of heads, packed
  const Segment *segment;
  int64_t group;
  int32_t *keys, *values;
};

struct Block {  // query rows of one head
  const Problem *problem;
  int64_t head, row;
};

int64_t packed_units(const Segment &s, const Shape &shape, int per) {
  int64_t panels = up(s.keys, kPanel);
  return panels * (shape.width / per) + up(s.keys, 16) / per * up(shape.value_width, kPanel);
}

// Packs kKeys of a problem's keys and values, from one of them on.
template <typename T> void pack(const Problem &problem, int64_t key, const Shape &shape) {
  const Segment &s = *problem.segment;
  int64_t keys = std::min<int64_t>(kKeys, s.keys - key), width = shape.value_width;
  pack_keys(static_cast<const T *>(s.key) + problem.group * s.key_head + key * s.key_row, s.key_row, keys, shape.width,
            problem.keys + key * (shape.width / kPer<T>));
  const T *value = static_cast<const T *>(s.value) + problem.group * s.value_head + key * s.value_row;
  for (int64_t panel = 0; panel < width; panel += kPanel)
    pack_values(value + panel, s.value_row, keys, std::min<int64_t>(kPanel, width - panel),
                problem.values + (panel * up(s.keys, 16) + key * kPanel) / kPer<T>);
}

template <typename T> struct Room {  // what one thread works in
  alignas(64) float scores[kRows * kKeys];
  alignas(64) T weights[kRows * kKeys];
  std::vector<float> out;
};

template <typename T> void attend(const Block &block, const Shape &shape, Room<T> &room) {
  const Segment &s = *block.problem->segment;
  const T *query = static_cast<const T *>(s.query) + block.row * s.query_row + block.head * s.query_head;
  int64_t rows = std::min<int64_t>(kRows, s.rows - block.row), own = s.first + block.row;  // own key of the first row
  int64_t width = up(shape.value_width, 16), value_panels = up(shape.value_width, kPanel) / kPanel;
  int64_t value_keys = up(s.keys, 16), units = shape.width / kPer<T>;
  float most[kRows], total[kRows], scale = shape.scale * 1.44269504f;  // exp(x) = 2 ** (x log2 e)
  std::fill_n(most, kRows, kNone);
  std::fill_n(total, kRows, 0.f);
  room.out.assign(kRows * width, 0.f);
  auto seen_from = [&](int64_t row) { return s.window ? std::max<int64_t>(0, own + row - s.window + 1) : 0; };
  auto seen_to = [&](int64_t row) { return shape.causal ? std::min(s.keys, own + row + 1) : s.keys; };

  for (int64_t key = seen_from(0) / kKeys * kKeys; key < seen_to(rows - 1); key += kKeys) {
    for (int64_t row = 0; row < rows; row += kTile) {
      int64_t count = std::min<int64_t>(kTile, rows - row);
      int64_t end = std::min<int64_t>(kKeys, seen_to(row + count - 1) - key);
      if (end <= 0 || seen_from(row) >= key + kKeys) end = 0;
      const int32_t *a = reinterpret_cast<const int32_t *>(query + row * s.query_row);
      for (int64_t k = 0; k < end; k += kPanel)
        tile<T>(count, 4, a, s.query_row / kPer<T>, block.problem->keys + (key + k) * units, units,
                room.scores + row * kKeys + k, kKeys, false);
      int64_t padded = up(end, 16);
      for (int64_t r = row; padded && r < row + count; r++) {
        int64_t from = std::clamp<int64_t>(seen_from(r) - key, 0, end), to = std::clamp<int64_t>(seen_to(r) - key, from, end);
        float keep = soften<T>(room.scores + r * kKeys, room.weights + r * kKeys, from, to, padded, scale, most[r], total[r]);
        if (keep == 1.f) continue;
        for (int64_t v = 0; v < width; v += 16) {
          float *at = room.out.data() + r * width + v;
          _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(keep)));
        }
      }
    }
    for (int64_t panel = 0; panel < value_panels; panel++) {
      int n = static_cast<int>(std::min<int64_t>(kPanel, width - panel * kPanel) / 16);
      const int32_t *b = block.problem->values + (panel * value_keys + key) / kPer<T> * kPanel;
      for (int64_t row = 0; row < rows; row += kTile) {
        int64_t count = std::min<int64_t>(kTile, rows - row);
        int64_t end = std::min<int64_t>(kKeys, seen_to(row + count - 1) - key);
        if (end <= 0 || seen_from(row) >= key + kKeys) continue;
        tile<T>(count, n, reinterpret_cast<const int32_t *>(room.weights + row * kKeys), kKeys / kPer<T>, b,
                up(end, 16) / kPer<T>, room.out.data() + row * width + panel * kPanel, width, true);
      }
    }
  }
  for (int64_t row = 0; row < rows; row++) {
    T *to = static_cast<T *>(s.out) + (block.row + row) * s.out_row + block.head * s.out_head;
    __m512 factor = _mm512_set1_ps(total[row] > 0 ? 1 / total[row] : 0);
    for (int64_t v = 0; v < shape.value_width; v += 16)
      store(to + v, _mm512_mul_ps(_mm512_loadu_ps(room.out.data() + row * width + v), factor),
            lanes(0, shape.value_width - v));
  }
}

template <typename T> int run(const Segment *segments, int64_t count, const Shape &shape, int threads) {
  static thread_local std::vector<int32_t> kept;  // the lane's: pages that are touched once
  std::vector<Problem> problems;
  for (int64_t next = 0, all = count * shape.groups; next < all;) {
    problems.clear();
    int64_t units = 0;
    for (; next < all; next++) {  // as many as fit, at least one
      const Segment &s = segments[next / shape.groups];
      int64_t more = packed_units(s, shape, kPer<T>);
      if (!problems.empty() && (units + more) * 4 > kScratch) break;
      problems.push_back({&s, next % shape.groups, reinterpret_cast<int32_t *>(units), nullptr});
      units += more;
    }
    if (static_cast<int64_t>(kept.size()) < units + 16) kept.resize(units + 16);
    int32_t *base = reinterpret_cast<int32_t *>(up(reinterpret_cast<int64_t>(kept.data()), 64));
    std::vector<Block> blocks;
    std::vector<std::pair<const Problem *, int64_t>> unpacked;  // and the first of kKeys keys
    for (Problem &p : problems) {
      p.keys = base + reinterpret_cast<int64_t>(p.keys);
      p.values = p.keys + up(p.segment->keys, kPanel) * (shape.width / kPer<T>);
      const Segment &s = *p.segment;
      int64_t unseen = s.window ? std::max<int64_t>(0, s.first - s.window + 1) : 0;  // before every row's window
      for (int64_t key = unseen / kKeys * kKeys; key < s.keys; key += kKeys) unpacked.push_back({&p, key});
      int64_t heads = shape.heads / shape.groups;
      for (int64_t row = up(s.rows, kRows) - kRows; row >= 0; row -= kRows)  // the longest first
        for (int64_t head = p.group * heads; head < (p.group + 1) * heads; head++) blocks.push_back({&p, head, row});
    }
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < unpacked.size(); i++) pack<T>(*unpacked[i].first, unpacked[i].second, shape);
      Room<T> *room = new (std::align_val_t(64)) Room<T>;
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < blocks.size(); i++) attend<T>(blocks[i], shape, *room);
      room->~Room<T>();
      ::operator delete(room, std::align_val_t(64));
    }
  }
  return 0;
}

inline __m512 widen(const float *from, __mmask16 which) { return _mm512_maskz_loadu_ps(which, from); }
#ifdef __AVX512BF16__
inline __m512 widen(const bf16 *from, __mmask16 which) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(which, from)), 16));
}
#endif

// A decoder's layer: queries and keys are rotated, keys and values stored where they stay, and attention reads them there.

struct Piece {  // one sequence's rows of a packed row, and its stored keys and values [groups, capacity, width]
  int64_t start, rows, done, capacity;
  void *key, *value;
};

inline __m512 rounded(__m512 x, float) { return x; }
#ifdef __AVX512BF16__
inline __m512 rounded(__m512 x, bf16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}
#endif

// x cos + (-second half of x, first half of x) sin, rounded where transformers rounds; `to` may be `from`.
template <typename T> void rotate(const T *from, const T *cos, const T *sin, T *to, int64_t width) {
  int64_t half = width / 2;
  for (int64_t i = 0; i < half; i += 16) {
    __mmask16 which = lanes(0, half - i);
    auto times = [&](__m512 x, const T *factor) { return rounded(_mm512_mul_ps(x, widen(factor, which)), T()); };
    __m512 first = widen(from + i, which), second = widen(from + half + i, which);
    store(to + i, _mm512_sub_ps(times(first, cos + i), times(second, sin + i)), which);
    store(to + half + i, _mm512_add_ps(times(second, cos + half + i), times(first, sin + half + i)), which);
  }
}

// query [rows, heads, width], rotated in place; key and value [rows, groups, width]; cos and sin [rows, width].
template <typename T>
int attend_packed(T *query, const T *key, const T *value, const T *cos, const T *sin, T *out, const Piece *pieces,
                  int64_t count, const Shape &shape, int64_t window, int threads) {
  int64_t heads = shape.heads, groups = shape.groups, width = shape.width;
  std::vector<const Piece *> owner;
  std::vector<Segment> segments;
  for (const Piece *p = pieces; p < pieces + count; p++) {
    owner.insert(owner.end(), p->rows, p);
    int64_t first = p->start * heads * width, head = p->capacity * width;
    segments.push_back({query + first, p->key, p->value, out + first, p->rows, p->done + p->rows, p->done, window,
                        heads * width, width, width, head, width, head, heads * width, width});
  }
#pragma omp parallel for num_threads(threads) if (owner.size() * heads * width > 1 << 14)
  for (int64_t row = 0; row < static_cast<int64_t>(owner.size()); row++) {
    const T *c = cos + row * width, *s = sin + row * width;
    for (int64_t head = 0; head < heads; head++) {
      T *at = query + (row * heads + head) * width;
      rotate(at, c, s, at, width);
    }
    const Piece &p = *owner[row];
    for (int64_t group = 0; group < groups; group++) {
      int64_t from = (row * groups + group) * width;
      int64_t to = (group * p.capacity + p.done + row - p.start) * width;
      rotate(key + from, c, s, static_cast<T *>(p.key) + to, width);
      std::memcpy(static_cast<T *>(p.value) + to, value + from, width * sizeof(T));
    }
  }
  return run<T>(segments.data(), count, shape, threads);
}

// RMS norms: in rows that are read once and stay in the first cache.

// What is rounded where is transformers' order: x / rms is, before it is scaled; with `offset` (Gemma) it is not, and
// the scale is 1 + weight.
template <typename T>
void normalise(const T *x, const T *weight, T *out, int64_t rows, int64_t width, float eps, int offset, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > 1 << 14)
  for (int64_t row = 0; row < rows; row++) {
    const T *from = x + row * width;
    T *to = out + row * width;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) {
      __m512 part = widen(from + i, lanes(0, width - i));
      squares = _mm512_fmadd_ps(part, part, squares);
    }
    __m512 factor = _mm512_set1_ps(1 / std::sqrt(_mm512_reduce_add_ps(squares) / width + eps));
    for (int64_t i = 0; i < width; i += 16) {
      __mmask16 which = lanes(0, width - i);
      __m512 part = _mm512_mul_ps(widen(from + i, which), factor), scale = widen(weight + i, which);
      if (offset) {
        scale = _mm512_add_ps(scale, _mm512_set1_ps(1.f));
      } else {
        part = rounded(part, T());
      }
      store(to + i, _mm512_mul_ps(part, scale), which);
    }
  }
}

}  // namespace

extern "C" int attend_float(const Segment *segments, int64_t count, const Shape *shape, int threads) {
  return run<float>(segments, count, *shape, threads);
}

extern "C" int attend_bf16(const Segment *segments, int64_t count, const Shape *shape, int threads) {
#ifdef __AVX512BF16__
  return run<bf16>(segments, count, *shape, threads);
#else
  return 1;
#endif
}

extern "C" int attend_packed_float(float *query, const float *key, const float *value, const float *cos,
                                   const float *sin, float *out, const Piece *pieces, int64_t count, const Shape *shape,
                                   int64_t window, int threads) {
  return attend_packed(query, key, value, cos, sin, out, pieces, count, *shape, window, threads);
}

extern "C" int attend_packed_bf16(bf16 *query, const bf16 *key, const bf16 *value, const bf16 *cos, const bf16 *sin,
                                  bf16 *out, const Piece *pieces, int64_t count, const Shape *shape, int64_t window,
                                  int threads) {
#ifdef __AVX512BF16__
  return attend_packed(query, key, value, cos, sin, out, pieces, count, *shape, window, threads);
#else
  return 1;
#endif
}

extern "C" int normalise_float(const float *x, const float *weight, float *out, int64_t rows, int64_t width, float eps,
                               int offset, int threads) {
  normalise(x, weight, out, rows, width, eps, offset, threads);
  return 0;
}

extern "C" int normalise_bf16(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows, int64_t width, float eps,
                              int offset, int threads) {
#ifdef __AVX512BF16__
  normalise(x, weight, out, rows, width, eps, offset, threads);
  return 0;
#else
  return 1;
#endif
}
