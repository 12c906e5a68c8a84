// What a decoder layer computes between its matrix products and its attention, row by row: no row depends on another.
// layer.py checks it and is its only caller. Values are rounded to the layer's type wherever the model itself does.

#include <cstdint>

#include "functions.h"

namespace {

using namespace triptych;

constexpr int kMostHeadDim = 512;
constexpr int64_t kWorthThreads = 1 << 15;  // numbers from which on several threads are worth waking

struct Norm {
  const void* weights;  // null: there is none
  float epsilon;
  int32_t add_one;
};

enum Activation : int32_t { kSilu, kGeluTanh };

// width, head_dim and inner are multiples of 16.
struct Layer {
  int64_t width, heads, kv_heads, head_dim, inner;
  Norm before, after, query, key;
  int32_t activation;
};

template <typename T>
void normalise(const Norm& norm, const T* x, T* y, int64_t width) {
  triptych::normalise(x, static_cast<const T*>(norm.weights), y, width, norm.epsilon, norm.add_one);
}

template <typename T>
void add_row(const T* residual, T* x, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) store(x + i, load(residual + i) + load(x + i));
}

template <typename T>
void norm(const Layer& layer, const T* x, T* y, int64_t rows, int threads) {
  const int64_t width = layer.width;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * width >= kWorthThreads)
  for (int64_t row = 0; row < rows; row++) normalise(layer.before, x + row * width, y + row * width, width);
}

template <typename T>
void add_norm(const Layer& layer, const T* residual, T* x, T* y, int64_t rows, int threads) {
  const int64_t width = layer.width;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * width >= kWorthThreads)
  for (int64_t row = 0; row < rows; row++) {
    add_row(residual + row * width, x + row * width, width);
    normalise(layer.after, x + row * width, y + row * width, width);
  }
}

template <typename T>
void add(const Layer& layer, const T* residual, T* x, int64_t rows, int threads) {
  const int64_t width = layer.width;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * width >= kWorthThreads)
  for (int64_t row = 0; row < rows; row++) add_row(residual + row * width, x + row * width, width);
}

// The query's heads, then the key's: x * cos + (-second half, first half) * sin.
template <typename T>
void rotate(const Layer& layer, T* x, const T* cos, const T* sin, int64_t factor_row, int64_t rows, int threads) {
  const int64_t width = layer.head_dim, half = width / 2;
  const int64_t row_width = (layer.heads + 2 * layer.kv_heads) * width;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * row_width >= kWorthThreads)
  for (int64_t row = 0; row < rows; row++) {
    float cosines[kMostHeadDim], sines[kMostHeadDim], plain[kMostHeadDim], turned[kMostHeadDim];
    for (int64_t i = 0; i < width; i += kLanes) {
      store(cosines + i, load(cos + row * factor_row + i));
      store(sines + i, load(sin + row * factor_row + i));
    }
    for (int64_t head = 0; head < layer.heads + layer.kv_heads; head++) {
      T* at = x + row * row_width + head * width;
      const Norm& norm = head < layer.heads ? layer.query : layer.key;
      if (norm.weights) normalise(norm, at, at, width);
      for (int64_t i = 0; i < width; i += kLanes) store(plain + i, load(at + i));
      for (int64_t i = 0; i < half; i++) {
        turned[i] = -plain[i + half];
        turned[i + half] = plain[i];
      }
      for (int64_t i = 0; i < width; i += kLanes) {
        const Vec kept = rounded<T>(load(plain + i) * load(cosines + i));
        store(at + i, kept + rounded<T>(load(turned + i) * load(sines + i)));
      }
    }
  }
}

// x / (1 + e^-x)
inline Vec silu(Vec x) {
  const Vec e = exp_negative(x < 0.0f ? x : -x);
  return x * (x < 0.0f ? e : broadcast(1.0f)) / (1.0f + e);
}

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), which is x / (1 + e^-2y) for the tanh of y
inline Vec gelu_tanh(Vec x) {
  const Vec y = 1.5957691216f * (x + 0.044715f * x * x * x);
  const Vec e = exp_negative(y < 0.0f ? y : -y);
  return x * (y < 0.0f ? e : broadcast(1.0f)) / (1.0f + e);
}

// Rows of x are the gate's numbers and then as many to be gated.
template <typename T, Vec (*activation)(Vec)>
void gate(const Layer& layer, const T* x, T* y, int64_t rows, int threads) {
  const int64_t inner = layer.inner;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * inner >= kWorthThreads)
  for (int64_t row = 0; row < rows; row++) {
    const T* from = x + row * 2 * inner;
    for (int64_t i = 0; i < inner; i += kLanes) {
      store(y + row * inner + i, rounded<T>(activation(load(from + i))) * load(from + inner + i));
    }
  }
}

template <typename T>
void gate(const Layer& layer, const T* x, T* y, int64_t rows, int threads) {
  (layer.activation == kSilu ? gate<T, silu> : gate<T, gelu_tanh>)(layer, x, y, rows, threads);
}

}  // namespace

// Rows are dense and of the layer's type. y: results; x is overwritten by residual + x where there is a residual.
#define FOR_BOTH_TYPES(T, NAME)                                                                                      \
  void triptych_layer_norm_##NAME(const Layer* layer, const T* x, T* y, int64_t rows, int threads) {                 \
    norm(*layer, x, y, rows, threads);                                                                               \
  }                                                                                                                  \
  void triptych_layer_rotate_##NAME(                                                                                 \
      const Layer* layer, T* x, const T* cos, const T* sin, int64_t factor_row, int64_t rows, int threads) {         \
    rotate(*layer, x, cos, sin, factor_row, rows, threads);                                                          \
  }                                                                                                                  \
  void triptych_layer_add_norm_##NAME(const Layer* layer, const T* residual, T* x, T* y, int64_t rows, int threads) { \
    add_norm(*layer, residual, x, y, rows, threads);                                                                 \
  }                                                                                                                  \
  void triptych_layer_gate_##NAME(const Layer* layer, const T* x, T* y, int64_t rows, int threads) {                 \
    gate(*layer, x, y, rows, threads);                                                                               \
  }                                                                                                                  \
  void triptych_layer_add_##NAME(const Layer* layer, const T* residual, T* x, int64_t rows, int threads) {           \
    add(*layer, residual, x, rows, threads);                                                                         \
  }

extern "C" {
FOR_BOTH_TYPES(float, float32)
FOR_BOTH_TYPES(BFloat16, bfloat16)
}
