// Bytes of pictures to the towers' numbers, each written once. services/encoder/pixel_kernel.py checks it and is its only caller.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct Pictures {  // all of one size; distances are in bytes
  const uint8_t* pixels;
  int64_t count, height, width;
  int64_t picture, row, column, channel;
};

constexpr int kChannels = 3;
constexpr int64_t kLevels = 256;
constexpr int64_t kParallel = 1 << 16;  // pixels from which on a second thread is worth waking

// A patch's side, where it is known to the compiler; 0: it is not.
template <int kPatch>
void patches(const Pictures& in, const float* levels, float* out, int64_t patch, int64_t merge, int64_t depth, int threads) {
  const int64_t side = kPatch ? kPatch : patch, area = side * side, numbers = kChannels * depth * area;
  const int64_t steps = (in.count + depth - 1) / depth, down = in.height / (side * merge), across = in.width / (side * merge);
#pragma omp parallel num_threads(threads) if (in.count * in.height * in.width >= kParallel)
  {
    std::vector<float> made(numbers);  // in the order of out: [channel, picture of the step, row, column]
    float* const __restrict patch_out = made.data();
#pragma omp for
    for (int64_t line = 0; line < steps * down; line++) {
      const int64_t step = line / down, top = line % down * merge;
      float* to = out + line * across * merge * merge * numbers;
      for (int64_t index = 0; index < across * merge * merge; index++, to += numbers) {
        const int64_t y = top + index / merge % merge, x = index / (merge * merge) * merge + index % merge;
        for (int64_t t = 0; t < depth; t++) {
          const int64_t picture = std::min(step * depth + t, in.count - 1);
          const uint8_t* from = in.pixels + picture * in.picture + y * side * in.row + x * side * in.column;
          for (int c = 0; c < kChannels; c++) {
            float* const __restrict place = patch_out + (c * depth + t) * area;
            if (t > 0 && step * depth + t >= in.count) {
              std::memcpy(place, place - area, area * sizeof(float));
              continue;
            }
            for (int64_t i = 0; i < side; i++)
              for (int64_t j = 0; j < side; j++)
                place[i * side + j] = levels[c * kLevels + from[i * in.row + j * in.column + c * in.channel]];
          }
        }
        std::memcpy(to, patch_out, numbers * sizeof(float));
      }
    }
  }
}

}  // namespace

extern "C" {

// out: [ceil(count / depth), height / (patch merge), width / (patch merge), merge, merge, 3, depth, patch, patch]; where pictures do
// not fill the last step the last one is repeated.
void triptych_patches(
    const Pictures* in, const float* levels, float* out, int64_t patch, int64_t merge, int64_t depth, int threads) {
  const auto run = patch == 14 ? patches<14> : patch == 16 ? patches<16> : patches<0>;
  run(*in, levels, out, patch, merge, depth, threads);
}

// out: [count, 3, height, width]
void triptych_planes(const Pictures* in, const float* levels, float* __restrict out, int threads) {
  const int64_t area = in->height * in->width;
#pragma omp parallel for num_threads(threads) if (in->count * area >= kParallel)
  for (int64_t line = 0; line < in->count * in->height; line++) {
    const int64_t picture = line / in->height, y = line % in->height;
    const uint8_t* from = in->pixels + picture * in->picture + y * in->row;
    for (int c = 0; c < kChannels; c++) {
      float* const to = out + (picture * kChannels + c) * area + y * in->width;
      for (int64_t x = 0; x < in->width; x++) to[x] = levels[c * kLevels + from[x * in->column + c * in->channel]];
    }
  }
}
}
