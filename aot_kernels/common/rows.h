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
bool launch_rows_in_blocks(Call& call, int64_t rows, int64_t packs, const Body& body) {
  const int64_t blocks = (rows - 1) / kTeamsOfBlock<Shape> + 1;
  launch(call, rows_kernel<C, Shape, Body>, blocks, block_threads<Shape>(packs), 0, rows, body);
  return true;
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

template <typename C, typename Shape, typename Body>
bool launch_rows(Call& call, int64_t rows, int64_t packs, const Body& body) {
  if constexpr (Shape::kClustered) {
    return launch_rows_in_clusters<C, Shape>(call, rows, packs, body);
  } else {
    return launch_rows_in_blocks<C, Shape>(call, rows, packs, body);
  }
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

// A Ladder lists which team takes rows of up to so many packs or elements: the first rung that fits. Clusters, which
// the GPU may lack, are passed over then. No kernel is compiled for a rung of kNever.
template <int64_t kMost, typename Shape>
struct Rung {};
template <typename... Rungs>
struct Ladder {};
constexpr int64_t kNever = -1, kAny = INT64_MAX;

// Returns the first result of launch(shape) that is not 0.
template <int64_t... kMost, typename... Shapes, typename Launch>
int64_t climb(Ladder<Rung<kMost, Shapes>...>, int64_t length, const Launch& launch) {
  int64_t result = 0;
  const auto try_rung = [&](auto most, auto shape) {
    if constexpr (most == kNever) {
      return false;
    } else {
      return length <= most && (result = launch(shape)) != 0;
    }
  };
  (void)(try_rung(std::integral_constant<int64_t, kMost>(), Shapes()) || ...);
  return result;
}

// for_rows() has these rungs of packs. Up to 64 packs no team needs a barrier. Bodies whose instructions for each row
// take long have 4 packs in a lane. Clusters are of 2 to 8 blocks if kPrefersClusters, and of 2 to 16 for the longest
// rows that stay on the chip; longer ones are read again by each reduction.
template <int N, bool kPrefersClusters, int kPacks, int kLongPacks>
using PacksLadder = Ladder<Rung<8, TeamShape<4, N, 2>>, Rung<16, TeamShape<8, N, 2>>, Rung<32, TeamShape<16, N, 2>>,
                           Rung<64, TeamShape<32, N, 2>>, Rung<kPacks == 4 ? 128 : kNever, TeamShape<32, N, 4>>,
                           Rung<kPacks == 4 ? 512 : kNever, TeamShape<128, N, 4>>,
                           Rung<kPacks == 4 ? kNever : 1024, TeamShape<512, N, 2>>, Rung<2048, TeamShape<512, N, 4>>,
                           Rung<kPacks == 4 ? 4096 : kNever, TeamShape<4096 / kLongPacks, N, kLongPacks>>,
                           Rung<kPrefersClusters ? 8192 : kNever, SendingShape<256, N, 4>>,
                           Rung<kPacks == 4 ? kNever : 4096, TeamShape<512, N, 8>>, Rung<8192, TeamShape<1024, N, 8>>,
                           Rung<kAny, TeamShape<512, N, 8, true>>, Rung<kAny, TeamShape<512, N, 0>>>;
// It has these of elements.
using ElementsLadder = Ladder<Rung<32, TeamShape<4, 1, 8>>, Rung<512, TeamShape<32, 1, 16>>,
                              Rung<8192, TeamShape<512, 1, 16>>, Rung<32768, TeamShape<1024, 1, 32>>,
                              Rung<kAny, TeamShape<512, 1, 16, true>>, Rung<kAny, TeamShape<512, 1, 0>>>;
// Few kernels compile sooner.
template <int N>
using FewPacksLadder =
    Ladder<Rung<8, TeamShape<4, N, 2>>, Rung<16, TeamShape<8, N, 2>>, Rung<32, TeamShape<16, N, 2>>,
           Rung<64, TeamShape<32, N, 2>>, Rung<2048, TeamShape<512, N, 4>>, Rung<kAny, TeamShape<512, N, 0>>>;
using FewElementsLadder =
    Ladder<Rung<512, TeamShape<32, 1, 16>>, Rung<8192, TeamShape<512, 1, 16>>, Rung<kAny, TeamShape<512, 1, 0>>>;

// Takes rows by a ladder of packs or, where those do not tile them, of elements; rows between these, with kEdgePacks
// packs in a lane, by aligned packs and the edges around them, unless that is 0.
template <typename T, typename Packs, typename Elements, int kEdgePacks, typename Body>
void for_rows_by(Call& call, int64_t rows, std::initializer_list<RowLayout<T>> places, const Body& body) {
  const int64_t columns = places.begin()->columns;
  if (call.is_on_cpu()) return on_cpu(call, rows, RowOnCpu<Compute<T>, Body>{body}, 1.5 * static_cast<double>(columns));
#ifdef __CUDACC__
  call.require(kOnGpu<T>, kBadDtype, "there is no GPU code for %s", dtype_name<T>());
  if (!call.ok() || rows == 0) return;
  if constexpr (kOnGpu<T>) {
    const auto take = [&](auto ladder, int64_t length) {
      climb(ladder, length,
            [&](auto shape) { return launch_rows<Compute<T>, decltype(shape)>(call, rows, length, body); });
    };
    if constexpr (kMovesPacks<T>) {
      if (packs_tile<T>(places)) return take(Packs(), columns / kPackWidth<T>);
      if constexpr (kEdgePacks > 0)
        if (columns > 512 && columns / kPackWidth<T> <= 1024 && packs_match<T>(places))
          return launch_rows_with_edges<T, kEdgePacks>(call, rows, places, body);
    }
    take(Elements(), columns);
  }
#endif
}

// Takes rows as for_rows() does, with few kernels.
template <typename T, typename Body>
void for_rows_of_few_kernels(Call& call, int64_t rows, std::initializer_list<RowLayout<T>> places, const Body& body) {
  for_rows_by<T, FewPacksLadder<kPackWidth<T>>, FewElementsLadder, 0>(call, rows, places, body);
}

// Calls body(row, team) for every row in [0, rows). `places` are all the matrices and rows that the team reads and
// writes, of equal length. On the GPU packs of 16 bytes move them where such packs tile all of them, or where all rows
// of one number have their aligned packs at the same columns (see WithEdges); otherwise neighbouring lanes move
// neighbouring elements. The ladders above say which team takes how many packs or elements: few kernels serve float64,
// and what is rarely called. Bodies that would need many registers for long rows prefer clusters: those that load two
// rows, and norms. Bodies whose instructions for each row take long beside those for its elements have four packs in a
// lane, and kLongPacks in long rows: as many as registers allow.
template <typename T, bool kPrefersClusters = false, int kPacks = 2, int kLongPacks = 8, typename Body>
void for_rows(Call& call, int64_t rows, std::initializer_list<RowLayout<T>> places, const Body& body) {
  if constexpr (sizeof(T) == 8) {
    for_rows_of_few_kernels<T>(call, rows, places, body);
  } else {
    for_rows_by<T, PacksLadder<kPackWidth<T>, kPrefersClusters, kPacks, kLongPacks>, ElementsLadder, kPacks>(
        call, rows, places, body);
  }
}

}  // namespace msops
