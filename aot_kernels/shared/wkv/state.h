// A given state, or its gradient, has the dtype of the other inputs, or float32.
#pragma once

#include <cstring>

#include "../../common/call.h"

namespace msops::wkv {

// StateNumbers are elements of T or, if `are_float`, of float; or there are none.
template <typename T>
struct StateNumbers {
  void* data = nullptr;
  bool are_float = false;

  StateNumbers() = default;
  explicit StateNumbers(const Tensor& tensor)
      : data(tensor.data), are_float(tensor.dtype && std::strcmp(tensor.dtype, dtype_name<float>()) == 0) {}
  MSOPS_BOTH Compute<T> operator[](int64_t i) const {
    return are_float ? Compute<T>(static_cast<const float*>(data)[i]) : Compute<T>(static_cast<const T*>(data)[i]);
  }
  MSOPS_BOTH void set(int64_t i, Compute<T> value) const {
    if (are_float) {
      static_cast<float*>(data)[i] = static_cast<float>(value);
    } else {
      assign(static_cast<T*>(data)[i], value);
    }
  }
};

// Requires the gradient of a state to be there if the state is, and to have its dtype.
inline void require_gradient(Call& call, const Tensor& gradient, const Tensor& state) {
  if (!call.ok() || !gradient.dtype) return;
  call.require(state.dtype && std::strcmp(gradient.dtype, state.dtype) == 0, kBadDtype, "%s has not %s's dtype",
               gradient.name, state.dtype ? state.name : "state");
}

}  // namespace msops::wkv
