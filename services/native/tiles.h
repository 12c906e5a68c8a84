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
