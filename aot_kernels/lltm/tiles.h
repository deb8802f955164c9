// The time loop of float32 where there are samples enough for tiles of them and units, one for each block: a launch for
// each round makes a tile's sums by tensor cores, and what the units make of them. For GPUs from sm_90 on: the tensor
// memory accelerator (TMA) brings the factors to shared memory, and the blocks of a cluster share the sums of a tile.
#pragma once

#include <cmath>

#include "mma.h"
#include "steps.h"

namespace msops {

#if CUDART_VERSION >= 11080  // the first that knows sm_90

// For sm_90 and later.
#if __CUDA_ARCH__ >= 900
#define MSOPS_SM90(...) asm volatile(__VA_ARGS__)
#else
#define MSOPS_SM90(...)
#endif

// What the launches before have written is there.
__device__ __forceinline__ void wait_for_launches() { MSOPS_SM90("griddepcontrol.wait;" : : : "memory"); }
// The next launch may use what this one leaves free.
__device__ __forceinline__ void let_next_launch() { MSOPS_SM90("griddepcontrol.launch_dependents;" : : : "memory"); }

// An array of float32 that TMA reads boxes of, as the driver describes it. The function and the constants are those of
// its header cuda.h, which nvcc can lack.
class alignas(64) TensorMap {
 public:
  struct Dimension {
    int64_t size, stride;  // in elements; the first one's stride is 1
    int box;
  };

  // Elements beyond the sizes are read as 0. The first dimension's part of a box is a row of 128 bytes in shared
  // memory; the k-th pack of 16 bytes in it is stored as that with number k ^ row % 8.
  template <int N>
  bool encode(const float* data, const Dimension (&dimensions)[N]) {
    constexpr int kFloat = 7, kSwizzle128 = 3, kPromotion256 = 3;  // of what L2 reads, in bytes
    uint64_t sizes[kRank], strides[kRank];
    uint32_t boxes[kRank], steps[kRank];
    for (int i = 0; i < kRank; ++i) sizes[i] = boxes[i] = steps[i] = 1, strides[i] = 16;
    for (int i = 0; i < N; ++i) {
      sizes[i] = dimensions[i].size;
      strides[i] = dimensions[i].stride * sizeof(float);
      boxes[i] = dimensions[i].box;
    }
    static const auto function =
        reinterpret_cast<Function*>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuTensorMapEncodeTiled"));
    return function &&
           function(this, kFloat, kRank, data, sizes, strides + 1, boxes, steps, 0, kSwizzle128, kPromotion256, 0) == 0;
  }

 private:
  static constexpr int kRank = 5;
  using Function = int(TensorMap*, int, uint32_t, const void*, const uint64_t*, const uint64_t*, const uint32_t*,
                       const uint32_t*, int, int, int, int);
  [[maybe_unused]] uint64_t opaque_[16];
};

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Counts arrivals, and bytes that TMA writes, of one phase after another; in shared memory.
struct Barrier {
  unsigned address;

  __device__ __forceinline__ void init(int arrivals) const {
    MSOPS_SM90("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(address), "r"(arrivals) : "memory");
  }
  __device__ __forceinline__ void arrive() const {
    MSOPS_SM90("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(address) : "memory");
  }
  __device__ __forceinline__ void arrive_and_expect(int bytes) const {
    MSOPS_SM90("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(address), "r"(bytes) : "memory");
  }
  __device__ __forceinline__ void wait(int phase) const {
    unsigned done = 1;
    do
      MSOPS_SM90(
          "{.reg .pred p;"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
          "selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(address),
          "r"(phase % 2) : "memory");
    while (!done);
  }
};

// Begins to copy a box to shared memory; the barrier counts its bytes.
__device__ __forceinline__ void copy_box(unsigned to, Barrier barrier, const TensorMap& map, int x0, int x1, int x2,
                                         int x3, int x4) {
  MSOPS_SM90(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" : : "r"(to),
      "l"(&map), "r"(barrier.address), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
}

__device__ __forceinline__ void cluster_barrier() {
  MSOPS_SM90("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

__device__ __forceinline__ Pack<float, 4> load_from_cluster(const float* from, int block_of_cluster) {
  Pack<float, 4> pack = {};
  MSOPS_SM90(
      "{.reg .b32 there;"
      "mapa.shared::cluster.u32 there, %4, %5;"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}" : "=f"(pack.values[0]),
      "=f"(pack.values[1]), "=f"(pack.values[2]), "=f"(pack.values[3]) : "r"(shared_address(from)),
      "r"(block_of_cluster) : "memory");
  return pack;
}

// Four matrices of 8 x 4: thread `lane` gives the address of row lane % 8 of the (lane / 8)-th, and gets of each the
// number lane % 4 of row lane / 4.
__device__ __forceinline__ void load_matrices(unsigned address, unsigned (&words)[4]) {
  MSOPS_SM90("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(words[0]), "=r"(words[1]),
             "=r"(words[2]), "=r"(words[3]) : "r"(address));
}

// A block's tile, and its stages in shared memory: each has kDepth numbers of the products' length, in rows of 128
// bytes. Rows are of samples; and of the weights forward of the tile's columns, which are all units for each gate.
// Backward these rows are of 32 units, and there are kDepth for each 32 units.
template <int kSamples_, typename Loop>
struct Tile {
  static constexpr bool kForward = Loop::kTiles != 1;
  static constexpr int kDepth = 32;
  static constexpr int kSamples = kSamples_, kUnits = kForward ? 32 : kSamples / 2, kColumns = kUnits * Loop::kTiles;
  static constexpr int kWarpRows = 4, kWarpColumns = 2, kWarps = kWarpRows * kWarpColumns;
  static constexpr int kM = kSamples / kWarpRows / 16, kN = kColumns / kWarpColumns / 8;  // 16 x 8 sums, of a warp
  static constexpr int kSampleBytes = kSamples * 128, kStageBytes = kSampleBytes + kColumns * 128;
  static constexpr int kStages = 8;
  static constexpr double kCost = kForward ? (kSamples == 128 ? 7 : 4) : (kSamples == 128 ? 12 : 5);  // measured
  static constexpr int kPitch = kColumns + 8;  // of sums, so that a warp's stores hit all banks
  static constexpr int kSharedBytes = 1024 + kStages * (kStageBytes + 16);
  static_assert(kSamples * kPitch * 4 <= kStages * kStageBytes, "the sums take the stages' place");
};

// A warp's sums, or what they are of a part of the products' length: kM x kN matrices of 16 x 8.
template <typename Tile>
class WarpSums {
 public:
  __device__ __forceinline__ WarpSums() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    first_row_ = warp / Tile::kWarpColumns * (16 * kM), first_column_ = warp % Tile::kWarpColumns * (8 * kN);
    samples_ = (first_row_ + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
    if constexpr (Tile::kForward) {
      weights_ = (first_column_ + lane / 16 * 8 + lane % 8) * 128 + (lane / 8 % 2 ^ lane % 8) * 16;
    } else {
      // In boxes of 32 units and 32 rows of weights; with the rows k and k + 4 as neighbours, a warp's loads hit all
      // banks.
      const int row = lane % 4 * 2, column = first_column_ % 32 + lane / 4;
      weights_ = (first_column_ / 32 * 32 + row) * 128 + (column / 4 ^ row) * 16 + column % 4 * 4;
    }
  }

  // Of a stage. While some sums' products are made, the ones before are added.
  __device__ __forceinline__ void add(unsigned samples, unsigned weights) {
#pragma unroll
    for (int step = 0; step < Tile::kDepth / 8; ++step) {
      Operand a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        unsigned words[4];
        load_matrices(((samples + samples_) ^ step * 32) + m * 16 * 128, words);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = Operand(words[i]);
      }
      unsigned b[kN][2];
      load_weights(weights + weights_, step, b);
#pragma unroll
      for (int first = 0; first < kN; first += kAtOnce) add(a, &b[first], &sums_[first]);
    }
  }

  // To [kSamples][kPitch].
  __device__ __forceinline__ void store_to(float* all) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        float* const to = all + (first_row_ + 16 * m + lane / 4) * Tile::kPitch + first_column_ + 8 * n + lane % 4 * 2;
        store(to, Pack<float, 2>{{sums_[n][m][0], sums_[n][m][1]}});
        store(to + 8 * Tile::kPitch, Pack<float, 2>{{sums_[n][m][2], sums_[n][m][3]}});
      }
  }

 private:
  using Operand = Word<Product::kFloat>;
  static constexpr int kM = Tile::kM, kN = Tile::kN, kAtOnce = kM == 1 ? kN : kN / 2;

  __device__ __forceinline__ static void load_weights(unsigned from, int step, unsigned (&b)[kN][2]) {
    if constexpr (Tile::kForward) {
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        unsigned words[4];
        load_matrices((from ^ step * 32) + n * 8 * 128, words);
#pragma unroll
        for (int i = 0; i < 4; ++i) b[n + i / 2][i % 2] = words[i];
      }
    } else {
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          [[maybe_unused]] const unsigned there =
              (from ^ (n % 4 * 32 + i * 16)) + i * 128 + (n / 4 * 32 + step * 8) * 128;
          MSOPS_SM90("ld.shared.b32 %0, [%1];" : "=r"(b[n][i]) : "r"(there));
        }
    }
  }

  // As `multiply_add` does, but one kind of products of all sums before the next: they don't wait for each other.
  __device__ __forceinline__ static void add(const Operand (&a)[kM][4], const unsigned (*words)[2],
                                             float (*sums)[kM][4]) {
    Operand b[kAtOnce][2];
    float products[kAtOnce][kM][4] = {};
    const auto for_all = [](const auto& f) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
        for (int m = 0; m < kM; ++m) f(n, m);
    };
    const auto multiply = [&](unsigned Operand::* of_a, unsigned Operand::* of_b) {
      for_all([&](int n, int m) {
        multiply_add<Product::kFloat>(products[n][m], a[m][0].*of_a, a[m][1].*of_a, a[m][2].*of_a, a[m][3].*of_a,
                                      b[n][0].*of_b, b[n][1].*of_b);
      });
    };
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) b[n][i] = Operand(words[n][i]);
    multiply(&Operand::lower, &Operand::upper);
    multiply(&Operand::upper, &Operand::lower);
    multiply(&Operand::upper, &Operand::upper);
    for_all([&](int n, int m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][m][i] += products[n][m][i];
    });
  }

  float sums_[kN][kM][4] = {};
  int first_row_, first_column_;
  unsigned samples_, weights_;  // of the first that the thread loads, in bytes
};

// The blocks of a cluster have one tile, and a part of the products' length each.
template <typename Tile, typename Loop>
__global__ void __launch_bounds__(32 * (Tile::kWarps + 1), 1)
    tile_kernel(const __grid_constant__ TensorMap published, const __grid_constant__ TensorMap weights,
                const __grid_constant__ Round<4, Loop> round) {
  constexpr int kDepth = Tile::kDepth, kStages = Tile::kStages, kWorkers = 32 * Tile::kWarps;
  extern __shared__ unsigned char memory[];
  unsigned char* const stages = memory + (-shared_address(memory) & 1023);
  const auto samples_at = [&](int stage) { return shared_address(stages) + stage * Tile::kStageBytes; };
  const auto weights_at = [&](int stage) { return samples_at(stage) + Tile::kSampleBytes; };
  const auto full = [&](int stage) { return Barrier{samples_at(kStages) + 16 * stage}; };
  const auto empty = [&](int stage) { return Barrier{samples_at(kStages) + 16 * stage + 8}; };

  const int first_unit = blockIdx.x * Tile::kUnits, first_sample = blockIdx.y * Tile::kSamples;
  const int part = blockIdx.z, parts = gridDim.z;
  const int boxes = static_cast<int>((round.loop.hidden + kDepth - 1) / kDepth);  // of a segment
  const int begin = part_begin(Loop::kSegments * boxes, part, parts);
  const int count = part_begin(Loop::kSegments * boxes, part + 1, parts) - begin;
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      full(stage).init(1);
      empty(stage).init(Tile::kWarps);
    }
    MSOPS_SM90("fence.mbarrier_init.release.cluster;" : : : "memory");
  }
  __syncthreads();
  let_next_launch();

  WarpSums<Tile> warp_sums;
  if (warp == Tile::kWarps) {
    if (threadIdx.x % 32 == 0) {
      const auto copy_weights = [&](int i) {
        const int segment = (begin + i) / boxes, k = (begin + i) % boxes * kDepth, stage = i % kStages;
        full(stage).arrive_and_expect(Tile::kStageBytes);
        if constexpr (Tile::kForward)
          copy_box(weights_at(stage), full(stage), weights, k, first_unit, 0, 0, 0);
        else
          for (int unit = 0; unit < Tile::kUnits; unit += 32)
            copy_box(weights_at(stage) + unit * 128, full(stage), weights, first_unit + unit, 0, 0, k / 8, segment);
      };
      const auto copy_samples = [&](int i) {
        const int segment = (begin + i) / boxes, k = (begin + i) % boxes * kDepth, stage = i % kStages;
        copy_box(samples_at(stage), full(stage), published, k, first_sample, segment, 0, 0);
      };
      const int ahead = min(count, kStages);
      for (int i = 0; i < ahead; ++i) copy_weights(i);
      wait_for_launches();
      for (int i = 0; i < ahead; ++i) copy_samples(i);
      for (int i = kStages; i < count; ++i) {
        empty(i % kStages).wait(i / kStages - 1);
        copy_weights(i);
        copy_samples(i);
      }
    }
    __syncwarp();
  } else {
    for (int i = 0; i < count; ++i) {
      const int stage = i % kStages;
      full(stage).wait(i / kStages);
      warp_sums.add(samples_at(stage), weights_at(stage));
      __syncwarp();
      if (threadIdx.x % 32 == 0) empty(stage).arrive();
    }
  }
  __syncthreads();
  if (warp < Tile::kWarps) warp_sums.store_to(reinterpret_cast<float*>(stages));
  wait_for_launches();

  // Each block has some of the tile's samples. What is read besides the sums is there before them.
  const float* const sums = reinterpret_cast<const float*>(stages);
  const int first_row = part_begin(Tile::kSamples, part, parts);
  constexpr int kPacks = Tile::kUnits / 4, kAtOnce = 2;
  const int packs = (part_begin(Tile::kSamples, part + 1, parts) - first_row) * kPacks;
  typename Round<4, Loop>::Before before[kAtOnce];
  const auto for_packs = [&](int first, const auto& f) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * kWorkers + threadIdx.x;
      const int row = first_row + i / kPacks, column = i % kPacks * 4;
      const int64_t sample = first_sample + row, unit = first_unit + column;
      if (warp < Tile::kWarps && i < packs && sample < round.loop.batch && unit < round.loop.hidden)
        f(before[j], row, column, sample, unit);
    }
  };
  for (int first = 0; first < packs; first += kAtOnce * kWorkers) {
    for_packs(first,
              [&](auto& of_pack, int, int, int64_t sample, int64_t unit) { of_pack = round.before(sample, unit); });
    if (first == 0) {
      __syncwarp();
      cluster_barrier();
    }
    for_packs(first, [&](const auto& of_pack, int row, int column, int64_t sample, int64_t unit) {
      float of_units[Loop::kTiles][4];
#pragma unroll
      for (int tile = 0; tile < Loop::kTiles; ++tile) {
        const float* const at = sums + row * Tile::kPitch + tile * Tile::kUnits + column;
        Pack<float, 4> total = load_from_cluster(at, 0);
        for (int other = 1; other < parts; ++other) {
          const auto pack = load_from_cluster(at, other);
          for (int j = 0; j < 4; ++j) total.values[j] += pack.values[j];
        }
        for (int j = 0; j < 4; ++j) of_units[tile][j] = total.values[j];
      }
      round.finish(of_pack, sample, unit, of_units);
    });
  }
  __syncwarp();
  cluster_barrier();  // the others have read this block's sums
}

// How the blocks are launched for all rounds.
template <typename Tile, typename Loop>
class TileLaunch {
 public:
  double cost = INFINITY;  // in units of Tile::kCost

  // With as many parts of the products' length as are fastest.
  TileLaunch(Call& call, const Loop& loop, const Gpu& gpu) {
    if (Tile::kSharedBytes > gpu.shared_bytes || !is_compiled_for(90, kernel_)) return;
    cudaFuncSetAttribute(kernel_, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
    const int64_t tiles[] = {(loop.hidden - 1) / Tile::kUnits + 1, (loop.batch - 1) / Tile::kSamples + 1};
    if (tiles[0] > 65535 || tiles[1] > 65535) return;
    config_.blockDim = dim3(32 * (Tile::kWarps + 1));
    config_.dynamicSmemBytes = Tile::kSharedBytes;
    config_.stream = call.stream();
    config_.attrs = attributes_;
    attributes_[0].id = cudaLaunchAttributeClusterDimension;
    attributes_[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes_[1].val.programmaticStreamSerializationAllowed = 1;
    int best = 1;
    for (int parts = 1; parts <= 4; ++parts) {
      set_parts(tiles, parts);
      config_.numAttrs = 1;
      int clusters = 0;
      if (cudaOccupancyMaxActiveClusters(&clusters, kernel_, &config_) != cudaSuccess || clusters == 0) continue;
      const double of_parts = static_cast<double>((tiles[0] * tiles[1] - 1) / clusters + 1) * Tile::kCost / parts;
      if (of_parts < cost) cost = of_parts, best = parts;
    }
    set_parts(tiles, best);
    config_.numAttrs = 2;
  }
  void operator()(Call& call, const TensorMap& published, const TensorMap& weights, const Round<4, Loop>& round) const {
    cudaLaunchKernelEx(&config_, kernel_, published, weights, round);
    call.check_launch();
  }

 private:
  void set_parts(const int64_t (&tiles)[2], int parts) {
    config_.gridDim = dim3(static_cast<unsigned>(tiles[0]), static_cast<unsigned>(tiles[1]), parts);
    attributes_[0].val.clusterDim = {1, 1, static_cast<unsigned>(parts)};
  }

  static constexpr auto kernel_ = tile_kernel<Tile, Loop>;
  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute attributes_[2]{};
};

template <typename Tile, typename Loop>
bool run_in_tiles(Call& call, const Loop& loop, float* scratch, const TileLaunch<Tile, Loop>& launch) {
  constexpr int kSegments = Loop::kSegments, kDepth = Tile::kDepth;
  const int64_t units = loop.hidden, all = loop.batch * units;
  float* const published[2] = {scratch + 2 * all, scratch + (2 + kSegments) * all};
  TensorMap of_published[2], of_weights;
  bool encoded;
  if constexpr (Tile::kForward) {
    const TensorMap::Dimension unit_rows[] = {
        {units, 1, kDepth}, {units, units, Tile::kUnits}, {kGates, units * units, kGates}};
    encoded = of_weights.encode(loop.weight, unit_rows);
  } else {
    const TensorMap::Dimension rows[] = {
        {units, 1, 32}, {2, 4 * units, 2}, {4, units, 4}, {units / 8, 8 * units, 4}, {kGates, units * units, 1}};
    encoded = of_weights.encode(loop.weight, rows);
  }
  const TensorMap::Dimension samples[] = {
      {units, 1, kDepth}, {loop.batch, kSegments * units, Tile::kSamples}, {kSegments, units, 1}};
  for (int i = 0; i < 2; ++i) encoded &= of_published[i].encode(published[i], samples);
  if (!encoded) return false;

  Round<4, Loop> body{loop, -1, {scratch, scratch + all}, published[0]};
  run_round<true>(call, body, nullptr);
  for (body.round = 0; loop.steps > body.round && call.ok(); ++body.round) {
    body.published = published[(body.round + 1) % 2];
    launch(call, of_published[body.round % 2], of_weights, body);
  }
  return true;
}

// Runs the loop if the GPU and the alignment allow it, and there are samples enough; returns whether.
template <typename Loop>
bool run_in_tiles(Call& call, const Loop& loop, float* scratch, const Gpu& gpu) {
  // Where cuBLAS is not faster on an H200: it is with few samples, and backward for some sizes between.
  const bool narrow = loop.hidden <= 2048;
  bool fits = Loop::kTiles != 1
                  ? loop.batch >= (narrow ? 16 : 48)
                  : loop.batch > 128 || (loop.batch >= 48 && narrow && loop.batch * loop.hidden <= 160 << 10);
  fits &= loop.hidden % 8 == 0;
  fits &= is_aligned<4>(loop.weight) && is_aligned<4>(scratch);
  loop.with_arrays([&](std::initializer_list<const float*> arrays) {
    for (const float* array : arrays) fits &= is_aligned<4>(array);
  });
  if (!fits) return false;
  const TileLaunch<Tile<128, Loop>, Loop> large(call, loop, gpu);
  const TileLaunch<Tile<64, Loop>, Loop> small(call, loop, gpu);
  if (std::isinf(large.cost)) return false;
  return large.cost < small.cost ? run_in_tiles(call, loop, scratch, large) : run_in_tiles(call, loop, scratch, small);
}

#else
template <typename Loop>
bool run_in_tiles(Call&, const Loop&, float*, const Gpu&) {
  return false;
}
#endif

}  // namespace msops
