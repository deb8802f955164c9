// LongRows is a thread's part of rows that the blocks of a cluster share, on sm_90 and later. A cluster works on many
// rows, one after the other. A thread copies its own packs of the next rows to shared memory, while it computes from
// those of this row, which stay as they are stored. So 64 registers are enough, and 1024 threads fill a multiprocessor.
#pragma once

#include "normal.h"
#include "settings.h"

#ifdef __CUDACC__
#include "../../common/gpu/cp_async.h"

namespace msops::norm {

// Returns a column's parameter, or its default.
template <typename T, int place>
__device__ float parameter(const Parameters<T, place>& of, int column) {
  return !of.data ? of.otherwise[0] : of.is_float ? of.row_of_float().data[column] : float(of.row().data[column]);
}

constexpr int kLongPacks = 2;           // of a thread in each row
constexpr int64_t kLongColumns = 8192;  // of rows that have faster kernels, at most

// Returns the most threads of a block. In float16, where instructions take most of the time, other blocks of the
// multiprocessor compute while one waits for the others of its cluster; in float32, fewer blocks need fewer exchanges.
template <typename T>
constexpr int kLongThreads = sizeof(T) == 2 ? 512 : 1024;

// SharedOfLongRows is what the threads of a block, and the blocks of a cluster, tell each other.
struct SharedOfLongRows {
  float of_warps[5][32];                  // (number, warp): up to four sums, and their pivot
  float counts[32];                       // of elements that warps have in a row
  alignas(16) float of_blocks[2][16][8];  // (turn, block, number): also the block's count
  alignas(16) float result[8];
  uint64_t arrived[2];  // an mbarrier for each turn
};

// If kCentred, sums over a row are about a pivot, see SumsAbout in statistics.h.
template <typename T, int kInputs, int kStages, bool kCentred>
class LongRows {
 public:
  static constexpr int N = kPackWidth<T>;

  // `stages` and the shared places are those of the block. All threads of the cluster call this.
  __device__ LongRows(SharedOfLongRows& shared, Bytes16* stages, int64_t columns)
      : shared_(shared), places_(stages + threadIdx.x) {
    const int block = static_cast<int>(cluster_ctarank()), blocks = static_cast<int>(cluster_nctarank());
    first_ = (block * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N;
    apart_ = blocks * static_cast<int>(blockDim.x) * N;
    has_last_ = first_ + apart_ < columns;
    if (threadIdx.x == 0) {
      for (uint64_t& each : shared.arrived) mbarrier_init(shared_address(&each), 1);
      fence_mbarrier_init();
    }
    const int packs = 32 + __popc(__ballot_sync(~0u, has_last_));  // of the warp
    if (threadIdx.x % 32 == 0) shared.counts[threadIdx.x / 32] = static_cast<float>(packs * N);
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();
  }

  // Calls f(i, column) for each of the thread's packs.
  template <typename F>
  __device__ void each(const F& f) const {
    static_assert(kLongPacks == 2, "each thread has a first pack, and may have a last one");
    f(0, first_);
    if (has_last_) f(1, first_ + apart_);
  }

  // Begins to copy the thread's packs of one row of each input, to places that no other thread uses: of the row that is
  // `ahead` rows after this one, below kStages. There is none if `offset`, where it begins, is not below `size`.
  __device__ void begin(const T* const (&inputs)[kInputs], int ahead, int64_t offset, int64_t size) const {
    const int stage = (stage_ + ahead) % kStages;
    if (offset < size)
      each([&](int i, int column) {
        for (int in = 0; in < kInputs; ++in) cp_async<16>(place(stage, in, i), inputs[in] + offset + column);
      });
    cp_async_commit();
  }
  // Waits for the copies of this row, where those of kStages - 1 rows after it have begun.
  __device__ void wait() const { cp_async_wait<kStages - 1>(); }
  // Returns a pack of this row, once its copies are made.
  __device__ Pack<T, N> pack(int in, int i) const {
    Pack<T, N> pack;
    memcpy(&pack, place(stage_, in, i), sizeof pack);
    return pack;
  }
  __device__ void load(float (&values)[N], int in, int i) const {
    const Pack<T, N> from = pack(in, i);
    for (int k = 0; k < N; ++k) values[k] = from.values[k];
  }

  // Keeps a number for each of the thread's columns in shared memory, or loads them.
  template <typename F>
  __device__ void keep(int parameter, const F& of_column) const {
    each([&](int i, int column) {
      for (int k = 0; k < N; ++k) kept(parameter, i, k)->values[k % 4] = of_column(column + k);
    });
  }
  __device__ void load_kept(float (&values)[N], int parameter, int i) const {
    for (int k = 0; k < N; k += 4) {
      const Pack<float, 4> pack = *kept(parameter, i, k);
      for (int e = 0; e < 4; ++e) values[k + e] = pack.values[e];
    }
  }

  // Returns a number near the mean of the warp's elements of input 0.
  __device__ float pivot() const {
    float values[N], sum = 0;
    load(values, 0, 0);
    if constexpr (!kTakesRests<T>) return __shfl_sync(~0u, values[0], 0);
    each([&](int i, int) {
      load(values, 0, i);
      for (const float v : values) sum += v;
    });
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum / shared_.counts[threadIdx.x / 32];
  }

  // Turns to the next row.
  __device__ void advance() { ++rows_, stage_ = (stage_ + 1) % kStages; }

  // Adds up what all threads of the cluster have, once for each row, and returns finish(sums). The sums of a warp are
  // about its pivot. One warp of each block merges them and finishes: shuffles by all warps would take longer.
  template <int kSums, typename F>
  __device__ auto over_cluster(const float (&of_thread)[kSums], float pivot, const F& finish) const {
    using Sums = SumsAbout<float, kSums>;
    using Result = decltype(finish(Sums()));
    static_assert(sizeof(Result) <= sizeof shared_.result, "there is no room for the result");
    constexpr int kLanes = 32 / kSums;  // that have the same sum
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const float of_warp = over_warp(of_thread);
    if (lane % kLanes == 0) shared_.of_warps[lane / kLanes][warp] = of_warp;
    if (kCentred && lane == 0) shared_.of_warps[kSums][warp] = pivot;
    __syncthreads();
    if (warp == 0) {
      const Sums all = of_blocks<kSums>();
      const Result result = finish(all);
      if (lane == 0) memcpy(shared_.result, &result, sizeof result);
    }
    __syncthreads();
    return *reinterpret_cast<const Result*>(shared_.result);
  }

 private:
  __device__ Bytes16* place(int stage, int in, int i) const {
    return places_ + ((stage * kInputs + in) * kLongPacks + i) * static_cast<int>(blockDim.x);
  }

  // Kept numbers are after the stages, in packs of four.
  __device__ Pack<float, 4>* kept(int parameter, int i, int k) const {
    const int packs = kStages * kInputs * kLongPacks + ((parameter * kLongPacks + i) * N + k) / 4;
    return reinterpret_cast<Pack<float, 4>*>(places_ + packs * static_cast<int>(blockDim.x));
  }

  // Sends the block's sums to all blocks of the cluster, and merges theirs. A block that is a row ahead writes to the
  // places of the other turn, see Team::sent_by_blocks().
  template <int kSums>
  __device__ SumsAbout<float, kSums> of_blocks() const {
    constexpr int kLanes = 32 / kSums;
    const int lane = static_cast<int>(threadIdx.x), blocks = static_cast<int>(cluster_nctarank());
    const unsigned turn = rows_ % 2, arrived = shared_address(&shared_.arrived[turn]);
    if (lane == 0) mbarrier_arrive_expect_tx(arrived, 4 * (kSums + 2 * kCentred) * blocks);
    float* const here = shared_.of_blocks[turn][cluster_ctarank()];
    SumsAbout<float, kSums> part, all;
    float count = 0;
    if (lane < static_cast<int>(blockDim.x) / 32) {
      for (int s = 0; s < kSums; ++s) part.sums.of[s] = shared_.of_warps[s][lane];
      if constexpr (kCentred) part.pivot = shared_.of_warps[kSums][lane], count = shared_.counts[lane];
    }
    if constexpr (kCentred) {
      part.move(__shfl_sync(~0u, part.pivot + part.sums.of[1] / count, 0), count);
      for (int distance = 16; distance > 0; distance /= 2) count += __shfl_xor_sync(~0u, count, distance);
      if (lane < blocks) {
        st_async(part.pivot, here + kSums, arrived, lane);
        st_async(count, here + kSums + 1, arrived, lane);
      }
    }
    const float sum = over_warp(part.sums.of);
#pragma unroll 1
    for (int to = lane % kLanes; to < blocks; to += kLanes) st_async(sum, here + lane / kLanes, arrived, to);
    mbarrier_wait(arrived, rows_ / 2 % 4096);
    if constexpr (kCentred) all.pivot = shared_.of_blocks[turn][0][kSums];
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      const float* const from = shared_.of_blocks[turn][block];
      const auto sums = msops::load<kSums>(from);
      for (int s = 0; s < kSums; ++s) part.sums.of[s] = sums.values[s];
      if constexpr (kCentred) {
        part.pivot = from[kSums];
        part.move(all.pivot, from[kSums + 1]);
      }
      all.sums = all.sums + part.sums;
    }
    return all;
  }

  // Adds up over the lanes of a warp. A lane returns sum number lane / (32 / kSums): at first, one half of the lanes
  // takes one half of the sums.
  template <int kSums>
  static __device__ float over_warp(const float (&of_lane)[kSums]) {
    float sums[kSums];
    for (int s = 0; s < kSums; ++s) sums[s] = of_lane[s];
    int distance = 16;
#pragma unroll
    for (int kept = kSums / 2; kept > 0; kept /= 2, distance /= 2) {
      const bool upper = threadIdx.x & distance;
#pragma unroll
      for (int s = 0; s < kept; ++s) {
        const float other = __shfl_xor_sync(~0u, upper ? sums[s] : sums[s + kept], distance);
        sums[s] = (upper ? sums[s + kept] : sums[s]) + other;
      }
    }
#pragma unroll
    for (; distance > 0; distance /= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], distance);
    return sums[0];
  }

  SharedOfLongRows& shared_;
  Bytes16* places_;    // of this thread, blockDim.x apart
  int first_, apart_;  // the columns of its first pack, and from it to the last one
  bool has_last_;
  unsigned rows_ = 0;  // that are done
  int stage_ = 0;      // of this row
};

// Returns how many packs of shared memory a thread has for its rows, and for numbers that it keeps.
template <typename T>
constexpr int long_places(int inputs, int stages, int kept) {
  return kLongPacks * (inputs * stages + kept * kPackWidth<T> / 4);
}

// Returns how many blocks share a row of so many packs, or 0 if a cluster has too few.
template <typename T>
int blocks_of_long_row(int64_t packs) {
  int blocks = 1;
  while (blocks <= 16 && int64_t{blocks} * kLongThreads<T> * kLongPacks < packs) blocks *= 2;
  return blocks <= 16 ? blocks : 0;
}

// A launch depends on how many warps a block has, and how many blocks a cluster.
constexpr int kLongKeys = 33 * 17;

// Launches clusters that work on all rows: `most`, or no more than run at once. Returns how many, or 0 if the GPU has
// no such clusters. In shared memory, a thread has `packs_of_thread` packs of 16 bytes.
template <typename T, typename... P>
int64_t launch_long_rows(Call& call, void (*kernel)(P...), int64_t columns, int packs_of_thread, int64_t most,
                         FactOfGpu<kLongKeys>& fact, const typename Type<P>::type&... arguments) {
  const int64_t packs = columns / kPackWidth<T>;
  const int blocks = blocks_of_long_row<T>(packs);
  if (blocks == 0) return 0;
  const int64_t of_warps = int64_t{32} * kLongPacks * blocks;
  const int threads = static_cast<int>((packs + of_warps - 1) / of_warps * 32), bytes = threads * packs_of_thread * 16;
  const Grid one = Grid(blocks).in_clusters(blocks);
  const auto find = [&] {
    const int room = Gpu().shared_bytes - static_cast<int>(sizeof(SharedOfLongRows));
    if (!is_compiled_for(90, kernel) || !kHasStAsync || bytes > room) return 0;
    return clusters_at_once(kernel, one, threads, bytes);
  };
  const int64_t used = std::min<int64_t>(most, fact.get(find, threads / 32 * 17 + blocks));
  launch(call, kernel, Grid(used * blocks).in_clusters(blocks), threads, bytes, arguments...);
  return used;
}

}  // namespace msops::norm
#endif
