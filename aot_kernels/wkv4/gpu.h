// A thread walks over the steps of a channel, or of a part of them, and loads some steps ahead. Blocks have one warp,
// so that even few channels spread over the GPU.
//
// Where several parts share a channel, a first launch computes what each part's own steps add to the state, or to its
// gradient; in the second, each part begins with the sum of these over the parts before it.
#pragma once

#include "passes.h"
#ifdef __CUDACC__
#include "../common/gpu/unrolled.h"

namespace msops::wkv4 {

constexpr int kLanes = 32;

inline Grid grid_of(const Sizes& s) { return Grid(s.samples * ((s.channels + kLanes - 1) / kLanes), 1, s.parts()); }

// Place says what a thread works on: blocks are (strips of channels of all samples, 1, parts).
struct Place {
  int64_t sample, channel, begin, end;  // of its steps

  __device__ explicit Place(const Sizes& s) {
    const int64_t strips = (s.channels + kLanes - 1) / kLanes, runs = s.runs();
    sample = blockIdx.x / strips;
    channel = blockIdx.x % strips * kLanes + threadIdx.x;
    begin = first_step(s, runs, blockIdx.z);
    end = first_step(s, runs, blockIdx.z + 1);
  }
  static __device__ int64_t first_step(const Sizes& s, int64_t runs, int64_t part) {
    const int64_t step = kEvery * part_begin<int64_t>(runs, part, gridDim.z);
    return step < s.steps ? step : s.steps;
  }
};

// Ahead holds elements of some neighbouring steps of a channel, of several inputs.
template <int kInputs, int kSteps, typename T>
struct Ahead {
  T values[kSteps][kInputs];

  __device__ __forceinline__ void load(const T* const (&from)[kInputs], int64_t stride, int64_t step, int64_t end) {
    unrolled<kSteps, kInputs>(
        [&](int i, int n) { values[i][n] = step + i < end && step + i >= 0 ? from[n][(step + i) * stride] : T(0); });
  }
};

template <bool kIsFirst, typename T>
__global__ void __launch_bounds__(kLanes) forward_kernel(const Forward<T> all) {
  using C = Compute<T>;
  constexpr int kSteps = 8;
  const Sizes& s = all.s;
  const Place here(s);
  if (here.channel >= s.channels) return;
  const Weights<T> weights = Weights<T>::of(all.w[here.channel], all.u[here.channel]);
  State<T> state;
  const int64_t of_part = 3 * s.samples * s.channels;
  if constexpr (!kIsFirst) {
    state = all.start(here.sample, here.channel);
    const int64_t runs = s.runs();
    for (int part = 0; part < static_cast<int>(blockIdx.z); ++part) {
      const C* const from = all.parts + part * of_part + s.at_state(here.sample, here.channel);
      const int64_t steps = Place::first_step(s, runs, part + 1) - Place::first_step(s, runs, part);
      state.add(C(steps) * weights.w, from[2 * s.channels], from[0], from[s.channels]);
    }
  }
  const int64_t offset = s.at(here.sample, 0, here.channel);
  const T* const inputs[] = {all.k + offset, all.v + offset};
  T* const y = all.y + offset;
  Ahead<2, kSteps, T> now, next;
  next.load(inputs, s.channels, here.begin, here.end);
  for (int64_t t = here.begin; t < here.end; t += kSteps) {
    now = next;
    next.load(inputs, s.channels, t + kSteps, here.end);
    if (!kIsFirst && t % kEvery == 0) all.keep(here.sample, t / kEvery, here.channel, state);
    unrolled<kSteps>([&](int i) {
      if (t + i >= here.end) return;
      const C k = C(now.values[i][0]), v = C(now.values[i][1]);
      if (!kIsFirst) assign(y[(t + i) * s.channels], state.mean(weights, k, v));
      state.step(weights, k, v);
    });
  }
  if (kIsFirst) return all.put(all.parts + blockIdx.z * of_part + s.at_state(here.sample, here.channel), state);
  if (here.end < s.steps) return;
  if (s.steps % kEvery == 0) all.keep(here.sample, s.steps / kEvery, here.channel, state);
  all.finish(here.sample, here.channel, state);
}

// Returns the gradient of the state after a part.
template <typename T>
__device__ __forceinline__ Carry<T> carry_after(const Backward<T>& all, const Place& here, Compute<T> decay) {
  using C = Compute<T>;
  const Sizes& s = all.s;
  const int last = static_cast<int>(gridDim.z) - 1;
  Carry<T> carry = all.start(here.sample, here.channel);
  for (int part = last; part > static_cast<int>(blockIdx.z); --part) {
    const C* const from = all.parts + 3 * part * s.samples * s.channels + s.at_state(here.sample, here.channel);
    const Carry<T> own{from[0], from[s.channels], from[2 * s.channels]};
    if (part == last) {  // the last part began with the gradient of the last state
      carry = own;
      continue;
    }
    const int64_t runs = s.runs();
    const int64_t begin = Place::first_step(s, runs, part), end = Place::first_step(s, runs, part + 1);
    const C before = all.kept_state(here.sample, begin / kEvery, here.channel).o;
    const C after = all.kept_state(here.sample, end / kEvery, here.channel).o;
    const C factor = Activations<T>::exp(C(end - begin) * decay + before - after);
    carry = {own.p + factor * carry.p, own.q + factor * carry.q, own.o * carry.o};
  }
  return carry;
}

template <bool kIsFirst, typename T>
__global__ void __launch_bounds__(kLanes) backward_kernel(const Backward<T> all) {
  using C = Compute<T>;
  constexpr int kSteps = sizeof(T) == 8 ? 4 : 8;
  __shared__ C saved[kEvery][3][kLanes];  // the states before the steps of a run
  const Sizes& s = all.s;
  const Place here(s);
  if (here.channel >= s.channels) return;
  const int lane = threadIdx.x;
  const Weights<T> weights = Weights<T>::of(all.w[here.channel], all.u[here.channel]);
  const int64_t offset = s.at(here.sample, 0, here.channel);
  const T* const inputs[] = {all.k + offset, all.v + offset};
  const T* const all_inputs[] = {all.k + offset, all.v + offset, all.dy + offset};
  T *const dk = all.dk + offset, *const dv = all.dv + offset;
  // In the first launch, an exponent's gradient of 1 tells whether the part hands it on.
  Carry<T> carry{C(0), C(0), C(1)};
  if (!kIsFirst || here.end == s.steps) carry = carry_after(all, here, weights.w);
  Sum<C> dw, du;
  Ahead<2, kSteps, T> ahead;
  const int64_t first_run = here.begin / kEvery, runs = (here.end + kEvery - 1) / kEvery;
  ahead.load(inputs, s.channels, (runs - 1) * kEvery, here.end);
  for (int64_t run = runs - 1; run >= first_run; --run) {
    const int64_t begin = run * kEvery, end = begin + kEvery < here.end ? begin + kEvery : here.end;
    const int64_t last = begin + (end - begin - 1) / kSteps * kSteps;
    Ahead<3, kSteps, T> back, next;
    next.load(all_inputs, s.channels, last, end);

    // Phase 1: compute the states again.
    State<T> state = all.kept_state(here.sample, run, here.channel);
    for (int64_t t = begin; t < end; t += kSteps) {
      const Ahead<2, kSteps, T> now = ahead;
      ahead.load(inputs, s.channels, t + kSteps < end ? t + kSteps : begin - kEvery, end);
      unrolled<kSteps>([&](int i) {
        C(&to)[3][kLanes] = saved[(t - begin) + i];
        to[0][lane] = state.p;
        to[1][lane] = state.q;
        to[2][lane] = state.o;
        state.step(weights, C(now.values[i][0]), C(now.values[i][1]));
      });
    }

    // Phase 2: walk back.
    C of_w = 0, of_u = 0;
    for (int64_t t = last; t >= begin; t -= kSteps) {
      back = next;
      if (t > begin) next.load(all_inputs, s.channels, t - kSteps, end);
      unrolled<kSteps>([&](int n) {
        const int i = kSteps - 1 - n;
        if (t + i >= end) return;
        const C(&from)[3][kLanes] = saved[(t - begin) + i];
        const State<T> before{from[0][lane], from[1][lane], from[2][lane]};
        C of_k, of_v;
        carry.step(weights, before, C(back.values[i][0]), C(back.values[i][1]), C(back.values[i][2]), of_k, of_v, of_w,
                   of_u);
        if (kIsFirst) return;
        assign(dk[(t + i) * s.channels], of_k);
        assign(dv[(t + i) * s.channels], of_v);
      });
    }
    dw += of_w;
    du += of_u;
  }
  if (kIsFirst) {
    C* const to = all.parts + 3 * blockIdx.z * s.samples * s.channels + s.at_state(here.sample, here.channel);
    to[0] = carry.p;
    to[s.channels] = carry.q;
    to[2 * s.channels] = carry.o;
    return;
  }
  const int64_t sum = (here.sample * gridDim.z + blockIdx.z) * s.channels + here.channel;
  all.dw[sum] = of_raw(dw.total(), weights.w);
  all.du[sum] = du.total();
  if (here.begin == 0) all.finish(here.sample, here.channel, carry);
}

}  // namespace msops::wkv4
#endif
