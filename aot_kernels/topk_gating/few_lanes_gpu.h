// How the lanes of a warp have rows of experts, and where these lie in shared memory.
#pragma once

#include "../common/gpu/divisor.h"
#include "best.h"
#include "lanes_gpu.h"

namespace msops::gating {

constexpr int kMostFew = 8, kMostOfLane = 32, kWarpsOfBlock = kGatingThreads / 32;

// How lanes have the experts of a row.
struct Lanes {
  int experts, k, groups, of_group;  // one group, where all stay
  int log_of_group = 0, log_of_row;  // base 2 of the lanes of a group, and of a row
  int of_lane;                       // experts that a lane has at most, a multiple of kSorted
  bool whole_packs, tiled_by_packs;  // whether packs tile the rows of a warp; and each lane's experts
  Divisor by_k;

  template <typename T>
  explicit Lanes(const Row<T>& all)
      : experts(static_cast<int>(all.experts)),
        k(static_cast<int>(all.s.k)),
        groups(all.s.selects_groups() ? static_cast<int>(all.s.groups) : 1),
        of_group(experts / groups),
        by_k(k) {
    while (of_group > kMostOfLane << log_of_group) ++log_of_group;
    log_of_row = log_of_group;
    while (groups > 1 << (log_of_row - log_of_group)) ++log_of_row;
    const int each = ((of_group - 1) >> log_of_group) + 1;
    of_lane = (each + kSorted - 1) / kSorted * kSorted;
    whole_packs = int64_t{32 >> log_of_row} * experts % kPackWidth<T> == 0 && is_aligned<kPackWidth<T>>(all.logits);
    tiled_by_packs = experts % kPackWidth<T> == 0 && of_group % kPackWidth<T> == 0;
  }
  // Returns whether a warp has a row at least.
  bool fit() const { return log_of_row <= 5; }
  __host__ __device__ int rows() const { return 32 >> log_of_row; }
  __host__ __device__ int numbers() const { return rows() * experts + kSorted; }  // lanes read in whole blocks
};

// Neighbouring numbers in shared memory. Their packs change places in runs of 128 bytes, so that lanes that read packs
// which are 32, 64 or 128 bytes apart reach different banks.
template <typename T>
class Swizzled {
 public:
  static constexpr unsigned kWidth = kPackWidth<T>;

  explicit __device__ Swizzled(void* memory) : numbers_(static_cast<T*>(memory)) {}
  static __host__ __device__ int bytes(int numbers) {
    return (numbers * static_cast<int>(sizeof(T)) + 127) / 128 * 128;
  }
  __device__ T* pack(unsigned i) const { return numbers_ + place(i / kWidth) * kWidth; }
  __device__ T& operator[](unsigned i) const { return pack(i)[i % kWidth]; }

 private:
  static __device__ unsigned place(unsigned pack) { return pack ^ (pack >> 3 & 7); }

  T* numbers_;
};

}  // namespace msops::gating
