// Transposes tiles through shared memory, where x has neighbours along one axis and y along another. A block takes a
// tile of k positions along x's axis and m positions along y's, 16 KiB in all. In shared memory, elements of less than
// 4 bytes are joined, along m, to words of 4 bytes, so that packs of 16 bytes at both ends are written and read word by
// word. A row of words for each position along m has one word more than the tile: no two threads of a warp meet in a
// bank. From sm_80 on, elements of 2 bytes go through smaller tiles, by ldmatrix.
#pragma once

#include "../common/gpu/ldmatrix.h"
#include "gpu_walk.h"

namespace msops::strided_copy {

template <typename T>
struct TileOf {
  static constexpr int log2(int n) { return n == 1 ? 0 : 1 + log2(n / 2); }

  static constexpr int kThreads = 256;
  static constexpr int kPack = 16 / sizeof(T);                         // elements
  static constexpr int kJoined = sizeof(T) < 4 ? 4 / sizeof(T) : 1;    // elements of a word
  static constexpr int kWords = kPack / kJoined;                       // words of a pack along m
  static constexpr int kArea = 16384 / sizeof(T);                      // elements of a tile
  static constexpr int kReads = kArea / (kPack * kJoined * kThreads);  // of kJoined packs, for each thread
  static constexpr int kWrites = kArea / (kPack * kThreads);           // packs that each thread writes
  static constexpr int kReadLanes = 32 / kPack < 8 ? 32 / kPack : 8;   // of a warp along k
  static constexpr int kWriteLanes = 8;                                // of a warp along m
  static constexpr int kNarrow = sizeof(T) == 16 ? 3 : 5, kWide = 7;   // log2 of the tile's size along k
  using Word = Unit<sizeof(T) < 4 ? 4 : sizeof(T)>;
  static constexpr int kRows = kArea / kJoined >> kNarrow;  // of words, at most
  static constexpr int kShared = kArea / kJoined + kRows;   // words: (m / kJoined, k + 1)
};

// Along k, x has stride 1; along m, y has stride 1.
template <typename T>
struct Transpose {
  int64_t k, m;                // sizes
  int64_t stride_m, stride_k;  // of x along m, of y along k
  int log_k;                   // of the tile
  Divisor tiles_m, tiles_k;
  Walk<2> others;  // strides of x, then of y
  const T* x;
  T* y;
};

// A Corner is where a block's tile begins in x and y, and how many positions along m and k there are from there on, at
// most the tile's.
template <typename T>
struct Corner {
  int m, k;
  const T* x;
  T* y;

  __device__ Corner(const Transpose<T>& t, int log_m) {
    int tile_m, tile_k;
    const int batch = t.tiles_k.divide(t.tiles_m.divide(static_cast<int>(blockIdx.x), &tile_m), &tile_k);
    int64_t from = 0, to = 0;
    t.others.add(batch, from, to);
    const int64_t first_m = int64_t{tile_m} << log_m, first_k = int64_t{tile_k} << t.log_k;
    m = static_cast<int>(std::min(t.m - first_m, int64_t{1} << log_m));
    k = static_cast<int>(std::min(t.k - first_k, int64_t{1} << t.log_k));
    x = t.x + from + first_m * t.stride_m + first_k;
    y = t.y + to + first_k * t.stride_k + first_m;
  }
};

template <bool kReadsPacks, bool kWritesPacks, typename T>
class Tile {
  using Of = TileOf<T>;
  using Word = typename Of::Word;
  static constexpr int kPack = Of::kPack, kJoined = Of::kJoined, kThreads = Of::kThreads;

 public:
  __device__ Tile(const Transpose<T>& t, Word* words)
      : t_(t), words_(words), row_((1 << t.log_k) + 1), log_m_(Of::log2(Of::kArea) - t.log_k), at_(t, log_m_) {}

  __device__ void read() {
    if constexpr (kReadsPacks) {
      read_packs();
    } else {
      read_elements();
    }
  }
  __device__ void write() {
    if constexpr (kWritesPacks) {
      write_packs();
    } else {
      write_elements();
    }
  }

 private:
  struct Place {
    int x, y;  // the number of the pack in a row; the row
  };

  // Returns the place of the pack that this thread takes in turn `turn`: kLanes threads of a warp are side by side.
  template <int kLanes>
  static __device__ Place place(int turn, int log_packs) {
    const int lane = threadIdx.x % 32, group = static_cast<int>(turn * kThreads + threadIdx.x) / 32;
    const int groups = (1 << log_packs) / kLanes;  // a power of 2
    return {(group & (groups - 1)) * kLanes + lane % kLanes,
            (group * kLanes >> log_packs) * (32 / kLanes) + lane / kLanes};
  }

  __device__ void read_packs() {
    constexpr int kLogPack = Of::log2(kPack);
    Pack<T, kPack> packs[Of::kReads][kJoined];
#pragma unroll
    for (int turn = 0; turn < Of::kReads; ++turn) {
      const Place at = place<Of::kReadLanes>(turn, t_.log_k - kLogPack);
      const int k = at.x * kPack, m = at.y * kJoined;
#pragma unroll
      for (int e = 0; e < kJoined; ++e) {
        packs[turn][e] = {};
        if (k < at_.k && m + e < at_.m) packs[turn][e] = load<kPack>(at_.x + (m + e) * t_.stride_m + k);
      }
    }
#pragma unroll
    for (int turn = 0; turn < Of::kReads; ++turn) {
      const Place at = place<Of::kReadLanes>(turn, t_.log_k - kLogPack);
      Word* const to = words_ + at.y * row_ + at.x * kPack;
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        T parts[kJoined];
#pragma unroll
        for (int e = 0; e < kJoined; ++e) parts[e] = packs[turn][e].values[j];
        memcpy(to + j, parts, sizeof(Word));
      }
    }
  }

  __device__ void read_elements() {
    constexpr int kAtOnce = 4;
    for (int i = threadIdx.x; i < Of::kArea / kJoined; i += kAtOnce * kThreads) {
      Word words[kAtOnce];
#pragma unroll
      for (int turn = 0; turn < kAtOnce; ++turn) {
        const int k = (i + turn * kThreads) & ((1 << t_.log_k) - 1), m = (i + turn * kThreads >> t_.log_k) * kJoined;
        T parts[kJoined] = {};
#pragma unroll
        for (int e = 0; e < kJoined; ++e)
          if (k < at_.k && m + e < at_.m) parts[e] = at_.x[(m + e) * t_.stride_m + k];
        memcpy(words + turn, parts, sizeof(Word));
      }
#pragma unroll
      for (int turn = 0; turn < kAtOnce; ++turn) {
        const int at = i + turn * kThreads;
        words_[(at >> t_.log_k) * row_ + (at & ((1 << t_.log_k) - 1))] = words[turn];
      }
    }
  }

  __device__ void write_packs() {
    constexpr int kLogPack = Of::log2(kPack);
#pragma unroll
    for (int turn = 0; turn < Of::kWrites; ++turn) {
      const Place at = place<Of::kWriteLanes>(turn, log_m_ - kLogPack);
      const int m = at.x * kPack, k = at.y;
      if (m >= at_.m || k >= at_.k) continue;
      Word words[Of::kWords];
#pragma unroll
      for (int w = 0; w < Of::kWords; ++w) words[w] = words_[(at.x * Of::kWords + w) * row_ + k];
      Pack<T, kPack> pack;
      memcpy(&pack, words, sizeof pack);
      store_at_once(at_.y + k * t_.stride_k + m, pack);
    }
  }

  __device__ void write_elements() {
#pragma unroll 4
    for (int i = threadIdx.x; i < Of::kArea; i += kThreads) {
      const int m = i & ((1 << log_m_) - 1), k = i >> log_m_;
      if (m >= at_.m || k >= at_.k) continue;
      const Word word = words_[m / kJoined * row_ + k];
      T parts[kJoined];
      memcpy(parts, &word, sizeof word);
      T value = parts[0];
#pragma unroll
      for (int e = 1; e < kJoined; ++e)
        if (m % kJoined == e) value = parts[e];
      at_.y[k * t_.stride_k + m] = value;
    }
  }

  const Transpose<T>& t_;
  Word* const words_;
  const int row_, log_m_;
  const Corner<T> at_;
};

// Unless it is told that one block a multiprocessor is enough, nvcc takes 32 registers, which hold but a few of the
// packs that a thread could load at once. For elements of one byte it takes more already, and they are slower when it
// is told.
template <bool kReadsPacks, bool kWritesPacks, typename T>
__global__ void __launch_bounds__(TileOf<T>::kThreads, sizeof(T) > 1) transpose_kernel(const Transpose<T> t) {
  __shared__ alignas(16) typename TileOf<T>::Word words[TileOf<T>::kShared];
  Tile<kReadsPacks, kWritesPacks, T> tile(t, words);
  tile.read();
  __syncthreads();
  tile.write();
}

// Transposes elements of 2 bytes, in packs at both ends, by ldmatrix, whose matrices have rows of a pack. A block takes
// 64 positions along both axes. In shared memory, the packs of each position along m are swizzled: neither the 8 that
// are stored at once nor the 8 rows of a matrix meet in a bank.
constexpr int kLogSide = 6;
template <typename T>
__global__ void __launch_bounds__(TileOf<T>::kThreads) ldmatrix_kernel(const Transpose<T> t) {
  constexpr int kSide = 1 << kLogSide, kPack = TileOf<T>::kPack, kPacks = kSide / kPack;  // packs of a row
  constexpr int kRows = TileOf<T>::kThreads / kPacks, kTurns = kSide / kRows;
  static_assert(kPack == 8 && TileOf<T>::kThreads == 32 * kPacks, "ldmatrix takes 16-bit elements, a warp a column");
  if (!has_instructions_of(80)) return;
  __shared__ Pack<T, kPack> tile[kSide * kPacks];
  const auto place = [&](int m, int pack) { return tile + m * kPacks + (pack ^ ((m & 1) | (m >> 2 & 6))); };
  const Corner<T> at(t, kLogSide);
  const int column = threadIdx.x % kPacks, row = threadIdx.x / kPacks;
  Pack<T, kPack> packs[kTurns] = {};
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int m = turn * kRows + row, k = column * kPack;
    if (m < at.m && k < at.k) packs[turn] = load<kPack>(at.x + m * t.stride_m + k);
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) *place(turn * kRows + row, column) = packs[turn];
  __syncthreads();
  // A warp takes a pack along k, of 32 positions along m at once. Pairs of these positions go to the four matrices in
  // turn, so that a thread gets 8 neighbours of them, for one position along k.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, k = warp * kPack + lane / 4;
#pragma unroll
  for (int first = 0; first < kSide; first += 32) {
    uint32_t words[4];
    ldmatrix_x4_trans(words, shared_address(place(first + lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2, warp)));
    const int m = first + lane % 4 * kPack;
    if (m < at.m && k < at.k) st_global_v4(at.y + k * t.stride_k + m, words);
  }
}

// Returns how many tiles of 2^log positions cover so many.
inline int64_t tiles_of(int64_t positions, int log) { return (positions - 1 >> log) + 1; }

// Chooses the tile that takes the fewest tiles, and rather one that is 64 wide along k.
template <typename T>
int best_log_k(int64_t k, int64_t m) {
  using Of = TileOf<T>;
  const auto tiles = [=](int log_k) { return tiles_of(k, log_k) * tiles_of(m, Of::log2(Of::kArea) - log_k); };
  int best = sizeof(T) < 8 ? 6 : 5;
  for (int log_k = Of::kNarrow; log_k <= Of::kWide; ++log_k)
    if (tiles(log_k) < tiles(best)) best = log_k;
  return best;
}

// Copies where x has neighbours along the axis `inner`, which is not the innermost one.
template <typename T>
void transpose(Call& call, const Copy<T>& copy, int inner) {
  using Of = TileOf<T>;
  const int last = copy.axes.count - 1;
  int64_t next = 1, strides[kMostAxes];
  for (int a = last; a >= 0; next *= copy.axes.size[a--]) strides[a] = next;
  Axes<2> others;
  bool reads_packs = is_aligned<Of::kPack>(copy.x) && copy.axes.size[inner] % Of::kPack == 0;
  for (int a = 0; a <= last; ++a) {
    if (a == inner) continue;
    reads_packs &= copy.axes.stride[0][a] % Of::kPack == 0;
    if (a != last) others.push(copy.axes.size[a], {copy.axes.stride[0][a], strides[a]});
  }
  const int64_t k = copy.axes.size[inner], m = copy.axes.size[last];
  const bool writes_packs = is_aligned<Of::kPack>(copy.y) && m % Of::kPack == 0;
  const auto run = [&](auto kernel, int log_k, int log_m) {
    const int64_t tiles_m = tiles_of(m, log_m), tiles_k = tiles_of(k, log_k);
    const Transpose<T> t{k,
                         m,
                         copy.axes.stride[0][last],
                         strides[inner],
                         log_k,
                         Divisor(tiles_m),
                         Divisor(tiles_k),
                         Walk<2>(others),
                         copy.x,
                         copy.y};
    launch(call, kernel, tiles_m * tiles_k * others.total(), Of::kThreads, 0, t);
  };
  const int log_k = best_log_k<T>(k, m), log_m = Of::log2(Of::kArea) - log_k;
  if constexpr (sizeof(T) == 2) {
    // Along a short axis, a longer tile covers less that is not there.
    const bool is_short = tiles_of(k, kLogSide) * tiles_of(m, kLogSide) > 2 * tiles_of(k, log_k) * tiles_of(m, log_m);
    const auto kernel = ldmatrix_kernel<T>;
    [[maybe_unused]] static FactOfGpu<> fact;
    if (reads_packs && writes_packs && !is_short && fact.get([=] { return int{is_compiled_for(80, kernel)}; }))
      return run(kernel, kLogSide, kLogSide);
  }
  const auto run_tiles = [&](auto kernel) { run(kernel, log_k, log_m); };
  if (reads_packs) {
    writes_packs ? run_tiles(transpose_kernel<true, true, T>) : run_tiles(transpose_kernel<true, false, T>);
  } else {
    writes_packs ? run_tiles(transpose_kernel<false, true, T>) : run_tiles(transpose_kernel<false, false, T>);
  }
}

}  // namespace msops::strided_copy
