// Few rows of float16 by tensor cores (mma.sync), for sm_80 and later. Codes are read once, as a stream that goes on
// from tile to tile, and are widened in registers.
//
// A block goes through tiles of kRows outputs for all tokens. Its warps share the terms: a chunk of them at a time goes
// to a warp, which copies their codes to a ring of its own in shared memory. The weights are the left operand, so that
// a token is a column. Tensor cores multiply whole numbers, code - zero point, which float16 holds; a group's sum is
// multiplied by its scale afterwards, in float. What a zero point is off a whole number is multiplied by the sum of x.
// Then the warps' sums are added in order.
#pragma once

#include "stream.h"
#include "widen_pairs.h"

#ifdef __CUDACC__

#include "../common/gpu/cp_async.h"
#include "../common/gpu/divisor.h"
#include "../common/gpu/griddepcontrol.h"
#include "../common/gpu/mma.h"
#include "../common/launch.h"
#include "../common/pack.h"

namespace msops::weight_quant_matmul {

enum class Format { kFour, kEight, kTable };  // kTable has codes of 4 bits

// There are kN times 8 tokens. kIsCoarse is for groups of 128, 256, ... terms with scales of float16 and whole zero
// points. Else each piece has a scale of its own, and both may have any value.
template <Format kFormat_, int kN_, bool kIsCoarse_>
struct FewShape {
  static constexpr Format kFormat = kFormat_;
  static constexpr int kN = kN_, kRows = 16, kTokens = 8 * kN, kMostWarps = 8;
  static constexpr bool kIsCoarse = kIsCoarse_;
  static constexpr int kBits = kFormat == Format::kEight ? 8 : 4;
  // A chunk has kBytes of each row. The k-th pack of 16 bytes of a row is stored at position k ^ row % 8.
  static constexpr int kBytes = 128, kStages = 4, kStageBytes = kRows * kBytes;
  static constexpr int kPiece = 32, kChunk = 8 * kBytes / kBits, kPieces = kChunk / kPiece;  // terms; a piece: two mma
  static constexpr int kShare = kIsCoarse ? 4 : 1,
                       kSets = kPieces / kShare;                            // pieces that share scales, and their sets
  static constexpr int kAhead = kN == 1 ? kPieces : 4;                      // pieces whose x is loaded at once
  static constexpr int kSumPitch = kRows + 4, kSums = kTokens * kSumPitch;  // of a warp
  static constexpr int kBlocks = kN == 2 && !kIsCoarse ? 1 : 2;             // of a multiprocessor
  static constexpr int kTableBytes = kFormat == Format::kTable ? 1024 : 0;  // of pairs, for each byte

  // Shared memory has the table, the warps' rings, and two times their sums.
  static constexpr int64_t bytes(int warps) { return kTableBytes + warps * (kStages * kStageBytes + 2 * kSums * 4); }
};

// FewWarp computes a warp's part of the sums.
template <typename S>
class FewWarp {
 public:
  // `groups` divides the number of a set of scales by the sets of a group.
  __device__ __forceinline__ FewWarp(const Products<Half>& p, const Divisor& groups, unsigned char* shared)
      : p_(p), groups_(groups), pairs_(reinterpret_cast<const uint32_t*>(shared)) {
    unsigned char* const rings = shared + S::kTableBytes;
    ring_ = rings + warp_ * S::kStages * S::kStageBytes;
    shared_sums_ = reinterpret_cast<float*>(rings + warps() * S::kStages * S::kStageBytes);
    unrolled<S::kN>([&](int n) {
      const int token = min(8 * n + row_, static_cast<int>(p_.tokens) - 1);
      x_[n] = p_.x + (int64_t{token} * deep() + 8 * quad_);
    });
  }

  __device__ __forceinline__ void compute() {
    Place copied = first(), scaled = first(), own = first();
    for (int i = 0; i < S::kStages - 1; ++i) begin_copy(i, copied);
    int row = (scaled.output + 8 * (lane_ % 2) + row_) * groups();
    Scales ahead[2];
    load(ahead[0], scaled, row), load(ahead[1], scaled, row);
    griddepcontrol_wait();  // for x
    unsigned turn = 0;
    for (int tile = 0; own.output < outputs(); ++tile) {
      const int output = own.output;
      unrolled<S::kN, 4>([&](int n, int i) { sums_[n][i] = 0; });
      while (own.output == output) {
        uint4 x[S::kN][S::kAhead];
        load(x, own.term);
        const Scales scales = ahead[0];
        ahead[0] = ahead[1];
        load(ahead[1], scaled, row);  // two chunks before it is used
        cp_async_wait<S::kStages - 2>();
        __syncwarp();
        begin_copy((turn + S::kStages - 1) % S::kStages, copied);
        const unsigned char* const stage = ring_ + turn % S::kStages * S::kStageBytes;
        unrolled<S::kSets>([&](int set) {
          const int piece = set * S::kShare;
          if (piece > 0 && piece % S::kAhead == 0) load(x, own.term + piece * S::kPiece);
          multiply(stage, piece, scales.scale[set], scales.zero[set], x);
        });
        ++turn;
        advance(own);
      }
      add_warps(tile, output);
    }
    cp_async_wait<0>();
  }

 private:
  static constexpr uint32_t kOnes = 0x3c003c00;  // two times 1

  // A Place is a chunk of a tile: those of a warp in a tile, then those in the block's next tile.
  struct Place {
    int output, term;
  };
  // A lane has what it loaded for row `row`, or row + 8 if its number is odd. It is converted when it is used, so that
  // nothing waits for it before.
  struct Scales {
    uint32_t scale[S::kSets], zero[S::kSets];
  };

  __device__ __forceinline__ int warps() const { return static_cast<int>(blockDim.x / 32); }
  __device__ __forceinline__ int outputs() const { return static_cast<int>(p_.outputs); }
  __device__ __forceinline__ int deep() const { return static_cast<int>(p_.deep); }
  __device__ __forceinline__ int groups() const { return static_cast<int>(p_.weights.groups); }
  __device__ __forceinline__ int outputs_apart() const { return static_cast<int>(gridDim.x) * S::kRows; }

  __device__ __forceinline__ Place first() const {
    return {static_cast<int>(blockIdx.x) * S::kRows, warp_ * S::kChunk};
  }
  // Returns whether the next chunk is of another tile.
  __device__ __forceinline__ bool advance(Place& place) const {
    place.term += warps() * S::kChunk;
    const bool is_other = place.term >= deep();
    if (is_other) place.term = warp_ * S::kChunk, place.output += outputs_apart();
    return is_other;
  }

  // Begins to copy codes, and advances. What is outside of the matrix becomes 0.
  __device__ __forceinline__ void begin_copy(int stage, Place& place) const {
    if (place.output < outputs()) {
      const int pack = lane_ % 8, term = place.term + pack * (128 / S::kBits), pitch = deep() / (8 / S::kBits);
      const int rows = term < deep() ? outputs() - place.output : 0;
      const uint8_t* const from = p_.weights.data + (int64_t{place.output + lane_ / 8} * pitch + term / (8 / S::kBits));
      unsigned char* const to = ring_ + stage * S::kStageBytes;
#pragma unroll
      for (int i = 0; i < S::kRows; i += 4) {
        const int r = i + lane_ / 8;
        const bool is_inside = r < rows;
        cp_async<16>(to + r * S::kBytes + (pack ^ r % 8) * 16, is_inside ? from + int64_t{i} * pitch : p_.weights.data,
                     is_inside);
      }
      advance(place);
    }
    cp_async_commit();
  }

  // Begins to load scales, and advances. The lane's row of scales begins with this number.
  __device__ __forceinline__ void load(Scales& scales, Place& place, int& row) const {
    if (place.output + 8 * (lane_ % 2) + row_ < outputs())
      unrolled<S::kSets>([&](int set) {
        int rest;
        const int group = groups_.divide(place.term / (S::kShare * S::kPiece) + set, &rest);
        const unsigned i = row + min(group, groups() - 1);
        load_scale<S::kIsCoarse>(p_.weights, i, scales.scale[set], scales.zero[set]);
      });
    if (advance(place)) row += outputs_apart() * groups();
  }
  __device__ __forceinline__ PairZero zero_of(uint32_t bits) const {
    const int most = p_.weights.are_signed ? 1 << (S::kBits - 1) : 0;
    const auto kind = p_.weights.zero.kind;
    if (!S::kIsCoarse && kind == ZeroPoints<Half>::kFloating)
      return PairZero(number_of(bits, p_.weights.zero.numbers.are_float), static_cast<float>(most));
    return PairZero(whole_zero_of(kind, bits) + most);
  }

  // Loads the terms of x that the lane multiplies: 8 of each piece, of token `row` of each eight. Where there is no
  // token, it reads the last one, whose products are not stored.
  __device__ __forceinline__ void load(uint4 (&x)[S::kN][S::kAhead], int term) const {
    const bool is_whole = term + S::kAhead * S::kPiece <= deep();
    unrolled<S::kN, S::kAhead>([&](int n, int i) {
      const uint4* const from = reinterpret_cast<const uint4*>(x_[n] + term + i * S::kPiece);
      if (is_whole) x[n][i] = *from;
    });
    if (!is_whole)
      unrolled<S::kN, S::kAhead>([&](int n, int i) {
        const uint4* const from = reinterpret_cast<const uint4*>(x_[n] + term + i * S::kPiece);
        x[n][i] = term + i * S::kPiece < deep() ? *from : uint4{0, 0, 0, 0};
      });
  }

  // Widens the lane's codes of a piece: eight of rows `row` and row + 8, in four pairs.
  __device__ __forceinline__ void widen(uint32_t (&pairs)[2][4], const unsigned char* stage, int piece,
                                        const uint32_t (&zeros)[2]) const {
    const int byte = piece * 4 * S::kBits + quad_ * S::kBits;
    const unsigned char* const codes = stage + row_ * S::kBytes + (byte / 16 ^ row_) * 16 + byte % 16;
    unrolled<2>([&](int half) {
      if constexpr (S::kFormat != Format::kTable) {
        widen_pairs<S::kBits>(pairs[half], codes + half * 8 * S::kBytes, p_.weights.are_signed, zeros[half]);
      } else {
        const uint32_t eight = *reinterpret_cast<const uint32_t*>(codes + half * 8 * S::kBytes);
        unrolled<4>([&](int j) { pairs[half][j] = pairs_[eight >> 8 * j & 255]; });
      }
    });
  }

  // Multiplies the pieces of a chunk that share scales, from one on.
  __device__ __forceinline__ void multiply(const unsigned char* stage, int first, uint32_t scale_bits,
                                           uint32_t zero_bits, const uint4 (&x)[S::kN][S::kAhead]) {
    const bool has_rest = !S::kIsCoarse && p_.weights.zero.kind == ZeroPoints<Half>::kFloating;
    const float own = number_of(scale_bits, !S::kIsCoarse && p_.weights.scale.are_float);
    const PairZero zero = zero_of(zero_bits);
    uint32_t zeros[2];
    float scale[2], rest[2], products[2][S::kN][4] = {}, ones[S::kN][4] = {};  // two sums, which do not wait
    unrolled<2>([&](int half) {
      const int from = lane_ / 4 * 4 + half;
      scale[half] = __shfl_sync(~0u, own, from), zeros[half] = __shfl_sync(~0u, zero.pair, from);
      rest[half] = S::kIsCoarse ? 0 : __shfl_sync(~0u, zero.rest, from);
    });
    unrolled<S::kShare>([&](int i) {
      uint32_t a[2][4];
      widen(a, stage, first + i, zeros);
      unrolled<S::kN>([&](int n) {
        const uint4 w = x[n][(first + i) % S::kAhead];
        uint32_t b[4] = {w.x, w.y, w.z, w.w};
        if constexpr (S::kFormat == Format::kFour) {  // a pair has terms k and k + 4
          b[0] = prmt<0x5410>(w.x, w.z), b[1] = prmt<0x7632>(w.x, w.z);
          b[2] = prmt<0x5410>(w.y, w.w), b[3] = prmt<0x7632>(w.y, w.w);
        }
        unrolled<2>([&](int step) {
          const uint32_t of_step[2] = {b[2 * step], b[2 * step + 1]};
          mma_m16n8k16(products[i % 2][n], {a[0][2 * step], a[1][2 * step], a[0][2 * step + 1], a[1][2 * step + 1]},
                       of_step);
          if (has_rest) mma_m16n8k16(ones[n], {kOnes, kOnes, kOnes, kOnes}, of_step);
        });
      });
    });
    unrolled<S::kN, 4>([&](int n, int i) {
      const float product = S::kShare == 1 ? products[0][n][i] : products[0][n][i] + products[1][n][i];
      sums_[n][i] += scale[i / 2] * (has_rest ? product - rest[i / 2] * ones[n][i] : product);
    });
  }

  // Adds the sums of all warps, and stores the tile. The sums of two tiles are in different memory, so that no warp
  // waits before it writes.
  __device__ __forceinline__ void add_warps(int tile, int output) {
    float* const buffer = shared_sums_ + tile % 2 * warps() * S::kSums;
    unrolled<S::kN, 4>([&](int n, int i) {
      buffer[warp_ * S::kSums + (8 * n + 2 * quad_ + i % 2) * S::kSumPitch + i / 2 * 8 + row_] = sums_[n][i];
    });
    __syncthreads();
    for (int i = threadIdx.x; i < S::kRows * static_cast<int>(p_.tokens); i += blockDim.x) {
      const int token = i / S::kRows, to = output + i % S::kRows;
      if (to >= outputs()) continue;
      float sum = 0;
      for (int w = 0; w < warps(); ++w) sum += buffer[w * S::kSums + token * S::kSumPitch + i % S::kRows];
      p_.store(token, to, sum);
    }
  }

  const int lane_ = threadIdx.x % 32, quad_ = threadIdx.x % 4, row_ = threadIdx.x % 32 / 4, warp_ = threadIdx.x / 32;
  const Products<Half>& p_;
  const Divisor& groups_;
  const uint32_t* const pairs_;  // (256,): what a byte's two codes stand for
  unsigned char* ring_;          // (kStages, kRows, kBytes)
  float* shared_sums_;           // (2, warps, kTokens, kSumPitch)
  const Half* x_[S::kN];
  float sums_[S::kN][4];
};

template <typename S>
__device__ __forceinline__ void multiply_few(const Products<Half>& p, const Divisor& groups) {
  extern __shared__ __align__(1024) unsigned char shared[];
  griddepcontrol_launch_dependents();
  if constexpr (S::kFormat == Format::kTable) {
    uint32_t* const pairs = reinterpret_cast<uint32_t*>(shared);
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
      pairs[i] = uint32_t{Half(p.weights.table[i >> 4]).bits} << 16 | Half(p.weights.table[i & 15]).bits;
    __syncthreads();
  }
  FewWarp<S> warp(p, groups, shared);
  warp.compute();
}

template <typename S>
__global__ void __launch_bounds__(32 * S::kMostWarps, S::kBlocks)
    few_kernel(const __grid_constant__ Products<Half> p, const __grid_constant__ Divisor groups) {
  if (has_instructions_of(80)) multiply_few<S>(p, groups);
}

template <typename S>
int blocks_of_few(const Gpu& gpu, int warps) {
  [[maybe_unused]] static FactOfGpu<S::kMostWarps> facts;
  return facts.get([&] { return blocks_at_once(gpu, few_kernel<S>, 32 * warps, S::bytes(warps)); }, warps - 1);
}

template <Format kFormat, int kN, bool kIsCoarse>
bool launch_few(Call& call, const Products<Half>& p, bool is_programmatic) {
  using S = FewShape<kFormat, kN, kIsCoarse>;
  const int64_t chunks = (p.deep + S::kChunk - 1) / S::kChunk, tiles = (p.outputs + S::kRows - 1) / S::kRows;
  const int warps = static_cast<int>(std::min<int64_t>(chunks, S::kMostWarps));
  const Gpu gpu;
  if (!is_compiled_for(80, few_kernel<S>) || gpu.dynamic_bytes() < S::bytes(warps)) return false;
  const int64_t blocks = std::min<int64_t>(blocks_of_few<S>(gpu, warps), tiles);
  constexpr int64_t kEndless = 1 << 30;  // sets, of a single group
  const Divisor groups(p.weights.groups == 1 ? kEndless : p.weights.group / (S::kShare * S::kPiece));
  const Grid grid = Grid(blocks).programmatic(is_programmatic);
  launch(call, few_kernel<S>, grid, 32 * warps, S::bytes(warps), p, groups);
  return blocks > 0;
}

template <Format kFormat, bool kIsCoarse>
bool launch_few(Call& call, const Products<Half>& p, bool is_programmatic) {
  return p.tokens <= 8 ? launch_few<kFormat, 1, kIsCoarse>(call, p, is_programmatic)
                       : launch_few<kFormat, 2, kIsCoarse>(call, p, is_programmatic);
}

constexpr int64_t kMostFew = 16;  // more tokens than this are for tiles

// Returns false, and launches nothing, if there are many rows, or they are not whole packs, or the GPU lacks the
// instructions. A launch that is programmatic reads codes, scales and zero points before the launch before it has
// ended.
inline bool multiply_few(Call& call, const Products<Half>& p, bool is_programmatic = false) {
  const Codes<Half>& w = p.weights;
  if (p.tokens > kMostFew || !p.by_terms || w.groups_rows || p.deep == 0 || p.deep % 32 != 0 || !w.have_rows_at(16) ||
      !is_aligned<8>(p.x) || (w.groups > 1 && w.group % 32 != 0) || p.deep > INT32_MAX / 2 ||
      p.outputs * w.groups > INT32_MAX / 2)
    return false;
  if (multiply_in_stream(call, p, is_programmatic)) return true;
  if (w.table) return w.bits == 4 && launch_few<Format::kTable, false>(call, p, is_programmatic);
  const bool is_coarse =
      (w.groups == 1 || w.group % 128 == 0) && !w.scale.are_float && w.zero.kind != ZeroPoints<Half>::kFloating;
  if (w.bits == 4)
    return is_coarse ? launch_few<Format::kFour, true>(call, p, is_programmatic)
                     : launch_few<Format::kFour, false>(call, p, is_programmatic);
  return is_coarse ? launch_few<Format::kEight, true>(call, p, is_programmatic)
                   : launch_few<Format::kEight, false>(call, p, is_programmatic);
}

}  // namespace msops::weight_quant_matmul

#endif
