// Attention of bfloat16 rows to one another, none hidden, on a CPU that multiplies tiles (AMX).
//
// A head's keys and values are rearranged once. 32 queries at a time then have all their scores at once, which fit the second
// cache for the lengths of pictures, so that nothing is scaled twice. Scores, weights' sums and results are float32; weights
// are rounded to bfloat16 for the second product, as torch does. attention.py checks this and is its only caller.

#include <cstdint>

#include <algorithm>
#include <cmath>

#include "tiles.h"
#include "vectors.h"

#ifdef TRIPTYCH_TILES
namespace {

using namespace triptych;

constexpr float kLog2E = 1.44269504f;
constexpr int64_t kQueries = 2 * kSide;  // queries of a block

inline int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

extern "C" {
// Rows of one tensor, [heads, rows, width], dense along the width; strides count numbers.
struct TriptychTowerRows {
  const uint16_t* data;
  int64_t head, row;
};
}

namespace {

struct Call {
  TriptychTowerRows query, key, value;
  uint16_t* out;  // [queries, heads, width]
  int64_t heads, queries, keys, width;
  float scale;
  int64_t steps() const { return up(width, kStep) / kStep; }      // tiles along a query
  int64_t columns() const { return up(width, kStep) / kSide; }    // tiles along a result, an even number
  int64_t padded() const { return up(keys, kStep); }
};

// Keys to tiles [16 keys][steps][16 pairs of the width][16 keys][2], values to [columns][pairs of keys][16][2];
// what is not there becomes zeros.
void pack(const Call& call, int64_t head, uint16_t* keys, uint16_t* values) {
  const int64_t steps = call.steps(), padded = call.padded(), width = call.width;
  const uint16_t* key = call.key.data + head * call.key.head;
  const uint16_t* value = call.value.data + head * call.value.head;
  for (int64_t first = 0; first < padded; first += kSide)
    for (int64_t at = 0; at < steps * kStep; at += kStep, keys += kTile) {
      const __mmask32 there = width - at >= kStep ? ~0u : (1u << (width - at)) - 1;
      __m512i r[kSide];
      for (int64_t i = 0, row = first; i < kSide; i++, row++)
        r[i] = row < call.keys ? _mm512_maskz_loadu_epi16(there, key + row * call.key.row + at) : _mm512_setzero_si512();
      turn(r);
      for (int64_t i = 0; i < kSide; i++) _mm512_store_si512(keys + i * kStep, r[i]);
    }
  for (int64_t row = 0; row < padded; row += 2, values += kStep)
    for (int64_t column = 0; column < call.columns(); column++) {
      const int64_t at = column * kSide, left = std::clamp<int64_t>(width - at, 0, kSide);
      const __mmask16 there = (1u << left) - 1;
      const auto load = [&](int64_t i) {
        const __mmask16 mask = i < call.keys ? there : 0;
        return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, value + i * call.value.row + at));
      };
      _mm512_store_si512(values + column * padded * kSide, _mm512_or_si512(load(row), _mm512_slli_epi32(load(row + 1), 16)));
    }
}

// 2^x for x <= 0 to about 5e-6, a hundredth of what bfloat16 holds; -inf to 0.
inline __m512 exp2_negative(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);  // a NaN stays, being the second
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(9.6181291e-3f);
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, whole);
}

// A block's scores to weights before they are divided by their `sums`.
void weigh(const Call& call, float* scores, BFloat16* weights, float* sums) {
  const int64_t padded = call.padded();
  const __m512 factor = _mm512_set1_ps(call.scale * kLog2E);
  for (int64_t row = 0; row < kQueries; row++) {
    float* at = scores + row * padded;
    std::fill(at + call.keys, at + padded, -INFINITY);
    __m512 most[2] = {_mm512_loadu_ps(at), _mm512_loadu_ps(at + kLanes)};
    for (int64_t i = kStep; i < padded; i += kStep) {
      most[0] = _mm512_max_ps(most[0], _mm512_loadu_ps(at + i));
      most[1] = _mm512_max_ps(most[1], _mm512_loadu_ps(at + i + kLanes));
    }
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(_mm512_max_ps(most[0], most[1])) * call.scale * kLog2E);
    __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t i = 0; i < padded; i += kStep) {
      const __m512 low = exp2_negative(_mm512_fmsub_ps(_mm512_loadu_ps(at + i), factor, top));
      const __m512 high = exp2_negative(_mm512_fmsub_ps(_mm512_loadu_ps(at + i + kLanes), factor, top));
      total[0] = _mm512_add_ps(total[0], low);
      total[1] = _mm512_add_ps(total[1], high);
      const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
      _mm512_storeu_si512(weights + row * padded + i, (__m512i)both);
    }
    sums[row] = _mm512_reduce_add_ps(_mm512_add_ps(total[0], total[1]));
  }
}

void attend(const Call& call, int64_t head) {
  static thread_local Buffer<uint16_t> key_buffer, value_buffer, query_buffer;
  static thread_local Buffer<float> score_buffer;
  static thread_local Buffer<BFloat16> weight_buffer;
  const int64_t steps = call.steps(), columns = call.columns(), padded = call.padded(), deep = steps * kStep;
  uint16_t* keys = key_buffer.of(padded * deep);
  uint16_t* values = value_buffer.of(padded * columns * kSide);
  uint16_t* queries = query_buffer.of(kQueries * deep);
  float* scores = score_buffer.of(kQueries * padded);
  BFloat16* weights = weight_buffer.of(kQueries * padded);
  pack(call, head, keys, values);
  std::fill(queries, queries + kQueries * deep, 0);
  alignas(64) float made[4][kSide * kSide];
  float sums[kQueries];
  for (int64_t first = 0; first < call.queries; first += kQueries) {
    const int64_t count = std::min(kQueries, call.queries - first);
    for (int64_t i = 0; i < count; i++) {
      const uint16_t* from = call.query.data + head * call.query.head + (first + i) * call.query.row;
      std::copy(from, from + call.width, queries + i * deep);
    }
    for (int64_t key = 0; key < padded; key += kStep) {
      multiply_four(queries, deep, keys + key / kSide * steps * kTile, steps);
      float* to = scores + key;
      _tile_stored(0, to, padded * 4);
      _tile_stored(1, to + kSide, padded * 4);
      _tile_stored(2, to + kSide * padded, padded * 4);
      _tile_stored(3, to + kSide * padded + kSide, padded * 4);
    }
    weigh(call, scores, weights, sums);
    for (int64_t column = 0; column < columns; column += 2) {
      multiply_four(weights, padded, values + column * padded * kSide, padded / kStep);
      _tile_stored(0, made[0], 64);
      _tile_stored(1, made[1], 64);
      _tile_stored(2, made[2], 64);
      _tile_stored(3, made[3], 64);
      for (int64_t i = 0; i < count; i++) {
        uint16_t* to = call.out + ((first + i) * call.heads + head) * call.width;
        const __m512 share = _mm512_set1_ps(1.0f / sums[i]);
        for (int64_t side = 0; side < 2; side++) {
          const int64_t at = (column + side) * kSide, there = std::min(kSide, call.width - at);
          if (there <= 0) break;
          const __m512 x = _mm512_load_ps(made[i / kSide * 2 + side] + i % kSide * kSide);
          const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(x, share));
          _mm256_mask_storeu_epi16(to + at, (1u << there) - 1, rounded);
        }
      }
    }
  }
}

}  // namespace

extern "C" {
int triptych_tower_attention_allowed() { return tiles_allowed(); }

// out[query, head] = sum of values weighed by softmax(scale * query . key) over all keys; scale is positive, keys at least one.
void triptych_tower_attention(
    const TriptychTowerRows* query, const TriptychTowerRows* key, const TriptychTowerRows* value, void* out, int64_t heads, int64_t queries,
    int64_t keys, int64_t width, float scale, int threads) {
  static const TileConfig config;
  const Call call{*query, *key, *value, static_cast<uint16_t*>(out), heads, queries, keys, width, scale};
#pragma omp parallel num_threads(threads) if (threads > 1 && heads > 1)
  {
    _tile_loadconfig(&config);
#pragma omp for schedule(static)
    for (int64_t head = 0; head < heads; head++) attend(call, head);
    _tile_release();
  }
}
}
#else
extern "C" {
int triptych_tower_attention_allowed() { return 0; }
void triptych_tower_attention(const void*, const void*, const void*, void*, int64_t, int64_t, int64_t, int64_t, float, int) {}
}
#endif
