// scale = max |x smooth| / 127 and codes = round(x smooth / scale), for each row x
//
// The largest magnitude is found by the bits of magnitudes, whose order is that of the numbers, with NaN as the
// largest. All is computed by single operations in float (double), so that both devices give the same codes.

#include <cmath>

#include "common/numbers.h"
#include "common/pack.h"
#include "common/parallel.h"

using namespace msops;

namespace {

template <typename C>
using BitsOf = std::conditional_t<sizeof(C) == 8, uint64_t, uint32_t>;

template <typename C>
MSOPS_BOTH BitsOf<C> magnitude_bits(C value) {
  BitsOf<C> bits;
  memcpy(&bits, &value, sizeof bits);
  return bits & ~BitsOf<C>(0) >> 1;
}
template <typename C>
MSOPS_BOTH C number_of(BitsOf<C> bits) {
  C value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
struct RowCodes {
  using C = Compute<T>;
  int64_t columns;
  const T* x;
  OptionalNumbers<T> smooth;
  int8_t* codes;
  float* scale;

  MSOPS_BOTH C smoothed(C value, int64_t column) const { return smooth.data ? value * smooth[column] : value; }
  MSOPS_BOTH static float scale_of(BitsOf<C> most) { return static_cast<float>(number_of<C>(most) / C(127)); }
  // Returns the code of a number of a row with a finite scale that is not 0.
  MSOPS_BOTH static int8_t code_of(C value, C of_row) {
    const C code = std::rint(value / of_row);
    return static_cast<int8_t>(code < C(-127) ? C(-127) : code > C(127) ? C(127) : code);
  }
  MSOPS_BOTH static bool has_codes(float of_row) {
    return of_row > 0 && magnitude_bits(of_row) < 0x7f800000u;  // neither 0 nor infinite nor NaN
  }

  // Computes a row on the CPU.
  MSOPS_CPU void operator()(int64_t row) const {
    constexpr int64_t kBlock = 256;
    C block[kBlock];
    BitsOf<C> most = 0;
    const auto load = [&](int64_t first, int64_t n) {
      widen(x + row * columns + first, block, n);
      if (smooth.data)
        for (int64_t j = 0; j < n; ++j) block[j] *= smooth[first + j];
    };
    for (int64_t first = 0; first < columns; first += kBlock) {
      const int64_t n = std::min(kBlock, columns - first);
      load(first, n);
      for (int64_t j = 0; j < n; ++j) most = std::max(most, magnitude_bits(block[j]));
    }
    const float of_row = scale[row] = scale_of(most);
    int8_t* const to = codes + row * columns;
    if (!has_codes(of_row)) return std::fill_n(to, columns, int8_t{0}), void();
    for (int64_t first = 0; first < columns; first += kBlock) {
      const int64_t n = std::min(kBlock, columns - first);
      load(first, n);
      for (int64_t j = 0; j < n; ++j) to[first + j] = code_of(block[j], C(of_row));
    }
  }
};

#ifdef __CUDACC__
constexpr int kMostThreads = 512;

// A block takes a row. It reads it twice, the second time from the caches.
template <typename T, int N>
__global__ void __launch_bounds__(kMostThreads) rows_kernel(const __grid_constant__ RowCodes<T> rows) {
  using C = Compute<T>;
  __shared__ BitsOf<C> of_warp[kMostThreads / 32];
  const int64_t row = blockIdx.x, columns = rows.columns;
  const T* const x = rows.x + row * columns;
  const int step = static_cast<int>(blockDim.x) * N;
  BitsOf<C> most = 0;
  for (int64_t j = threadIdx.x * N; j < columns; j += step) {
    const Pack<T, N> pack = load<N>(x + j);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const BitsOf<C> bits = magnitude_bits(rows.smoothed(C(pack.values[i]), j + i));
      most = bits > most ? bits : most;
    }
  }
  const auto reduce = [&] {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
      const BitsOf<C> other = __shfl_xor_sync(~0u, most, apart);
      most = other > most ? other : most;
    }
  };
  reduce();
  if (blockDim.x > 32) {
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = most;
    __syncthreads();
    most = threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0;
    reduce();
  }
  const float of_row = RowCodes<T>::scale_of(most);
  if (threadIdx.x == 0) rows.scale[row] = of_row;
  const bool has_codes = RowCodes<T>::has_codes(of_row);
  for (int64_t j = threadIdx.x * N; j < columns; j += step) {
    const Pack<T, N> pack = load<N>(x + j);
    Pack<int8_t, N> codes;
#pragma unroll
    for (int i = 0; i < N; ++i)
      codes.values[i] =
          has_codes ? RowCodes<T>::code_of(rows.smoothed(C(pack.values[i]), j + i), C(of_row)) : int8_t{0};
    store(rows.codes + row * columns + j, codes);
  }
}

template <typename T>
void quantize_on_gpu(Call& call, int64_t count, const RowCodes<T>& rows) {
  constexpr int N = kPackWidth<T>;
  const bool has_packs = rows.columns % N == 0 && is_aligned<N>(rows.x) && is_aligned<N>(rows.codes);
  const int64_t packs = rows.columns / (has_packs ? N : 1);
  const int threads = static_cast<int>(std::min<int64_t>(std::max<int64_t>((packs + 31) / 32, 1) * 32, kMostThreads));
  has_packs ? launch(call, rows_kernel<T, N>, count, threads, 0, rows)
            : launch(call, rows_kernel<T, 1>, count, threads, 0, rows);
}
#endif

}  // namespace

// (x, smooth?) -> (codes, scale)
MSOPS_ENTRY(QuantizeRowsForward) {
  const Tensor x = call.tensor("x"), smooth = call.optional_of("common|float32", "smooth", 1);
  const Tensor codes = call.tensor_of("int8", "codes"), scale = call.tensor_of("float32", "scale");
  call.require(x.rank > 0, kBadRank, "x has no axes");
  if (smooth.dtype) call.require_shape(smooth, {x.dim(-1)});
  call.require_same_shape(codes, x);
  call.require_shape_of_rows(scale, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const RowCodes<T> rows{x.dim(-1), x.as<T>(), OptionalNumbers<T>(smooth), codes.as<int8_t>(), scale.as<float>()};
    if (call.is_on_cpu()) return on_cpu(call, scale.size, rows, 2 * static_cast<double>(rows.columns));
#ifdef __CUDACC__
    quantize_on_gpu(call, scale.size, rows);
#endif
  });
}
