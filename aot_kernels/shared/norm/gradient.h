// The gradient of rows that are normalized. With columns j = 1 ... n, and without the mean if kCentred is false:
//
//   xhat_j = (x_j - mean(x)) r,  r = 1 / sqrt(mean((x - mean(x))^2) + eps),  y_j = xhat_j f_j + bias_j
//   g_j = dy_j f_j,  dx_j = r (g_j - mean(g) - xhat_j mean(g xhat))
//   dweight_j = sum of dy_j xhat_j over all rows,  dbias_j = sum of dy_j
//
// where f = weight + offset. Nothing is kept from the forward pass: the row is read anyway.
#pragma once

#include "heads.h"
#include "normal.h"
#include "settings.h"

namespace msops::norm {

// If kAdds, another gradient is added to dx: that of x itself, where x is an output, too. If kBias, there is a second
// sum, dbias.
template <typename T, bool kCentred, bool kAdds, bool kBias = kCentred>
struct NormGradient {
  using C = Compute<T>;
  static constexpr int kRows = 2 + kAdds;  // that `load` loads
  Rows<const T> x, dy, added;
  Rows<T> dx;
  Parameters<T, 0> weight;
  C eps, offset;

  MSOPS_BOTH void advance(int64_t rows) { weight.advance(rows); }  // see heads.h

  template <typename Team>
  MSOPS_BOTH auto load(int64_t row, Team&& team) const {
    const auto x_row = team.load(x[row]), dy_row = team.load(dy[row]);
    if constexpr (kAdds) {
      return loaded(x_row, dy_row, team.load(added[row]));
    } else {
      return loaded(x_row, dy_row);
    }
  }

  template <typename Team, typename Held, typename Sums>
  MSOPS_BOTH void operator()(int64_t row, const Team& team, const Held& held, Sums& sums) const {
    const C n = C(x.columns), add_to_weight = offset;
    const auto x_row = team.compute(std::get<0>(held)), dy_row = team.compute(std::get<1>(held));
    const auto g_row = team.compute([=](C d, C w) { return d * (w + add_to_weight); }, dy_row, weight);
    TwoSums<C> means;  // of x and g
    if constexpr (kCentred) means = team.sum([](C v, C g) { return TwoSums<C>{v, g}; }, x_row, g_row);
    const C mean = kCentred ? means.of[0] / n : C(0), g_mean = kCentred ? means.of[1] / n : C(0);
#ifdef __CUDA_ARCH__
    constexpr bool kRests = kCentred && sizeof(T) == 8;  // in float32 they take 5 to 15 % of the time (on an H200)
#else
    constexpr bool kRests = kCentred && kTakesRests<T>;
#endif
    FourSums<C> row_sums;  // of squares and products, and what the means were rounded by (see normal.h)
    if constexpr (kRests) {
      row_sums = team.sum(
          [=](C v, C g) {
            const C u = v - mean, h = g - g_mean;
            return FourSums<C>{{u * u, u * h, u, h}};
          },
          x_row, g_row);
    } else {
      const auto two =
          team.sum([=](C v, C g) { return TwoSums<C>{(v - mean) * (v - mean), (v - mean) * g}; }, x_row, g_row);
      row_sums = {{two.of[0], two.of[1]}};
    }
    const auto& [squares, products, x_rest, g_rests] = row_sums.of;
    const Normal<C, kRests> normal(mean, squares, x_rest, n, eps);
    const C r = normal.r, g_rest = kRests ? g_rests / n : C(0);
    const C along = r * products / n + (kRests ? normal.shift * g_rest : C(0));
    const C slope = r * along, rest = kRests ? g_rest + normal.shift * along : C(0);
    const auto gradient = [=](C v, C g) { return r * (g - g_mean - rest - (v - mean) * slope); };
    if constexpr (kAdds) {
      team.map([=](C v, C g, C other) { return gradient(v, g) + other; }, dx[row], x_row, g_row, std::get<2>(held));
    } else {
      team.map(gradient, dx[row], x_row, g_row);
    }
    sums.template add<0>([=](C v, C d) { return d * normal(v); }, x_row, dy_row);
    if constexpr (kBias) sums.template add<1>([](C d) { return d; }, dy_row);
  }
};

// What for_rows_with_sums adds up: partial sums in scratch, and the results, which are absent where their parameters
// are. Without parameters the sums are not used: that costs hardly any time, and no other kernels.
struct NormSums {
  Tensor weight, bias, partial;

  template <typename T, bool kBias, bool kHolds, typename Body, typename Groups = Constant<1>>
  void run(Call& call, int64_t rows, std::initializer_list<PlaceOfRows<T>> places, const Body& body,
           Groups heads = {}) const {
    using C = Compute<T>;
    const int64_t columns = places.begin()->columns * heads, parts = partial.dim(0);
    C *const of_weight = partial.as<C>(), *const of_bias = of_weight + parts * columns;
    if constexpr (kBias) {
      const int64_t used =
          for_rows_with_sums<T, 2, kHolds>(call, rows, places, body, {of_weight, of_bias}, parts, heads);
      add_parts<T>(call, used, columns, of_weight, weight);
      add_parts<T>(call, used, columns, of_bias, bias);
    } else {
      const int64_t used = for_rows_with_sums<T, 1, kHolds>(call, rows, places, body, {of_weight}, parts, heads);
      add_parts<T>(call, used, columns, of_weight, weight);
    }
  }

  // Returns the shape of the scratch for `sums` numbers for each column, added up over the rows of x.
  static Shapes scratch(const Tensor& x, int64_t columns, int64_t sums) {
    return {{row_parts(x.size / std::max<int64_t>(1, columns), columns), size_of({sums, columns})}};
  }

  // Requires scratch of the right shape.
  void check(Call& call, int64_t columns, int sums) const {
    call.require(partial.dim(0) >= 1, kBadShape, "partial has no rows");
    call.require_shape(partial, {partial.dim(0), size_of({sums, columns})});
  }

 private:
  template <typename T>
  static void add_parts(Call& call, int64_t parts, int64_t columns, const Compute<T>* sums, const Tensor& out) {
    if (!out.dtype) return;
    with_type<T, float>(out, [&](auto type) {
      using Out = typename decltype(type)::type;
      sum_rows(call, parts, out.size, columns, sums, out.as<Out>());
    });
  }
};

}  // namespace msops::norm
