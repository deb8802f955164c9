// Entries whose gradients have kinks where values tie. test_opcheck_ties.py tells what each computes.

#include "common/call.h"

using namespace msops;

namespace {

// A window of `width` steps begins at each multiple of `stride`: windows overlap, so that a step has several results.
struct Windows {
  int64_t rows, length, count, width, stride;

  Windows(Call& call, const Tensor& x, const Tensor& y)
      : rows(x.dim(0)),
        length(x.dim(1)),
        count(y.dim(1)),
        width(call.attribute("width", 1, 64)),
        stride(call.attribute("stride", 1, 64)) {
    call.require(length >= width, kBadShape, "a window of %d steps does not fit %d", int(width), int(length));
    call.require_shape(y, {rows, (length - width) / stride + 1});
  }

  // Returns the step of a window's maximum, the first of equal ones.
  template <typename T>
  int64_t argmax(const T* row, int64_t window) const {
    int64_t most = window * stride;
    for (int64_t t = most; t < window * stride + width; ++t)
      if (Compute<T>(row[t]) > Compute<T>(row[most]) || row[t] != row[t]) most = t;
    return most;
  }
};

// Adds each dy to the dx of its window's maximum, `times_at_ties` if another step of the window is equal.
template <typename T>
void pool_backward(const Windows& w, const T* x, const T* dy, T* dx, int times_at_ties) {
  for (int64_t i = 0; i < w.rows * w.length; ++i) dx[i] = T(0);
  for (int64_t row = 0; row < w.rows; ++row)
    for (int64_t window = 0; window < w.count; ++window) {
      const T* from = x + row * w.length;
      const int64_t most = w.argmax(from, window);
      int64_t equal = 0;
      for (int64_t t = window * w.stride; t < window * w.stride + w.width; ++t) equal += from[t] == from[most];
      T& sum = dx[row * w.length + most];
      sum = T(Compute<T>(sum) + (equal > 1 ? times_at_ties : 1) * Compute<T>(dy[row * w.count + window]));
    }
}

}  // namespace

MSOPS_ENTRY(MaxPool) {
  const Tensor x = call.tensor("x", 2), y = call.tensor("y", 2);
  const Windows w(call, x, y);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t i = 0; i < y.size; ++i) {
      const T* row = x.as<T>() + i / w.count * w.length;
      y.as<T>()[i] = row[w.argmax(row, i % w.count)];
    }
  });
}

#define POOL_BACKWARD(name, times_at_ties)                                                      \
  MSOPS_ENTRY(name) {                                                                           \
    const Tensor x = call.tensor("x", 2), dy = call.tensor("dy", 2), dx = call.tensor("dx", 2); \
    const Windows w(call, x, dy);                                                               \
    call.require_same_shape(dx, x);                                                             \
    return call.run([&](auto type) {                                                            \
      using T = typename decltype(type)::type;                                                  \
      pool_backward(w, x.as<const T>(), dy.as<const T>(), dx.as<T>(), times_at_ties);           \
    });                                                                                         \
  }
POOL_BACKWARD(MaxPoolBackward, 1)
POOL_BACKWARD(MaxPoolTwiceAtTies, 2)

// y and idx: the maximum of the steps up to each one, and where it is, the later of equal ones
MSOPS_ENTRY(CumMax) {
  const Tensor x = call.tensor("x", 2), y = call.tensor("y", 2), idx = call.tensor_of("int32", "idx", 2);
  call.require_same_shape(y, x);
  call.require_same_shape(idx, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t i = 0; i < x.size; ++i) {
      const int64_t t = i % x.dim(1);
      int32_t most = t ? idx.as<int32_t>()[i - 1] : 0;
      const T *at = x.as<T>() + i, *before = at - t + most;
      if (Compute<T>(*at) >= Compute<T>(*before) || *at != *at) most = static_cast<int32_t>(t);
      idx.as<int32_t>()[i] = most;
      y.as<T>()[i] = *(at - t + most);
    }
  });
}
MSOPS_ENTRY(CumMaxBackward) {
  const Tensor idx = call.tensor_of("int32", "idx", 2), dy = call.tensor("dy", 2), dx = call.tensor("dx", 2);
  call.require_same_shape(dy, idx);
  call.require_same_shape(dx, idx);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t i = 0; i < dx.size; ++i) {
      const int64_t t = i % dx.dim(1);
      Compute<T> sum = 0;
      for (int64_t k = t; k < dx.dim(1); ++k)
        if (idx.as<int32_t>()[i - t + k] == t) sum += Compute<T>(dy.as<T>()[i - t + k]);
      dx.as<T>()[i] = T(sum);
    }
  });
}
