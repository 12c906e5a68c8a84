// Functions of vectors and of rows that several kernels need.
#pragma once

#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace triptych {

// x as T holds it
template <typename T>
inline Vec rounded(Vec x) {
  T kept[kLanes];
  store(kept, x);
  return load(kept);
}

// e^x for x <= 0 to about 1e-7; below e^-87 the result is 0, NaN stays NaN.
inline Vec exp_negative(Vec x) {
  const IntVec tiny = x < -87.0f;
  x = tiny ? broadcast(-87.0f) : x;
  const Vec shifted = x * 1.44269504f + 12582912.0f;                 // 1.5 * 2^23: rounds to an integer in the low bits
  const Vec n = shifted - 12582912.0f;
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;         // ln 2 in two parts
  Vec p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const IntVec scaled = (IntVec)p + (((IntVec)shifted - 0x4b400000) << 23);
  return tiny ? Vec{} : (Vec)scaled;
}

// RMS norm of a row, in the two ways that models round it: x / rms(x) * w, rounded to T before it is scaled (Llama), or
// x / rms(x) * (1 + w), rounded once (Gemma). width is a multiple of 16; y may be x.
template <typename T>
inline void normalise(const T* x, const T* weights, T* y, int64_t width, float epsilon, int add_one) {
  Vec squares = {};
  for (int64_t i = 0; i < width; i += kLanes) squares += load(x + i) * load(x + i);
  float sum = 0;
  for (int i = 0; i < kLanes; i++) sum += squares[i];
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(width) + epsilon);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec scaled = load(x + i) * factor;
    store(y + i, add_one ? scaled * (1.0f + load(weights + i)) : rounded<T>(scaled) * load(weights + i));
  }
}

}  // namespace triptych
