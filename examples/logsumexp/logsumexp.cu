// y = log sum_j e^x_j of each row x,  dx_j = dy e^x_j / sum_i e^x_i

#include "common/rows.h"

using namespace msops;

namespace {

// sum_j e^(x_j - shift), where the shift is the largest, so that nothing overflows.
template <typename C>
struct ShiftedSum {
  C shift, sum;

  template <typename Team, typename T>
  MSOPS_BOTH ShiftedSum(const Team& team, Row<const T> x) {
    const C most = team.max(x);
    shift = isfinite(most) ? most : C(0);  // infinity - infinity is NaN
    sum = team.sum([this](C v) { return exp(v - shift); }, x);
  }
};

template <typename T>
struct Forward {
  Rows<const T> x;
  T* y;

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    const ShiftedSum<Compute<T>> of(team, x[row]);
    team.store(y + row, of.shift + log(of.sum));
  }
};

template <typename T>
struct Backward {
  Rows<const T> x;
  const T* dy;
  Rows<T> dx;

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    const ShiftedSum<Compute<T>> of(team, x[row]);
    const auto slope = of.sum == 0 ? 0 : dy[row] / of.sum;  // 0 where all are -infinity
    team.map([&](auto v) { return slope * exp(v - of.shift); }, dx[row], x[row]);
  }
};

}  // namespace

MSOPS_ENTRY(LogsumexpForward) {
  const Tensor x = call.tensor("x"), y = call.tensor("y");
  call.require_shape_of_rows(y, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    for_rows<T>(call, y.size, {x}, Forward<T>{x, y.as<T>()});
  });
}

MSOPS_ENTRY(LogsumexpBackward) {
  const Tensor x = call.tensor("x"), dy = call.tensor("dy"), dx = call.tensor("dx");
  call.require_shape_of_rows(dy, x);
  call.require_same_shape(dx, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    for_rows<T>(call, dy.size, {x, dx}, Backward<T>{x, dy.as<T>(), dx});
  });
}
