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

  enum Swizzle { kNoSwizzle = 0, kSwizzle128 = 3 };

  template <typename T, int N>
  bool encode(const T* data, const Dimension (&dimensions)[N], Swizzle swizzle = kSwizzle128) {
    data_ = reinterpret_cast<const char*>(data), item_ = sizeof(T), swizzle_ = swizzle;
    for (int i = 0; i < kRank; ++i) dimensions_[i] = i < N ? dimensions[i] : Dimension{1, 0, 1};
    bool fits = reinterpret_cast<uintptr_t>(data) % 16 == 0;
    for (int i = 0; i < kRank; ++i)
      fits = fits && dimensions_[i].box <= 256 && (i == 0 || dimensions_[i].stride * item_ % 16 == 0);
    const int bytes = dimensions_[0].box * item_;
    return fits && (swizzle ? bytes == 128 : bytes % 16 == 0);
  }
  unsigned place(unsigned address) const { return swizzle_ ? emulator::swizzled_128(address) : address; }

  // Returns how many bytes elements of the first dimension take.
  int64_t bytes_of(int elements) const { return int64_t{elements} * item_; }

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
  Swizzle swizzle_;
  Dimension dimensions_[kRank];
};

}  // namespace msops

namespace emulator {

// Copies a box to a block's shared memory.
inline void load_box(unsigned to, unsigned barrier, const msops::TensorMap& map, const int (&first)[5], unsigned rank) {
  if (to % 128) fail("TMA with an address that is not aligned");
  if (map.bytes_of(first[0]) % 16) fail("TMA of a box that does not begin at a multiple of 16 bytes");
  const int bytes = map.for_box(first, [&](unsigned offset, const char* from, int item) {
    unsigned char* const place = in_block(shared_memory(map.place(to + offset)), rank);
    if (from) std::memcpy(place, from, item);
    if (!from) std::memset(place, 0, item);
  });
  const std::lock_guard<std::mutex> guard(mbarriers());
  mbarrier_at(in_block(shared_memory(barrier), rank))->complete(0, bytes);
}

}  // namespace emulator

namespace msops {

inline void tma_load_5d(unsigned to, unsigned barrier, const TensorMap& map, int x0, int x1, int x2, int x3, int x4) {
  emulator::load_box(to, barrier, map, {x0, x1, x2, x3, x4}, emulator::block->rank);
}
inline void tma_load_5d_multicast(unsigned to, unsigned barrier, const TensorMap& map, int x0, int x1, int x2, int x3,
                                  int x4, uint16_t blocks) {
  for (unsigned block = 0; block < 16; ++block)
    if (blocks >> block & 1) emulator::load_box(to, barrier, map, {x0, x1, x2, x3, x4}, block);
}

}  // namespace msops
