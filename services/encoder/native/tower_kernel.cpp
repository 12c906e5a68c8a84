// What vision towers compute between their matrix products and their attention, each in one pass.
// rotary.py and activation.py check it and are its only callers.

#include <algorithm>
#include <cstdint>

#include "functions.h"

namespace {

using namespace triptych;

constexpr int64_t kWorthThreads = 1 << 15;  // numbers from which on several threads are worth waking
constexpr int64_t kChunk = 1 << 12;         // numbers that a thread takes at a time; a multiple of the lanes

// y[head, row] = x * cos + (-second half, first half) * sin, rounded once. Strides count numbers; y, cos and sin are dense.
template <typename T>
void rotate(
    const T* x, int64_t x_row, int64_t x_head, const float* cos, const float* sin, T* y, int64_t rows, int64_t heads, int64_t width,
    int threads) {
  const int64_t half = width / 2;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * heads * width >= kWorthThreads)
  for (int64_t row = 0; row < rows; row++) {
    const float *c = cos + row * width, *s = sin + row * width;
    for (int64_t head = 0; head < heads; head++) {
      const T* from = x + row * x_row + head * x_head;
      T* to = y + (head * rows + row) * width;
      int64_t i = 0;
      for (; i + kLanes <= half; i += kLanes) {
        const Vec a = load(from + i), b = load(from + half + i);
        store(to + i, a * load(c + i) - b * load(s + i));
        store(to + half + i, b * load(c + half + i) + a * load(s + half + i));
      }
      for (; i < half; i++) {
        const float a = load_one(from + i), b = load_one(from + half + i);
        store_one(to + i, a * c[i] - b * s[i]);
        store_one(to + half + i, b * c[half + i] + a * s[half + i]);
      }
    }
  }
}

// 1 / (1 + e^-x)
inline Vec sigmoid(Vec x) {
  const Vec e = exp_negative(x < 0.0f ? x : -x);
  return (x < 0.0f ? e : broadcast(1.0f)) / (1.0f + e);
}

// x * sigmoid(1.702 x), rounded where the tensor operations round it
template <typename T>
inline Vec quick_gelu(Vec x) {
  return x * rounded<T>(sigmoid(rounded<T>(1.702f * x)));
}

// x / 2 * (1 + tanh(y)) for y = sqrt(2 / pi) * (x + 0.044715 x^3), which is x * sigmoid(2y)
template <typename T>
inline Vec gelu_tanh(Vec x) {
  return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
}

template <typename T, Vec (*function)(Vec)>
void each(const T* x, T* y, int64_t count, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && count >= kWorthThreads)
  for (int64_t start = 0; start < count; start += kChunk) {
    const int64_t stop = std::min(count, start + kChunk);
    int64_t i = start;
    for (; i + kLanes <= stop; i += kLanes) store(y + i, function(load(x + i)));
    if (i == stop) continue;
    T rest[kLanes] = {};  // fewer numbers than lanes
    std::copy(x + i, x + stop, rest);
    store(rest, function(load(rest)));
    std::copy(rest, rest + (stop - i), y + i);
  }
}

}  // namespace

// width is even; count numbers are dense.
#define FOR_BOTH_TYPES(T, NAME)                                                                                            \
  void triptych_tower_rotate_##NAME(                                                                                       \
      const T* x, int64_t x_row, int64_t x_head, const float* cos, const float* sin, T* y, int64_t rows, int64_t heads,    \
      int64_t width, int threads) {                                                                                        \
    rotate(x, x_row, x_head, cos, sin, y, rows, heads, width, threads);                                                    \
  }                                                                                                                        \
  void triptych_tower_quick_gelu_##NAME(const T* x, T* y, int64_t count, int threads) {                                    \
    each<T, quick_gelu<T>>(x, y, count, threads);                                                                          \
  }                                                                                                                        \
  void triptych_tower_gelu_tanh_##NAME(const T* x, T* y, int64_t count, int threads) { each<T, gelu_tanh<T>>(x, y, count, threads); }

extern "C" {
FOR_BOTH_TYPES(float, float32)
FOR_BOTH_TYPES(BFloat16, bfloat16)
}
