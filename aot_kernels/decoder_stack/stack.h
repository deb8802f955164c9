// Stack says what a call of decoder_stack reads, writes and must compute.
//
//   h = x;  in each layer:
//   a = rms_norm(h, norm1),  (q, k, v) = a qkv^T + qkv_bias,  q and k normed by head, and rotated
//   o = attention(q; the cached rows that count, then the new rows up to the query's own)
//   h = h + o out^T,  a = rms_norm(h, norm2),  h = h + (silu(a gate^T) a up^T) down^T
//   y = rms_norm(h, norm), or h without norm
//
// Results are rounded to T wherever the single operators would store them. The four matrices may be codes, which stand
// for numbers as in weight_quant_matmul.
#pragma once

#include <cmath>

#include "../common/activations.h"
#include "../common/numbers.h"
#include "../weight_quant_matmul/codes.h"

namespace msops::decoder_stack {

using weight_quant_matmul::Codes;

// The steps of a layer that multiply by a matrix.
enum Step : int { kQkv, kOut, kGates, kDown, kSteps };

// Weights are a layer's rows of a matrix: `numbers`, or codes in which the layer's first row is number `first`.
template <typename T>
struct Weights {
  int64_t rows, columns;
  const T* numbers;
  const Codes<T>* codes;  // or null
  int64_t first;
};

// Layer is what one layer reads and writes. Pointers may be null where the stack's tensors are absent.
template <typename T>
struct Layer {
  int64_t index;
  Numbers<T> norm1, norm2, q_norm, k_norm;         // of this layer, from their first element on
  const T *qkv, *qkv_bias, *out, *gate_up, *down;  // (qkv_rows, C), (qkv_rows), (C, heads D), (2, F, C), (C, F)
  const T *keys, *values;                          // (B, S, kv_heads, D), or in blocks (P, S, kv_heads, D)
  T *k, *v;                                        // (B, T, kv_heads, D)
};

template <typename T>
struct Stack {
  using C = Compute<T>;
  int64_t layers, batch, length, width, heads, kv_heads, head_size, hidden,
      room;             // room: of a text's rows in the cache
  const T* x;           // (B, T, C)
  Numbers<T> cos, sin;  // (T, D/2) or (B, T, D/2)
  bool has_table_of_text, interleaved;
  Numbers<T> norm1, norm2, norm, q_norm, k_norm;  // (L, C), (L, C), (C), (L, D), (L, D)
  const T *qkv, *qkv_bias, *out, *gate_up, *down, *keys, *values;
  bool has_codes;
  Codes<T> codes[kSteps];  // of all layers, in place of qkv, out, gate_up and down
  Integers lengths;        // (B)
  bool has_cache;
  // If the cache has blocks, row j of a text is row j % block_size of the block that its row of the table names at
  // place j / block_size.
  bool has_blocks;
  Integers tables;                            // (B, table_columns)
  int64_t blocks, block_size, table_columns;  // blocks: of a layer
  C eps;
  T *y, *k, *v;

  MSOPS_BOTH int64_t tokens() const { return batch * length; }
  MSOPS_BOTH int64_t group() const { return heads / kv_heads; }
  MSOPS_BOTH int64_t all_heads() const { return heads + 2 * kv_heads; }
  MSOPS_BOTH int64_t qkv_rows() const { return all_heads() * head_size; }
  MSOPS_BOTH int64_t of_heads() const { return heads * head_size; }
  MSOPS_BOTH int64_t of_kv_heads() const { return kv_heads * head_size; }
  C scale() const { return C(1 / std::sqrt(static_cast<double>(head_size > 0 ? head_size : 1))); }

  // Returns how many rows of a text's cache count.
  MSOPS_BOTH int64_t cached(int64_t text) const {
    if (!has_cache) return 0;
    const int64_t rows = lengths[text];
    return rows < 0 ? 0 : rows < room ? rows : room;
  }

  // Returns which row of a layer's cache is row j of a text, which counts.
  MSOPS_BOTH int64_t row_of_cache(int64_t text, int64_t j) const {
    if (!has_blocks) return text * room + j;
    const auto row = static_cast<uint32_t>(j), size = static_cast<uint32_t>(block_size);
    return tables[text * table_columns + row / size] * block_size + row % size;
  }

  Layer<T> layer(int64_t i) const {
    const int64_t rows = has_blocks ? blocks * block_size : batch * room;
    const int64_t of_cache = rows * of_kv_heads(), of_new = tokens() * of_kv_heads();
    const auto at = [](const T* data, int64_t offset) { return data ? data + offset : nullptr; };
    return {i,
            norm1.from(i * width),
            norm2.from(i * width),
            q_norm.from(i * head_size),
            k_norm.from(i * head_size),
            at(qkv, i * qkv_rows() * width),
            at(qkv_bias, i * qkv_rows()),
            at(out, i * width * of_heads()),
            at(gate_up, i * 2 * hidden * width),
            at(down, i * width * hidden),
            at(keys, i * of_cache),
            at(values, i * of_cache),
            k + i * of_new,
            v + i * of_new};
  }

  // Return the sizes of a layer's matrix.
  int64_t rows(Step step) const { return step == kQkv ? qkv_rows() : step == kGates ? 2 * hidden : width; }
  int64_t columns(Step step) const { return step == kOut ? of_heads() : step == kDown ? hidden : width; }
  Weights<T> weights(const Layer<T>& layer, Step step) const {
    const T* const numbers[] = {layer.qkv, layer.out, layer.gate_up, layer.down};
    return {rows(step), columns(step), numbers[step], has_codes ? &codes[step] : nullptr, layer.index * rows(step)};
  }
};

// Norms a number by the reciprocal root mean square and its factor.
template <typename T>
MSOPS_BOTH Compute<T> normed(Compute<T> number, Compute<T> reciprocal, Compute<T> factor) {
  return rounded<T>(rounded<T>(number * reciprocal) * rounded<T>(factor));
}

// A Pair is two features of a head that are rotated together, by the pair-th angle.
struct Pair {
  int64_t first, second;

  MSOPS_BOTH Pair(int64_t pair, int64_t head_size, bool interleaved)
      : first(interleaved ? 2 * pair : pair), second(interleaved ? 2 * pair + 1 : pair + head_size / 2) {}
};

template <typename T>
MSOPS_BOTH Compute<T> gated(Compute<T> gate, Compute<T> up) {
  return rounded<T>(Activations<Compute<T>>::silu(gate) * up);
}

}  // namespace msops::decoder_stack
