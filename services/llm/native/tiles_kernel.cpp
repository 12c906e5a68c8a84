// Products of bfloat16 rows with a weight matrix as checkpoints store it, [out, in], on a CPU that multiplies tiles (AMX).
//
// A tile of weights is 16 rows of 32 numbers, loaded from where they lie: nothing is rearranged but the rows of x, which are few.
// The product comes out turned, [out, row], and is turned back 16 by 16. Sums are float32 and run along the inner axis in order.
// A result depends on its own row of x alone: not on how many others there are.
// services/llm/native/linear.py checks this against torch and is its only caller.

#include <cstdint>

#include <algorithm>

#include "tiles.h"
#include "vectors.h"

#ifdef TRIPTYCH_TILES
namespace {

using namespace triptych;

constexpr int64_t kOuts = 2 * kSide;       // rows of weights in a block; a panel has kSide rows of x
constexpr int64_t kMostRows = 32 * kSide;  // rows of x that are rearranged at a time: they stay in the second cache

struct Product {
  const uint16_t* x;  // [rows, in], rows `x_row` apart
  int64_t x_row;
  const uint16_t* weights;  // [outs, in]
  const uint16_t* bias;     // [outs] or null
  uint16_t* y;              // [rows, outs]
  int64_t rows, in, outs;
};

// A panel's 16 rows to tiles [in / 32][16 pairs][16 rows][2]; rows that are not there become zeros.
void pack(const Product& p, int64_t panel, uint16_t* tiles) {
  for (int64_t k = 0; k < p.in; k += kStep, tiles += kTile) {
    __m512i r[kSide];
    for (int64_t i = 0, row = panel * kSide; i < kSide; i++, row++)
      r[i] = row < p.rows ? _mm512_loadu_si512(p.x + row * p.x_row + k) : _mm512_setzero_si512();
    turn(r);
    for (int i = 0; i < kSide; i++) _mm512_store_si512(tiles + i * kStep, r[i]);
  }
}

// Sums [16 outs][16 rows] to y[panel's rows, at .. at + 16], rounded once.
inline void put(const Product& p, const float* sums, int64_t panel, int64_t at) {
  __m512i r[kSide];
  for (int i = 0; i < kSide; i++) r[i] = _mm512_load_si512(sums + i * kSide);
  turn(r);
  __m512 bias = _mm512_setzero_ps();
  if (p.bias) bias = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(p.bias + at))), 16);
  const int64_t rows = std::min<int64_t>(kSide, p.rows - panel * kSide);
  for (int64_t i = 0; i < rows; i++) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps((__m512)r[i], bias));
    _mm256_storeu_si256((__m256i*)(p.y + (panel * kSide + i) * p.outs + at), rounded);
  }
}

// y[all rows, at .. at + 32]; two panels at a time, so that a tile is loaded for two products.
void block(const Product& p, const uint16_t* tiles, int64_t at) {
  const int64_t steps = p.in / kStep, panels = (p.rows + kSide - 1) / kSide, bytes = 2 * p.in;
  const uint16_t* low = p.weights + at * p.in;
  const uint16_t* high = low + kSide * p.in;
  alignas(64) float sums[4][kSide * kSide];
  for (int64_t panel = 0; panel < panels; panel += 2) {
    const uint16_t* here = tiles + panel * steps * kTile;
    if (panel + 1 < panels) {
      multiply_four(low, p.in, here, steps);
      _tile_stored(1, sums[1], 64);
      _tile_stored(3, sums[3], 64);
      put(p, sums[1], panel + 1, at);
      put(p, sums[3], panel + 1, at + kSide);
    } else {
      _tile_zero(0);
      _tile_zero(2);
      for (int64_t k = 0; k < steps; k++) {
        _tile_loadd(4, low + k * kStep, bytes);
        _tile_loadd(5, high + k * kStep, bytes);
        _tile_loadd(6, here + k * kTile, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
      }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(2, sums[2], 64);
    put(p, sums[0], panel, at);
    put(p, sums[2], panel, at + kSide);
  }
}

void multiply(const Product& p, uint16_t* tiles, int threads) {
  static const TileConfig config;
  const int64_t panels = (p.rows + kSide - 1) / kSide, blocks = (p.outs + kOuts - 1) / kOuts;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < panels; panel++) pack(p, panel, tiles + panel * kSide * p.in);
    _tile_loadconfig(&config);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < blocks; i++) block(p, tiles, std::min(i * kOuts, p.outs - kOuts));  // the last may begin earlier
    _tile_release();
  }
}

}  // namespace

extern "C" {
// Whether the system lets this process use tiles; asked once for all its threads.
int triptych_tiles_allowed() {
  return tiles_allowed();
}

// y = x . weights^T + bias. `in` is a multiple of 32, `outs` of 16 and at least 32; x's rows are dense within.
void triptych_linear_tiles(
    const void* x, int64_t x_row, const void* weights, const void* bias, void* y, int64_t rows, int64_t in, int64_t outs,
    int threads) {
  static thread_local Buffer<uint16_t> buffer;
  uint16_t* tiles = buffer.of((std::min(rows, kMostRows) + kSide - 1) / kSide * kSide * in);
  for (int64_t row = 0; row < rows; row += kMostRows) {
    const Product p{
        static_cast<const uint16_t*>(x) + row * x_row, x_row, static_cast<const uint16_t*>(weights),
        static_cast<const uint16_t*>(bias), static_cast<uint16_t*>(y) + row * outs, std::min(kMostRows, rows - row), in, outs};
    multiply(p, tiles, threads);
  }
}
}
#else
extern "C" {
int triptych_tiles_allowed() { return 0; }
void triptych_linear_tiles(const void*, int64_t, const void*, const void*, void*, int64_t, int64_t, int64_t, int) {}
}
#endif
