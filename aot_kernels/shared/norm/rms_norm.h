// y_j = x_j r (weight_j + offset) + bias_j,  r = 1 / sqrt(mean(x^2) + eps), for each row x. This is the forward formula
// of rms_norm and add_rms_norm, where the bias may be absent.
#pragma once

#include "settings.h"

namespace msops::norm {

// Casting says what is rounded to the elements' type T on the way. The sum of squares is in Compute<T> in any case.
//
//   kLlama  y = T(T(x r) factor), factor = T(T(weight) + T(offset))
//   kGemma  y = T(x r (weight + offset))
//   kNone   as kLlama, with r = T(1 / sqrt(T(T(mean(x^2)) + T(eps))))
//
// With a bias, kLlama and kNone add T(bias) to y, and kGemma adds it before rounding.
enum class Casting : int { kLlama, kGemma, kNone };

// Reads the attribute casting.
inline Casting casting_of(Call& call) { return static_cast<Casting>(call.attribute("casting", 0, 2)); }

// RmsNormElement computes one y. It is a struct, since a lambda of this size is not inlined on the CPU, and then its
// loop does not vectorize. Likewise kRounds is known at compile time.
template <typename T, bool kRounds>
struct RmsNormElement {
  using C = Compute<T>;
  C r, offset;

  MSOPS_BOTH C operator()(C x, C weight) const {
    const C factor = rounding(rounding(weight) + offset);
    return rounding(x * r) * factor;
  }
  MSOPS_BOTH C operator()(C x, C weight, C bias) const { return rounding((*this)(x, weight)) + rounding(bias); }
  static MSOPS_BOTH C rounding(C value) { return kRounds ? rounded<T>(value) : value; }
};

template <typename T>
struct RmsNorm {
  using C = Compute<T>;
  Parameters<T, 0> weight;
  C eps, offset;
  bool rounds_products, rounds_all;

  RmsNorm(const Tensor& weight_tensor, int64_t columns, double eps_number, double offset_number, Casting casting)
      : weight(weight_tensor, columns, C(1)),
        rounds_products(casting != Casting::kGemma),
        rounds_all(casting == Casting::kNone) {
    const C number = weight.data ? C(offset_number) : C(0);
    eps = rounding(C(eps_number));
    offset = rounds_products ? rounded<T>(number) : number;
  }
  MSOPS_BOTH C rounding(C value) const { return rounds_all ? rounded<T>(value) : value; }

  // Normalizes a row that the team may hold. `bias` is empty, or Parameters.
  template <typename Team, typename Held, typename... Bias>
  MSOPS_BOTH void operator()(const Team& team, const Held& x, Row<T> y, const Bias&... bias) const {
    const C squares = team.sum([](C v) { return v * v; }, x);
    const C mean = rounding(squares / C(y.length)), r = rounding(1 / sqrt(rounding(mean + eps)));
    if constexpr (Team::kKeepsPacks && sizeof...(Bias) == 0) {
      const auto map = [&](const auto& f) {
        team.with_rows([&](const auto& factors) { team.map(f, y, x, factors); }, weight);
      };
      if constexpr (!std::is_same<T, C>::value)
        if (rounds_products) return map(RmsNormElement<T, true>{r, offset});
      map(RmsNormElement<T, false>{r, offset});
    } else {
      if constexpr (!std::is_same<T, C>::value)
        if (rounds_products) return team.map(RmsNormElement<T, true>{r, offset}, y, x, weight, bias...);
      team.map(RmsNormElement<T, false>{r, offset}, y, x, weight, bias...);
    }
  }
};

template <typename T>
struct RmsNormWithBias : RmsNorm<T> {
  Parameters<T, 1> bias;

  RmsNormWithBias(const RmsNorm<T>& normalize, const Tensor& bias_tensor)
      : RmsNorm<T>(normalize), bias(bias_tensor, normalize.weight.length, -0.0) {}  // adding -0 changes no number
  template <typename Team, typename Held>
  MSOPS_BOTH void operator()(const Team& team, const Held& x, Row<T> y) const {
    if (!bias.data) return RmsNorm<T>::operator()(team, x, y);
    RmsNorm<T>::operator()(team, x, y, bias);
  }
  MSOPS_BOTH void advance(int64_t rows) { this->weight.advance(rows), bias.advance(rows); }
};

}  // namespace msops::norm
