// On the GPU, `lanes` threads read a row once, in chunks of kPacks packs for each thread. A chunk takes one
// exponential for each element and one more to rescale the sum before it to the new maximum.
//
// A row may begin anywhere: its elements before the first whole pack and after the last one are taken one by one.
//
//   packs of a row            lanes                       why
//   up to 128                 the fewest that take a row  several rows in a block, no barrier
//                             in one chunk, 4 to 32
//   up to 512, many rows      32                          no barrier, and enough warps to fill a GPU
//   up to 2048, or many rows  256                         four or more blocks on each multiprocessor hide the barriers
//   more                      1024                        as many bytes in flight as a multiprocessor takes
#pragma once

#include "../common/activations.h"
#include "../common/gpu/approx.h"
#include "../common/pack.h"
#include "../common/parallel.h"
#include "../common/team.h"
#include "loss.h"

namespace msops::cross_entropy {

constexpr int kPacks = 4;  // a thread's packs of a chunk
constexpr int kSumThreads = 1024;
// kMostThreads<T> is the most threads of a block. Exponentials of double take many registers.
template <typename T>
constexpr int kMostThreads = sizeof(T) == 8 ? 512 : 1024;

// Returns e^(x - max) for a row's maximum. On float16, `max` and x are exact, and the difference of their products by
// log2(e) takes one instruction; all exponentials then have one common error, which `correction` undoes.
template <typename T>
class Power {
 public:
  using C = Compute<T>;

  explicit __device__ Power(C max) : max_(max == C(-HUGE_VAL) ? C(0) : max) {  // infinity - infinity would be NaN
    if constexpr (kFused) scaled_ = __fmul_rn(max_, kLog2E<float>);
  }

  __device__ C operator()(C x) const {
    if constexpr (kFused) {
      return ex2_approx_ftz(fmaf(x, kLog2E<float>, -scaled_));
    } else if constexpr (sizeof(C) == 4) {
      return ex2_approx_ftz((x - max_) * kLog2E<float>);
    } else {
      return exp(x - max_);
    }
  }

  // Returns the factor that makes sums for an older, smaller maximum sums for this one.
  __device__ C factor(C older) const {
    if constexpr (kFused) {
      return ex2_approx_ftz(__fmul_rn(older, kLog2E<float>) - scaled_);
    } else {
      return (*this)(older);
    }
  }
  __device__ C correction() const {
    if constexpr (kFused) {
      return ex2_approx_ftz(-fmaf(max_, kLog2E<float>, -scaled_));
    } else {
      return 1;
    }
  }

 private:
  static constexpr bool kFused = std::is_same<T, Half>::value;

  C max_, scaled_ = 0;
};

// Returns the largest element of several packs. NaN is passed over: the exponentials' sum has it.
template <typename T, int N>
__device__ __forceinline__ Compute<T> largest(const Pack<T, N> (&packs)[kPacks]) {
  using C = Compute<T>;
#if __CUDA_ARCH__ >= 800  // the first that has max.f16x2
  constexpr bool kInPairs = std::is_same<T, Half>::value;
#else
  constexpr bool kInPairs = false;
#endif
  if constexpr (kInPairs) {
    uint32_t words[kPacks * N / 2];
    memcpy(words, packs, sizeof words);
    for (int half = kPacks * N / 4; half > 0; half /= 2)
      for (int k = 0; k < half; ++k) words[k] = max_f16x2(words[k], words[k + half]);
    Pack<Half, 2> last;
    memcpy(&last, words, sizeof last);
    return fmaxf(last.values[0], last.values[1]);
  } else {
    C values[kPacks];
    for (int i = 0; i < kPacks; ++i) {
      values[i] = C(-HUGE_VAL);
      for (const T& value : packs[i].values) values[i] = ::fmax(values[i], C(value));
    }
    return ::fmax(::fmax(values[0], values[1]), ::fmax(values[2], values[3]));
  }
}

// Returns a pack of elements that are no row's maximum.
template <typename T, int N>
__device__ __forceinline__ Pack<T, N> lowest_pack() {
  Pack<T, N> pack;
  for (T& value : pack.values) value = T(-HUGE_VALF);
  return pack;
}

// PlacesOfRow says how many elements stand before a row's whole packs, how many packs there are, and how many elements
// stand after them.
struct PlacesOfRow {
  int head, packs, tail;

  template <int N, typename T>
  static __device__ PlacesOfRow of(const T* row, int64_t length) {
    const int64_t to_pack = elements_to_pack<N>(row), head = to_pack < length ? to_pack : length;
    const int64_t packs = (length - head) / N;
    return {static_cast<int>(head), static_cast<int>(packs), static_cast<int>(length - head - packs * N)};
  }
};

// Returns x_j of a logit. If kPlain, there is neither softcap nor label smoothing.
template <bool kPlain, typename T, bool kGeneral>
__device__ __forceinline__ Compute<T> x_of(const Loss<T, kGeneral>& loss, Compute<T> logit) {
  if constexpr (!kPlain)
    if (loss.softcap > 0) return loss.softcap * Activations<T>::tanh(logit / loss.softcap);
  return logit;
}

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
template <typename T, bool kPlain, bool kGeneral>
class RowReader {
 public:
  using C = Compute<T>;
  static constexpr int N = kPackWidth<T>;

  __device__ RowReader(const Loss<T, kGeneral>& loss, C own) : loss_(loss), reference_(loss.reference(own)) {}

  // Adds a lane's share of a row.
  __device__ void add(const T* row, int64_t length, int lane, int lanes) {
    const PlacesOfRow places = PlacesOfRow::of<N>(row, length);
    const T* from = row + places.head + int64_t{lane} * N;
    for (int k = lane; k < places.packs; k += kPacks * lanes, from += int64_t{kPacks} * lanes * N) {
      Pack<T, N> packs[kPacks];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        packs[i] = lowest_pack<T, N>();
        if (k + i * lanes < places.packs) packs[i] = load<N>(from + i * lanes * N);
      }
      add_chunk(packs, k, lanes, places);
    }
    for (int j = lane; j < places.head; j += lanes) add_one(row, j);
    for (int j = lane; j < places.tail; j += lanes) add_one(row, length - places.tail + j);
  }

  // Returns the sums of the whole row, which the first lane gets; all threads of the block call this.
  __device__ RowSums<C> total(const RowLanes& lanes) {
    __shared__ RowSums<C> of_warps[kMostThreads<T> / 32];
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
    if (!loss_.weight) result.weights = C(loss_.classes);
    return result;
  }

 private:
  __device__ C x(C logit) const { return x_of<kPlain>(loss_, logit); }

  __device__ void add_chunk(const Pack<T, N> (&packs)[kPacks], int k, int lanes, const PlacesOfRow& places) {
    const Power<T> power = raise(largest(packs));
    C sums[kPacks] = {};
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
      if (k + i * lanes < places.packs)
        for (const T& value : packs[i].values) sums[i] += power(x(C(value)));
    sums_.sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if constexpr (!kPlain) {
      if (loss_.smoothing == 0) return;
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
        if (k + i * lanes < places.packs)
          for (int n = 0; n < N; ++n) add_below(places.head + int64_t{k + i * lanes} * N + n, C(packs[i].values[n]));
    }
  }

  __device__ void add_one(const T* row, int64_t j) {
    const C logit = C(row[j]);
    const Power<T> power = raise(logit);
    sums_.sum += power(x(logit));
    if constexpr (!kPlain)
      if (loss_.smoothing > 0) add_below(j, logit);
  }

  // Rescales the sum if an element is larger than the maximum.
  __device__ Power<T> raise(C logit) {
    const C max = ::fmax(sums_.max, logit);
    const Power<T> power(x(max));
    sums_.sum *= power.factor(x(sums_.max));
    sums_.max = max;
    return power;
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
      sums_.max = larger;
      if constexpr (!kPlain) {
        sums_.weights += __shfl_xor_sync(~0u, sums_.weights, distance);
        sums_.below += __shfl_xor_sync(~0u, sums_.below, distance);
      }
    }
  }

  const Loss<T, kGeneral>& loss_;
  C reference_;
  RowSums<C> sums_;
};

template <typename T, bool kPlain, bool kGeneral>
__global__ void __launch_bounds__(kMostThreads<T>)
    loss_kernel(Loss<T, kGeneral> loss, int row_lanes, Compute<T>* losses, RowStats<Compute<T>>* stats) {
  using C = Compute<T>;
  const RowLanes lanes(row_lanes);
  const bool is_row = lanes.row < loss.rows;
  const int64_t label = is_row ? loss.labels[lanes.row] : loss.ignored;
  const bool counts = label != loss.ignored;
  const T* const row = loss.logits + lanes.row * loss.classes;
  const C own = counts && loss.is_class(label) ? x_of<kPlain>(loss, C(row[label])) : C(0);
  RowReader<T, kPlain, kGeneral> reader(loss, own);
  if (counts) reader.add(row, loss.classes, lanes.lane, lanes.count);
  const RowSums<C> sums = reader.total(lanes);
  if (!is_row || lanes.lane != 0) return;
  RowStats<C> of_row;
  if (counts) of_row = {sums.max, 1 / sums.sum};
  losses[lanes.row] = counts ? loss.of_row(label, own, sums) : C(0);
  stats[lanes.row] = of_row;
  if constexpr (kGeneral) loss.store_lse(lanes.row, of_row);
}

// Each block adds up its part of `count` Totals: those in `from` or, if that is null, those of the rows. It writes its
// sum to `partial` or, if that is null, finishes the loss.
template <typename T, bool kGeneral>
__global__ void __launch_bounds__(kSumThreads)
    totals_kernel(Loss<T, kGeneral> loss, int64_t count, const Compute<T>* losses, const RowStats<Compute<T>>* stats,
                  const Compute<T>* from, Compute<T>* partial, Compute<T>* result, Compute<T>* totals) {
  using C = Compute<T>;
  const int64_t end = part_begin<int64_t>(count, blockIdx.x + 1, gridDim.x);
  Totals<C> sums;
  for (int64_t i = part_begin<int64_t>(count, blockIdx.x, gridDim.x) + threadIdx.x; i < end; i += kSumThreads) {
    const C* const there = from + Totals<C>::kNumbers * i;
    sums += from ? Totals<C>{there[0], there[1], there[2], there[3]} : loss.totals_of(i, losses[i], stats[i]);
  }
  using Block = TeamShape<kSumThreads, 1, 0>;
  __shared__ SharedOfWarp shared[kSharedOfTeam<Block>];
  const Team<C, Block> block(threadIdx.x, shared);
  const auto add = [](auto a, const auto& b) { return a += b; };
  sums = block.over_lanes(sums, Totals<C>{}, add);
  if (partial) {
    C* const to = partial + Totals<C>::kNumbers * blockIdx.x;
    if (threadIdx.x == 0) to[0] = sums.cross, to[1] = sums.weight, to[2] = sums.rows, to[3] = sums.squares;
    return;
  }
  C of_classes = C(loss.classes);
  if (loss.weight && loss.smoothing > 0) {
    of_classes = 0;
    for (int64_t j = threadIdx.x; j < loss.classes; j += kSumThreads) of_classes += C(loss.weight[j]);
    of_classes = block.over_lanes(of_classes, C(0), add);
  }
  if (threadIdx.x == 0) loss.finish(sums, of_classes, result, totals);
}

// RowWriter computes the gradient of a row. `to` is as aligned as `from` is, unless `is_apart`; the logits of a row
// that does not count are not read.
template <typename T, bool kPlain, bool kGeneral>
struct RowWriter {
  using C = Compute<T>;
  static constexpr int N = kPackWidth<T>;
  const Loss<T, kGeneral>& loss;
  Slope<C> slope;
  Power<T> power;
  int64_t label;
  const T* from;
  T* to;
  bool counts, is_apart;

  // Writes a lane's share of one of the row's chunks. The first chunk also has what is outside of whole packs.
  __device__ void write(int chunk, int lane, int lanes) const {
    const PlacesOfRow places = PlacesOfRow::of<N>(from, loss.classes);
    const int first = chunk * kPacks * lanes + lane;
    Pack<T, N> packs[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int k = first + i * lanes;
      packs[i] = {};
      if (counts && k < places.packs) packs[i] = load<N>(from + places.head + int64_t{k} * N);
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int k = first + i * lanes;
      if (k < places.packs) write_pack(packs[i], places.head + int64_t{k} * N);
    }
    if (chunk > 0) return;
    for (int j = lane; j < places.head; j += lanes) write_one(j);
    for (int j = lane; j < places.tail; j += lanes) write_one(loss.classes - places.tail + j);
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

  // The label's element is stored twice by one thread, the second time as it shall be.
  __device__ void write_pack(const Pack<T, N>& logits, int64_t j) const {
    Pack<T, N> pack;
    for (int n = 0; n < N; ++n) assign(pack.values[n], gradient(j + n, C(logits.values[n]), C(0)));
    if (is_apart) {
      for (int n = 0; n < N; ++n) to[j + n] = pack.values[n];
    } else {
      store_at_once(to + j, pack);
    }
    if (j <= label && label < j + N) write_one(label);
  }

  __device__ void write_one(int64_t j) const {
    assign(to[j], gradient(j, counts ? C(from[j]) : C(0), j == label ? slope.label : C(0)));
  }
};

template <typename T, bool kPlain, bool kGeneral>
__global__ void __launch_bounds__(kThreads)
    gradient_kernel(Loss<T, kGeneral> loss, int row_lanes, const RowStats<Compute<T>>* stats, const Compute<T>* totals,
                    const Compute<T>* dloss, bool is_per_row, bool is_apart, int chunks, T* dlogits) {
  using C = Compute<T>;
  const RowLanes lanes(row_lanes);
  if (lanes.row >= loss.rows) return;
  const int64_t label = loss.labels[lanes.row], first = lanes.row * loss.classes;
  const bool counts = label != loss.ignored;
  Slope<C> slope;
  const RowStats<C> of_row = stats[lanes.row];
  const Power<T> power(of_row.max);
  if (counts) slope = loss.slope(lanes.row, label, of_row, totals, dloss[is_per_row ? lanes.row : 0]);
  slope.exponential *= power.correction();
  const RowWriter<T, kPlain, kGeneral> writer{
      loss, slope, power, counts ? label : -1, loss.logits + first, dlogits + first, counts, is_apart};
  for (int chunk = static_cast<int>(blockIdx.y); chunk < chunks; chunk += static_cast<int>(gridDim.y))
    writer.write(chunk, lanes.lane, lanes.count);
}

// Launches a kernel with `lanes` threads for each row, and `chunks` blocks for each group of rows.
template <typename Kernel, typename... Arguments>
void launch_rows(Call& call, Kernel kernel, int64_t rows, int lanes, int chunks, const Arguments&... arguments) {
  const int threads = std::max(lanes, kThreads), of_block = threads / lanes;
  launch(call, kernel, {(rows - 1) / of_block + 1, std::min(chunks, 65535)}, threads, 0, arguments...);
}

// Returns the fewest lanes, from 4 to 32, that take a row in one chunk.
inline int lanes_of_short_row(int64_t packs) {
  int lanes = 4;
  while (lanes < 32 && lanes * kPacks < packs) lanes *= 2;
  return lanes;
}

template <typename T, bool kGeneral>
void launch_loss(Call& call, const Loss<T, kGeneral>& loss, Compute<T>* losses, RowStats<Compute<T>>* stats) {
  const Gpu gpu;
  const int64_t packs = loss.classes / kPackWidth<T>;
  const bool has_many_rows = loss.rows >= 4 * gpu.multiprocessors;
  int lanes = kMostThreads<T>;
  if (packs <= 32 * kPacks || (packs <= 512 && loss.rows >= 64 * gpu.multiprocessors)) {
    lanes = lanes_of_short_row(packs);
  } else if (packs <= 2048 || has_many_rows) {
    lanes = 256;
  }
  const auto kernel = loss.is_plain() ? loss_kernel<T, true, kGeneral> : loss_kernel<T, false, kGeneral>;
  launch_rows(call, kernel, loss.rows, lanes, 1, loss, lanes, losses, stats);
}

template <typename T, bool kGeneral>
void launch_totals(Call& call, const Loss<T, kGeneral>& loss, const Compute<T>* losses,
                   const RowStats<Compute<T>>* stats, int64_t parts, Compute<T>* partial, Compute<T>* result,
                   Compute<T>* totals) {
  using C = Compute<T>;
  int64_t count = loss.reduction == Reduction::kNone ? 0 : loss.rows;
  const C* from = nullptr;
  if (count > 0 && parts > 1) {
    const int64_t blocks = std::min<int64_t>(parts, INT32_MAX);
    launch(call, totals_kernel<T, kGeneral>, blocks, kSumThreads, 0, loss, count, losses, stats, from, partial, nullptr,
           nullptr);
    count = blocks, from = partial;
  }
  launch(call, totals_kernel<T, kGeneral>, 1, kSumThreads, 0, loss, count, losses, stats, from, nullptr, result,
         totals);
}

template <typename T, bool kGeneral>
void launch_gradient(Call& call, const Loss<T, kGeneral>& loss, const RowStats<Compute<T>>* stats,
                     const Compute<T>* totals, const Compute<T>* dloss, bool is_per_row, T* dlogits) {
  constexpr int N = kPackWidth<T>;
  const int64_t packs = loss.classes / N;
  const int lanes = packs <= 32 * kPacks ? lanes_of_short_row(packs) : kThreads;
  const int chunks = static_cast<int>(std::max<int64_t>(1, (packs - 1) / (kPacks * lanes) + 1));
  const bool is_apart = elements_to_pack<N>(loss.logits) != elements_to_pack<N>(dlogits);
  const auto kernel = loss.is_plain() ? gradient_kernel<T, true, kGeneral> : gradient_kernel<T, false, kGeneral>;
  launch_rows(call, kernel, loss.rows, lanes, chunks, loss, lanes, stats, totals, dloss, is_per_row, is_apart, chunks,
              dlogits);
}

}  // namespace msops::cross_entropy
