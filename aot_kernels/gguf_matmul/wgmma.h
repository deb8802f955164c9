// Products of many tokens of float16 by wgmma on sm_90a, where rows of x and of the weight begin at multiples of 16
// bytes. Tiles are of the transposed result: outputs x tokens.
//
// A block goes through tiles. One thread of the first warpgroup copies blocks as they lie, and x, by TMA into rings.
// Each of the two other warpgroups computes 64 outputs of a tile: it widens their codes to float16 in registers, as the
// left factor, while its product before that is computed.
#pragma once

#include "../shared/product/mma_sides.h"
#include "../shared/product/wgmma_tiles.h"
#include "codes.h"

#ifdef __CUDACC__

namespace msops::gguf_matmul {

#if CUDART_VERSION >= 12000

template <typename F_, int kTokens_>
struct WgmmaShape {
  using F = F_;
  static constexpr int kTokens = kTokens_, kConsumers = 2, kRows = 64 * kConsumers;  // of a tile
  static constexpr int kDeep = 64, kSteps = 4, kChunkDeep = kSteps * kDeep;  // terms of a stage of x, of one of blocks
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // TMA begins to read at multiples of 16 bytes only, so that a chunk can begin up to 14 bytes after its place.
  static constexpr int kChunk = kChunkBytes<F>, kPitch = ((kChunk + (kChunk % 16 ? 14 : 0) + 15) / 16 | 1) * 16;
  // Warps have scales of 16 rows, and warpgroups transpose 64 outputs of 64 tokens.
  static constexpr int kGroups = kChunkDeep / F::kGroup, kScaleBytes = kGroups * 16 * 8;
  static constexpr int kOutPitch = 2 * 64 + 16, kOutBytes = 64 * kOutPitch;
  using X = product::Ring<4, product::SharedTile<kTokens, kDeep>>;
  using Blocks = product::Ring<2, product::SharedArray<unsigned char, kRows * kPitch>>;
  using ScalesOfWarps = product::Stages<4 * kConsumers, product::SharedArray<unsigned char, kScaleBytes>>;
  using Out = product::Stages<kConsumers, product::SharedArray<unsigned char, kOutBytes>>;
  using Memory = product::SharedMemory<X, Blocks, ScalesOfWarps, Out>;
  static constexpr int kBytes = Memory::kBytes;
  static constexpr int kBlocks = kTokens == 64 && kBytes <= 113 * 1024 ? 2 : 1;  // of a multiprocessor
  static constexpr int kProducerRegisters = kBlocks == 2 ? 24 : 40, kRegisters = kBlocks == 2 ? 104 : 232;
};

template <typename S>
struct WgmmaTiles {
  const Products<Half>& p;

  MSOPS_BOTH int64_t down() const { return (p.tokens + S::kTokens - 1) / S::kTokens; }
  MSOPS_BOTH int64_t count() const { return down() * ((p.columns() + S::kRows - 1) / S::kRows); }
  MSOPS_BOTH int chunks() const { return static_cast<int>((p.deep() + S::kChunkDeep - 1) / S::kChunkDeep); }
  // Neighbouring tiles share rows of the weight.
  __device__ __forceinline__ int token(int64_t tile) const { return static_cast<int>(tile % down()) * S::kTokens; }
  __device__ __forceinline__ int output(int64_t tile) const { return static_cast<int>(tile / down()) * S::kRows; }
};

template <typename S>
struct WgmmaMemory {
  typename S::Memory memory;
  typename S::X x;
  typename S::Blocks blocks;
  typename S::ScalesOfWarps scales;
  typename S::Out out;

  __device__ __forceinline__ explicit WgmmaMemory(unsigned char* shared) : memory{shared} {
    memory.take(x), memory.take(blocks), memory.take(scales), memory.take(out);
  }
};

// Begins all copies. One thread calls this.
template <typename S>
__device__ __forceinline__ void copy_tiles(const Products<Half>& p, const WgmmaMemory<S>& m, const TensorMap& x,
                                           const TensorMap& weight) {
  const WgmmaTiles<S> tiles{p};
  const int64_t count = tiles.count();
  const int chunks = tiles.chunks();
  unsigned copy = 0;
  for (int64_t tile = blockIdx.x; tile < count; tile += gridDim.x) {
    const int token = tiles.token(tile), output = tiles.output(tile);
    for (int chunk = 0; chunk < chunks; ++chunk, ++copy) {
      m.blocks.wait_for_room(copy);
      mbarrier_arrive_expect_tx(m.blocks.full(copy), S::kRows * S::kPitch);
      const int first = chunk * S::kChunk - begin_of_chunk<typename S::F>(chunk);
      tma_load_5d(m.blocks.tile(copy).address, m.blocks.full(copy), weight, first / 2, output, 0, 0, 0);
      for (int step = 0; step < S::kSteps; ++step) {
        const unsigned stage = copy * S::kSteps + step;
        m.x.wait_for_room(stage);
        mbarrier_arrive_expect_tx(m.x.full(stage), S::kTokens * S::kDeep * 2);
        tma_load_5d(m.x.tile(stage).address, m.x.full(stage), x, chunk * S::kChunkDeep + step * S::kDeep, token, 0, 0,
                    0);
      }
    }
  }
}

// WgmmaWarp is a warp of a warpgroup that computes tiles. It owns 16 rows of the weight.
template <typename S>
struct WgmmaWarp {
  using F = typename S::F;
  const Products<Half>& p;
  const WgmmaMemory<S>& m;
  const int consumer, warp = 4 * consumer + threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32, quad = lane % 4, row = lane / 4;
  float4* const scales = reinterpret_cast<float4*>(m.memory[m.scales.tile(warp)]);  // (kGroups / 2, 16)
  float sums[S::kTokens / 8][4];
  uint32_t numbers[2][S::kSteps][4];  // of two stages, as wgmma takes them

  // A code is a byte in a float beside kBase. So scale * (kBase + code) + rest is the number.
  static constexpr bool kIsByte = std::is_same<F, gguf::Q8_0>::value;
  static constexpr float kBase = kIsByte ? 32768 : 128;
  template <int kByte>
  static __device__ __forceinline__ float based(uint32_t codes) {
    if constexpr (kIsByte) return __uint_as_float(prmt<0x7504 | kByte << 4>(codes, 0x47000000u));
    return __uint_as_float(prmt<0x7044 | kByte << 8>(codes, 0x43000000u));
  }

  // Waits for a chunk, and decodes its scales. A lane has half of a row.
  __device__ __forceinline__ void open_chunk(unsigned copy, int chunk) {
    m.blocks.wait(copy);
    const int r = lane % 16, half = lane / 16;
    constexpr int kCount = Scales<F>::kCount;
    constexpr int kPlace = S::kChunk % 4 ? kAnywhere : 0;
    const Scales<F> own = decode<F, kPlace>(rows_of(copy, chunk) + r * S::kPitch, half, [](int) { return 1.f; });
    float rest[kCount];
    unrolled<kCount>([&](int i) {
      rest[i] = F::kHasMinima ? own.offset[i] - kBase * own.scale[i] : -(kBase + F::kZero) * own.scale[i];
    });
    __syncwarp();
    unrolled<kCount / 2>([&](int i) {
      scales[(half * (kCount / 2) + i) * 16 + r] =
          make_float4(own.scale[2 * i], rest[2 * i], own.scale[2 * i + 1], rest[2 * i + 1]);
    });
    __syncwarp();
  }
  __device__ __forceinline__ const unsigned char* rows_of(unsigned copy, int chunk) const {
    return m.memory[m.blocks.tile(copy)] + 16 * warp * S::kPitch + begin_of_chunk<F>(chunk);
  }

  // Widens the codes of a stage of a chunk.
  __device__ __forceinline__ void widen(unsigned copy, int chunk, int step) {
    constexpr int kPairs = S::kDeep / F::kGroup / 2;  // of groups
    const unsigned char* const rows = rows_of(copy, chunk) + row * S::kPitch + 2 * quad;
    unrolled<2, kPairs>([&](int half, int pair) {
      const float4 own = scales[(step * kPairs + pair) * 16 + row + 8 * half];
      unrolled<S::kSteps / kPairs>([&](int i) {
        const int k = pair * (S::kSteps / kPairs) + i;
        const bool is_second = i >= S::kSteps / kPairs / 2;
        const float scale = is_second ? own.z : own.x, rest = is_second ? own.w : own.y;
        const uint32_t codes = spread_codes<F>(rows + 8 * half * S::kPitch, step * S::kDeep + 16 * k);
        uint32_t (&to)[4] = numbers[step % 2][k];
        to[half] = product::pair_of(fmaf(scale, based<0>(codes), rest), fmaf(scale, based<1>(codes), rest));
        to[2 + half] = product::pair_of(fmaf(scale, based<2>(codes), rest), fmaf(scale, based<3>(codes), rest));
      });
    });
  }

  __device__ __forceinline__ void compute_tiles() {
    const WgmmaTiles<S> tiles{p};
    const int64_t count = tiles.count();
    const int chunks = tiles.chunks();
    unsigned copy = 0;
    open_chunk(copy, 0), widen(copy, 0, 0);
    for (int64_t tile = blockIdx.x; tile < count; tile += gridDim.x) {
      for (int chunk = 0; chunk < chunks; ++chunk, ++copy) {
        const bool is_last = chunk + 1 == chunks && tile + gridDim.x >= count;
        const int next = chunk + 1 < chunks ? chunk + 1 : 0;
#pragma unroll
        for (int step = 0; step < S::kSteps; ++step) {
          const unsigned stage = copy * S::kSteps + step;
          m.x.wait(stage);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < S::kSteps; ++k)
            wgmma_k16<0>(sums, numbers[step % 2][k], m.x.tile(stage).columns(k), chunk > 0 || step > 0 || k > 0);
          wgmma_commit_group();
          wgmma_wait_group<1>();
          if (chunk > 0 || step > 0) m.x.release(stage - 1);
          if (step + 1 < S::kSteps) {
            widen(copy, chunk, step + 1);
          } else {
            m.blocks.release(copy);
            if (!is_last) open_chunk(copy + 1, next), widen(copy + 1, next, 0);
          }
        }
      }
      wgmma_wait_group<0>();
      wgmma_fence_operand(sums);
      m.x.release(copy * S::kSteps - 1);
      store_tile(tiles.token(tile), tiles.output(tile) + 64 * consumer);
    }
  }

  // Stores 64 outputs of the tile's tokens, 64 tokens at a time, which the warpgroup transposes in shared memory.
  __device__ __forceinline__ void store_tile(int token, int output) const {
    constexpr int kPart = 64;
    unsigned char* const to = m.memory[m.out.tile(consumer)];  // (kPart, 64)
    const int first = 16 * (warp % 4) + row;
    float bias[2];
    unrolled<2>([&](int half) {
      const int own = output + first + 8 * half;
      bias[half] = own < p.columns() ? p.bias[own] : 0;
    });
    const bool has_packs = reinterpret_cast<uintptr_t>(p.out) % 16 == 0 && p.columns() % 8 == 0;
#pragma unroll
    for (int part = 0; part < S::kTokens; part += kPart) {
      if (token + part >= p.tokens) break;
      bar_sync(1 + consumer, 128);
      unrolled<kPart / 8, 2, 2>([&](int n, int half, int i) {
        const float sum = sums[part / 8 + n][2 * half + i] + bias[half];
        *reinterpret_cast<Half*>(to + (8 * n + 2 * quad + i) * S::kOutPitch + 2 * (first + 8 * half)) = Half(sum);
      });
      bar_sync(1 + consumer, 128);
      unrolled<kPart * 8 / 128>([&](int i) {
        const int place = threadIdx.x % 128 + 128 * i, of = token + part + place / 8, at = output + place % 8 * 8;
        if (of >= p.tokens || at >= p.columns()) return;
        const auto pack = load<8>(reinterpret_cast<const Half*>(to + place / 8 * S::kOutPitch + place % 8 * 16));
        Half* const into = p.out + of * p.columns() + at;
        if (has_packs) return store_at_once(into, pack);
        for (int k = 0; k < 8; ++k)
          if (at + k < p.columns()) into[k] = pack.values[k];
      });
    }
  }
};

template <typename S>
__device__ __forceinline__ void multiply_by_wgmma(const Products<Half>& p, const TensorMap& x,
                                                  const TensorMap& weight) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const WgmmaMemory<S> m(shared);
  if (threadIdx.x == 0) {
    m.x.init(4 * S::kConsumers), m.blocks.init(4 * S::kConsumers);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<S::kProducerRegisters>();
    if (threadIdx.x == 0) copy_tiles<S>(p, m, x, weight);
  } else {
    setmaxnreg_inc<S::kThreads, S::kProducerRegisters, S::kRegisters>();
    const int consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // is known to be the same in a warp
    WgmmaWarp<S>{p, m, consumer}.compute_tiles();
  }
}

// Where the instructions are missing, the kernel has no code, and is compiled for one thread only.
template <typename S>
__global__ void __launch_bounds__(kHasSm90a ? S::kThreads : 1, S::kBlocks)
    wgmma_kernel(const __grid_constant__ Products<Half> p, const __grid_constant__ TensorMap x,
                 const __grid_constant__ TensorMap weight) {
  if constexpr (kHasSm90a) multiply_by_wgmma<S>(p, x, weight);
}

template <typename F, int kTokens>
bool launch_wgmma(Call& call, const Products<Half>& p) {
  using S = WgmmaShape<F, kTokens>;
  const auto kernel = wgmma_kernel<S>;
  const int64_t count = WgmmaTiles<S>{p}.count();
  if (product::wgmma_blocks<S>(kernel, count) == 0) return false;
  TensorMap x, weight;
  const TensorMap::Dimension of_x[] = {{p.deep(), 1, S::kDeep}, {p.tokens, p.deep(), S::kTokens}};
  const TensorMap::Dimension of_weight[] = {{p.weight.row_bytes / 2, 1, S::kPitch / 2},
                                            {p.weight.rows, p.weight.row_bytes / 2, S::kRows}};
  if (!x.encode(p.x, of_x) ||
      !weight.encode(reinterpret_cast<const Half*>(p.weight.data), of_weight, TensorMap::kNoSwizzle))
    return false;
  launch(call, kernel, std::min<int64_t>(count, Gpu().multiprocessors * S::kBlocks), S::kThreads, S::kBytes, p, x,
         weight);
  return true;
}

// Returns false, and launches nothing, if the GPU lacks the instructions or TMA cannot read rows.
template <typename F>
bool multiply_by_wgmma(Call& call, const Products<Half>& p) {
  if (p.deep() == 0 || p.weight.places() % 16 != 0 || !product::has_packs(p.x, p.deep()) ||
      std::max({p.tokens, p.deep(), p.columns()}) > INT32_MAX / 2)
    return false;
  if (p.tokens <= 64) return launch_wgmma<F, 64>(call, p);
  // Narrow tiles widen codes more often, but more of them are ready at the same time.
  const auto rounds = [&](int64_t tokens, int64_t cost) {
    const int64_t tiles = (p.tokens + tokens - 1) / tokens * ((p.columns() + 127) / 128),
                  at_once = Gpu().multiprocessors;
    return (tiles + at_once - 1) / at_once * cost;
  };
  return rounds(256, 8) <= rounds(128, 5) ? launch_wgmma<F, 256>(call, p) : launch_wgmma<F, 128>(call, p);
}

#else
template <typename F>
bool multiply_by_wgmma(Call&, const Products<Half>&) {
  return false;
}
#endif

}  // namespace msops::gguf_matmul

#endif
