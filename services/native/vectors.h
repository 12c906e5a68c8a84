// Vectors of sixteen floats, which the compiler splits where registers are narrower, and two number types to load them from.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace triptych {

constexpr int kLanes = 16;

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef float VecUnaligned __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UintVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

struct BFloat16 {
  uint16_t bits;
};

inline Vec broadcast(float x) { return x - Vec{}; }
inline Vec load(const float* p) { return *reinterpret_cast<const VecUnaligned*>(p); }
inline Vec load(const BFloat16* p) {
  const UintVec wide = __builtin_convertvector(*reinterpret_cast<const HalfVec*>(p), UintVec) << 16;
  return (Vec)wide;
}
inline void store(float* p, Vec x) { *reinterpret_cast<VecUnaligned*>(p) = x; }
inline void store(BFloat16* p, Vec x) {
  UintVec bits = (UintVec)x;
  bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  bits = x == x ? bits : UintVec{} + 0x7fc0u;           // NaN stays NaN
  *reinterpret_cast<HalfVec*>(p) = __builtin_convertvector(bits, HalfVec);
}

inline float load_one(const float* p) { return *p; }
inline float load_one(const BFloat16* p) {
  const uint32_t wide = static_cast<uint32_t>(p->bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}
inline void store_one(float* p, float x) { *p = x; }
inline void store_one(BFloat16* p, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  p->bits = x == x ? (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16 : 0x7fc0u;
}

// Lane i of the result is the sum over the lanes of sums[i], added up in a fixed order.
inline Vec fold(const Vec* sums) {
  Vec a[8], b[4], c[2];
  for (int i = 0; i < 8; i++) {
    const Vec x = sums[2 * i], y = sums[2 * i + 1];
    a[i] = __builtin_shuffle(x, y, IntVec{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}) +
           __builtin_shuffle(x, y, IntVec{1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31});
  }
  for (int i = 0; i < 4; i++) {
    const Vec x = a[2 * i], y = a[2 * i + 1];
    b[i] = __builtin_shuffle(x, y, IntVec{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}) +
           __builtin_shuffle(x, y, IntVec{2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
  }
  for (int i = 0; i < 2; i++) {
    const Vec x = b[2 * i], y = b[2 * i + 1];
    c[i] = __builtin_shuffle(x, y, IntVec{0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}) +
           __builtin_shuffle(x, y, IntVec{4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31});
  }
  return __builtin_shuffle(c[0], c[1], IntVec{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}) +
         __builtin_shuffle(c[0], c[1], IntVec{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
}

#if defined(__AVX512F__)
// Turns 16 rows of 16 words.
inline void turn(__m512i* r) {
  __m512i t[16], u[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++)
    for (int half = 0; half < 2; half++) {
      u[4 * i + 2 * half] = _mm512_unpacklo_epi64(t[4 * i + half], t[4 * i + 2 + half]);
      u[4 * i + 2 * half + 1] = _mm512_unpackhi_epi64(t[4 * i + half], t[4 * i + 2 + half]);
    }
  for (int i = 0; i < 4; i++) {
    const __m512i p = _mm512_shuffle_i32x4(u[i], u[4 + i], 0x88), q = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0x88);
    const __m512i s = _mm512_shuffle_i32x4(u[i], u[4 + i], 0xdd), v = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0xdd);
    r[i] = _mm512_shuffle_i32x4(p, q, 0x88);
    r[4 + i] = _mm512_shuffle_i32x4(s, v, 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(p, q, 0xdd);
    r[12 + i] = _mm512_shuffle_i32x4(s, v, 0xdd);
  }
}
#endif

}  // namespace triptych
