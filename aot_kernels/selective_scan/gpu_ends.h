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

  __device__ C& end(int64_t part, int64_t channel, int64_t n) const {
    return end_of(all_, part, place_.block.sample, channel, n);
  }
  // Returns the gradient of a state after the part, as far as later parts and the last state give it.
  __device__ C start(int64_t channel, int64_t n, C decay) const {
    C g = all_.dlast[all_.at(place_.block.sample, channel, n)];
    for (int64_t part = all_.parts - 1; part > place_.part; --part)
      g = after_part(decay * end(part, channel, all_.s.states), g, end(part, channel, n));
    return g;
  }
  __device__ C& carry(int64_t channel, int64_t n) const {
    return all_.carry[all_.at_part(place_.part, place_.block.sample, channel, n)];
  }

  // Computes dy from the packs of dout and z, which are the first ones.
  template <int W, int kArrays>
  __device__ void load_dy(const Packs<T, W, kArrays>& packs, C (&dy)[W]) const {
    packs.get(0, dy);
    if (!all_.z) return;
    C z[W];
    packs.get(1, z);
    for (int k = 0; k < W; ++k) dy[k] *= Activations<T>::silu(z[k]);
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
    Shared<S, C, kChunk> group;
    C dt[S::kRows][kRow], terms[S::kRows][kRow], dy[S::kRows][kRow];
  };

  __device__ EndsOnGpu(const BackwardProblem<T>& all, Memory& memory, bool packs) : Base(all, packs), memory_(memory) {}

  __device__ void run() {
    C totals[S::kEach] = {};  // of dt
    for (int64_t chunk = place_.end - 1; chunk >= place_.begin; --chunk) {
      load(chunk);
      for (int64_t state = 0; state < all_.s.states; state += S::kStates) {
        if (state > 0) __syncthreads();  // all threads have read the states before
        load_shared<S, T>(all_, place_, this->packs_, chunk, state, memory_.group);
        __syncthreads();
        walk(chunk, state);
      }
      if (all_.s.states == 0) __syncthreads();
      for (int t = 0; t < kChunk; ++t) unrolled<S::kEach>([&](int i) { totals[i] += memory_.dt[place_.row(i)][t]; });
      __syncthreads();
    }
    if (place_.lane > 0) return;
    for (int i = 0; i < S::kEach; ++i)
      if (place_.has(i)) this->end(place_.part, place_.channel(i), all_.s.states) = totals[i];
  }

 private:
  // Loads dt and dy of a chunk.
  __device__ void load(int64_t chunk) const {
    load_steps<S, T>(all_, place_, this->packs_, chunk, memory_);
    for_packs(
        this->packs_, place_, all_.s, chunk,
        [&](const Spot& spot, auto width) { return load_packs<width>(spot.is_inside, spot.at, all_.dout, all_.z); },
        [&](const Spot& spot, const auto& packs, auto width) {
          constexpr int W = width;
          C dy[W];
          this->load_dy(packs, dy);
          for (int k = 0; k < W; ++k) memory_.dy[spot.row][spot.t + k] = dy[k];
        });
  }

  __device__ void walk(int64_t chunk, int64_t state) const {
    C decays[S::kEach][S::kOfLane], carry[S::kEach][S::kOfLane];
    load_decays(all_, place_, state, decays);
    unrolled<S::kEach, S::kOfLane>([&](int i, int j) { carry[i][j] = 0; });
    if (chunk + 1 < place_.end)
      place_.for_states(all_.s, state,
                        [&](int i, int j, int64_t channel, int64_t n) { carry[i][j] = this->carry(channel, n); });
#pragma unroll 4
    for (int t = kChunk - 1; t >= 0; --t) {
      const auto c = msops::load<S::kOfLane>(memory_.group.outputs[t] + place_.lane * S::kOfLane);
      unrolled<S::kEach>([&](int i) {
        const C dt = memory_.dt[place_.row(i)][t], dy = memory_.dy[place_.row(i)][t];
        unrolled<S::kOfLane>(
            [&](int j) { carry[i][j] = Decay<C>::of(dt * decays[i][j]) * (carry[i][j] + dy * c.values[j]); });
      });
    }
    place_.for_states(all_.s, state, [&](int i, int j, int64_t channel, int64_t n) {
      (chunk > place_.begin ? this->carry(channel, n) : this->end(place_.part, channel, n)) = carry[i][j];
    });
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
