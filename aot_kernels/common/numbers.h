// Numbers read and write the elements of a tensor of T or, beside T, of float, such as a parameter or a state; Integers
// read those of a tensor of int32 or int64.
#pragma once

#include <cstring>

#include "call.h"

namespace msops {

// The tensor must be there when an element is read or written; `data` tells whether it is.
template <typename T>
struct Numbers {
  using C = Compute<T>;
  void* data = nullptr;
  bool are_float = false;

  Numbers() = default;
  explicit Numbers(const Tensor& tensor)
      : data(tensor.data), are_float(tensor.dtype && std::strcmp(tensor.dtype, dtype_name<float>()) == 0) {}
  // Returns those from number `first` on.
  Numbers from(int64_t first) const {
    Numbers rest = *this;
    if (data)
      rest.data = static_cast<char*>(data) + first * static_cast<int64_t>(are_float ? sizeof(float) : sizeof(T));
    return rest;
  }
  MSOPS_BOTH C operator[](int64_t i) const {
    return are_float ? C(static_cast<const float*>(data)[i]) : C(static_cast<const T*>(data)[i]);
  }
  MSOPS_BOTH void set(int64_t i, C value) const {
    if (are_float) {
      static_cast<float*>(data)[i] = static_cast<float>(value);
    } else {
      assign(static_cast<T*>(data)[i], value);
    }
  }
};

// OptionalNumbers are read as `otherwise` where the tensor is absent.
template <typename T>
struct OptionalNumbers : Numbers<T> {
  using C = Compute<T>;
  C otherwise;

  explicit OptionalNumbers(const Tensor& tensor, C number = 0) : Numbers<T>(tensor), otherwise(number) {}
  MSOPS_BOTH C operator[](int64_t i) const { return this->data ? Numbers<T>::operator[](i) : otherwise; }
};

// Integers are int32 or int64.
struct Integers {
  const void* data = nullptr;
  bool are_long = false;

  Integers() = default;
  explicit Integers(const Tensor& tensor)
      : data(tensor.data), are_long(tensor.dtype && std::strcmp(tensor.dtype, "int64") == 0) {}
  MSOPS_BOTH int64_t operator[](int64_t i) const {
    return are_long ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

}  // namespace msops
