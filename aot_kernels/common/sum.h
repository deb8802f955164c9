// Sums within teams of threads and over axes of an array have a fixed order, so that they are reproducible bit for bit.
#pragma once

#include <algorithm>

#include "axes.h"
#include "pack.h"
#include "parallel.h"
#include "sum_cpu.h"

namespace msops {

// Sum is a running sum of elements of type T. It keeps what each addition loses, and so has about the error of one
// addition, however many there are.
template <typename T>
struct Sum {
  using C = Compute<T>;
  C sum = 0, lost = 0;

  MSOPS_BOTH Sum& operator+=(C x) {
    const C before = sum;
    sum += x;
    const C added = sum - before;
    lost += (before - (sum - added)) + (x - added);
    return *this;
  }
  MSOPS_BOTH C total() const { return sum - sum == 0 ? sum + lost : sum; }  // what an infinite sum lost is NaN
};

// ShortSum is a running sum of usually up to some hundred terms. Rounding to float16 hides what float loses in these.
template <typename T>
struct ShortSum : Sum<T> {};
template <>
struct ShortSum<Half> {
  float sum = 0;

  MSOPS_BOTH ShortSum& operator+=(float x) { return sum += x, *this; }
  MSOPS_BOTH float total() const { return sum; }
};

// Adds up values over a team: kLanes neighbouring GPU threads of one warp that work on one item, or one thread on the
// CPU. The sum is over the lanes whose distance is a multiple of kStride. All teams of the warp must call this, or have
// returned.
template <int kLanes, int kStride = 1, typename T>
MSOPS_BOTH T team_sum(T value) {
#ifdef __CUDA_ARCH__
  for (int distance = kLanes / 2; distance >= kStride; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
#endif
  return value;
}
// Replaces values by their sums over a team whose size, a power of 2, is known at the launch. The values take turns, so
// that none waits for another's shuffle.
template <int kValues, typename T>
MSOPS_BOTH void team_sum([[maybe_unused]] T (&values)[kValues], [[maybe_unused]] unsigned lanes) {
#ifdef __CUDA_ARCH__
  for (unsigned distance = lanes / 2; distance > 0; distance /= 2)
    for (T& value : values) value += __shfl_xor_sync(~0u, value, distance);
#endif
}
#ifdef __CUDACC__
// Returns the sum over the lanes of a warp up to and with this one. All of them call this.
template <typename T>
__device__ __forceinline__ T warp_prefix_sum(T value) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T other = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}
#endif

// out[split][k] = sum of in[kept(k) + summed(r)] over the split's part of all r. Elements are read in packs of N
// neighbours, which belong to one sum or, if kAcross, to N sums; `terms` or `outputs` then counts packs. If kEnds, the
// sum is along one axis, by packs that may begin and end anywhere, and `terms` counts elements. A team of 2^lane_bits
// threads shares a sum. `out` has elements of Rounded if `rounds`, else of Compute<In>; `rounds` is a runtime argument,
// since that costs no time.
template <bool kAcross, bool kEnds, int N, typename In, typename Rounded>
struct SumBody {
  using C = Compute<In>;
  Axes<1> kept, summed;
  int64_t outputs, terms, splits;
  int lane_bits;
  const In* in;
  void* out;
  bool rounds;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    constexpr int kSums = kAcross ? N : 1;
    const Index lanes = Index(1) << lane_bits, item = i >> lane_bits, lane = i & (lanes - 1);
    const Index split = item / static_cast<Index>(outputs), k = item - split * static_cast<Index>(outputs);
    const Index all = static_cast<Index>(terms), parts = static_cast<Index>(splits);
    const In* from = in + kept.offset(0, k * kSums);
    Sum<In> sums[kSums];
    Index r = part_begin<Index>(all, split, parts), end = part_begin<Index>(all, split + 1, parts);
    In first = In(0), last = In(0);
    if (kEnds) {  // the elements before and after the whole packs, one for each lane
      from += r;
      const Index run = end - r, to_pack = elements_to_pack<N>(from), head = to_pack < run ? to_pack : run;
      const Index tail = (run - head) % N;
      if (lane < head) first = from[lane];
      if (lane < tail) last = from[run - tail + lane];
      from += head, r = 0, end = (run - head) / N;
    }
    if (summed.count <= 1) {  // there are no divisions, and up to 8 loads of a lane are in flight
      const Index step = summed.count ? static_cast<Index>(summed.stride[0][0]) : 0;
      const auto offset = [step](Index term) { return term * step; };
      for (; r + 8 * lanes <= end; r += 8 * lanes) add<8, false>(from, offset, r + lane, end, sums);
      for (; r < end; r += 4 * lanes) add<4, true>(from, offset, r + lane, end, sums);
    } else {
      const auto offset = [this](Index term) { return summed.offset(0, term); };
      for (; r < end; r += 4 * lanes) add<4, true>(from, offset, r + lane, end, sums);
    }
    if (kEnds) sums[0] += C(first) + C(last);
    C totals[kSums];
    for (int s = 0; s < kSums; ++s) totals[s] = sums[s].total();
    team_sum(totals, static_cast<unsigned>(lanes));
    if (lane != 0) return;
    for (int s = 0; s < kSums; ++s) put(item * kSums + s, totals[s]);
  }

 private:
  // Adds this lane's next kPacks packs before `end`: in pairs, pairs of pairs and so on, then to the running sums.
  template <int kPacks, bool kLast, typename Offset, typename Index, int kSums>
  MSOPS_BOTH void add(const In* from, const Offset& offset, Index r, [[maybe_unused]] Index end,
                      Sum<In> (&sums)[kSums]) const {
    constexpr int kTerms = N / kSums, kAll = kPacks * kTerms;
    Pack<In, N> packs[kPacks] = {};
    for (int j = 0; j < kPacks; ++j, r += Index(1) << lane_bits)
      if (!kLast || r < end) packs[j] = load<N>(from + offset(r * kTerms));
    for (int s = 0; s < kSums; ++s) {
      C values[kAll];
      for (int t = 0; t < kAll; ++t) values[t] = C(packs[t / kTerms].values[t % kTerms + s]);
      for (int half = kAll / 2; half > 0; half /= 2)
        for (int t = 0; t < half; ++t) values[t] += values[t + half];
      sums[s] += values[0];
    }
  }

  template <typename Index>
  MSOPS_BOTH void put(Index at, C total) const {
    if (rounds) {
      static_cast<Rounded*>(out)[at] = Rounded(total);
      return;
    }
    static_cast<C*>(out)[at] = total;
  }
};

template <typename In, typename Out>
void sum(Call& call, const Axes<1>& kept, const Axes<1>& summed, int64_t splits, const In* in, Out* out) {
  if (call.is_on_cpu()) return sum_on_cpu<Sum>(call, kept, summed, splits, in, out);
  constexpr int kPack = kPackWidth<In>;
  constexpr bool kRounds = !std::is_same<Out, Compute<In>>::value;
  using Rounded = std::conditional_t<kRounds || sizeof(In) == 8, Out, Half>;  // one kernel for both results of float
  const int64_t outputs = kept.total(), terms = summed.total(), largest_offset = kept.extent(0) + summed.extent(0);
  // Launches teams of 1 thread, of 8, or of a warp: the smallest with a thread for each of `work` pieces.
  const auto launch = [&](auto across, auto ends, auto width, int64_t work, int fewest_bits) {
    constexpr bool kAcross = across, kEnds = ends;
    constexpr int N = width;
    const int lane_bits = std::max(fewest_bits, work <= 1 ? 0 : work <= 8 ? 3 : 5);
    const int64_t items = kAcross ? outputs / N : outputs, steps = kAcross || kEnds ? terms : terms / N;
    const auto threads = [&](int64_t of) { return (of * splits) << lane_bits; };
    if (std::max({threads(items), terms, outputs * splits, largest_offset}) <= kLargest32) {
      const SumBody<kAcross, kEnds, N, In, Rounded> body{kept,      summed, items, steps,  splits,
                                                         lane_bits, in,     out,   kRounds};
      on_gpu_with<uint32_t>(call, threads(items), body);
    } else {  // one kernel serves all cases
      const SumBody<false, false, 1, In, Rounded> body{kept,      summed, outputs, terms,  splits,
                                                       lane_bits, in,     out,     kRounds};
      on_gpu_with<int64_t>(call, threads(outputs), body);
    }
  };
  constexpr std::true_type yes;
  constexpr std::false_type no;
  constexpr Constant<kPack> pack;
  // Neighbouring threads should read neighbouring elements, of one sum or of as many sums. If there are too few sums to
  // fill a GPU, a team shares a sum all the same.
  const bool along = summed.contiguous() || kept.count == 0;
  const bool enough = outputs * splits >= 65536;
  const bool packs = kept.packs<kPack>() && summed.packs<kPack>() && is_aligned<kPack>(in);
  if (packs && summed.contiguous()) {
    launch(no, no, pack, terms / kPack / splits, 3);
  } else if (packs && kept.contiguous()) {
    launch(yes, no, pack, enough ? 1 : terms / splits, 0);
  } else if (summed.contiguous() && summed.count == 1 && terms / splits >= 8 * kPack) {
    launch(no, yes, pack, terms / kPack / splits, 3);
  } else {
    launch(no, no, Constant<1>{}, along || !enough ? terms / splits : 1, 0);
  }
}

// out[j] = sum of in[i][j] over i, where the rows of `in` have the stride `pitch`.
template <typename In, typename Out>
void sum_rows(Call& call, int64_t rows, int64_t columns, int64_t pitch, const In* in, Out* out) {
  Axes<1> kept, summed;
  kept.push(columns, {1});
  summed.push(rows, {pitch});
  sum(call, kept, summed, 1, in, out);
}

// partial[part][j] = sum of f(i, j) over the part's rows i. Neighbouring threads have neighbouring columns.
template <typename C, typename F>
struct SumOfFunction {
  int64_t rows, columns, parts;
  F f;
  C* partial;

  template <typename Index>
  MSOPS_BOTH void operator()(Index at) const {
    const Index width = static_cast<Index>(columns), part = at / width, j = at - part * width;
    const int64_t end = part_begin<int64_t>(rows, part + 1, parts);
    Sum<C> sum;
    for (int64_t i = part_begin<int64_t>(rows, part, parts); i < end; ++i) sum += f(i, int64_t{j});
    partial[at] = sum.total();
  }
};

// Adds up a run of neighbouring columns on the CPU, row by row.
template <typename C, typename F>
struct SumOfFunctionOnCpu {
  static constexpr int64_t kRun = 64;  // columns
  SumOfFunction<C, F> all;

  int64_t runs() const { return (all.columns + kRun - 1) / kRun; }

  MSOPS_CPU void operator()(int64_t item) const {
    const int64_t part = item / runs(), first = item % runs() * kRun, count = std::min(kRun, all.columns - first);
    const int64_t end = part_begin(all.rows, part + 1, all.parts);
    Sum<C> sums[kRun];
    for (int64_t i = part_begin(all.rows, part, all.parts); i < end; ++i)
#pragma omp simd
      for (int64_t k = 0; k < count; ++k) sums[k] += all.f(i, first + k);
    for (int64_t k = 0; k < count; ++k) all.partial[part * all.columns + first + k] = sums[k].total();
  }
};

// out[j] = sum of f(i, j) over the rows i, where `f` is an object with `MSOPS_BOTH C operator()(int64_t i, int64_t j)
// const`. `partial` is scratch for parts * columns sums, each over a part of the rows.
template <typename C, typename F, typename Out>
void sum_rows_of(Call& call, const F& f, int64_t rows, int64_t columns, int64_t parts, C* partial, Out* out) {
  const SumOfFunction<C, F> all{rows, columns, parts, f, partial};
  const SumOfFunctionOnCpu<C, F> on_one{all};
  if (call.is_on_cpu()) {
    const double terms = static_cast<double>(rows / std::max<int64_t>(1, parts) + 1);
    on_cpu(call, parts * on_one.runs(), on_one, terms * static_cast<double>(std::min(on_one.kRun, columns)));
  } else {
    on_gpu(call, parts * columns, parts * columns, all);
  }
  sum_rows(call, parts, columns, columns, static_cast<const C*>(partial), out);
}

}  // namespace msops
