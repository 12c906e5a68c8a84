// RMS norm of rows. norm.py checks it and is its only caller.

#include <cstdint>

#include "functions.h"

namespace {

using namespace triptych;

template <typename T>
void normalise_rows(const T* x, int64_t x_row, const T* weights, T* y, int64_t rows, int64_t width, float epsilon, int add_one) {
  for (int64_t row = 0; row < rows; row++) normalise(x + row * x_row, weights, y + row * width, width, epsilon, add_one);
}

}  // namespace

extern "C" {
// width is a multiple of 16; rows of x are dense within and x_row apart.
void triptych_norm_float32(
    const float* x, int64_t x_row, const float* weights, float* y, int64_t rows, int64_t width, float epsilon, int add_one) {
  normalise_rows(x, x_row, weights, y, rows, width, epsilon, add_one);
}
void triptych_norm_bfloat16(
    const BFloat16* x, int64_t x_row, const BFloat16* weights, BFloat16* y, int64_t rows, int64_t width, float epsilon,
    int add_one) {
  normalise_rows(x, x_row, weights, y, rows, width, epsilon, add_one);
}
}
