// Few rows of float16 by tensor cores (mma.sync), for sm_80 and later. The codes of a warp go through shared memory
// once, many bytes in flight, and are widened in registers.
//
// A block computes kRows outputs for up to kTokens tokens, and its warps share the terms: kChunk of them at a time go
// to a warp. The weights are the left operand, so that a token is a column. Tensor cores multiply whole numbers, code -
// zero point, which float16 holds; a group's sum is multiplied by its scale afterwards, in float. What a zero point is
// off a whole number is multiplied by the sum of x. Then the warps' sums are added in order.
#pragma once

#include "widen_pairs.h"

#ifdef __CUDACC__

#include "../common/gpu/cp_async.h"
#include "../common/gpu/mma.h"
#include "../common/launch.h"
#include "../common/pack.h"

namespace msops::weight_quant_matmul {

enum class Format { kFour, kEight, kTable };  // kTable has codes of 4 bits

// A warp multiplies kM times 16 outputs by kN times 8 tokens. Groups of 128, 256, ... terms are multiplied by their
// scale once a chunk; kFine is for those of 32, 64, ..., where each piece has a scale of its own.
template <Format kFormat_, int kM_, int kN_, bool kFine_>
struct FewShape {
  static constexpr Format kFormat = kFormat_;
  static constexpr int kM = kM_, kN = kN_, kRows = 16 * kM, kTokens = 8 * kN, kMostWarps = 8;
  static constexpr bool kFine = kFine_;
  static constexpr int kPiece = 32, kPieces = 4, kChunk = kPieces * kPiece;  // terms: two mma, and a warp's at a time
  static constexpr int kBits = kFormat == Format::kEight ? 8 : 4;
  static constexpr int kBytes = kChunk * kBits / 8, kPitch = kBytes + 16;  // of a row of a stage; no banks conflict
  static constexpr int kStages = kM == 1 && kBits == 4 ? 6 : 4, kStageBytes = kRows * kPitch;
  static constexpr int kScales = kFine ? kPieces : 1;
  static constexpr int kTableBytes = kFormat == Format::kTable ? 1024 : 0;  // of pairs, for each byte

  static constexpr int64_t bytes(int warps) {
    const int sums = kRows * kTokens * 4, ring = kStages * kStageBytes;
    return kTableBytes + warps * (ring > sums ? ring : sums);
  }
};

// FewWarp computes a warp's part of the sums.
template <typename S>
struct FewWarp {
  const Products<Half>& p;
  unsigned char* ring;    // (kStages, kRows, kPitch)
  const uint32_t* pairs;  // (256,): what a byte's two codes stand for
  int64_t output, token;  // the first ones of the block
  unsigned warp, warps;
  int lane = threadIdx.x % 32, quad = threadIdx.x % 4, row = threadIdx.x % 32 / 4;
  float sums[S::kM][S::kN][4] = {};

  // Scales and zero points of rows `row` and `row + 8` of the chunk's groups.
  struct Scales {
    float scale[S::kScales][S::kM][2], zero[S::kScales][S::kM][2];
  };

  __device__ __forceinline__ int64_t term_of(unsigned i) const {
    return static_cast<int64_t>(i * warps + warp) * S::kChunk;
  }

  // Begins to copy the codes of the warp's chunk number i. Bytes after a row become 0.
  __device__ __forceinline__ void begin_copy(unsigned i) const {
    const int64_t first = term_of(i) * S::kBits / 8;
    if (term_of(i) < p.deep) {
      constexpr int kPacks = S::kBytes / 16, kApart = 32 / kPacks;  // kApart: rows that the lanes copy at once
      const int64_t byte = first + lane % kPacks * 16, pitch = p.weights.pitch();
#pragma unroll
      for (int r = 0; r < S::kRows; r += kApart) {
        const int64_t at = output + r + lane / kPacks;
        const bool is_inside = at < p.outputs && byte < pitch;
        cp_async<16>(ring + i % S::kStages * S::kStageBytes + (r + lane / kPacks) * S::kPitch + lane % kPacks * 16,
                     p.weights.data + (is_inside ? at * pitch + byte : 0), is_inside);
      }
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void load(Scales& scales, unsigned i) const {
    const bool has_zero = p.weights.zero.kind != ZeroPoints<Half>::kNone;
    unrolled<S::kScales, S::kM, 2>([&](int j, int m, int half) {
      const int64_t at = output + 16 * m + 8 * half + row, term = term_of(i) + j * S::kPiece;
      const bool is_inside = at < p.outputs && term < p.deep;
      const int64_t place = is_inside ? p.weights.place(at, term) : 0;
      scales.scale[j][m][half] = is_inside ? p.weights.scale[place] : 0;
      scales.zero[j][m][half] = is_inside && has_zero ? p.weights.zero[place] : 0;
    });
  }

  // Loads the chunk's terms of x that the lane multiplies: 8 of each piece, of token `row` of each eight.
  __device__ __forceinline__ void load(uint4 (&x)[S::kN][S::kPieces], unsigned i) const {
    unrolled<S::kN, S::kPieces>([&](int n, int piece) {
      const int64_t at = token + 8 * n + row, term = term_of(i) + piece * S::kPiece + 8 * quad;
      x[n][piece] = uint4{0, 0, 0, 0};
      if (at < p.tokens && term < p.deep) x[n][piece] = *reinterpret_cast<const uint4*>(p.x + at * p.deep + term);
    });
  }

  // Widens the lane's eight codes of a piece and a row to four pairs, less the zero point.
  __device__ __forceinline__ void widen(uint32_t (&words)[4], const unsigned char* codes, uint32_t zeros) const {
    if constexpr (S::kFormat != Format::kTable) {
      widen_pairs<S::kBits>(words, codes, p.weights.are_signed, zeros);
    } else {
      const uint32_t eight = *reinterpret_cast<const uint32_t*>(codes);
      unrolled<4>([&](int j) { words[j] = pairs[eight >> 8 * j & 255]; });
    }
  }

  // Multiplies the pieces of a chunk that share scales, from one on.
  template <int kCount>
  __device__ __forceinline__ void multiply(const unsigned char* stage, const uint4 (&x)[S::kN][S::kPieces], int first,
                                           int64_t term, const float (&scale)[S::kM][2],
                                           const float (&zero)[S::kM][2]) {
    const bool has_rest = p.weights.zero.kind == ZeroPoints<Half>::kFloating;
    const float most = p.weights.are_signed ? 1 << (S::kBits - 1) : 0;
    uint32_t zeros[S::kM][2];
    float rest[S::kM][2], products[S::kM][S::kN][4] = {}, ones[S::kN][4] = {};
    unrolled<S::kM, 2>([&](int m, int half) {
      const PairZero of_row(zero[m][half], most);
      zeros[m][half] = of_row.pair, rest[m][half] = of_row.rest;
    });
#pragma unroll
    for (int piece = first; piece < first + kCount; ++piece) {
      if (term + piece * S::kPiece >= p.deep) break;
      const unsigned char* const codes = stage + row * S::kPitch + (piece * S::kPiece + 8 * quad) * S::kBits / 8;
      uint32_t a[S::kM][2][4];
      unrolled<S::kM, 2>(
          [&](int m, int half) { widen(a[m][half], codes + (16 * m + 8 * half) * S::kPitch, zeros[m][half]); });
#pragma unroll
      for (int n = 0; n < S::kN; ++n) {
        const uint4 w = x[n][piece];
        uint32_t b[4] = {w.x, w.y, w.z, w.w};
        if constexpr (S::kFormat == Format::kFour) {  // a pair has terms k and k + 4
          b[0] = prmt<0x5410>(w.x, w.z), b[1] = prmt<0x7632>(w.x, w.z);
          b[2] = prmt<0x5410>(w.y, w.w), b[3] = prmt<0x7632>(w.y, w.w);
        }
        unrolled<2, S::kM>([&](int step, int m) {
          mma_m16n8k16(products[m][n],
                       {a[m][0][2 * step], a[m][1][2 * step], a[m][0][2 * step + 1], a[m][1][2 * step + 1]},
                       {b[2 * step], b[2 * step + 1]});
        });
        constexpr uint32_t kOnes = 0x3c003c00;
        if (has_rest)
          unrolled<2>(
              [&](int step) { mma_m16n8k16(ones[n], {kOnes, kOnes, kOnes, kOnes}, {b[2 * step], b[2 * step + 1]}); });
      }
    }
    unrolled<S::kM, S::kN, 4>([&](int m, int n, int i) {
      const float product = has_rest ? products[m][n][i] - rest[m][i / 2] * ones[n][i] : products[m][n][i];
      sums[m][n][i] += scale[m][i / 2] * product;
    });
  }

  __device__ __forceinline__ void compute() {
    Scales own, next;
    for (unsigned i = 0; i < S::kStages - 1; ++i) begin_copy(i);
    load(next, 0);
    for (unsigned i = 0; term_of(i) < p.deep; ++i) {
      uint4 x[S::kN][S::kPieces];
      load(x, i);
      own = next;
      load(next, i + 1);  // arrives while this chunk is multiplied
      cp_async_wait<S::kStages - 2>();
      __syncwarp();
      begin_copy(i + S::kStages - 1);
      const unsigned char* const stage = ring + i % S::kStages * S::kStageBytes;
      if constexpr (S::kFine) {
        unrolled<S::kPieces>(
            [&](int piece) { multiply<1>(stage, x, piece, term_of(i), own.scale[piece], own.zero[piece]); });
      } else {
        multiply<S::kPieces>(stage, x, 0, term_of(i), own.scale[0], own.zero[0]);
      }
      __syncwarp();
    }
    cp_async_wait<0>();
  }

  // Leaves the warp's sums in shared memory (kTokens, kRows).
  __device__ __forceinline__ void put(float* to) const {
    unrolled<S::kM, S::kN, 4>([&](int m, int n, int i) {
      to[(8 * n + 2 * quad + i % 2) * S::kRows + 16 * m + i / 2 * 8 + row] = sums[m][n][i];
    });
  }
};

template <typename S>
__device__ __forceinline__ void multiply_few(const Products<Half>& p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if constexpr (S::kFormat == Format::kTable) {
    uint32_t* const pairs = reinterpret_cast<uint32_t*>(shared);
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
      pairs[i] = uint32_t{Half(p.weights.table[i >> 4]).bits} << 16 | Half(p.weights.table[i & 15]).bits;
    __syncthreads();
  }
  unsigned char* const data = shared + S::kTableBytes;
  const int64_t output = static_cast<int64_t>(blockIdx.x) * S::kRows;
  const int64_t token = static_cast<int64_t>(blockIdx.y) * S::kTokens;
  FewWarp<S> of{
      p, data + warp * S::kStages * S::kStageBytes, reinterpret_cast<uint32_t*>(shared), output, token, warp, warps};
  of.compute();
  __syncthreads();
  float* const sums = reinterpret_cast<float*>(data);
  constexpr int kSums = S::kRows * S::kTokens;
  of.put(sums + warp * kSums);
  __syncthreads();
  for (int i = threadIdx.x; i < kSums; i += blockDim.x) {
    float sum = 0;
    for (unsigned w = 0; w < warps; ++w) sum += sums[w * kSums + i];
    const int64_t to = output + i % S::kRows, of_token = token + i / S::kRows;
    if (to < p.outputs && of_token < p.tokens) p.store(of_token, to, sum);
  }
}

template <typename S>
__global__ void __launch_bounds__(32 * S::kMostWarps) few_kernel(const __grid_constant__ Products<Half> p) {
  if (has_instructions_of(80)) multiply_few<S>(p);
}

constexpr int64_t kMostFew = 64;  // more tokens than this are for tiles

template <Format kFormat, int kM, int kN, bool kFine>
bool launch_few(Call& call, const Products<Half>& p) {
  using S = FewShape<kFormat, kM, kN, kFine>;
  const int64_t chunks = (p.deep + S::kChunk - 1) / S::kChunk;
  const int warps = static_cast<int>(std::min<int64_t>(std::max<int64_t>(chunks / 2, 1), S::kMostWarps));
  const auto kernel = few_kernel<S>;
  const Gpu gpu;
  if (!is_compiled_for(80, kernel) || gpu.dynamic_bytes() < S::bytes(warps)) return false;
  const Grid grid((p.outputs + S::kRows - 1) / S::kRows, (p.tokens + S::kTokens - 1) / S::kTokens);
  return launch(call, kernel, grid, 32 * warps, S::bytes(warps), p), true;
}

template <Format kFormat>
bool launch_few(Call& call, const Products<Half>& p) {
  const bool is_fine = kFormat == Format::kTable || (p.weights.groups > 1 && p.weights.group % 128 != 0);
  if constexpr (kFormat == Format::kTable) {
    return p.tokens > 8 ? launch_few<kFormat, 2, 2, true>(call, p) : launch_few<kFormat, 1, 1, true>(call, p);
  } else if (p.tokens > 8) {
    return is_fine ? launch_few<kFormat, 2, 2, true>(call, p) : launch_few<kFormat, 2, 2, false>(call, p);
  } else {
    return is_fine ? launch_few<kFormat, 1, 1, true>(call, p) : launch_few<kFormat, 1, 1, false>(call, p);
  }
}

// Returns false, and launches nothing, if there are many rows, or they are not whole packs, or the GPU lacks the
// instructions.
inline bool multiply_few(Call& call, const Products<Half>& p) {
  const Codes<Half>& w = p.weights;
  if (p.tokens > kMostFew || !p.by_terms || w.groups_rows || p.deep == 0 || p.deep % 32 != 0 || !w.have_rows_at(16) ||
      !is_aligned<8>(p.x) || (w.groups > 1 && w.group % 32 != 0))
    return false;
  if (w.table) return w.bits == 4 && launch_few<Format::kTable>(call, p);
  return w.bits == 4 ? launch_few<Format::kFour>(call, p) : launch_few<Format::kEight>(call, p);
}

}  // namespace msops::weight_quant_matmul

#endif
