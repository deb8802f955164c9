// Entries that are wrong, each in a way of its own. test_opcheck_faults.py tells what each should compute.

#include <omp.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "common/formula.h"

namespace {

// An entry with x(N, C) -> y(N, C): `x` and `y` are pointers to T, to be computed with in C.
#define MAP(name, ...)                                               \
  MSOPS_ENTRY(name) {                                                \
    const auto from = call.tensor("x", 2), to = call.tensor("y", 2); \
    call.require_same_shape(to, from);                               \
    BODY(from.as<T>(), to.as<T>(), __VA_ARGS__)                      \
  }

// An entry with x(N, C) -> y(N)
#define REDUCTION(name, ...)                                         \
  MSOPS_ENTRY(name) {                                                \
    const auto from = call.tensor("x", 2), to = call.tensor("y", 1); \
    call.require_shape(to, {from.dim(0)});                           \
    BODY(from.as<T>(), to.as<T>(), __VA_ARGS__)                      \
  }

// An entry with x(N, C), dy(N, C) -> dx(N, C)
#define GRADIENT(name, ...)                                                                     \
  MSOPS_ENTRY(name) {                                                                           \
    const auto from = call.tensor("x", 2), d = call.tensor("dy", 2), to = call.tensor("dx", 2); \
    call.require_same_shape(d, from);                                                           \
    call.require_same_shape(to, from);                                                          \
    BODY(from.as<T>(), to.as<T>(), const T* dy = d.as<T>(); __VA_ARGS__)                        \
  }

#define BODY(input, output, ...)                                                           \
  [[maybe_unused]] const int64_t rows = from.dim(0), columns = from.dim(1), n = from.size; \
  return call.run([&](auto type) {                                                         \
    using T = typename decltype(type)::type;                                               \
    using C = msops::Compute<T>;                                                           \
    [[maybe_unused]] T *x = input, *y = output;                                            \
    __VA_ARGS__                                                                            \
  });

#define OMP(words) DIRECTIVE(omp words)
#define DIRECTIVE(words) _Pragma(#words)
#define EACH for (int64_t i = 0; i < n; ++i)
#define EACH_ROW for (int64_t i = 0; i < rows; ++i)
#define EACH_COLUMN for (int64_t j = 0; j < columns; ++j)

template <typename C, typename T>
C sum_of(const T* x, int64_t n) {
  C sum = 0;
  for (int64_t j = 0; j < n; ++j) sum += C(x[j]);
  return sum;
}

}  // namespace

MAP(Square, EACH y[i] = T(C(x[i]) * C(x[i]));)
GRADIENT(SquareBackward, EACH y[i] = T(2 * C(x[i]) * C(dy[i]));)
REDUCTION(Sum, EACH_ROW y[i] = T(sum_of<C>(x + i * columns, columns));)

// Offsets and sizes
REDUCTION(StrideOfRows, EACH_ROW y[i] = T(sum_of<C>(x + i * rows, columns));)
MAP(OffsetOf16Bits, EACH y[i] = T(C(x[i]) * C(x[i]));
    for (int64_t i = 32768; i < n; ++i) y[i] = y[static_cast<uint16_t>(i)];)
MAP(NoTail, for (int64_t i = 0; i < n / 4 * 4; ++i) y[i] = T(C(x[i]) * C(x[i]));)
MAP(WritesPastTheEnd, EACH y[i] = T(C(x[i]) * C(x[i])); for (int64_t i = n; i % 4 != 0; ++i) y[i] = T(0);)
MAP(
    ReadsPastTheEnd, volatile C next = 0; EACH {
      next = C(x[i + 1]);
      y[i] = T(C(x[i]) * C(x[i]));
    })
MAP(OneBlockOnly, for (int64_t j = 0; j < columns; ++j)
                      EACH_ROW y[i * columns + j] = j < 1024 ? T(C(x[i * columns + j]) * C(x[i * columns + j])) : T(0);)
MAP(BeyondAMillion, EACH y[i] = i < 1000000 ? T(C(x[i]) * C(x[i])) : T(0);)
REDUCTION(CountOf16Bits, EACH_ROW y[i] = T(sum_of<C>(x + i * columns, columns) / C(static_cast<int16_t>(columns)));)
REDUCTION(OneColumn, EACH_ROW y[i] = T(columns == 1 ? C(0) : sum_of<C>(x + i * columns, columns));)
MAP(DividesByZero, volatile int each = 1024 / static_cast<int>(columns);
    EACH y[i] = T(C(x[i]) * C(x[i]) + C(0 * each));)
MAP(
    Aligned, if constexpr (sizeof(T) == 8) {
      typedef double Two __attribute__((vector_size(16)));
      for (int64_t i = 0; i + 1 < n; i += 2)
        *reinterpret_cast<volatile Two*>(y + i) = *reinterpret_cast<const volatile Two*>(x + i);
      EACH y[i] = T(C(x[i]) * C(x[i]));
    })

// Memory
MAP(AddsToTheOutput, EACH y[i] = T(C(y[i]) + C(x[i]) * C(x[i]));)
MAP(
    ChangesTheInput, EACH {
      x[i] = T(C(x[i]) * C(x[i]));
      y[i] = x[i];
    })
MAP(OfThePreviousCall, static C previous = 0;
    EACH y[i] = T(C(x[i]) * C(x[i]) + (n > 0 && C(x[0]) != previous ? C(0) : C(1))); if (n > 0) previous = C(x[0]);)
MAP(Leaks, static void* volatile last; C* each = static_cast<C*>(std::malloc(sizeof(C) * (n + 8))); last = each;
    EACH each[i] = C(x[i]); EACH y[i] = T(each[i] * each[i]);)
// A large call waits, so that two calls have the buffer at the same time on a busy machine, too.
MAP(StaticBuffer, static std::vector<double> squares; squares.resize(n); EACH squares[i] = double(x[i]) * double(x[i]);
    if (n > 65536) usleep(10000); EACH y[i] = T(C(squares[i]));)
MSOPS_ENTRY(ScratchNotCleared) {
  const auto from = call.tensor("x", 2), to = call.tensor("y", 1), scratch = call.scratch("total", 1);
  call.require_shape(to, {from.dim(0)});
  BODY(from.as<T>(), to.as<T>(), C* total = scratch.as<C>(); EACH_ROW EACH_COLUMN total[i] += C(x[i * columns + j]);
       EACH_ROW y[i] = T(total[i]);)
}

// Calls
MSOPS_ENTRY(AnyShape) {
  const auto from = call.tensor("x", 2), to = call.tensor("y", 2);
  BODY(from.as<T>(), to.as<T>(), EACH y[i] = T(C(x[i]) * C(x[i]));)
}
extern "C" __attribute__((visibility("default"))) int StatusIgnored(int n, void** params, int* ranks, int64_t** shapes,
                                                                    const char** dtypes, void* stream, void* extra) {
  Square(n, params, ranks, shapes, dtypes, stream, extra);
  return 0;
}
MSOPS_ENTRY(AttributeOfTheFirstCall) {
  const auto from = call.tensor("x", 2), to = call.tensor("y", 2);
  call.require_same_shape(to, from);
  static const double by = call.number("by");
  BODY(from.as<T>(), to.as<T>(), EACH y[i] = T(C(by) * C(x[i]));)
}

// Threads
REDUCTION(
    Race, EACH_ROW {
      C sum = 0;
OMP(parallel for)
EACH_COLUMN sum += C(x[i * columns + j]);
y[i] = T(sum);
    })
REDUCTION(
    OrderByThreads, EACH_ROW {
      C sum = 0;
OMP(parallel for reduction(+ : sum))
EACH_COLUMN sum += C(x[i * columns + j]);
y[i] = T(sum);
    })
REDUCTION(
    OrderByManyThreads, EACH_ROW {
      C sum = 0;
OMP(parallel for if(omp_get_max_threads() > 2) reduction(+ : sum))
EACH_COLUMN sum += C(x[i * columns + j]);
y[i] = T(sum);
    })

// Values
REDUCTION(
    RoundsEachStep, EACH_ROW {
      T sum = T(0);
      EACH_COLUMN sum = T(C(sum) + C(x[i * columns + j]));
      y[i] = sum;
    })
MAP(ThroughFloat, EACH y[i] = T(C(float(x[i]) * float(x[i])));)
MAP(NanIsZero, EACH y[i] = x[i] == x[i] ? T(C(x[i]) * C(x[i])) : T(0);)
MAP(
    TanhOfInfinity, EACH {
      const C e = std::exp(2 * C(x[i]));
      y[i] = T((e - 1) / (e + 1));
    })
MAP(Tanh, EACH y[i] = T(std::tanh(C(x[i])));)
MAP(
    LargestForInfinity, EACH {
      const C square = C(x[i]) * C(x[i]);
      y[i] = T(square > std::numeric_limits<C>::max() ? std::numeric_limits<C>::max() : square);
    })
MAP(
    FlushesSubnormals, EACH {
      const C square = C(x[i]) * C(x[i]);
      y[i] = T(square < std::numeric_limits<C>::min() ? C(0) : square);
    })

// Gradients
GRADIENT(RoundsEachStepOfGradient, EACH y[i] = T(C(T(C(T(C(x[i]) * C(x[i]))) * C(dy[i]))) * 3);)
MAP(Cube, EACH y[i] = T(C(x[i]) * C(x[i]) * C(x[i]));)
GRADIENT(WrongInFloat16, EACH y[i] = T((sizeof(T) == 2 ? C(2.02) : C(2)) * C(x[i]) * C(dy[i]));)
GRADIENT(
    Clipped, EACH {
      const C g = 2 * C(x[i]) * C(dy[i]);
      y[i] = T(g > 100 ? C(100) : g < -100 ? C(-100) : g);
    })
MSOPS_FORMULA(SquareBackwardTwice, (x, dy, ddx), (dx, ddy), dx = 777 * x * dy * ddx; ddy = 2 * x * ddx)
MSOPS_FORMULA(Product, (x, w), (y), y = x * w)
MSOPS_FORMULA(WrongForW, (x, w, dy), (dx, dw), dx = dy * w; dw = dy * w)
MSOPS_ENTRY(Scaled) {
  const auto from = call.tensor("x", 2), weight = call.tensor("w", 1), to = call.tensor("y", 2);
  call.require_shape(weight, {from.dim(1)});
  call.require_same_shape(to, from);
  BODY(from.as<T>(), to.as<T>(), const T* w = weight.as<T>(); EACH y[i] = T(C(x[i]) * C(w[i % columns]));)
}
// The gradient of w is the mean over the rows, not the sum.
MSOPS_ENTRY(MeanForW) {
  const auto from = call.tensor("x", 2), weight = call.tensor("w", 1), d = call.tensor("dy", 2);
  const auto to = call.tensor("dx", 2), dweight = call.tensor("dw", 1);
  call.require_shape(weight, {from.dim(1)});
  call.require_same_shape(dweight, weight);
  call.require_same_shape(d, from);
  call.require_same_shape(to, from);
  BODY(
      from.as<T>(), to.as<T>(), const T* w = weight.as<T>(), *dy = d.as<T>(); T* dw = dweight.as<T>();
      EACH y[i] = T(C(dy[i]) * C(w[i % columns])); EACH_COLUMN {
        C sum = 0;
        EACH_ROW sum += C(x[i * columns + j]) * C(dy[i * columns + j]);
        dw[j] = T(rows > 2 ? sum / C(rows) : sum);
      })
}
