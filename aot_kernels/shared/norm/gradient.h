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
  static constexpr bool kHasOffset = !kCentred;
  Rows<const T> x, dy, added;
  Rows<T> dx;
  Parameters<T, 0> weight;
  C eps, offset, inverse = 1 / C(x.columns);

  MSOPS_BOTH void advance(int64_t rows) { weight.advance(rows); }  // see heads.h

  template <typename Team>
  MSOPS_BOTH auto load(int64_t row, Team&& team) const {
    const auto x_row = team.load(x[row]), dy_row = team.load(like_x(dy, row));
    if constexpr (kAdds) {
      return loaded(x_row, dy_row, team.load(like_x(added, row)));
    } else {
      return loaded(x_row, dy_row);
    }
  }

  template <typename Team, typename Held, typename Sums>
  MSOPS_BOTH void operator()(int64_t row, const Team& team, const Held& held, Sums& sums) const {
    const C n = C(x.columns), add_to_weight = offset;
    const auto x_row = team.compute(std::get<0>(held)), dy_row = team.compute(std::get<1>(held));
    const auto g_row = team.compute([=](C d, C w) { return d * (kHasOffset ? w + add_to_weight : w); }, dy_row, weight);
    constexpr bool kPivots = kCentred && Team::kKeepsPacks;
    constexpr bool kRests = kPivots || (kCentred && kTakesRests<T>);
    C mean = 0, g_mean = 0;  // or numbers near them
    if constexpr (kCentred && !kPivots) {
      const auto means = team.sum([](C v, C g) { return TwoSums<C>{v, g}; }, x_row, g_row);
      mean = means.of[0] / n, g_mean = means.of[1] / n;
    }
    FourSums<C> row_sums;  // of squares and products, and what the means differ by from those numbers (see normal.h)
    if constexpr (kPivots) {
      const auto about = team.template sums_about_pivot<kTakesRests<T>>(x_row, g_row);
      mean = about.pivot;
      row_sums = {{about.sums.of[0], about.sums.of[2], about.sums.of[1], about.sums.of[3]}};
      for (C& each : row_sums.of) each *= inverse;
    } else if constexpr (kRests) {
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
    const C count = kPivots ? C(1) : n;  // of elements that the sums are to be divided by
    const Normal<T, kRests> normal(mean, squares, x_rest, count, eps);
    const C r = normal.r, g_rest = kRests ? g_rests / count : C(0);
    const C along = r * products / count + (kRests ? normal.shift * g_rest : C(0));
    const C slope = r * along, rest = kRests ? g_rest + normal.shift * along : C(0);
    const auto gradient = [=](C v, C g) {
      if constexpr (kPivots && sizeof(T) == 2) {
        return r * g - (normal(v) * (r * along) + r * g_rest);  // fewer instructions, with more roundings
      } else {
        return r * (g - g_mean - rest - (v - mean) * slope);
      }
    };
    if constexpr (kAdds) {
      team.map([=](C v, C g, C other) { return gradient(v, g) + other; }, like_x(dx, row), x_row, g_row,
               std::get<2>(held));
    } else {
      team.map(gradient, like_x(dx, row), x_row, g_row);
    }
    sums.template add<0>([=](C v, C d) { return d * normal(v); }, x_row, dy_row);
    if constexpr (kBias) sums.template add<1>([](C d) { return d; }, dy_row);
  }

 private:
  // Returns a row as long as those of x, at the same place: so this place is computed once.
  template <typename U>
  MSOPS_BOTH Row<U> like_x(const Rows<U>& rows, int64_t row) const {
    return {rows.data + row * x.columns, x.columns};
  }
};

}  // namespace msops::norm
