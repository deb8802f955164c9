// Rows of heads as tiles for the tensor cores (see shared/product/mma_tiles.h), and the launch of kernels for them.
#pragma once

#include <algorithm>

#include "../shared/product/mma_tiles.h"
#include "items.h"

#ifdef __CUDACC__

#include "../common/gpu/approx.h"
#include "../common/launch.h"

namespace msops::flash_attention {

using product::clear, product::for_sums, product::pair_of, product::store_pair, product::store_rows;
template <typename T, int kWidth>
using Tile = product::MmaTile<T, kWidth>;
template <typename Element>
using HeadRows = product::TileRows<Element>;

constexpr float kLn2 = 0.6931471805599453f;

// Describes the rows of a head, whose first one is at an offset.
template <typename Element>
__device__ __forceinline__ HeadRows<Element> rows_of(Element* data, const Strides& strides, int64_t offset,
                                                     int64_t width, bool aligned) {
  return {data + offset, strides.row, static_cast<int>(width), aligned};
}

// Describe the rows of an item's head (see items.h), where `aligned` has the bits of AlignedRows. Kernels pass the
// widths that they keep in registers: nvcc makes other code where `a` is read instead.
template <typename A, typename Item>
__device__ __forceinline__ auto rows_of_q(const A& a, const Item& item, int64_t width, int aligned) {
  return rows_of(a.q, a.of_q, item.query(a.of_q, 0), width, aligned & kAlignedQ);
}
template <typename A, typename Item>
__device__ __forceinline__ auto rows_of_k(const A& a, const Item& item, int64_t width, int aligned) {
  return rows_of(a.k, a.of_k, item.key(a.of_k, 0), width, aligned & kAlignedK);
}
template <typename A, typename Item>
__device__ __forceinline__ auto rows_of_v(const A& a, const Item& item, int64_t width, int aligned) {
  return rows_of(a.v, a.of_v, item.key(a.of_v, 0), width, aligned & kAlignedV);
}
template <typename A, typename Gradient, typename Item>
__device__ __forceinline__ auto rows_of_dout(const A& a, const Gradient& g, const Item& item, int64_t width,
                                             int aligned) {
  return rows_of(g.dout, a.of_out, item.query(a.of_out, 0), width, aligned & kAlignedOut);
}

// Turns sums into a left operand of 16 kM rows of float16.
template <int kM, int kN>
__device__ __forceinline__ void operand(uint32_t (&words)[kM][kN / 2][4], const float (&sums)[kM][kN][4]) {
  unrolled<kM, kN, 2>(
      [&](int m, int n, int i) { words[m][n / 2][n % 2 * 2 + i] = pair_of(sums[m][n][2 * i], sums[m][n][2 * i + 1]); });
}
// Turns sums into a left operand of float32. The columns 2 q and 2 q + 1 of eight are the operand's q and q + 4, so
// that no thread needs what another one has.
template <int kM, int kN>
__device__ __forceinline__ void operand(uint32_t (&words)[kM][kN][4], const float (&sums)[kM][kN][4]) {
  unrolled<kM, kN, 4>([&](int m, int n, int i) { words[m][n][i] = __float_as_uint(sums[m][n][i % 2 * 2 + i / 2]); });
}

// Launches a kernel, if the GPU has its instructions and its shared memory.
template <typename S, typename... Parameters, typename... Arguments>
bool launch_on_tensor_cores(Call& call, void (*kernel)(Parameters...), int64_t blocks, const Arguments&... arguments) {
  if (!is_compiled_for(80, kernel) || Gpu().dynamic_bytes() < S::kBytes) return false;
  launch(call, kernel, least(blocks, INT32_MAX), S::kThreads, S::kBytes, arguments...);
  return true;
}

}  // namespace msops::flash_attention

#endif
