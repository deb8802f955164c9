// The backward pass on the GPU. A chunk's states are computed again from those before it, which are kept every kSub
// steps; then the block goes back, kSub steps at a time, whose decays and states registers hold. The sums over the
// channels of a block are added in each lane, within warps by shuffles, and over warps through shared memory.
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
    Shared<S, C, kChunk> group;
    C dt[S::kRows][kRow], terms[S::kRows][kRow], dy[S::kRows][kRow];
    Lane kept[kChunk / kSub - 1][S::kEach][S::kThreads];  // states before each run of kSub steps, but the first one
    C sums[2][S::kWarps][2][S::kStates][kSub + 1];        // dB and dC of two such runs
  };

  __device__ BackwardOnGpu(const BackwardProblem<T>& all, Memory& memory, bool packs)
      : Base(all, packs), memory_(memory) {}

  __device__ void run() {
    const int64_t states = all_.s.states;
    const bool is_single = states <= S::kStates;
    for (int64_t chunk = place_.end - 1; chunk >= place_.begin; --chunk) {
      load_steps<S, T>(all_, place_, packs_, chunk, memory_);
      if (is_single || all_.z) advance_all(chunk);  // y, of all states, is for dz alone
      gate(chunk);
      int64_t state = 0;
      do {
        if (!is_single) {
          __syncthreads();  // all threads have read the states before
          load_shared<S, T>(all_, place_, packs_, chunk, state, memory_.group);
        }
        __syncthreads();
        if (!is_single || chunk + 1 == place_.end) begin(chunk, state);
        if (!is_single) advance(chunk, state, false);
        for (int t = kChunk - kSub; t >= 0; t -= kSub) {
          go_back(chunk, state, t);
          __syncthreads();
          add_warps(chunk, state, t);
        }
        if (!is_single || chunk == place_.begin) finish(chunk, state);
        state += S::kStates;
      } while (state < states);
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
    load_decays(all_, place_, state, decays_);
    unrolled<S::kEach, S::kOfLane>([&](int i, int j) { carry_[i][j] = dA_[i][j] = 0; });
    place_.for_states(all_.s, state, [&](int i, int j, int64_t channel, int64_t n) {
      const bool is_first = chunk + 1 == place_.end;
      carry_[i][j] = is_first ? this->start(channel, n, decays_[i][j]) : this->carry(channel, n);
      if (!is_first) dA_[i][j] = of_dA(channel, n);
    });
  }
  __device__ C& of_dA(int64_t channel, int64_t n) const {
    return all_.dA[all_.at_part(place_.part, place_.block.sample, channel, n)];
  }

  // Keeps the carried gradients and the sums of dA for the chunk before this one.
  __device__ void finish(int64_t chunk, int64_t state) const {
    place_.for_states(all_.s, state, [&](int i, int j, int64_t channel, int64_t n) {
      this->carry(channel, n) = carry_[i][j];
      of_dA(channel, n) = dA_[i][j];
      if (chunk == 0 && all_.dinitial.data) all_.dinitial.set(all_.at(place_.block.sample, channel, n), carry_[i][j]);
    });
  }

  // Computes y of a chunk, in place of dy, and keeps the states of the last turn.
  __device__ void advance_all(int64_t chunk) {
    int64_t state = 0;
    do {
      if (state > 0) __syncthreads();  // all threads have read the states before
      load_shared<S, T>(all_, place_, packs_, chunk, state, memory_.group);
      __syncthreads();
      if (all_.s.states > S::kStates || chunk + 1 == place_.end) load_decays(all_, place_, state, decays_);
      advance(chunk, state, all_.z != nullptr);
      state += S::kStates;
    } while (state < all_.s.states);
    __syncthreads();
  }
  // Computes the states of a chunk, of which it keeps those before each run of steps.
  __device__ void advance(int64_t chunk, int64_t state, bool has_y) {
    constexpr int kSums = S::kEach * kSub / S::kLanes;
    Lane h[S::kEach];
    before(chunk, state, h);
    const int end = has_y ? kChunk : kChunk - kSub;
    for (int t = 0; t < end; t += kSub) {
      if (t > 0) keep(t, h);
      Pack<C, kSub> dt[S::kEach], term[S::kEach];
      steps(t, dt, term);
      C y[S::kEach * kSub] = {};
      unrolled<kSub>([&](int k) {
        const auto b = inputs(t + k), c = outputs(t + k);
        unrolled<S::kEach, S::kOfLane>([&](int i, int j) {
          h[i].values[j] =
              Decay<C>::of(dt[i].values[k] * decays_[i][j]) * h[i].values[j] + term[i].values[k] * b.values[j];
          y[i * kSub + k] += c.values[j] * h[i].values[j];
        });
      });
      if (!has_y) continue;
      scatter_sums<S::kLanes>(y);
      for (int k = 0; k < kSums; ++k) {
        const int of_lane = place_.lane * kSums + k;
        C& sum = memory_.dy[place_.row(of_lane / kSub)][t + of_lane % kSub];
        sum = state > 0 ? sum + y[k] : y[k];
      }
    }
    if (!has_y) keep(kChunk - kSub, h);
  }
  // Loads the states before a chunk.
  __device__ void before(int64_t chunk, int64_t state, Lane (&h)[S::kEach]) const {
    unrolled<S::kEach, S::kOfLane>([&](int i, int j) { h[i].values[j] = 0; });
    place_.for_states(all_.s, state, [&](int i, int j, int64_t channel, int64_t n) {
      h[i].values[j] = *all_.saved(place_.block.sample, chunk, channel, n);
    });
  }
  __device__ void keep(int t, const Lane (&h)[S::kEach]) const {
    unrolled<S::kEach>([&](int i) { memory_.kept[t / kSub - 1][i][threadIdx.x] = h[i]; });
  }
  // Loads dt and dt u from step t on.
  template <int kSteps>
  __device__ void steps(int t, Pack<C, kSteps> (&dt)[S::kEach], Pack<C, kSteps> (&term)[S::kEach]) const {
    unrolled<S::kEach>([&](int i) {
      dt[i] = msops::load<kSteps>(memory_.dt[place_.row(i)] + t);
      term[i] = msops::load<kSteps>(memory_.terms[place_.row(i)] + t);
    });
  }
  __device__ Lane inputs(int t) const {
    return msops::load<S::kOfLane>(memory_.group.inputs[t] + place_.lane * S::kOfLane);
  }
  __device__ Lane outputs(int t) const {
    return msops::load<S::kOfLane>(memory_.group.outputs[t] + place_.lane * S::kOfLane);
  }

  // Writes dz of a chunk, and replaces y by dy.
  __device__ void gate(int64_t chunk) const {
    for_packs(
        packs_, place_, all_.s, chunk,
        [&](const Spot& spot, auto width) {
          return load_packs<width>(spot.is_inside, spot.at, all_.dout, all_.z, all_.z ? all_.u : nullptr);
        },
        [&](const Spot& spot, const auto& packs, auto width) {
          constexpr int W = width;
          C dy[W];
          packs.get(0, dy);
          if (all_.z) {
            C z[W], u[W], dz[W];
            packs.get(1, z);
            packs.get(2, u);
            const C D = spot.is_inside ? all_.D[spot.channel] : C(0);
            for (int k = 0; k < W; ++k) {
              const C gate = Activations<T>::sigmoid(z[k]), y = memory_.dy[spot.row][spot.t + k] + D * u[k];
              dz[k] = dy[k] * y * gate * (1 + z[k] * (1 - gate));
              dy[k] *= z[k] * gate;
            }
            if (spot.is_inside) msops::store_at_once(all_.dz + spot.at, rounded_pack<T>(dz));
          }
          for (int k = 0; k < W; ++k) memory_.dy[spot.row][spot.t + k] = dy[k];
        });
  }

  // Goes back over kSub steps from step t + kSub - 1. After the last turn, s1 of each step replaces dt u, and s2 dy.
  __device__ void go_back(int64_t chunk, int64_t state, int t) {
    C factors[kSub][S::kEach][S::kOfLane];
    Lane h[kSub + 1][S::kEach];  // before each step
    if (t == 0) {
      before(chunk, state, h[0]);
    } else {
      unrolled<S::kEach>([&](int i) { h[0][i] = memory_.kept[t / kSub - 1][i][threadIdx.x]; });
    }
    unrolled<kSub / kFour>([&](int four) {
      Pack<C, kFour> dt[S::kEach], term[S::kEach];
      steps(t + four * kFour, dt, term);
      unrolled<kFour>([&](int k) {
        const int step = four * kFour + k;
        const Lane b = inputs(t + step);
        unrolled<S::kEach, S::kOfLane>([&](int i, int j) {
          factors[step][i][j] = Decay<C>::of(dt[i].values[k] * decays_[i][j]);
          h[step + 1][i].values[j] = factors[step][i][j] * h[step][i].values[j] + term[i].values[k] * b.values[j];
        });
      });
    });
    unrolled<kSub / kFour>([&](int back) {
      const int four = kSub / kFour - 1 - back, first = t + four * kFour;
      Pack<C, kFour> dt[S::kEach], term[S::kEach], dy[S::kEach];
      steps(first, dt, term);
      unrolled<S::kEach>([&](int i) { dy[i] = msops::load<kFour>(memory_.dy[place_.row(i)] + first); });
      C s1[S::kEach * kFour] = {}, s2[S::kEach * kFour] = {};
      unrolled<kFour>([&](int from_last) {
        const int k = kFour - 1 - from_last, step = four * kFour + k;
        const Lane b = inputs(t + step), c = outputs(t + step);
        C of_inputs[2 * S::kOfLane] = {};  // dB, then dC
        unrolled<S::kEach, S::kOfLane>([&](int i, int j) {
          const C g = carry_[i][j] + dy[i].values[k] * c.values[j];
          carry_[i][j] = factors[step][i][j] * g;
          const C p = carry_[i][j] * h[step][i].values[j];
          of_inputs[j] += term[i].values[k] * g;
          of_inputs[S::kOfLane + j] += dy[i].values[k] * h[step + 1][i].values[j];
          dA_[i][j] += dt[i].values[k] * p;
          s1[i * kFour + k] += g * b.values[j];
          s2[i * kFour + k] += decays_[i][j] * p;
        });
        scatter_sums<kTeams, S::kLanes>(of_inputs);
        keep_sums(t, step, of_inputs);
      });
      scatter_sums<S::kLanes>(s1);
      scatter_sums<S::kLanes>(s2);
      __syncwarp();  // all lanes of the team have read what the sums replace
      constexpr int kSums = S::kEach * kFour / S::kLanes;
      for (int k = 0; k < kSums; ++k) {
        const int of_lane = place_.lane * kSums + k, i = of_lane / kFour, at = first + of_lane % kFour;
        C sums[2] = {s1[k], s2[k] * Decay<C>::inverse_scale()};
        if (all_.s.states > S::kStates) add_held(i, at, state, sums);
        if (state + S::kStates < all_.s.states) continue;
        memory_.terms[place_.row(i)][at] = sums[0];
        memory_.dy[place_.row(i)][at] = sums[1];
      }
    });
  }

  // Stores the sums over a warp's channels of a step of the kSub from t on. A lane has one of the sums of its states
  // or, where a warp has few teams, several.
  __device__ void keep_sums(int t, int step, const C (&of_inputs)[2 * S::kOfLane]) const {
    constexpr int kSums = 2 * S::kOfLane, kOfThread = kSums > kTeams ? kSums / kTeams : 1;
    const int team = static_cast<int>(threadIdx.x) % 32 / S::kLanes, lanes = kTeams > kSums ? kTeams / kSums : 1;
    if (team % lanes != 0) return;
    for (int k = 0; k < kOfThread; ++k) {
      const int n = team / lanes * kOfThread + k;
      memory_.sums[t / kSub % 2][threadIdx.x / 32][n / S::kOfLane][place_.lane * S::kOfLane + n % S::kOfLane][step] =
          of_inputs[k];
    }
  }

  // Adds s1 and s2 of a step to those of the states before, where a channel's states are taken in several turns.
  __device__ void add_held(int i, int t, int64_t state, C (&sums)[2]) const {
    if (!place_.has(i)) return;
    C* const held =
        all_.held + all_.at_part(place_.part, place_.block.sample, place_.channel(i), 0) / all_.s.states * 2 * kChunk;
    for (int which = 0; which < 2; ++which) {
      C& sum = held[which * kChunk + t];
      sums[which] += state > 0 ? sum : C(0);
      sum = sums[which];
    }
  }

  // Writes dB and dC of kSub steps, summed over the channels of the block.
  __device__ void add_warps(int64_t chunk, int64_t state, int t) const {
    constexpr unsigned kOfThread = 2 * S::kStates * kSub / S::kThreads;  // neighbouring steps
    static_assert(kSub % kOfThread == 0, "a thread has steps of one state");
    const unsigned at = threadIdx.x * kOfThread, i = at % kSub, n = at / kSub % S::kStates,
                   which = at / kSub / S::kStates;
    if (state + n >= all_.s.states) return;
    C sums[kOfThread] = {};
    unrolled<S::kWarps, kOfThread>(
        [&](int warp, int k) { sums[k] += memory_.sums[t / kSub % 2][warp][which][n][i + k]; });
    const int64_t first = chunk * kChunk + t + i,
                  row = all_.row_of_state(place_.block.sample, place_.block.group, state + n);
    C* const to = all_.sums + all_.at_sums(place_.block.index, which, row + first);
    unrolled<kOfThread>([&](int k) {
      if (first + k < all_.s.steps) to[k] = sums[k];
    });
  }

  // Writes du and ddelta of a chunk. It replaces dt by the terms of ddelta_bias, and s1 by the terms of dD.
  __device__ void store(int64_t chunk) const {
    for_packs(
        packs_, place_, all_.s, chunk,
        [&](const Spot& spot, auto width) {
          return load_packs<width>(spot.is_inside, spot.at, all_.dout, all_.z, all_.u, all_.delta);
        },
        [&](const Spot& spot, const auto& packs, auto width) {
          constexpr int W = width;
          C dy[W], u[W], x[W], du[W], ddelta[W];
          this->load_dy(packs, dy);
          packs.get(2, u);
          packs.get(3, x);
          const C bias = spot.is_inside ? all_.bias[spot.channel] : C(0);
          const C D = spot.is_inside ? all_.D[spot.channel] : C(0);
          for (int k = 0; k < W; ++k) {
            const C s1 = memory_.terms[spot.row][spot.t + k], s2 = memory_.dy[spot.row][spot.t + k];
            du[k] = memory_.dt[spot.row][spot.t + k] * s1 + D * dy[k];
            ddelta[k] = s2 + u[k] * s1;
          }
          if (all_.steps.has_softplus)
            for (int k = 0; k < W; ++k) ddelta[k] *= Activations<T>::sigmoid(x[k] + bias);
          for (int k = 0; k < W; ++k) {
            memory_.dt[spot.row][spot.t + k] = spot.is_inside ? ddelta[k] : C(0);
            memory_.terms[spot.row][spot.t + k] = dy[k] * u[k];
          }
          if (!spot.is_inside) return;
          msops::store_at_once(all_.du + spot.at, rounded_pack<T>(du));
          msops::store_at_once(all_.ddelta + spot.at, rounded_pack<T>(ddelta));
        });
  }

  // Adds the terms of dD and ddelta_bias to the lane's sums.
  __device__ void add_steps() {
    unrolled<S::kEach>([&](int i) {
      C of_D = 0, of_bias = 0;
      for (int t = place_.lane; t < kChunk; t += S::kLanes) {
        of_D += memory_.terms[place_.row(i)][t];
        of_bias += memory_.dt[place_.row(i)][t];
      }
      vectors_[0][i] += of_D;
      vectors_[1][i] += of_bias;
    });
  }
  __device__ void store_vectors() {
    unrolled<2, S::kEach>([&](int which, int i) {
      C sum = vectors_[which][i];
#pragma unroll
      for (int distance = S::kLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
      if (place_.has(i) && place_.lane == 0)
        *all_.vector(which, place_.part, place_.block.sample, place_.channel(i)) = sum;
    });
  }

  Memory& memory_;
  C decays_[S::kEach][S::kOfLane], carry_[S::kEach][S::kOfLane], dA_[S::kEach][S::kOfLane];
  C vectors_[2][S::kEach] = {};  // dD and ddelta_bias
};

// Blocks are (blocks of channels, 1, parts). Shared memory has room for four blocks of the widest shape.
template <typename S, typename T>
__global__ void __launch_bounds__(S::kThreads, 256 / S::kThreads)
    backward_kernel(const BackwardProblem<T> all, bool packs) {
  extern __shared__ __align__(32) unsigned char bytes[];
  BackwardOnGpu<S, T>(all, *reinterpret_cast<typename BackwardOnGpu<S, T>::Memory*>(bytes), packs).run();
}

template <typename T>
void backward_on_gpu(Call& call, const BackwardProblem<T>& all) {
  with_shape<true, T>(all.s, [&](auto shape) {
    using S = decltype(shape);
    const bool packs =
        are_packs<T>(all.s, {all.u, all.delta, all.inputs, all.outputs, all.z, all.dout, all.du, all.ddelta, all.dz});
    const Grid grid(all.s.blocks(), 1, all.parts);
    if (all.parts > 1)
      launch(call, ends_kernel<S, T>, grid, S::kThreads, sizeof(typename EndsOnGpu<S, T>::Memory), all, packs);
    launch(call, backward_kernel<S, T>, grid, S::kThreads, sizeof(typename BackwardOnGpu<S, T>::Memory), all, packs);
  });
}

}  // namespace msops::selective_scan
