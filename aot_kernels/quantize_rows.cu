// scale = max |x smooth| / 127 and codes = round(x smooth / scale), for each row x
//
// The largest magnitude is found by the bits of magnitudes, whose order is that of the numbers, with NaN as the
// largest. All is computed by single operations in float (double), so that both devices give the same codes. The GPU
// keeps a row in registers where these are enough, and divides no number whose code a product shows (FastCodes).

#include <algorithm>
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
// RowOnGpu is a row that threads share; columns is a number of packs of N elements.
template <typename T, int N>
struct RowOnGpu {
  using Codes = RowCodes<T>;
  using C = Compute<T>;
  const Codes& rows;
  int64_t row;

  __device__ __forceinline__ Pack<T, N> load_pack(int64_t column) const {
    return load<N>(rows.x + row * rows.columns + column);
  }
  __device__ __forceinline__ void store_codes(int64_t column, const Pack<int8_t, N>& codes) const {
    store(rows.codes + row * rows.columns + column, codes);
  }
  __device__ __forceinline__ void widen(const Pack<T, N>& pack, int64_t column, C (&values)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = C(pack.values[i]);
    if (rows.smooth.data)
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] *= rows.smooth[column + i];
  }
};

// Most finds the largest magnitude of numbers. Those of float16 have the order of their bits, too, and are compared in
// pairs, unless they are multiplied first.
template <typename T, int N>
struct Most {
  using C = Compute<T>;
  static constexpr bool kHasPairs = std::is_same<T, Half>::value && N % 2 == 0;
  BitsOf<C> bits = 0;
  uint32_t pairs = 0;

  __device__ __forceinline__ void add(const RowOnGpu<T, N>& row, const Pack<T, N>& pack, int64_t column) {
    if (kHasPairs && !row.rows.smooth.data) {
      uint32_t words[kHasPairs ? N / 2 : 1];
      memcpy(words, &pack, sizeof words);
#pragma unroll
      for (const uint32_t word : words) pairs = __vmaxu2(pairs, word & 0x7fff7fff);
      return;
    }
    C values[N];
    row.widen(pack, column, values);
#pragma unroll
    for (int i = 0; i < N; ++i) bits = std::max(bits, magnitude_bits(values[i]));
  }
  __device__ __forceinline__ BitsOf<C> result() const {
    if constexpr (!kHasPairs) return bits;
    Half half;
    half.bits = static_cast<uint16_t>(std::max(pairs & 0xffff, pairs >> 16));
    return std::max(bits, magnitude_bits(C(half)));
  }
};

// FastCodes computes code_of for a scale that is not subnormal. For quotients of up to 127, the products with the
// rounded reciprocal are off by up to 2^-17, and the rounded quotients by up to 2^-18. So both have one nearest whole
// number, unless a product is within 2^-16 of a half; then the pack's numbers are divided.
struct FastCodes {
  static constexpr float kWhole = 12582912.f;  // 1.5 2^23: what is added to it becomes whole, in the lowest bits
  float scale, reciprocal;

  __device__ __forceinline__ explicit FastCodes(float of_row) : scale(of_row), reciprocal(1.f / of_row) {}

  template <int N>
  __device__ __forceinline__ Pack<int8_t, N> operator()(const float (&values)[N]) const {
    Pack<int8_t, N> codes;
    float furthest = 0.f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float sum = fmaf(values[i], reciprocal, kWhole);
      furthest = fmaxf(furthest, fabsf(fmaf(values[i], reciprocal, kWhole - sum)));
      codes.values[i] = static_cast<int8_t>(__float_as_uint(sum));
    }
    if (furthest > 0.5f - 0x1p-16f)
#pragma unroll
      for (int i = 0; i < N; ++i) codes.values[i] = RowCodes<float>::code_of(values[i], scale);
    return codes;
  }
};

constexpr int kMostThreads = 512, kThreads = 128;  // of a block: at most, and where a warp takes a row

// Threads x of a block take a row, of which each keeps kPacks packs; where that is 0, they read the row twice, the
// second time from the caches.
template <typename T, int N, int kPacks>
__global__ void __launch_bounds__(kMostThreads) rows_kernel(const __grid_constant__ RowCodes<T> rows, int64_t count) {
  using C = Compute<T>;
  __shared__ BitsOf<C> of_warp[kMostThreads / 32];
  const RowOnGpu<T, N> row{rows, static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y};
  if (row.row >= count) return;
  const int64_t first = threadIdx.x * N, step = static_cast<int>(blockDim.x) * N;
  Pack<T, N> packs[kPacks > 0 ? kPacks : 1];
  const auto for_packs = [&](const auto& f) {  // calls f(pack, column)
    if constexpr (kPacks == 0) {
      for (int64_t j = first; j < rows.columns; j += step) f(row.load_pack(j), j);
    } else {
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
        if (first + i * step < rows.columns) f(packs[i], first + i * step);
    }
  };
#pragma unroll
  for (int i = 0; i < kPacks; ++i)
    if (first + i * step < rows.columns) packs[i] = row.load_pack(first + i * step);
  Most<T, N> of_thread;
  for_packs([&](const Pack<T, N>& pack, int64_t j) { of_thread.add(row, pack, j); });
  BitsOf<C> most = of_thread.result();
  const auto reduce = [&] {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) most = std::max(most, __shfl_xor_sync(~0u, most, apart));
  };
  reduce();
  if (blockDim.x > 32) {
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = most;
    __syncthreads();
    most = threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0;
    reduce();
  }
  const float of_row = RowCodes<T>::scale_of(most);
  if (threadIdx.x == 0) rows.scale[row.row] = of_row;
  constexpr float kNormal = 0x1p-126f;
  const auto store_codes = [&](const auto& codes_of) {
    for_packs([&](const Pack<T, N>& pack, int64_t j) {
      C values[N];
      row.widen(pack, j, values);
      row.store_codes(j, codes_of(values));
    });
  };
  if (!RowCodes<T>::has_codes(of_row)) {
    store_codes([](const C(&)[N]) { return Pack<int8_t, N>{}; });
  } else if (std::is_same<C, float>::value && of_row >= kNormal) {
    if constexpr (std::is_same<C, float>::value) store_codes(FastCodes(of_row));
  } else {
    store_codes([&](const C(&values)[N]) {
      Pack<int8_t, N> codes;
#pragma unroll
      for (int i = 0; i < N; ++i) codes.values[i] = RowCodes<T>::code_of(values[i], C(of_row));
      return codes;
    });
  }
}

template <typename T, int N>
void launch_rows(Call& call, int64_t count, const RowCodes<T>& rows) {
  const int64_t packs = (rows.columns + N - 1) / N;
  const auto launch_kernel = [&](auto kernel, int64_t kept) {  // kept: packs of a thread
    const int64_t warps = std::max<int64_t>((packs + 32 * kept - 1) / (32 * kept), 1);
    const unsigned x = static_cast<unsigned>(std::min<int64_t>(32 * warps, kMostThreads));
    const unsigned y = x == 32 ? kThreads / 32 : 1;
    launch(call, kernel, (count + y - 1) / y, dim3(x, y), 0, rows, count);
  };
  if (packs <= 32) return launch_kernel(rows_kernel<T, N, 1>, 1);
  if (packs <= 4 * kMostThreads) return launch_kernel(rows_kernel<T, N, 4>, 4);
  if (packs <= 8 * kMostThreads) return launch_kernel(rows_kernel<T, N, 8>, 8);
  launch_kernel(rows_kernel<T, N, 0>, 8);
}

template <typename T>
void quantize_on_gpu(Call& call, int64_t count, const RowCodes<T>& rows) {
  constexpr int N = kPackWidth<T>;
  const bool has_packs = rows.columns % N == 0 && is_aligned<N>(rows.x) && is_aligned<N>(rows.codes);
  has_packs ? launch_rows<T, N>(call, count, rows) : launch_rows<T, 1>(call, count, rows);
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
