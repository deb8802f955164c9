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
// This is the body of for_rows<T>(call, number_of_rows, {x, y}, body), which takes all matrices and rows that the body
// hands to the team. A Tensor's rows run along its last axis.
//
// team.load reads a row once, and keeps it in the team's registers if it fits there. Reductions and maps take its
// result in place of the row. Functions of elements may take the column, an int64_t, before the elements:
// team.map([&](int64_t j, C v) { ... }, ...).
//
// A team is the threads that share a row: one thread on the CPU; on the GPU 4 to 32 threads of a warp, a block, or the
// blocks of a cluster. All of them get the results of the team's reductions, which are made in a fixed order. Every row
// must make the same reductions, since the teams of a warp make them together: choose what depends on values by `?:`,
// not by `if`.
#pragma once

#include "statistics.h"
#include "team.h"

namespace msops {

// Rows is a matrix without gaps between its rows. T is const where it is only read.
template <typename T>
struct Rows {
  T* data;
  int64_t columns;

  Rows(T* first, int64_t length) : data(first), columns(length) {}
  Rows(const Tensor& tensor) : data(tensor.as<T>()), columns(tensor.dim(-1)) {}  // along its last axis
  MSOPS_BOTH Row<T> operator[](int64_t row) const { return {data + row * columns, columns}; }
};

template <typename C, typename Body>
struct RowOnCpu {
  Body body;

  MSOPS_CPU void operator()(int64_t row) const { body(row, Team<C, OnCpu>(0, nullptr)); }
};

#ifdef __CUDACC__
struct alignas(16) Bytes16 {
  unsigned char bytes[16];
};

// Teams up to a warp share a block of kThreads; larger ones are a block, of this many threads at most.
template <typename Shape>
constexpr int kBlockThreads = Shape::kLanes > 32 ? Shape::kLanes : kThreads;
template <typename Shape>
constexpr int kTeamsOfBlock = kBlockThreads<Shape> / Shape::kLanes;

// Returns how many threads a block needs, of which `blocks` share a row of so many packs.
template <typename Shape>
int block_threads(int64_t packs, int blocks = 1) {
  if constexpr (Shape::kLanes <= 32 || Shape::kHeld == 0) {
    return kBlockThreads<Shape>;
  } else {
    const int64_t of_warp = 32 * Shape::kHeld * blocks;
    return static_cast<int>((packs + of_warp - 1) / of_warp * 32);
  }
}

template <typename C, typename Shape, typename Body>
__global__ void __launch_bounds__(kBlockThreads<Shape>,
                                  Shape::kWidth > 1 && Shape::kLanes > 32 ? 1024 / Shape::kLanes : 1)
    rows_kernel(int64_t rows, Body body) {
  constexpr int kLanes = Shape::kLanes;
  __shared__ SharedOfWarp shared[kSharedOfTeam<Shape>];
  if (Shape::kClustered && !has_instructions_of(90)) return;
  const int64_t block = blockIdx.x / (Shape::kClustered ? cluster_nctarank() : 1);
  const int64_t row = kLanes > 32 ? block : block * kTeamsOfBlock<Shape> + threadIdx.x / kLanes;
  if constexpr (Shape::kSends) {
    __shared__ SentResults results;
    Team<C, Shape> team(threadIdx.x, shared);
    team.begin_sending(&results);
    body(row, team);
    return team.end_sending();
  }
  if (row < rows) body(row, Team<C, Shape>(kLanes > 32 ? threadIdx.x : threadIdx.x % kLanes, shared));
  if (Shape::kClustered) cluster_arrive_wait();  // before the block ends, whose shared memory others read
}

template <typename C, typename Shape, typename Body>
void launch_rows(Call& call, int64_t rows, int64_t packs, const Body& body) {
  const int64_t blocks = (rows - 1) / kTeamsOfBlock<Shape> + 1;
  launch(call, rows_kernel<C, Shape, Body>, blocks, block_threads<Shape>(packs), 0, rows, body);
}

// Launches a cluster for each row, of the fewest blocks that can keep `packs` packs. Returns false, and does nothing,
// if there are no such clusters.
template <typename C, typename Shape, typename Body>
bool launch_rows_in_clusters(Call& call, int64_t rows, int64_t packs, const Body& body) {
  const auto kernel = rows_kernel<C, Shape, Body>;
  [[maybe_unused]] static FactOfGpu<> fact;
  const int most = fact.get([&] {
    if (!is_compiled_for(90, kernel) || (Shape::kSends && !kHasStAsync)) return 0;
    for (const int blocks : {16, 8})
      if (clusters_at_once(kernel, Grid(blocks).in_clusters(blocks), kBlockThreads<Shape>, 0) > 0) return blocks;
    return 0;
  });
  int blocks = 2;
  while (int64_t{blocks} * Shape::kLanes * Shape::kHeld < packs && blocks <= most) blocks *= 2;
  const Grid grid = Grid(rows * blocks).in_clusters(blocks);
  if (blocks > most || !grid.fits_launch()) return false;
  launch(call, kernel, grid, block_threads<Shape>(packs, blocks), 0, rows, body);
  return true;
}
#endif

// RowLayout tells how long rows are, whether packs of 16 bytes of T tile them, and how many elements the first row has
// before its first aligned pack: -1 for parameters, which may have any number.
template <typename T>
struct RowLayout {
  int64_t columns;
  bool packs_tile;
  int head;

  template <typename U>
  RowLayout(const Rows<U>& rows) : RowLayout(rows[0]) {}
  template <typename U>
  RowLayout(const Row<U>& row)
      : columns(row.length),
        packs_tile(row.length % kPackWidth<T> == 0 && is_aligned<kPackWidth<T>>(row.data)),
        head(static_cast<int>(elements_to_pack<kPackWidth<T>>(row.data))) {}
  template <int place>
  RowLayout(const Parameters<T, place>& parameters)
      : RowLayout(parameters.is_float ? RowLayout(parameters.row_of_float()) : RowLayout(parameters.row())) {
    head = -1;
  }
  RowLayout(const Tensor& tensor) : RowLayout(Rows<const T>(tensor)) {}
};

// Elements of float64 move one by one: this takes no longer, and needs half as many kernels.
template <typename T>
constexpr bool kMovesPacks = sizeof(T) < 8;

template <typename T>
bool packs_tile(std::initializer_list<RowLayout<T>> places) {
  return std::all_of(places.begin(), places.end(), [](const RowLayout<T>& place) { return place.packs_tile; });
}

// Returns whether the rows of one number have their aligned packs at the same columns.
template <typename T>
bool packs_match(std::initializer_list<RowLayout<T>> places) {
  const int head = places.begin()->head;
  return std::all_of(places.begin(), places.end(),
                     [=](const RowLayout<T>& place) { return place.head < 0 || place.head == head; });
}

#ifdef __CUDACC__
// WithEdges is a body for rows that packs do not tile. Every N rows begin at the same distance from an aligned pack.
template <int N, typename Body>
struct WithEdges : Body {
  unsigned head, columns;  // of the first row

  template <typename T>
  WithEdges(std::initializer_list<RowLayout<T>> places, const Body& body)
      : Body(body), head(places.begin()->head), columns(static_cast<unsigned>(places.begin()->columns)) {}
  __device__ int head_of(int64_t row) const { return (head - static_cast<unsigned>(row) * columns) % N; }
};

template <typename C, typename Shape, typename Body>
__global__ void __launch_bounds__(Shape::kLanes, (Shape::kHeld > 2 ? 768 : 1024) / Shape::kLanes)
    rows_with_edges_kernel(int64_t rows, Body body) {
  __shared__ SharedOfWarp shared[kSharedOfTeam<Shape>];
  extern __shared__ Bytes16 places[];
  Team<C, Shape> team(threadIdx.x, shared);
  team.set_head(body.head_of(blockIdx.x));
  team.keep_parameters(places);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    team.set_next(row + gridDim.x < rows ? int64_t{gridDim.x} * body.columns : 0);
    body(row, team);
  }
}

// Launches as many blocks as run at once, which go over all rows, so that each reads its parameters once.
template <typename T, int kPacks, typename Body>
void launch_rows_with_edges(Call& call, int64_t rows, std::initializer_list<RowLayout<T>> places, const Body& body) {
  constexpr int N = kPackWidth<T>;
  using Shape = TeamShape<1024 / kPacks, N, kPacks, false, true, true>;
  using Edged = WithEdges<N, Body>;
  const auto kernel = rows_with_edges_kernel<Compute<T>, Shape, Edged>;
  const int threads = block_threads<Shape>(places.begin()->columns / N);
  const auto of_parameters = std::count_if(places.begin(), places.end(), [](const auto& p) { return p.head < 0; });
  const int bytes = static_cast<int>(of_parameters) * bytes_of_place<Shape>(threads);
  [[maybe_unused]] static FactOfGpu<17> fact;
  const int64_t at_once = fact.get([&] { return blocks_at_once(Gpu(), kernel, threads, bytes); }, threads / 32);
  const int64_t blocks = std::max<int64_t>(1, at_once / N) * N;  // so that a block's rows have the same head
  launch(call, kernel, std::min(rows, blocks), threads, bytes, rows, Edged(places, body));
}
#endif

template <typename T, typename Body>
void for_rows_on_cpu(Call& call, int64_t rows, std::initializer_list<RowLayout<T>> places, const Body& body) {
  on_cpu(call, rows, RowOnCpu<Compute<T>, Body>{body}, 1.5 * static_cast<double>(places.begin()->columns));
}

// Calls body(row, team) for every row in [0, rows). `places` are all the matrices and rows that the team reads and
// writes, of equal length. On the GPU packs of 16 bytes move them where such packs tile all of them, or where all rows
// of one number have their aligned packs at the same columns (see WithEdges); otherwise neighbouring lanes move
// neighbouring elements. Bodies that would need many registers for long rows prefer clusters: those that load two rows,
// and norms. Bodies whose instructions for each row take long beside those for its elements have four packs in a lane,
// and kLongPacks in long rows: as many as registers allow.
//
// On the GPU the team depends on how many packs or elements a row has:
//
//   packs                     elements        team                             why
//   up to 8                   up to 32        4 lanes, 2 packs each            64 rows in a block
//   up to 16                                  8 lanes, 2 packs each
//   up to 32                                  16 lanes, 2 packs each
//   up to 64                  up to 512       a warp, 2 packs each             no barrier
//   up to 128                                 a warp, 4 packs each             if kPacks is 4
//   up to 512                                 up to 128 threads, 4 packs each  if kPacks is 4
//   up to 1024                                up to 512 threads, 2 packs each  if kPacks is 2
//   up to 1024, and edges                     up to 512 threads, kPacks each   lanes keep their parameters
//   up to 2048                                up to 512 threads, 4 packs each
//   up to 4096                                kLongPacks packs in a lane       if kPacks is 4
//   up to 8192, from sm_90                    2 to 8 blocks of 256 threads     if kPrefersClusters
//   up to 4096                up to 8192      up to 512 threads, 8 packs each
//   up to 8192                up to 32768     up to 1024 threads, 8 packs each
//   up to 65536, from sm_90   up to 131072    2 to 16 blocks of 512 threads    the row stays on the chip
//   more                      more            512 threads                      each reduction reads the row again
template <typename T, bool kPrefersClusters = false, int kPacks = 2, int kLongPacks = 8, typename Body>
void for_rows(Call& call, int64_t rows, std::initializer_list<RowLayout<T>> places, const Body& body) {
  if (call.is_on_cpu()) return for_rows_on_cpu<T>(call, rows, places, body);
#ifdef __CUDACC__
  call.require(kOnGpu<T>, kBadDtype, "there is no GPU code for %s", dtype_name<T>());
  if (!call.ok() || rows == 0) return;
  if constexpr (kOnGpu<T>) {
    using C = Compute<T>;
    const int64_t columns = places.begin()->columns;
    if constexpr (kMovesPacks<T>) {
      if (packs_tile<T>(places)) {
        constexpr int N = kPackWidth<T>;
        const int64_t packs = columns / N;
        if (packs <= 8) return launch_rows<C, TeamShape<4, N, 2>>(call, rows, packs, body);
        if (packs <= 16) return launch_rows<C, TeamShape<8, N, 2>>(call, rows, packs, body);
        if (packs <= 32) return launch_rows<C, TeamShape<16, N, 2>>(call, rows, packs, body);
        if (packs <= 64) return launch_rows<C, TeamShape<32, N, 2>>(call, rows, packs, body);
        if constexpr (kPacks == 4) {
          if (packs <= 128) return launch_rows<C, TeamShape<32, N, 4>>(call, rows, packs, body);
          if (packs <= 512) return launch_rows<C, TeamShape<128, N, 4>>(call, rows, packs, body);
        } else {
          if (packs <= 1024) return launch_rows<C, TeamShape<512, N, 2>>(call, rows, packs, body);
        }
        if (packs <= 2048) return launch_rows<C, TeamShape<512, N, 4>>(call, rows, packs, body);
        if constexpr (kPacks == 4)
          if (packs <= 4096)
            return launch_rows<C, TeamShape<4096 / kLongPacks, N, kLongPacks>>(call, rows, packs, body);
        if constexpr (kPrefersClusters)
          if (packs <= 8192 && launch_rows_in_clusters<C, SendingShape<256, N, 4>>(call, rows, packs, body)) return;
        if constexpr (kPacks != 4)
          if (packs <= 4096) return launch_rows<C, TeamShape<512, N, 8>>(call, rows, packs, body);
        if (packs <= 8192) return launch_rows<C, TeamShape<1024, N, 8>>(call, rows, packs, body);
        if (launch_rows_in_clusters<C, TeamShape<512, N, 8, true>>(call, rows, packs, body)) return;
        return launch_rows<C, TeamShape<512, N, 0>>(call, rows, packs, body);
      }
    }
    if (columns <= 32) return launch_rows<C, TeamShape<4, 1, 8>>(call, rows, columns, body);
    if (columns <= 512) return launch_rows<C, TeamShape<32, 1, 16>>(call, rows, columns, body);
    if constexpr (kMovesPacks<T>)
      if (columns / kPackWidth<T> <= 1024 && packs_match<T>(places))
        return launch_rows_with_edges<T, kPacks>(call, rows, places, body);
    if (columns <= 8192) return launch_rows<C, TeamShape<512, 1, 16>>(call, rows, columns, body);
    if (columns <= 32768) return launch_rows<C, TeamShape<1024, 1, 32>>(call, rows, columns, body);
    if (launch_rows_in_clusters<C, TeamShape<512, 1, 16, true>>(call, rows, columns, body)) return;
    launch_rows<C, TeamShape<512, 1, 0>>(call, rows, columns, body);
  }
#endif
}

// Does the same with few kernels, which compile sooner, and read rows of more than 2048 packs again for each reduction:
// for what is rarely called.
template <typename T, typename Body>
void for_rows_of_few_kernels(Call& call, int64_t rows, std::initializer_list<RowLayout<T>> places, const Body& body) {
  if (call.is_on_cpu()) return for_rows_on_cpu<T>(call, rows, places, body);
#ifdef __CUDACC__
  call.require(kOnGpu<T>, kBadDtype, "there is no GPU code for %s", dtype_name<T>());
  if (!call.ok() || rows == 0) return;
  if constexpr (kOnGpu<T>) {
    using C = Compute<T>;
    const int64_t columns = places.begin()->columns;
    if constexpr (kMovesPacks<T>) {
      if (packs_tile<T>(places)) {
        constexpr int N = kPackWidth<T>;
        const int64_t packs = columns / N;
        if (packs <= 16) return launch_rows<C, TeamShape<8, N, 2>>(call, rows, packs, body);
        if (packs <= 64) return launch_rows<C, TeamShape<32, N, 2>>(call, rows, packs, body);
        if (packs <= 2048) return launch_rows<C, TeamShape<512, N, 4>>(call, rows, packs, body);
        return launch_rows<C, TeamShape<512, N, 0>>(call, rows, packs, body);
      }
    }
    if (columns <= 512) return launch_rows<C, TeamShape<32, 1, 16>>(call, rows, columns, body);
    if (columns <= 8192) return launch_rows<C, TeamShape<512, 1, 16>>(call, rows, columns, body);
    launch_rows<C, TeamShape<512, 1, 0>>(call, rows, columns, body);
  }
#endif
}

}  // namespace msops
