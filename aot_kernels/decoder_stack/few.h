// Hands a stack to the kernel for few tokens.
#pragma once

#ifdef __CUDACC__

#include "few_plan.h"
#include "find_blocks.h"

namespace msops::decoder_stack::few {

template <typename T>
Factors<T> factors(const Numbers<T>& numbers) {
  return {numbers.data, numbers.are_float && !std::is_same<T, float>::value};
}

template <typename T>
FewTokens<T> problem(const Stack<T>& s) {
  FewTokens<T> f{};
  f.layers = static_cast<int>(s.layers), f.batch = static_cast<int>(s.batch), f.length = static_cast<int>(s.length);
  f.width = static_cast<int>(s.width), f.hidden = static_cast<int>(s.hidden), f.room = s.room;
  f.heads = static_cast<int>(s.heads), f.kv_heads = static_cast<int>(s.kv_heads);
  f.head_size = static_cast<int>(s.head_size);
  f.x = s.x, f.keys = s.keys, f.values = s.values, f.qkv_bias = s.qkv_bias;
  f.norm1 = factors(s.norm1), f.norm2 = factors(s.norm2), f.norm = factors(s.norm);
  f.q_norm = factors(s.q_norm), f.k_norm = factors(s.k_norm), f.cos = factors(s.cos), f.sin = factors(s.sin);
  f.lengths = s.has_cache ? s.lengths.data : nullptr, f.lengths_are_wide = s.lengths.are_long;
  f.columns = s.table_columns, f.rows_of_layer = s.blocks * s.block_size;
  f.by_block = Divisor(s.table_columns > 0 ? s.block_size : 1);
  f.has_table_of_text = s.has_table_of_text, f.interleaved = s.interleaved, f.eps = static_cast<float>(s.eps);
  f.matrices[kQkv] = {s.qkv, f.qkv_rows(), f.width, false, 0, 0};
  f.matrices[kOut] = {s.out, f.width, f.heads * f.head_size, false, 0, 0};
  f.matrices[kGates] = {s.gate_up, f.hidden, f.width, true, 0, 0};
  f.matrices[kDown] = {s.down, f.width, f.hidden, false, 0, 0};
  f.y = s.y, f.k = s.k, f.v = s.v;
  return f;
}

// Returns whether matrices are of numbers, sizes have 32 bits, and the kernel takes them.
template <typename T>
bool fits(const Stack<T>& s) {
  constexpr int64_t kMost = 1 << 26;
  if (s.has_codes || s.layers > INT32_MAX || s.tokens() > kMostTokens || s.tokens() < 1) return false;
  if (std::max({s.width, s.hidden, s.qkv_rows(), s.of_heads()}) > kMost) return false;
  return is_for_few_tokens(problem(s));
}

// Returns whether all tensors begin at multiples of 16 bytes, so that whole packs are copied.
template <typename T>
bool are_aligned(const Stack<T>& s) {
  uintptr_t bits = 0;
  for (const void* each : std::initializer_list<const void*>{
           s.x, s.qkv, s.qkv_bias, s.out, s.gate_up, s.down, s.keys, s.values, s.y, s.k, s.v, s.cos.data, s.sin.data,
           s.norm1.data, s.norm2.data, s.norm.data, s.q_norm.data, s.k_norm.data})
    bits |= reinterpret_cast<uintptr_t>(each);
  return bits % 16 == 0;
}

// Returns how many numbers of scratch the kernel takes on any GPU.
template <typename T>
int64_t numbers(const Stack<T>& s) {
  if constexpr (std::is_same<T, double>::value) {
    return 0;
  } else {
    constexpr int kMostBlocks = 256, kBytes = 1 << 18;
    if (!fits(s)) return 0;
    FewTokens<T> f = problem(s);
    plan_few_tokens(f, kMostBlocks, kBytes);
    return static_cast<int64_t>(place_few_tokens(f, nullptr) / sizeof(float));
  }
}

template <typename T>
auto kernel_for(int tokens) {
  constexpr int kOne = sizeof(T) == 2 ? 1 : 4;
  return tokens == 1  ? few_tokens_kernel<T, kOne>
         : tokens > 4 ? few_tokens_kernel<T, kMostTokens>
                      : few_tokens_kernel<T, 4>;
}

// Launches the kernel, or returns false and does nothing.
template <typename T>
bool forward(Call& call, const Stack<T>& s, const Tensor& work) {
  if constexpr (std::is_same<T, double>::value) {
    return false;
  } else {
    const Gpu gpu;
    if (!call.ok() || !gpu.cooperative || !fits(s) || !are_aligned(s)) return false;
    FewTokens<T> f = problem(s);
    const auto kernel = kernel_for<T>(f.tokens());
    if (!is_compiled_for(80, kernel)) return false;
    const int64_t shared_bytes = plan_few_tokens(f, gpu.multiprocessors, gpu.dynamic_bytes());
    const size_t bytes = place_few_tokens(f, work.data);
    if (shared_bytes == 0 || bytes > work.size * sizeof(float)) return false;
    cudaMemsetAsync(work.data, 0, bytes, call.stream());
    if (f.tables) {
      Stack<T> with_found = s;
      find_blocks(call, with_found, f.tables, f.counts);
      f.lengths = f.counts, f.lengths_are_wide = false;
    }
    launch(call, kernel, Grid(gpu.multiprocessors).cooperative(), 32 * (f.warps() + 1), shared_bytes, f);
    return true;
  }
}

}  // namespace msops::decoder_stack::few

#endif
