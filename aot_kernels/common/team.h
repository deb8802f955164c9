// Team is the threads that share a row: this is what it offers to the body of for_rows (see rows.h), on both devices.
#pragma once

#include <type_traits>

#include "functions.h"
#include "pack.h"
#include "parallel.h"
#ifdef __CUDACC__
#include "gpu/cluster.h"
#endif

namespace msops {

// Row is a row of a matrix. T is const where it is only read.
template <typename T>
struct Row {
  T* data;
  int64_t length;
};

// HeldRow is a row that the team keeps in registers, kHeld packs of N neighbours in each lane.
template <typename T, int kHeld, int N>
struct HeldRow {
  Row<T> row;
  Pack<std::remove_const_t<T>, N> packs[kHeld];
};

// TeamShape says how a team is made up. kLanes threads of a block share a row, of which a lane keeps kHeld packs. If
// kHeld is 0, rows may be longer, and each reduction reads them again. If kClustered, the blocks of a cluster share a
// row.
template <int lanes, int width, int held, bool clustered = false>
struct TeamShape {
  static constexpr int kLanes = lanes, kWidth = width, kHeld = held;
  static constexpr bool kClustered = clustered;
};
using OnCpu = TeamShape<1, 16, 0>;

// Parameters are a number for each column, which all rows share, such as a weight. They are elements of T or, if
// `is_float`, of float. Functions of rows take them in place of a Row; if `data` is null, each is `otherwise`.
template <typename T>
struct Parameters {
  const void* data;
  int64_t length;
  bool is_float;
  Compute<T> otherwise[OnCpu::kWidth];  // as many equal numbers as the CPU reads at once

  Parameters(const Tensor& tensor, Compute<T> number)
      : data(tensor.data),
        length(tensor.size),
        is_float(tensor.dtype && std::strcmp(tensor.dtype, dtype_name<float>()) == 0) {
    for (Compute<T>& each : otherwise) each = number;
  }
  MSOPS_BOTH Row<const T> row() const { return {static_cast<const T*>(data), length}; }
  MSOPS_BOTH Row<const float> row_of_float() const { return {static_cast<const float*>(data), length}; }
};

// SharedOfWarp has room for one result of a reduction.
struct alignas(16) SharedOfWarp {
  unsigned char bytes[32];
};

// Elements have the computing type C. The packs of a row begin `shift` elements before it, where memory is aligned; the
// elements of the first and the last pack that are outside the row are neither read nor written.
template <typename C, typename Shape>
class Team {
 public:
  MSOPS_BOTH Team(int lane, int shift, SharedOfWarp* shared)
      : lane_(lane), lanes_(Shape::kLanes), shift_(shift), shared_(shared) {
#ifdef __CUDA_ARCH__
    if (Shape::kClustered) {
      lane_ += static_cast<int>(cluster_ctarank()) * Shape::kLanes;
      lanes_ *= static_cast<int>(cluster_nctarank());
    }
#endif
  }

  // Returns the row for the functions below, which take it in place of a Row. It is read once, where the team can keep
  // it.
  template <typename T>
  MSOPS_BOTH auto load(Row<T> row) const {
    if constexpr (Shape::kHeld == 0) {
      return row;
    } else {
      HeldRow<T, Shape::kHeld, N> held;
      held.row = row;
      for_packs(row.length, [&](int i, int64_t j) { held.packs[i] = read_pack(row, j); });
      return held;
    }
  }

  // sum and max return the sum and the largest of f(a_j, b_j, ...) over all j, for rows a, b, ... of one length. For
  // empty rows they return 0 and -infinity. NaN counts as larger than all.
  template <typename F, typename First, typename... In>
  MSOPS_BOTH C sum(const F& f, const First& first, const In&... in) const {
    return combined(C(0), [](C a, C b) { return a + b; }, f, first, in...);
  }
  template <typename F, typename First, typename... In>
  MSOPS_BOTH C max(const F& f, const First& first, const In&... in) const {
    return combined(C(-HUGE_VAL), [](C a, C b) { return b > a || b != b ? b : a; }, f, first, in...);
  }

  template <typename In>
  MSOPS_BOTH C sum(const In& in) const {
    return sum([](C v) { return v; }, in);
  }
  template <typename In>
  MSOPS_BOTH C max(const In& in) const {
    return max([](C v) { return v; }, in);
  }

  // Combines the results of f by any associative and commutative `combine`, for which combine(a, identity) is a.
  // Results may be numbers, or structs of up to 32 bytes, such as a value and its column.
  template <typename R, typename Combine, typename F, typename First, typename... In>
  MSOPS_BOTH R reduce(R identity, const Combine& combine, const F& f, const First& first, const In&... in) const {
    static_assert(std::is_same<decltype(at(f, int64_t{}, element(first, 0), element(in, 0)...)), R>::value,
                  "reduce: the identity must have the type that the function returns");
    return combined(identity, combine, f, first, in...);
  }

  // Returns a statistic of a row (see statistics.h), as in team.reduce(ArgMax<C>(), x[row]).
  template <typename R, typename In>
  MSOPS_BOTH R reduce(R identity, const In& in) const {
    return combined(
        identity, [](const R& a, const R& b) { return R::combine(a, b); }, [](int64_t j, C v) { return R::of(j, v); },
        in);
  }

  // out_j = f(a_j, b_j, ...) for all j, where `out` may be one of the inputs.
  template <typename F, typename T, typename... In>
  MSOPS_BOTH void map(const F& f, Row<T> out, const In&... in) const {
#ifdef __CUDA_ARCH__
    for_packs(out.length, [&](int i, int64_t j) { write(out, f, j, read(in, i, j)...); });
#else
    const int64_t whole = out.length / N * N;
    for (int64_t j = 0; j < whole; j += N) write(out, f, j, read(in, 0, j)...);
    for (int64_t j = whole; j < out.length; ++j) assign(out.data[j], at(f, j, element(in, j)...));
#endif
  }

  // Does as map does, and returns `out` as load would, but does not read it.
  template <typename F, typename T, typename... In>
  MSOPS_BOTH auto map_and_load(const F& f, Row<T> out, const In&... in) const {
    if constexpr (Shape::kHeld == 0) {
      map(f, out, in...);
      return Row<const T>{out.data, out.length};
    } else {
      HeldRow<const T, Shape::kHeld, N> held;
      held.row = {out.data, out.length};
      for_packs(out.length, [&](int i, int64_t j) {
        held.packs[i] = pack_of<T>(out.length, f, j, read(in, i, j)...);
        write_pack(out, j, held.packs[i]);
      });
      return held;
    }
  }

  // Stores one number for the whole row.
  template <typename T>
  MSOPS_BOTH void store(T* to, Compute<T> value) const {
    if (lane_ == 0) assign(*to, value);
  }

 private:
  static constexpr int N = Shape::kWidth;
  struct Values {
    C of[N];
  };
  struct InPlace {  // Values on the CPU where they need no conversion; a copy would not vectorize
    const C* of;
  };

  template <typename R, typename Combine, typename F, typename First, typename... In>
  MSOPS_BOTH R combined(R identity, const Combine& combine, const F& f, const First& first, const In&... in) const {
    static_assert(std::is_trivially_copyable<R>::value && sizeof(R) <= sizeof(SharedOfWarp),
                  "reduce: what is reduced must be a number, or a struct of up to 32 bytes that memcpy may copy");
    const int64_t length = row_of(first).length;
    R results[N];
    for (R& result : results) result = identity;
#ifdef __CUDA_ARCH__
    for_packs(length, [&](int i, int64_t j) {
      accumulate(results, length, combine, f, j, read(first, i, j), read(in, i, j)...);
    });
    return over_lanes(folded(results, combine), combine);
#else
    constexpr int64_t kRun = 256 * N;  // elements; with more, a sum would lose digits
    R total = identity;
    int64_t j = 0;
    for (const int64_t whole = length / N * N; j < whole;) {
      for (const int64_t end = j + kRun < whole ? j + kRun : whole; j < end; j += N)
        accumulate(results, length, combine, f, j, read(first, 0, j), read(in, 0, j)...);
      total = combine(total, folded(results, combine));
      for (R& result : results) result = identity;
    }
    for (; j < length; ++j) total = combine(total, R(at(f, j, element(first, j), element(in, j)...)));
    return total;
#endif
  }

  // Combines all results to one, by halves.
  template <typename R, typename Combine>
  static MSOPS_BOTH R folded(R (&results)[N], const Combine& combine) {
    for (int half = N / 2; half > 0; half /= 2)
      for (int k = 0; k < half; ++k) results[k] = combine(results[k], results[k + half]);
    return results[0];
  }

  // Column converts to int64_t and to nothing else, so that a function of one more element does not pass for one of a
  // column.
  struct Column {
    template <typename Index, typename = std::enable_if_t<std::is_same<Index, int64_t>::value>>
    MSOPS_BOTH operator Index() const;
  };

  // Calls f(v...), or f(j, v...) if f takes the column.
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

  template <typename T>
  static MSOPS_BOTH const Row<T>& row_of(const Row<T>& row) {
    return row;
  }
  template <typename T>
  static MSOPS_BOTH const Row<T>& row_of(const HeldRow<T, Shape::kHeld, N>& held) {
    return held.row;
  }
  template <typename In>
  static MSOPS_BOTH C element(const In& in, int64_t j) {
    return C(row_of(in).data[j]);
  }

  template <typename T>
  static MSOPS_BOTH C element(const Parameters<T>& in, int64_t j) {
    return in.data == nullptr ? in.otherwise[0] : in.is_float ? C(in.row_of_float().data[j]) : C(in.row().data[j]);
  }

  // Calls f(i, j) for each of this lane's packs, where pack i begins at element j.
  template <typename F>
  MSOPS_BOTH void for_packs(int64_t length, const F& f) const {
    if constexpr (Shape::kHeld > 0) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
      for (int i = 0; i < Shape::kHeld; ++i) {
        const int64_t j = (int64_t{i} * lanes_ + lane_) * N - shift_;
        if (j < length) f(i, j);
      }
    } else {
      for (int64_t j = int64_t{lane_} * N - shift_; j < length; j += int64_t{lanes_} * N) f(0, j);
    }
  }

  static MSOPS_BOTH bool is_inside(int64_t j, int64_t length) {
    return static_cast<uint64_t>(j) < static_cast<uint64_t>(length);
  }
  // Returns whether the pack at element j is moved at once.
  template <typename T>
  static MSOPS_BOTH bool is_whole(const Row<T>& row, int64_t j) {
    return j >= 0 && j + N <= row.length && is_aligned<N>(row.data + j);
  }

  template <typename T>
  static MSOPS_BOTH Pack<std::remove_const_t<T>, N> read_pack(const Row<T>& row, int64_t j) {
    if (is_whole(row, j)) return msops::load<N>(row.data + j);
    Pack<std::remove_const_t<T>, N> pack = {};
    for (int k = 0; k < N; ++k)
      if (is_inside(j + k, row.length)) pack.values[k] = row.data[j + k];
    return pack;
  }

#ifdef __CUDA_ARCH__
  template <typename T>
  static MSOPS_BOTH Values read(const Row<T>& row, int, int64_t j) {
    Values values;
    const auto pack = read_pack(row, j);
    for (int k = 0; k < N; ++k) values.of[k] = C(pack.values[k]);
    return values;
  }
#else
  template <typename T>
  static MSOPS_BOTH auto read(const Row<T>& row, int, int64_t j) {
    const T* from = row.data + j;
    if constexpr (std::is_same<std::remove_const_t<T>, C>::value) {
      return InPlace{from};
    } else {
      Values values;
#pragma omp simd
      for (int k = 0; k < N; ++k) values.of[k] = C(from[k]);
      return values;
    }
  }
#endif
  template <typename T>
  static MSOPS_BOTH Values read(const HeldRow<T, Shape::kHeld, N>& held, int i, int64_t) {
    Values values;
    for (int k = 0; k < N; ++k) values.of[k] = C(held.packs[i].values[k]);
    return values;
  }

  template <typename T>
  static MSOPS_BOTH auto read(const Parameters<T>& in, int, int64_t j) {
#ifndef __CUDA_ARCH__
    if constexpr (std::is_same<T, float>::value)
      return InPlace{in.data ? in.row().data + j : in.otherwise};
    else
#endif
    {
      if (in.data && in.is_float && !std::is_same<T, float>::value) return as_values(read(in.row_of_float(), 0, j));
      if (in.data) return as_values(read(in.row(), 0, j));
      Values values;
#pragma omp simd
      for (int k = 0; k < N; ++k) values.of[k] = in.otherwise[0];
      return values;
    }
  }
  template <typename V>
  static MSOPS_BOTH Values as_values(const V& from) {
    Values values;
#pragma omp simd
    for (int k = 0; k < N; ++k) values.of[k] = from.of[k];
    return values;
  }

  template <typename T, typename F, typename... V>
  static MSOPS_BOTH Pack<T, N> pack_of(int64_t length, const F& f, int64_t j, const V&... values) {
    Pack<T, N> pack = {};
    for (int k = 0; k < N; ++k)
      if (is_inside(j + k, length)) assign(pack.values[k], at(f, j + k, values.of[k]...));
    return pack;
  }
  template <typename T>
  static MSOPS_BOTH void write_pack(const Row<T>& out, int64_t j, const Pack<T, N>& pack) {
    if (is_whole(out, j)) return store_at_once(out.data + j, pack);
    for (int k = 0; k < N; ++k)
      if (is_inside(j + k, out.length)) out.data[j + k] = pack.values[k];
  }

  template <typename T, typename F, typename... V>
  static MSOPS_BOTH void write(const Row<T>& out, const F& f, int64_t j, const V&... values) {
#ifdef __CUDA_ARCH__
    write_pack(out, j, pack_of<T>(out.length, f, j, values...));
#else
    T* to = out.data + j;
#pragma omp simd
    for (int k = 0; k < N; ++k) assign(to[k], at(f, j + k, values.of[k]...));
#endif
  }

  template <typename R, typename Combine, typename F, typename... V>
  static MSOPS_BOTH void accumulate(R (&results)[N], [[maybe_unused]] int64_t length, const Combine& combine,
                                    const F& f, int64_t j, const V&... values) {
#ifdef __CUDA_ARCH__
    for (int k = 0; k < N; ++k)
      if (is_inside(j + k, length)) results[k] = combine(results[k], R(at(f, j + k, values.of[k]...)));
#else
#pragma omp simd
    for (int k = 0; k < N; ++k) results[k] = combine(results[k], R(at(f, j + k, values.of[k]...)));
#endif
  }

#ifdef __CUDACC__
  // Reduces over `lanes` neighbouring lanes of a warp, a power of 2. Structs are combined in the lanes' order, so that
  // all lanes have the same bits even where combine(a, b) is rounded differently from combine(b, a).
  template <typename R, typename Combine>
  static __device__ R over_warp(R value, const Combine& combine, int lanes) {
    constexpr int kWords = (sizeof(R) + 3) / 4;
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      uint32_t words[kWords] = {};
      memcpy(words, &value, sizeof value);
      for (uint32_t& word : words) word = __shfl_xor_sync(~0u, word, distance);
      R other;
      memcpy(&other, words, sizeof other);
      if (std::is_class<R>::value && threadIdx.x & distance) {
        value = combine(other, value);
      } else {
        value = combine(value, other);
      }
    }
    return value;
  }

  // Reduces over the blocks of a cluster, whose number is a power of 2. `shared` is the same place in each of them.
  template <typename R, typename Combine>
  static __device__ R over_cluster(R value, const Combine& combine, SharedOfWarp* shared) {
    if (threadIdx.x == 0) memcpy(shared, &value, sizeof value);
    __syncwarp();
    cluster_arrive_wait();
    const int blocks = static_cast<int>(cluster_nctarank()), block = static_cast<int>(threadIdx.x) % blocks;
    const float* const from = reinterpret_cast<const float*>(shared);
    const Pack<float, 4> halves[2] = {ld_shared_cluster(from, block), ld_shared_cluster(from + 4, block)};
    memcpy(&value, halves, sizeof value);
    cluster_arrive_wait();  // before the next reduction writes there, or the block ends
    return over_warp(value, combine, blocks);
  }

  template <typename R, typename Combine>
  __device__ R over_lanes(R value, const Combine& combine) const {
    constexpr int kWarp = Shape::kLanes < 32 ? Shape::kLanes : 32, kWarps = Shape::kLanes / kWarp;
    value = over_warp(value, combine, kWarp);
    if constexpr (kWarps > 1) {
      R* of_warps = reinterpret_cast<R*>(shared_);
      if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
      __syncthreads();
      value = over_warp(of_warps[threadIdx.x % kWarps], combine, kWarps);
      __syncthreads();  // before the next reduction writes there
    }
    if constexpr (Shape::kClustered) value = over_cluster(value, combine, shared_ + kWarps);
    return value;
  }
#endif

  int lane_, lanes_;      // lanes of the whole team
  int shift_;             // elements from where memory is aligned to the row
  SharedOfWarp* shared_;  // a result of each warp, then of the block, if the team is larger than a warp
};

}  // namespace msops
