#include <algorithm>

#include "common/formula.h"

MSOPS_FORMULA(Cube, (x), (y), y = x * x * x)
MSOPS_FORMULA(CubeBackward, (x, dy), (dx), dx = 3 * x * x * dy)
MSOPS_FORMULA(CubeBackwardBackward, (x, dy, ddx), (dx, ddy), dx = 6 * x * dy * ddx; ddy = 3 * x * x * ddx)
MSOPS_FORMULA(CubeThird, (x, dy, g, a, b), (dx, ddy, dg), dx = 6 * dy * g * a + 6 * x * g * b; ddy = 6 * x * g * a;
              dg = 6 * x * dy * a + 3 * x * x * b)
MSOPS_FORMULA(Both, (x, y), (sum, product), sum = x + y; product = x * y)
MSOPS_FORMULA(BothBackward, (x, y, dsum, dproduct), (dx, dy), dx = dsum + dproduct * y; dy = dsum + dproduct * x)

using namespace msops;

template <typename T>
struct Fill {
  T* out;
  double value;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    assign(out[i], Compute<T>(value));
  }
};

extern "C" __attribute__((visibility("default"))) int NoEntry(int, void**, int*, int64_t**, const char**, void*,
                                                              void*) {
  return 0;
}

// All elements of `out` are `value`.
MSOPS_ENTRY(Filled) {
  call.tensor("x");
  const Tensor out = call.tensor("out");
  const double value = call.number("value");
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    parallel_for(call, out.size, out.size, Fill<T>{out.as<T>(), value});
  });
}

// out[n] = x[index[n]]
template <typename T>
struct Taken {
  const T* x;
  const int32_t* index;
  T* out;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    out[i] = x[index[i]];
  }
};

MSOPS_ENTRY(Take) {
  const Tensor x = call.tensor("x", 1), index = call.tensor_of("int32", "index", 1), out = call.tensor("out", 1);
  call.require_shape(out, {index.dim(0)});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    parallel_for(call, out.size, out.size, Taken<T>{x.as<T>(), index.as<int32_t>(), out.as<T>()});
  });
}

struct Store {
  int64_t* out;
  int64_t value;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    out[i] = value;
  }
};

// What arrives of attributes: the bits of `number`, and `count`.
MSOPS_ENTRY(Attributes) {
  call.tensor("x");
  const Tensor bits = call.tensor_of("int64", "bits", 1), number = call.tensor_of("int64", "number", 1);
  const double value = call.number("value");
  const int64_t count = call.attribute("count", INT64_MIN, INT64_MAX);
  int64_t as_bits;
  memcpy(&as_bits, &value, sizeof as_bits);
  return call.run([&](auto) {
    parallel_for(call, 1, 1, Store{bits.as<int64_t>(), as_bits});
    parallel_for(call, 1, 1, Store{number.as<int64_t>(), count});
  });
}

MSOPS_ENTRY(Fails) { return 77; }
