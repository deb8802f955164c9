// On the GPU, short rows (gpu_short_rows.h) and others (gpu_long_rows.h) have kernels of their own.
//
//   packs of other rows       lanes                       why
//   up to 128                 the fewest that take a row  several rows in a block, no barrier
//                             in one chunk, 4 to 32
//   up to 512, many rows      32                          no barrier, and enough warps to fill a GPU
//   up to 2048, or many rows  256                         four or more blocks on each multiprocessor hide the barriers
//   more                      kMostThreads                as many bytes in flight as a multiprocessor takes
#pragma once

#include "../common/gpu/griddepcontrol.h"
#include "../common/parallel.h"
#include "../common/team.h"
#include "gpu_long_rows.h"
#include "gpu_short_rows.h"

namespace msops::cross_entropy {

constexpr int kSumThreads = 1024;  // of a block that adds up the losses of rows

// Each block adds up its part of `count` Totals: those in `from` or, if that is null, those of the rows. It writes its
// sum to `partial` or, if that is null, finishes the loss.
template <typename T, Form kForm>
__global__ void __launch_bounds__(kSumThreads)
    totals_kernel(Loss<T, kForm> loss, int64_t count, const Compute<T>* losses, const RowStats<Compute<T>>* stats,
                  const Compute<T>* from, Compute<T>* partial, Compute<T>* result, Compute<T>* totals) {
  using C = Compute<T>;
  griddepcontrol_wait();
  const int64_t end = part_begin<int64_t>(count, blockIdx.x + 1, gridDim.x);
  Totals<C> sums;
#pragma unroll 4
  for (int64_t i = part_begin<int64_t>(count, blockIdx.x, gridDim.x) + threadIdx.x; i < end; i += kSumThreads) {
    const C* const there = from + Totals<C>::kNumbers * i;
    sums += from ? Totals<C>{there[0], there[1], there[2], there[3]}
                 : loss.totals_of(loss.label_of(i), losses[i], stats[i]);
  }
  using Block = TeamShape<kSumThreads, 1, 0>;
  __shared__ SharedOfWarp shared[kSharedOfTeam<Block>];
  const Team<C, Block> block(threadIdx.x, shared);
  const auto add = [](auto a, const auto& b) { return a += b; };
  sums = block.over_lanes(sums, Totals<C>{}, add);
  if (partial) {
    if (threadIdx.x == 0) sums.store(partial + Totals<C>::kNumbers * blockIdx.x);
    return;
  }
  C of_classes = C(loss.classes);
  if (loss.weight && loss.smoothing > 0) {
    of_classes = 0;
    for (int64_t j = threadIdx.x; j < loss.classes; j += kSumThreads) of_classes += C(loss.weight[j]);
    of_classes = block.over_lanes(of_classes, C(0), add);
  }
  if (threadIdx.x == 0) loss.finish(sums, of_classes, result, totals);
}

// Launches a kernel with `lanes` threads for each row, and `chunks` blocks for each group of rows.
template <typename Kernel, typename... Arguments>
void launch_rows(Call& call, Kernel kernel, int64_t rows, int lanes, int chunks, const Arguments&... arguments) {
  const int threads = std::max(lanes, kThreads), of_block = threads / lanes;
  launch(call, kernel, {(rows - 1) / of_block + 1, std::min(chunks, 65535)}, threads, 0, arguments...);
}

// Returns the fewest lanes, from 4 to `most`, that take a row in one chunk, or `most`.
inline int fewest_lanes(int64_t packs, int most) {
  int lanes = 4;
  while (lanes < most && lanes * kPacks < packs) lanes *= 2;
  return lanes;
}

// Returns how many Totals `partial` has got, which is 0 if those of the rows remain to be added up.
template <typename T, Form kForm>
int64_t launch_loss(Call& call, const Loss<T, kForm>& loss, Compute<T>* losses, RowStats<Compute<T>>* stats,
                    Compute<T>* partial) {
  const int64_t packs = loss.classes / kPackWidth<T>;
  if (loss.is_plain() && ShortRows<T>::take(packs)) {
    const auto kernel = short_loss_kernel<T, kForm>;
    const ShortRows<T> rows(kernel, loss.rows, packs, 1);
    const bool adds = loss.reduction != Reduction::kNone;
    launch(call, kernel, rows.blocks, kThreads, 0, loss, rows.passes, adds ? nullptr : losses, stats,
           adds ? partial : nullptr);
    return adds ? rows.blocks : 0;
  }
  const Gpu gpu;
  const bool has_many_rows = loss.rows >= 4 * gpu.multiprocessors;
  int lanes = kMostThreads<T, kForm>;
  if (packs <= 32 * kPacks || (packs <= 512 && loss.rows >= 64 * gpu.multiprocessors)) {
    lanes = fewest_lanes(packs, 32);
  } else if (packs <= 2048 || has_many_rows) {
    lanes = 256;
  }
  const auto kernel = loss.is_plain() ? loss_kernel<T, true, kForm> : loss_kernel<T, false, kForm>;
  launch_rows(call, kernel, loss.rows, lanes, 1, loss, lanes, losses, stats);
  return 0;
}

// Adds up the losses of rows or, if there are any, the `parts` Totals that `partial` has.
template <typename T, Form kForm>
void launch_totals(Call& call, const Loss<T, kForm>& loss, const Compute<T>* losses, const RowStats<Compute<T>>* stats,
                   int64_t parts, Compute<T>* partial, Compute<T>* result, Compute<T>* totals) {
  const int64_t rows = loss.reduction == Reduction::kNone ? 0 : loss.rows;
  if (parts == 0 && rows >= 2 * kRowsOfSum) {
    parts = std::min<int64_t>(rows / kRowsOfSum, 1024);
    launch(call, totals_kernel<T, kForm>, Grid(parts).programmatic(), kSumThreads, 0, loss, rows, losses, stats,
           nullptr, partial, nullptr, nullptr);
  }
  launch(call, totals_kernel<T, kForm>, Grid(1).programmatic(), kSumThreads, 0, loss, parts > 0 ? parts : rows, losses,
         stats, parts > 0 ? partial : nullptr, nullptr, result, totals);
}

// `dlogits` or `dlabels`, which are those of probabilities, may be null. `dlogits` may be the logits themselves.
template <typename T, Form kForm>
void launch_gradient(Call& call, const Loss<T, kForm>& loss, const RowStats<Compute<T>>* stats,
                     const Compute<T>* totals, const Compute<T>* dloss, bool is_per_row, T* dlogits, T* dlabels) {
  const int64_t packs = loss.classes / kPackWidth<T>;
  bool is_apart = (dlogits && are_apart(dlogits, loss.logits)) || (dlabels && are_apart(dlabels, loss.logits));
  if constexpr (kForm == Form::kProbabilities) is_apart |= loss.is_apart;
  if constexpr (kForm != Form::kProbabilities)
    if (loss.is_plain() && ShortRows<T>::take(packs)) {
      const auto kernel = short_gradient_kernel<T, kForm>;
      const ShortRows<T> rows(kernel, loss.rows, packs, 2);
      return launch(call, kernel, rows.blocks, kThreads, 0, loss, rows.passes, stats, totals, dloss, is_per_row,
                    is_apart, dlogits);
    }
  const int lanes = fewest_lanes(packs, kThreads);
  const int chunks = static_cast<int>(std::max<int64_t>(1, (packs - 1) / (kPacks * lanes) + 1));
  const auto kernel = loss.is_plain() ? gradient_kernel<T, true, kForm> : gradient_kernel<T, false, kForm>;
  launch_rows(call, kernel, loss.rows, lanes, chunks, loss, lanes, stats, totals, dloss, is_per_row, is_apart, chunks,
              dlogits, dlabels);
}

}  // namespace msops::cross_entropy
