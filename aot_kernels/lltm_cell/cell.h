// Cell and Gradient compute one element of one step of the LLTM, forward and backward. With the gates i, o, g and the
// old c:
//   new_c = c + sigmoid(i) elu(g),  new_h = tanh(new_c) sigmoid(o)
#pragma once

#include "../common/activations.h"

namespace msops::lltm {

enum Gate { kI, kO, kG, kGates };

// Cell is all that one element computes, forward and again backward.
template <typename T>
struct Cell {
  using C = Compute<T>;
  C i, o, elu, elu_slope, new_c, tanh_c;

  MSOPS_BOTH Cell(C gate_i, C gate_o, C gate_g, C c) {
    i = Activations<T>::sigmoid(gate_i);
    o = Activations<T>::sigmoid(gate_o);
    const C below = Activations<T>::expm1(gate_g > 0 ? C(0) : gate_g);
    elu = gate_g > 0 ? gate_g : below;
    elu_slope = below + C(1);
    new_c = c + i * elu;
    tanh_c = Activations<T>::tanh(new_c);
  }
};

// Gradient holds the gradients of one element's gates and old c.
template <typename T>
struct Gradient {
  using C = Compute<T>;
  C gates[kGates], c;

  MSOPS_BOTH Gradient(const Cell<T>& cell, C dnew_h, C dnew_c) {
    c = dnew_c + dnew_h * cell.o * (C(1) - cell.tanh_c * cell.tanh_c);
    gates[kI] = c * cell.elu * cell.i * (C(1) - cell.i);
    gates[kO] = dnew_h * cell.tanh_c * cell.o * (C(1) - cell.o);
    gates[kG] = c * cell.i * cell.elu_slope;
  }
};

}  // namespace msops::lltm
