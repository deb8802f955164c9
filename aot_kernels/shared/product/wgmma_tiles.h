// Tiles of float16 that TMA copies to shared memory, and rings of them, for products by wgmma, for sm_90a. A warpgroup
// owns 64 rows of a product.
#pragma once

#include <algorithm>

#include "mma_tiles.h"

#ifdef __CUDACC__

#include "../../common/gpu/barrier.h"
#include "../../common/gpu/mbarrier.h"
#include "../../common/gpu/tma.h"
#include "../../common/gpu/wgmma.h"
#include "../../common/launch.h"

#if CUDART_VERSION >= 12000

namespace msops::product {

// SharedTile is a tile in shared memory, or its rows from one on. It has boxes of 64 columns; a box has kRows rows of
// 128 bytes, with TMA's swizzle.
template <int kRows_, int kWidth>
struct SharedTile {
  using Element = unsigned char;
  static constexpr int kRows = kRows_, kBoxes = kWidth / 64, kRowBytes = 128, kBoxBytes = kRows * kRowBytes;
  static constexpr int kBytes = kBoxes * kBoxBytes;
  unsigned address;

  __device__ __forceinline__ SharedTile rows(int first) const { return {address + first * kRowBytes}; }
  __device__ __forceinline__ SharedTile<kRows, 64> box(int number) const { return {address + number * kBoxBytes}; }

  // Returns the address of a pack of 8 elements of the first box.
  __device__ __forceinline__ unsigned pack(int row, int pack) const {
    return address + row * kRowBytes + (pack ^ row % 8) * 16;
  }
  // Describe 16 columns and 16 rows to wgmma, as factors of a product that sums over them.
  __device__ __forceinline__ uint64_t columns(int step) const {
    return advanced(wgmma_matrix(address), step / 4 * kBoxBytes + step % 4 * 32);
  }
  __device__ __forceinline__ uint64_t transposed_rows(int step) const {
    return advanced(wgmma_transposed(address, kBoxBytes), 16 * step * kRowBytes);
  }

 private:
  // Returns the matrix that begins so many bytes later, by one addition of 32 bits.
  static __device__ __forceinline__ uint64_t advanced(uint64_t matrix, int bytes) {
    return matrix >> 32 << 32 | static_cast<uint32_t>(static_cast<uint32_t>(matrix) + bytes / 16);
  }
};

// SharedArray is an array in shared memory.
template <typename T, int kCount>
struct SharedArray {
  using Element = T;
  static constexpr int kBytes = (kCount * static_cast<int>(sizeof(T)) + 15) / 16 * 16;
  unsigned address;
};

// Stages are tiles, or arrays, that are used in turn.
template <int kStages, typename Tile>
struct Stages {
  static constexpr int kBytes = kStages * Tile::kBytes, kBarrierBytes = 0;
  unsigned data;

  __device__ __forceinline__ Tile tile(unsigned copy) const { return {data + copy % kStages * Tile::kBytes}; }
};

// Ring is a ring of stages with its mbarriers. Copy number c goes to stage c % kStages; it ends the phase c / kStages
// of `full`, and each warp that uses it arrives at `empty`. Copies are unsigned, for which % takes one instruction.
template <int kStages, typename Tile>
struct Ring {
  static constexpr int kBytes = kStages * Tile::kBytes, kBarrierBytes = 16 * kStages;
  unsigned data, barriers;

  __device__ __forceinline__ Tile tile(unsigned copy) const { return {data + copy % kStages * Tile::kBytes}; }
  __device__ __forceinline__ unsigned full(unsigned copy) const { return barriers + copy % kStages * 16; }
  __device__ __forceinline__ unsigned empty(unsigned copy) const { return full(copy) + 8; }
  __device__ __forceinline__ void init(int users, int makers = 1) const {
    for (int i = 0; i < kStages; ++i) mbarrier_init(full(i), makers), mbarrier_init(empty(i), users);
  }
  // Waits for a copy. `zero` is 0, but the compiler does not know that, so that the wait comes after what computes it.
  __device__ __forceinline__ void wait(unsigned copy, int zero = 0) const {
    mbarrier_wait(full(copy), copy / kStages + zero);
  }
  // Waits until the stage of a copy is no longer used.
  __device__ __forceinline__ void wait_for_room(unsigned copy) const {
    if (copy >= kStages) mbarrier_wait(empty(copy), copy / kStages - 1);
  }
  __device__ __forceinline__ void release(unsigned copy) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty(copy));
  }
  // Begins to copy rows of a head to a tile.
  __device__ __forceinline__ void load(unsigned copy, const TensorMap& map, int64_t row, int head, int batch) const {
    wait_for_room(copy);
    mbarrier_arrive_expect_tx(full(copy), Tile::kBytes);
    for (int box = 0; box < Tile::kBoxes; ++box)
      tma_load_5d(tile(copy).box(box).address, full(copy), map, 64 * box, static_cast<int>(row), head, batch, 0);
  }
};

// SharedMemory hands out a block's dynamic shared memory to rings and stages: first their data, then their barriers.
template <typename... Parts>
struct SharedMemory {
  static constexpr int kData = (Parts::kBytes + ...), kBytes = kData + (Parts::kBarrierBytes + ...);
  unsigned char* first;
  unsigned data = shared_address(first), barriers = data + kData;  // what is not handed out

  template <int kStages, typename Tile>
  __device__ __forceinline__ void take(Ring<kStages, Tile>& ring) {
    ring = {data, barriers};
    data += ring.kBytes, barriers += ring.kBarrierBytes;
  }
  template <int kStages, typename Tile>
  __device__ __forceinline__ void take(Stages<kStages, Tile>& stages) {
    stages = {data};
    data += stages.kBytes;
  }
  // Returns where a tile or an array is.
  template <typename Tile>
  __device__ __forceinline__ typename Tile::Element* operator[](const Tile& tile) const {
    return reinterpret_cast<typename Tile::Element*>(first + (tile.address - shared_address(first)));
  }
};

// Transposes the words of kLanes neighbouring lanes, where 4 / kLanes words belong together: lane i gets the i-th of
// each lane, in the order of the lanes.
template <int kLanes>
__device__ __forceinline__ void transpose_words(uint32_t (&words)[4]) {
#pragma unroll
  for (int apart = 1; apart < kLanes; apart *= 2)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int distance = 4 / kLanes * apart;
      if (j & distance) continue;
      const bool upper = threadIdx.x & apart;
      const uint32_t other = __shfl_xor_sync(~0u, upper ? words[j] : words[j + distance], apart);
      if (upper) {
        words[j] = other;
      } else {
        words[j + distance] = other;
      }
    }
}

// Stores a warp's 16 rows of sums times `factor` of a row's half. Threads of a quad first exchange words, so that each
// stores packs of 16 bytes.
template <int kN>
__device__ __forceinline__ void store_aligned(const float (&sums)[kN][4], const float (&factor)[2],
                                              const TileRows<Half>& rows, int begin, int end) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = begin + 8 * half + lane / 4;
    Half* const to = rows[row];
#pragma unroll
    for (int n = 0; n < kN; n += 4) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[j] = pair_of(sums[n + j][2 * half] * factor[half], sums[n + j][2 * half + 1] * factor[half]);
      transpose_words<4>(words);
      const int column = (n + quad) * 8;
      if (row >= end || column >= rows.width) continue;
      Pack<Half, 8> pack;
      memcpy(&pack, words, sizeof pack);
      store_at_once(to + column, pack);
    }
  }
}

// Sets a tile's rows from `inside` on to 0, if they may be anything: rows of other sequences, or those that kv_lengths
// hides. A whole warpgroup calls this; `barrier` is its own.
template <typename Memory, typename Tile>
__device__ __forceinline__ void clear_rows(const Memory& memory, Tile tile, int inside, bool may_be_anything,
                                           int barrier) {
  if (inside >= Tile::kRows || !may_be_anything) return;
  for (int i = threadIdx.x % 128; i < Tile::kBytes / 16; i += 128)
    if (i / 8 % Tile::kRows >= inside) *reinterpret_cast<uint4*>(memory[tile] + i * 16) = make_uint4(0, 0, 0, 0);
  fence_proxy_async();
  bar_sync(barrier, 128);
}

// Returns how many blocks to launch of a kernel that goes through `count` items, or 0 if the GPU lacks its
// instructions.
template <typename S, typename Kernel>
int64_t wgmma_blocks(Kernel kernel, int64_t count) {
  cudaFuncAttributes attributes{};
  const Gpu gpu;
  if (!is_compiled_for(90, kernel) || cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return 0;
  if (attributes.maxThreadsPerBlock < S::kThreads) return 0;  // the code is for sm_90 or later GPUs, not for sm_90a
  if (gpu.shared_bytes < S::kBytes) return 0;                 // the kernels have no further shared arrays
  return std::min<int64_t>(count, gpu.multiprocessors);
}

}  // namespace msops::product

#endif
#endif
