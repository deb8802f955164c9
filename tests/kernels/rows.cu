#include "common/rows_sums.h"

using namespace msops;

namespace {

template <typename T>
struct Softmax {
  using C = Compute<T>;
  Rows<const T> x;
  Rows<T> y;

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    const auto x_row = team.load(x[row]);
    const C most = team.max(x_row);
    const C sum = team.sum([&](C v) { return exp(v - most); }, x_row);
    team.map([&](C v) { return exp(v - most) / sum; }, y[row], x_row);
  }
};

// dx = y (dy - sum of y dy), with two rows of which one is loaded, weighted by the column's weight.
template <typename T>
struct SoftmaxBackward {
  using C = Compute<T>;
  Rows<const T> y, dy;
  Rows<T> dx;
  const T* weight;

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    const auto y_row = team.load(y[row]);
    const auto gradient = [&](int64_t j, C d) { return d * C(weight[j]); };
    const C sum = team.sum([&](int64_t j, C v, C d) { return v * gradient(j, d); }, y_row, dy[row]);
    team.map([&](int64_t j, C v, C d) { return v * (gradient(j, d) - sum); }, dx[row], y_row, dy[row]);
  }
};

template <typename T>
struct Statistics {
  using C = Compute<T>;
  Rows<const T> x;
  int64_t* column;
  T *most, *log_sum, *mean, *variance;

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    const auto x_row = team.load(x[row]);
    const auto found = team.reduce(ArgMax<C>(), x_row);
    const auto exponentials = team.reduce(MaxSum<C>(), x_row);
    const auto moments = team.reduce(Moments<C>(), x_row);
    team.store(column + row, found.column);
    team.store(most + row, found.value);
    team.store(log_sum + row, exponentials.max + log(exponentials.sum));
    team.store(mean + row, moments.mean);
    team.store(variance + row, moments.variance());
  }
};

// dx = dy x / sum of x x, dweight_j = sum over rows of x_j dy_j, dbias_j = sum over rows of j dy_j.
template <typename T>
struct RowsWithSums {
  using C = Compute<T>;
  static constexpr int kRows = 2;
  Rows<const T> x, dy;
  Rows<T> dx;

  template <typename Team>
  MSOPS_BOTH auto load(int64_t row, Team&& team) const {
    const auto x_row = team.load(x[row]), dy_row = team.load(dy[row]);
    return loaded(x_row, dy_row);
  }
  template <typename Team, typename Held, typename Sums>
  MSOPS_BOTH void operator()(int64_t row, const Team& team, const Held& held, Sums& sums) const {
    const auto x_row = team.compute(std::get<0>(held));
    const auto& dy_row = std::get<1>(held);
    const auto product = team.compute([](C x, C dy) { return x * dy; }, x_row, dy_row);
    const auto both = team.sum([](C x, C p) { return TwoSums<C>{x * x, p}; }, x_row, product);
    team.map([&](C p) { return p / both.of[0]; }, dx[row], product);
    sums.template add<0>([](C p) { return p; }, product);
    sums.template add<1>([](int64_t j, C dy) { return C(j) * dy; }, dy_row);
  }
};

}  // namespace

MSOPS_ENTRY(SumsOfRows) {
  const Tensor x = call.tensor("x"), dy = call.tensor("dy"), dx = call.tensor("dx");
  const Tensor dweight = call.tensor("dweight"), dbias = call.tensor("dbias");
  const Tensor first = call.scratch("first", 2), second = call.scratch("second", 2);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const int64_t columns = x.dim(1);
    const int64_t used = for_rows_with_sums<T, 2>(call, x.dim(0), {x, dy, dx}, RowsWithSums<T>{x, dy, dx},
                                                  {first.as<C>(), second.as<C>()}, first.dim(0));
    sum_rows(call, used, columns, columns, first.as<C>(), dweight.as<T>());
    sum_rows(call, used, columns, columns, second.as<C>(), dbias.as<T>());
  });
}

MSOPS_SCRATCH(SumsOfRows) {
  const Tensor x = call.tensor("x", 2);
  const int64_t parts = row_parts(x.dim(0), x.dim(1));
  return {{parts, x.dim(1)}, {parts, x.dim(1)}};
}

MSOPS_ENTRY(SoftmaxForward) {
  const Tensor x = call.tensor("x"), y = call.tensor("y");
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    for_rows<T>(call, x.size / x.dim(-1), {x, y}, Softmax<T>{x, y});
  });
}

MSOPS_ENTRY(SoftmaxBackwardWeighted) {
  const Tensor y = call.tensor("y", 2), dy = call.tensor("dy", 2), weight = call.tensor("weight", 1);
  const Tensor dx = call.tensor("dx", 2);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    for_rows<T>(call, y.dim(0), {y, dy, dx}, SoftmaxBackward<T>{y, dy, dx, weight.as<T>()});
  });
}

MSOPS_ENTRY(StatisticsForward) {
  const Tensor x = call.tensor("x", 2), column = call.tensor_of("int64", "column", 1), most = call.tensor("most", 1);
  const Tensor log_sum = call.tensor("log_sum", 1), mean = call.tensor("mean", 1);
  const Tensor variance = call.tensor("variance", 1);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const Statistics<T> body{x, column.as<int64_t>(), most.as<T>(), log_sum.as<T>(), mean.as<T>(), variance.as<T>()};
    for_rows<T>(call, x.dim(0), {x}, body);
  });
}
