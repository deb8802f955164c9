// y_j = xhat_j weight_j + bias_j,  xhat_j = (x_j - mean(x)) r,  r = 1 / sqrt(mean((x - mean(x))^2) + eps), where a row
// x holds the last axes

#include "shared/norm/second_gradient.h"

using namespace msops;
using namespace msops::norm;

namespace {

template <typename T>
struct Normalize {
  using C = Compute<T>;
  Rows<T> y;
  Parameters<T, 0> weight;
  Parameters<T, 1> bias;
  C eps, inverse;  // of the number of columns

  Normalize(const Tensor& to, const Tensor& factors, const Tensor& terms, double epsilon, int64_t columns)
      : y{to.as<T>(), columns},
        weight(factors, columns, C(1)),
        bias(terms, columns, C(0)),
        eps(C(epsilon)),
        inverse(1 / C(columns)) {}

  template <typename Team, typename Row>
  MSOPS_BOTH void operator()(int64_t row, const Team& team, const Row& x_row) const {
    const C n = C(y.columns);
    // In float32, rows that packs tile take less time with two reductions.
    if constexpr (Team::kKeepsPacks && (sizeof(T) == 2 || Team::kHasEdges)) {
      const auto about = team.template sums_about_pivot<kTakesRests<T>>(x_row);
      const Normal<T, true> normal(about.pivot, about.sums.of[0] * inverse, about.sums.of[1] * inverse, C(1), eps);
      const auto of_element = [=](C v, C w, C b) { return normal(v) * w + b; };
      team.with_rows([&](const auto&... parameters) { team.map(of_element, y[row], x_row, parameters...); }, weight,
                     bias);
    } else {
      const C mean = team.sum(x_row) / n;
      TwoSums<C> sums;
      if constexpr (kTakesRests<T>) {
        sums = team.sum([=](C v) { return TwoSums<C>{(v - mean) * (v - mean), v - mean}; }, x_row);
      } else {
        sums.of[0] = team.sum([=](C v) { return (v - mean) * (v - mean); }, x_row);
      }
      const Normal<T, kTakesRests<T>> normal(mean, sums.of[0], sums.of[1], n, eps);
      team.map([=](C v, C w, C b) { return normal(v) * w + b; }, y[row], x_row, weight, bias);
    }
  }
};

template <typename T>
struct Forward {
  Rows<const T> x;
  Normalize<T> normalize;

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    normalize(row, team, team.load(x[row]));
  }
};

// Sums that the chip does not hold are read again, from where the result will be.
template <typename T>
struct AddForward {
  using C = Compute<T>;
  Rows<const T> x, residual;
  Normalize<T> normalize;

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    const auto x_row = team.load(x[row]);
    const auto residual_row = team.load(residual[row]);
    normalize(row, team, team.map_and_load([](C a, C b) { return a + b; }, normalize.y[row], x_row, residual_row));
  }
};

// Requires the parameters to have the last axes of x, and returns how many elements these have. Without a weight it is
// the last axis alone.
int64_t columns_of(Call& call, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const Tensor& parameter = weight.dtype ? weight : bias;
  const int axes = weight.dtype ? weight.rank : 1;
  bool fits = 1 <= axes && axes <= x.rank && (!parameter.dtype || parameter.rank == axes);
  for (int axis = 1; fits && parameter.dtype && axis <= axes; ++axis) fits = parameter.dim(-axis) == x.dim(-axis);
  call.require(fits, kBadShape, "x and its parameters have different last axes");
  if (weight.dtype && bias.dtype) call.require_same_shape(bias, weight);
  return parameter.dtype ? parameter.size : x.dim(-1);
}

template <typename T>
Rows<T> rows_in(const Tensor& tensor, int64_t columns) {
  return {tensor.as<T>(), columns};
}

template <typename T>
void normalize(Call& call, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& y, double eps,
               int64_t columns) {
  const Forward<T> body{rows_in<const T>(x, columns), {y, weight, bias, eps, columns}};
  const Normalize<T>& to = body.normalize;
  for_rows<T, sizeof(T) == 4, sizeof(T) == 2 ? 4 : 2, 4>(call, rows_of(x, columns), {body.x, to.y, to.weight, to.bias},
                                                         body);
}

template <typename T>
void find_gradients(Call& call, const Tensor& x, const Tensor& weight, const Tensor& dy, const Tensor& dx,
                    const NormSums& sums, double eps, int64_t columns) {
  using C = Compute<T>;
  const Parameters<T, 0> factors(weight, columns, C(1));
  const auto from = rows_in<const T>(x, columns), dfrom = rows_in<const T>(dy, columns);
  const auto to = rows_in<T>(dx, columns);
  const NormGradient<T, true, false> body{from, dfrom, from, to, factors, C(eps), C(0)};
  sums.run_gradient<T>(call, rows_of(x, columns), {from, dfrom, to, factors}, body);
}

// x (B, ..., C) has B samples, each of which has a row of the parameters (B, C).
struct Samples {
  int64_t count, columns;

  Samples(Call& call, const Tensor& x, const Tensor& weight, const Tensor& bias) : count(x.dim(0)), columns(x.dim(-1)) {
    call.require(x.rank >= 2, kBadRank, "x has %d axes, expected at least 2", x.rank);
    for (const Tensor& each : {weight, bias}) call.require_shape(each, {count, columns});
  }

  // Returns a sample's part of a tensor of T.
  template <typename T>
  Tensor part(const Tensor& of, int64_t sample) const {
    Tensor part = of;
    part.size = of.size / count;
    if (part.data) part.data = of.as<T>() + sample * part.size;
    return part;
  }
};

}  // namespace

// (x, weight?, bias?) -> (y)
MSOPS_ENTRY(LayerNormForward) {
  const Tensor x = call.tensor("x"), weight = call.optional_of("common|float32", "weight");
  const Tensor bias = call.optional_of("common|float32", "bias"), y = call.tensor("y");
  const double eps = eps_of(call);
  const int64_t columns = columns_of(call, x, weight, bias);
  call.require_same_shape(y, x);
  return call.run([&](auto type) { normalize<typename decltype(type)::type>(call, x, weight, bias, y, eps, columns); });
}

// (x, residual, weight?, bias?) -> (y), which normalizes x + residual
MSOPS_ENTRY(AddLayerNormForward) {
  const Tensor x = call.tensor("x"), residual = call.tensor("residual");
  const Tensor weight = call.optional_of("common|float32", "weight");
  const Tensor bias = call.optional_of("common|float32", "bias"), y = call.tensor("y");
  const double eps = eps_of(call);
  const int64_t columns = columns_of(call, x, weight, bias);
  for (const Tensor& tensor : {residual, y}) call.require_same_shape(tensor, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const auto from = rows_in<const T>(x, columns), other = rows_in<const T>(residual, columns);
    const AddForward<T> body{from, other, {y, weight, bias, eps, columns}};
    const Normalize<T>& to = body.normalize;
    for_rows<T, true, sizeof(T) == 2 ? 4 : 2, 4>(call, rows_of(x, columns), {from, other, to.y, to.weight, to.bias},
                                                 body);
  });
}

// (x, weight, bias) -> (y), with a row of parameters for each sample
MSOPS_ENTRY(LayerNormOfSamplesForward) {
  const Tensor x = call.tensor("x"), weight = call.tensor("weight", 2), bias = call.tensor("bias", 2);
  const Tensor y = call.tensor("y");
  const double eps = eps_of(call);
  const Samples all(call, x, weight, bias);
  call.require_same_shape(y, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t i = 0; i < all.count; ++i) {
      const auto of = [&](const Tensor& tensor) { return all.part<T>(tensor, i); };
      normalize<T>(call, of(x), of(weight), of(bias), of(y), eps, all.columns);
    }
  });
}

// (x, weight?, bias?, dy) -> (dx, dweight?, dbias?, partial): the values of the bias are not read. `partial` is
// scratch, with a row for each part of the sums over rows: those of the weight, then those of the bias.
MSOPS_ENTRY(LayerNormBackward) {
  const Tensor x = call.tensor("x"), weight = call.optional_of("common|float32", "weight");
  const Tensor bias = call.optional_of("common|float32", "bias"), dy = call.tensor("dy"), dx = call.tensor("dx");
  const Tensor dweight = call.optional_of("common|float32", "dweight");
  const Tensor dbias = call.optional_of("common|float32", "dbias");
  const NormSums sums{dweight, dbias, call.scratch("partial", 2)};
  const double eps = eps_of(call);
  const int64_t columns = columns_of(call, x, weight, bias);
  call.require_same_shape(dy, x);
  call.require_same_shape(dx, x);
  call.require_gradient(dweight, weight);
  call.require_gradient(dbias, bias);
  sums.check(call, columns, 2);
  return call.run(
      [&](auto type) { find_gradients<typename decltype(type)::type>(call, x, weight, dy, dx, sums, eps, columns); });
}

MSOPS_SCRATCH(LayerNormBackward) {
  const Tensor x = call.tensor("x"), weight = call.optional_of("common|float32", "weight");
  return NormSums::scratch(x, weight.dtype ? weight.size : x.dim(-1), 2);
}

// (x, weight, bias, dy) -> (dx, dweight, dbias, partial): the values of the bias are not read. The samples take turns
// with the scratch.
MSOPS_ENTRY(LayerNormOfSamplesBackward) {
  const Tensor x = call.tensor("x"), weight = call.tensor("weight", 2), bias = call.tensor("bias", 2);
  const Tensor dy = call.tensor("dy"), dx = call.tensor("dx");
  const Tensor dweight = call.tensor("dweight", 2), dbias = call.tensor("dbias", 2);
  const Tensor partial = call.scratch("partial", 2);
  const double eps = eps_of(call);
  const Samples all(call, x, weight, bias);
  call.require_same_shape(dy, x);
  call.require_same_shape(dx, x);
  call.require_same_shape(dweight, weight);
  call.require_same_shape(dbias, bias);
  NormSums{dweight, dbias, partial}.check(call, all.columns, 2);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t i = 0; i < all.count; ++i) {
      const auto of = [&](const Tensor& tensor) { return all.part<T>(tensor, i); };
      const NormSums sums{of(dweight), of(dbias), partial};
      find_gradients<T>(call, of(x), of(weight), of(dy), of(dx), sums, eps, all.columns);
    }
  });
}

MSOPS_SCRATCH(LayerNormOfSamplesBackward) {
  Tensor x = call.tensor("x");
  x.size /= std::max<int64_t>(1, x.dim(0));
  return NormSums::scratch(x, x.dim(-1), 2);
}

// (x, weight?, dy, ddx, ddweight?, ddbias?) -> (dx, dweight?, ddy, partial): the gradients of what LayerNormBackward
// computes, where ddx, ddweight and ddbias are the gradients of its results. `partial` is scratch,
// as for LayerNormBackward.
MSOPS_ENTRY(LayerNormBackwardBackward) {
  const Tensor x = call.tensor("x"), weight = call.optional_of("common|float32", "weight"), dy = call.tensor("dy");
  const Tensor ddx = call.tensor("ddx"), ddweight = call.optional_of("common|float32", "ddweight");
  const Tensor ddbias = call.optional_of("common|float32", "ddbias"), dx = call.tensor("dx");
  const Tensor dweight = call.optional_of("common|float32", "dweight"), ddy = call.tensor("ddy");
  const NormSums sums{dweight, {}, call.scratch("partial", 2)};
  const double eps = eps_of(call);
  const int64_t columns = columns_of(call, x, weight, ddbias);
  for (const Tensor& tensor : {dy, ddx, dx, ddy}) call.require_same_shape(tensor, x);
  call.require_gradient(dweight, weight);
  call.require_gradient(ddweight, weight);
  sums.check(call, columns, 2);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const Parameters<T> factors(weight, columns, C(1)), of_weight(ddweight, columns, C(0));
    const Parameters<T> of_bias(ddbias, columns, C(0));
    const auto in = [&](const Tensor& tensor) { return rows_in<const T>(tensor, columns); };
    const auto out = [&](const Tensor& tensor) { return rows_in<T>(tensor, columns); };
    const NormSecondGradient<T, true> body{in(x),   in(dy),    in(ddx), out(dx), out(ddy),
                                           factors, of_weight, of_bias, C(eps),  C(0)};
    sums.run<T, true, Kernels::kReadAgain>(
        call, rows_of(x, columns), {in(x), in(dy), in(ddx), out(dx), out(ddy), factors, of_weight, of_bias}, body);
  });
}

MSOPS_SCRATCH(LayerNormBackwardBackward) {
  const Tensor x = call.tensor("x"), weight = call.optional_of("common|float32", "weight");
  return NormSums::scratch(x, weight.dtype ? weight.size : x.dim(-1), 2);
}
