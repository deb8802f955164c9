// Columns are the sets of elements along an axis that is not the last one: neighbours of a column are `inner` elements
// apart, and neighbouring columns are neighbours in memory. for_columns() reduces and maps them by a Program, which
// for_rows() may also follow:
//
//   template <typename C>
//   struct Program {
//     static constexpr int kInputs, kOutputs, kPhases;
//     static constexpr bool kScales;  // whether the only output is the last phase's term, times what that phase found
//     // Each phase reduces one number of each element, and may use what the phases before it found.
//     template <int phase> static C identity();
//     template <int phase> static C of(const C (&in)[kInputs], const C (&found)[kPhases]);
//     template <int phase> static C combine(C a, C b);
//     template <int phase> static C finish(C combined);  // what the phase found
//     static void map(const C (&in)[kInputs], const C (&found)[kPhases], C (&out)[kOutputs]);
//   };
#pragma once

#include "../common/pack.h"
#include "../common/parallel.h"

namespace msops::softmax {

struct ColumnSizes {
  int64_t outer, length, inner;  // inner > 0

  int64_t columns() const { return outer * inner; }
};

template <typename Program, typename T>
struct Columns {
  ColumnSizes s;
  const T* in[Program::kInputs];
  T* out[Program::kOutputs];
};

// Calls f(Constant<phase>{}) for each phase.
template <typename Program, int phase = 0, typename F>
MSOPS_BOTH void for_phases(const F& f) {
  if constexpr (phase < Program::kPhases) {
    f(Constant<phase>{});
    for_phases<Program, phase + 1>(f);
  }
}

// On the CPU, item i is a run of columns, whose elements are computed together:
//
//   columns                      run
//   many neighbours              neighbouring columns
//   few neighbours               all of them, with rows of several steps joined; equal columns are combined at the end
//   ... of together few numbers  the same column of many sets
template <typename Program, typename T>
class ColumnsOnCpu {
 public:
  using C = Compute<T>;

  explicit ColumnsOnCpu(const Columns<Program, T>& all) : all_(all) {
    const int64_t of_set = all.s.length * all.s.inner;
    is_short_ = of_set <= kShort && all.s.outer >= kJoined / 4;
    is_narrow_ = !is_short_ && all.s.inner <= kJoined / 2;
    joined_ = std::max<int64_t>(1, std::clamp<int64_t>(of_set / 8, kJoined / 2, kJoined) / all.s.inner) * all.s.inner;
  }
  int64_t items() const { return is_short_ ? runs(all_.s.outer) * all_.s.inner : all_.s.outer * runs_of_set(); }

  MSOPS_CPU void operator()(int64_t i) const {
    const int64_t inner = all_.s.inner, of_set = all_.s.length * inner;
    if (is_short_) {
      const int64_t set = i / inner * kRun, begin = set * of_set + i % inner;
      return follow<true>({begin, begin + of_set, inner, std::min(kRun, all_.s.outer - set), of_set});
    }
    const int64_t set = i / runs_of_set() * of_set, first = i % runs_of_set() * kRun;
    const int64_t width = is_narrow_ ? std::min(joined_, of_set) : std::min(kRun, inner - first);
    follow<false>({set + first, set + of_set, is_narrow_ ? joined_ : inner, width, 1});
  }

 private:
  static constexpr int64_t kRun = 128, kJoined = 64;  // elements of a row at most; those of joined rows
  static constexpr int64_t kShortSum = 256;           // rows of a sum; with more, it would lose digits
  // A set of at most so many numbers is read a column at a time. Out of cold caches that is slow, but the time of
  // exponentials hides it.
  static constexpr int64_t kShort = Program::kScales ? 2 * kJoined - 1 : kJoined / 2;
  // Terms of the last phase wait in the output for their scale, where they are not rounded.
  static constexpr bool kStores = Program::kScales && std::is_same<T, C>::value;
  using Results = C[Program::kPhases][kRun];

  // Rows of `width` elements, which are `stride` apart, begin at begin, begin + step, ...
  struct Run {
    int64_t begin, end, step, width, stride;
  };

  static int64_t runs(int64_t columns) { return (columns + kRun - 1) / kRun; }
  int64_t runs_of_set() const { return is_narrow_ ? 1 : runs(all_.s.inner); }

  // The last row may be shorter, where rows are joined.
  template <bool kStrided>
  static MSOPS_CPU int64_t count(const Run& run, int64_t at) {
    return kStrided ? run.width : std::min(run.width, run.end - at);
  }

  template <bool kStrided>
  MSOPS_CPU void follow(const Run& run) const {
    Results found;
    for_phases<Program>([&](auto phase) { reduce<kStrided, phase>(run, found); });
    for (int64_t at = run.begin; at < run.end; at += run.step) map<kStrided>(run, at, found);
  }

  template <bool kStrided, int phase>
  MSOPS_CPU void reduce(const Run& run, Results& found) const {
    C total[kRun], part[kRun];
    for (int64_t j = 0; j < run.width; ++j) total[j] = Program::template identity<phase>();
    for (int64_t at = run.begin; at < run.end;) {
      for (int64_t j = 0; j < run.width; ++j) part[j] = Program::template identity<phase>();
      for (int64_t rows = 0; rows < kShortSum && at < run.end; ++rows, at += run.step)
        add<kStrided, phase>(run, at, found, part);
      for (int64_t j = 0; j < run.width; ++j) total[j] = Program::template combine<phase>(total[j], part[j]);
    }
    const int64_t columns = !kStrided && is_narrow_ ? all_.s.inner : run.width;
    for (int64_t rows = run.width / columns; rows > 1; rows -= rows / 2) {
      const int64_t half = rows / 2 * columns, rest = (rows - rows / 2) * columns;
#pragma omp simd
      for (int64_t j = 0; j < half; ++j) total[j] = Program::template combine<phase>(total[j], total[rest + j]);
    }
    for (int64_t j = 0; j < columns; ++j) found[phase][j] = Program::template finish<phase>(total[j]);
    for (int64_t done = columns; done < run.width; done *= 2) {
      const int64_t more = std::min(done, run.width - done);
#pragma omp simd
      for (int64_t j = 0; j < more; ++j) found[phase][done + j] = found[phase][j];
    }
  }

  template <bool kStrided, int phase>
  MSOPS_CPU void add(const Run& run, int64_t at, const Results& found, C (&part)[kRun]) const {
    const int64_t stride = kStrided ? run.stride : 1, n = count<kStrided>(run, at);
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      C in[Program::kInputs], of_column[Program::kPhases];
      read(at + j * stride, j, found, in, of_column);
      const C term = Program::template of<phase>(in, of_column);
      if (kStores && phase == Program::kPhases - 1) assign(all_.out[0][at + j * stride], term);
      part[j] = Program::template combine<phase>(part[j], term);
    }
  }

  template <bool kStrided>
  MSOPS_CPU void map(const Run& run, int64_t at, const Results& found) const {
    const int64_t stride = kStrided ? run.stride : 1, n = count<kStrided>(run, at);
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      C in[Program::kInputs], of_column[Program::kPhases], out[Program::kOutputs];
      read(at + j * stride, j, found, in, of_column);
      if constexpr (kStores) {
        out[0] = C(all_.out[0][at + j * stride]) * of_column[Program::kPhases - 1];
      } else {
        Program::map(in, of_column, out);
      }
      MSOPS_UNROLL
      for (int o = 0; o < Program::kOutputs; ++o) assign(all_.out[o][at + j * stride], out[o]);
    }
  }

  MSOPS_CPU void read(int64_t at, int64_t j, const Results& found, C (&in)[Program::kInputs],
                      C (&of_column)[Program::kPhases]) const {
    MSOPS_UNROLL
    for (int a = 0; a < Program::kInputs; ++a) in[a] = C(all_.in[a][at]);
    MSOPS_UNROLL
    for (int p = 0; p < Program::kPhases; ++p) of_column[p] = found[p][j];
  }

  Columns<Program, T> all_;
  bool is_short_, is_narrow_;
  int64_t joined_;  // elements of a joined row
};

#ifdef __CUDACC__
constexpr int kColumnThreads = 1024;  // of a block at most, so that a thread has 64 registers

// Grid says which elements the threads of a block take: 2^lane_bits neighbouring packs of columns, 2^step_bits threads
// for each of them, which share its length, and 2^outer_bits sets of columns.
struct Grid {
  int lane_bits, step_bits, outer_bits;
  unsigned tiles, packs_of_tile;  // of a set of columns; a block takes a tile, whose packs may be fewer than its lanes
  int64_t packs;                  // of columns, in a set of them
};

// A thread holds so many packs of each input, in 32 registers of all inputs, or fewer where their addresses or
// exponentials take many. If they are not the whole column, it is a quarter as many at a time.
template <int N, bool kWhole, typename Program, typename T>
constexpr int kHeldPacks = (sizeof(T) == 8 ? 16
                            : N > 1        ? 32
                                           : 24) /
                           (kWhole ? 1 : 4) / Program::kInputs / (sizeof(T) * N > 4 ? sizeof(T) * N / 4 : 1);

// Combines the terms of a pack's elements with N results. If kKeeps, they also take the places of elements.
template <int phase, bool kKeeps, typename Program, typename T, int N>
__device__ __forceinline__ void combine_packs(Pack<T, N> (&packs)[Program::kInputs],
                                              const Compute<T> (&found)[N][Program::kPhases],
                                              Compute<T> (&results)[N]) {
  for (int j = 0; j < N; ++j) {
    Compute<T> in[Program::kInputs];
    for (int a = 0; a < Program::kInputs; ++a) in[a] = Compute<T>(packs[a].values[j]);
    const Compute<T> term = Program::template of<phase>(in, found[j]);
    if constexpr (kKeeps) packs[0].values[j] = term;
    results[j] = Program::template combine<phase>(results[j], term);
  }
}

// Stores the outputs of a pack's elements, which were kept as terms if kKeepsTerms.
template <bool kKeepsTerms, int N, typename Program, typename T>
__device__ __forceinline__ void map_packs(const Columns<Program, T>& all, int64_t at,
                                          const Pack<T, N> (&packs)[Program::kInputs],
                                          const Compute<T> (&found)[N][Program::kPhases]) {
  Compute<T> out[Program::kOutputs][N];
  for (int j = 0; j < N; ++j) {
    Compute<T> in[Program::kInputs], of[Program::kOutputs];
    for (int a = 0; a < Program::kInputs; ++a) in[a] = Compute<T>(packs[a].values[j]);
    if constexpr (kKeepsTerms) {
      of[0] = in[0] * found[j][Program::kPhases - 1];
    } else {
      Program::map(in, found[j], of);
    }
    for (int o = 0; o < Program::kOutputs; ++o) out[o][j] = of[o];
  }
  for (int o = 0; o < Program::kOutputs; ++o) store_at_once(all.out[o] + at, rounded_pack<T>(out[o]));
}

template <int N, bool kWhole, typename Program, typename T>
class ColumnTeam {
 public:
  using C = Compute<T>;
  using Found = C[N][Program::kPhases];

  __device__ ColumnTeam(const Columns<Program, T>& all, const Grid& grid, C* shared)
      : all_(all), lanes_(1u << grid.lane_bits), team_(lanes_ << grid.step_bits), shared_(shared) {
    const unsigned tile = blockIdx.x % grid.tiles, group = blockIdx.x / grid.tiles;
    const unsigned lane = threadIdx.x & (lanes_ - 1), team = threadIdx.x / team_;
    const int64_t pack = int64_t{tile} * grid.packs_of_tile + lane;
    const int64_t outer = (int64_t{group} << grid.outer_bits) + team;
    const int64_t step = (threadIdx.x & (team_ - 1)) >> grid.lane_bits, steps = int64_t{1} << grid.step_bits;
    shared_ += team * (team_ / 32 + 1) * lanes_ * N;
    // Threads without a column take part in the team's shuffles and barriers.
    const bool has_column = lane < grid.packs_of_tile && pack < grid.packs && outer < all.s.outer;
    count_ = has_column && step < all.s.length ? static_cast<int>((all.s.length - 1 - step) >> grid.step_bits) + 1 : 0;
    start_ = (outer * all.s.length + step) * all.s.inner + pack * N;
    stride_ = steps * all.s.inner;
    hold();
  }

  template <int phase>
  __device__ void reduce(Found& found) {
    C results[N];
    for (C& result : results) result = Program::template identity<phase>();
    each([&](int64_t, Pack<T, N>(&packs)[Program::kInputs]) {
      combine_packs<phase, kKeepsTerms && phase == Program::kPhases - 1, Program>(packs, found, results);
    });
    over_team<phase>(results);
    for (int j = 0; j < N; ++j) found[j][phase] = Program::template finish<phase>(results[j]);
  }

  __device__ void map(const Found& found) {
    each([&](int64_t at, Pack<T, N>(&packs)[Program::kInputs]) { map_packs<kKeepsTerms>(all_, at, packs, found); });
  }

 private:
  static constexpr int kHeld = std::max(1, kHeldPacks<N, kWhole, Program, T>);
  // Terms of the last phase take the places of elements, where they are not rounded.
  static constexpr bool kKeepsTerms = kWhole && Program::kScales && std::is_same<T, C>::value;

  // Reads the chunk of kHeld packs of each input that begins with the thread's pack first_.
  __device__ void hold() {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (first_ + i < count_)
        for (int a = 0; a < Program::kInputs; ++a) held_[i][a] = load<N>(all_.in[a] + place(i));
  }
  __device__ int64_t place(int i) const { return start_ + (first_ + i) * stride_; }

  // Calls f(place, packs) for this thread's packs. It begins with the chunk that it holds, which is the first or the
  // last one: it goes up and down by turns.
  template <typename F>
  __device__ void each(const F& f) {
    for (int rest = count_ - kHeld;; rest -= kHeld) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (first_ + i < count_) f(place(i), held_[i]);
      if (kWhole || rest <= 0) break;
      first_ += next_;
      hold();
    }
    next_ = -next_;
  }

  // Combines the results of the threads that share columns, in a fixed order: first those of a warp, then, with a
  // thread for each column, those of all warps.
  template <int phase>
  __device__ void over_team(C (&results)[N]) const {
    for (unsigned distance = (team_ < 32 ? team_ : 32) / 2; distance >= lanes_; distance /= 2)
      for (C& result : results)
        result = Program::template combine<phase>(result, __shfl_xor_sync(~0u, result, distance));
    if (team_ <= 32) return;
    const unsigned thread = threadIdx.x & (team_ - 1), lane = thread & (lanes_ - 1), columns = lanes_ * N;
    C *const of_warp = shared_ + thread / 32 * columns, *const of_team = shared_ + team_ / 32 * columns;
    if (thread % 32 < lanes_)
      for (int j = 0; j < N; ++j) of_warp[j * lanes_ + lane] = results[j];
    __syncthreads();
    for (unsigned column = thread; column < columns; column += team_) {
      C total = shared_[column];
      for (const C* next = shared_ + column + columns; next < of_team; next += columns)
        total = Program::template combine<phase>(total, *next);
      of_team[column] = total;
    }
    __syncthreads();
    for (int j = 0; j < N; ++j) results[j] = of_team[j * lanes_ + lane];
  }

  Columns<Program, T> all_;
  unsigned lanes_, team_;  // threads
  C* shared_;              // (warp of the team, element of a pack, lane), and once more for the team
  int count_, first_ = 0, next_ = kHeld;
  int64_t start_, stride_;
  Pack<T, N> held_[kHeld][Program::kInputs];
};

template <int N, bool kWhole, typename Program, typename T>
__global__ void __launch_bounds__(kColumnThreads) columns_kernel(Columns<Program, T> all, Grid grid) {
  extern __shared__ uint4 shared[];
  ColumnTeam<N, kWhole, Program, T> team(all, grid, reinterpret_cast<Compute<T>*>(shared));
  Compute<T> found[N][Program::kPhases];
  for_phases<Program>([&](auto phase) { team.template reduce<phase>(found); });
  team.map(found);
}

inline int bits_for(int64_t n, int most) {
  int bits = 0;
  while (bits < most && (int64_t{1} << bits) < n) ++bits;
  return bits;
}

// Returns an address that is as aligned as the least aligned tensor.
template <typename Program, typename T>
const T* least_aligned(const Columns<Program, T>& all) {
  uintptr_t addresses = 0;
  for (const T* in : all.in) addresses |= reinterpret_cast<uintptr_t>(in);
  for (const T* out : all.out) addresses |= reinterpret_cast<uintptr_t>(out);
  return reinterpret_cast<const T*>(addresses);
}

// A block has up to 32 neighbouring packs, or fewer, down to 64 bytes, if its threads then hold a longer column. It has
// 256 threads if they hold that, so that other blocks of a multiprocessor load and store meanwhile. More threads share
// a column if there are few columns.
template <int N, typename Program, typename T>
void launch_columns(Call& call, const Columns<Program, T>& all) {
  constexpr int kMostBits = 10, kBlockBits = 8;  // of the threads of a block
  static_assert(1 << kMostBits == kColumnThreads, "a block has at most kColumnThreads threads");
  constexpr int64_t kHeld = kHeldPacks<N, true, Program, T>, kFewThreads = 1 << 17;
  const ColumnSizes& s = all.s;
  const int64_t packs = s.inner / N, shared_by = (s.length + kHeld - 1) / kHeld;
  Grid grid{};
  grid.packs = packs;
  grid.lane_bits = bits_for(packs, 5);
  grid.step_bits = bits_for(shared_by, kMostBits);
  while (s.outer * packs << grid.step_bits < kFewThreads && int64_t{1} << grid.step_bits < s.length) ++grid.step_bits;
  const int fewest_lanes = bits_for(64 / (N * sizeof(T)), grid.lane_bits);
  grid.lane_bits = std::max(fewest_lanes, std::min(grid.lane_bits, kBlockBits - grid.step_bits));
  grid.step_bits = std::min(grid.step_bits, kMostBits - grid.lane_bits);
  grid.outer_bits = bits_for(s.outer, std::max(0, kBlockBits - grid.lane_bits - grid.step_bits));
  const int64_t tiles = ((packs - 1) >> grid.lane_bits) + 1, groups = ((s.outer - 1) >> grid.outer_bits) + 1;
  grid.tiles = static_cast<unsigned>(tiles);
  grid.packs_of_tile = static_cast<unsigned>((packs + tiles - 1) / tiles);
  const int team_bits = grid.lane_bits + grid.step_bits;
  const int threads = 1 << std::max(5, team_bits + grid.outer_bits);  // a warp must be whole, for its shuffles
  const int64_t results = team_bits <= 5 ? 0 : (threads / 32 + (threads >> team_bits)) * (N << grid.lane_bits);
  auto kernel = columns_kernel<N, false, Program, T>;
  if constexpr (Program::kInputs <= 2)
    if (s.length <= kHeld << grid.step_bits) kernel = columns_kernel<N, true, Program, T>;
  launch(call, kernel, tiles * groups, threads, results * sizeof(Compute<T>), all, grid);
}
#endif

template <typename Program, typename T>
void for_columns(Call& call, const Columns<Program, T>& all) {
  if (call.is_on_cpu()) {
    const ColumnsOnCpu<Program, T> body(all);
    const double elements = static_cast<double>(all.s.columns() * all.s.length);
    return on_cpu(call, body.items(), body, 4 * elements / static_cast<double>(std::max<int64_t>(1, body.items())));
  }
#ifdef __CUDACC__
  constexpr int kWidest = Program::kInputs > 2 ? 1 : kPackWidth<T>;  // gradients of gradients are rare
  with_width<T, kWidest>(false, all.s.inner, {least_aligned(all)},
                         [&](auto width) { launch_columns<width>(call, all); });
#endif
}

}  // namespace msops::softmax
