// Products of few tokens of float16 on tensor cores (mma.sync), for sm_80 and later: the weight is read once, at the
// memory's rate. A block takes 16 rows of the weight, and its warps take chunks of these rows in turn: they copy bytes
// as they lie to shared memory, by 16 bytes where rows allow that, some chunks ahead. Codes become exact float16, and
// are multiplied with x in float32. So a group's sum is
//   scale * sum of (code - kZero) x + offset * sum of x
// where another mma, of ones, sums x. Warps' sums are added in order.
#pragma once

#include "problem.h"

#ifdef __CUDACC__

#include "../common/gpu/cp_async.h"
#include "../common/gpu/mma.h"
#include "../common/gpu/unrolled.h"
#include "../common/launch.h"

namespace msops::gguf_matmul {

// Each warp has kStages chunks of kRows rows, which begin kPitch bytes apart: the 8 rows that a warp reads at once are
// in different banks. `scales` has those of a chunk: (kGroups, kRows, kFields).
template <typename F>
struct FewShape {
  static constexpr int kRows = 16, kDeep = 256, kStages = 3, kMostWarps = 8;
  static constexpr int kChunk = kDeep / F::kNumbers * F::kBytes, kSpan = kChunk + (kChunk % 16 ? 14 : 0);
  static constexpr int kPitch = ((kSpan + 15) / 16 | 1) * 16, kGroups = kDeep / F::kGroup;
  static constexpr int kFields = F::kHasMinima ? 2 : 1, kScales = kGroups * kRows * kFields;
  static constexpr int kTiles = kStages * kRows * kPitch, kBytes = kTiles + 4 * kScales;  // of a warp
};

// Copies of rows are by so many bytes, of which addresses and lengths of rows are multiples.
inline int granule_of(const Weight& w) {
  const auto address = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(w.data)) | static_cast<uint64_t>(w.row_bytes);
  return address % 16 == 0 ? 16 : address % 4 == 0 ? 4 : address % 2 == 0 ? 2 : 1;
}

// Begins to copy a warp's chunk. Each row begins in `to` as many bytes after a multiple of kGranule as it does in
// memory.
template <typename F, int kGranule>
__device__ __forceinline__ void copy_chunk(uint8_t* to, const Weight& w, int64_t row, int64_t first, int bytes) {
  using S = FewShape<F>;
  constexpr int kPieces = (S::kSpan + kGranule - 1) / kGranule;
  const int before = static_cast<int>(first % kGranule), lane = threadIdx.x % 32;
  for (int i = lane; i < S::kRows * kPieces; i += 32) {
    const int r = i / kPieces, at = i % kPieces * kGranule;
    if (at >= before + bytes) continue;
    const int64_t of = row + r < w.rows ? row + r : w.rows - 1;
    const uint8_t* const from = w.data + of * w.row_bytes + (first - before) + at;
    uint8_t* const into = to + r * S::kPitch + at;
    if constexpr (kGranule >= 4) {
      cp_async<kGranule>(into, from);
    } else if constexpr (kGranule == 2) {
      *reinterpret_cast<uint16_t*>(into) = *reinterpret_cast<const uint16_t*>(from);
    } else {
      *into = *from;
    }
  }
}

template <typename F>
__device__ __forceinline__ void copy_chunk(int granule, uint8_t* to, const Weight& w, int64_t row, int64_t first,
                                           int bytes) {
  if (granule == 16) return copy_chunk<F, 16>(to, w, row, first, bytes);
  if (granule == 4) return copy_chunk<F, 4>(to, w, row, first, bytes);
  if (granule == 2) return copy_chunk<F, 2>(to, w, row, first, bytes);
  copy_chunk<F, 1>(to, w, row, first, bytes);
}

// Returns two codes, which are in bits 0 to 7 and 16 to 23, minus kZero, in float16. 0x6400 is 1024, whose unit is 1.
template <typename F>
__device__ __forceinline__ uint32_t halves_of(uint32_t codes) {
  const uint32_t bits = (codes & 0x00ff00ffu) | 0x64006400u;
  constexpr uint32_t kBase = 0x6400u + F::kZero;
  constexpr uint32_t kBases = kBase << 16 | kBase;
  __half2 numbers, bases;
  memcpy(&numbers, &bits, sizeof bits);
  memcpy(&bases, &kBases, sizeof kBases);
  const __half2 difference = __hsub2(numbers, bases);
  uint32_t result;
  memcpy(&result, &difference, sizeof result);
  return result;
}

// Loads four neighbours of x as pairs: the first and the third, the second and the fourth.
__device__ __forceinline__ void load_pairs(uint32_t (&pairs)[2], const Half* from, bool has_packs) {
  uint32_t words[2];
  if (has_packs) {
    const uint2 both = *reinterpret_cast<const uint2*>(from);
    words[0] = both.x, words[1] = both.y;
  } else {
    for (int i = 0; i < 2; ++i) words[i] = from[2 * i].bits | uint32_t{from[2 * i + 1].bits} << 16;
  }
  pairs[0] = (words[0] & 0xffffu) | words[1] << 16;
  pairs[1] = words[0] >> 16 | (words[1] & 0xffff0000u);
}

// Multiplies 32 numbers from e on of a warp's 16 rows with 8 kN tokens. Lane `lane` takes numbers 4 (lane % 4) to + 3,
// and the same 16 later, of rows lane / 4 and + 8, and of token lane / 4.
template <typename F, int kN>
__device__ __forceinline__ void multiply_32(float (&sums)[kN][4], const uint8_t* rows, const float* scales, int e,
                                            const Half* const (&x)[kN], bool has_packs) {
  using S = FewShape<F>;
  const int lane = threadIdx.x % 32, at = lane % 4 * 4, row = lane / 4;
  const uint8_t* const block = rows + row * S::kPitch + e / F::kNumbers * F::kBytes;
  uint32_t pairs[kN][2][2];
  unrolled<kN, 2>([&](int n, int half) {
    pairs[n][half][0] = pairs[n][half][1] = 0;
    if (x[n]) load_pairs(pairs[n][half], x[n] + e + 16 * half + at, has_packs);
  });
  float products[kN][4] = {}, totals[kN][4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t codes =
          F::template codes<uint32_t, true>(block + i * 8 * S::kPitch, e % F::kNumbers + 16 * half + at);
      a[i] = halves_of<F>(codes), a[2 + i] = halves_of<F>(codes >> 8);
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      mma_m16n8k16(products[n], a, pairs[n][half]);
      if constexpr (F::kHasMinima)  // by a matrix of ones
        mma_m16n8k16(totals[n], {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u}, pairs[n][half]);
    }
    if (F::kGroup == 32 && half == 0) continue;
    const float* const of = scales + ((e + 16 * half) / F::kGroup * S::kRows + row) * S::kFields;
    unrolled<kN, 4>([&](int n, int i) {
      const float* const own = of + i / 2 * 8 * S::kFields;
      sums[n][i] += own[0] * products[n][i];
      if constexpr (F::kHasMinima) sums[n][i] += own[1] * totals[n][i];
      products[n][i] = totals[n][i] = 0;
    });
  }
}

template <typename F, int kN>
__device__ __forceinline__ void multiply_few(const Products<Half>& p, int granule, bool has_packs) {
  using S = FewShape<F>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  uint8_t* const stages = shared + warp * S::kBytes;
  float* const scales = reinterpret_cast<float*>(stages + S::kTiles);
  const int64_t row = int64_t{blockIdx.x} * S::kRows, token = int64_t{blockIdx.y} * 8 * kN;
  const int64_t chunks = (p.deep() + S::kDeep - 1) / S::kDeep;
  const auto numbers_in = [&](int64_t chunk) {
    const int64_t left = p.deep() - chunk * S::kDeep;
    return left < S::kDeep ? static_cast<int>(left) : S::kDeep;
  };
  const auto begin_copy = [&](int64_t chunk, int stage) {
    if (chunk < chunks)
      copy_chunk<F>(granule, stages + stage * S::kRows * S::kPitch, p.weight, row, chunk * S::kChunk,
                    numbers_in(chunk) / F::kNumbers * F::kBytes);
    cp_async_commit();
  };
  float sums[kN][4] = {};
  for (int stage = 0; stage < S::kStages - 1; ++stage) begin_copy(warp + stage * warps, stage);
  int stage = 0;
  for (int64_t chunk = warp; chunk < chunks; chunk += warps) {
    begin_copy(chunk + (S::kStages - 1) * warps, (stage + S::kStages - 1) % S::kStages);
    cp_async_wait<S::kStages - 1>();
    __syncwarp();
    const uint8_t* const rows = stages + stage * S::kRows * S::kPitch + chunk * S::kChunk % granule;
    const int numbers = numbers_in(chunk);
    for (int i = lane; i < numbers / F::kGroup * S::kRows; i += 32) {
      const int e = i / S::kRows * F::kGroup;
      const uint8_t* const block = rows + i % S::kRows * S::kPitch + e / F::kNumbers * F::kBytes;
      const gguf::Scale s = F::scale(block, e % F::kNumbers);
      scales[i * S::kFields] = s.scale;
      if constexpr (F::kHasMinima) scales[i * S::kFields + 1] = s.offset;
    }
    __syncwarp();
    const Half* x[kN];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int64_t own = token + 8 * n + lane / 4;
      x[n] = own < p.tokens ? p.x + own * p.deep() + chunk * S::kDeep : nullptr;
    }
#pragma unroll(kN == 1 ? 8 : 2)
    for (int e = 0; e < S::kDeep; e += 32) {
      if (e >= numbers) break;
      multiply_32<F>(sums, rows, scales, e, x, has_packs);
    }
    __syncwarp();
    stage = (stage + 1) % S::kStages;
  }
  float* const own = reinterpret_cast<float*>(stages);  // (8 kN tokens, kRows)
  unrolled<kN, 4>(
      [&](int n, int i) { own[(8 * n + lane % 4 * 2 + i % 2) * S::kRows + lane / 4 + i / 2 * 8] = sums[n][i]; });
  __syncthreads();
  for (int i = threadIdx.x; i < 8 * kN * S::kRows; i += blockDim.x) {
    const int64_t to_token = token + i / S::kRows, to_row = row + i % S::kRows;
    if (to_token >= p.tokens || to_row >= p.columns()) continue;
    float sum = p.bias[to_row];
    for (int w = 0; w < warps; ++w) sum += reinterpret_cast<const float*>(shared + w * S::kBytes)[i];
    assign(p.out[to_token * p.columns() + to_row], sum);
  }
}

template <typename F, int kN>
__global__ void __launch_bounds__(32 * FewShape<F>::kMostWarps)
    few_kernel(const __grid_constant__ Products<Half> p, int granule, bool has_packs) {
  if (has_instructions_of(80)) multiply_few<F, kN>(p, granule, has_packs);
}

constexpr int64_t kMostFew = 64;  // tokens

// Returns false, and launches nothing, if the GPU lacks the instructions.
template <typename F>
bool multiply_few(Call& call, const Products<Half>& p) {
  using S = FewShape<F>;
  const auto launch_for = [&](auto eights) {
    constexpr int kN = eights;
    const auto kernel = few_kernel<F, kN>;
    if (!is_compiled_for(80, kernel)) return false;
    const int64_t chunks = (p.deep() + S::kDeep - 1) / S::kDeep, room = Gpu().dynamic_bytes() / S::kBytes;
    const int64_t warps = std::max<int64_t>(1, std::min<int64_t>({chunks, room, S::kMostWarps}));
    const Grid grid((p.columns() + S::kRows - 1) / S::kRows, (p.tokens + 8 * kN - 1) / (8 * kN));
    launch(call, kernel, grid, static_cast<unsigned>(32 * warps), warps * S::kBytes, p, granule_of(p.weight),
           reinterpret_cast<uintptr_t>(p.x) % 8 == 0);
    return true;
  };
  if (p.tokens <= 8) return launch_for(Constant<1>{});
  return p.tokens <= 16 ? launch_for(Constant<2>{}) : launch_for(Constant<4>{});
}

}  // namespace msops::gguf_matmul

#endif
