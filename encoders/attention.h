// Fused attention: scores, softmax and the weighted sum of values never leave the cache.
//
// A problem is one head's keys and values with every query row that looks at them. Its K is packed once as columns and
// its V as rows, in panels of P numbers (64, with AVX2 16) that a register tile of 6 x P consumes; then blocks of query
// rows run over blocks of keys with a running maximum and sum, as in FlashAttention.
//
//   queries 48 x W  x  K panel W x P  ->  scores 48 x 256, fp32  ->  weights 48 x 256  x  V panel 256 x P  ->  out

#pragma once

#include "tiles.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

constexpr int kRows = 8 * kTile;     // query rows in a block
constexpr int kKeys = 256;           // keys in a block: 48 x 256 scores are 48 kB
constexpr int64_t kScratch = 8 << 20;  // bytes of packed K and V alive at a time, unless one head takes more
constexpr float kNone = -INFINITY;

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

// Softmax of one row's scores[begin, end) of a block as weights; those around it up to `padded` become 0. Updates the
// running maximum and sum, and returns what the sums so far have to be multiplied by. T is the type of attention's output,
// which says how exact the exponents have to be.
template <typename T, typename P>
float soften(const float *scores, P *weights, int64_t begin, int64_t end, int64_t padded, float scale, float &most,
             float &sum) {
  Floats best = all(kNone);
  for (int64_t k = begin / kLanes * kLanes; k < end; k += kLanes)
    best = max(best, load(scores + k), lanes(begin - k, end - k));
  float now = begin < end ? std::max(most, highest(best) * scale) : most;
  bool seen = now != kNone;
  if (!seen) now = 0;  // all weights are 0
  Floats factor = all(scale), shift = all(-now), part = zeros();
  for (int64_t k = 0; k < padded; k += kLanes) {
    Which which = lanes(begin - k, end - k);
    Floats weight = zeros();
    if (!none(which)) weight = only(exp2<T>(fma(load(scores + k), factor, shift)), which);
    part = add(part, weight);
    store(weights + k, weight, lanes(0, kLanes));
  }
  float keep = most == kNone ? 1.f : std::exp2(most - now);  // there are no sums before the first
  sum = sum * keep + total(part);
  if (seen) most = now;
  return keep;
}

// Units of the values of one key, or of a pair of keys of which the second may not be there; `count` of them.
template <typename T> Units column_units(const T *from, int64_t row, bool second, int64_t count) {
  Which which = lanes(0, count);
  if constexpr (sizeof(Packed<T>) == 4) {
    return units(widen(from, which));
  } else {
    return pairs(from, row, second, which);
  }
}

// keys x width of at most kPanel -> [unit of the keys][kPanel]; values past the width and keys past the end are 0.
template <typename T> void pack_values(const T *value, int64_t row, int64_t keys, int64_t width, int32_t *to) {
  for (int64_t k = 0, padded = up(keys, kLanes); k < padded; k += kPer<Packed<T>>, to += kPanel)
    for (int64_t v = 0; v < kPanel; v += kLanes)
      store_units(to + v, column_units(value + k * row + v, row, k + 1 < keys, k < keys ? width - v : 0));
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
  return up(s.keys, kPanel) * (shape.width / per) + up(s.keys, kLanes) / per * up(shape.value_width, kPanel);
}

// Packs kKeys of a problem's keys and values, from one of them on.
template <typename T> void pack(const Problem &problem, int64_t key, const Shape &shape) {
  constexpr int per = kPer<Packed<T>>;
  const Segment &s = *problem.segment;
  int64_t keys = std::min<int64_t>(kKeys, s.keys - key), width = shape.value_width;
  pack_rows(static_cast<const T *>(s.key) + problem.group * s.key_head + key * s.key_row, s.key_row, keys, shape.width,
            problem.keys + key * (shape.width / per));
  const T *value = static_cast<const T *>(s.value) + problem.group * s.value_head + key * s.value_row;
  for (int64_t panel = 0; panel < width; panel += kPanel)
    pack_values(value + panel, s.value_row, keys, std::min<int64_t>(kPanel, width - panel),
                problem.values + (panel * up(s.keys, kLanes) + key * kPanel) / per);
}

template <typename T> struct Room {  // what one thread works in
  alignas(64) float scores[kRows * kKeys];
  alignas(64) Packed<T> weights[kRows * kKeys];
  std::vector<float> out, query;
};

// Rows of queries as units, and how many units they are apart: as they lie, or widened into `room`.
template <typename T>
std::pair<const int32_t *, int64_t> queries(const T *query, int64_t row, int64_t rows, int64_t width, Room<T> &room) {
  if constexpr (std::is_same_v<T, Packed<T>>) {
    return {reinterpret_cast<const int32_t *>(query), row / kPer<T>};
  } else {
    room.query.resize(kRows * width);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t w = 0; w < width; w += kLanes) {
        Which which = lanes(0, width - w);
        store(room.query.data() + r * width + w, widen(query + r * row + w, which), which);
      }
    return {reinterpret_cast<const int32_t *>(room.query.data()), width};
  }
}

template <typename T> void attend_block(const Block &block, const Shape &shape, Room<T> &room) {
  using P = Packed<T>;
  const Segment &s = *block.problem->segment;
  int64_t rows = std::min<int64_t>(kRows, s.rows - block.row), own = s.first + block.row;  // own key of the first row
  auto [query, query_row] = queries(static_cast<const T *>(s.query) + block.row * s.query_row + block.head * s.query_head,
                                    s.query_row, rows, shape.width, room);
  int64_t width = up(shape.value_width, kLanes), value_panels = up(shape.value_width, kPanel) / kPanel;
  int64_t value_keys = up(s.keys, kLanes), units = shape.width / kPer<P>;
  float most[kRows], sum[kRows], scale = shape.scale * kLog2E;
  std::fill_n(most, kRows, kNone);
  std::fill_n(sum, kRows, 0.f);
  room.out.assign(kRows * width, 0.f);
  auto seen_from = [&](int64_t row) { return s.window ? std::max<int64_t>(0, own + row - s.window + 1) : 0; };
  auto seen_to = [&](int64_t row) { return shape.causal ? std::min(s.keys, own + row + 1) : s.keys; };

  for (int64_t key = seen_from(0) / kKeys * kKeys; key < seen_to(rows - 1); key += kKeys) {
    for (int64_t row = 0; row < rows; row += kTile) {
      int64_t count = std::min<int64_t>(kTile, rows - row);
      int64_t end = std::min<int64_t>(kKeys, seen_to(row + count - 1) - key);
      if (end <= 0 || seen_from(row) >= key + kKeys) end = 0;
      for (int64_t k = 0; k < end; k += kPanel)
        tile<P>(count, kColumns, query + row * query_row, query_row, block.problem->keys + (key + k) * units, units,
                room.scores + row * kKeys + k, kKeys, false);
      int64_t padded = up(end, kLanes);
      for (int64_t r = row; padded && r < row + count; r++) {
        int64_t from = std::clamp<int64_t>(seen_from(r) - key, 0, end), to = std::clamp<int64_t>(seen_to(r) - key, from, end);
        float keep = soften<T>(room.scores + r * kKeys, room.weights + r * kKeys, from, to, padded, scale, most[r], sum[r]);
        if (keep == 1.f) continue;
        for (int64_t v = 0; v < width; v += kLanes) {
          float *at = room.out.data() + r * width + v;
          store(at, mul(load(at), all(keep)));
        }
      }
    }
    for (int64_t panel = 0; panel < value_panels; panel++) {
      int n = static_cast<int>(std::min<int64_t>(kPanel, width - panel * kPanel) / kLanes);
      const int32_t *b = block.problem->values + (panel * value_keys + key) / kPer<P> * kPanel;
      for (int64_t row = 0; row < rows; row += kTile) {
        int64_t count = std::min<int64_t>(kTile, rows - row);
        int64_t end = std::min<int64_t>(kKeys, seen_to(row + count - 1) - key);
        if (end <= 0 || seen_from(row) >= key + kKeys) continue;
        tile<P>(count, n, reinterpret_cast<const int32_t *>(room.weights + row * kKeys), kKeys / kPer<P>, b,
                up(end, kLanes) / kPer<P>, room.out.data() + row * width + panel * kPanel, width, true);
      }
    }
  }
  for (int64_t row = 0; row < rows; row++) {
    T *to = static_cast<T *>(s.out) + (block.row + row) * s.out_row + block.head * s.out_head;
    Floats factor = all(sum[row] > 0 ? 1 / sum[row] : 0);
    for (int64_t v = 0; v < shape.value_width; v += kLanes)
      store(to + v, mul(load(room.out.data() + row * width + v), factor), lanes(0, shape.value_width - v));
  }
}

template <typename T> int attend(const Segment *segments, int64_t count, const Shape &shape, int threads) {
  constexpr int per = kPer<Packed<T>>;
  static thread_local std::vector<int32_t> kept;  // the lane's: pages that are touched once
  std::vector<Problem> problems;
  for (int64_t next = 0, all = count * shape.groups; next < all;) {
    problems.clear();
    int64_t units = 0;
    for (; next < all; next++) {  // as many as fit, at least one
      const Segment &s = segments[next / shape.groups];
      int64_t more = packed_units(s, shape, per);
      if (!problems.empty() && (units + more) * 4 > kScratch) break;
      problems.push_back({&s, next % shape.groups, nullptr, nullptr});
      units += more;
    }
    int32_t *at = room(kept, units);
    std::vector<Block> blocks;
    std::vector<std::pair<const Problem *, int64_t>> unpacked;  // and the first of kKeys keys
    for (Problem &p : problems) {
      const Segment &s = *p.segment;
      p.keys = at;
      p.values = p.keys + up(s.keys, kPanel) * (shape.width / per);
      at += packed_units(s, shape, per);
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
      for (size_t i = 0; i < blocks.size(); i++) attend_block<T>(blocks[i], shape, *room);
      room->~Room<T>();
      ::operator delete(room, std::align_val_t(64));
    }
  }
  return 0;
}

// A decoder's layer: queries and keys are rotated, keys and values stored where they stay, and attention reads them there.

struct Piece {  // one sequence's rows of a packed row, and its stored keys and values [groups, capacity, width]
  int64_t start, rows, done, capacity;
  void *key, *value;
};

// x cos + (-second half of x, first half of x) sin, rounded where transformers rounds; `to` may be `from`.
template <typename T> void rotate(const T *from, const T *cos, const T *sin, T *to, int64_t width) {
  int64_t half = width / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    Which which = lanes(0, half - i);
    auto times = [&](Floats x, const T *factor) { return rounded(mul(x, widen(factor, which)), T()); };
    Floats first = widen(from + i, which), second = widen(from + half + i, which);
    store(to + i, sub(times(first, cos + i), times(second, sin + i)), which);
    store(to + half + i, add(times(second, cos + half + i), times(first, sin + half + i)), which);
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
  return attend<T>(segments.data(), count, shape, threads);
}

}  // namespace
