// On a GPU, a team of lanes writes a row's gradient: it has one part for all experts, and another for those that were
// chosen. Rows that registers hold are read and written once, in packs where these tile a row. Both parts meet in
// shared memory.
#pragma once

#include "lanes_gpu.h"

namespace msops::gating {

// Calls f(place, first, n) for each run of neighbours that a lane holds of a row: `first` is an expert, and its number
// is at `place` among the lane's. Runs are packs, or single numbers where packs do not tile a row.
template <int kLanes, int kHeld, int kWidth, typename F>
__device__ void for_runs(int experts, bool aligned, const F& f) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  if (aligned) {
#pragma unroll
    for (int h = 0; h < kHeld; h += kWidth) {
      const int first = (h / kWidth * kLanes + lane) * kWidth;
      if (first < experts) f(h, first, Constant<kWidth>{});
    }
  } else {
#pragma unroll
    for (int h = 0; h < kHeld; ++h)
      if (h * kLanes + lane < experts) f(h, h * kLanes + lane, Constant<1>{});
  }
}

// What a row's gradient is computed from: a lane has every kLanes-th of the chosen experts. Lanes without a row have no
// experts, but take part in all shuffles.
template <int kLanes, typename T>
struct RowGradient {
  using C = Compute<T>;
  const Gradient<T>& gradient;
  int64_t row;
  int experts;
  Shares<C> shares;

  // Calls f(expert, logit, gradient of the weight before scaling) for this lane's chosen experts.
  template <typename F>
  __device__ void each_chosen(const F& f) const {
    const int lane = static_cast<int>(threadIdx.x) % kLanes, k = static_cast<int>(gradient.all.s.k);
#pragma unroll 1
    for (int i = lane; experts > 0 && i < k; i += kLanes)
      if (const int64_t e = gradient.expert(row, i); e >= 0)
        f(static_cast<int>(e), gradient.all.logit(row, e), C(gradient.all.s.scale) * C(gradient.dweights[row * k + i]));
  }

  __device__ void find_shares_of_chosen() {
    C largest = -C(HUGE_VAL), total = 0;
    each_chosen([&](int, C x, C) { largest = std::fmax(largest, x); });
    shares.shift = Shares<C>::shift_of(largest_over(largest, kLanes));
    each_chosen([&](int, C x, C) { total += gradient.all.term(x, shares); });
    shares.total = sum_over(total, kLanes);
  }

  // Returns the sum of products of the weights and their gradients.
  __device__ C sum() const {
    C sum = 0;
    each_chosen([&](int, C x, C dweight) { sum += shares.share(gradient.all.term(x, shares)) * dweight; });
    return sum_over(sum, kLanes);
  }

  // Writes the gradients of the chosen logits to their places among those of the row.
  __device__ void write_chosen(C sum, T* to) const {
    each_chosen([&](int e, C x, C dweight) {
      assign(to[e], gradient.all.gradient(x, shares.share(gradient.all.term(x, shares)), dweight, sum));
    });
  }
};

template <int kLanes, int kHeld, typename T>
__global__ void __launch_bounds__(kGatingThreads) gradient_kernel(Gradient<T> gradient, bool aligned) {
  using C = Compute<T>;
  constexpr int kWidth = kPackWidth<T>;
  extern __shared__ uint4 shared[];
  const Row<T>& all = gradient.all;
  const int team = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t row = blockIdx.x * int64_t{kGatingThreads / kLanes} + team;
  const int experts = row < gradient.rows ? static_cast<int>(all.experts) : 0;
  T* const memory = reinterpret_cast<T*>(shared + team * ((all.experts + kWidth - 1) / kWidth));
  RowGradient<kLanes, T> own{gradient, row, experts, {}};
  const auto for_own = [&](const auto& f) { for_runs<kLanes, kHeld, kWidth>(experts, aligned, f); };

  C terms[kHeld];
  if (all.s.is_share_of_all()) {
    const T* const logits = all.logits + row * all.experts;
    for (int h = 0; h < kHeld; ++h) terms[h] = -C(HUGE_VAL);
    for_own([&](int h, int first, auto n) {
      const auto pack = load<n>(logits + first);
      for (int j = 0; j < n; ++j) terms[h + j] = C(pack.values[j]);
    });
    C largest = -C(HUGE_VAL), total = 0;
    for (int h = 0; h < kHeld; ++h) largest = std::fmax(largest, terms[h]);
    own.shares.shift = Shares<C>::shift_of(largest_over(largest, kLanes));
    for (int h = 0; h < kHeld; ++h) total += terms[h] = own.shares.term(terms[h]);
    own.shares.total = sum_over(total, kLanes);
  } else {
    for (int h = 0; h < kHeld; ++h) terms[h] = 0;
    if (all.s.renormalize) own.find_shares_of_chosen();
  }
  const C sum = own.sum();
  const C factor = all.s.is_share_of_all() ? -sum * own.shares.share(C(1)) : C(0);
  for_own([&](int h, int first, auto n) {
    C numbers[n];
    for (int j = 0; j < n; ++j) numbers[j] = factor * terms[h + j];
    store(memory + first, rounded_pack<T>(numbers));
  });
  __syncwarp();
  own.write_chosen(sum, memory);
  __syncwarp();
  T* const dlogits = gradient.dlogits + row * all.experts;
  for_own([&](int, int first, auto n) { store(dlogits + first, load<n>(memory + first)); });
}

// A warp reads a row that registers do not hold several times, and writes its gradient in two steps.
template <typename T>
__global__ void __launch_bounds__(kGatingThreads) gradient_of_many_kernel(Gradient<T> gradient) {
  using C = Compute<T>;
  const Row<T>& all = gradient.all;
  const int64_t row = blockIdx.x * int64_t{kGatingThreads / 32} + threadIdx.x / 32;
  if (row >= gradient.rows) return;
  RowGradient<32, T> own{gradient, row, static_cast<int>(all.experts), {}};
  const auto each = [&](const auto& f) {
    for (int e = static_cast<int>(threadIdx.x) % 32; e < own.experts; e += 32) f(e, all.logit(row, e));
  };
  if (all.s.is_share_of_all()) {
    C largest = -C(HUGE_VAL), total = 0;
    each([&](int, C x) { largest = std::fmax(largest, x); });
    own.shares.shift = Shares<C>::shift_of(largest_over(largest, 32));
    each([&](int, C x) { total += own.shares.term(x); });
    own.shares.total = sum_over(total, 32);
  } else if (all.s.renormalize) {
    own.find_shares_of_chosen();
  }
  const C sum = own.sum();
  T* const dlogits = gradient.dlogits + row * all.experts;
  each([&](int e, C x) {
    assign(dlogits[e], all.s.is_share_of_all() ? -sum * own.shares.share(own.shares.term(x)) : C(0));
  });
  __syncwarp();  // other lanes may have written what the chosen get
  own.write_chosen(sum, dlogits);
}

template <int kLanes, int kHeld, typename T>
void launch_gradient(Call& call, const Gradient<T>& gradient) {
  constexpr int kTeams = kGatingThreads / kLanes, kWidth = kPackWidth<T>;
  const int64_t experts = gradient.all.experts;
  const bool aligned =
      experts % kWidth == 0 && is_aligned<kWidth>(gradient.all.logits) && is_aligned<kWidth>(gradient.dlogits);
  launch(call, gradient_kernel<kLanes, kHeld, T>, (gradient.rows + kTeams - 1) / kTeams, kGatingThreads,
         kTeams * ((experts + kWidth - 1) / kWidth) * 16, gradient, aligned);
}

template <typename T>
void gradient_on_gpu(Call& call, const Gradient<T>& gradient) {
  const int64_t experts = gradient.all.experts;
  if (experts <= 64) return launch_gradient<8, 8>(call, gradient);
  if (experts <= 256) return launch_gradient<32, 8>(call, gradient);
  if (experts <= kMostHeld) return launch_gradient<32, 32>(call, gradient);
  launch(call, gradient_of_many_kernel<T>, (gradient.rows + kGatingThreads / 32 - 1) / (kGatingThreads / 32),
         kGatingThreads, 0, gradient);
}

}  // namespace msops::gating
