// Work on the rows of matrices: reductions along a row, and maps of it, written once for both devices. For example
// y = log sum e^x of each row, where x is `Rows<const T>` and y is `T*`:
//
//   template <typename Team>
//   MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
//     const C most = team.max(x[row]);
//     const C sum = team.sum([&](C v) { return exp(v - most); }, x[row]);
//     team.store(y + row, most + log(sum));
//   }
//
// is the body of for_rows<T>(call, number_of_rows, {x}, body). A Tensor's rows run along its last axis.
//
// Functions of elements may take the column, an int64_t, before them: team.map([&](int64_t j, C v) { ... }, ...).
//
// A team is the threads that share a row: one on the CPU; on the GPU 2, 4, 8 or 32 of a warp, or a block. All of them
// get the results of its reductions, which are always made in the same order. Every row must make the same reductions,
// since the teams of a warp make them together: what depends on values is chosen by `?:`, not by `if`.
#pragma once

#include "functions.h"
#include "pack.h"
#include "parallel.h"

namespace msops {

// A matrix without gaps between its rows, and a row of one. T is const where it is only read.
template <typename T>
struct Row {
  T* data;
  int64_t length;
};
template <typename T>
struct Rows {
  T* data;
  int64_t columns;

  Rows(const Tensor& tensor) : data(tensor.as<T>()), columns(tensor.dim(-1)) {}  // of its last axis
  MSOPS_BOTH Row<T> operator[](int64_t row) const { return {data + row * columns, columns}; }
};

// Room for one result of a reduction.
struct alignas(16) SharedOfWarp {
  unsigned char bytes[32];
};

// kLanes threads, each of which works on N neighbouring elements at once.
template <typename C, int kLanes, int N>
class Team {
 public:
  MSOPS_BOTH Team(int lane, SharedOfWarp* shared) : lane_(lane), shared_(shared) {}

  // The sum, and the largest, of f(a_j, b_j, ...) over all j, of rows a, b, ... of one length; 0, and -infinity, of
  // none. NaN counts as larger than all.
  template <typename F, typename... In>
  MSOPS_BOTH C sum(const F& f, Row<In>... in) const {
    return combined(C(0), [](C a, C b) { return a + b; }, f, in...);
  }
  template <typename F, typename... In>
  MSOPS_BOTH C max(const F& f, Row<In>... in) const {
    return combined(C(-HUGE_VAL), [](C a, C b) { return b > a || b != b ? b : a; }, f, in...);
  }

  template <typename In>
  MSOPS_BOTH C sum(Row<In> in) const {
    return sum([](C v) { return v; }, in);
  }
  template <typename In>
  MSOPS_BOTH C max(Row<In> in) const {
    return max([](C v) { return v; }, in);
  }

  // The results of f combined by any associative and commutative `combine`, for which combine(a, identity) is a. They
  // may be numbers, or structs of up to 32 bytes, such as a value and its column.
  template <typename R, typename Combine, typename F, typename First, typename... In>
  MSOPS_BOTH R reduce(R identity, const Combine& combine, const F& f, Row<First> first, Row<In>... in) const {
    static_assert(std::is_same<decltype(at(f, int64_t{}, C(first.data[0]), C(in.data[0])...)), R>::value,
                  "reduce: the identity must have the type that the function returns");
    return combined(identity, combine, f, first, in...);
  }

  // out_j = f(a_j, b_j, ...) for all j. `out` may be one of the others.
  template <typename F, typename T, typename... In>
  MSOPS_BOTH void map(const F& f, Row<T> out, Row<In>... in) const {
    for (int64_t j = lane_ * N; j < whole(out); j += kLanes * N) write(out.data + j, f, j, read(in.data + j)...);
    for (int64_t j = whole(out); j < out.length; ++j) assign(out.data[j], at(f, j, C(in.data[j])...));
  }

  // One number, of the whole row.
  template <typename T>
  MSOPS_BOTH void store(T* to, Compute<T> value) const {
    if (lane_ == 0) assign(*to, value);
  }

 private:
  struct Values {
    C of[N];
  };

  template <typename R, typename Combine, typename F, typename First, typename... In>
  MSOPS_BOTH R combined(R identity, const Combine& combine, const F& f, Row<First> first, Row<In>... in) const {
    R results[N];
    for (R& result : results) result = identity;
    for (int64_t j = lane_ * N; j < whole(first); j += kLanes * N)
      accumulate(results, combine, f, j, read(first.data + j), read(in.data + j)...);
    for (int64_t j = whole(first); j < first.length; ++j)
      results[0] = combine(results[0], R(at(f, j, C(first.data[j]), C(in.data[j])...)));
    for (int half = N / 2; half > 0; half /= 2)
      for (int k = 0; k < half; ++k) results[k] = combine(results[k], results[k + half]);
    return over_lanes(results[0], combine);
  }

  // Converts to int64_t and to nothing else, so that no function of an element more passes for one of a column.
  struct Column {
    template <typename Index, typename = std::enable_if_t<std::is_same<Index, int64_t>::value>>
    MSOPS_BOTH operator Index() const;
  };

  // f(v...), or f(j, v...) if it takes the column.
  template <typename F, typename... V>
  static MSOPS_BOTH auto at(const F& f, [[maybe_unused]] int64_t j, V... v) {
    if constexpr (std::is_invocable<F, V...>::value) {
      return f(v...);
    } else {
      static_assert(std::is_invocable<F, Column, V...>::value,
                    "a function of elements takes one of each row, or the column, an int64_t, and one of each row");
      return f(j, v...);
    }
  }

  // What packs of N tile. Rows on the GPU are whole packs.
  template <typename T>
  static MSOPS_BOTH int64_t whole(Row<T> row) {
#ifdef __CUDA_ARCH__
    return row.length;
#else
    return row.length / N * N;
#endif
  }

  template <typename T>
  static MSOPS_BOTH Values read(const T* from) {
    Values values;
#ifdef __CUDA_ARCH__
    const Pack<T, N> pack = load<N>(from);
    for (int k = 0; k < N; ++k) values.of[k] = C(pack.values[k]);
#else
#pragma omp simd
    for (int k = 0; k < N; ++k) values.of[k] = C(from[k]);
#endif
    return values;
  }

  template <typename T, typename F, typename... V>
  static MSOPS_BOTH void write(T* to, const F& f, int64_t j, const V&... values) {
#ifdef __CUDA_ARCH__
    Pack<T, N> pack;
    for (int k = 0; k < N; ++k) pack.values[k] = T(at(f, j + k, values.of[k]...));
    msops::store(to, pack);
#else
#pragma omp simd
    for (int k = 0; k < N; ++k) assign(to[k], at(f, j + k, values.of[k]...));
#endif
  }

  template <typename R, typename Combine, typename F, typename... V>
  static MSOPS_BOTH void accumulate(R (&results)[N], const Combine& combine, const F& f, int64_t j,
                                    const V&... values) {
#pragma omp simd
    for (int k = 0; k < N; ++k) results[k] = combine(results[k], R(at(f, j + k, values.of[k]...)));
  }

#ifdef __CUDACC__
  // The value of the lane that is `distance` away, moved in words of 4 bytes.
  template <typename R>
  static __device__ R from_lane(const R& value, int distance) {
    constexpr int kWords = (sizeof(R) + 3) / 4;
    uint32_t words[kWords] = {};
    memcpy(words, &value, sizeof value);
    for (uint32_t& word : words) word = __shfl_xor_sync(~0u, word, distance);
    R result;
    memcpy(&result, words, sizeof result);
    return result;
  }
#endif

  template <typename R, typename Combine>
  MSOPS_BOTH R over_lanes(R value, [[maybe_unused]] const Combine& combine) const {
    static_assert(std::is_trivially_copyable<R>::value && sizeof(R) <= sizeof(SharedOfWarp),
                  "reduce: what is reduced must be a number, or a struct of up to 32 bytes that memcpy may copy");
#ifdef __CUDA_ARCH__
    constexpr int kWarp = kLanes < 32 ? kLanes : 32;
    for (int distance = kWarp / 2; distance > 0; distance /= 2) value = combine(value, from_lane(value, distance));
    if constexpr (kLanes > kWarp) {
      R* of_warps = reinterpret_cast<R*>(shared_);
      if (lane_ % kWarp == 0) of_warps[lane_ / kWarp] = value;
      __syncthreads();
      value = of_warps[0];
      for (int warp = 1; warp < kLanes / kWarp; ++warp) value = combine(value, of_warps[warp]);
      __syncthreads();  // before the next reduction writes there
    }
#endif
    return value;
  }

  int lane_;
  SharedOfWarp* shared_;  // of each warp, if the team is a block
};

template <typename C, typename Body>
struct RowOnCpu {
  Body body;

  MSOPS_CPU void operator()(int64_t row) const { body(row, Team<C, 1, 16>(0, nullptr)); }
};

#ifdef __CUDACC__
template <typename C, int kLanes, int N, typename Body>
__global__ void __launch_bounds__(kThreads) rows_kernel(int64_t rows, Body body) {
  __shared__ SharedOfWarp shared[kThreads / 32];
  const int64_t row = blockIdx.x * int64_t{kThreads / kLanes} + threadIdx.x / kLanes;
  if (row < rows) body(row, Team<C, kLanes, N>(threadIdx.x % kLanes, shared));
}
#endif

// body(row, team) for every row in [0, rows), where the team reads and writes rows of `matrices`, of equal length.
template <typename T, typename Body>
void for_rows(Call& call, int64_t rows, std::initializer_list<Rows<const T>> matrices, const Body& body) {
  const int64_t columns = matrices.begin()->columns;
  if (call.on_cpu()) return on_cpu(call, rows, RowOnCpu<Compute<T>, Body>{body}, 4 * static_cast<double>(columns));
#ifdef __CUDACC__
  call.require(kOnGpu<T>, kBadDtype, "there is no GPU code for %s", dtype_name<T>());
  if (!call.ok() || rows == 0) return;
  bool packs = columns % kPackWidth<T> == 0;
  for (const Rows<const T>& matrix : matrices) packs &= is_aligned<kPackWidth<T>>(matrix.data);
  const auto launch = [&](auto lanes, auto width) {
    constexpr int kTeams = kThreads / decltype(lanes)::value;
    const int64_t blocks = (rows - 1) / kTeams + 1;
    call.require(blocks <= INT32_MAX, kBadShape, "too many rows for one launch");
    if (!call.ok()) return;
    rows_kernel<Compute<T>, decltype(lanes)::value, decltype(width)::value>
        <<<blocks, kThreads, 0, call.stream()>>>(rows, body);
    call.check_launch();
  };
  [[maybe_unused]] const auto with_team = [&](auto width) {
    const int64_t steps = columns / decltype(width)::value;
    if (steps <= 2) return launch(Constant<2>{}, width);
    if (steps <= 4) return launch(Constant<4>{}, width);
    if (steps <= 16) return launch(Constant<8>{}, width);
    // A block for each row where warps would be too few to fill a GPU, or each would have much to do.
    steps <= 64 || (steps <= 1024 && rows >= 8192) ? launch(Constant<32>{}, width)
                                                   : launch(Constant<kThreads>{}, width);
  };
  if constexpr (kOnGpu<T>) packs ? with_team(Constant<kPackWidth<T>>{}) : with_team(Constant<1>{});
#endif
}

}  // namespace msops
