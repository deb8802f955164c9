// Copies each token to the rows of its slots, and zeros to rows that have no slot.
#pragma once

#include "slots.h"

namespace msops::routing {

template <typename T>
struct Copies {
  Slots slots;
  const T* tokens;  // (tokens, columns)
  T* rows;
};

template <typename T>
struct SpreadOnCpu {
  Copies<T> all;

  MSOPS_CPU void operator()(int64_t slot) const {
    const int64_t row = all.slots.row(slot), columns = all.slots.columns;
    if (row < 0) return;
    const T* const from = all.tokens + slot / all.slots.choices * columns;
    T* const to = all.rows + row * columns;
    const T* const next = all.slots.run_after(slot, static_cast<const T*>(all.rows), 0, to);
    constexpr int kLine = 64 / sizeof(T);
    int64_t c = 0;
    for (; c + kLine <= columns; c += kLine) {
      __builtin_prefetch(next + c, 1);
      std::memcpy(to + c, from + c, 64);
    }
    std::memcpy(to + c, from + c, static_cast<size_t>(columns - c) * sizeof(T));
  }
};

#ifdef __CUDACC__
// Index i is a run of columns of a token: a thread reads it once for all slots.
template <int W, typename T>
struct SpreadRun {
  static constexpr int kAtOnce = 4;  // positions that are loaded before a store, which could change them for nvcc
  Copies<T> all;

  template <typename I>
  __device__ void operator()(I i) const {
    const Slots& slots = all.slots;
    const Run<W> run(i, slots.columns);
    const Pack<T, W> pack = load<W>(all.tokens + run.token * slots.columns + run.column);
    for (int64_t first = 0; first < slots.choices; first += kAtOnce) {
      int64_t rows[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        rows[j] = first + j < slots.choices ? slots.row(run.token * slots.choices + first + j) : -1;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (rows[j] >= 0) store(all.rows + rows[j] * slots.columns + run.column, pack);
    }
  }
};
#endif

template <typename T>
void spread(Call& call, const Copies<T>& all) {
  const Slots& slots = all.slots;
  const int64_t size = slots.tokens * slots.columns;
  if (!call.ok() || size == 0) return;
  if (call.is_on_cpu()) {
    return on_cpu(call, slots.tokens * slots.choices, SpreadOnCpu<T>{all}, static_cast<double>(slots.columns));
  }
#ifdef __CUDACC__
  with_width<T>(false, slots.columns, {all.tokens, all.rows}, [&](auto width) {
    constexpr int W = width;
    on_gpu(call, size / W, size, SpreadRun<W, T>{all});
  });
#endif
}

#ifdef __CUDACC__
constexpr int kZeroThreads = 256, kRowsOfWarp = 8;

// A warp looks at neighbouring rows: most have a slot, and there is nothing to write.
template <int W, typename T, typename HasSlot>
__global__ void __launch_bounds__(kZeroThreads)
    zero_rows_kernel(int64_t number, int64_t columns, HasSlot has_slot, T* rows) {
  const int64_t warp = blockIdx.x * int64_t{kZeroThreads / 32} + threadIdx.x / 32;
  const int64_t first = warp * kRowsOfWarp;
  const int lane = threadIdx.x % 32;
  const bool is_unused = lane < kRowsOfWarp && first + lane < number && !has_slot(first + lane);
  for (unsigned left = __ballot_sync(~0u, is_unused); left; left &= left - 1) {
    T* const row = rows + (first + __ffs(static_cast<int>(left)) - 1) * columns;
    for (int64_t c = lane * W; c < columns; c += 32 * W) store(row + c, Pack<T, W>{});
  }
}
#endif

template <typename T, typename HasSlot>
struct ZeroRowsOnCpu {
  int64_t columns;
  HasSlot has_slot;
  T* rows;

  MSOPS_CPU void operator()(int64_t row) const {
    if (!has_slot(row)) std::memset(rows + row * columns, 0, static_cast<size_t>(columns) * sizeof(T));
  }
};

// Writes zeros to the rows for which has_slot(row) is false, and to no others.
template <typename T, typename HasSlot>
void zero_rows(Call& call, int64_t number, int64_t columns, const HasSlot& has_slot, T* rows) {
  if (!call.ok() || number * columns == 0) return;
  if (call.is_on_cpu())
    return on_cpu(call, number, ZeroRowsOnCpu<T, HasSlot>{columns, has_slot, rows}, static_cast<double>(columns));
#ifdef __CUDACC__
  const int64_t warps = (number + kRowsOfWarp - 1) / kRowsOfWarp, blocks = (warps - 1) / (kZeroThreads / 32) + 1;
  with_width<T>(false, columns, {rows}, [&](auto width) {
    constexpr int W = width;
    launch(call, zero_rows_kernel<W, T, HasSlot>, blocks, kZeroThreads, 0, number, columns, has_slot, rows);
  });
#endif
}

}  // namespace msops::routing
