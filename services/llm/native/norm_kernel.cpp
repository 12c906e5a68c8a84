// RMS norm of rows, in the two ways that models round it. services/llm/norm.py checks it and is its only caller.

#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace {

using namespace triptych;

// y = x / rms(x) * w, rounded to T before it is scaled (Llama), or y = x / rms(x) * (1 + w), rounded once (Gemma)
template <typename T>
void normalise(const T* x, int64_t x_row, const T* weights, T* y, int64_t rows, int64_t width, float epsilon, int add_one) {
  for (int64_t row = 0; row < rows; row++, x += x_row, y += width) {
    Vec squares = {};
    for (int64_t i = 0; i < width; i += kLanes) squares += load(x + i) * load(x + i);
    float sum = 0;
    for (int i = 0; i < kLanes; i++) sum += squares[i];
    const float factor = 1.0f / std::sqrt(sum / static_cast<float>(width) + epsilon);
    for (int64_t i = 0; i < width; i += kLanes) {
      const Vec scaled = load(x + i) * factor;
      if (add_one) {
        store(y + i, scaled * (1.0f + load(weights + i)));
      } else {
        T rounded[kLanes];
        store(rounded, scaled);
        store(y + i, load(rounded) * load(weights + i));
      }
    }
  }
}

}  // namespace

extern "C" {
// width is a multiple of 16; rows of x are dense within and x_row apart.
void triptych_norm_float32(
    const float* x, int64_t x_row, const float* weights, float* y, int64_t rows, int64_t width, float epsilon, int add_one) {
  normalise(x, x_row, weights, y, rows, width, epsilon, add_one);
}
void triptych_norm_bfloat16(
    const BFloat16* x, int64_t x_row, const BFloat16* weights, BFloat16* y, int64_t rows, int64_t width, float epsilon,
    int add_one) {
  normalise(x, x_row, weights, y, rows, width, epsilon, add_one);
}
}
