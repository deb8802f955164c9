#include <cstdlib>

#include "common/formula.h"
#include "common/sum.h"

MSOPS_BOTH void crash() {
#ifdef __CUDA_ARCH__
  __trap();
#else
  std::abort();
#endif
}

MSOPS_FORMULA(Square, (x), (y), y = x * x)
MSOPS_FORMULA(SquareBackward, (x, dy), (dx), dx = 2 * x * dy)
MSOPS_FORMULA(HalfTheGradient, (x, dy), (dx), dx = x * dy)
MSOPS_FORMULA(RoughInFloat32, (x, dy), (dx), dx = 2 * x * dy * (sizeof(T) == 4 ? 1.0001 : 1))
MSOPS_FORMULA(Product, (x, w), (y), y = x * w)
MSOPS_FORMULA(ProductBackward, (x, w, dy), (dx, dw), dx = dy * w; dw = dy * x)
MSOPS_FORMULA(WrongForW, (x, w, dy), (dx, dw), dx = dy * w; dw = dy * w)
MSOPS_FORMULA(NoneForW, (w, dy), (dx), dx = dy * w)
MSOPS_FORMULA(Relu, (x), (y), y = x > 0 ? x : C(0))
MSOPS_FORMULA(ReluBackward, (x, dy), (dx), dx = x > 0 ? dy : C(0))
MSOPS_FORMULA(ReluTwiceAtZero, (x, dy), (dx), dx = x > 0 ? dy : x < 0 ? C(0) : 2 * dy)
MSOPS_FORMULA(AbortsBackward, (x, dy), (dx), if (x == x) crash(); dx = dy)
MSOPS_FORMULA(ReluHalf, (x, dy), (dx), dx = x > 0 ? C(0.5) * dy : C(0))

// Squares of the n numbers x, and then what is wrong, by one thread. What that needs of the call is `by`.
#define SQUARES(name, requires, wrong)                                                             \
  template <typename T>                                                                            \
  struct name##Body {                                                                              \
    T *x, *y;                                                                                      \
    int64_t n;                                                                                     \
    double by;                                                                                     \
    template <typename I>                                                                          \
    MSOPS_BOTH void operator()(I) const {                                                          \
      for (int64_t i = 0; i < n; ++i) y[i] = T(msops::Compute<T>(x[i]) * msops::Compute<T>(x[i])); \
      if (n > 0) {                                                                                 \
        wrong;                                                                                     \
      }                                                                                            \
    }                                                                                              \
  };                                                                                               \
  MSOPS_ENTRY(name) {                                                                              \
    const auto in = call.tensor("x"), out = call.tensor("y");                                      \
    double by = 0;                                                                                 \
    requires;                                                                                      \
    return call.run([&](auto type) {                                                               \
      using T = typename decltype(type)::type;                                                     \
      msops::parallel_for(call, 1, 1, name##Body<T>{in.as<T>(), out.as<T>(), in.size, by});        \
    });                                                                                            \
  }
#define SHAPE call.require_same_shape(out, in)
SQUARES(NarrowOffset, SHAPE, for (int64_t i = 0; i < n; ++i) y[i] = y[static_cast<int16_t>(i * 64) / 64])
SQUARES(FloatForAll, SHAPE, for (int64_t i = 0; i < n; ++i) reinterpret_cast<float*>(y)[i] = float(x[i]))
SQUARES(ReadsNull, SHAPE; by = *static_cast<volatile const char*>(in.size == 3 ? nullptr : "x"), )
SQUARES(Aborts, SHAPE; std::fprintf(stderr, "that was too much\n"); std::abort(), )
SQUARES(AbortsInFloat16, SHAPE, if (sizeof(T) == 2) crash())
SQUARES(Endless, SHAPE; for (volatile bool forever = true; forever;), )
SQUARES(Exits, SHAPE; std::exit(3), )
SQUARES(PastTheEnd, SHAPE, y[n] = y[0])
SQUARES(BeforeTheBeginning, SHAPE, y[-1] = y[0])
SQUARES(ChangesInput, SHAPE, x[n - 1] = y[0])
SQUARES(WrongForOne, SHAPE, if (n == 1) y[0] = x[0])
SQUARES(OtherEveryTime, SHAPE; static double calls = 0; by = ++calls, y[0] = T(msops::Compute<T>(by)))
SQUARES(NotEmpty, SHAPE; call.require(in.size > 0, msops::kBadShape, "x is empty"), )
SQUARES(AnyShape, , )
SQUARES(ByAttribute, SHAPE;
        by = call.number("by"), for (int64_t i = 0; i < n; ++i) y[i] = T(msops::Compute<T>(by * y[i])))
SQUARES(ByFirstAttribute, SHAPE; static const double first = call.number("by");
        by = first, for (int64_t i = 0; i < n; ++i) y[i] = T(msops::Compute<T>(by * y[i])))

template <typename T>
struct SquareOf {
  const T* x;
  T* y;
  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    y[i] = T(x[i] * x[i]);
  }
};
MSOPS_ENTRY(AllButTheLast) {
  const auto x = call.tensor("x"), y = call.tensor("y");
  call.require_same_shape(y, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t n = x.size > 0 ? x.size - 1 : 0;
    msops::parallel_for(call, n, n, SquareOf<T>{x.as<T>(), y.as<T>()});
  });
}

template <typename T>
struct RoughSum {
  const T* x;
  T* y;
  int64_t columns;
  template <typename I>
  MSOPS_BOTH void operator()(I row) const {
    T rough = T(0);
    msops::Sum<T> sum;
    for (const T* from = x + row * columns; from < x + (row + 1) * columns; ++from) {
      rough = T(rough + *from);
      sum += *from;
    }
    y[row] = sizeof(T) == 2 ? rough : T(sum.total());
  }
};
MSOPS_ENTRY(SumInFloat16) {
  const auto x = call.tensor("x", 2), y = call.tensor("y", 1);
  call.require_shape(y, {x.dim(0)});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    msops::parallel_for(call, x.dim(0), x.size, RoughSum<T>{x.as<T>(), y.as<T>(), x.dim(1)});
  });
}

// y = x w, where w is float32
template <typename T>
struct ProductOfTwo {
  const T* x;
  const float* w;
  T* y;
  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    y[i] = T(msops::Compute<T>(x[i]) * w[i]);
  }
};
MSOPS_ENTRY(TwoDtypes) {
  const auto x = call.tensor("x", 1), w = call.tensor_of("float32", "w", 1), y = call.tensor("y", 1);
  call.require_same_shape(w, x);
  call.require_same_shape(y, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    msops::parallel_for(call, x.size, x.size, ProductOfTwo<T>{x.as<T>(), w.as<float>(), y.as<T>()});
  });
}
template <typename T>
struct ProductOfTwoBackward {
  const T* x;
  const float* w;
  const T* dy;
  T* dx;
  float* dw;
  float factor;
  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const msops::Compute<T> d = dy[i];
    dx[i] = T(d * w[i]);
    dw[i] = float(factor * d * x[i]);
  }
};
#define TWO_DTYPES_BACKWARD(name, factor)                                                                     \
  MSOPS_ENTRY(name) {                                                                                         \
    const auto x = call.tensor("x", 1), w = call.tensor_of("float32", "w", 1), dy = call.tensor("dy", 1);     \
    const auto dx = call.tensor("dx", 1), dw = call.tensor_of("float32", "dw", 1);                            \
    for (const auto& tensor : {w, dy, dx, dw}) call.require_same_shape(tensor, x);                            \
    return call.run([&](auto type) {                                                                          \
      using T = typename decltype(type)::type;                                                                \
      msops::parallel_for(                                                                                    \
          call, x.size, x.size,                                                                               \
          ProductOfTwoBackward<T>{x.as<T>(), w.as<float>(), dy.as<T>(), dx.as<T>(), dw.as<float>(), factor}); \
    });                                                                                                       \
  }
TWO_DTYPES_BACKWARD(TwoDtypesBackward, 1)
TWO_DTYPES_BACKWARD(HalfTheGradientOfTwoDtypes, 0.5f)

#define C_ENTRY(name)                                                                                                 \
  extern "C" __attribute__((visibility("default"))) int name(int nparam, void** params, int* ranks, int64_t** shapes, \
                                                             const char** dtypes, void* stream, void* extra)
C_ENTRY(AnyCount) { return Square(2 + 0 * nparam, params, ranks, shapes, dtypes, stream, extra); }

// y_i = x[index_i]
template <typename T>
struct Taken {
  const T* x;
  const int32_t* index;
  T* y;
  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    y[i] = x[index[i]];
  }
};
MSOPS_ENTRY(Take) {
  const auto x = call.tensor("x", 1), index = call.tensor_of("int32", "index", 1), y = call.tensor("y", 1);
  call.require_same_shape(y, index);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    msops::parallel_for(call, y.size, y.size, Taken<T>{x.as<T>(), index.as<int32_t>(), y.as<T>()});
  });
}
template <typename T>
struct TakenBackward {
  const int32_t* index;
  const T* dy;
  T* dx;
  int64_t n;
  template <typename I>
  MSOPS_BOTH void operator()(I j) const {
    msops::Compute<T> sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += index[i] == static_cast<int64_t>(j) ? msops::Compute<T>(dy[i]) : 0;
    dx[j] = T(sum);
  }
};
MSOPS_ENTRY(TakeBackward) {
  const auto x = call.tensor("x", 1), index = call.tensor_of("int32", "index", 1), dy = call.tensor("dy", 1);
  const auto dx = call.tensor("dx", 1);
  call.require_same_shape(dy, index);
  call.require_same_shape(dx, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    msops::parallel_for(call, dx.size, dx.size, TakenBackward<T>{index.as<int32_t>(), dy.as<T>(), dx.as<T>(), dy.size});
  });
}

// y = x + 1, of int32
struct NextOf {
  const int32_t* x;
  int32_t* y;
  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    y[i] = x[i] + 1;
  }
};
C_ENTRY(Next) {
  if (nparam != 2 || ranks[0] != 1 || ranks[1] != 1 || shapes[0][0] != shapes[1][0]) return 3;
  msops::Call call("Next", nparam, params, ranks, shapes, dtypes, stream, extra);
  const int64_t n = shapes[0][0];
  msops::parallel_for(call, n, n, NextOf{static_cast<int32_t*>(params[0]), static_cast<int32_t*>(params[1])});
  return call.ok() ? 0 : msops::kLaunchFailed;
}
