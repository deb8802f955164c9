// y = x weight^T + bias, and the first index of the largest number of each row of y
//
//   case                                        kernel                   why
//   one row of x, whole packs of 16 bytes       one_row_kernel           reads the weight at the memory's rate
//   other rows                                  shared/product/gpu.h     tensor cores
//   bias and index, some long rows              part_kernel, ...         a row would leave most of the GPU idle
//   bias and index, other rows                  rows_kernel (Choose)     y is in the cache
//
// Products are rounded to the dtype of y before the bias is added, as a matrix product and an addition would.

#include "common/rows.h"
#include "common/scratch.h"
#include "common/sum.h"
#include "shared/product/cpu.h"
#include "shared/product/gpu.h"
#include "shared/product/linear.h"

using namespace msops;
using namespace msops::product;

namespace {

// Rows of y are cut into parts where a GPU has some long ones.
constexpr int64_t kPart = 2048, kMostCut = 256;

int64_t parts_of(const LinearInputs& in) { return in.outputs / kPart + (in.outputs % kPart > 0); }
bool is_cut(const LinearInputs& in) { return in.tokens <= kMostCut && in.outputs > 2 * kPart; }

// Returns how many numbers the panels of tokens have, which the CPU multiplies, or the best numbers of parts and their
// columns.
template <typename C>
int64_t scratch_numbers(const LinearInputs& in) {
  return std::max(
      {INT64_C(1), size_of({Lanes<C>{in.tokens}.places(), in.deep}), is_cut(in) ? 2 * in.tokens * parts_of(in) : 0});
}

template <typename T>
struct Put {
  using C = Compute<T>;
  const T* x;
  C* panels;
  Lanes<C> lanes;
  int64_t deep;

  MSOPS_CPU void operator()(int64_t t) const {
    const int64_t pitch = lanes.pitch(t);
    C* const to = lanes.at(panels, t, deep);
    for (int64_t i = 0; i < deep; ++i) to[i * pitch] = t < lanes.tokens ? C(x[t * deep + i]) : C(0);
  }
};

template <typename T>
struct Store {
  T* y;
  int64_t outputs;

  MSOPS_CPU void operator()(const Tile<Compute<T>>& tile) const {
    for (int64_t t = 0; t < tile.tokens; ++t)
      for (int64_t r = 0; r < tile.rows; ++r)
        assign(y[(tile.token + t) * outputs + tile.row + r], tile.sums[r * tile.pitch + t]);
  }
};

// Threads take blocks of the weight's rows, one after another.
template <typename T>
struct Multiply {
  using C = Compute<T>;
  const T* weight;
  const C* panels;
  Lanes<C> lanes;
  int64_t deep, outputs;
  Store<T> store;
  Shares& shares;

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    const std::unique_ptr<C[]> weights(new C[kBlock * deep]), sums(new C[kBlock * kMostLanes<C>]);
    const TokenProduct<T> by_tokens{lanes, deep, panels, weights.get(), sums.get()};
    const int64_t blocks = (outputs + kBlock - 1) / kBlock;
    for (int64_t i; shares.take(0, part, parts, blocks, i);)
      by_tokens(weight, i * kBlock, std::min(kBlock, outputs - i * kBlock), store);
  }
};

template <typename T>
void multiply_on_cpu(Call& call, const LinearInputs& in, Compute<T>* panels, T* y) {
  using C = Compute<T>;
  const Lanes<C> lanes{in.tokens};
  const int64_t deep = in.deep;
  const double work = static_cast<double>(deep) * static_cast<double>(in.tokens);
  on_cpu(call, lanes.places(), Put<T>{in.x.as<const T>(), panels, lanes, deep}, static_cast<double>(deep));
  Shares shares(1);
  const Multiply<T> multiply{in.weight.as<const T>(), panels, lanes, deep, in.outputs, {y, in.outputs}, shares};
  on_threads(call, (in.outputs + kBlock - 1) / kBlock, work * static_cast<double>(in.outputs) / 8, multiply);
}

#ifdef __CUDACC__
constexpr int kWarps = 8, kRowsOfWarp = 4;

// Multiplies one row of x. A warp takes some rows of the weight at once.
template <typename T>
__global__ void __launch_bounds__(32 * kWarps)
    one_row_kernel(int64_t deep, int64_t outputs, const T* x, const T* weight, T* y) {
  using C = Compute<T>;
  constexpr int N = kPackWidth<T>;
  const int lane = threadIdx.x % 32;
  const int64_t step = int64_t{gridDim.x} * kWarps * kRowsOfWarp, last = outputs - 1;
  for (int64_t row = (int64_t{blockIdx.x} * kWarps + threadIdx.x / 32) * kRowsOfWarp; row < outputs; row += step) {
    C sums[kRowsOfWarp] = {};
    for (int64_t k = lane * N; k < deep; k += 32 * N) {
      const Pack<T, N> number = load<N>(x + k);
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) {
        const Pack<T, N> w = load<N>(weight + (row + r < last ? row + r : last) * deep + k);
#pragma unroll
        for (int i = 0; i < N; ++i) sums[r] += C(w.values[i]) * C(number.values[i]);
      }
    }
    team_sum(sums, 32);
    if (lane == 0)
      for (int r = 0; r < kRowsOfWarp; ++r)
        if (row + r < outputs) assign(y[row + r], sums[r]);
  }
}

template <typename T>
void multiply_on_gpu(Call& call, const LinearInputs& in, T* y) {
  constexpr int N = kPackWidth<T>, kOfBlock = kWarps * kRowsOfWarp;
  const T *const x = in.x.as<const T>(), *const weight = in.weight.as<const T>();
  if (in.tokens > 1 || in.deep % N || !is_aligned<N>(x) || !is_aligned<N>(weight))
    return product::multiply<T>(call, {in.tokens, in.outputs, in.deep, x, weight, y});
  const int64_t blocks = std::min<int64_t>((in.outputs + kOfBlock - 1) / kOfBlock, 1 << 20);
  launch(call, one_row_kernel<T>, blocks, 32 * kWarps, 0, in.deep, in.outputs, x, weight, y);
}

// Returns the best of a warp's.
template <typename C>
__device__ __forceinline__ ArgMax<C> best_of_warp(ArgMax<C> best) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    const C value = __shfl_xor_sync(~0u, best.value, apart);
    best = ArgMax<C>::combine(best, {value, __shfl_xor_sync(~0u, best.column, apart)});
  }
  return best;
}

// Adds the bias to a part of a row of y, and finds its best number.
template <typename T>
__global__ void __launch_bounds__(32 * kWarps)
    part_kernel(int64_t outputs, const T* bias, T* y, Compute<T>* values, int32_t* columns) {
  using C = Compute<T>;
  __shared__ C value_of_warp[kWarps];
  __shared__ int64_t column_of_warp[kWarps];
  const int64_t begin = blockIdx.x * kPart, end = begin + kPart < outputs ? begin + kPart : outputs;
  y += blockIdx.y * outputs;
  ArgMax<C> best;
  for (int64_t i = begin + threadIdx.x; i < end; i += 32 * kWarps) {
    C value(y[i]);
    if (bias) {
      assign(y[i], value + C(bias[i]));
      value = C(y[i]);
    }
    best = ArgMax<C>::combine(best, {value, i});
  }
  best = best_of_warp(best);
  if (threadIdx.x % 32 == 0) {
    value_of_warp[threadIdx.x / 32] = best.value;
    column_of_warp[threadIdx.x / 32] = best.column;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < kWarps; ++w) best = ArgMax<C>::combine(best, {value_of_warp[w], column_of_warp[w]});
  values[blockIdx.y * gridDim.x + blockIdx.x] = best.value;
  columns[blockIdx.y * gridDim.x + blockIdx.x] = static_cast<int32_t>(best.column);
}

// Finds the best of the parts of a row. A block is a warp.
template <typename C>
__global__ void __launch_bounds__(32)
    best_kernel(int64_t parts, const C* values, const int32_t* columns, int32_t* index) {
  ArgMax<C> best;
  for (int64_t part = blockIdx.x * parts + threadIdx.x; part < (blockIdx.x + 1) * parts; part += 32)
    best = ArgMax<C>::combine(best, {values[part], columns[part]});
  best = best_of_warp(best);
  if (threadIdx.x == 0) index[blockIdx.x] = static_cast<int32_t>(best.column);
}

template <typename T>
void choose_by_parts(Call& call, const LinearInputs& in, T* y, Compute<T>* work, int32_t* index) {
  const int64_t parts = parts_of(in);
  int32_t* const columns = reinterpret_cast<int32_t*>(work + in.tokens * parts);
  launch(call, part_kernel<T>, Grid(parts, in.tokens), 32 * kWarps, 0, in.outputs, in.bias.as<const T>(), y, work,
         columns);
  launch(call, best_kernel<Compute<T>>, in.tokens, 32, 0, parts, work, columns, index);
}
#endif

template <typename T>
struct Choose {
  using C = Compute<T>;
  Rows<T> y;
  Parameters<T> bias;
  int32_t* index;

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    if (bias.data) team.map([](C sum, C b) { return sum + b; }, y[row], y[row], bias);
    index[row] = static_cast<int32_t>(team.reduce(ArgMax<C>(), y[row]).column);
  }
};

}  // namespace

// (x, weight, bias?) -> (y, index, work): the last one is scratch.
MSOPS_ENTRY(LinearArgmaxForward) {
  const LinearInputs in(call, false);
  const Tensor y = call.tensor("y"), index = call.tensor_of("int32", "index"), work = call.scratch("work", 2);
  if (call.ok()) {
    in.require_outputs(call, y);
    call.require_shape_of_rows(index, in.x);
  }
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const int64_t numbers = scratch_numbers<C>(in);
    call.require(work.dim(0) >= numbers && work.dim(1) == 1, kBadShape,
                 "work has %lld rows of %lld, expected %lld of 1", static_cast<long long>(work.dim(0)),
                 static_cast<long long>(work.dim(1)), static_cast<long long>(numbers));
    if (!call.ok() || in.tokens == 0) return;
#ifdef __CUDACC__
    if (!call.is_on_cpu()) {
      multiply_on_gpu(call, in, y.as<T>());
      if (is_cut(in)) return choose_by_parts(call, in, y.as<T>(), work.as<C>(), index.as<int32_t>());
    }
#endif
    if (call.is_on_cpu()) multiply_on_cpu(call, in, work.as<C>(), y.as<T>());
    for_rows<T>(call, in.tokens, {y}, Choose<T>{y, Parameters<T>(in.bias, in.outputs, C(0)), index.as<int32_t>()});
  });
}

MSOPS_SCRATCH(LinearArgmaxForward) {
  const LinearInputs in(call, false);
  int64_t numbers = 1;
  with_type<Half, float, double>(in.x, [&](auto type) {
    if (call.ok()) numbers = scratch_numbers<Compute<typename decltype(type)::type>>(in);
  });
  return {{numbers, 1}};
}
