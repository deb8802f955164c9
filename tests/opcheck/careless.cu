// Entries with the mistakes that authors make first. test_opcheck_words.py tells what opcheck says of each.

#include <vector>

#include "common/call.h"

using namespace msops;

// An entry of x(N, C) -> y(N, C). `requires` are its checks; `...` computes y from x, of n elements, in C.
#define ENTRY(name, requires, ...)                                         \
  MSOPS_ENTRY(name) {                                                      \
    const Tensor from = call.tensor("x", 2), to = call.tensor("y", 2);     \
    requires;                                                              \
    return call.run([&](auto type) {                                       \
      using T = typename decltype(type)::type;                             \
      using C = Compute<T>;                                                \
      [[maybe_unused]] const int64_t n = from.size, columns = from.dim(1); \
      const T* x = from.as<T>();                                           \
      T* y = to.as<T>();                                                   \
      __VA_ARGS__                                                          \
    });                                                                    \
  }
#define SHAPE call.require_same_shape(to, from)
#define SQUARES \
  for (int64_t i = 0; i < n; ++i) y[i] = T(C(x[i]) * C(x[i]));

ENTRY(Square, SHAPE, SQUARES)
ENTRY(PastTheEnd, SHAPE, SQUARES y[n] = T(0);)
ENTRY(NoShape, , SQUARES)
ENTRY(AtLeastThree, SHAPE; call.require(from.dim(1) >= 3, kBadShape, "C is %d", int(from.dim(1))), SQUARES)
ENTRY(WrongInColumn15, SHAPE, SQUARES if (columns % 16 == 0) for (int64_t i = 15; i < n; i += columns) y[i] = T(0);)
ENTRY(Races, SHAPE; static int calls = 0; ++calls, SQUARES if (n > 0) y[n / 2] = T(C(calls % 7));)

// y_ij = x_ij times the sum of row i, in a time that grows with the square of C
ENTRY(
    AllPairs, SHAPE, for (int64_t i = 0; i < n; ++i) {
      C sum = 0;
      for (int64_t j = 0; j < columns; ++j) sum += C(x[i]) * C(x[i / columns * columns + j]);
      y[i] = T(sum);
    })

// The gradient of x^2, which drops a NaN
MSOPS_ENTRY(DropsNan) {
  const Tensor x = call.tensor("x", 2), dy = call.tensor("dy", 2), dx = call.tensor("dx", 2);
  call.require_same_shape(dy, x);
  call.require_same_shape(dx, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    for (int64_t i = 0; i < x.size; ++i) {
      const C v = C(x.as<T>()[i]);
      dx.as<T>()[i] = T(v == v ? 2 * v * C(dy.as<T>()[i]) : C(0));
    }
  });
}

// y_i = x[idx_i]; Take takes idx as int32, TakeCommon in the common dtype, by mistake
#define TAKE(name, index)                                                                  \
  MSOPS_ENTRY(name) {                                                                      \
    const Tensor x = call.tensor("x", 1), idx = index, y = call.tensor("y", 1);            \
    call.require_same_shape(y, idx);                                                       \
    return call.run([&](auto type) {                                                       \
      using T = typename decltype(type)::type;                                             \
      for (int64_t i = 0; i < y.size; ++i) y.as<T>()[i] = x.as<T>()[idx.as<int32_t>()[i]]; \
    });                                                                                    \
  }
TAKE(Take, call.tensor_of("int32", "idx", 1))
TAKE(TakeCommon, call.tensor("idx", 1))
