// Kernels of reductions. Threads read packs of 16 bytes, at any address. Blocks take parts of the terms where there are
// too few outputs to fill a GPU; the numbers that they find are then reduced by a second launch. All orders are fixed.
#pragma once

#include "../common/gpu/divisor.h"
#include "../common/pack.h"
#include "operations.h"

namespace msops::reduce {

constexpr int kBlock = 256, kInFlight = 4;  // threads; loads of a thread that nothing waits for

// Array reads packs of N elements, of which only `count` may exist, from any address or, if kAligned, from aligned
// ones.
template <bool kAligned, typename T>
struct Array {
  static constexpr int N = kPackWidth<T>;
  const T* begin;
  int64_t size;

  __device__ __forceinline__ Pack<T, N> read(const T* from, int64_t count, T other) const {
    if constexpr (kAligned) return load<N>(from);
    if (count >= N && packs_around<N>(from, begin, size)) return load_shifted<N>(from);
    Pack<T, N> pack;
#pragma unroll
    for (int j = 0; j < N; ++j) pack.values[j] = j < count ? from[j] : other;
    return pack;
  }
};

// Returns what lanes of a warp, `lanes` neighbours, have together.
template <typename Operation, typename C>
__device__ __forceinline__ C over_lanes(C value, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    if constexpr (sizeof(C) < 4) {
      value = Operation::combine(value, static_cast<C>(__shfl_xor_sync(~0u, static_cast<unsigned>(value), distance)));
    } else {
      value = Operation::combine(value, __shfl_xor_sync(~0u, value, distance));
    }
  }
  return value;
}

// Joins what a block's threads found for the same outputs: `groups` of kBlock / groups threads have the same ones.
// The first group returns with all.
template <typename Operation, int kValues, typename C>
__device__ void over_groups(C (&values)[kValues], int groups, C* shared) {
  const int of_group = kBlock / groups;
  for (int half = groups / 2; half > 0; half /= 2) {
    const int thread = static_cast<int>(threadIdx.x), group = thread / of_group;
    __syncthreads();
    if (group >= half && group < 2 * half)
#pragma unroll
      for (int j = 0; j < kValues; ++j) shared[j * (kBlock / 2) + thread - half * of_group] = values[j];
    __syncthreads();
    if (group < half)
#pragma unroll
      for (int j = 0; j < kValues; ++j) values[j] = Operation::combine(values[j], shared[j * (kBlock / 2) + thread]);
  }
}

// A block takes 2^log_packs neighbouring packs of columns, and its threads share the rows of a part.
template <bool kAligned, typename T, typename C, typename Rounded>
struct AcrossProblem {
  Across s;
  Divisor packs;  // of a row
  int64_t items, parts;
  int log_packs;
  Array<kAligned, T> x;
  Output<C, Rounded> y;
};

template <bool kAligned, typename Operation, typename T, typename C, typename Rounded>
__global__ void __launch_bounds__(kBlock) across_kernel(const AcrossProblem<kAligned, T, C, Rounded> p) {
  constexpr int N = kPackWidth<T>;
  __shared__ C shared[N * kBlock / 2];
  const int groups = kBlock >> p.log_packs, group = static_cast<int>(threadIdx.x) >> p.log_packs;
  const int item = (static_cast<int>(blockIdx.x) << p.log_packs) + static_cast<int>(threadIdx.x) % (kBlock / groups);
  const bool exists = item < p.items;
  int pack = 0;
  const int outer = p.packs.divide(exists ? item : 0, &pack);
  const int64_t column = int64_t{pack} * N, count = exists ? p.s.inner - column : 0;
  const T* const from = p.x.begin + outer * p.s.terms * p.s.inner + column;
  const int64_t begin = part_begin<int64_t>(p.s.terms, blockIdx.y, p.parts);
  const int64_t end = part_begin<int64_t>(p.s.terms, blockIdx.y + 1, p.parts);
  Running<Operation, C> running[N];
  const T none = T(Operation::template identity<C>());
  int64_t r = begin + group;
  if (exists) {
    for (; r + (kInFlight - 1) * groups < end; r += kInFlight * groups) {
      Pack<T, N> packs[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) packs[k] = p.x.read(from + (r + k * groups) * p.s.inner, count, none);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const C low = Operation::combine(C(packs[0].values[j]), C(packs[1].values[j]));
        running[j].add(Operation::combine(low, Operation::combine(C(packs[2].values[j]), C(packs[3].values[j]))));
      }
    }
    for (; r < end; r += groups) {
      const Pack<T, N> last = p.x.read(from + r * p.s.inner, count, none);
#pragma unroll
      for (int j = 0; j < N; ++j) running[j].add(C(last.values[j]));
    }
  }
  C found[N];
#pragma unroll
  for (int j = 0; j < N; ++j) found[j] = running[j].total();
  over_groups<Operation>(found, groups, shared);
  if (group > 0) return;
  const int64_t at = (blockIdx.y * p.s.outer + outer) * p.s.inner + column;
#pragma unroll
  for (int j = 0; j < N; ++j)
    if (j < count) p.y.put(at + j, found[j]);
}

// A team of 2^log_lanes threads, of a warp or a whole block, takes an output and a part of its terms.
template <typename T, typename C, typename Rounded>
struct AlongProblem {
  Along s;
  Divisor packs;  // of a run of `length` terms, together with parts of packs at its ends
  int64_t all;    // packs of an output
  int64_t teams, parts;
  int log_lanes;
  const T* x;
  bool aligned;  // whether all runs are whole packs
  Output<C, Rounded> y;
};

template <typename Operation, typename T, typename C, typename Rounded>
__global__ void __launch_bounds__(kBlock) along_kernel(const AlongProblem<T, C, Rounded> p) {
  constexpr int N = kPackWidth<T>;
  __shared__ C shared[kBlock / 2];
  const int lanes = 1 << p.log_lanes, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int64_t team = (int64_t{blockIdx.x} * kBlock + threadIdx.x) >> p.log_lanes;
  const bool exists = team < p.teams;
  const int64_t part = exists ? team / p.s.outputs : 0, output = exists ? team - part * p.s.outputs : 0;
  const T none = T(Operation::template identity<C>());
  const auto read = [&](int64_t t) {
    int64_t run = 0, pack = t;
    if (p.s.outer > 1) {
      int rest;
      run = p.packs.divide(static_cast<int>(t), &rest), pack = rest;
    }
    // The run's packs are aligned, so that the first and the last one may begin or end outside of it.
    const T* const begin = p.x + (run * p.s.outputs + output) * p.s.length;
    const int64_t before = p.aligned ? 0 : reinterpret_cast<uintptr_t>(begin) / sizeof(T) % N;
    const int64_t first = pack * N - before, left = p.s.length - first;
    if (first >= 0 && left >= N) return load<N>(begin + first);
    Pack<T, N> ends;
#pragma unroll
    for (int j = 0; j < N; ++j) ends.values[j] = first + j >= 0 && j < left ? begin[first + j] : none;
    return ends;
  };
  const auto of_pack = [](const Pack<T, N>& pack) {
    C values[N];
#pragma unroll
    for (int j = 0; j < N; ++j) values[j] = C(pack.values[j]);
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2)
#pragma unroll
      for (int j = 0; j < half; ++j) values[j] = Operation::combine(values[j], values[j + half]);
    return values[0];
  };
  Running<Operation, C> running;
  const int64_t end = exists ? part_begin<int64_t>(p.all, part + 1, p.parts) : 0;
  int64_t t = (exists ? part_begin<int64_t>(p.all, part, p.parts) : 0) + lane;
  for (; t + (kInFlight - 1) * lanes < end; t += kInFlight * lanes) {
    Pack<T, N> packs[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) packs[k] = read(t + k * lanes);
    const C low = Operation::combine(of_pack(packs[0]), of_pack(packs[1]));
    running.add(Operation::combine(low, Operation::combine(of_pack(packs[2]), of_pack(packs[3]))));
  }
  for (; t < end; t += lanes) running.add(of_pack(read(t)));
  C found[1] = {over_lanes<Operation>(running.total(), lanes < 32 ? lanes : 32)};
  if (lanes > 32) {  // the lanes of a warp have the same number
    over_groups<Operation>(found, kBlock / 32, shared);
    if (threadIdx.x > 0) return;
  }
  if (exists && lane == 0) p.y.put(team, found[0]);
}

inline int log2_above(int64_t n, int most) {
  int log = 0;
  while (log < most && int64_t{1} << log < n) ++log;
  return log;
}

template <typename Operation, typename T, typename C, typename Rounded>
void across(Call& call, const Across& s, int64_t parts, const T* x, const Output<C, Rounded>& y) {
  constexpr int N = kPackWidth<T>;
  const int64_t packs = (s.inner + N - 1) / N, items = s.outer * packs;
  call.require(items <= kLargest32, kBadShape, "has too many outputs for a kernel of 32 bits");
  if (!call.ok()) return;
  // Few blocks take fewer columns each, down to 32 bytes, as long as there are rows for all threads.
  constexpr int64_t kFewBlocks = 256;
  int log_packs = log2_above(items, 5);
  while (log_packs > 1 && parts * (items >> log_packs) < kFewBlocks && s.terms / parts >= kBlock >> (log_packs - 1))
    --log_packs;
  const int64_t blocks = (items + (1 << log_packs) - 1) >> log_packs;
  const auto run = [&](auto is_aligned) {
    constexpr bool kAligned = is_aligned;
    const AcrossProblem<kAligned, T, C, Rounded> problem{
        s, Divisor(packs), items, parts, log_packs, {x, s.outer * s.terms * s.inner}, y};
    launch(call, across_kernel<kAligned, Operation, T, C, Rounded>, Grid(blocks, parts), kBlock, 0, problem);
  };
  is_aligned<N>(x) && s.inner % N == 0 ? run(std::true_type{}) : run(std::false_type{});
}

template <typename Operation, typename T, typename C, typename Rounded>
void along(Call& call, const Along& s, int64_t parts, const T* x, const Output<C, Rounded>& y) {
  constexpr int N = kPackWidth<T>;
  const bool aligned = is_aligned<N>(x) && s.length % N == 0;
  const int64_t packs = (s.length + N - 1) / N + (aligned || N == 1 ? 0 : 1), all = s.outer * packs;
  call.require(s.outer == 1 || all <= kLargest32, kBadShape, "has too many terms for a kernel of 32 bits");
  if (!call.ok()) return;
  const int64_t teams = s.outputs * parts, of_part = (all + parts - 1) / parts;
  // A block takes an output if each of its threads has several packs to load at once, or if there are few outputs.
  const bool has_work = of_part >= kBlock * kInFlight ? teams < 8192 || of_part > 2048 : teams < 1024;
  const bool whole_block = of_part > 32 * kInFlight && has_work;
  const int log_lanes = whole_block ? 8 : log2_above(of_part, 5);
  const AlongProblem<T, C, Rounded> problem{
      s, Divisor(s.outer > 1 ? std::max<int64_t>(1, packs) : 1), all, teams, parts, log_lanes, x, aligned, y};
  const int64_t blocks = ((teams << log_lanes) + kBlock - 1) / kBlock;
  launch(call, along_kernel<Operation, T, C, Rounded>, blocks, kBlock, 0, problem);
}

}  // namespace msops::reduce
