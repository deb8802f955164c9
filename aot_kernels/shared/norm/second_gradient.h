// The gradient of the gradient of rows that are normalized, with the names of gradient.h. Let a, b and c be the
// gradients with respect to dx, dweight and dbias; h_j = dy_j b_j; a', g' and h' are a, g and h without their means if
// kCentred, and as they are otherwise. With p = mean(a' xhat), q = mean(g' xhat), s = mean(a' g') and t = mean(h' xhat)
//
//   dx_j = r (h'_j - xhat_j t - r (a'_j q + g'_j p + xhat_j (s - 3 p q)))
//   ddy_j = f_j r (a'_j - xhat_j p) + xhat_j b_j + c_j
//   dweight_j = sum of dy_j r (a'_j - xhat_j p) over all rows
//
// Here L = sum(a dx) + sum(b dweight) + sum(c dbias) is r n s - r n p q + n t + sum(c dy), and
//   dr / dx_j = -r^2 xhat_j / n
#pragma once

#include "sums.h"

namespace msops::norm {

template <typename T, bool kCentred>
struct NormSecondGradient {
  using C = Compute<T>;
  static constexpr int kRows = 3;  // that `load` loads
  Rows<const T> x, dy, ddx;
  Rows<T> dx, ddy;
  Parameters<T> weight, ddweight, ddbias;
  C eps, offset;

  MSOPS_BOTH void advance(int64_t rows) { weight.advance(rows), ddweight.advance(rows), ddbias.advance(rows); }

  template <typename Team>
  MSOPS_BOTH auto load(int64_t row, Team&& team) const {
    const auto x_row = team.load(x[row]), dy_row = team.load(dy[row]), ddx_row = team.load(ddx[row]);
    return loaded(x_row, dy_row, ddx_row);
  }

  template <typename Team, typename Held, typename Sums>
  MSOPS_BOTH void operator()(int64_t row, const Team& team, const Held& held, Sums& sums) const {
    const auto& [x_row, dy_row, a_row] = held;
    const C n = C(x.columns), add_to_weight = offset;
    FourSums<C> means;  // of x, g, a, h
    if constexpr (kCentred) {
      means = team.sum([=](C v, C d, C a, C w, C b) { return FourSums<C>{{v, d * (w + add_to_weight), a, d * b}}; },
                       x_row, dy_row, a_row, weight, ddweight);
      for (C& sum : means.of) sum /= n;
    }
    const C mean = means.of[0], g_mean = means.of[1], a_mean = means.of[2], h_mean = means.of[3];
    const FourSums<C> along = team.sum(
        [=](C v, C d, C a, C w, C b) {
          const C u = v - mean;
          return FourSums<C>{{u * u, u * (d * (w + add_to_weight) - g_mean), u * (a - a_mean), u * (d * b - h_mean)}};
        },
        x_row, dy_row, a_row, weight, ddweight);
    // The sum of a'_j g'_j, and those of x, h and a without their means, which are what these were rounded by. The
    // factor r, which may be large, multiplies all of them; where it multiplies g', p is small.
    FourSums<C> rests;
    const auto product = [=](C d, C a, C w) { return (a - a_mean) * (d * (w + add_to_weight) - g_mean); };
    if constexpr (kCentred) {
      rests = team.sum([=](C v, C d, C a, C w,
                           C b) { return FourSums<C>{{product(d, a, w), v - mean, d * b - h_mean, a - a_mean}}; },
                       x_row, dy_row, a_row, weight, ddweight);
    } else {
      rests.of[0] = team.sum(product, dy_row, a_row, weight);
    }
    const Normal<T, kCentred> normal(mean, along.of[0], rests.of[1], n, eps);
    const C r = normal.r, s = rests.of[0] / n, h_rest = rests.of[2] / n, a_rest = rests.of[3] / n;
    const C q = r * along.of[1] / n, p = r * along.of[2] / n + normal.shift * a_rest;
    const C t = r * along.of[3] / n + normal.shift * h_rest, rest = s - 3 * p * q;
    team.map(
        [=](C v, C d, C a, C w, C b) {
          const C xhat = normal(v), g = d * (w + add_to_weight) - g_mean;
          return r * (d * b - h_mean - h_rest - xhat * t - r * ((a - a_mean - a_rest) * q + g * p + xhat * rest));
        },
        dx[row], x_row, dy_row, a_row, weight, ddweight);
    team.map(
        [=](C v, C a, C w, C b, C c) {
          const C xhat = normal(v);
          return (w + add_to_weight) * r * (a - a_mean - a_rest - xhat * p) + xhat * b + c;
        },
        ddy[row], x_row, a_row, weight, ddweight, ddbias);
    sums.template add<0>([=](C v, C d, C a) { return d * r * (a - a_mean - a_rest - normal(v) * p); }, x_row, dy_row,
                         a_row);
    if constexpr (kCentred) sums.template add<1>([](C) { return C(0); }, x_row);
  }
};

}  // namespace msops::norm
