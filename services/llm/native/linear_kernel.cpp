// Products of a few rows with a weight matrix as checkpoints store it, [out, in]: what decoding does all day.
//
// BLAS rearranges the weights at every call, which pays only when many rows share the work. Here a few rows of weights are
// read once, in order, and meet every row of x; sums run along the inner axis, so nothing is rearranged and nothing copied.
// A result depends on its own row of x alone: not on how many others there are. Sums are float32 for either number type.
// services/llm/native/linear.py checks this against torch and is its only caller.

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace {

using namespace triptych;

constexpr int kOuts = 4;  // rows of weights in a block
constexpr int kRows = 4;  // rows of x in a block: 16 running sums, which one folding turns into one vector

template <typename T>
struct Product {
  const T* x;  // [rows, in], rows `x_row` apart
  int64_t x_row;
  const T* weights;  // [outs, in]
  const T* bias;     // [outs] or null
  T* y;              // [rows, outs]
  int64_t rows, in, outs;
};

// y[row .. row + rows, at .. at + outs]; meanwhile the weights [fetch, fetch_end) are brought nearer, `lines` at each step.
template <int outs, int rows, typename T>
inline void block(const Product<T>& p, int64_t at, int64_t row, const T* fetch, const T* fetch_end, int lines) {
  constexpr int line = 64 / sizeof(T);
  const T* weights = p.weights + at * p.in;
  const T* x = p.x + row * p.x_row;
  Vec sums[kOuts * kRows] = {};
  for (int64_t k = 0; k < p.in; k += kLanes) {
    for (int i = 0; i < lines && fetch < fetch_end; i++, fetch += line) __builtin_prefetch(fetch, 0, 2);
    Vec w[outs];
    for (int i = 0; i < outs; i++) w[i] = load(weights + i * p.in + k);
    for (int j = 0; j < rows; j++) {
      const Vec v = load(x + j * p.x_row + k);
      for (int i = 0; i < outs; i++) sums[j * kOuts + i] += w[i] * v;
    }
  }
  const Vec folded = fold(sums);
  for (int j = 0; j < rows; j++)
    for (int i = 0; i < outs; i++)
      store_one(p.y + (row + j) * p.outs + at + i, folded[j * kOuts + i] + (p.bias ? load_one(p.bias + at + i) : 0.0f));
}

template <int outs, typename T>
void all_rows(const Product<T>& p, int64_t at) {
  const int64_t blocks = (p.rows + kRows - 1) / kRows;
  // the next block of weights is fetched in slices while this one is worked on
  const int64_t coming = std::min<int64_t>(kOuts, p.outs - at - outs) * p.in;
  const int64_t slice = (coming / blocks + kLanes) / kLanes * kLanes;
  const int lines = blocks > 1 ? 2 : 4;
  const T* next = p.weights + (at + outs) * p.in;
  for (int64_t row = 0; row < p.rows; row += kRows) {
    const int64_t from = std::min(coming, row / kRows * slice);
    const T *fetch = next + from, *end = next + std::min(coming, from + slice);
    switch (p.rows - row) {
      default: block<outs, kRows, T>(p, at, row, fetch, end, lines); break;
      case 3: block<outs, 3, T>(p, at, row, fetch, end, lines); break;
      case 2: block<outs, 2, T>(p, at, row, fetch, end, lines); break;
      case 1: block<outs, 1, T>(p, at, row, fetch, end, lines); break;
    }
  }
}

template <typename T>
void multiply(const Product<T>& p, int threads) {
  const int64_t whole = p.outs / kOuts;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < whole; i++) all_rows<kOuts>(p, i * kOuts);
  for (int64_t at = whole * kOuts; at < p.outs; at++) all_rows<1>(p, at);
}

}  // namespace

// y = x . weights^T + bias. `in` is a multiple of 16, x's rows are dense within.
extern "C" {
void triptych_linear_float32(
    const float* x, int64_t x_row, const float* weights, const float* bias, float* y, int64_t rows, int64_t in, int64_t outs,
    int threads) {
  multiply(Product<float>{x, x_row, weights, bias, y, rows, in, outs}, threads);
}
void triptych_linear_bfloat16(
    const BFloat16* x, int64_t x_row, const BFloat16* weights, const BFloat16* bias, BFloat16* y, int64_t rows, int64_t in,
    int64_t outs, int threads) {
  multiply(Product<BFloat16>{x, x_row, weights, bias, y, rows, in, outs}, threads);
}
}
