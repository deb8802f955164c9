// The forward pass on the GPU. Where there are few rows, blocks share them: a first launch computes the states after
// each part of the steps, as if the part began with zeros; in the second launch, each part begins with the states that
// follow from those of the parts before it.
#pragma once

#include "gpu.h"

namespace msops::selective_scan {

template <typename S, typename T>
class ForwardOnGpu {
 public:
  using C = Compute<T>;
  static constexpr int kFour = 4;  // steps that are taken together
  struct Memory {
    Shared<S, C> group;
    C dt[S::kRows][S::kRow], terms[S::kRows][S::kRow], y[S::kRows][S::kRow];  // terms: dt u
  };

  __device__ ForwardOnGpu(const ForwardProblem<T>& all, Memory& memory, bool packs, bool is_first)
      : all_(all), memory_(memory), place_(all), packs_(packs), is_first_(is_first) {}

  __device__ void run() {
    const int64_t states = all_.s.states;
    const bool is_single = states <= S::kStates;
    for (int64_t chunk = place_.begin; chunk < place_.end; ++chunk) {
      load_steps(all_, place_, packs_, chunk, memory_, [](int, int, int64_t, bool, auto) {});
      for (int64_t state = 0; state < states; state += S::kStates) {
        if (state > 0) __syncthreads();  // all threads have read the states before
        load_shared<S>(static_cast<const Problem<T>&>(all_), place_.block, chunk, state, memory_.group);
        __syncthreads();
        if (!is_single || chunk == place_.begin) begin(chunk, state);
        save(chunk, state);
        walk(state > 0);
        if (!is_single || chunk + 1 == place_.end) finish(chunk, state);
      }
      __syncthreads();
      if (!is_first_) store(chunk);
    }
    if (is_first_ && place_.is_inside && place_.lane == 0) end(place_.part, states) = total_;
  }

 private:
  __device__ C& end(int64_t part, int64_t n) const { return end_of(all_, place_, part, n); }

  // Sets the lane's states before a chunk.
  __device__ void begin(int64_t chunk, int64_t state) {
    const int count = place_.count(all_, state);
    const int64_t first = state + place_.lane * S::kOfLane, at = all_.at(place_.block.sample, place_.channel, first);
    load_decays(all_, place_, state, decays_);
    for (int j = 0; j < S::kOfLane; ++j) {
      h_[j] = 0;
      if (j >= count) continue;
      if (chunk > place_.begin) {
        h_[j] = *all_.saved(place_.block.sample, chunk, place_.channel, first + j);
      } else if (!is_first_) {
        h_[j] = all_.initial[at + j];
        for (int64_t part = 0; part < place_.part; ++part)
          h_[j] = after_part(decays_[j] * end(part, all_.s.states), h_[j], end(part, first + j));
      }
    }
  }

  // Keeps the lane's states before a chunk.
  __device__ void save(int64_t chunk, int64_t state) const {
    const int count = place_.count(all_, state);
    C* const to = all_.saved(place_.block.sample, chunk, place_.channel, state + place_.lane * S::kOfLane);
    if (is_first_) return;
    for (int j = 0; j < S::kOfLane; ++j)
      if (j < count) to[j] = h_[j];
  }

  // Advances the lane's states over a chunk.
  __device__ void walk(bool adds) {
    const int row = place_.row, lane = place_.lane;
    for (int t = 0; t < kChunk; t += kFour) {
      const Pack<C, kFour> dt = msops::load<kFour>(memory_.dt[row] + t),
                           term = msops::load<kFour>(memory_.terms[row] + t);
      C y[kFour] = {};
      unrolled<kFour>([&](int i) {
        const auto b = msops::load<S::kOfLane>(memory_.group.inputs[t + i] + lane * S::kOfLane);
        const auto c = msops::load<S::kOfLane>(memory_.group.outputs[t + i] + lane * S::kOfLane);
        for (int j = 0; j < S::kOfLane; ++j) {
          h_[j] = Decay<C>::of(dt.values[i] * decays_[j]) * h_[j] + term.values[i] * b.values[j];
          y[i] += c.values[j] * h_[j];
        }
        if (is_first_ && !adds) total_ += dt.values[i];
      });
      if (is_first_) continue;
      scatter_sums<S::kLanes>(y);
      for (int k = 0; k < kFour / S::kLanes; ++k) {
        C& sum = memory_.y[row][t + lane * (kFour / S::kLanes) + k];
        sum = adds ? sum + y[k] : y[k];
      }
    }
  }

  // Keeps the lane's states after a chunk, where the next chunk, the parts after it or the caller read them.
  __device__ void finish(int64_t chunk, int64_t state) const {
    const int count = place_.count(all_, state);
    const int64_t first = state + place_.lane * S::kOfLane;
    for (int j = 0; j < S::kOfLane; ++j) {
      if (j >= count) continue;
      if (chunk + 1 < place_.end) {
        *all_.saved(place_.block.sample, chunk + 1, place_.channel, first + j) = h_[j];
      } else if (is_first_) {
        end(place_.part, first + j) = h_[j];
      } else if (chunk + 1 == all_.s.chunks()) {
        all_.last[all_.at(place_.block.sample, place_.channel, first + j)] = h_[j];
      }
    }
  }

  // Writes the outputs of a chunk.
  __device__ void store(int64_t chunk) const {
    const int count = steps_of(all_.s, chunk);
    for_packs<S, T>(packs_, [&](int row, int t, auto width) {
      constexpr int W = width;
      if (row >= place_.block.channels || t >= count) return;
      const int64_t channel = place_.block.channel + row,
                    at = all_.row(place_.block.sample, channel) + chunk * kChunk + t;
      C u[W], z[W], out[W];
      load_or_zeros<W>(u, all_.u + at, true);
      load_or_zeros<W>(z, all_.z + at, all_.z != nullptr);
      const C D = all_.D[channel];
      for (int k = 0; k < W; ++k) {
        const C y = (all_.s.states > 0 ? memory_.y[row][t + k] : C(0)) + D * u[k];
        out[k] = all_.z ? y * Activations<T>::silu(z[k]) : y;
      }
      msops::store_at_once(all_.out + at, rounded_pack<T>(out));
    });
  }

  const ForwardProblem<T>& all_;
  Memory& memory_;
  const Place<S, T> place_;
  const bool packs_, is_first_;
  C h_[S::kOfLane], decays_[S::kOfLane], total_ = 0;  // total: of dt
};

// Blocks are (blocks of channels, 1, parts).
template <typename S, typename T>
__global__ void __launch_bounds__(S::kThreads) forward_kernel(const ForwardProblem<T> all, bool packs, bool is_first) {
  extern __shared__ __align__(32) unsigned char bytes[];
  ForwardOnGpu<S, T>(all, *reinterpret_cast<typename ForwardOnGpu<S, T>::Memory*>(bytes), packs, is_first).run();
}

template <typename T>
void forward_on_gpu(Call& call, const ForwardProblem<T>& all) {
  with_shape<T>(all.s, [&](auto shape) {
    using S = decltype(shape);
    const bool packs = are_packs<T>(all.s, {all.u, all.delta, all.z, all.out});
    const Grid grid(all.s.blocks(), 1, all.parts);
    const auto kernel = forward_kernel<S, T>;
    const int64_t bytes = sizeof(typename ForwardOnGpu<S, T>::Memory);
    if (all.parts > 1) launch(call, kernel, grid, S::kThreads, bytes, all, packs, true);
    launch(call, kernel, grid, S::kThreads, bytes, all, packs, false);
  });
}

}  // namespace msops::selective_scan
