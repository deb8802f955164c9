// On the GPU, `lanes` threads read a row once, in chunks of kPacks packs for each thread. A chunk takes one
// exponential for each element and one more to rescale the sum before it to the new maximum.
//
// A row may begin anywhere: its elements before the first whole pack and after the last one are taken one by one.
//
// Rows of up to 32 x kShortPacks packs have kernels of their own (TeamsOfWarp), unless there is softcap or label
// smoothing. In those kernels, up to 32 lanes hold a row, so that its maximum is known before its exponentials.
//
// Probabilities are read in packs beside those of their logits. Their sums are relative to the maximum so far, as that
// of exponentials is: then all terms have one sign, and no digits cancel. Their gradient takes the kernel of long rows
// for all rows: it has no reductions to save.
//
//   packs of other rows       lanes                       why
//   up to 128                 the fewest that take a row  several rows in a block, no barrier
//                             in one chunk, 4 to 32
//   up to 512, many rows      32                          no barrier, and enough warps to fill a GPU
//   up to 2048, or many rows  256                         four or more blocks on each multiprocessor hide the barriers
//   more                      kMostThreads                as many bytes in flight as a multiprocessor takes
#pragma once

#include "../common/activations.h"
#include "../common/gpu/approx.h"
#include "../common/gpu/griddepcontrol.h"
#include "../common/pack.h"
#include "../common/parallel.h"
#include "../common/team.h"
#include "loss.h"

namespace msops::cross_entropy {

constexpr int kPacks = 4;  // a thread's packs of a chunk
template <typename T>
constexpr int kShortPacks = sizeof(T) == 2 ? 4 : 8;  // a thread's packs of a short row
constexpr int kSumThreads = 1024;                    // of a block that adds up the losses of rows
// kMostThreads is the most threads of a block. Exponentials of double take many registers, and so do probabilities, of
// which a thread has as many packs in flight as of logits.
template <typename T, Form kForm>
constexpr int kMostThreads = sizeof(T) == 8 || kForm == Form::kProbabilities ? 512 : 1024;

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

  // Returns the maximum or, where that is not finite yet, 0.
  __device__ C shift() const { return max_; }

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
template <typename T, int N, int kCount>
__device__ __forceinline__ Compute<T> largest(const Pack<T, N> (&packs)[kCount]) {
  using C = Compute<T>;
#if __CUDA_ARCH__ >= 800  // the first that has max.f16x2
  constexpr bool kInPairs = std::is_same<T, Half>::value;
#else
  constexpr bool kInPairs = false;
#endif
  if constexpr (kInPairs) {
    uint32_t words[kCount * N / 2];
    memcpy(words, packs, sizeof words);
    for (int half = kCount * N / 4; half > 0; half /= 2)
      for (int k = 0; k < half; ++k) words[k] = max_f16x2(words[k], words[k + half]);
    Pack<Half, 2> last;
    memcpy(&last, words, sizeof last);
    return fmaxf(last.values[0], last.values[1]);
  } else {
    C values[kCount];
    for (int i = 0; i < kCount; ++i) {
      values[i] = C(-HUGE_VAL);
      for (const T& value : packs[i].values) values[i] = ::fmax(values[i], C(value));
    }
    for (int apart = 1; apart < kCount; apart *= 2)
      for (int i = 0; i < kCount; i += 2 * apart) values[i] = ::fmax(values[i], values[i + apart]);
    return values[0];
  }
}

// Loads a pack if it is in the row; else returns elements that are no row's maximum and add nothing to its sum. Packs
// of float16 are loaded as words, since a choice between two packs would take instructions for each element.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_or_lowest(const T* from, bool is_in_row) {
  Pack<T, N> pack;
  for (T& value : pack.values) value = T(-HUGE_VALF);
  if constexpr (sizeof(T) == 2) {
    Pack<uint32_t, N / 2> words;
    memcpy(&words, &pack, sizeof pack);
    if (is_in_row) words = load<N / 2>(reinterpret_cast<const uint32_t*>(from));
    memcpy(&pack, &words, sizeof pack);
  } else if (is_in_row) {
    pack = load<N>(from);
  }
  return pack;
}

// PlacesOfRow says how many elements stand before a row's whole packs, how many packs there are, and how many elements
// stand after them. Where other rows that are taken in packs together with this one are not aligned as it is, it has no
// packs: then it `is_apart`.
struct PlacesOfRow {
  int head, packs, tail;

  template <int N, typename T, typename Length>
  static __device__ PlacesOfRow of(const T* row, Length length, bool is_apart) {
    const Length to_pack = elements_to_pack<N>(row), head = to_pack < length && !is_apart ? to_pack : length;
    const Length packs = (length - head) / N;
    return {static_cast<int>(head), static_cast<int>(packs), static_cast<int>(length - head - packs * N)};
  }
};

// Returns a_j, or q_j w_j if kPlain: then there is no label smoothing.
template <bool kPlain, typename T>
__device__ __forceinline__ Compute<T> a_of(const Loss<T, Form::kProbabilities>& loss, Compute<T> spread, int64_t j,
                                           Compute<T> q) {
  if constexpr (!kPlain) q = q * (1 - loss.smoothing) + spread;
  return loss.weight ? q * loss.weight[j] : q;
}

// Returns x_j of a logit. If kPlain, there is neither softcap nor label smoothing.
template <bool kPlain, typename T, Form kForm>
__device__ __forceinline__ Compute<T> x_of(const Loss<T, kForm>& loss, Compute<T> logit) {
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
    const PlacesOfRow places = PlacesOfRow::of<N>(row, length, is_apart);
    const T* from = row + places.head + int64_t{lane} * N;
    for (int k = lane; k < places.packs; k += kPacks * lanes, from += int64_t{kPacks} * lanes * N) {
      Pack<T, N> packs[kPacks];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) packs[i] = load_or_lowest<N>(from + i * lanes * N, k + i * lanes < places.packs);
      add_chunk(packs, k, lanes, places);
    }
    for (int j = lane; j < places.head; j += lanes) add_one(row, j);
    for (int j = lane; j < places.tail; j += lanes) add_one(row, length - places.tail + j);
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

  __device__ void add_chunk(const Pack<T, N> (&packs)[kPacks], int k, int lanes, const PlacesOfRow& places) {
    [[maybe_unused]] Pack<T, N> probabilities[kPacks] = {};
    if constexpr (kHasProbabilities) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
        if (k + i * lanes < places.packs)
          probabilities[i] = load<N>(probabilities_ + places.head + int64_t{k + i * lanes} * N);
    }
    const Power<T> power = raise(largest(packs));
    C sums[kPacks] = {};
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
      if (k + i * lanes < places.packs)
        for (const T& value : packs[i].values) sums[i] += power(x(C(value)));
    sums_.sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if constexpr (kHasProbabilities) {
      C masses[kPacks] = {}, below[kPacks] = {};
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
        if (k + i * lanes < places.packs)
          for (int n = 0; n < N; ++n) {
            const C a = a_of<kPlain>(loss_, spread_, places.head + int64_t{k + i * lanes} * N + n,
                                     C(probabilities[i].values[n]));
            masses[i] += a, below[i] += a * (x(C(packs[i].values[n])) - power.shift());
          }
      sums_.weights += (masses[0] + masses[1]) + (masses[2] + masses[3]);
      sums_.below += (below[0] + below[1]) + (below[2] + below[3]);
    } else if constexpr (!kPlain) {
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

// Passes says how a warp takes short rows: each of its teams of `lanes` threads takes one row in a pass.
struct Passes {
  int log_lanes, lanes, teams, count;
};

// TeamsOfWarp are the teams of a warp. What is done once for a row is done by a lane that has this row for its own, for
// all rows of a warp at once: in each team, lane i has the row of pass i.
struct TeamsOfWarp : Passes {
  int lane;
  int64_t first;

  explicit __device__ TeamsOfWarp(const Passes& passes) : Passes(passes), lane(threadIdx.x & (lanes - 1)) {
    const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
    first = warp * (count * teams) + ((threadIdx.x % 32) >> log_lanes);
  }

  __device__ int64_t row(int pass) const { return first + pass * teams; }

  // Returns what the lane that has the row of this pass knows.
  template <typename V>
  __device__ V of_pass(V value, int pass) const {
    return __shfl_sync(~0u, value, pass, lanes);
  }

  template <typename C, typename Combine>
  __device__ C over_lanes(C value, const Combine& combine) const {
#pragma unroll 1
    for (int distance = lanes >> 1; distance > 0; distance >>= 1)
      value = combine(value, C(__shfl_xor_sync(~0u, value, distance)));
    return value;
  }
};

// OwnRow is a lane's own row of a warp's. Lanes that have none have one that does not count.
struct OwnRow {
  int64_t row, label;
  bool exists, counts, has_class;

  template <typename T, Form kForm>
  __device__ OwnRow(const Loss<T, kForm>& loss, const TeamsOfWarp& teams)
      : row(teams.row(teams.lane)), exists(teams.lane < teams.count && row < loss.rows) {
    label = exists ? loss.label_of(row) : loss.ignored;
    counts = label != loss.ignored, has_class = counts && loss.is_class(label);
  }
};

// Returns the sums of a row; that of its exponentials lacks the correction of Power.
template <typename T, Form kForm>
__device__ RowSums<Compute<T>> sums_of_short(const Loss<T, kForm>& loss, const T* row, unsigned length,
                                             const TeamsOfWarp& teams) {
  using C = Compute<T>;
  constexpr int N = kPackWidth<T>, kHeld = kShortPacks<T>;
  bool is_apart = false;
  [[maybe_unused]] const T* of_probabilities = nullptr;
  if constexpr (kForm == Form::kProbabilities)
    of_probabilities = loss.probabilities + (row - loss.logits), is_apart = loss.is_apart;
  const PlacesOfRow places = PlacesOfRow::of<N>(row, length, is_apart);
  const auto for_edges = [&](const auto& f) {
    for (int j = teams.lane; j < places.head + places.tail; j += teams.lanes)
      f(C(row[j < places.head ? j : j + places.packs * N]), j < places.head ? j : j + places.packs * N);
  };
  const T* const from = row + places.head + teams.lane * N;
  Pack<T, N> packs[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    packs[i] = load_or_lowest<N>(from + i * teams.lanes * N, teams.lane + i * teams.lanes < places.packs);
  [[maybe_unused]] Pack<T, N> probabilities[kHeld] = {};
  if constexpr (kForm == Form::kProbabilities) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (teams.lane + i * teams.lanes < places.packs)
        probabilities[i] = load<N>(of_probabilities + places.head + (teams.lane + i * teams.lanes) * N);
  }
  RowSums<C> result;
  result.max = largest(packs);
  for_edges([&](C x, int) { result.max = ::fmax(result.max, x); });
  result.max = teams.over_lanes(result.max, [](C a, C b) { return ::fmax(a, b); });
  const Power<T> power(result.max);
  C sums[kHeld] = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (i <= kHeld / 2 || i * teams.lanes < places.packs)  // the first half is taken without a branch
      for (const T& value : packs[i].values) sums[i] += power(C(value));
  for_edges([&](C x, int) { sums[0] += power(x); });
  for (int apart = 1; apart < kHeld; apart *= 2)
    for (int i = 0; i < kHeld; i += 2 * apart) sums[i] += sums[i + apart];
  const auto add = [](C a, C b) { return a + b; };
  result.sum = teams.over_lanes(sums[0], add);
  if constexpr (kForm == Form::kProbabilities) {
    C masses[2] = {}, below[2] = {};
    const auto add_one = [&](int i, int j, C x, C q) {
      const C a = a_of<true>(loss, C(0), j, q);
      masses[i % 2] += a, below[i % 2] += a * (x - power.shift());
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (teams.lane + i * teams.lanes < places.packs)
        for (int n = 0; n < N; ++n)
          add_one(i, places.head + (teams.lane + i * teams.lanes) * N + n, C(packs[i].values[n]),
                  C(probabilities[i].values[n]));
    for_edges([&](C x, int j) { add_one(0, j, x, C(of_probabilities[j])); });
    result.weights = teams.over_lanes(masses[0] + masses[1], add);
    result.below = teams.over_lanes(below[0] + below[1], add);
  }
  return result;
}

// Adds up the Totals of the block's rows to `partial`, or stores the losses of rows; the other one is null.
template <typename T, Form kForm>
__global__ void __launch_bounds__(kThreads) short_loss_kernel(Loss<T, kForm> loss, Passes passes, Compute<T>* losses,
                                                              RowStats<Compute<T>>* stats, Compute<T>* partial) {
  using C = Compute<T>;
  const TeamsOfWarp teams(passes);
  const OwnRow own(loss, teams);
  const C logit = own.has_class ? C(loss.logits[own.row * loss.classes + own.label]) : C(0);
  RowSums<C> sums;
  const T* row = loss.logits + teams.row(0) * loss.classes;
  for (int pass = 0; pass < teams.count; ++pass, row += teams.teams * loss.classes) {
    const unsigned length = teams.of_pass(own.counts ? static_cast<unsigned>(loss.classes) : 0, pass);
    const RowSums<C> of_pass = sums_of_short(loss, row, length, teams);
    if (pass == teams.lane) {
      sums.max = of_pass.max, sums.sum = of_pass.sum;
      if constexpr (kForm == Form::kProbabilities) sums.weights = of_pass.weights, sums.below = of_pass.below;
    }
  }
  griddepcontrol_launch_dependents();
  RowStats<C> of_row;
  C of_own = 0;
  if (own.counts) {
    sums.sum *= Power<T>(sums.max).correction();
    of_row = {sums.max, 1 / sums.sum};
    of_own = loss.of_row(own.label, logit, sums);
  }
  if (own.exists) {
    stats[own.row] = of_row;
    if (losses) losses[own.row] = of_own;
    loss.store_of_form(own.row, of_row, sums);
  }
  if (!partial) return;
  using Block = TeamShape<kThreads, 1, 0>;
  __shared__ SharedOfWarp shared[kSharedOfTeam<Block>];
  const Totals<C> totals = Team<C, Block>(threadIdx.x, shared)
                               .over_lanes(loss.totals_of(own.label, of_own, of_row), Totals<C>{},
                                           [](auto a, const auto& b) { return a += b; });
  if (threadIdx.x == 0) totals.store(partial + Totals<C>::kNumbers * blockIdx.x);
}

// Each block adds up its part of `count` Totals: those in `from` or, if that is null, those of the rows. It writes its
// sum to `partial` or, if that is null, finishes the loss.
template <typename T, Form kForm>
__global__ void __launch_bounds__(kSumThreads)
    totals_kernel(Loss<T, kForm> loss, int64_t count, const Compute<T>* losses, const RowStats<Compute<T>>* stats,
                  const Compute<T>* from, Compute<T>* partial, Compute<T>* result, Compute<T>* totals) {
  using C = Compute<T>;
  griddepcontrol_wait();
  const int64_t end = part_begin<int64_t>(count, blockIdx.x + 1, gridDim.x);
  Totals<C> sums;
#pragma unroll 4
  for (int64_t i = part_begin<int64_t>(count, blockIdx.x, gridDim.x) + threadIdx.x; i < end; i += kSumThreads) {
    const C* const there = from + Totals<C>::kNumbers * i;
    sums += from ? Totals<C>{there[0], there[1], there[2], there[3]}
                 : loss.totals_of(loss.label_of(i), losses[i], stats[i]);
  }
  using Block = TeamShape<kSumThreads, 1, 0>;
  __shared__ SharedOfWarp shared[kSharedOfTeam<Block>];
  const Team<C, Block> block(threadIdx.x, shared);
  const auto add = [](auto a, const auto& b) { return a += b; };
  sums = block.over_lanes(sums, Totals<C>{}, add);
  if (partial) {
    if (threadIdx.x == 0) sums.store(partial + Totals<C>::kNumbers * blockIdx.x);
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
    const PlacesOfRow places = PlacesOfRow::of<N>(from, loss.classes, is_apart);
    const int first = chunk * kPacks * lanes + lane;
    Pack<T, N> packs[kPacks], of_labels[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int k = first + i * lanes;
      packs[i] = of_labels[i] = {};
      if (counts && k < places.packs) packs[i] = load<N>(from + places.head + int64_t{k} * N);
      if (probabilities && k < places.packs) of_labels[i] = load<N>(probabilities + places.head + int64_t{k} * N);
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int k = first + i * lanes;
      if (k < places.packs) write_pack(packs[i], of_labels[i], places.head + int64_t{k} * N);
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

// Writes a row's gradient as if the row had no label, without packs if `to` is not aligned as `from` is. The logits of
// a row that does not count are not read.
template <typename T>
__device__ void write_short(const T* from, T* to, unsigned length, bool counts, bool is_apart, Compute<T> exponential,
                            const Power<T>& power, const TeamsOfWarp& teams) {
  using C = Compute<T>;
  constexpr int N = kPackWidth<T>, kHeld = kShortPacks<T>;
  const PlacesOfRow places = PlacesOfRow::of<N>(from, length, is_apart);
  const int first = places.head + teams.lane * N, step = teams.lanes * N;
  Pack<T, N> packs[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    packs[i] = load_or_lowest<N>(from + (first + i * step), counts && teams.lane + i * teams.lanes < places.packs);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (teams.lane + i * teams.lanes >= places.packs) continue;
    C numbers[N];
    for (int n = 0; n < N; ++n) numbers[n] = exponential * power(C(packs[i].values[n]));
    store_at_once(to + (first + i * step), rounded_pack<T>(numbers));
  }
  for (int j = teams.lane; j < places.head + places.tail; j += teams.lanes) {
    const int at = j < places.head ? j : j + places.packs * N;
    assign(to[at], exponential * power(counts ? C(from[at]) : C(0)));
  }
}

// The label's element is stored twice, the second time as it shall be.
template <typename T, Form kForm>
__global__ void __launch_bounds__(kThreads)
    short_gradient_kernel(Loss<T, kForm> loss, Passes passes, const RowStats<Compute<T>>* stats,
                          const Compute<T>* totals, const Compute<T>* dloss, bool is_per_row, bool is_apart,
                          T* dlogits) {
  using C = Compute<T>;
  const TeamsOfWarp teams(passes);
  const OwnRow own(loss, teams);
  const int64_t at_label = own.row * loss.classes + own.label;
  const C logit = own.has_class ? C(loss.logits[at_label]) : C(0);
  __syncwarp();  // it is read before another lane writes there, since `dlogits` may be the logits
  RowStats<C> of_row;
  Slope<C> slope;
  if (own.counts) {
    of_row = stats[own.row];
    slope = loss.slope(own.row, own.label, of_row, totals, dloss[is_per_row ? own.row : 0]);
  }
  const Power<T> power(of_row.max);
  slope.exponential *= power.correction();
  const int64_t first = teams.row(0) * loss.classes, step = teams.teams * loss.classes;
  const T* from = loss.logits + first;
  T* to = dlogits + first;
  for (int pass = 0; pass < teams.count; ++pass, from += step, to += step) {
    const C exponential = teams.of_pass(slope.exponential, pass), max = teams.of_pass(of_row.max, pass);
    const bool counts = teams.of_pass(static_cast<int>(own.counts), pass);
    if (teams.row(pass) < loss.rows)
      write_short(from, to, static_cast<unsigned>(loss.classes), counts, is_apart, exponential, Power<T>(max), teams);
  }
  __syncwarp();
  if (own.has_class) assign(dlogits[at_label], slope.exponential * power(logit) - slope.label);
}

// Launches a kernel with `lanes` threads for each row, and `chunks` blocks for each group of rows.
template <typename Kernel, typename... Arguments>
void launch_rows(Call& call, Kernel kernel, int64_t rows, int lanes, int chunks, const Arguments&... arguments) {
  const int threads = std::max(lanes, kThreads), of_block = threads / lanes;
  launch(call, kernel, {(rows - 1) / of_block + 1, std::min(chunks, 65535)}, threads, 0, arguments...);
}

// Returns the fewest lanes, from 4 to `most`, that take a row in one chunk, or `most`.
inline int fewest_lanes(int64_t packs, int most) {
  int lanes = 4;
  while (lanes < most && lanes * kPacks < packs) lanes *= 2;
  return lanes;
}

// ShortRows is the launch of a kernel for short rows, with the fewest lanes from 2 to 32 that hold a row. All rows are
// taken at once, in as many passes as that needs, or in several waves of equally many passes.
template <typename T>
struct ShortRows {
  Passes passes;
  int64_t blocks;

  static bool take(int64_t packs) { return packs <= 32 * kShortPacks<T>; }

  template <typename Kernel>
  ShortRows(Kernel kernel, int64_t rows, int64_t packs, int log_lanes) {  // a row has at least 2^log_lanes lanes
    while (log_lanes < 5 && (kShortPacks<T> << log_lanes) < packs) ++log_lanes;
    const int64_t of_block = kThreads >> log_lanes;
    const int64_t at_once = of_block * std::max(1, blocks_at_once(Gpu(), kernel, kThreads, 0));
    const int64_t turns = (rows - 1) / at_once + 1, waves = ((turns - 1) >> log_lanes) + 1;
    passes = {log_lanes, 1 << log_lanes, 32 >> log_lanes, static_cast<int>((turns - 1) / waves + 1)};
    blocks = (rows - 1) / (of_block * passes.count) + 1;
  }
};

// Returns how many Totals `partial` has got, which is 0 if those of the rows remain to be added up.
template <typename T, Form kForm>
int64_t launch_loss(Call& call, const Loss<T, kForm>& loss, Compute<T>* losses, RowStats<Compute<T>>* stats,
                    Compute<T>* partial) {
  const int64_t packs = loss.classes / kPackWidth<T>;
  if (loss.is_plain() && ShortRows<T>::take(packs)) {
    const auto kernel = short_loss_kernel<T, kForm>;
    const ShortRows<T> rows(kernel, loss.rows, packs, 1);
    const bool adds = loss.reduction != Reduction::kNone;
    launch(call, kernel, rows.blocks, kThreads, 0, loss, rows.passes, adds ? nullptr : losses, stats,
           adds ? partial : nullptr);
    return adds ? rows.blocks : 0;
  }
  const Gpu gpu;
  const bool has_many_rows = loss.rows >= 4 * gpu.multiprocessors;
  int lanes = kMostThreads<T, kForm>;
  if (packs <= 32 * kPacks || (packs <= 512 && loss.rows >= 64 * gpu.multiprocessors)) {
    lanes = fewest_lanes(packs, 32);
  } else if (packs <= 2048 || has_many_rows) {
    lanes = 256;
  }
  const auto kernel = loss.is_plain() ? loss_kernel<T, true, kForm> : loss_kernel<T, false, kForm>;
  launch_rows(call, kernel, loss.rows, lanes, 1, loss, lanes, losses, stats);
  return 0;
}

// Adds up the losses of rows or, if there are any, the `parts` Totals that `partial` has.
template <typename T, Form kForm>
void launch_totals(Call& call, const Loss<T, kForm>& loss, const Compute<T>* losses, const RowStats<Compute<T>>* stats,
                   int64_t parts, Compute<T>* partial, Compute<T>* result, Compute<T>* totals) {
  const int64_t rows = loss.reduction == Reduction::kNone ? 0 : loss.rows;
  if (parts == 0 && rows >= 2 * kRowsOfSum) {
    parts = std::min<int64_t>(rows / kRowsOfSum, 1024);
    launch(call, totals_kernel<T, kForm>, Grid(parts).programmatic(), kSumThreads, 0, loss, rows, losses, stats,
           nullptr, partial, nullptr, nullptr);
  }
  launch(call, totals_kernel<T, kForm>, Grid(1).programmatic(), kSumThreads, 0, loss, parts > 0 ? parts : rows, losses,
         stats, parts > 0 ? partial : nullptr, nullptr, result, totals);
}

// `dlogits` or `dlabels`, which are those of probabilities, may be null. `dlogits` may be the logits themselves.
template <typename T, Form kForm>
void launch_gradient(Call& call, const Loss<T, kForm>& loss, const RowStats<Compute<T>>* stats,
                     const Compute<T>* totals, const Compute<T>* dloss, bool is_per_row, T* dlogits, T* dlabels) {
  const int64_t packs = loss.classes / kPackWidth<T>;
  bool is_apart = (dlogits && are_apart(dlogits, loss.logits)) || (dlabels && are_apart(dlabels, loss.logits));
  if constexpr (kForm == Form::kProbabilities) is_apart |= loss.is_apart;
  if constexpr (kForm != Form::kProbabilities)
    if (loss.is_plain() && ShortRows<T>::take(packs)) {
      const auto kernel = short_gradient_kernel<T, kForm>;
      const ShortRows<T> rows(kernel, loss.rows, packs, 2);
      return launch(call, kernel, rows.blocks, kThreads, 0, loss, rows.passes, stats, totals, dloss, is_per_row,
                    is_apart, dlogits);
    }
  const int lanes = fewest_lanes(packs, kThreads);
  const int chunks = static_cast<int>(std::max<int64_t>(1, (packs - 1) / (kPacks * lanes) + 1));
  const auto kernel = loss.is_plain() ? gradient_kernel<T, true, kForm> : gradient_kernel<T, false, kForm>;
  launch_rows(call, kernel, loss.rows, lanes, chunks, loss, lanes, stats, totals, dloss, is_per_row, is_apart, chunks,
              dlogits, dlabels);
}

}  // namespace msops::cross_entropy
