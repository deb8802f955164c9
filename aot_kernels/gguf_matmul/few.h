// Products of few tokens of float16 on tensor cores (mma.sync), for sm_80 and later: the weight is read once, at the
// memory's rate. Blocks go through tiles of 16 rows of the weight. All of x lies in shared memory, and a warp has
// chunks of 256 numbers of the tile's rows, which come as they lie to a ring of its own, some chunks ahead. Codes
// become exact float16, and are multiplied with x in float32. So a group's sum is
//   scale * (sum of code * x - kZero * sum of x) + offset * sum of x
// Warps' sums are added in order.
#pragma once

#include "few_copies.h"

#ifdef __CUDACC__

#include "../common/gpu/mma.h"
#include "../common/launch.h"
#include "../common/pack.h"

namespace msops::gguf_matmul {

// How a launch divides its work, and where parts of shared memory begin: x (tokens, x_pitch bytes), `parts`, the sums
// of x in each group (numbers / kGroup, kAtOnce), `sums`, the warps' sums of two tiles, and the warps' rings.
struct FewPlan {
  int warps, tokens;  // of a block; of a pass
  int x_pitch, parts, sums, rings, bytes;
  bool has_packs;  // whether x is read by eight numbers
};

// FewWarp is a warp at work. kAtOnce is 1 or 8 tokens.
template <typename F, int kAtOnce, typename Copies>
struct FewWarp {
  using S = typename Copies::S;
  const Products<Half>& p;
  const FewPlan& plan;
  unsigned char* const shared;
  const Copies copies;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4, row = lane / 4;
  const int chunks = static_cast<int>((p.deep() + S::kDeep - 1) / S::kDeep);
  const int tiles = static_cast<int>((p.columns() + S::kRows - 1) / S::kRows);
  const int64_t token = int64_t{blockIdx.y} * plan.tokens;  // the pass's first one
  const int tokens = static_cast<int>(p.tokens - token < plan.tokens ? p.tokens - token : plan.tokens);
  unsigned char* const ring = shared + plan.rings + warp * S::kWarpBytes;
  float4* const scales = reinterpret_cast<float4*>(ring + S::kStages * S::kStageBytes);  // (kGroups / 4, kRows)
  float sums[4] = {};         // of rows `row` and `row` + 8, and tokens 2 quad and 2 quad + 1
  float rests[kAtOnce] = {};  // of minima, of row lane % 16 and half of the numbers

  // The warp's items follow one another, through all tiles of the block.
  __device__ __forceinline__ FewItem next(FewItem item) const {
    item.chunk += plan.warps;
    if (item.chunk >= chunks) item.chunk = warp, item.tile += gridDim.x;
    return item;
  }
  __device__ __forceinline__ void begin_copy(const FewItem& item, int stage) const {
    copies.begin(item, item.tile < tiles, ring + stage * S::kStageBytes, warp * S::kStages + stage);
  }

  // Loads eight numbers of x, or zeros after it.
  __device__ __forceinline__ Pack<Half, 8> load_x(int64_t token, int64_t e) const {
    Pack<Half, 8> numbers = {};
    const Half* const from = p.x + token * p.deep() + e;
    if (e >= p.deep()) return numbers;
    if (plan.has_packs) return load<8>(from);
    unrolled<8>([&](int k) { numbers.values[k] = from[k]; });
    return numbers;
  }
  // Brings the pass's x to shared memory: a lane's eight of each 32 numbers lie together, as Fours have them. Also adds
  // up its groups. All warps call this.
  __device__ __forceinline__ void take_x() const {
    const int eights = chunks * (S::kDeep / 8);
    float* const parts = reinterpret_cast<float*>(shared + plan.parts);
    constexpr int kLoads = 4;  // at once
    for (int t = 0; t < tokens; ++t)
      for (int first = threadIdx.x; first < eights; first += kLoads * blockDim.x) {
        Pack<Half, 8> numbers[kLoads];
        unrolled<kLoads>([&](int i) { numbers[i] = load_x(token + t, int64_t{8} * (first + i * blockDim.x)); });
        unrolled<kLoads>([&](int i) {
          const int eight = first + i * blockDim.x;
          if (eight >= eights) return;
          float sum = 0;
          unrolled<8>([&](int k) { sum += static_cast<float>(numbers[i].values[k]); });
          unsigned char* const to = shared + S::kBarrierBytes + t * plan.x_pitch + eight / 4 * 64 + eight % 4 / 2 * 8;
          unrolled<2>([&](int four) {
            uint32_t words[2] = {};
            unrolled<4>([&](int k) { words[k % 2] |= uint32_t{numbers[i].values[4 * four + k].bits} << 16 * (k / 2); });
            *reinterpret_cast<uint2*>(to + (eight % 2 * 2 + four) * 16) = make_uint2(words[0], words[1]);
          });
#pragma unroll
          for (int apart = 1; apart < F::kGroup / 8; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
          const int e = 8 * eight;
          if (e % F::kGroup == 0)
            parts[e / F::kGroup * kAtOnce + t] =
                sum * (F::kHasMinima ? kUnit : -F::kZero * kUnit / S::factor(e % S::kDeep));
        });
      }
  }

  // Decodes the scales of a chunk, and multiplies minima. A lane has half of a row.
  template <int kPlace>
  __device__ __forceinline__ void decode_scales(const unsigned char* rows, const float* parts) {
    const int r = lane % S::kRows, half = lane / S::kRows;
    constexpr int kCount = Scales<F>::kCount;
    const Scales<F> own = decode<F, kPlace>(rows, half, S::factor);
    unrolled<kCount / 4>([&](int i) {
      scales[(half * (kCount / 4) + i) * S::kRows + r] =
          make_float4(own.scale[4 * i], own.scale[4 * i + 1], own.scale[4 * i + 2], own.scale[4 * i + 3]);
    });
    if constexpr (F::kHasMinima) {
      constexpr int kPack = kAtOnce == 1 ? 4 : kAtOnce;
      unrolled<kCount * kAtOnce / kPack>([&](int i) {
        const auto sums_of_x = load<kPack>(parts + half * kCount * kAtOnce + i * kPack);
        unrolled<kPack>(
            [&](int k) { rests[k % kAtOnce] += own.offset[(i * kPack + k) / kAtOnce] * sums_of_x.values[k]; });
      });
    }
  }

  // Adds the products of 16 numbers from e on to `products`, which begin with the sums of a group that the zero adds.
  template <int kPlace>
  __device__ __forceinline__ void multiply_16(float (&products)[4], const unsigned char* const (&rows)[2], int e,
                                              uint2 x, const float* parts) const {
    if (e % F::kGroup == 0) {
      unrolled<4>([&](int i) { products[i] = 0; });
      if constexpr (!F::kHasMinima) {
        const float* const own = parts + e / F::kGroup * kAtOnce;
        unrolled<4>([&](int i) { products[i] = own[kAtOnce == 1 ? 0 : i % 2]; });
      }
    }
    const Fours upper = WideCodes<F>::template fours<kPlace>(rows[0], e);
    const Fours lower = WideCodes<F>::template fours<kPlace>(rows[1], e);
    mma_m16n8k16(products, {upper.even, lower.even, upper.odd, lower.odd}, {x.x, x.y});
  }

  // Multiplies a chunk in a stage, whose rows begin at kPlace.
  template <int kPlace>
  __device__ __forceinline__ void multiply(const FewItem& item, const unsigned char* stage) {
    const auto row_of = [&](int r) { return stage + r * S::kPitch + copies.begin_of(item, r); };
    const float* const parts =
        reinterpret_cast<const float*>(shared + plan.parts) + item.chunk * (S::kDeep / F::kGroup * kAtOnce);
    decode_scales<kPlace>(row_of(lane % S::kRows), parts);
    __syncwarp();
    const unsigned char* const rows[] = {row_of(row) + 4 * quad, row_of(row + 8) + 4 * quad};
    const int own = row < tokens ? row : 0;  // columns that are no tokens may be anything
    const unsigned char* const x =
        shared + S::kBarrierBytes + own * plan.x_pitch + item.chunk * (2 * S::kDeep) + quad * 16;
    constexpr int kRun = 4 * F::kGroup;  // whose scales are a vector
    float products[4];
#pragma unroll(kPlace == kAnywhere ? 1 : S::kDeep / kRun)
    for (int e = 0; e < S::kDeep; e += kRun) {
      const auto upper = load<4>(reinterpret_cast<const float*>(scales + e / kRun * S::kRows + row));
      const auto lower = load<4>(reinterpret_cast<const float*>(scales + e / kRun * S::kRows + row + 8));
      unrolled<kRun / 32>([&](int i) {
        const uint4 of_x = *reinterpret_cast<const uint4*>(x + 2 * (e + 32 * i));
        unrolled<2>([&](int j) {
          const int k = 32 * i + 16 * j;
          multiply_16<kPlace>(products, rows, e + k, j ? make_uint2(of_x.z, of_x.w) : make_uint2(of_x.x, of_x.y),
                              parts + (kAtOnce == 1 ? 0 : 2 * quad));
          if ((k + 16) % F::kGroup != 0) return;
          unrolled<kAtOnce == 1 ? 1 : 2>([&](int column) {
            sums[column] += upper.values[k / F::kGroup] * products[column];
            sums[2 + column] += lower.values[k / F::kGroup] * products[2 + column];
          });
        });
      });
    }
  }

  // Adds the warps' sums of a tile, and stores the result. `number` counts the block's tiles.
  __device__ __forceinline__ void store_tile(int tile, int number) {
    const int size = S::kRows * kAtOnce;
    float* const all = reinterpret_cast<float*>(shared + plan.sums) + number % 2 * plan.warps * size;
    float* const own = all + warp * size;  // (kRows, kAtOnce)
    if (kAtOnce > 1 || quad == 0)
      unrolled<2, kAtOnce == 1 ? 1 : 2>(
          [&](int half, int i) { own[(row + 8 * half) * kAtOnce + 2 * quad + i] = sums[2 * half + i]; });
    if constexpr (F::kHasMinima) {
      unrolled<kAtOnce>([&](int t) { rests[t] += __shfl_xor_sync(~0u, rests[t], 16); });
      __syncwarp();
      if (lane < S::kRows) unrolled<kAtOnce>([&](int t) { own[lane * kAtOnce + t] += rests[t]; });
    }
    unrolled<4>([&](int i) { sums[i] = 0; });
    unrolled<kAtOnce>([&](int t) { rests[t] = 0; });
    __syncthreads();
    const int turn = static_cast<int>((warp + number) % plan.warps);  // warps take turns
    if (turn * 32 >= S::kRows * tokens) return;
    for (int i = turn * 32 + lane; i < S::kRows * tokens; i += blockDim.x) {
      const int r = i % S::kRows, t = i / S::kRows;
      const int64_t to = int64_t{tile} * S::kRows + r;
      if (to >= p.columns()) continue;
      float sum = 0;
#pragma unroll 8
      for (int w = 0; w < plan.warps; ++w) sum += all[w * size + r * kAtOnce + t];
      assign(p.out[(token + t) * p.columns() + to], sum * (1 / kUnit) + p.bias[to]);
    }
  }

  __device__ __forceinline__ void run() {
    copies.init(warp);
    FewItem copied{static_cast<int>(blockIdx.x), warp}, item = copied;
    for (int stage = 0; stage < S::kStages - 1; ++stage, copied = next(copied)) begin_copy(copied, stage);
    take_x();
    __syncthreads();
    int stage = 0, phase = 0, number = 0;
    while (item.tile < tiles) {
      copies.wait(warp * S::kStages + stage, phase);
      begin_copy(copied, stage == 0 ? S::kStages - 1 : stage - 1);
      copied = next(copied);
      const unsigned char* const from = ring + stage * S::kStageBytes;
      switch (copies.place_of(item)) {
        case 0:
          multiply<0>(item, from);
          break;
        case 2:
          multiply<S::kHasOddChunks ? 2 : 0>(item, from);
          break;
        default:
          multiply<S::kIsAnywhere ? kAnywhere : 0>(item, from);
      }
      __syncwarp();
      if (++stage == S::kStages) stage = 0, ++phase;
      const int tile = item.tile;
      item = next(item);
      if (item.tile != tile) store_tile(tile, number++);
    }
  }
};

template <typename F, int kAtOnce>
__global__ void __launch_bounds__(32 * kMostWarps, 1)
    few_kernel(const __grid_constant__ Products<Half> p, const __grid_constant__ FewPlan plan) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using Copies = AsyncCopies<F>;
  if (has_instructions_of(80)) FewWarp<F, kAtOnce, Copies>{p, plan, shared, Copies(p.weight)}.run();
}

#if CUDART_VERSION >= 12000
template <typename F, int kAtOnce>
__global__ void __launch_bounds__(32 * kMostWarps, 1)
    few_tma_kernel(const __grid_constant__ Products<Half> p, const __grid_constant__ FewPlan plan,
                   const __grid_constant__ TensorMap weight) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using Copies = TmaCopies<F>;
  if constexpr (kHasSm90) FewWarp<F, kAtOnce, Copies>{p, plan, shared, Copies{weight, shared_address(shared)}}.run();
}
#endif

// Returns a plan for so many warps and tokens.
template <typename F, int kAtOnce, typename S>
FewPlan plan_few(const Products<Half>& p, int64_t warps, int64_t tokens) {
  const int64_t chunks = (p.deep() + S::kDeep - 1) / S::kDeep;
  FewPlan plan;
  plan.warps = static_cast<int>(warps), plan.tokens = static_cast<int>(tokens);
  plan.x_pitch = static_cast<int>(chunks * S::kDeep * 2 + 64);  // rows of two tokens are in different banks
  plan.parts = S::kBarrierBytes + plan.x_pitch * plan.tokens;
  plan.sums = plan.parts + static_cast<int>(chunks * S::kDeep / F::kGroup * kAtOnce * 4);
  plan.rings = (plan.sums + 2 * plan.warps * S::kRows * kAtOnce * 4 + 127) / 128 * 128;
  plan.bytes = plan.rings + plan.warps * S::kWarpBytes;
  plan.has_packs = is_aligned<8>(p.x);
  return plan;
}

// Launches a kernel with what it takes after the plan. Returns false, and launches nothing, if x has too many terms for
// shared memory.
template <typename F, int kAtOnce, typename S, typename... More>
bool launch_few(Call& call, void (*kernel)(Products<Half>, FewPlan, More...), const Products<Half>& p,
                const More&... more) {
  const Gpu gpu;
  const int64_t chunks = (p.deep() + S::kDeep - 1) / S::kDeep, tiles = (p.columns() + S::kRows - 1) / S::kRows;
  const auto fits = [&](int64_t warps, int64_t tokens, int blocks) {
    const int bytes = plan_few<F, kAtOnce, S>(p, warps, tokens).bytes;
    return blocks * (bytes + 1024) <= gpu.shared_bytes + 1024;
  };
  // Few tokens are read again and again from memory if the others do not fit.
  for (int64_t tokens = std::min<int64_t>(p.tokens, kAtOnce); tokens > 0; tokens /= 2) {
    // Two blocks of a multiprocessor overlap better than one, whose warps wait for each other.
    int64_t warps = std::min<int64_t>(chunks, kMostWarps / 2);
    if (!fits(warps, tokens, 2)) {
      warps = std::min<int64_t>(chunks, kMostWarps);
      while (warps > 1 && !fits(warps, tokens, 1)) --warps;
    }
    if (!fits(warps, tokens, 1) || (warps < std::min<int64_t>(chunks, 8) && tokens > 1)) continue;
    const int64_t rounds = (chunks + warps - 1) / warps;
    const FewPlan plan = plan_few<F, kAtOnce, S>(p, (chunks + rounds - 1) / rounds, tokens);
    const int64_t at_once = std::max(1, blocks_at_once(gpu, kernel, 32 * plan.warps, plan.bytes));
    launch(call, kernel, Grid(std::min(tiles, at_once), (p.tokens + tokens - 1) / tokens), 32 * plan.warps, plan.bytes,
           p, plan, more...);
    return true;
  }
  return false;
}

template <typename F, int kAtOnce>
bool launch_few(Call& call, const Products<Half>& p) {
  const auto kernel = few_kernel<F, kAtOnce>;
  if (!is_compiled_for(80, kernel)) return false;
#if CUDART_VERSION >= 12000
  using S = typename TmaCopies<F>::S;
  const auto tma_kernel = few_tma_kernel<F, kAtOnce>;
  TensorMap weight;
  const TensorMap::Dimension of_weight[] = {{p.weight.row_bytes / 2, 1, S::kPitch / 2},
                                            {p.weight.rows, p.weight.row_bytes / 2, S::kRows}};
  if (is_compiled_for(90, tma_kernel) && p.weight.places() % 16 == 0 &&
      weight.encode(reinterpret_cast<const Half*>(p.weight.data), of_weight, TensorMap::kNoSwizzle))
    return launch_few<F, kAtOnce, S>(call, tma_kernel, p, weight);
#endif
  return p.weight.places() % 2 == 0 && launch_few<F, kAtOnce, typename AsyncCopies<F>::S>(call, kernel, p);
}

constexpr int64_t kMostFew = 64;  // tokens

// Returns false, and launches nothing, if the GPU lacks the instructions, or the weight begins at an odd address, or x
// is too long.
template <typename F>
bool multiply_few(Call& call, const Products<Half>& p) {
  if (p.deep() == 0 || p.deep() > 1 << 17 || p.columns() > INT32_MAX / 2) return false;
  return p.tokens == 1 ? launch_few<F, 1>(call, p) : launch_few<F, 8>(call, p);
}

}  // namespace msops::gguf_matmul

#endif
