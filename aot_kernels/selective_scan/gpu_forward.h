// The forward pass on the GPU. Where there are few rows, blocks share them: a first launch computes the states after
// each part of the steps, as if the part began with zeros; in the second launch, each part begins with the states that
// follow from those of the parts before it.
//
// While a block walks along a tile of steps, it also loads the next tile and writes the outputs of the one before, so
// that the exponentials, which bound this kernel, hide the rest. There are two stages of shared memory for that.
#pragma once

#include "gpu.h"

namespace msops::selective_scan {

constexpr int kTile = 32;  // steps

// Tile is what a block walks along at once: steps of kStates states.
struct Tile {
  int64_t chunk, state;
  int step;  // of the chunk: the first one

  template <typename S>
  __device__ Tile next(int64_t states) const {
    if (step + kTile < kChunk) return {chunk, state, step + kTile};
    if (state + S::kStates < states) return {chunk, state + S::kStates, 0};
    return {chunk + 1, 0, 0};
  }
  __device__ int64_t at() const { return chunk * kChunk + step; }
};

// A pack has W steps.
template <typename S, typename T, int W>
class ForwardOnGpu {
 public:
  using C = Compute<T>;
  static constexpr int kSteps = 8;  // of a walk, whose outputs are added up together
  static constexpr int kOfRow = kTile / W, kRowsAtOnce = S::kThreads / kOfRow, kPacks = S::kRows / kRowsAtOnce;
  // A thread moves its packs in groups, between which it walks along some of the steps.
  static constexpr int kGroups = kPacks < kTile / kSteps ? kPacks : kTile / kSteps, kOfGroup = kPacks / kGroups;
  using OfShared = PackOfShared<S, W, kTile>;
  static constexpr int kSharedOfGroup = (OfShared::kOfThread + kGroups - 1) / kGroups;
  static_assert(S::kThreads % kOfRow == 0 && kPacks % kGroups == 0, "a thread has whole groups, at one step");

  struct Stage {
    Shared<S, C, kTile> group;
    C dt[S::kRows][kTile + 4], terms[S::kRows][kTile + 4], y[S::kRows][kTile + 4];  // terms: dt u
  };
  struct Memory {
    C bias[S::kRows], D[S::kRows];
    Stage stages[2];
    C held[S::kRows][kChunk];  // y of the states before, if there are more than kStates
  };

  __device__ ForwardOnGpu(const ForwardProblem<T>& all, Memory& memory, bool is_first)
      : all_(all),
        memory_(memory),
        place_(all),
        is_first_(is_first),
        row_(static_cast<int>(threadIdx.x) / kOfRow),
        step_(static_cast<int>(threadIdx.x) % kOfRow * W),
        at_(all.row(place_.block.sample, place_.block.channel + row_) + step_) {}

  __device__ void run() {
    for (int row = static_cast<int>(threadIdx.x); row < S::kRows; row += S::kThreads) {
      const bool is_inside = row < place_.block.channels;
      memory_.bias[row] = is_inside ? all_.bias[place_.block.channel + row] : C(0);
      memory_.D[row] = is_inside ? all_.D[place_.block.channel + row] : C(0);
    }
    __syncthreads();
    Tile before = {-1, 0, 0}, tile = {place_.begin, 0, 0};
    for (int group = 0; group < kGroups; ++group) {
      Given given;
      load(tile, group, given);
      put(tile, group, given, memory_.stages[0]);
    }
    for (int stage = 0; tile.chunk < place_.end; stage = 1 - stage) {
      const Tile next = tile.next<S>(all_.s.states);
      const bool has_before = before.chunk >= 0 && !is_first_;
      Stage &now = memory_.stages[stage], &other = memory_.stages[1 - stage];
      __syncthreads();
      if (tile.step == 0) start(tile);
#pragma unroll 1
      for (int group = 0; group < kGroups; ++group) {
        Given given;
        Taken taken;
        load(next, group, given);
        if (has_before) load_again(before, group, taken);
#pragma unroll
        for (int t = 0; t < kTile / kGroups; t += kSteps) walk(now, group * (kTile / kGroups) + t);
        if (has_before) store(before, group, taken, other);
        put(next, group, given, other);
      }
      if (is_first_ && tile.state == 0) add_dt(now);
      if (next.step == 0) finish(tile);
      before = tile;
      tile = next;
      if (tile.chunk == place_.end && !is_first_) {
        __syncthreads();
        for (int group = 0; group < kGroups; ++group) {
          Taken taken;
          load_again(before, group, taken);
          store(before, group, taken, now);
        }
      }
    }
    if (!is_first_ || place_.lane > 0) return;
    for (int i = 0; i < S::kEach; ++i)
      if (place_.has(i)) end(place_.part, place_.channel(i), all_.s.states) = totals_[i];
  }

 private:
  // Given is what a group of packs of the next tile comes from; Taken is what the outputs need besides y.
  struct Given {
    Packs<T, W, 2> steps[kOfGroup];  // u and delta
    Pack<T, W> shared[kSharedOfGroup];
  };
  struct Taken {
    Packs<T, W, 2> packs[kOfGroup];  // u and z
  };

  __device__ C& end(int64_t part, int64_t channel, int64_t n) const {
    return end_of(all_, part, place_.block.sample, channel, n);
  }

  // Calls f(k, row, at, is_inside) for each pack of a group, whose first element is at `at`.
  template <typename F>
  __device__ void for_group(const Tile& tile, int group, const F& f) const {
    const bool is_step = tile.at() + step_ < all_.s.steps;
    unrolled<kOfGroup>([&](int k) {
      const int rows = (group * kOfGroup + k) * kRowsAtOnce, row = row_ + rows;
      f(k, row, at_ + rows * all_.s.steps + tile.at(), is_step && row < place_.block.channels);
    });
  }

  // Loads what a group of packs of the next tile comes from. After the last tile of a part, nothing reads them.
  __device__ void load(const Tile& tile, int group, Given& given) const {
    for_group(tile, group, [&](int k, int, int64_t at, bool is_inside) {
      given.steps[k] = load_packs<W>(is_inside, at, all_.u, all_.delta);
    });
    unrolled<kSharedOfGroup>([&](int k) {
      const OfShared pack(group * kSharedOfGroup + k);
      given.shared[k] = pack.load(static_cast<const Problem<T>&>(all_), place_.block, tile.at(), tile.state);
    });
  }
  __device__ void put(const Tile& tile, int group, const Given& given, Stage& stage) const {
    for_group(tile, group, [&](int k, int row, int64_t, bool is_inside) {
      put_steps<W, T>(all_, row, step_, is_inside, memory_.bias[row], given.steps[k], stage);
    });
    unrolled<kSharedOfGroup>(
        [&](int k) { OfShared(group * kSharedOfGroup + k).template store<T>(given.shared[k], stage.group); });
  }

  // Loads what the outputs of a group need.
  __device__ void load_again(const Tile& tile, int group, Taken& taken) const {
    for_group(tile, group, [&](int k, int, int64_t at, bool is_inside) {
      taken.packs[k] = load_packs<W>(is_inside, at, all_.u, all_.z);
    });
  }
  // Writes the outputs of a group, or keeps their sums until all states have been added.
  __device__ void store(const Tile& tile, int group, const Taken& taken, const Stage& stage) const {
    const bool is_single = all_.s.states <= S::kStates, is_last = tile.state + S::kStates >= all_.s.states;
    for_group(tile, group, [&](int k, int row, int64_t at, bool is_inside) {
      Pack<C, W> y = msops::load<W>(stage.y[row] + step_);
      if (!is_single) {
        C* const held = memory_.held[row] + tile.step + step_;
        for (int w = 0; w < W; ++w) held[w] = y.values[w] += tile.state > 0 ? held[w] : C(0);
      }
      if (!is_last || !is_inside) return;
      C u[W], z[W], out[W];
      taken.packs[k].get(0, u);
      taken.packs[k].get(1, z);
      for (int w = 0; w < W; ++w) out[w] = y.values[w] + memory_.D[row] * u[w];
      if (all_.z)
        for (int w = 0; w < W; ++w) out[w] *= Activations<T>::silu(z[w]);
      msops::store_at_once(all_.out + at, rounded_pack<T>(out));
    });
  }

  // Sets the lane's states before a chunk, where the registers do not have them, and keeps them.
  __device__ void start(const Tile& tile) {
    if (all_.s.states > S::kStates || tile.chunk == place_.begin) {
      load_decays(all_, place_, tile.state, decays_);
      unrolled<S::kEach, S::kOfLane>([&](int i, int j) { h_[i][j] = 0; });
      place_.for_states(all_.s, tile.state, [&](int i, int j, int64_t channel, int64_t n) {
        if (tile.chunk > place_.begin) {
          h_[i][j] = *all_.saved(place_.block.sample, tile.chunk, channel, n);
        } else if (!is_first_) {
          h_[i][j] = all_.initial[all_.at(place_.block.sample, channel, n)];
          for (int64_t part = 0; part < place_.part; ++part)
            h_[i][j] = after_part(decays_[i][j] * end(part, channel, all_.s.states), h_[i][j], end(part, channel, n));
        }
      });
    }
    if (is_first_) return;
    place_.for_states(all_.s, tile.state, [&](int i, int j, int64_t channel, int64_t n) {
      *all_.saved(place_.block.sample, tile.chunk, channel, n) = h_[i][j];
    });
  }

  // Advances the lane's states over kSteps steps.
  __device__ void walk(Stage& stage, int t) {
    constexpr int kSums = S::kEach * kSteps / S::kLanes;  // of the lane
    Pack<C, kSteps> dt[S::kEach], term[S::kEach];
    C y[S::kEach * kSteps] = {};
    unrolled<S::kEach>([&](int i) {
      dt[i] = msops::load<kSteps>(stage.dt[place_.row(i)] + t);
      term[i] = msops::load<kSteps>(stage.terms[place_.row(i)] + t);
    });
    unrolled<kSteps>([&](int k) {
      const auto b = msops::load<S::kOfLane>(stage.group.inputs[t + k] + place_.lane * S::kOfLane);
      const auto c = msops::load<S::kOfLane>(stage.group.outputs[t + k] + place_.lane * S::kOfLane);
      unrolled<S::kEach, S::kOfLane>([&](int i, int j) {
        h_[i][j] = Decay<C>::of(dt[i].values[k] * decays_[i][j]) * h_[i][j] + term[i].values[k] * b.values[j];
        y[i * kSteps + k] += c.values[j] * h_[i][j];
      });
    });
    scatter_sums<S::kLanes>(y);
    Pack<C, kSums> sums;
    for (int k = 0; k < kSums; ++k) sums.values[k] = y[k];
    const int first = place_.lane * kSums;
    msops::store(stage.y[place_.row(first / kSteps)] + t + first % kSteps, sums);
  }

  // Adds dt of a tile to the totals.
  __device__ void add_dt(const Stage& stage) {
    for (int t = 0; t < kTile; ++t) unrolled<S::kEach>([&](int i) { totals_[i] += stage.dt[place_.row(i)][t]; });
  }

  // Keeps the lane's states after a chunk, where the next chunk, the parts after it or the caller read them.
  __device__ void finish(const Tile& tile) const {
    const bool is_end = tile.chunk + 1 == place_.end;
    if (all_.s.states <= S::kStates && !is_end) return;
    place_.for_states(all_.s, tile.state, [&](int i, int j, int64_t channel, int64_t n) {
      if (!is_end) {
        *all_.saved(place_.block.sample, tile.chunk + 1, channel, n) = h_[i][j];
      } else if (is_first_) {
        end(place_.part, channel, n) = h_[i][j];
      } else if (tile.chunk + 1 == all_.s.chunks()) {
        all_.last[all_.at(place_.block.sample, channel, n)] = h_[i][j];
      }
    });
  }

  const ForwardProblem<T>& all_;
  Memory& memory_;
  const Place<S, T> place_;
  const bool is_first_;
  const int row_, step_;  // of the thread's first pack in a tile
  const int64_t at_;      // the place of that row's step_
  C h_[S::kEach][S::kOfLane], decays_[S::kEach][S::kOfLane], totals_[S::kEach] = {};  // totals: of dt
};

// Blocks are (blocks of channels, 1, parts).
template <typename S, typename T, int W>
__global__ void __launch_bounds__(S::kThreads) forward_kernel(const ForwardProblem<T> all, bool is_first) {
  extern __shared__ __align__(32) unsigned char bytes[];
  ForwardOnGpu<S, T, W>(all, *reinterpret_cast<typename ForwardOnGpu<S, T, W>::Memory*>(bytes), is_first).run();
}

template <typename T>
void forward_on_gpu(Call& call, const ForwardProblem<T>& all) {
  const auto with_packs = [&](auto shape, auto width) {
    using S = decltype(shape);
    constexpr int W = width;
    using Memory = typename ForwardOnGpu<S, T, W>::Memory;
    const Grid grid(all.s.blocks(), 1, all.parts);
    const auto kernel = forward_kernel<S, T, W>;
    const int64_t bytes = all.s.states > S::kStates ? sizeof(Memory) : offsetof(Memory, held);
    if (all.parts > 1) launch(call, kernel, grid, S::kThreads, bytes, all, true);
    launch(call, kernel, grid, S::kThreads, bytes, all, false);
  };
  with_shape<false, T>(all.s, [&](auto shape) {
    if (are_packs<T>(all.s, {all.u, all.delta, all.inputs, all.outputs, all.z, all.out})) {
      with_packs(shape, Constant<kPackWidth<T>>{});
    } else {
      with_packs(shape, Constant<1>{});
    }
  });
}

}  // namespace msops::selective_scan
