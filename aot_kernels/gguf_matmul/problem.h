// The products that gguf_matmul and its gradient compute, for both devices.
#pragma once

#include "../common/numbers.h"
#include "../shared/gguf/formats.h"

namespace msops::gguf_matmul {

using gguf::with_format;

// A Weight has `rows` rows of `columns` numbers, which are whole blocks.
struct Weight {
  int64_t rows, columns, row_bytes;
  const uint8_t* data;

  // Returns the block of number k of a row.
  template <typename F>
  MSOPS_BOTH const uint8_t* block(int64_t row, int64_t k) const {
    return data + row * row_bytes + k / F::kNumbers * F::kBytes;
  }
  // Returns a number that multiples of up to 16 divide if they divide the addresses of all rows.
  MSOPS_BOTH int places() const {
    return static_cast<int>((reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(row_bytes)) % 16);
  }
};

// out_n = x_n W^T + bias: (tokens, weight.rows)
template <typename T>
struct Products {
  int64_t tokens;
  Weight weight;
  const T* x;               // (tokens, weight.columns)
  OptionalNumbers<T> bias;  // (weight.rows)
  T* out;

  MSOPS_BOTH int64_t deep() const { return weight.columns; }
  MSOPS_BOTH int64_t columns() const { return weight.rows; }
};

// dx_n = dout_n W: (tokens, weight.columns)
template <typename T>
struct Gradients {
  int64_t tokens;
  Weight weight;
  const T* x;  // dout: (tokens, weight.rows)
  T* out;      // dx

  MSOPS_BOTH int64_t deep() const { return weight.rows; }
  MSOPS_BOTH int64_t columns() const { return weight.columns; }
};

}  // namespace msops::gguf_matmul
