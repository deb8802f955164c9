// Rows of up to 32 elements that packs do not tile, on the GPU: each thread has a row. A block copies its rows to
// shared memory, and the results from there, as one run of packs. for_short_rows() follows a Program (see columns.h).
#pragma once

#include "../common/pack.h"
#include "columns.h"
#ifdef __CUDACC__
#include "../common/gpu/cp_async.h"
#endif

namespace msops::softmax {

#ifdef __CUDACC__
constexpr int kRowThreads = 128;

// Copies a block's elements between arrays, as packs where both are aligned.
template <typename T, typename CopyPack>
__device__ void copy_run(T* to, const T* from, int n, bool aligned, const CopyPack& copy_pack) {
  constexpr int N = kPackWidth<T>;
  const int in_packs = aligned ? n / N * N : 0;
#pragma unroll 1
  for (int i = threadIdx.x * N; i < in_packs; i += kRowThreads * N) copy_pack(to + i, from + i);
#pragma unroll 1
  for (int i = in_packs + threadIdx.x; i < n; i += kRowThreads) to[i] = from[i];
}

// A row has up to kMost packs of N elements. Dynamic shared memory is T (input, row of the block, element); results
// take the places of inputs.
template <int N, int kMost, typename Program, typename T>
__global__ void __launch_bounds__(kRowThreads)
    short_rows_kernel(Columns<Program, T> all, int rows_of_block, bool aligned) {
  using C = Compute<T>;
  constexpr int kLast = Program::kPhases - 1;
  extern __shared__ uint4 shared[];
  T* const places = reinterpret_cast<T*>(shared);
  const int length = static_cast<int>(all.s.length), packs = length / N, place = rows_of_block * length;
  const int64_t first = int64_t{blockIdx.x} * rows_of_block, left = all.s.outer - first;
  const int rows = left < rows_of_block ? static_cast<int>(left) : rows_of_block;
  for (int a = 0; a < Program::kInputs; ++a)
    copy_run(places + a * place, all.in[a] + first * length, rows * length, aligned,
             [](T* to, const T* from) { cp_async<16>(to, from); });
  cp_async_wait_all();
  __syncthreads();
  for (int row = threadIdx.x; row < rows; row += kRowThreads) {
    T* const of_row = places + row * length;
    C in[kMost][N][Program::kInputs], found[Program::kPhases];
#pragma unroll
    for (int k = 0; k < kMost; ++k)
      if (k < packs)
        for (int a = 0; a < Program::kInputs; ++a) {
          const Pack<T, N> pack = load<N>(of_row + a * place + k * N);
          for (int j = 0; j < N; ++j) in[k][j][a] = C(pack.values[j]);
        }
    for_phases<Program>([&](auto phase) {
      C result = Program::template identity<phase>();
#pragma unroll
      for (int k = 0; k < kMost; ++k)
        if (k < packs)
          for (C(&each)[Program::kInputs] : in[k]) {
            const C term = Program::template of<phase>(each, found);
            if constexpr (Program::kScales && phase == kLast) each[0] = term;  // replaces the element
            result = Program::template combine<phase>(result, term);
          }
      found[phase] = Program::template finish<phase>(result);
    });
#pragma unroll
    for (int k = 0; k < kMost; ++k)
      if (k < packs) {
        C out[Program::kOutputs][N];
        for (int j = 0; j < N; ++j) {
          C of[Program::kOutputs];
          if constexpr (Program::kScales) {
            of[0] = in[k][j][0] * found[kLast];
          } else {
            Program::map(in[k][j], found, of);
          }
          for (int o = 0; o < Program::kOutputs; ++o) out[o][j] = of[o];
        }
        for (int o = 0; o < Program::kOutputs; ++o) store(of_row + o * place + k * N, rounded_pack<T>(out[o]));
      }
  }
  __syncthreads();
  for (int o = 0; o < Program::kOutputs; ++o)
    copy_run(all.out[o] + first * length, places + o * place, rows * length, aligned,
             [](T* to, const T* from) { store(to, load<kPackWidth<T>>(from)); });
}

template <int N, int kMost, typename Program, typename T>
void launch_short_rows(Call& call, const Columns<Program, T>& all, bool aligned) {
  constexpr int64_t kBytes = 12 * 1024, kFewRows = 1 << 17;  // of a block, at most if a thread has several rows; of all
  const int64_t bytes = kRowThreads * Program::kInputs * all.s.length * static_cast<int64_t>(sizeof(T));
  const int64_t of_thread = std::max<int64_t>(1, std::min({int64_t{2}, kBytes / bytes, all.s.outer / kFewRows}));
  const int64_t blocks = (all.s.outer - 1) / (of_thread * kRowThreads) + 1;
  launch(call, short_rows_kernel<N, kMost, Program, T>, blocks, kRowThreads, of_thread * bytes, all,
         static_cast<int>(of_thread * kRowThreads), aligned);
}
#endif

// Follows the Program along rows, which are columns without neighbours. Returns false, and does nothing, on the CPU,
// for long rows and for rows that packs tile.
template <typename Program, typename T>
bool for_short_rows([[maybe_unused]] Call& call, [[maybe_unused]] const Columns<Program, T>& all) {
#ifdef __CUDACC__
  if constexpr (sizeof(T) < 8) {
    if (call.is_on_cpu() || all.s.length > 32) return false;
    constexpr int N = kPackWidth<T>;
    bool aligned = true;
    for (const T* in : all.in) aligned &= is_aligned<N>(in);
    for (const T* out : all.out) aligned &= is_aligned<N>(out);
    if (aligned && all.s.length % N == 0) return false;
    if (all.s.length % 2 == 0) {
      all.s.length <= 12 ? launch_short_rows<2, 6>(call, all, aligned) : launch_short_rows<2, 16>(call, all, aligned);
    } else {
      all.s.length <= 12 ? launch_short_rows<1, 12>(call, all, aligned) : launch_short_rows<1, 32>(call, all, aligned);
    }
    return true;
  }
#endif
  return false;
}

}  // namespace msops::softmax
