// The kernels of long rows, and of all rows with softcap or label smoothing: `lanes` threads read a row once, in chunks
// of kPacks packs for each thread. A chunk takes one exponential for each element and one more to rescale the sum
// before it to the new maximum.
//
// Probabilities are read in packs beside those of their logits. Their sums are relative to the maximum so far, as that
// of exponentials is: then all terms have one sign, and no digits cancel. Their gradient takes these kernels for all
// rows: it has no reductions to save.
#pragma once

#include "../common/parallel.h"
#include "gpu_row.h"

namespace msops::cross_entropy {

constexpr int kPacks = 4;  // a thread's packs of a chunk
// kMostThreads is the most threads of a block. Exponentials of double take many registers, and so do probabilities, of
// which a thread has as many packs in flight as of logits.
template <typename T, Form kForm>
constexpr int kMostThreads = sizeof(T) == 8 || kForm == Form::kProbabilities ? 512 : 1024;

// RowLanes are the threads that share a row. Up to a warp, several rows are in a block; else one is. Their number is
// known at the launch, so that one kernel serves rows of all lengths; that of a Team is known at compile time.
struct RowLanes {
  int count, lane;
  int64_t row;

  explicit __device__ RowLanes(int count) : count(count), lane(threadIdx.x & (count - 1)) {
    row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / count) + threadIdx.x / count;
  }
};

// RowReader computes the sums of a row. Until the end, `max` is the largest logit, before the softcap, which keeps the
// order, and `sum` lacks the correction of Power.
template <typename T, bool kPlain, Form kForm>
class RowReader {
 public:
  using C = Compute<T>;
  static constexpr int N = kPackWidth<T>;

  __device__ RowReader(const Loss<T, kForm>& loss, C own)
      : loss_(loss), reference_(loss.reference(own)), spread_(loss.smoothing / C(loss.classes)) {}

  // Adds a lane's share of a row.
  __device__ void add(const T* row, int64_t length, int lane, int lanes) {
    bool is_apart = false;
    if constexpr (kHasProbabilities)
      probabilities_ = loss_.probabilities + (row - loss_.logits), is_apart = loss_.is_apart;
    const RowParts parts = RowParts::of<N>(row, length, is_apart);
    const T* from = row + parts.head + int64_t{lane} * N;
    for (int k = lane; k < parts.packs; k += kPacks * lanes, from += int64_t{kPacks} * lanes * N) {
      Pack<T, N> packs[kPacks];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) packs[i] = load_or_lowest<N>(from + i * lanes * N, k + i * lanes < parts.packs);
      add_chunk(packs, k, lanes, parts);
    }
    for (int j = lane; j < parts.head; j += lanes) add_one(row, j);
    for (int j = lane; j < parts.tail; j += lanes) add_one(row, length - parts.tail + j);
  }

  // Returns the sums of the whole row, which the first lane gets; all threads of the block call this.
  __device__ RowSums<C> total(const RowLanes& lanes) {
    __shared__ RowSums<C> of_warps[kMostThreads<T, kForm> / 32];
    combine_lanes(lanes.count < 32 ? lanes.count : 32);
    if (lanes.count > 32) {
      if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sums_;
      __syncthreads();
      if (threadIdx.x < 32) {
        sums_ = threadIdx.x < blockDim.x / 32 ? of_warps[threadIdx.x] : RowSums<C>{};
        combine_lanes(32);
      }
    }
    RowSums<C> result = sums_;
    result.max = x(sums_.max);
    result.sum *= Power<T>(result.max).correction();
    if (!kHasProbabilities && !loss_.weight) result.weights = C(loss_.classes);
    return result;
  }

 private:
  static constexpr bool kHasProbabilities = kForm == Form::kProbabilities;

  __device__ C x(C logit) const { return x_of<kPlain>(loss_, logit); }

  __device__ void add_chunk(const Pack<T, N> (&packs)[kPacks], int k, int lanes, const RowParts& parts) {
    [[maybe_unused]] Pack<T, N> probabilities[kPacks] = {};
    if constexpr (kHasProbabilities) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
        if (k + i * lanes < parts.packs)
          probabilities[i] = load<N>(probabilities_ + parts.head + int64_t{k + i * lanes} * N);
    }
    const Power<T> power = raise(largest(packs));
    C sums[kPacks] = {};
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
      if (k + i * lanes < parts.packs)
        for (const T& value : packs[i].values) sums[i] += power(x(C(value)));
    sums_.sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if constexpr (kHasProbabilities) {
      C masses[kPacks] = {}, below[kPacks] = {};
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
        if (k + i * lanes < parts.packs)
          for (int n = 0; n < N; ++n) {
            const C a = a_of<kPlain>(loss_, spread_, parts.head + int64_t{k + i * lanes} * N + n,
                                     C(probabilities[i].values[n]));
            masses[i] += a, below[i] += a * (x(C(packs[i].values[n])) - power.shift());
          }
      sums_.weights += (masses[0] + masses[1]) + (masses[2] + masses[3]);
      sums_.below += (below[0] + below[1]) + (below[2] + below[3]);
    } else if constexpr (!kPlain) {
      if (loss_.smoothing == 0) return;
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
        if (k + i * lanes < parts.packs)
          for (int n = 0; n < N; ++n) add_below(parts.head + int64_t{k + i * lanes} * N + n, C(packs[i].values[n]));
    }
  }

  __device__ void add_one(const T* row, int64_t j) {
    const C logit = C(row[j]);
    const Power<T> power = raise(logit);
    sums_.sum += power(x(logit));
    if constexpr (kHasProbabilities) {
      const C a = a_of<kPlain>(loss_, spread_, j, C(probabilities_[j]));
      sums_.weights += a, sums_.below += a * (x(logit) - power.shift());
    } else if constexpr (!kPlain) {
      if (loss_.smoothing > 0) add_below(j, logit);
    }
  }

  // Rescales the sums if an element is larger than the maximum.
  __device__ Power<T> raise(C logit) {
    const C max = ::fmax(sums_.max, logit);
    const Power<T> power(x(max));
    sums_.sum *= power.factor(x(sums_.max));
    if constexpr (kHasProbabilities) sums_.below = below_for(power, sums_.max, sums_.weights, sums_.below);
    sums_.max = max;
    return power;
  }

  // Returns the sum of a_j (x_j - max) for the maximum of `power`, given those for an older maximum.
  __device__ C below_for(const Power<T>& power, C older, C mass, C below) const {
    return below + mass * (Power<T>(x(older)).shift() - power.shift());
  }

  __device__ void add_below(int64_t j, C logit) {
    const C weight = loss_.weight ? C(loss_.weight[j]) : C(1);
    sums_.weights += weight;
    sums_.below += weight * (x(logit) - reference_);
  }

  __device__ void combine_lanes(int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      const C max = __shfl_xor_sync(~0u, sums_.max, distance), sum = __shfl_xor_sync(~0u, sums_.sum, distance);
      const C larger = ::fmax(sums_.max, max);
      const Power<T> power(x(larger));
      sums_.sum = sums_.sum * power.factor(x(sums_.max)) + sum * power.factor(x(max));
      if constexpr (kHasProbabilities || !kPlain) {
        const C weights = __shfl_xor_sync(~0u, sums_.weights, distance);
        C below = __shfl_xor_sync(~0u, sums_.below, distance);
        if constexpr (kHasProbabilities) {
          sums_.below = below_for(power, sums_.max, sums_.weights, sums_.below);
          below = below_for(power, max, weights, below);
        }
        sums_.weights += weights, sums_.below += below;
      }
      sums_.max = larger;
    }
  }

  const Loss<T, kForm>& loss_;
  C reference_, spread_;
  const T* probabilities_ = nullptr;  // the row's
  RowSums<C> sums_;
};

template <typename T, bool kPlain, Form kForm>
__global__ void __launch_bounds__(kMostThreads<T, kForm>)
    loss_kernel(Loss<T, kForm> loss, int row_lanes, Compute<T>* losses, RowStats<Compute<T>>* stats) {
  using C = Compute<T>;
  const RowLanes lanes(row_lanes);
  const bool is_row = lanes.row < loss.rows;
  const int64_t label = is_row ? loss.label_of(lanes.row) : loss.ignored;
  const bool counts = label != loss.ignored;
  const T* const row = loss.logits + lanes.row * loss.classes;
  const C own = counts && loss.is_class(label) ? x_of<kPlain>(loss, C(row[label])) : C(0);
  RowReader<T, kPlain, kForm> reader(loss, own);
  if (counts) reader.add(row, loss.classes, lanes.lane, lanes.count);
  const RowSums<C> sums = reader.total(lanes);
  if (!is_row || lanes.lane != 0) return;
  RowStats<C> of_row;
  if (counts) of_row = {sums.max, 1 / sums.sum};
  losses[lanes.row] = counts ? loss.of_row(label, own, sums) : C(0);
  stats[lanes.row] = of_row;
  loss.store_of_form(lanes.row, of_row, sums);
}

// RowWriter computes the gradient of a row: that of the logits, `to`, or that of the probabilities, or both. What is
// not wanted is null. The logits of a row that does not count are not read.
template <typename T, bool kPlain, Form kForm>
struct RowWriter {
  using C = Compute<T>;
  static constexpr int N = kPackWidth<T>;
  const Loss<T, kForm>& loss;
  Slope<C> slope;
  Power<T> power;
  int64_t label;
  const T *from, *probabilities;
  T *to, *to_probabilities;
  C log_sum;
  bool counts, is_apart;

  // Writes a lane's share of one of the row's chunks. The first chunk also has what is outside of whole packs.
  __device__ void write(int chunk, int lane, int lanes) const {
    const RowParts parts = RowParts::of<N>(from, loss.classes, is_apart);
    const int first = chunk * kPacks * lanes + lane;
    Pack<T, N> packs[kPacks], of_labels[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int k = first + i * lanes;
      packs[i] = of_labels[i] = {};
      if (counts && k < parts.packs) packs[i] = load<N>(from + parts.head + int64_t{k} * N);
      if (probabilities && k < parts.packs) of_labels[i] = load<N>(probabilities + parts.head + int64_t{k} * N);
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int k = first + i * lanes;
      if (k < parts.packs) write_pack(packs[i], of_labels[i], parts.head + int64_t{k} * N);
    }
    if (chunk > 0) return;
    for (int j = lane; j < parts.head; j += lanes) write_one(j);
    for (int j = lane; j < parts.tail; j += lanes) write_one(loss.classes - parts.tail + j);
  }

 private:
  // Returns the gradient with respect to a logit, of which `less` is subtracted before the softcap's derivative.
  __device__ C gradient(int64_t j, C logit, C less) const {
    const C x = x_of<kPlain>(loss, logit);
    C result = slope.exponential * power(x) - less;
    if constexpr (!kPlain) {
      result -= slope.uniform * (loss.weight && slope.uniform != 0 ? C(loss.weight[j]) : C(1));
      if (loss.softcap > 0) result *= 1 - (x / loss.softcap) * (x / loss.softcap);
    }
    return result;
  }

  // Returns label * q_j w_j, or 0 without probabilities.
  __device__ C less([[maybe_unused]] int64_t j, [[maybe_unused]] C probability) const {
    if constexpr (kForm == Form::kProbabilities)
      return a_of<true>(loss, C(0), j, slope.label * probability);
    else
      return 0;
  }

  // Returns the gradient with respect to a probability.
  __device__ C gradient_of_probability(int64_t j, C logit) const {
    const C result = slope.label * (log_sum + (power.shift() - x_of<kPlain>(loss, logit)));
    return loss.weight ? result * C(loss.weight[j]) : result;
  }

  // The label's element is stored twice by one thread, the second time as it shall be. Its logit is read before the
  // first time, since `to` may be `from`.
  __device__ void write_pack(const Pack<T, N>& logits, const Pack<T, N>& of_labels, int64_t j) const {
    Pack<T, N> pack;
    if (to_probabilities) {
      for (int n = 0; n < N; ++n) assign(pack.values[n], gradient_of_probability(j + n, C(logits.values[n])));
      store_at_once(to_probabilities + j, pack);
    }
    if (kForm == Form::kProbabilities && !to) return;
    for (int n = 0; n < N; ++n)
      assign(pack.values[n], gradient(j + n, C(logits.values[n]), less(j + n, C(of_labels.values[n]))));
    const bool has_label = j <= label && label < j + N;
    const C own = has_label ? C(from[label]) : C(0);
    store_at_once(to + j, pack);
    if (has_label) write_one(label, own);
  }

  __device__ void write_one(int64_t j) const { write_one(j, counts ? C(from[j]) : C(0)); }
  __device__ void write_one(int64_t j, C logit) const {
    if (to_probabilities) assign(to_probabilities[j], gradient_of_probability(j, logit));
    if (kForm == Form::kProbabilities && !to) return;
    assign(to[j], gradient(j, logit, probabilities ? less(j, C(probabilities[j])) : j == label ? slope.label : C(0)));
  }
};

// With probabilities, three blocks fit a multiprocessor.
template <typename T, bool kPlain, Form kForm>
__global__ void __launch_bounds__(kThreads, kForm == Form::kProbabilities && kPlain && sizeof(T) < 8 ? 3 : 0)
    gradient_kernel(Loss<T, kForm> loss, int row_lanes, const RowStats<Compute<T>>* stats, const Compute<T>* totals,
                    const Compute<T>* dloss, bool is_per_row, bool is_apart, int chunks, T* dlogits, T* dlabels) {
  using C = Compute<T>;
  const RowLanes lanes(row_lanes);
  if (lanes.row >= loss.rows) return;
  const int64_t label = loss.label_of(lanes.row), first = lanes.row * loss.classes;
  const bool counts = label != loss.ignored;
  Slope<C> slope;
  const RowStats<C> of_row = stats[lanes.row];
  const Power<T> power(of_row.max);
  if (counts) slope = loss.slope(lanes.row, label, of_row, totals, dloss[is_per_row ? lanes.row : 0]);
  slope.exponential *= power.correction();
  const T* probabilities = nullptr;
  T *to = dlogits + first, *to_probabilities = nullptr;
  C log_sum = 0;
  if constexpr (kForm == Form::kProbabilities) {
    if (dlogits) probabilities = loss.probabilities + first;
    if (!dlogits) to = nullptr;
    if (dlabels) to_probabilities = dlabels + first, log_sum = of_row.log_sum();
  }
  const RowWriter<T, kPlain, kForm> writer{
      loss,    slope,  power,   counts ? label : -1, loss.logits + first, probabilities, to, to_probabilities,
      log_sum, counts, is_apart};
  for (int chunk = static_cast<int>(blockIdx.y); chunk < chunks; chunk += static_cast<int>(gridDim.y))
    writer.write(chunk, lanes.lane, lanes.count);
}

}  // namespace msops::cross_entropy
