// Weights as small codes, and the products that weight_quant_matmul and its gradient compute, for both devices.
#pragma once

#include "../common/numbers.h"

namespace msops::weight_quant_matmul {

// ZeroPoints are of uint8, int8, float or T. They are 0 where the tensor is absent.
template <typename T>
struct ZeroPoints {
  using C = Compute<T>;
  enum Kind { kNone, kUnsigned, kSigned, kFloating };
  Numbers<T> numbers;
  Kind kind = kNone;

  ZeroPoints() = default;
  explicit ZeroPoints(const Tensor& tensor) : numbers(tensor) {
    if (!tensor.dtype) return;
    kind = !std::strcmp(tensor.dtype, "uint8") ? kUnsigned : !std::strcmp(tensor.dtype, "int8") ? kSigned : kFloating;
  }
  // Returns those from number `first` on.
  ZeroPoints from(int64_t first) const {
    ZeroPoints rest = *this;
    if (kind == kFloating) rest.numbers = numbers.from(first);
    if (kind == kUnsigned || kind == kSigned) rest.numbers.data = static_cast<uint8_t*>(numbers.data) + first;
    return rest;
  }
  MSOPS_BOTH C operator[](int64_t i) const {
    if (kind == kNone) return 0;
    if (kind == kUnsigned) return C(static_cast<const uint8_t*>(numbers.data)[i]);
    if (kind == kSigned) return C(static_cast<const int8_t*>(numbers.data)[i]);
    return numbers[i];
  }
};

// Codes are a matrix of weights: (code - zero point) * scale, or table[code] * scale. Two codes of 4 bits are a byte,
// the one of the even column in its lower half. `group` neighbours along an axis have a scale and a zero point.
template <typename T>
struct Codes {
  using C = Compute<T>;
  const uint8_t* data;
  int64_t rows, columns;
  int bits;
  bool are_signed,
      groups_rows;  // groups_rows: a group is of rows, and scales are (groups, columns), not (rows, groups)
  int64_t group, groups;
  Numbers<T> scale;
  ZeroPoints<T> zero;
  const float* table;

  // Returns how many bytes a row has.
  MSOPS_BOTH int64_t pitch() const { return bits == 8 ? columns : columns / 2 + columns % 2; }
  MSOPS_BOTH const uint8_t* at(int64_t row, int64_t column) const {
    return data + row * pitch() + (bits == 8 ? column : column / 2);
  }
  // Returns the place of an element's scale.
  MSOPS_BOTH int64_t place(int64_t row, int64_t column) const {
    return groups_rows ? row / group * columns + column : row * groups + column / group;
  }
  // Returns the number that a code stands for, apart from its zero point and scale.
  MSOPS_BOTH C number(unsigned code) const {
    if (table) return C(table[code]);
    const int half = are_signed << (bits - 1);  // codes of two's complement are 0 to 2^bits - 1 with another top bit
    return C(static_cast<int>(code ^ static_cast<unsigned>(half)) - half);
  }
  MSOPS_BOTH C value(int64_t row, int64_t column) const {
    const unsigned byte = *at(row, column), code = bits == 8 ? byte : column % 2 ? byte >> 4 : byte & 15;
    const int64_t i = place(row, column);
    return (number(code) - zero[i]) * scale[i];
  }
  // Returns whether rows begin at multiples of so many bytes.
  bool have_rows_at(int64_t bytes) const {
    return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0 && pitch() % bytes == 0;
  }
};

// out (tokens, outputs) = x (tokens, deep) W + bias, where the terms of an output lie close together in the weights
// (outputs, deep) if they are `by_terms`, else the outputs do, in the weights (deep, outputs).
template <typename T>
struct Products {
  using C = Compute<T>;
  int64_t tokens, deep, outputs;
  const T* x;
  Codes<T> weights;
  bool by_terms;
  OptionalNumbers<T> bias;
  T* out;

  MSOPS_BOTH C weight(int64_t output, int64_t term) const {
    return by_terms ? weights.value(output, term) : weights.value(term, output);
  }
  MSOPS_BOTH void store(int64_t token, int64_t output, C sum) const {
    assign(out[token * outputs + output], sum + bias[output]);
  }
};

}  // namespace msops::weight_quant_matmul
