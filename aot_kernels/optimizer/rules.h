// The rules by which optimizers move an element of a parameter.
#pragma once

#include <cmath>

#include "../common/dtype.h"

namespace msops::optimizer {

// Numbers that the device holds, so that a step reads nothing of the host.
using Number = const float*;

// How Adam corrects its moments, which begin at 0.
enum Correction : int {
  kNone = 0,
  kPowers = 1,  // first and second are powers of the betas, and epsilon counts as much as in the first step
  kGiven = 2,   // first and second are what the moments are divided by
};

// g = (±g + [coupled] decay p) scale, m = β₁ m + rest₁ g, v = β₂ v + rest₂ g²,
// p -= rate (m / first / (√(v / second) + eps) + [decoupled] decay p).
//
// With `nesterov`, β₁ m + rest₁ g stands for m in the last line; with kLargest, the largest v of all steps for v.
template <typename C, bool kLargest>
struct Adam {
  static constexpr int kStates = kLargest ? 3 : 2;
  Number rate, beta1, beta2, rest1, rest2, eps, decay, first, second, scale;
  int correction;
  bool is_decoupled, is_nesterov, maximizes;

  struct Step {
    C rate, beta1, beta2, rest1, rest2, eps, root, coupled, shrink, scale;
    bool is_nesterov;

    MSOPS_BOTH void operator()(C& p, C (&states)[kStates], C g) const {
      g = (g * scale) + p * coupled;
      states[0] = beta1 * states[0] + rest1 * g;
      states[1] = beta2 * states[1] + rest2 * (g * g);
      C v = states[1];
      if constexpr (kLargest) {
        v = states[2] > v || states[2] != states[2] ? states[2] : v;
        states[2] = v;
      }
      const C m = is_nesterov ? beta1 * states[0] + rest1 * g : states[0];
      p -= rate * (m / (std::sqrt(v) * root + eps)) + shrink * p;
    }
  };

  MSOPS_BOTH Step step() const {
    Step s{C(*rate), C(*beta1), C(*beta2), C(*rest1), C(*rest2), C(*eps), C(1), C(0), C(0), C(*scale), is_nesterov};
    is_decoupled ? s.shrink = s.rate * C(*decay) : s.coupled = C(*decay) * s.scale;
    if (correction == kPowers) s.rate *= std::sqrt(1 - C(*second)) / (1 - C(*first));
    if (correction == kGiven) {
      s.rate /= C(*first);
      s.root = 1 / std::sqrt(C(*second));
    }
    if (maximizes) s.scale = -s.scale;
    return s;
  }
};

// g = (±g + decay p) scale, a = momentum a + share g, p -= rate a, or rate (g + momentum a) with `nesterov`. If it is
// not `buffered`, p -= rate g, and a stays.
template <typename C>
struct Momentum {
  static constexpr int kStates = 1;
  Number rate, momentum, share, decay, scale;
  bool is_buffered, is_nesterov, maximizes;

  struct Step {
    C rate, momentum, share, coupled, scale;
    bool is_buffered, is_nesterov;

    MSOPS_BOTH void operator()(C& p, C (&states)[kStates], C g) const {
      g = g * scale + p * coupled;
      const C sum = momentum * states[0] + share * g;
      states[0] = is_buffered ? sum : states[0];
      p -= rate * (!is_buffered ? g : is_nesterov ? g + momentum * sum : sum);
    }
  };

  MSOPS_BOTH Step step() const {
    const C s = C(*scale);
    return {C(*rate), C(*momentum), C(*share), C(*decay) * s, maximizes ? -s : s, is_buffered, is_nesterov};
  }
};

}  // namespace msops::optimizer
