// Attention of packed sequences over a paged pool, on a CPU, without gathering blocks first.
//
// A plain C interface called with addresses; services/llm/paged_kernel.py builds it, checks it and is its only caller.
// Per sequence: its new keys and values go into the pool, then its queries attend, causally, over everything before them.
// Softmax is computed online over tiles of keys, so scratch memory does not grow with the context.
// Nothing past a sequence's length is ever read: what a block's tail held before cannot leak, not even as 0 * NaN.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "functions.h"
#include "vectors.h"

namespace {

using namespace triptych;

constexpr int kTile = 32;       // keys handled between two updates of the running softmax
constexpr float kNever = -1e30f;  // score of a key that a query must not see; finite, so differences of it stay numbers
constexpr int kFew = 4;  // query vectors up to which keys are not turned
constexpr int kQueryVectors = 32;  // query vectors (queries x heads that share keys) that go over a tile together

// cap * tanh(x / cap)
inline Vec soft_cap(Vec x, float cap) {
  const Vec size = (x < 0.0f ? -x : x) / cap;
  const Vec e = exp_negative(-2.0f * size);
  const Vec t = cap * (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -t : t;
}

// Folds a vector in halves: the order of additions is fixed, and it takes four steps rather than sixteen.
inline float largest(Vec x) {
  Vec y = __builtin_shuffle(x, IntVec{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  x = x < y ? y : x;
  y = __builtin_shuffle(x, IntVec{4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3});
  x = x < y ? y : x;
  y = __builtin_shuffle(x, IntVec{2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1});
  x = x < y ? y : x;
  return std::max(x[0], x[1]);
}
inline float total(Vec x) {
  x += __builtin_shuffle(x, IntVec{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  x += __builtin_shuffle(x, IntVec{4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3});
  x += __builtin_shuffle(x, IntVec{2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1});
  return x[0] + x[1];
}

// rows[16][width] at 16 addresses to columns[width][kTile]: a query then meets 16 keys in one vector.
template <typename T>
inline void transpose(const T* const* rows, int width, float* columns) {
  for (int at = 0; at < width; at += kLanes) {
#if defined(__AVX512F__)
    __m512i turned[16];
    for (int i = 0; i < 16; i++) turned[i] = (__m512i)load(rows[i] + at);
    turn(turned);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(columns + (at + i) * kTile, turned[i]);
#else
    for (int i = 0; i < kLanes; i++) {
      const Vec row = load(rows[i] + at);
      for (int j = 0; j < kLanes; j++) columns[(at + j) * kTile + i] = row[j];
    }
#endif
  }
}

// Running sums of query . key over pairs of lanes or single lanes; fold() adds up the rest.
template <typename T, int parts>
struct Dots {
  Vec query[parts];
  explicit Dots(const T* q) {
    for (int i = 0; i < parts; i++) query[i] = load(q + i * kLanes);
  }
  Vec with(const T* key) const {
    Vec sum = query[0] * load(key);
    for (int i = 1; i < parts; i++) sum += query[i] * load(key + i * kLanes);
    return sum;
  }
};

#if defined(__AVX512BF16__)
template <int parts>
struct Dots<BFloat16, parts> {  // products of bfloat16 are exact in float32, where they are added up
  __m512bh query[parts / 2];
  explicit Dots(const BFloat16* q) {
    for (int i = 0; i < parts / 2; i++) query[i] = (__m512bh)_mm512_loadu_si512(q + i * 2 * kLanes);
  }
  Vec with(const BFloat16* key) const {
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < parts / 2; i++) sum = _mm512_dpbf16_ps(sum, query[i], (__m512bh)_mm512_loadu_si512(key + i * 2 * kLanes));
    return (Vec)sum;
  }
};
#endif

// scores[count][kTile] = queries . keys, for so few queries that turning the keys would cost more than adding up lanes.
template <typename T, int parts, int count>
inline void multiply_few(const T* const* queries, const T* const* keys, int lanes, float* scores) {
  Vec sums[count][kLanes];
  for (int at = 0; at < lanes; at += kLanes) {
    if constexpr (count == 1) {
      const Dots<T, parts> a(queries[0]);
      for (int t = 0; t < kLanes; t++) sums[0][t] = a.with(keys[at + t]);
    } else if constexpr (count == 2) {
      const Dots<T, parts> a(queries[0]), b(queries[1]);
      for (int t = 0; t < kLanes; t++) sums[0][t] = a.with(keys[at + t]), sums[1][t] = b.with(keys[at + t]);
    } else {
      const Dots<T, parts> a(queries[0]), b(queries[1]), c(queries[2]);
      for (int t = 0; t < kLanes; t++)
        sums[0][t] = a.with(keys[at + t]), sums[1][t] = b.with(keys[at + t]), sums[2][t] = c.with(keys[at + t]);
    }
    for (int i = 0; i < count; i++) store(scores + i * kTile + at, fold(sums[i]));
  }
}

template <typename T, int parts>
inline void multiply_few(const T* const* queries, const T* const* keys, int vectors, int lanes, float* scores) {
  for (; vectors >= 3; vectors -= 3, queries += 3, scores += 3 * kTile) multiply_few<T, parts, 3>(queries, keys, lanes, scores);
  if (vectors == 2) multiply_few<T, parts, 2>(queries, keys, lanes, scores);
  if (vectors == 1) multiply_few<T, parts, 1>(queries, keys, lanes, scores);
}

// scores[count][kTile] = queries[count][width] . columns[width][kTile]
template <int count>
inline void multiply(const float* queries, const float* columns, int width, float* scores) {
  constexpr int parts = kTile / kLanes;
  Vec sums[count][parts] = {};
  for (int d = 0; d < width; d++) {
    Vec keys[parts];
    for (int j = 0; j < parts; j++) keys[j] = load(columns + d * kTile + j * kLanes);
    for (int i = 0; i < count; i++)
      for (int j = 0; j < parts; j++) sums[i][j] += queries[i * width + d] * keys[j];
  }
  for (int i = 0; i < count; i++)
    for (int j = 0; j < parts; j++) store(scores + i * kTile + j * kLanes, sums[i][j]);
}

// sums[count][width] = scale * sums + weights[count][kTile] . values, for `parts` vectors of the width
template <int count, int parts, typename T>
inline void accumulate(
    const float* weights, const float* scale, const T* const* values, int keys, int width, int at, float* sums) {
  Vec total[count][parts];
  for (int i = 0; i < count; i++)
    for (int j = 0; j < parts; j++) total[i][j] = load(sums + i * width + at + j * kLanes) * scale[i];
  for (int t = 0; t < keys; t++) {
    Vec row[parts];
    for (int j = 0; j < parts; j++) row[j] = load(values[t] + at + j * kLanes);
    for (int i = 0; i < count; i++)
      for (int j = 0; j < parts; j++) total[i][j] += weights[i * kTile + t] * row[j];
  }
  for (int i = 0; i < count; i++)
    for (int j = 0; j < parts; j++) store(sums + i * width + at + j * kLanes, total[i][j]);
}

template <int count, typename T>
void accumulate_all(const float* weights, const float* scale, const T* const* values, int keys, int width, float* sums) {
  int at = 0;
  for (; at + 4 * kLanes <= width; at += 4 * kLanes) accumulate<count, 4>(weights, scale, values, keys, width, at, sums);
  for (; at < width; at += kLanes) accumulate<count, 1>(weights, scale, values, keys, width, at, sums);
}

}  // namespace

extern "C" {

// What every layer of a step shares. Addresses are borrowed for the call.
struct Batch {
  int64_t sequences;
  const int32_t* query_starts;  // [sequences + 1]: rows of each sequence's queries, which are its newest tokens
  const int32_t* lengths;       // [sequences]: tokens of each, the new ones included
  const int32_t* tables;        // [sequences, table_stride]: blocks
  int64_t table_stride;
};

// One layer. Strides count elements; the innermost axis is dense.
struct Layer {
  int64_t heads, kv_heads, head_dim, block_size;
  const void* query;  // [rows, heads, head_dim]
  int64_t query_row, query_head;
  const void* key;  // [rows, kv_heads, head_dim], or null: the pool holds the new tokens already
  int64_t key_row, key_head;
  const void* value;
  int64_t value_row, value_head;
  void* pool_keys;  // [blocks, block_size, kv_heads, head_dim], dense
  void* pool_values;
  void* out;       // [rows, heads, head_dim], dense
  int64_t window;  // a query sees this many tokens, itself included; 0: all
  float scale;
  float softcap;  // 0: none
};
}

namespace {

// Offset of a token in a pool, in elements.
inline int64_t place(const Batch& b, const Layer& layer, int64_t sequence, int64_t position) {
  const int64_t block = b.tables[sequence * b.table_stride + position / layer.block_size];
  return (block * layer.block_size + position % layer.block_size) * layer.kv_heads * layer.head_dim;
}

// Offsets of the keys of a tile; lanes past the last repeat it. Returns how many there are.
inline int locate(const Batch& b, const Layer& layer, int64_t sequence, int64_t tile, int64_t end, int64_t* offsets) {
  const int keys = static_cast<int>(std::clamp<int64_t>(end - tile, 0, kTile));
  for (int t = 0; t < keys;) {
    const int64_t left = std::min<int64_t>(keys - t, layer.block_size - (tile + t) % layer.block_size);
    int64_t offset = place(b, layer, sequence, tile + t);
    for (int64_t i = 0; i < left; i++, offset += layer.kv_heads * layer.head_dim) offsets[t++] = offset;
  }
  for (int t = keys; t < kTile && keys; t++) offsets[t] = offsets[keys - 1];
  return keys;
}

template <typename T>
void write_new(const Batch& b, const Layer& layer, int64_t sequence) {
  const int64_t first = b.query_starts[sequence], count = b.query_starts[sequence + 1] - first;
  for (int64_t i = 0; i < count; i++) {
    const int64_t to = place(b, layer, sequence, b.lengths[sequence] - count + i);
    const T* key = static_cast<const T*>(layer.key) + (first + i) * layer.key_row;
    const T* value = static_cast<const T*>(layer.value) + (first + i) * layer.value_row;
    for (int64_t h = 0; h < layer.kv_heads; h++) {
      std::memcpy(static_cast<T*>(layer.pool_keys) + to + h * layer.head_dim, key + h * layer.key_head, layer.head_dim * sizeof(T));
      std::memcpy(static_cast<T*>(layer.pool_values) + to + h * layer.head_dim, value + h * layer.value_head, layer.head_dim * sizeof(T));
    }
  }
}

// Scratch of one thread, for kv heads [first_head, last_head) and `vectors` query vectors each.
struct Scratch {
  std::vector<float> queries, sums, highest, weights, columns, mass, scale;
  std::vector<const void*> addresses;
  void resize(int64_t heads, int64_t vectors, int64_t width) {
    queries.resize(heads * vectors * width);
    sums.assign(heads * vectors * width, 0.0f);
    highest.assign(heads * vectors, kNever);
    mass.assign(heads * vectors, 0.0f);
    weights.resize(vectors * kTile);
    scale.resize(vectors);
    columns.resize(width * kTile);
  }
};

// Queries [from, to) of one sequence (counted from its first new token), for kv heads [first_head, last_head).
template <typename T>
void attend(const Batch& b, const Layer& layer, int64_t sequence, int64_t from, int64_t to, int64_t first_head, int64_t last_head) {
  static thread_local Scratch scratch;
  const int width = static_cast<int>(layer.head_dim);
  const int64_t group = layer.heads / layer.kv_heads, vectors = (to - from) * group;
  const int64_t row = b.query_starts[sequence] + from;
  const int64_t context = b.lengths[sequence] - (b.query_starts[sequence + 1] - b.query_starts[sequence]);
  const int64_t first_query = context + from, end = context + to;  // positions
  const int64_t window = layer.window > 0 ? layer.window : end;
  const int64_t start = std::max<int64_t>(0, first_query + 1 - window);
  scratch.resize(last_head - first_head, vectors, width);

  const bool few = vectors <= kFew && (width == 64 || width == 128);
  scratch.addresses.resize((last_head - first_head) * vectors);
  const T** raw_queries = reinterpret_cast<const T**>(scratch.addresses.data());
  for (int64_t h = first_head; h < last_head; h++)
    for (int64_t v = 0; v < vectors; v++) {
      const int64_t at = (h - first_head) * vectors + v;
      raw_queries[at] = static_cast<const T*>(layer.query) + (row + v / group) * layer.query_row + (h * group + v % group) * layer.query_head;
      for (int d = 0; d < width && !few; d += kLanes) store(scratch.queries.data() + at * width + d, load(raw_queries[at] + d));
    }

  int64_t offsets[kTile], next_offsets[kTile];
  int next_keys = locate(b, layer, sequence, start, end, next_offsets);
  for (int64_t tile = start; tile < end; tile += kTile) {
    const int keys = next_keys;
    std::copy(next_offsets, next_offsets + kTile, offsets);
    next_keys = locate(b, layer, sequence, tile + kTile, end, next_offsets);
    for (int64_t h = first_head; h < last_head; h++) {
      const T* key_rows[kTile];
      const T* value_rows[kTile];
      for (int t = 0; t < kTile; t++) {  // lanes past the last key repeat it and are masked
        key_rows[t] = static_cast<const T*>(layer.pool_keys) + offsets[t] + h * width;
        value_rows[t] = static_cast<const T*>(layer.pool_values) + offsets[t] + h * width;
      }
      for (int t = 0; t < next_keys; t++)
        for (int64_t at = 0; at < width; at += 64 / sizeof(T)) {
          __builtin_prefetch(static_cast<const T*>(layer.pool_keys) + next_offsets[t] + h * width + at, 0, 2);
          __builtin_prefetch(static_cast<const T*>(layer.pool_values) + next_offsets[t] + h * width + at, 0, 2);
        }

      const int64_t base = (h - first_head) * vectors;
      const float* queries = scratch.queries.data() + base * width;
      float* weights = scratch.weights.data();
      int64_t v = 0;
      if (few && width == 64) {
        multiply_few<T, 4>(raw_queries + base, key_rows, static_cast<int>(vectors), keys, weights);
      } else if (few) {
        multiply_few<T, 8>(raw_queries + base, key_rows, static_cast<int>(vectors), keys, weights);
      } else {
        for (int t = 0; t < keys; t += kLanes) transpose(key_rows + t, width, scratch.columns.data() + t);
        for (; v + 6 <= vectors; v += 6) multiply<6>(queries + v * width, scratch.columns.data(), width, weights + v * kTile);
        for (; v + 3 <= vectors; v += 3) multiply<3>(queries + v * width, scratch.columns.data(), width, weights + v * kTile);
        for (; v < vectors; v++) multiply<1>(queries + v * width, scratch.columns.data(), width, weights + v * kTile);
      }

      for (v = 0; v < vectors; v++) {
        const int64_t position = first_query + v / group;
        const int last = static_cast<int>(std::min<int64_t>(keys, position + 1 - tile));          // keys [first, last) are seen
        const int first = static_cast<int>(std::max<int64_t>(0, position + 1 - window - tile));
        Vec scores[kTile / kLanes], high = broadcast(kNever);
        for (int j = 0; j < kTile / kLanes; j++) {
          const IntVec lane = IntVec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + j * kLanes;
          Vec x = load(weights + v * kTile + j * kLanes) * layer.scale;
          if (layer.softcap > 0) x = soft_cap(x, layer.softcap);
          scores[j] = (lane >= first) & (lane < last) ? x : broadcast(kNever);
          high = high < scores[j] ? scores[j] : high;
        }
        const float before = scratch.highest[base + v], now = std::max(before, largest(high));
        const float decay = exp_negative(broadcast(before - now))[0];
        Vec sum = Vec{};
        for (int j = 0; j < kTile / kLanes; j++) {
          const Vec x = scores[j] == kNever ? Vec{} : exp_negative(scores[j] - now);
          store(weights + v * kTile + j * kLanes, x);
          sum += x;
        }
        scratch.highest[base + v] = now;
        scratch.mass[base + v] = scratch.mass[base + v] * decay + total(sum);
        scratch.scale[v] = decay;
      }

      float* sums = scratch.sums.data() + base * width;
      const float* scale = scratch.scale.data();
      for (v = 0; v + 4 <= vectors; v += 4)
        accumulate_all<4>(weights + v * kTile, scale + v, value_rows, keys, width, sums + v * width);
      switch (vectors - v) {
        case 3: accumulate_all<3>(weights + v * kTile, scale + v, value_rows, keys, width, sums + v * width); break;
        case 2: accumulate_all<2>(weights + v * kTile, scale + v, value_rows, keys, width, sums + v * width); break;
        case 1: accumulate_all<1>(weights + v * kTile, scale + v, value_rows, keys, width, sums + v * width); break;
      }
    }
  }

  for (int64_t h = first_head; h < last_head; h++)
    for (int64_t v = 0; v < vectors; v++) {
      T* out = static_cast<T*>(layer.out) + ((row + v / group) * layer.heads + h * group + v % group) * width;
      const int64_t at = (h - first_head) * vectors + v;
      for (int d = 0; d < width; d += kLanes) store(out + d, load(scratch.sums.data() + at * width + d) / scratch.mass[at]);
    }
}

template <typename T>
void run(const Batch& b, const Layer& layer, int threads) {
  if (layer.key)
    for (int64_t s = 0; s < b.sequences; s++) write_new<T>(b, layer, s);
  const int64_t per_unit = std::max<int64_t>(1, kQueryVectors / (layer.heads / layer.kv_heads));  // queries
  std::vector<int64_t> units;  // sequence, first query
  for (int64_t s = 0; s < b.sequences; s++)
    for (int64_t q = 0; q < b.query_starts[s + 1] - b.query_starts[s]; q += per_unit) {
      units.push_back(s);
      units.push_back(q);
    }
  // One thread walks blocks in memory order, all heads at once; several share out heads too.
  const int64_t slices = threads > 1 ? layer.kv_heads : 1, heads = layer.kv_heads / slices;
  const int64_t count = static_cast<int64_t>(units.size()) / 2 * slices;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < count; i++) {
    const int64_t s = units[i / slices * 2], q = units[i / slices * 2 + 1], h = i % slices * heads;
    attend<T>(b, layer, s, q, std::min<int64_t>(q + per_unit, b.query_starts[s + 1] - b.query_starts[s]), h, h + heads);
  }
}

}  // namespace

extern "C" {
void triptych_attend_float32(const Batch* batch, const Layer* layer, int threads) { run<float>(*batch, *layer, threads); }
void triptych_attend_bfloat16(const Batch* batch, const Layer* layer, int threads) { run<BFloat16>(*batch, *layer, threads); }
}
