// The kernels of rows of up to 32 x kShortPacks packs, without softcap and label smoothing. Up to 32 lanes hold a row,
// so that its maximum is known before its exponentials.
#pragma once

#include "../common/gpu/griddepcontrol.h"
#include "../common/launch.h"
#include "../common/parallel.h"
#include "../common/team.h"
#include "gpu_row.h"

namespace msops::cross_entropy {

template <typename T>
constexpr int kShortPacks = sizeof(T) == 2 ? 4 : 8;  // a thread's packs of a short row

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
  const RowParts parts = RowParts::of<N>(row, length, is_apart);
  const auto for_edges = [&](const auto& f) {
    for (int j = teams.lane; j < parts.head + parts.tail; j += teams.lanes)
      f(C(row[j < parts.head ? j : j + parts.packs * N]), j < parts.head ? j : j + parts.packs * N);
  };
  const T* const from = row + parts.head + teams.lane * N;
  Pack<T, N> packs[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    packs[i] = load_or_lowest<N>(from + i * teams.lanes * N, teams.lane + i * teams.lanes < parts.packs);
  [[maybe_unused]] Pack<T, N> probabilities[kHeld] = {};
  if constexpr (kForm == Form::kProbabilities) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (teams.lane + i * teams.lanes < parts.packs)
        probabilities[i] = load<N>(of_probabilities + parts.head + (teams.lane + i * teams.lanes) * N);
  }
  RowSums<C> result;
  result.max = largest(packs);
  for_edges([&](C x, int) { result.max = ::fmax(result.max, x); });
  result.max = teams.over_lanes(result.max, [](C a, C b) { return ::fmax(a, b); });
  const Power<T> power(result.max);
  C sums[kHeld] = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (i <= kHeld / 2 || i * teams.lanes < parts.packs)  // the first half is taken without a branch
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
      if (teams.lane + i * teams.lanes < parts.packs)
        for (int n = 0; n < N; ++n)
          add_one(i, parts.head + (teams.lane + i * teams.lanes) * N + n, C(packs[i].values[n]),
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

// Writes a row's gradient as if the row had no label, without packs if `to` is not aligned as `from` is. The logits of
// a row that does not count are not read.
template <typename T>
__device__ void write_short(const T* from, T* to, unsigned length, bool counts, bool is_apart, Compute<T> exponential,
                            const Power<T>& power, const TeamsOfWarp& teams) {
  using C = Compute<T>;
  constexpr int N = kPackWidth<T>, kHeld = kShortPacks<T>;
  const RowParts parts = RowParts::of<N>(from, length, is_apart);
  const int first = parts.head + teams.lane * N, step = teams.lanes * N;
  Pack<T, N> packs[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    packs[i] = load_or_lowest<N>(from + (first + i * step), counts && teams.lane + i * teams.lanes < parts.packs);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (teams.lane + i * teams.lanes >= parts.packs) continue;
    C numbers[N];
    for (int n = 0; n < N; ++n) numbers[n] = exponential * power(C(packs[i].values[n]));
    store_at_once(to + (first + i * step), rounded_pack<T>(numbers));
  }
  for (int j = teams.lane; j < parts.head + parts.tail; j += teams.lanes) {
    const int at = j < parts.head ? j : j + parts.packs * N;
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

}  // namespace msops::cross_entropy
