// Where blocks share rows, a first kernel of the backward pass computes what each part of the steps adds to the
// gradient of the states before it, which the parts before it need. Gradient is what this kernel and the main one have
// in common.
#pragma once

#include "gpu.h"

namespace msops::selective_scan {

template <typename S, typename T>
class Gradient {
 public:
  using C = Compute<T>;

 protected:
  __device__ Gradient(const BackwardProblem<T>& all, bool packs) : all_(all), place_(all), packs_(packs) {}

  __device__ C& end(int64_t part, int64_t n) const { return end_of(all_, place_, part, n); }

  // Loads dt, dt u and dy of a chunk.
  template <typename Memory>
  __device__ void load(int64_t chunk, Memory& memory) const {
    load_steps(all_, place_, packs_, chunk, memory, [&](int row, int t, int64_t at, bool is_inside, auto width) {
      constexpr int W = width;
      C z[W], dout[W];
      load_or_zeros<W>(dout, all_.dout + at, is_inside);
      load_or_zeros<W>(z, all_.z + at, is_inside && all_.z);
      for (int k = 0; k < W; ++k) memory.dy[row][t + k] = all_.z ? dout[k] * Activations<T>::silu(z[k]) : dout[k];
    });
  }

  // Returns the gradient of a state after the part, as far as later parts and the last state give it.
  __device__ C start(int64_t n, C decay) const {
    C g = all_.dlast[all_.at(place_.block.sample, place_.channel, n)];
    for (int64_t part = all_.parts - 1; part > place_.part; --part)
      g = after_part(decay * end(part, all_.s.states), g, end(part, n));
    return g;
  }
  __device__ C& carry(int64_t n) const {
    return all_.carry[all_.at_part(place_.part, place_.block.sample, place_.channel, n)];
  }

  const BackwardProblem<T>& all_;
  const Place<S, T> place_;
  const bool packs_;
};

// Computes what a part gives to the gradients of the states before it, if it gets zeros from those after it.
template <typename S, typename T>
class EndsOnGpu : Gradient<S, T> {
  using Base = Gradient<S, T>;
  using Base::all_, Base::place_;

 public:
  using C = Compute<T>;
  struct Memory {
    Shared<S, C> group;
    C dt[S::kRows][S::kRow], terms[S::kRows][S::kRow], dy[S::kRows][S::kRow];
  };

  __device__ EndsOnGpu(const BackwardProblem<T>& all, Memory& memory, bool packs) : Base(all, packs), memory_(memory) {}

  __device__ void run() {
    C total = 0;  // of dt
    for (int64_t chunk = place_.end - 1; chunk >= place_.begin; --chunk) {
      this->load(chunk, memory_);
      for (int64_t state = 0; state < all_.s.states; state += S::kStates) {
        if (state > 0) __syncthreads();  // all threads have read the states before
        load_shared<S>(static_cast<const Problem<T>&>(all_), place_.block, chunk, state, memory_.group);
        __syncthreads();
        walk(chunk, state);
      }
      if (all_.s.states == 0) __syncthreads();
      for (int t = 0; t < kChunk; ++t) total += memory_.dt[place_.row][t];
      __syncthreads();
    }
    if (place_.is_inside && place_.lane == 0) this->end(place_.part, all_.s.states) = total;
  }

 private:
  __device__ void walk(int64_t chunk, int64_t state) const {
    const int count = place_.count(all_, state), lane = place_.lane;
    const int64_t first = state + lane * S::kOfLane;
    C decays[S::kOfLane], carry[S::kOfLane];
    load_decays(all_, place_, state, decays);
    for (int j = 0; j < S::kOfLane; ++j) carry[j] = j < count && chunk + 1 < place_.end ? this->carry(first + j) : C(0);
#pragma unroll 4
    for (int t = kChunk - 1; t >= 0; --t) {
      const C dt = memory_.dt[place_.row][t], dy = memory_.dy[place_.row][t];
      const auto c = msops::load<S::kOfLane>(memory_.group.outputs[t] + lane * S::kOfLane);
      for (int j = 0; j < S::kOfLane; ++j) carry[j] = Decay<C>::of(dt * decays[j]) * (carry[j] + dy * c.values[j]);
    }
    for (int j = 0; j < S::kOfLane; ++j) {
      if (j >= count) continue;
      (chunk > place_.begin ? this->carry(first + j) : this->end(place_.part, first + j)) = carry[j];
    }
  }

  Memory& memory_;
};

// Blocks are (blocks of channels, 1, parts).
template <typename S, typename T>
__global__ void __launch_bounds__(S::kThreads) ends_kernel(const BackwardProblem<T> all, bool packs) {
  extern __shared__ __align__(32) unsigned char bytes[];
  EndsOnGpu<S, T>(all, *reinterpret_cast<typename EndsOnGpu<S, T>::Memory*>(bytes), packs).run();
}

}  // namespace msops::selective_scan
