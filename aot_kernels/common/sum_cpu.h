// On the CPU, sums over axes of an array run in loops along the array's innermost axis, which vectorize.
#pragma once

#include <algorithm>

#include "axes.h"
#include "parallel.h"

namespace msops {

// Adds up n neighbours as kLanes sums, each of every kLanes-th element.
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

// Share is one split's range of all terms.
struct Share {
  int64_t begin, end;

  MSOPS_CPU Share(int64_t terms, int64_t split, int64_t splits)
      : begin(splits == 1 ? 0 : part_begin(terms, split, splits)),
        end(splits == 1 ? terms : part_begin(terms, split + 1, splits)) {}
};

// Computes out[split][k] as SumBody does, where the innermost axis of `summed` has stride 1. Index i is one sum.
template <typename Sum, typename In, typename Out>
struct SumAlong {
  Axes<1> kept, summed;
  int64_t outputs, terms, splits;
  const In* in;
  Out* out;

  MSOPS_CPU void operator()(int64_t i) const {
    constexpr int64_t kRun = 1024;  // terms of a plain sum
    const int64_t split = splits == 1 ? 0 : i / outputs, length = summed.size[summed.count - 1];
    const Share share(terms, split, splits);
    const In* from = in + kept.offset(0, i - split * outputs);
    Sum sum;
    for (int64_t r = share.begin, n; r < share.end; r += n) {
      n = std::min({kRun, share.end - r, summed.count == 1 ? kRun : length - r % length});
      sum += sum_of_run(from + summed.offset(0, r), n);
    }
    out[i] = Out(sum.total());
  }
};

// Computes out[split][k] where the innermost axis of `kept` has stride 1, or all is summed. Index i is a run of
// neighbouring sums.
template <typename Sum, typename In, typename Out>
struct SumAcross {
  static constexpr int64_t kRun = 128;
  Axes<1> kept, summed;
  int64_t outputs, terms, splits, length, runs;  // length, runs: of the innermost kept axis, which is cut into runs
  const In* in;
  Out* out;

  MSOPS_CPU void operator()(int64_t i) const {
    constexpr int64_t kTerms = 64;  // of a plain sum
    using C = Compute<In>;
    const int64_t row = i / runs, first = (i - row * runs) * kRun, split = row * length / outputs;
    const int64_t n = std::min(kRun, length - first);
    const In* from = in + kept.offset(0, row * length - split * outputs + first);
    const Share share(terms, split, splits);
    Sum sums[kRun];
    for (int64_t begin = share.begin; begin < share.end; begin += kTerms) {
      const int64_t end = std::min(begin + kTerms, share.end);
      C plain[kRun] = {};
      int64_t r = begin;
      for (; r + 4 <= end; r += 4) {
        const In* rows[4];
        for (int a = 0; a < 4; ++a) rows[a] = from + summed.offset(0, r + a);
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) plain[j] += (C(rows[0][j]) + C(rows[1][j])) + (C(rows[2][j]) + C(rows[3][j]));
      }
      for (; r < end; ++r) {
        const In* last = from + summed.offset(0, r);
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) plain[j] += C(last[j]);
      }
      for (int64_t j = 0; j < n; ++j) sums[j] += plain[j];
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
