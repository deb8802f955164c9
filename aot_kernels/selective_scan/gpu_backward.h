// The backward pass on the GPU. A chunk's states are computed again from those before it, which are kept every kSub
// steps; then the block goes back, kSub steps at a time, whose decays and products registers hold. The sums over the
// channels of a block are added within warps by shuffles, and over warps through shared memory.
#pragma once

#include "gpu_ends.h"

namespace msops::selective_scan {

template <typename S, typename T>
class BackwardOnGpu : Gradient<S, T> {
  using Base = Gradient<S, T>;
  using Base::all_, Base::place_, Base::packs_;

 public:
  using C = Compute<T>;
  static constexpr int kSub = sizeof(C) == 8 ? 4 : 8, kFour = 4, kTeams = 32 / S::kLanes;  // kTeams: of a warp
  using Lane = Pack<C, S::kOfLane>;
  struct Memory {
    Shared<S, C> group;
    C dt[S::kRows][S::kRow], terms[S::kRows][S::kRow], dy[S::kRows][S::kRow], y[S::kRows][S::kRow];
    Lane kept[kChunk / kSub - 1][S::kThreads];   // states before each run of kSub steps, from the second one on
    C sums[S::kWarps][2][S::kStates][kSub + 1];  // dB and dC of such a run
  };

  __device__ BackwardOnGpu(const BackwardProblem<T>& all, Memory& memory, bool packs)
      : Base(all, packs), memory_(memory) {}

  __device__ void run() {
    const int64_t states = all_.s.states;
    const bool is_single = states <= S::kStates;
    for (int64_t chunk = place_.end - 1; chunk >= place_.begin; --chunk) {
      this->load(chunk, memory_);
      for (int64_t state = 0; state < states; state += S::kStates) {
        const bool is_last = state + S::kStates >= states;
        load_shared<S>(static_cast<const Problem<T>&>(all_), place_.block, chunk, state, memory_.group);
        __syncthreads();
        if (!is_single || chunk + 1 == place_.end) begin(chunk, state);
        advance(chunk, state);
        for (int t = kChunk - kSub; t >= 0; t -= kSub) {
          go_back(chunk, state, t, is_last);
          __syncthreads();
          add_warps(chunk, state, t);
          __syncthreads();
        }
        if (!is_single || chunk == place_.begin) finish(chunk, state);
      }
      if (states == 0) clear();
      store(chunk);
      __syncthreads();
      add_steps();
      __syncthreads();
    }
    store_vectors();
  }

 private:
  // Begins a chunk with the gradients of its last states that later chunks give, and with the sums of dA so far.
  __device__ void begin(int64_t chunk, int64_t state) {
    const int count = place_.count(all_, state);
    const int64_t first = state + place_.lane * S::kOfLane;
    load_decays(all_, place_, state, decays_);
    for (int j = 0; j < S::kOfLane; ++j) {
      carry_[j] = dA_[j] = 0;
      if (j >= count) continue;
      const bool is_first = chunk + 1 == place_.end;
      carry_[j] = is_first ? this->start(first + j, decays_[j]) : this->carry(first + j);
      if (!is_first) dA_[j] = of_dA(first + j);
    }
  }
  __device__ C& of_dA(int64_t n) const {
    return all_.dA[all_.at_part(place_.part, place_.block.sample, place_.channel, n)];
  }

  // Keeps the carried gradients and the sums of dA for the chunk before this one.
  __device__ void finish(int64_t chunk, int64_t state) const {
    const int count = place_.count(all_, state);
    const int64_t first = state + place_.lane * S::kOfLane;
    for (int j = 0; j < S::kOfLane; ++j) {
      if (j >= count) continue;
      this->carry(first + j) = carry_[j];
      of_dA(first + j) = dA_[j];
      if (chunk == 0 && all_.dinitial.data)
        all_.dinitial.set(all_.at(place_.block.sample, place_.channel, first + j), carry_[j]);
    }
  }

  // Computes y and the states of a chunk, of which it keeps those before each run of steps.
  __device__ void advance(int64_t chunk, int64_t state) {
    const int row = place_.row, lane = place_.lane;
    Lane h = before(chunk, state);
    const int end = all_.z ? kChunk : kChunk - kSub;  // y is for dz alone
    for (int t = 0; t < end; t += kFour) {
      if (t > 0 && t % kSub == 0) memory_.kept[t / kSub - 1][threadIdx.x] = h;
      const auto dt = msops::load<kFour>(memory_.dt[row] + t), term = msops::load<kFour>(memory_.terms[row] + t);
      C y[kFour] = {};
      unrolled<kFour>([&](int i) {
        const auto b = inputs(t + i), c = outputs(t + i);
        for (int j = 0; j < S::kOfLane; ++j) {
          h.values[j] = Decay<C>::of(dt.values[i] * decays_[j]) * h.values[j] + term.values[i] * b.values[j];
          y[i] += c.values[j] * h.values[j];
        }
      });
      if (!all_.z) continue;
      scatter_sums<S::kLanes>(y);
      for (int k = 0; k < kFour / S::kLanes; ++k) {
        C& sum = memory_.y[row][t + lane * (kFour / S::kLanes) + k];
        sum = state > 0 ? sum + y[k] : y[k];
      }
    }
    if (!all_.z) memory_.kept[kChunk / kSub - 2][threadIdx.x] = h;
  }
  // Returns the states before a chunk.
  __device__ Lane before(int64_t chunk, int64_t state) const {
    const int count = place_.count(all_, state);
    const C* const from = all_.saved(place_.block.sample, chunk, place_.channel, state + place_.lane * S::kOfLane);
    Lane h;
    for (int j = 0; j < S::kOfLane; ++j) h.values[j] = j < count ? from[j] : C(0);
    return h;
  }
  __device__ Lane inputs(int t) const {
    return msops::load<S::kOfLane>(memory_.group.inputs[t] + place_.lane * S::kOfLane);
  }
  __device__ Lane outputs(int t) const {
    return msops::load<S::kOfLane>(memory_.group.outputs[t] + place_.lane * S::kOfLane);
  }

  // Goes back over kSub steps from step t + kSub - 1. It replaces dt u of each step by s1, and dy by s2.
  __device__ void go_back(int64_t chunk, int64_t state, int t, bool is_last) {
    const int row = place_.row, lane = place_.lane;
    C factors[kSub][S::kOfLane], products[kSub][S::kOfLane];
    Lane h = t == 0 ? before(chunk, state) : memory_.kept[t / kSub - 1][threadIdx.x];
    unrolled<kSub / kFour>([&](int half) {
      const int first = t + half * kFour;
      const auto dt = msops::load<kFour>(memory_.dt[row] + first),
                 term = msops::load<kFour>(memory_.terms[row] + first);
      unrolled<kFour>([&](int k) {
        const int i = half * kFour + k;
        const Lane b = inputs(t + i);
        for (int j = 0; j < S::kOfLane; ++j) {
          factors[i][j] = Decay<C>::of(dt.values[k] * decays_[j]);
          products[i][j] = factors[i][j] * h.values[j];
          h.values[j] = products[i][j] + term.values[k] * b.values[j];
        }
      });
    });
    unrolled<kSub / kFour>([&](int back) {
      const int half = kSub / kFour - 1 - back, first = t + half * kFour;
      const auto dt = msops::load<kFour>(memory_.dt[row] + first),
                 term = msops::load<kFour>(memory_.terms[row] + first);
      const auto dy = msops::load<kFour>(memory_.dy[row] + first);
      C s1[kFour] = {}, s2[kFour] = {};
      unrolled<kFour>([&](int from_last) {
        const int k = kFour - 1 - from_last, i = half * kFour + k;
        const Lane b = inputs(t + i), c = outputs(t + i);
        C of_inputs[2 * S::kOfLane];  // dB, then dC
        for (int j = 0; j < S::kOfLane; ++j) {
          const C g = carry_[j] + dy.values[k] * c.values[j], p = g * products[i][j];
          of_inputs[j] = term.values[k] * g;
          of_inputs[S::kOfLane + j] = dy.values[k] * (products[i][j] + term.values[k] * b.values[j]);
          dA_[j] += dt.values[k] * p;
          s1[k] += g * b.values[j];
          s2[k] += decays_[j] * p;
          carry_[j] = factors[i][j] * g;
        }
        scatter_sums<kTeams, S::kLanes>(of_inputs);
        keep(i, of_inputs);
      });
      scatter_sums<S::kLanes>(s1);
      scatter_sums<S::kLanes>(s2);
      __syncwarp();  // all lanes of the team have read what the sums replace
      for (int k = 0; k < kFour / S::kLanes; ++k) {
        const int at = first + lane * (kFour / S::kLanes) + k;
        C sums[2] = {s1[k], s2[k] * Decay<C>::inverse_scale()};
        if (all_.s.states > S::kStates) add_held(at, state, sums);
        if (!is_last) continue;
        memory_.terms[row][at] = sums[0];
        memory_.dy[row][at] = sums[1];
      }
    });
  }

  // Stores the sums over a warp's channels of the i-th of kSub steps. A lane has one of the sums of its states or,
  // where a warp has few teams, several.
  __device__ void keep(int i, const C (&of_inputs)[2 * S::kOfLane]) {
    constexpr int kSums = 2 * S::kOfLane, kEach = kSums > kTeams ? kSums / kTeams : 1;
    const int team = static_cast<int>(threadIdx.x) % 32 / S::kLanes, lanes = kTeams > kSums ? kTeams / kSums : 1;
    if (team % lanes != 0) return;
    for (int k = 0; k < kEach; ++k) {
      const int n = team / lanes * kEach + k;
      memory_.sums[threadIdx.x / 32][n / S::kOfLane][place_.lane * S::kOfLane + n % S::kOfLane][i] = of_inputs[k];
    }
  }

  // Adds s1 and s2 of a step to those of the states before, where a channel's states are taken in several turns.
  __device__ void add_held(int t, int64_t state, C (&sums)[2]) const {
    if (!place_.is_inside) return;
    C* const held =
        all_.held + all_.at_part(place_.part, place_.block.sample, place_.channel, 0) / all_.s.states * 2 * kChunk;
    for (int which = 0; which < 2; ++which) {
      C& sum = held[which * kChunk + t];
      sums[which] += state > 0 ? sum : C(0);
      sum = sums[which];
    }
  }

  // Writes dB and dC of kSub steps, summed over the channels of the block.
  __device__ void add_warps(int64_t chunk, int64_t state, int t) const {
    const int count = steps_of(all_.s, chunk);
    for (int k = static_cast<int>(threadIdx.x); k < 2 * S::kStates * kSub; k += S::kThreads) {
      const int i = k % kSub, n = k / kSub % S::kStates, which = k / kSub / S::kStates;
      if (t + i >= count || state + n >= all_.s.states) continue;
      C sum = 0;
      for (int warp = 0; warp < S::kWarps; ++warp) sum += memory_.sums[warp][which][n][i];
      const int64_t row = all_.row_of_state(place_.block.sample, place_.block.group, state + n);
      all_.sums[all_.at_sums(place_.block.index, which, row + chunk * kChunk + t + i)] = sum;
    }
  }

  // Sets the sums over the states where there are none.
  __device__ void clear() {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < S::kRows * kChunk; i += S::kThreads)
      memory_.terms[i / kChunk][i % kChunk] = memory_.dy[i / kChunk][i % kChunk] = memory_.y[i / kChunk][i % kChunk] =
          0;
    __syncthreads();
  }

  // Writes du, ddelta and dz of a chunk. It replaces dt by the terms of ddelta_bias, and y by the terms of dD.
  __device__ void store(int64_t chunk) const {
    const int count = steps_of(all_.s, chunk);
    for_packs<S, T>(packs_, [&](int row, int t, auto width) {
      constexpr int W = width;
      const bool is_inside = row < place_.block.channels && t < count;
      const int64_t channel = place_.block.channel + row,
                    at = all_.row(place_.block.sample, channel) + chunk * kChunk + t;
      C u[W], delta[W], z[W], dout[W], du[W], ddelta[W], dz[W];
      load_or_zeros<W>(u, all_.u + at, is_inside);
      load_or_zeros<W>(delta, all_.delta + at, is_inside);
      load_or_zeros<W>(dout, all_.dout + at, is_inside);
      load_or_zeros<W>(z, all_.z + at, is_inside && all_.z);
      const C bias = is_inside ? all_.bias[channel] : C(0), D = is_inside ? all_.D[channel] : C(0);
      for (int k = 0; k < W; ++k) {
        const C s1 = memory_.terms[row][t + k], s2 = memory_.dy[row][t + k];
        const C dy = all_.z ? dout[k] * Activations<T>::silu(z[k]) : dout[k];
        du[k] = memory_.dt[row][t + k] * s1 + D * dy;
        ddelta[k] = (s2 + u[k] * s1) * all_.steps.slope(delta[k] + bias);
        dz[k] = all_.z ? Activations<T>::silu_gradient(z[k], dout[k] * (memory_.y[row][t + k] + D * u[k])) : C(0);
        memory_.dt[row][t + k] = is_inside ? ddelta[k] : C(0);
        memory_.y[row][t + k] = dy * u[k];
      }
      if (!is_inside) return;
      msops::store_at_once(all_.du + at, rounded_pack<T>(du));
      msops::store_at_once(all_.ddelta + at, rounded_pack<T>(ddelta));
      if (all_.z) msops::store_at_once(all_.dz + at, rounded_pack<T>(dz));
    });
  }

  // Adds the terms of dD and ddelta_bias to the lane's sums.
  __device__ void add_steps() {
    C of_D = 0, of_bias = 0;
    for (int t = place_.lane; t < kChunk; t += S::kLanes) {
      of_D += memory_.y[place_.row][t];
      of_bias += memory_.dt[place_.row][t];
    }
    dD_ += of_D;
    dbias_ += of_bias;
  }
  __device__ void store_vectors() const {
    C sums[2] = {dD_, dbias_};
#pragma unroll
    for (int distance = S::kLanes / 2; distance > 0; distance /= 2)
      for (C& sum : sums) sum += __shfl_xor_sync(~0u, sum, distance);
    if (!place_.is_inside || place_.lane > 0) return;
    for (int which = 0; which < 2; ++which)
      *all_.vector(which, place_.part, place_.block.sample, place_.channel) = sums[which];
  }

  Memory& memory_;
  C decays_[S::kOfLane], carry_[S::kOfLane], dA_[S::kOfLane], dD_ = 0, dbias_ = 0;
};

// Blocks are (blocks of channels, 1, parts). Shared memory has room for 384 threads of a multiprocessor.
template <typename S, typename T>
__global__ void __launch_bounds__(S::kThreads, sizeof(Compute<T>) == 8 ? 8 : 384 / S::kThreads)
    backward_kernel(const BackwardProblem<T> all, bool packs) {
  extern __shared__ __align__(32) unsigned char bytes[];
  BackwardOnGpu<S, T>(all, *reinterpret_cast<typename BackwardOnGpu<S, T>::Memory*>(bytes), packs).run();
}

template <typename T>
void backward_on_gpu(Call& call, const BackwardProblem<T>& all) {
  with_shape<T>(all.s, [&](auto shape) {
    using S = decltype(shape);
    const bool packs = are_packs<T>(all.s, {all.u, all.delta, all.z, all.dout, all.du, all.ddelta, all.dz});
    const Grid grid(all.s.blocks(), 1, all.parts);
    if (all.parts > 1)
      launch(call, ends_kernel<S, T>, grid, S::kThreads, sizeof(typename EndsOnGpu<S, T>::Memory), all, packs);
    launch(call, backward_kernel<S, T>, grid, S::kThreads, sizeof(typename BackwardOnGpu<S, T>::Memory), all, packs);
  });
}

}  // namespace msops::selective_scan
