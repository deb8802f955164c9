// Copies of chunks of the weight to the ring of a warp (few.h), by TMA or by cp.async.
#pragma once

#include "codes.h"

#ifdef __CUDACC__

#include "../common/gpu/cp_async.h"
#include "../common/gpu/mbarrier.h"
#include "../common/gpu/tma.h"

namespace msops::gguf_matmul {

constexpr int kMostWarps = 16;
constexpr float kUnit = 1.f / (1 << 24);  // codes are widened to so much of them, or to 16 times that

// A chunk's kRows rows begin kPitch bytes apart, up to kBefore bytes before their first one: the 8 rows that a warp
// reads at once are in different banks.
template <typename F, int kBefore, bool kIsAnywhere_, int kStages_>
struct FewShape {
  static constexpr int kRows = 16, kDeep = 256, kChunk = kChunkBytes<F>;
  static constexpr int kPitch = ((kBefore + kChunk + 15) / 16 | 1) * 16, kStageBytes = kRows * kPitch;
  static constexpr int kStages = kStages_, kWarpBytes = kStages * kStageBytes + kRows * kDeep / F::kGroup * 4;
  static constexpr int kBarrierBytes = kMostWarps * kStages * 8;
  static constexpr bool kIsAnywhere = kIsAnywhere_, kHasOddChunks = kChunk % 4 != 0;

  // Makes up for codes that were widened to 16 times as much.
  static __device__ __forceinline__ float factor(int e) { return WideCodes<F>::is_sixteenfold(e) ? 1.f / 16 : 1.f; }
};

// A FewItem is a chunk of a tile of rows.
struct FewItem {
  int tile, chunk;
};

#if CUDART_VERSION >= 12000

// TMA places rows, which must begin at multiples of 16 bytes, and zeros after them. It traps if a box begins elsewhere,
// so that a chunk can begin up to 14 bytes after its place.
template <typename F>
struct TmaCopies {
  using S = FewShape<F, (kChunkBytes<F> % 16 ? 14 : 0), false, (F::kBytes * 8 > 6 * F::kNumbers ? 2 : 3)>;
  const TensorMap& weight;  // (rows, row_bytes / 2)
  const unsigned barriers;

  __device__ __forceinline__ void init(int warp) const {
    if (threadIdx.x % 32 != 0) return;
    for (int stage = 0; stage < S::kStages; ++stage) mbarrier_init(barriers + (warp * S::kStages + stage) * 8, 1);
    fence_mbarrier_init();
  }
  __device__ __forceinline__ void begin(const FewItem& item, bool is_there, unsigned char* to, int barrier) const {
    if (threadIdx.x % 32 != 0 || !is_there) return;
    mbarrier_arrive_expect_tx(barriers + barrier * 8, S::kStageBytes);
    const int first = item.chunk * S::kChunk - begin_of_chunk<F>(item.chunk);
    tma_load_5d(shared_address(to), barriers + barrier * 8, weight, first / 2, item.tile * S::kRows, 0, 0, 0);
  }
  __device__ __forceinline__ void wait(int barrier, int phase) const { mbarrier_wait(barriers + barrier * 8, phase); }
  __device__ __forceinline__ int begin_of(const FewItem& item, int) const { return begin_of_chunk<F>(item.chunk); }
  __device__ __forceinline__ int place_of(const FewItem& item) const { return begin_of(item, 0) % 4; }
};

#endif

// cp.async copies 16 bytes, so that a row begins up to 14 bytes after the place of its first one.
template <typename F>
struct AsyncCopies {
  using S = FewShape<F, 14, true, (F::kBytes * 8 > 6 * F::kNumbers ? 2 : 3)>;
  const Weight& w;
  const bool are_whole, have_words;  // whether rows begin at multiples of 16 bytes, of 4 bytes

  __device__ __forceinline__ explicit AsyncCopies(const Weight& weight)
      : w(weight), are_whole(weight.places() % 16 == 0), have_words(weight.places() % 4 == 0) {}

  __device__ __forceinline__ void init(int) const {}
  __device__ __forceinline__ void begin(const FewItem& item, bool is_there, unsigned char* to, int) const {
    __syncwarp();
    if (is_there) {
      const bool is_whole =
          are_whole && (item.tile + 1) * int64_t{S::kRows} <= w.rows && bytes_of(item.chunk) == S::kChunk;
      is_whole ? copy_whole(item, to) : copy_any(item, to);
    }
    cp_async_commit();
  }
  __device__ __forceinline__ void wait(int, int) const {
    cp_async_wait<S::kStages - 2>();
    __syncwarp();
  }
  // Returns how many bytes after its place in a stage a row begins.
  __device__ __forceinline__ int begin_of(const FewItem& item, int r) const {
    if (are_whole) return begin_of_chunk<F>(item.chunk);
    const auto begin = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(w.data));
    return static_cast<int>((begin + static_cast<uint32_t>(first_of(item, r))) % 16);
  }
  __device__ __forceinline__ int place_of(const FewItem& item) const {
    if (!have_words) return kAnywhere;
    return S::kHasOddChunks && item.chunk % 2 != 0 ? 2 : 0;
  }

 private:
  __device__ __forceinline__ int bytes_of(int chunk) const {
    const int64_t left = w.row_bytes - int64_t{chunk} * S::kChunk;
    return left < S::kChunk ? static_cast<int>(left) : S::kChunk;
  }
  // Returns where a row of an item begins in the weight.
  __device__ __forceinline__ int64_t first_of(const FewItem& item, int r) const {
    const int64_t row = int64_t{item.tile} * S::kRows + r;
    return (row < w.rows ? row : w.rows - 1) * w.row_bytes + int64_t{item.chunk} * S::kChunk;
  }

  __device__ __forceinline__ void copy_whole(const FewItem& item, unsigned char* to) const {
    constexpr int kPieces = (S::kChunk + (S::kChunk % 16 ? 14 : 0) + 15) / 16, kCount = S::kRows * kPieces;
    const int first = item.chunk * S::kChunk / 16 * 16, lane = threadIdx.x % 32;
    const uint8_t* const from = w.data + int64_t{item.tile} * S::kRows * w.row_bytes + first;
#pragma unroll
    for (int j = 0; j < kCount; j += 32) {
      const int r = (j + lane) / kPieces, piece = (j + lane) % kPieces;
      if (j + 32 <= kCount || lane < kCount - j)
        cp_async<16>(to + r * S::kPitch + piece * 16, from + r * w.row_bytes + piece * 16);
    }
  }
  // Rows may begin anywhere. Pieces that are not inside of the weight are copied byte by byte, and zeros follow a row.
  __device__ __forceinline__ void copy_any(const FewItem& item, unsigned char* to) const {
    constexpr int kPieces = (S::kChunk + 14 + 15) / 16;
    const int bytes = bytes_of(item.chunk);
#pragma unroll 1
    for (int j = threadIdx.x % 32; j < S::kRows * kPieces; j += 32) {
      const int r = j / kPieces, at = j % kPieces * 16 - begin_of(item, r);
      const int64_t first = first_of(item, r) + at;
      unsigned char* const into = to + r * S::kPitch + j % kPieces * 16;
      if (first >= 0 && first + 16 <= w.rows * w.row_bytes && (at + 16 <= bytes || bytes == S::kChunk)) {
        cp_async<16>(into, w.data + first);
      } else {
#pragma unroll 1
        for (int i = 0; i < 16; ++i)
          if (at + i >= 0) into[i] = at + i < bytes ? w.data[first + i] : 0;
      }
    }
  }
};

}  // namespace msops::gguf_matmul

#endif
