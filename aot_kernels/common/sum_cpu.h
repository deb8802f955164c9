// Sums over axes of an array on the CPU, in loops along the array's innermost axis, which vectorize.
#pragma once

#include <algorithm>

#include "axes.h"
#include "parallel.h"

namespace msops {

// The sum of n neighbours, as that of kLanes sums which each take every kLanes-th.
template <typename In>
MSOPS_CPU Compute<In> sum_of_run(const In* in, int64_t n) {
  constexpr int kVectors = 4, kWidth = 32 / sizeof(Compute<In>), kLanes = kVectors * kWidth;
  Compute<In> total = 0;
  int64_t j = 0;
  if (n >= kLanes) {
    Compute<In> sums[kVectors][kWidth] = {};
    for (; j + kLanes <= n; j += kLanes)
      for (int v = 0; v < kVectors; ++v)
#pragma omp simd
        for (int w = 0; w < kWidth; ++w) sums[v][w] += Compute<In>(in[j + v * kWidth + w]);
    for (int w = 0; w < kWidth; ++w) total += (sums[0][w] + sums[1][w]) + (sums[2][w] + sums[3][w]);
  }
  for (; j < n; ++j) total += Compute<In>(in[j]);
  return total;
}

// out[split][k] as in SumBody; the innermost axis of `summed` has stride 1. Index i is one sum.
template <typename Sum, typename In, typename Out>
struct SumAlong {
  Axes<1> kept, summed;
  int64_t outputs, terms, splits;
  const In* in;
  Out* out;

  MSOPS_CPU void operator()(int64_t i) const {
    constexpr int64_t kRun = 1024;  // terms of a plain sum
    const int64_t split = i / outputs, end = part_begin(terms, split + 1, splits);
    const int64_t length = summed.size[summed.count - 1];
    const In* from = in + kept.offset(0, i - split * outputs);
    Sum sum;
    for (int64_t r = part_begin(terms, split, splits), n; r < end; r += n) {
      n = std::min({kRun, end - r, length - r % length});
      sum += sum_of_run(from + summed.offset(0, r), n);
    }
    out[i] = Out(sum.total());
  }
};

// The same where the innermost axis of `kept` has stride 1, or all is summed. Index i is a run of neighbouring sums.
template <typename Sum, typename In, typename Out>
struct SumAcross {
  static constexpr int64_t kRun = 128;
  Axes<1> kept, summed;
  int64_t outputs, terms, splits, length, runs;  // of the innermost kept axis, which is cut into runs
  const In* in;
  Out* out;

  MSOPS_CPU void operator()(int64_t i) const {
    constexpr int kInFlight = 4;  // rows that are added to each other first
    const int64_t row = i / runs, first = (i - row * runs) * kRun, split = row * length / outputs;
    const int64_t n = std::min(kRun, length - first), end = part_begin(terms, split + 1, splits);
    const In* from = in + kept.offset(0, row * length - split * outputs + first);
    Sum sums[kRun];
    int64_t r = part_begin(terms, split, splits);
    for (; r + kInFlight <= end; r += kInFlight) {
      const In* rows[kInFlight];
      for (int a = 0; a < kInFlight; ++a) rows[a] = from + summed.offset(0, r + a);
#pragma omp simd
      for (int64_t j = 0; j < n; ++j)
        sums[j] +=
            (Compute<In>(rows[0][j]) + Compute<In>(rows[1][j])) + (Compute<In>(rows[2][j]) + Compute<In>(rows[3][j]));
    }
    for (; r < end; ++r) {
      const In* last = from + summed.offset(0, r);
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) sums[j] += Compute<In>(last[j]);
    }
    for (int64_t j = 0; j < n; ++j) out[row * length + first + j] = Out(sums[j].total());
  }
};

template <template <typename> class Sum, typename In, typename Out>
void sum_on_cpu(Call& call, const Axes<1>& kept, const Axes<1>& summed, int64_t splits, const In* in, Out* out) {
  const int64_t outputs = kept.total(), terms = summed.total();
  const double each = static_cast<double>(terms) / static_cast<double>(splits);
  if (summed.contiguous()) {
    on_cpu(call, outputs * splits, SumAlong<Sum<In>, In, Out>{kept, summed, outputs, terms, splits, in, out}, each);
    return;
  }
  using Body = SumAcross<Sum<In>, In, Out>;
  const int64_t length = kept.count > 0 ? kept.size[kept.count - 1] : 1;
  const int64_t runs = (length + Body::kRun - 1) / Body::kRun;
  on_cpu(call, outputs == 0 ? 0 : outputs / length * runs * splits,
         Body{kept, summed, outputs, terms, splits, length, runs, in, out},
         each * static_cast<double>(std::min(Body::kRun, length)));
}

}  // namespace msops
