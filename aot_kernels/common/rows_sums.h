// for_rows_with_sums() is for_rows() (see rows.h) with sums of columns over all rows, such as the gradient of a weight.
// The body reads a row in `load`, and is called with what that returned:
//
//   static constexpr int kRows = 2;  // how many rows `load` reads
//
//   template <typename Team>
//   MSOPS_BOTH auto load(int64_t row, Team&& team) const {
//     const auto x_row = team.load(x[row]), dy_row = team.load(dy[row]);  // always in this order
//     return loaded(x_row, dy_row);
//   }
//   template <typename Team, typename Held, typename Sums>
//   MSOPS_BOTH void operator()(int64_t row, const Team& team, const Held& held, Sums& sums) const {
//     team.map([](C x, C dy) { return 2 * x * dy; }, dx[row], std::get<0>(held), std::get<1>(held));
//     sums.template add<0>([](C x, C dy) { return x * dy; }, std::get<0>(held), std::get<1>(held));
//   }
//
// A team works on many rows, one after the other, and keeps its sums in registers. On the GPU the next row is already
// on its way to shared memory while the team works on this one. Each team stores its sums once, as a row of scratch,
// which has row_parts(rows, columns) rows:
//
//   const int64_t used = for_rows_with_sums<T, 1>(call, rows, {x, dy, dx}, body, {partial.as<C>()}, partial.dim(0));
//   sum_rows(call, used, columns, columns, partial.as<C>(), dweight.as<T>());
//
// Rows may also take turns in `groups`, where row i belongs to group i % groups. Then each group has sums of its own: a
// row of scratch has those of all groups, one after the other, and there are row_parts(rows / groups, groups * columns)
// such rows.
#pragma once

#ifdef __CUDACC__
#include "gpu/cp_async.h"
#endif
#include "rows.h"
#include "scratch.h"
#include "sum.h"

namespace msops {

// Returns how many rows of scratch for_rows_with_sums needs for each of its sums: as many as fill a large GPU, and take
// no more than 8 MB of float32.
inline int64_t row_parts(int64_t rows, int64_t columns) {
  return std::max<int64_t>(1, std::min<int64_t>(rows, 33 * 65536 / std::max<int64_t>(1, columns)));
}

// Returns what the calls of team.load returned, in a tuple.
template <typename... In>
MSOPS_BOTH std::tuple<In...> loaded(const In&... in) {
  return {in...};
}

// PartialSums is scratch: for each sum, a row for each part of the rows.
template <typename C, int kSums>
struct PartialSums {
  C* data[kSums];
  int64_t columns;

  MSOPS_BOTH Row<C> row(int sum, int64_t part) const { return {data[sum] + part * columns, columns}; }
};

// SumsInMemory adds to rows of scratch. SumsInRegisters keeps what one lane has of each row.
template <typename Team, typename C, int kSums>
struct SumsInMemory {
  const Team& team;
  PartialSums<C, kSums> partial;
  int64_t part;

  MSOPS_BOTH SumsInMemory(const Team& of, const PartialSums<C, kSums>& sums, int64_t number)
      : team(of), partial(sums), part(number) {
    for (int k = 0; k < kSums; ++k) team.map([] { return C(0); }, partial.row(k, part));
  }
  template <int k, typename F, typename... In>
  MSOPS_BOTH void add(const F& f, const In&... in) {
    team.add(partial.row(k, part), f, in...);
  }
};

template <typename Team, int kSums>
struct SumsInRegisters {
  const Team& team;
  typename Team::LaneSums lanes[kSums] = {};

  template <int k, typename F, typename... In>
  MSOPS_BOTH void add(const F& f, const In&... in) {
    team.add(lanes[k], f, in...);
  }
};

template <typename C, int kSums, typename Body>
struct RowsWithSumsOnCpu {
  int64_t rows, parts, groups;  // rows and parts of each group
  Body body;
  PartialSums<C, kSums> partial;

  MSOPS_CPU void operator()(int64_t item) const {
    const Team<C, OnCpu> team(0, nullptr);
    SumsInMemory<Team<C, OnCpu>, C, kSums> sums(team, partial, item);
    const int64_t part = item / groups, group = item % groups, end = part_begin(rows, part + 1, parts);
    for (int64_t i = part_begin(rows, part, parts); i < end; ++i) {
      const int64_t row = i * groups + group;
      body(row, team, body.load(row, team), sums);
    }
  }
};

#ifdef __CUDACC__
// The body's rows pass through shared memory, where each lane has places for its own packs of the next row.

// Begins to copy what team.load reads. An element at the edges goes to a register.
template <typename Team, typename Shape>
struct BeginLoads {
  const Team& team;
  Bytes16* places;  // of this thread, blockDim.x apart
  uint32_t* edge;   // of the row

  template <typename T>
  __device__ int load(Row<T> row) {
    team.each_pack(row, [&](auto i, const T* from) {
      if constexpr (std::is_same<decltype(i), Edge>::value) {
        const auto element = msops::load<1>(from);
        memcpy(edge, &element, sizeof element);
      } else {
        cp_async<16>(places + i * blockDim.x, from);
      }
    });
    places += Shape::kHeld * blockDim.x, ++edge;
    return 0;
  }
};

// Takes what has been copied.
template <typename Team, typename Shape>
struct EndLoads {
  const Team& team;
  const Bytes16* places;
  const uint32_t* edge;

  template <typename T>
  __device__ HeldRow<T, Shape> load(Row<T> row) {
    HeldRow<T, Shape> held;
    held.row = row;
    team.each_pack(row, [&](auto i, const T*) {
      if constexpr (std::is_same<decltype(i), Edge>::value) {
        memcpy(&held.of[i], edge, sizeof(T));
      } else {
        memcpy(&held.of[i], places + i * blockDim.x, 16);
      }
    });
    places += Shape::kHeld * blockDim.x, ++edge;
    return held;
  }
};

// Returns the packs of a block for the rows that it loads.
template <typename Shape, typename Body>
MSOPS_BOTH int places_of(int threads) {
  return Shape::kWidth > 1 ? threads * Shape::kHeld * Body::kRows : 0;
}

// Each block, or cluster, has rows of one group.
template <typename C, typename Shape, int kSums, typename Body, typename Groups>
__global__ void __launch_bounds__(kBlockThreads<Shape>,
                                  Shape::kClustered&& Shape::kWidth > 1
                                      ? (Shape::kKeepsParameters ? 512 : 1024) / kBlockThreads<Shape>
                                      : 1)
    rows_with_sums_kernel(int64_t rows, Body body, PartialSums<C, kSums> partial, Groups groups) {
  constexpr int kLanes = Shape::kLanes, kTeams = kTeamsOfBlock<Shape>;
  __shared__ SharedOfWarp shared[kSharedOfTeam<Shape>];
  if (Shape::kClustered && !has_instructions_of(90)) return;
  const int64_t in_cluster = Shape::kClustered ? cluster_nctarank() : 1;
  const int64_t part = blockIdx.x / in_cluster, step = gridDim.x / in_cluster * kTeams;
  const int of_block = kLanes > 32 ? 0 : static_cast<int>(threadIdx.x) / kLanes;
  Team<C, Shape> team(kLanes > 32 ? threadIdx.x : threadIdx.x % kLanes, shared);
  if constexpr (Shape::kSends) {
    __shared__ SentResults results;
    team.begin_sending(&results);
  }
  int64_t row = (part / groups * kTeams + of_block) * groups + part % groups;
  if constexpr (Shape::kHeld == 0) {
    SumsInMemory<Team<C, Shape>, C, kSums> sums(team, partial, part);
    for (; row < rows; row += step) body(row, team, body.load(row, team), sums);
  } else {
    SumsInRegisters<Team<C, Shape>, kSums> sums{team};
    extern __shared__ Bytes16 places[];
    if constexpr (Shape::kHasEdges) team.set_head(body.head_of(row));
    if constexpr (Shape::kKeepsParameters)  // after the rows
      team.keep_parameters(places + places_of<Shape, Body>(blockDim.x));
    if constexpr (Shape::kWidth > 1) {
      uint32_t edges[Body::kRows];
      const auto begin = [&](int64_t next) {
        if (next < rows) body.load(next, BeginLoads<Team<C, Shape>, Shape>{team, places + threadIdx.x, edges});
        cp_async_commit();
      };
      for (begin(row); row < rows; row += step) {
        cp_async_wait_all();
        const auto held = body.load(row, EndLoads<Team<C, Shape>, Shape>{team, places + threadIdx.x, edges});
        __syncwarp(team.mask());  // before the places are written again
        begin(row + step);
        body(row, team, held, sums);
      }
    } else {
      for (; row < rows; row += step) body(row, team, body.load(row, team), sums);
    }
    if constexpr (kTeams == 1) {
      for (int k = 0; k < kSums; ++k) team.store(partial.row(k, part), sums.lanes[k]);
    } else {  // the block's teams are added up in their order
      C* const of_teams = reinterpret_cast<C*>(places);
      for (int k = 0; k < kSums; ++k) {
        __syncthreads();
        team.store(Row<C>{of_teams + of_block * partial.columns, partial.columns}, sums.lanes[k]);
        __syncthreads();
        for (int64_t j = threadIdx.x; j < partial.columns; j += kBlockThreads<Shape>) {
          C sum = of_teams[j];
          for (int t = 1; t < kTeams; ++t) sum += of_teams[t * partial.columns + j];
          partial.row(k, part).data[j] = sum;
        }
      }
    }
  }
  if constexpr (Shape::kSends) {
    team.end_sending();
  } else {
    if (Shape::kClustered) cluster_arrive_wait();  // before the block ends, whose shared memory others read
  }
}

// Returns the bytes of a block for the rows that it loads, and for the sums of its teams.
template <typename C, typename Shape, typename Body>
int shared_bytes(int threads) {
  const int places = places_of<Shape, Body>(threads) * static_cast<int>(sizeof(Bytes16));
  if (Shape::kKeepsParameters) return places + bytes_of_place<Shape>(threads);
  return std::max(places,
                  Shape::kLanes > 32 ? 0 : threads * Shape::kHeld * Shape::kWidth * static_cast<int>(sizeof(C)));
}

// Launches at most `parts` blocks for each group, or clusters of `in_cluster` blocks: one, or no more than run at once.
// Returns how many for each group, or 0 if there are no such clusters.
template <typename C, typename Shape, int kSums, typename Body, typename Groups>
int64_t launch_rows_with_sums(Call& call, int64_t rows, int64_t packs, const Body& body, int64_t parts, int in_cluster,
                              const PartialSums<C, kSums>& partial, Groups groups) {
  const auto kernel = rows_with_sums_kernel<C, Shape, kSums, Body, Groups>;
  const int64_t wanted = std::max<int64_t>(1, std::min(parts, (rows / groups - 1) / kTeamsOfBlock<Shape> + 1));
  const int threads = block_threads<Shape>(packs, in_cluster);
  const int bytes = shared_bytes<C, Shape, Body>(threads);
  [[maybe_unused]] static FactOfGpu<33 * 33> fact;
  const auto blocks_or_clusters_at_once = [&] {
    if constexpr (Shape::kClustered) {
      const Grid cluster = Grid(in_cluster).in_clusters(in_cluster);
      const bool can = in_cluster <= 16 && is_compiled_for(90, kernel) && (kHasStAsync || !Shape::kSends);
      return can ? clusters_at_once(kernel, cluster, threads, bytes) : 0;
    } else {
      return std::max(1, blocks_at_once(Gpu(), kernel, threads, bytes));
    }
  };
  const int64_t at_once = fact.get(blocks_or_clusters_at_once, threads / 32 * 33 + in_cluster);
  int64_t used = std::min<int64_t>(wanted, at_once < groups ? at_once > 0 : at_once / groups);
  if (Shape::kHasEdges) used = (used < Shape::kWidth ? 1 : used / Shape::kWidth) * Shape::kWidth;  // see packs_match()
  const Grid grid(used * groups * in_cluster);
  launch(call, kernel, Shape::kClustered ? grid.in_clusters(in_cluster) : grid, threads, bytes, rows, body, partial,
         groups);
  return used;
}
#endif

// for_rows_with_sums() has these rungs of packs. With two sums in float16, lanes keep their parameters from 65 packs
// on. Clusters are of 2 to 16 blocks. Rows that do not stay on the chip are read again, and added up in memory.
template <typename T, int kSums, int N, bool kKeeps>
using PacksLadderWithSums =
    Ladder<Rung<8, TeamShape<4, N, 2>>, Rung<16, TeamShape<8, N, 2>>, Rung<32, TeamShape<16, N, 2>>,
           Rung<64, TeamShape<32, N, 2>>, Rung<128, TeamShape<32, N, 4, false, false, kKeeps>>,
           Rung<1024, TeamShape<512, N, 2, false, false, kKeeps>>,
           Rung<sizeof(T) == 2 ? kAny : kNever, SendingShape<256, N, kSums == 1 ? 4 : 2, true>>,
           Rung<sizeof(T) == 2 ? kNever : 16384, TeamShape<512, N, 2, true>>, Rung<kAny, TeamShape<512, N, 4, true>>,
           Rung<kAny, TeamShape<512, N, 0>>>;
// It has these of elements.
using ElementsLadderWithSums =
    Ladder<Rung<32, TeamShape<4, 1, 8>>, Rung<512, TeamShape<32, 1, 16>>, Rung<4096, TeamShape<512, 1, 8>>,
           Rung<kAny, TeamShape<512, 1, 8, true>>, Rung<kAny, TeamShape<512, 1, 0>>>;
// Few kernels compile sooner.
using FewElementsWithSums =
    Ladder<Rung<512, TeamShape<32, 1, 16>>, Rung<4096, TeamShape<512, 1, 8>>, Rung<kAny, TeamShape<512, 1, 0>>>;
template <int N>
using ReadAgain = Ladder<Rung<1024 / N, TeamShape<64, N, 0>>, Rung<kAny, TeamShape<512, N, 0>>>;

// What is rarely called takes few kernels for rows that packs do not tile, or only kernels that read rows again.
enum class Kernels { kAll, kFew, kReadAgain };

// Calls body(row, team, body.load(row, team), sums) for every row in [0, rows), and stores the sums of column j in
// columns j of partial[k], which have `parts` rows; of several groups, which must divide `rows`, in columns
// group * columns + j. Returns how many of these it filled: a number that is the same for equal calls on a machine.
// `places` are as for for_rows(). On the GPU, the ladders above say which team takes how many packs or elements; rows
// of up to 1024 packs with edges are between them.
template <typename T, int kSums, Kernels kKernels = Kernels::kAll, typename Body, typename Groups = Constant<1>>
int64_t for_rows_with_sums(Call& call, int64_t rows, std::initializer_list<RowLayout<T>> places, const Body& body,
                           Compute<T>* const (&partial)[kSums], int64_t parts, Groups groups = {}) {
  using C = Compute<T>;
  const int64_t columns = places.begin()->columns;
  PartialSums<C, kSums> sums{{}, columns};
  std::copy_n(partial, kSums, sums.data);
  if (call.is_on_cpu()) {
    const int64_t of_group = rows / groups, most = (64 + groups - 1) / groups;
    const int64_t used = std::min<int64_t>({parts, std::max<int64_t>(1, of_group), most});
    const RowsWithSumsOnCpu<C, kSums, Body> on_one{of_group, used, groups, body, sums};
    on_cpu(call, used * groups, on_one, 4 * static_cast<double>(columns) * static_cast<double>(of_group / used + 1));
    return used;
  }
#ifdef __CUDACC__
  call.require(kOnGpu<T>, kBadDtype, "there is no GPU code for %s", dtype_name<T>());
  if (!call.ok() || columns == 0) return parts;
  if constexpr (kOnGpu<T>) {
    const auto take = [&](auto ladder, int64_t length) {
      return climb(ladder, length, [&](auto shape) {
        using Shape = decltype(shape);
        constexpr int64_t kOfBlock = int64_t{Shape::kLanes} * Shape::kHeld;
        int in_cluster = 1;
        while (Shape::kClustered && in_cluster < 32 && (in_cluster == 1 || in_cluster * kOfBlock < length))
          in_cluster *= 2;
        return launch_rows_with_sums<C, Shape, kSums>(call, rows, length, body, parts, in_cluster, sums, groups);
      });
    };
    constexpr int N = kMovesPacks<T> ? kPackWidth<T> : 1;
    constexpr bool kKeeps = sizeof(T) == 2 && kSums == 2;
    const bool packs_fit = kMovesPacks<T> && packs_tile<T>(places);
    if constexpr (kKernels == Kernels::kReadAgain) {
      return packs_fit ? take(ReadAgain<N>(), columns / N) : take(ReadAgain<1>(), columns);
    } else {
      if constexpr (kMovesPacks<T>) {
        if (packs_fit) return take(PacksLadderWithSums<T, kSums, N, kKeeps>(), columns / N);
        if constexpr (kKernels == Kernels::kAll)
          if (columns > 512 && columns / N <= 1024 && parts >= N && packs_match<T>(places))
            return launch_rows_with_sums<C, TeamShape<512, N, 2, false, true, true>, kSums>(
                call, rows, columns / N, WithEdges<N, Body>(places, body), parts, 1, sums, groups);
      }
      using Elements = std::conditional_t<kKernels == Kernels::kFew, FewElementsWithSums, ElementsLadderWithSums>;
      return take(Elements(), columns);
    }
  }
#endif
  return parts;
}

}  // namespace msops
