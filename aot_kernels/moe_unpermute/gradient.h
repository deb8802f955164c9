// The gradients of moe_unpermute. A slot owns its row, and alone writes the row's gradient: one of them does, if
// several slots have the row. A warp, or a CPU thread, takes all slots of a token, so that dout comes from memory once.
#pragma once

#include "../shared/routing/spread.h"

namespace msops::routing {

template <typename T>
struct UnpermuteGradients {
  using C = Compute<T>;
  Slots slots;
  OptionalNumbers<T> weights;
  const T *rows, *dout;
  T* drows;
  Numbers<T> dweights;  // absent beside absent weights
  int32_t* owners;      // (rows): the slot that owns a row, or -1
};

struct HasOwner {
  const int32_t* owners;
  MSOPS_BOTH bool operator()(int64_t row) const { return owners[row] >= 0; }
};

// Index i is a slot.
struct FindOwners {
  Slots slots;
  int32_t* owners;

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const int64_t row = slots.row(i);
    if (row >= 0) owners[row] = static_cast<int32_t>(i);
  }
};

template <typename T>
struct GradientsOnCpu {
  using C = Compute<T>;
  UnpermuteGradients<T> all;

  MSOPS_CPU void operator()(int64_t token) const {
    for (int64_t j = 0; j < all.slots.choices; ++j) {
      const int64_t slot = token * all.slots.choices + j, row = all.slots.row(slot);
      const C product = row < 0 ? C(0) : of_slot(token, slot, row);
      if (all.dweights.data) all.dweights.set(slot, product);
    }
  }

 private:
  // Writes the gradient of the slot's row, and returns the product of the row and dout, if there are weights.
  MSOPS_CPU C of_slot(int64_t token, int64_t slot, int64_t row) const {
    const int64_t columns = all.slots.columns;
    const bool owns = all.owners[row] == slot, has_weights = all.dweights.data;
    const T *const dout = all.dout + token * columns, *const of_row = all.rows + row * columns;
    T* const drow = all.drows + row * columns;
    const T* const next_row = all.slots.run_after(slot, all.rows, 0, of_row);
    const T* const next_drow = all.slots.run_after(slot, static_cast<const T*>(all.drows), 0, drow);
    const C weight = all.weights[slot];
    C sums[kVector] = {};
    for_vectors(columns, [&](int64_t c, auto n) {
      C d[kVector], numbers[kVector];
      widen(dout + c, d, n);
      if (has_weights) {
        __builtin_prefetch(next_row + c);
        widen(of_row + c, numbers, n);
#pragma omp simd
        for (int k = 0; k < n; ++k) sums[k] += d[k] * numbers[k];
      }
      if (owns) {
        __builtin_prefetch(next_drow + c, 1);
#pragma omp simd
        for (int k = 0; k < n; ++k) numbers[k] = weight * d[k];
        narrow(numbers, drow + c, n);
      }
    });
    for (int half = kVector / 2; half > 0; half /= 2)
      for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
    return sums[0];
  }
};

#ifdef __CUDACC__
constexpr int kGradientThreads = 128;

template <int W, typename T>
__global__ void __launch_bounds__(kGradientThreads) gradients_kernel(UnpermuteGradients<T> all) {
  using C = Compute<T>;
  constexpr int kAtOnce = 4, kPacks = 2;  // slots, and packs of each, that a lane loads before it works on them
  const Slots& slots = all.slots;
  const int64_t token = blockIdx.x * int64_t{kGradientThreads / 32} + threadIdx.x / 32, columns = slots.columns;
  const int lane = threadIdx.x % 32;
  if (token >= slots.tokens) return;
  const T* const dout = all.dout + token * columns;
  for (int64_t first = 0; first < slots.choices; first += kAtOnce) {
    int64_t rows[kAtOnce];
    C weights[kAtOnce], sums[kAtOnce];
    unsigned own = 0;  // a bit for each slot that owns its row
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int64_t slot = token * slots.choices + first + j;
      rows[j] = first + j < slots.choices ? slots.row(slot) : -1;
      weights[j] = rows[j] >= 0 ? all.weights[slot] : C(0);
      own |= rows[j] >= 0 && all.owners[rows[j]] == slot ? 1u << j : 0u;
      sums[j] = 0;
    }
    for (int64_t c = lane * W; c < columns; c += kPacks * 32 * W) {
      Pack<T, W> d[kPacks], of_rows[kAtOnce][kPacks];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) d[i] = c + i * 32 * W < columns ? load<W>(dout + c + i * 32 * W) : Pack<T, W>{};
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const T* const from = all.rows + rows[j] * columns + c;
#pragma unroll
        for (int i = 0; i < kPacks; ++i)
          of_rows[j][i] = rows[j] >= 0 && c + i * 32 * W < columns ? load<W>(from + i * 32 * W) : Pack<T, W>{};
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        T* const to = all.drows + rows[j] * columns + c;
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          C products[W];
          for (int k = 0; k < W; ++k) {
            sums[j] += C(d[i].values[k]) * C(of_rows[j][i].values[k]);
            products[k] = weights[j] * C(d[i].values[k]);
          }
          if ((own >> j & 1) && c + i * 32 * W < columns) store_at_once(to + i * 32 * W, rounded_pack<T>(products));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      for (int distance = 16; distance > 0; distance /= 2) sums[j] += __shfl_xor_sync(~0u, sums[j], distance);
      if (lane == 0 && first + j < slots.choices)
        all.dweights.set(token * slots.choices + first + j, rows[j] >= 0 ? sums[j] : C(0));
    }
  }
}
#endif

template <typename T>
void unpermute_gradients(Call& call, const UnpermuteGradients<T>& all) {
  const Slots& slots = all.slots;
  if (!call.ok()) return;
  const int64_t number = slots.tokens * slots.choices;
  if (call.is_on_cpu()) {
    // One thread alone, since slots may have one row.
    std::fill_n(all.owners, slots.rows, -1);
    for (int64_t slot = 0; slot < number; ++slot) FindOwners{slots, all.owners}(slot);
    on_cpu(call, slots.tokens, GradientsOnCpu<T>{all}, 2 * static_cast<double>(slots.choices * (slots.columns + 16)));
  } else {
#ifdef __CUDACC__
    if (slots.rows > 0)
      cudaMemsetAsync(all.owners, 0xFF, static_cast<size_t>(slots.rows) * sizeof(int32_t), call.stream());
    on_gpu(call, number, number, FindOwners{slots, all.owners});
    if (!all.dweights.data) {
      spread(call, Copies<T>{slots, all.dout, all.drows});
    } else {
      const int64_t blocks = (slots.tokens - 1) / (kGradientThreads / 32) + 1;
      with_width<T>(false, slots.columns, {all.rows, all.dout, all.drows}, [&](auto width) {
        constexpr int W = width;
        launch(call, gradients_kernel<W, T>, blocks, kGradientThreads, 0, all);
      });
    }
#endif
  }
  zero_rows(call, slots.rows, slots.columns, HasOwner{all.owners}, all.drows);
}

}  // namespace msops::routing
