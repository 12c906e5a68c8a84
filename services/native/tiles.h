// Tiles of bfloat16 on a CPU that multiplies them (AMX): how they are set up, and who may use them.
#pragma once

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define TRIPTYCH_TILES 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <new>

namespace triptych {

constexpr int64_t kSide = 16;             // rows of a tile
constexpr int64_t kStep = 32;             // numbers along the inner axis in a tile
constexpr int64_t kTile = kSide * kStep;  // numbers in a tile

// All eight tiles whole: 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  TileConfig() {
    for (int i = 0; i < 8; i++) row_bytes[i] = 64, rows[i] = kSide;
  }
};

// Whether the system lets this process use tiles; asked once for all its threads.
inline bool tiles_allowed() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// Tiles 0 to 3 become the products of two tiles' height of `a`, rows `a_row` numbers apart, with two runs of `steps` tiles at `b`:
// upper and first, upper and second, lower and first, lower and second. Uses tiles 4 to 7.
template <typename T>
inline void multiply_four(const T* a, int64_t a_row, const uint16_t* b, int64_t steps) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < steps; k++) {
    _tile_loadd(4, a + k * kStep, a_row * 2);
    _tile_loadd(5, a + kSide * a_row + k * kStep, a_row * 2);
    _tile_loadd(6, b + k * kTile, 64);
    _tile_loadd(7, b + (steps + k) * kTile, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Memory that is kept from call to call, at the start of a cache line.
template <typename T>
class Buffer {
 public:
  T* of(int64_t count) {
    if (size_ < count) {
      held_.reset(static_cast<T*>(::operator new[](count * sizeof(T), std::align_val_t(64))));
      size_ = count;
    }
    return held_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  std::unique_ptr<T, Free> held_;
  int64_t size_ = 0;
};

}  // namespace triptych
#endif
