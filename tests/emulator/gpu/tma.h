// TMA in the emulator copies a box at once.
#pragma once

#include "../dtype.h"
#include "instructions.h"
#include "mbarrier.h"

namespace emulator {

// Returns where a byte is stored with the swizzle of 128 bytes: bits 7 to 9 of its address change bits 4 to 6.
inline unsigned swizzled_128(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

}  // namespace emulator

namespace msops {

class alignas(64) TensorMap {
 public:
  struct Dimension {
    int64_t size, stride;  // in elements; the first one's stride is 1
    int box;
  };

  template <typename T, int N>
  bool encode(const T* data, const Dimension (&dimensions)[N]) {
    data_ = reinterpret_cast<const char*>(data), item_ = sizeof(T);
    for (int i = 0; i < kRank; ++i) dimensions_[i] = i < N ? dimensions[i] : Dimension{1, 0, 1};
    return dimensions_[0].box * item_ == 128;
  }

  // Calls f(offset, from) for each element of a box, where `from` is null outside of the array.
  template <typename F>
  int for_box(const int (&first)[5], const F& f) const {
    int64_t count = 1;
    for (const Dimension& d : dimensions_) count *= d.box;
    for (int64_t i = 0; i < count; ++i) {
      int64_t rest = i, offset = 0;
      bool inside = true;
      for (int d = 0; d < kRank; ++d) {
        const int64_t at = first[d] + rest % dimensions_[d].box;
        rest /= dimensions_[d].box;
        inside = inside && 0 <= at && at < dimensions_[d].size;
        offset += at * dimensions_[d].stride;
      }
      f(static_cast<unsigned>(i * item_), inside ? data_ + offset * item_ : nullptr, item_);
    }
    return static_cast<int>(count * item_);
  }

 private:
  static constexpr int kRank = 5;
  const char* data_;
  int item_;
  Dimension dimensions_[kRank];
};

inline void tma_load_5d_multicast(unsigned to, unsigned barrier, const TensorMap& map, int x0, int x1, int x2, int x3,
                                  int x4, uint16_t blocks) {
  if (to % 128) emulator::fail("TMA with an address that is not aligned");
  for (unsigned block = 0; block < emulator::block->cluster->blocks; ++block) {
    if (!(blocks >> block & 1)) continue;
    const int bytes = map.for_box({x0, x1, x2, x3, x4}, [&](unsigned offset, const char* from, int item) {
      unsigned char* const place =
          emulator::in_block(emulator::shared_memory(emulator::swizzled_128(to + offset)), block);
      if (from) std::memcpy(place, from, item);
      if (!from) std::memset(place, 0, item);
    });
    const std::lock_guard<std::mutex> guard(emulator::mbarriers());
    emulator::mbarrier_at(emulator::in_block(emulator::shared_memory(barrier), block))->complete(0, bytes);
  }
}
inline void tma_load_5d(unsigned to, unsigned barrier, const TensorMap& map, int x0, int x1, int x2, int x3, int x4) {
  const unsigned own = emulator::block->rank % emulator::block->cluster->blocks;
  tma_load_5d_multicast(to, barrier, map, x0, x1, x2, x3, x4, static_cast<uint16_t>(1 << own));
}

}  // namespace msops
