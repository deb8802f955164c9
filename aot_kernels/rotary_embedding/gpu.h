// Rotary embedding on the GPU. A thread moves two packs of a row, the first and the second half of the pairs. Most
// kernels do that for some heads at the same place: a thread reads their angles once, and has all their loads in
// flight.
//
//   case                                   kernel              why
//   rows and halves are whole 16 bytes:
//     all features turn, each place has    TurnWhole           rows in order take 4 to 12 % less time, although each
//     its row of angles, each angle once                       head reads the angles again
//     other cases                          packs, 4 heads      128 bytes of a thread in flight
//     ... few rows, or up to 2 heads       packs, 1 head       more threads
//   others                                 elements, 4 heads   any size and alignment
//
// There are second kernels for tables with every angle twice and for positions. Where the copies of an angle differ, or
// a position is no row of the tables, the result is NaN: the CPU tells such an error.
#pragma once

#ifdef __CUDACC__
#include "../common/gpu/divisor.h"
#include "../common/pack.h"
#include "../common/parallel.h"
#include "rotation.h"

namespace msops::rotary {

// Grid says which rows and heads the threads of a block take. A unit is two packs of a row.
struct Grid {
  int64_t units;         // of all places of all samples, for one head
  int64_t units_of_row;  // for the pairs, then for the features that pass
  int64_t units_of_pairs;
  unsigned tiles;             // blocks along the units; further blocks take further heads
  int lane_bits;              // neighbouring threads of a block take 2^lane_bits neighbouring units, then further heads
  bool is_small;              // 32 bits hold the units
  Divisor of_row, of_sample;  // of units, and of places
};

// Place of a thread's first pack and of its second one in the row.
struct Packs {
  int64_t first, second, angles;
  bool turns_first, turns_second, has_second;
};

// In interleaved packs of more than one element, a pack has whole pairs. Otherwise the packs have the two halves of the
// pairs: N neighbours, or every second element.
template <int N, bool kPairsInPack>
__device__ Packs packs_of(const Rotation& s, const Grid& grid, int64_t unit) {
  const int64_t all = 2 * s.turned;
  Packs at;
  if (kPairsInPack) {
    at.first = unit * N;
    at.second = at.first + grid.units_of_row * N;
    at.turns_first = at.first < all;
    at.turns_second = at.second < all;
    at.angles = at.first / 2;
  } else {
    const int64_t passing = unit - grid.units_of_pairs, step = s.interleaved ? 2 : N,
                  gap = s.interleaved ? 1 : s.turned;
    at.turns_first = at.turns_second = passing < 0;
    at.first = passing < 0 ? unit * step : all + passing * N;
    at.second = at.first + (passing < 0 ? gap : (grid.units_of_row - grid.units_of_pairs) * N);
    at.angles = unit * N;
  }
  at.has_second = at.second < s.width;
  return at;
}

template <int N, typename T>
__device__ void turn_packs(Pack<T, N>& first, Pack<T, N>& second, const Compute<T> (&cos)[N],
                           const Compute<T> (&sin)[N]) {
  using C = Compute<T>;
  for (int j = 0; j < N; ++j) {
    C a = C(first.values[j]), b = C(second.values[j]);
    turn(a, b, cos[j], sin[j]);
    assign(first.values[j], a);
    assign(second.values[j], b);
  }
}

// Turns the pairs within a pack by N / 2 angles from `from` on.
template <int from, int N, int kAngles, typename T>
__device__ void turn_pairs(Pack<T, N>& pack, const Compute<T> (&cos)[kAngles], const Compute<T> (&sin)[kAngles]) {
  using C = Compute<T>;
  for (int j = 0; j < N / 2; ++j) {
    C a = C(pack.values[2 * j]), b = C(pack.values[2 * j + 1]);
    turn(a, b, cos[from + j], sin[from + j]);
    assign(pack.values[2 * j], a);
    assign(pack.values[2 * j + 1], b);
  }
}

// Turns N pairs of a row, all of whose features turn. Index i counts these over all rows.
template <int N, bool kPairsInPack, typename T, typename Table>
struct TurnWhole {
  Rotation s;
  const T* x;
  const Table *cos_table, *sin_table;
  T* out;

  template <typename I>
  __device__ void operator()(I i) const {
    using C = Compute<T>;
    const I units = static_cast<I>(s.turned / N), row = i / units, unit = i - row * units;
    const I length = static_cast<I>(s.length), heads = static_cast<I>(s.heads);
    const I outer = row / (s.heads_first ? length : heads), sample = outer / (s.heads_first ? heads : length);
    const I place = s.heads_first ? row - outer * length : outer - sample * length;
    const int64_t first = static_cast<int64_t>(row) * s.width + unit * (kPairsInPack ? 2 * N : N);
    const int64_t second = first + (kPairsInPack ? N : s.turned), angles = s.angles(sample, place) + unit * N;
    Pack<T, N> a = load<N>(x + first), b = load<N>(x + second);
    const auto cos_pack = load<N>(cos_table + angles), sin_pack = load<N>(sin_table + angles);
    C cos[N], sin[N];
    for (int j = 0; j < N; ++j)
      cos[j] = C(cos_pack.values[j]), sin[j] = s.inverse ? -C(sin_pack.values[j]) : C(sin_pack.values[j]);
    if constexpr (kPairsInPack) {
      turn_pairs<0>(a, cos, sin);
      turn_pairs<N / 2>(b, cos, sin);
    } else {
      turn_packs(a, b, cos, sin);
    }
    store(out + first, a);
    store(out + second, b);
  }
};

// Reads kCount angles for elements of type C.
template <int kCount, int kAngles, typename C, typename Table>
__device__ void read_angles(const Table* from, int at, C (&to)[kAngles]) {
  const auto pack = load<kCount>(from);
  for (int j = 0; j < kCount; ++j) to[at + j] = C(pack.values[j]);
}

// Reads kCount angles, from one on, of the row of a table that may have them twice.
template <int kCount, bool kPairsInPack, int kAngles, typename C, typename Table>
__device__ void read_copies(const RotationByTables& s, const Table* row, int64_t angle, int at, C (&to)[kAngles]) {
  if (!s.is_twice) return read_angles<kCount>(row + angle, at, to);
  const auto same = [](Table a, Table b) { return C(a) == C(b) ? C(a) : C(NAN); };
  if constexpr (kPairsInPack) {
    const auto copies = load<2 * kCount>(row + 2 * angle);
    for (int j = 0; j < kCount; ++j) to[at + j] = same(copies.values[2 * j], copies.values[2 * j + 1]);
  } else {
    const Table* const from = row + angle * s.step();
    const auto first = load<kCount>(from), second = load<kCount>(from + s.gap());
    for (int j = 0; j < kCount; ++j) to[at + j] = same(first.values[j], second.values[j]);
  }
}

template <int N, int kHeads, bool kPairsInPack, typename T, typename Table, typename S>
__global__ void __launch_bounds__(kThreads)
    turn_kernel(S s, Grid grid, const T* x, const Table* cos_table, const Table* sin_table, T* out) {
  using C = Compute<T>;
  const unsigned lane = threadIdx.x & ((1u << grid.lane_bits) - 1), tile = blockIdx.x % grid.tiles;
  const int64_t unit = (static_cast<int64_t>(tile) << grid.lane_bits) + lane;
  const int64_t group =
      int64_t{blockIdx.x / grid.tiles} * (blockDim.x >> grid.lane_bits) + (threadIdx.x >> grid.lane_bits);
  const int64_t head = group * kHeads, heads = s.heads - head;
  if (unit >= grid.units || heads <= 0) return;

  // Finds the place.
  int64_t sample, place, unit_of_row;
  if (grid.is_small) {
    int rest, rest_of_row;
    const int row = grid.of_row.divide(static_cast<int>(unit), &rest_of_row);
    sample = grid.of_sample.divide(row, &rest);
    place = rest;
    unit_of_row = rest_of_row;
  } else {
    const int64_t row = unit / grid.units_of_row;
    unit_of_row = unit - row * grid.units_of_row;
    sample = row / s.length;
    place = row - sample * s.length;
  }
  const Packs at = packs_of<N, kPairsInPack>(s, grid, unit_of_row);
  const int64_t of_head = s.of_head(), start = sample * s.of_batch() + head * of_head + place * s.of_place();

  // Reads the packs of all heads, then the angles.
  Pack<T, N> first[kHeads], second[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h < heads) first[h] = load<N>(x + start + h * of_head + at.first);
    if (h < heads && at.has_second) second[h] = load<N>(x + start + h * of_head + at.second);
  }
  C cos[N], sin[N];
  if (at.turns_first) {
    [[maybe_unused]] constexpr int kHalf = N / 2;
    const int64_t angles = s.angles(sample, place) + at.angles;
    if constexpr (!S::kIsPlain) {
      const int64_t position = s.position(sample, place), start = s.angles_at(sample, position);
      if (s.has_row(position)) {
        constexpr int kFirst = kPairsInPack ? kHalf : N;
        read_copies<kFirst, kPairsInPack>(s, cos_table + start, at.angles, 0, cos);
        read_copies<kFirst, kPairsInPack>(s, sin_table + start, at.angles, 0, sin);
        if constexpr (kPairsInPack) {
          const int64_t next = at.angles + grid.units_of_row * kHalf;
          if (at.turns_second) {
            read_copies<kHalf, true>(s, cos_table + start, next, kHalf, cos);
            read_copies<kHalf, true>(s, sin_table + start, next, kHalf, sin);
          }
        }
      } else {
        for (int j = 0; j < N; ++j) cos[j] = sin[j] = C(NAN);
      }
    } else if constexpr (kPairsInPack) {
      read_angles<kHalf>(cos_table + angles, 0, cos);
      read_angles<kHalf>(sin_table + angles, 0, sin);
      if (at.turns_second) {
        read_angles<kHalf>(cos_table + angles + grid.units_of_row * kHalf, kHalf, cos);
        read_angles<kHalf>(sin_table + angles + grid.units_of_row * kHalf, kHalf, sin);
      }
    } else {
      read_angles<N>(cos_table + angles, 0, cos);
      read_angles<N>(sin_table + angles, 0, sin);
    }
    for (C& angle : sin) angle = s.inverse ? -angle : angle;
  }

  // Turns and writes.
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h >= heads) continue;
    if constexpr (kPairsInPack) {
      if (at.turns_first) turn_pairs<0>(first[h], cos, sin);
      if (at.turns_second) turn_pairs<N / 2>(second[h], cos, sin);
    } else {
      if (at.turns_first) turn_packs(first[h], second[h], cos, sin);
    }
    store_at_once(out + start + h * of_head + at.first, first[h]);
    if (at.has_second) store_at_once(out + start + h * of_head + at.second, second[h]);
  }
}

// Returns the least b with 2^b >= n, but at most `most`.
inline int bits_for(int64_t n, int most) {
  int bits = 0;
  while (bits < most && (int64_t{1} << bits) < n) ++bits;
  return bits;
}

template <int N, int kHeads, bool kPairsInPack, typename T, typename Table, typename S>
void launch_turns(Call& call, const S& s, const T* x, const Table* cos, const Table* sin, T* out) {
  const int64_t passing = (s.width - 2 * s.turned + N - 1) / N, pairs = s.turned / N;
  const int64_t units_of_row = kPairsInPack ? (s.width / N + 1) / 2 : pairs + (passing + 1) / 2;
  const int64_t units = s.batch * s.length * units_of_row, groups = (s.heads + kHeads - 1) / kHeads;
  if (units == 0 || groups == 0) return;
  constexpr int kBits = 8, kHeadBits = 2;  // of the threads of a block, and of those for its heads, if it can choose
  static_assert(1 << kBits == kThreads, "a block has kThreads threads");
  const int lane_bits = bits_for(units, kBits - bits_for(groups, kHeadBits));
  const int head_bits = bits_for(groups, kBits - lane_bits);
  const int64_t tiles = ((units - 1) >> lane_bits) + 1, blocks = tiles * (((groups - 1) >> head_bits) + 1);
  const bool is_small = units <= INT32_MAX;
  const Grid grid{units,
                  units_of_row,
                  pairs,
                  static_cast<unsigned>(tiles),
                  lane_bits,
                  is_small,
                  Divisor(is_small ? units_of_row : 1),
                  Divisor(is_small ? s.length : 1)};
  launch(call, turn_kernel<N, kHeads, kPairsInPack, T, Table, S>, blocks, 1u << (lane_bits + head_bits), 0, s, grid, x,
         cos, sin, out);
}

template <typename T, typename Table, typename S>
void turn_on_gpu(Call& call, const S& s, const T* x, const Table* cos, const Table* sin, T* out) {
  constexpr int N = kPackWidth<T>;
  const int64_t angles = s.interleaved ? N / 2 : N;  // of a pack
  bool reads_pairs = false;
  if constexpr (!S::kIsPlain) reads_pairs = s.step() == 2;
  const uintptr_t bytes = (reads_pairs ? N : angles) * sizeof(Table);
  const bool packs = is_aligned<N>(x) && is_aligned<N>(out) && s.width % N == 0 && s.turned % angles == 0 &&
                     reinterpret_cast<uintptr_t>(cos) % bytes == 0 && reinterpret_cast<uintptr_t>(sin) % bytes == 0;
  if (!packs) return launch_turns<1, 4, false>(call, s, x, cos, sin, out);
  if constexpr (S::kIsPlain && N > 1) {
    if (2 * s.turned == s.width && s.turned % N == 0 && is_aligned<N>(cos) && is_aligned<N>(sin)) {
      const int64_t units = s.rows() * s.turned / N, size = 2 * units * N;
      if (s.interleaved) return on_gpu(call, units, size, TurnWhole<N, true, T, Table>{s, x, cos, sin, out});
      return on_gpu(call, units, size, TurnWhole<N, false, T, Table>{s, x, cos, sin, out});
    }
  }
  constexpr int64_t kMany = 1024 * kThreads * 4 * 2;  // packs that fill every GPU with threads of 4 heads
  const bool many = s.heads > 2 && s.rows() * (s.width / N) >= kMany;
  if (s.interleaved) {
    many ? launch_turns<N, 4, true>(call, s, x, cos, sin, out) : launch_turns<N, 1, true>(call, s, x, cos, sin, out);
  } else {
    many ? launch_turns<N, 4, false>(call, s, x, cos, sin, out) : launch_turns<N, 1, false>(call, s, x, cos, sin, out);
  }
}

}  // namespace msops::rotary
#endif
