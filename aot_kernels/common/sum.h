// Sums in a fixed order, so that equal calls give equal bits: within teams of threads, and over axes of an array.
#pragma once

#include <algorithm>

#include "axes.h"
#include "parallel.h"

namespace msops {

// A running sum of elements of type T. It keeps what each addition loses, and so has about the error of one addition,
// however many there are.
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
  MSOPS_BOTH C total() const { return sum - sum == 0 ? sum + lost : sum; }  // what infinity lost is NaN
};

// A team is kLanes neighbouring GPU threads of one warp that work on one item; on the CPU it is one thread.
template <int kLanes, typename T>
MSOPS_BOTH T team_sum(T value) {
#ifdef __CUDA_ARCH__
  const unsigned team = (kLanes == 32 ? 0 : 1u << kLanes % 32) - 1;
  const unsigned mask = team << threadIdx.x % 32 / kLanes * kLanes;
  for (int distance = kLanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(mask, value, distance);
#endif
  return value;
}

template <int L>
struct Lanes {
  static constexpr int value = L;
};

// Calls `f(Lanes<L>{})` with the first of the offered L that has a lane for each of `work` pieces, else with the last.
template <int L, int... kLarger, typename F>
void with_lanes(int64_t work, F&& f) {
  if constexpr (sizeof...(kLarger) == 0) {
    f(Lanes<L>{});
  } else if (work <= L) {
    f(Lanes<L>{});
  } else {
    with_lanes<kLarger...>(work, static_cast<F&&>(f));
  }
}

// out[split][k] = sum of in[kept(k) + summed(r)] over the split's share of all r.
template <int kLanes, typename In, typename Out>
struct SumBody {
  Axes<1> kept, summed;
  int64_t outputs, terms, splits;
  const In* in;
  Out* out;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const Index item = i / kLanes, lane = i % kLanes;
    const Index split = item / static_cast<Index>(outputs), k = item - split * static_cast<Index>(outputs);
    const Index all = static_cast<Index>(terms), parts = static_cast<Index>(splits);
    const Index end = part_begin<Index>(all, split + 1, parts);
    const In* from = in + kept.offset(0, k);
    constexpr int kInFlight = 8;
    Sum<In> sum;
    Index r = part_begin<Index>(all, split, parts) + lane;
    for (; r + (kInFlight - 1) * kLanes < end; r += kInFlight * kLanes) {
      In values[kInFlight];
      for (int j = 0; j < kInFlight; ++j) values[j] = from[summed.offset(0, r + j * kLanes)];
      Compute<In> part = 0;
      for (int j = 0; j < kInFlight; j += 2) part += Compute<In>(values[j]) + Compute<In>(values[j + 1]);
      sum += part;
    }
    for (; r < end; r += kLanes) sum += Compute<In>(from[summed.offset(0, r)]);
    const Compute<In> total = team_sum<kLanes>(sum.total());
    if (lane == 0) out[item] = Out(total);
  }
};

template <typename In, typename Out>
void sum(Call& call, const Axes<1>& kept, const Axes<1>& summed, int64_t splits, const In* in, Out* out) {
  const int64_t outputs = kept.total(), terms = summed.total();
  // Neighbouring threads should read neighbouring elements: of one sum, or of as many sums. If those are too few to
  // fill a GPU, a team shares a sum all the same.
  const bool sums_rows = kept.count == 0 || (summed.count > 0 && summed.stride[0][summed.count - 1] == 1);
  const bool share = sums_rows || outputs * splits < 65536;
  with_lanes<1, 8, 32>(share && !call.on_cpu() ? terms / splits : 1, [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value;
    const SumBody<kLanes, In, Out> body{kept, summed, outputs, terms, splits, in, out};
    const int64_t threads = outputs * splits * kLanes;
    const int64_t largest = std::max({threads, terms, kept.extent(0) + summed.extent(0)});
    parallel_for(call, threads, largest, body, static_cast<double>(terms / splits));
  });
}

// out[j] = sum of in[i][j] over i, where the rows of `in` are `pitch` apart.
template <typename In, typename Out>
void sum_rows(Call& call, int64_t rows, int64_t columns, int64_t pitch, const In* in, Out* out) {
  Axes<1> kept, summed;
  kept.push(columns, {1});
  summed.push(rows, {pitch});
  sum(call, kept, summed, 1, in, out);
}

}  // namespace msops
