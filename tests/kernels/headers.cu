#include "common/formula.h"
#include "common/rows.h"

MSOPS_FORMULA(Relu, (x), (y), y = max(x, C(0)))
MSOPS_FORMULA(Functions, (x, y), (least, most, size, power, inside), least = min(x, y); most = max(x, y); size = abs(x);
              power = pow(size, y) + pow(x, 2); inside = clamp(x, -1, y))
MSOPS_FORMULA(ReluBackward, (x, dy), (dx), dx = x > 0 ? dy : C(0))
MSOPS_FORMULA(Limits, (x), (y), y = std::min(x, std::numeric_limits<C>::max()))
MSOPS_FORMULA_WITH(Elu, (x), (y), (alpha), y = x > 0 ? x : alpha * expm1(x))
MSOPS_FORMULA_WITH(Affine, (x), (y), (factor, offset), y = factor * x + offset)

using namespace msops;

namespace {

struct Power {
  template <typename C>
  MSOPS_BOTH void operator()(C x, C& y) const {
    y = pow(x, C(3));
  }
};

template <typename T>
struct Successor {
  MSOPS_BOTH void operator()(T x, T& y) const { y = msops::max(x, 0) + 1; }
};

template <typename C>
struct Constantly {
  C value;

  MSOPS_BOTH void operator()(C, C& y) const { y = value; }
};

template <typename T>
struct Largest {
  using C = Compute<T>;
  Rows<const T> x;
  T* y;
  int64_t* column;

  struct At {
    C value;
    int64_t column;
  };

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    const auto larger = [](At a, At b) {
      return b.value > a.value || (b.value == a.value && b.column < a.column) ? b : a;
    };
    const At most = team.reduce(At{C(-HUGE_VAL), INT64_MAX}, larger, [](int64_t j, C v) { return At{v, j}; }, x[row]);
    team.store(y + row, most.value);
    team.store(column + row, most.column);
  }
};

// The running index times x, up to the diagonal, divided by the sum of these.
template <typename T>
struct Causal {
  using C = Compute<T>;
  Rows<const T> x;
  Rows<T> y;

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    const auto term = [row](int64_t j, C v) { return j <= row ? C(j + 1) * v : C(0); };
    const C sum = team.sum(term, x[row]), most = team.max(term, x[row]);
    team.map([&](int64_t j, C v) { return term(j, v) / sum + most; }, y[row], x[row]);
  }
};

}  // namespace

MSOPS_ENTRY(Cube) {
  const Tensor x = call.tensor("x"), y = call.tensor("y");
  return call.run<float, BFloat16>([&](auto type) {
    using T = typename decltype(type)::type;
    elementwise<T>(call, x.size, Power{}, {x.as<T>()}, {y.as<T>()});
  });
}

MSOPS_ENTRY(Next) {
  const Tensor x = call.tensor("x"), y = call.tensor("y");
  return call.run<int8_t, uint8_t, int32_t, int64_t>([&](auto type) {
    using T = typename decltype(type)::type;
    elementwise<T>(call, x.size, Successor<T>{}, {x.as<T>()}, {y.as<T>()});
  });
}

MSOPS_ENTRY(ArgMax) {
  const Tensor x = call.tensor("x", 2), y = call.tensor("y", 1), column = call.tensor_of("int64", "column", 1);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    for_rows<T>(call, x.dim(0), {x}, Largest<T>{x, y.as<T>(), column.as<int64_t>()});
  });
}

MSOPS_ENTRY(Weighted) {
  const Tensor x = call.tensor("x", 2), y = call.tensor("y", 2);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    for_rows<T>(call, x.dim(0), {x, y}, Causal<T>{x, y});
  });
}

// y = times * share of each element
MSOPS_ENTRY(Counted) {
  const Tensor x = call.tensor("x"), y = call.tensor("y");
  const double times = static_cast<double>(call.attribute("times", 1, 8)), share = call.number("share");
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    elementwise<T>(call, x.size, Constantly<Compute<T>>{Compute<T>(times * share)}, {x.as<T>()}, {y.as<T>()});
  });
}
