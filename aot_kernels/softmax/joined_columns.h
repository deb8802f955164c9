// Columns on the GPU whose rows are not of whole 128 bytes. Rows of a set are joined until whole packs tile them:
//
//   joined row  |  row 0, columns 0 .. inner - 1  |  row 1  |  ...  |    = `packs` packs of N elements
//
// The threads of a block take some whole joined rows at once, so that loads and stores are contiguous, and the packs of
// a thread have the same columns. A block holds its part of a set, or some whole sets. for_joined_columns() follows a
// Program (see columns.h) and combines, in a fixed order,
//
//   1. the terms of a thread       in registers
//   2. the results of the threads  in shared memory, in two steps
//   3. the results of the blocks   in each other's shared memory, where a cluster has the set
#pragma once

#include <numeric>

#include "columns.h"
#ifdef __CUDACC__
#include "../common/gpu/cluster.h"
#include "../common/gpu/cp_async.h"
#endif

namespace msops::softmax {

#ifdef __CUDACC__
constexpr int kMostSharing = 8;  // blocks of a cluster
// A thread has at most so many packs of each input in registers. It has as many in shared memory, where they suffice.
template <typename Program>
constexpr int kJoinedSteps = 8 / Program::kInputs;
// With fewer blocks of a launch, more of them share a set, down to so many packs of each input in a block.
constexpr int64_t kFewSharing = 256, kFewPacks = 1024;

// Joint says how blocks take sets.
struct Joint {
  int packs, rows;     // packs of a joined row; joined rows of a set
  int blocks, sets;    // blocks that share a set; sets that a block takes: one of both is 1
  int threads, steps;  // threads of a block for a set; packs of each input that a thread has, at most
  int lanes;           // numbers that the first step in shared memory leaves of each column
  int width;           // numbers of a row that holds one of each column, in whole 16 bytes
  int results;         // numbers that a block's shared memory has for results
  int64_t bytes;       // bytes of shared memory
};

// A thread holds its packs in registers or, if there are more, in shared memory.
template <int N, bool kInRegisters, typename Program, typename T>
class JoinedTeam {
 public:
  using C = Compute<T>;
  using Found = C[N][Program::kPhases];

  __device__ JoinedTeam(const Columns<Program, T>& all, const Joint& joint, void* shared) : all_(all), joint_(joint) {
    const int block = static_cast<int>(blockIdx.x % joint.blocks), first = static_cast<int>(threadIdx.x);
    const int in_block = first / joint.threads;
    thread_ = first % joint.threads;
    const int64_t set = int64_t{blockIdx.x / joint.blocks} * joint.sets + in_block;
    const int begin = part_begin(joint.rows, block, joint.blocks) * joint.packs + thread_;
    const int end = part_begin(joint.rows, block + 1, joint.blocks) * joint.packs;
    count_ = set < all.s.outer && begin < end ? (end - begin - 1) / joint.threads + 1 : 0;
    start_ = (set * joint.rows * joint.packs + begin) * N;
    totals_ = static_cast<C*>(shared);
    C* const found = totals_ + (joint.blocks > 1 ? Program::kPhases * joint.width : 0);
    C* const results = found + joint.sets * joint.packs * N;
    found_ = found + in_block * joint.packs * N;
    results_ = results + in_block * joint.threads * N;
    places_ = reinterpret_cast<Pack<T, N>*>(results + joint.results) + first;
    hold();
  }

  template <int phase>
  __device__ void reduce(Found& found) {
    constexpr bool kKeeps = kKeepsTerms && phase == Program::kPhases - 1;
    Pack<C, N> results;
    for (C& result : results.values) result = Program::template identity<phase>();
    each<kKeeps>([&](int64_t, Pack<T, N>(&packs)[Program::kInputs]) {
      combine_packs<phase, kKeeps, Program>(packs, found, results.values);
    });
    store(results_ + thread_ * N, results);
    over_block<phase>();
    const Pack<C, N> of_columns = load<N>(found_ + thread_ % joint_.packs * N);
    for (int j = 0; j < N; ++j) found[j][phase] = of_columns.values[j];
  }

  __device__ void map(const Found& found) {
    each<false>(
        [&](int64_t at, Pack<T, N>(&packs)[Program::kInputs]) { map_packs<kKeepsTerms>(all_, at, packs, found); });
  }

 private:
  static constexpr int kHeld = kInRegisters ? kJoinedSteps<Program> : 1;
  // Terms of the last phase take the places of elements, where they are not rounded.
  static constexpr bool kKeepsTerms = Program::kScales && std::is_same<T, C>::value;

  __device__ int64_t at(int i) const { return start_ + int64_t{i} * joint_.threads * N; }
  __device__ Pack<T, N>& place(int i, int input) const {
    return places_[(i * Program::kInputs + input) * static_cast<int>(blockDim.x)];
  }

  __device__ void hold() {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (i < count_)
          for (int a = 0; a < Program::kInputs; ++a) held_[i][a] = load<N>(all_.in[a] + at(i));
    } else {
      for (int i = 0; i < count_; ++i)
        for (int a = 0; a < Program::kInputs; ++a) cp_async<sizeof(Pack<T, N>)>(&place(i, a), all_.in[a] + at(i));
      cp_async_wait_all();  // a thread reads what it copied itself
    }
  }

  // Calls f(place, packs) for this thread's packs, and keeps what it leaves in the first input's pack if kKeeps.
  template <bool kKeeps, typename F>
  __device__ void each(const F& f) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (i < count_) f(at(i), held_[i]);
    } else {
#pragma unroll 4
      for (int i = 0; i < count_; ++i) {
        for (int a = 0; a < Program::kInputs; ++a) held_[0][a] = place(i, a);
        f(at(i), held_[0]);
        if constexpr (kKeeps) place(i, 0) = held_[0][0];
      }
    }
  }

  // Leaves in found_ what the phase found, out of the results of all threads of the set.
  template <int phase>
  __device__ void over_block() const {
    const int inner = static_cast<int>(all_.s.inner), of_lanes = joint_.lanes * inner;
    __syncthreads();
    for (int i = thread_; i < of_lanes; i += joint_.threads)
      results_[i] = combined<phase>(results_ + i, of_lanes, joint_.threads * N - i);
    __syncthreads();
    for (int i = thread_; i < inner; i += joint_.threads) {
      const C total = combined<phase>(results_ + i, inner, of_lanes - i);
      if (joint_.blocks == 1) {
        finish<phase>(i, total);
      } else {
        totals_[phase * joint_.width + i] = total;
      }
    }
    if (joint_.blocks > 1) {
      __syncwarp();
      over_cluster<phase>(totals_ + phase * joint_.width);
    }
    __syncthreads();
  }

  // Combines every `step`-th of n numbers, in their order.
  template <int phase>
  static __device__ C combined(const C* numbers, int step, int n) {
    C total = numbers[0];
    for (int i = step; i < n; i += step) total = Program::template combine<phase>(total, numbers[i]);
    return total;
  }

  // Copies the totals of all blocks to results_ (block, column), whose results have been read, and combines them.
  template <int phase>
  __device__ void over_cluster(const C* totals) const {
    constexpr int kNumbers = 16 / sizeof(C);
    const int in_packs = joint_.width / kNumbers, of_all = joint_.blocks * joint_.width;
    cluster_arrive_wait();
    for (int i = thread_; i * kNumbers < of_all; i += joint_.threads) {
      const float* const from = reinterpret_cast<const float*>(totals + i % in_packs * kNumbers);
      const Pack<float, 4> words = ld_shared_cluster(from, i / in_packs);
      memcpy(results_ + i * kNumbers, &words, sizeof words);
    }
    __syncthreads();
    for (int i = thread_; i < all_.s.inner; i += joint_.threads)
      finish<phase>(i, combined<phase>(results_ + i, joint_.width, of_all - i));
  }

  // Takes what blocks found of a column, for all of its places in a joined row.
  template <int phase>
  __device__ void finish(int column, C total) const {
    const C result = Program::template finish<phase>(total);
    for (int i = column; i < joint_.packs * N; i += static_cast<int>(all_.s.inner)) found_[i] = result;
  }

  const Columns<Program, T>& all_;
  const Joint& joint_;
  int thread_, count_;  // thread of the set in this block; packs of each input
  int64_t start_;
  C* totals_;            // (phase, column), for the cluster
  C *found_, *results_;  // (element of a joined row) and (thread, element of its pack), for each set
  Pack<T, N>* places_;   // (step, input, thread)
  Pack<T, N> held_[kHeld][Program::kInputs];
};

template <int N, bool kInRegisters, typename Program, typename T>
__global__ void __launch_bounds__(kColumnThreads) joined_columns_kernel(Columns<Program, T> all, Joint joint) {
  extern __shared__ uint4 shared[];
  JoinedTeam<N, kInRegisters, Program, T> team(all, joint, shared);
  Compute<T> found[N][Program::kPhases];
  for_phases<Program>([&](auto phase) { team.template reduce<phase>(found); });
  if (joint.blocks > 1) cluster_arrive_relaxed();
  team.map(found);
  __syncwarp();
  if (joint.blocks > 1) cluster_wait();  // before the block ends, whose shared memory others read
}

// Returns how `blocks` blocks take sets. They have up to `most` threads, or more if a joined row has more packs.
template <int N, bool kInRegisters, typename Program, typename T>
Joint joint_of(const ColumnSizes& s, int blocks, int most) {
  constexpr int kSteps = kJoinedSteps<Program>, kOfSets = 256, kRun = 32;  // threads of small sets together, and of one
  constexpr int64_t kNumber = sizeof(Compute<T>), kPacks = Program::kInputs * sizeof(Pack<T, N>);
  const auto parts = [](int64_t all, int64_t of) { return static_cast<int>((all + of - 1) / of); };
  Joint joint{};
  joint.packs = static_cast<int>(s.inner / std::gcd(s.inner, int64_t{N}));
  joint.rows = static_cast<int>(s.length * s.inner / (int64_t{joint.packs} * N));  // packs tile a set
  joint.blocks = blocks;
  const int rows = parts(joint.rows, blocks), room = std::max(1, most / joint.packs);  // of a block; at once
  const int fewest = parts(rows, kInRegisters ? kSteps : std::max(kSteps, parts(rows, room)));
  joint.steps = parts(rows, std::max(fewest, std::min(rows, kRun / joint.packs)));
  joint.threads = parts(rows, joint.steps) * joint.packs;
  if (blocks == 1) joint.sets = static_cast<int>(std::min<int64_t>(s.outer / kFewSharing, kOfSets / joint.threads));
  joint.sets = std::max(1, joint.sets);
  const int64_t numbers = int64_t{joint.threads} * N;
  joint.lanes = 1;
  while (joint.lanes * joint.lanes * s.inner < numbers && 2 * joint.lanes * s.inner <= joint.threads) joint.lanes *= 2;
  joint.width = parts(s.inner * kNumber, 16) * static_cast<int>(16 / kNumber);
  joint.results = std::max(joint.sets * joint.threads * N, blocks * joint.width);
  joint.bytes =
      ((blocks > 1 ? Program::kPhases * joint.width : 0) + int64_t{joint.sets} * joint.packs * N + joint.results) *
      kNumber;
  if (!kInRegisters) joint.bytes += joint.steps * kPacks * joint.sets * joint.threads;
  return joint;
}

// Returns whether clusters take less time than for_columns(), which is as fast where rows are of whole packs of 16
// bytes and there are many of these.
template <typename Program, typename T>
bool pays_in_clusters(const Columns<Program, T>& all) {
  constexpr int64_t N = kPackWidth<T>, kMany = 1024;
  return all.s.inner % N != 0 || !is_aligned<N>(least_aligned(all)) || all.s.columns() / N < kMany;
}

// Launches the fewest blocks for a set that leave room for another block on their multiprocessor or, if there are none,
// that have room themselves. Returns false, and does nothing, if a set is too large.
template <int N, bool kInRegisters, typename Program, typename T>
bool launch_joined_columns(Call& call, const Columns<Program, T>& all) {
  const auto kernel = joined_columns_kernel<N, kInRegisters, Program, T>;
  [[maybe_unused]] static FactOfGpu<kMostSharing + 1> facts;  // bytes of a block, and whether clusters of n blocks run
  const int room = facts.get([] { return Gpu().dynamic_bytes(); });
  const auto has_clusters = [&](int blocks) {
    const auto find = [&] {
      if (!is_compiled_for(90, kernel)) return 0;
      return clusters_at_once(kernel, msops::Grid(blocks).in_clusters(blocks), kColumnThreads, room);
    };
    return facts.get(find, blocks) > 0;
  };
  const int64_t bytes = all.s.length * all.s.inner * static_cast<int64_t>(sizeof(T)) * Program::kInputs;
  for (int resident = 2; resident >= (kInRegisters ? 2 : 1); --resident) {
    const int64_t held =
        kInRegisters ? kColumnThreads * kJoinedSteps<Program> * 16 * Program::kInputs : room / resident;
    Joint joint{};
    for (int64_t blocks = (bytes - 1) / held + 1; blocks <= kMostSharing; ++blocks) {
      if (blocks > 1 && !has_clusters(static_cast<int>(blocks))) continue;
      for (int most = 512; most >= (kInRegisters ? 512 : 256); most -= 128) {
        const Joint next = joint_of<N, kInRegisters, Program, T>(all.s, static_cast<int>(blocks), most);
        if (next.bytes > room / resident || next.threads > std::max(most, next.packs)) continue;
        joint = next;
        break;
      }
      if (joint.blocks > 0 && (all.s.outer * blocks >= kFewSharing || joint.threads * joint.steps <= kFewPacks)) break;
    }
    if (joint.blocks == 0) continue;
    if (joint.blocks > 1 && !pays_in_clusters(all)) return false;
    msops::Grid grid(((all.s.outer - 1) / joint.sets + 1) * joint.blocks);
    if (joint.blocks > 1) grid = grid.in_clusters(joint.blocks);
    if (!grid.fits_launch()) return false;
    launch(call, kernel, grid, joint.sets * joint.threads, joint.bytes, all, joint);
    return true;
  }
  return false;
}
#endif

// Follows the Program along columns. Returns false, and does nothing, on the CPU, where rows are of whole 128 bytes,
// where a set does not fit the blocks of a cluster, and where these do not pay.
template <typename Program, typename T>
bool for_joined_columns([[maybe_unused]] Call& call, [[maybe_unused]] const Columns<Program, T>& all) {
  bool done = false;
#ifdef __CUDACC__
  if constexpr (sizeof(T) < 8) {
    if (call.is_on_cpu() || all.s.inner * sizeof(T) % 128 == 0) return false;
    with_width<T>(false, all.s.length * all.s.inner, {least_aligned(all)}, [&](auto width) {
      constexpr int N = width, kBytes = N * sizeof(T);
      if (all.s.inner / std::gcd(all.s.inner, int64_t{N}) > kColumnThreads) return;
      if constexpr (kBytes == 16) done = launch_joined_columns<N, true>(call, all);
      if constexpr (kBytes >= 4) done = done || launch_joined_columns<N, false>(call, all);
    });
  }
#endif
  return done;
}

}  // namespace msops::softmax
