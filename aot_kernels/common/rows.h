// for_rows() reduces and maps the rows of matrices; its body is written once for both devices. An example is the
// softmax of each row, y = e^x / sum e^x, where x is `Rows<const T>` and y is `Rows<T>`:
//
//   template <typename Team>
//   MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
//     const auto x_row = team.load(x[row]);
//     const C most = team.max(x_row);
//     const C sum = team.sum([&](C v) { return exp(v - most); }, x_row);
//     team.map([&](C v) { return exp(v - most) / sum; }, y[row], x_row);
//   }
//
// This is the body of for_rows<T>(call, number_of_rows, {x, y}, body). A Tensor's rows run along its last axis.
//
// team.load reads a row once, and keeps it in the team's registers if it fits there. Reductions and maps take its
// result in place of the row. Functions of elements may take the column, an int64_t, before the elements:
// team.map([&](int64_t j, C v) { ... }, ...).
//
// A team is the threads that share a row: one thread on the CPU; on the GPU 4 or 32 threads of a warp, a block, or the
// blocks of a cluster. All of them get the results of the team's reductions, which are made in a fixed order. Every row
// must make the same reductions, since the teams of a warp make them together: choose what depends on values by `?:`,
// not by `if`.
#pragma once

#include "statistics.h"
#include "team.h"
#ifdef __CUDACC__
#include "gpu/occupancy.h"
#endif

namespace msops {

// Rows is a matrix without gaps between its rows. T is const where it is only read.
template <typename T>
struct Rows {
  T* data;
  int64_t columns;

  Rows(const Tensor& tensor) : data(tensor.as<T>()), columns(tensor.dim(-1)) {}  // along its last axis
  MSOPS_BOTH Row<T> operator[](int64_t row) const { return {data + row * columns, columns}; }
};

template <typename C, typename Body>
struct RowOnCpu {
  Body body;

  MSOPS_CPU void operator()(int64_t row) const { body(row, Team<C, OnCpu>(0, 0, nullptr)); }
};

#ifdef __CUDACC__
// Teams up to a warp share a block of kThreads; larger ones are a block.
template <typename Shape>
constexpr int kBlockThreads = Shape::kLanes > 32 ? Shape::kLanes : kThreads;

// `first` is the place of the first row's first element in a pack.
template <typename C, typename Shape, typename Body>
__global__ void __launch_bounds__(kBlockThreads<Shape>)
    rows_kernel(int64_t rows, unsigned first, int64_t columns, Body body) {
  constexpr int kLanes = Shape::kLanes, kTeams = kBlockThreads<Shape> / kLanes;
  __shared__ SharedOfWarp shared[kBlockThreads<Shape> / 32 + 1];
  if (Shape::kClustered && !has_instructions_of(90)) return;
  const int64_t block = blockIdx.x / (Shape::kClustered ? cluster_nctarank() : 1);
  const int64_t row = block * kTeams + threadIdx.x / kLanes;
  if (row >= rows) return;
  const unsigned shift = (first + static_cast<unsigned>(row) * static_cast<unsigned>(columns)) % Shape::kWidth;
  body(row, Team<C, Shape>(threadIdx.x % kLanes, static_cast<int>(shift), shared));
}

template <typename C, typename Shape, typename Body>
void launch_rows(Call& call, int64_t rows, unsigned first, int64_t columns, const Body& body) {
  constexpr int kTeams = kBlockThreads<Shape> / Shape::kLanes;
  const int64_t blocks = (rows - 1) / kTeams + 1;
  call.require(blocks <= INT32_MAX, kBadShape, "too many rows for one launch");
  if (!call.ok()) return;
  rows_kernel<C, Shape>
      <<<static_cast<unsigned>(blocks), kBlockThreads<Shape>, 0, call.stream()>>>(rows, first, columns, body);
  call.check_launch();
}

// Launches a cluster for each row, of the fewest blocks that can keep `packs` packs. Returns false, and does nothing,
// if there are no such clusters.
template <typename C, typename Shape, typename Body>
bool launch_rows_in_clusters([[maybe_unused]] Call& call, [[maybe_unused]] int64_t rows,
                             [[maybe_unused]] unsigned first, [[maybe_unused]] int64_t columns,
                             [[maybe_unused]] int64_t packs, [[maybe_unused]] const Body& body) {
#if CUDART_VERSION >= 12000
  const auto kernel = rows_kernel<C, Shape, Body>;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(kBlockThreads<Shape>);
  config.stream = call.stream();
  config.attrs = &attribute;
  config.numAttrs = 1;
  const auto set_blocks = [&](unsigned blocks, int64_t clusters) {
    attribute.val.clusterDim = {blocks, 1, 1};
    config.gridDim = dim3(static_cast<unsigned>(clusters * blocks));
  };
  static const unsigned most = [&]() -> unsigned {
    if (!is_compiled_for(90, kernel)) return 0;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    for (const unsigned blocks : {16u, 8u})
      if (set_blocks(blocks, 1), clusters_at_once(kernel, config) > 0) return blocks;
    return 0;
  }();
  unsigned blocks = 2;
  while (int64_t{blocks} * Shape::kLanes * Shape::kHeld < packs && blocks <= most) blocks *= 2;
  if (blocks > most || rows * blocks > INT32_MAX) return false;
  set_blocks(blocks, rows);
  cudaLaunchKernelEx(&config, kernel, rows, first, columns, body);
  call.check_launch();
  return true;
#else
  return false;
#endif
}
#endif

// Calls body(row, team) for every row in [0, rows). The team reads and writes rows of `matrices`, which have equal
// length. Rows may begin anywhere in memory; packs of 16 bytes move the matrices that are aligned as the first one is.
//
// On the GPU the team depends on how many packs a row has:
//
//   packs                    team                       why
//   up to 8                  4 lanes, 2 packs each      64 rows in a block
//   up to 64                 a warp, 2 packs each       no barrier
//   up to 256, many rows     a warp, 8 packs each       no barrier, and enough warps to fill a GPU
//   up to 2048               256 threads, 8 packs each
//   up to 65536, from sm_90  2 to 16 blocks, 8 packs    a row of 2^18 float32 stays on the chip
//   more                     512 threads                each reduction reads the row again
template <typename T, typename Body>
void for_rows(Call& call, int64_t rows, std::initializer_list<Rows<const T>> matrices, const Body& body) {
  const int64_t columns = matrices.begin()->columns;
  if (call.on_cpu()) return on_cpu(call, rows, RowOnCpu<Compute<T>, Body>{body}, 4 * static_cast<double>(columns));
#ifdef __CUDACC__
  call.require(kOnGpu<T>, kBadDtype, "there is no GPU code for %s", dtype_name<T>());
  if (!call.ok() || rows == 0) return;
  if constexpr (kOnGpu<T>) {
    using C = Compute<T>;
    constexpr int N = kPackWidth<T>;
    const unsigned first = reinterpret_cast<uintptr_t>(matrices.begin()->data) / sizeof(T) % N;
    const bool is_aligned = first == 0 && columns % N == 0;
    const int64_t packs = is_aligned ? columns / N : (columns + 2 * N - 2) / N;
    if (packs <= 8) return launch_rows<C, TeamShape<4, N, 2>>(call, rows, first, columns, body);
    if (packs <= 64) return launch_rows<C, TeamShape<32, N, 2>>(call, rows, first, columns, body);
    if (packs <= 256 && rows >= 8192) return launch_rows<C, TeamShape<32, N, 8>>(call, rows, first, columns, body);
    if (packs <= 2048) return launch_rows<C, TeamShape<256, N, 8>>(call, rows, first, columns, body);
    if (launch_rows_in_clusters<C, TeamShape<512, N, 8, true>>(call, rows, first, columns, packs, body)) return;
    launch_rows<C, TeamShape<512, N, 0>>(call, rows, first, columns, body);
  }
#endif
}

}  // namespace msops
