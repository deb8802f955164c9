// RWKV-7's state S of a head, a matrix of (value, key), and its gradient G:
//
//   s_t = S_(t-1) a_t,  S_t = S_(t-1) diag(d_t) + s_t b_t' + v_t k_t',  y_t = S_t r_t           with d = exp(-exp(w))
//   G_t = H_t + dy_t r_t',  g_t = G_t b_t,  H_(t-1) = G_t diag(d_t) + g_t a_t'                  with H_(T-1) = dlast
//   dv = G k,  dk = G' v,  db = G' s,  dr = S_t' dy,  da = S_(t-1)' g
//
// Each row of S and G needs only itself, and so does each column once s and g are known. Hence four walks over the
// steps, in each of which a row or a column stays in registers:
//
//   Forward       rows of S      y, s
//   RowsBack      rows of G      dv, g, and the gradient of the first state
//   ColumnsBack   columns of G   dk, db
//   Columns       columns of S   da, dr, dw
//
// No walk has both S and G, whose product dw needs: x_t = d_t dd_t = d_t sum_i G_t[i] S_(t-1)[i]. But the product of G
// and S changes from step to step by what the other gradients say:
//
//   sum_i H_(t-1)[i] S_(t-1)[i] = x_t + a_t da_t,  sum_i G_t[i] S_t[i] = x_t + b_t db_t + k_t dk_t
//   so x_t = x_(t-1) + b_(t-1) db_(t-1) + k_(t-1) dk_(t-1) - r_(t-1) dr_(t-1) - a_t da_t
//
// ColumnsBack keeps each kEvery-th H, by which Columns computes that product anew, so that few rounding errors add up.
#pragma once

#include <cmath>

#include "../common/activations.h"
#include "../common/numbers.h"
#include "../common/sum.h"

namespace msops::wkv7 {

constexpr int kMost = 128;  // features of a head
constexpr int kEvery = 32;  // steps from one kept H to the next

struct Sizes {
  int64_t samples, steps, heads, features;

  MSOPS_BOTH int64_t matrices() const { return samples * heads; }
  // Returns where the vectors of a matrix begin, and how far it is from one step's to the next.
  MSOPS_BOTH int64_t begin(int64_t matrix) const {
    return (matrix / heads * steps * heads + matrix % heads) * features;
  }
  MSOPS_BOTH int64_t stride() const { return heads * features; }
  // Returns how many H are kept of a matrix.
  MSOPS_BOTH int64_t kept() const { return steps / kEvery + (steps % kEvery > 0); }
};

// A step has these vectors. Inputs come first, then what other walks computed, then what follows from the inputs.
enum Vector { kR, kW, kK, kA, kB, kV, kDy, kS, kG, kTerms, kRate, kVectors };
constexpr int kInputs = kDy + 1, kComputed = kTerms + 1 - kInputs;  // kTerms: b db + k dk

template <typename C>
constexpr C kSmall = sizeof(C) == 8 ? C(0x1p-52) : C(0x1p-23);

template <typename T>
struct Task {
  using C = Compute<T>;
  Sizes s;
  const T* inputs[kInputs];  // (sample, step, head, feature), as all of the next three
  C* computed[kComputed];    // s, g and terms
  T* gradients[kInputs];     // as inputs; y in place of that of dy
  C* kept;                   // (sample, head, kept, value, key): H before the steps 0, kEvery, ...
  Numbers<T> state;          // (sample, head, value, key), or none
  Numbers<T> dstate;         // its gradient, or none
  C* last;                   // the state after the steps, of this shape
  const C* dlast;            // its gradient

  // Returns which matrix of `kept` is that before a step.
  MSOPS_BOTH int64_t kept_matrix(int64_t matrix, int64_t step) const { return matrix * s.kept() + step / kEvery; }
  MSOPS_BOTH C& result(int vector, int64_t at) const { return computed[vector - kInputs][at]; }
  MSOPS_BOTH C first_state(int64_t at) const { return state.data ? state[at] : C(0); }
};

// In all programs, m is an element of the matrix, `x` has the vectors at its index along the sums, and `own` those at
// the index of its row or column. A step takes m to begin(), then adds add() up to two sums, takes m to update(), and
// adds add_after() up to another sum. A program's walk says what follows from its matrix and its direction.
template <typename T, bool kOfRows, bool kGoesBack>
struct Walk {
  using C = Compute<T>;
  static constexpr bool kRows = kOfRows, kBack = kGoesBack;
  static constexpr MSOPS_BOTH bool sums_over(int v) { return kRows ? v <= kB : kV <= v && v <= kG; }

  static MSOPS_BOTH C start(const Task<T>& task, int64_t at) {
    if constexpr (kBack) {
      return task.dlast[at];
    } else {
      return task.first_state(at);
    }
  }
  template <typename Own, typename X>
  static MSOPS_BOTH C begin(C m, [[maybe_unused]] const X& x, [[maybe_unused]] const Own& own) {
    if constexpr (kBack) {
      return m + own(kRows ? kDy : kR) * x(kRows ? kR : kDy);
    } else {
      return m;
    }
  }
  template <typename X>
  static MSOPS_BOTH void add_after(C, const X&, C&) {}
};

template <typename T>
struct Forward : Walk<T, true, false> {
  using C = Compute<T>;
  static constexpr MSOPS_BOTH bool owns(int v) { return v == kV; }

  template <typename X>
  static MSOPS_BOTH void add(C m, const X& x, C& first, C&) {
    first += m * x(kA);
  }
  template <typename X, typename Own>
  static MSOPS_BOTH C update(C m, const X& x, const Own& own, C first, C) {
    return m * x(kW) + first * x(kB) + own(kV) * x(kK);
  }
  template <typename X>
  static MSOPS_BOTH void add_after(C m, const X& x, C& sum) {
    sum += m * x(kR);
  }
  template <typename Own>
  static MSOPS_BOTH void finish_step(const Task<T>& task, int64_t at, const Own&, C first, C, C after, Sum<C>&) {
    assign(task.gradients[kDy][at], after);
    task.result(kS, at) = first;
  }
  static MSOPS_BOTH void finish(const Task<T>& task, int64_t at, C m) { task.last[at] = m; }
};

template <typename T>
struct RowsBack : Walk<T, true, true> {
  using C = Compute<T>;
  static constexpr MSOPS_BOTH bool owns(int v) { return v == kDy; }

  template <typename X>
  static MSOPS_BOTH void add(C m, const X& x, C& first, C& second) {
    first += m * x(kK);
    second += m * x(kB);
  }
  template <typename X, typename Own>
  static MSOPS_BOTH C update(C m, const X& x, const Own&, C, C second) {
    return m * x(kW) + second * x(kA);
  }
  template <typename Own>
  static MSOPS_BOTH void finish_step(const Task<T>& task, int64_t at, const Own&, C first, C second, C, Sum<C>&) {
    assign(task.gradients[kV][at], first);
    task.result(kG, at) = second;
  }
  static MSOPS_BOTH void finish(const Task<T>& task, int64_t at, C m) {
    if (task.dstate.data) task.dstate.set(at, m);
  }
};

template <typename T>
struct ColumnsBack : Walk<T, false, true> {
  using C = Compute<T>;
  static constexpr MSOPS_BOTH bool owns(int v) { return v <= kB; }

  template <typename X>
  static MSOPS_BOTH void add(C m, const X& x, C& first, C& second) {
    first += m * x(kV);
    second += m * x(kS);
  }
  template <typename X, typename Own>
  static MSOPS_BOTH C update(C m, const X& x, const Own& own, C, C) {
    return m * own(kW) + own(kA) * x(kG);
  }
  template <typename Own>
  static MSOPS_BOTH void finish_step(const Task<T>& task, int64_t at, const Own& own, C first, C second, C, Sum<C>&) {
    assign(task.gradients[kK][at], first);
    assign(task.gradients[kB][at], second);
    task.result(kTerms, at) = own(kK) * first + own(kB) * second;
  }
};

template <typename T>
struct Columns : Walk<T, false, false> {
  using C = Compute<T>;
  static constexpr MSOPS_BOTH bool owns(int v) { return v <= kB || v == kTerms || v == kRate; }

  template <typename X>
  static MSOPS_BOTH void add(C m, const X& x, C& first, C&) {
    first += m * x(kG);
  }
  template <typename X, typename Own>
  static MSOPS_BOTH C update(C m, const X& x, const Own& own, C, C) {
    return m * own(kW) + own(kB) * x(kS) + own(kK) * x(kV);
  }
  template <typename X>
  static MSOPS_BOTH void add_after(C m, const X& x, C& sum) {
    sum += m * x(kDy);
  }
  // `product` is sum_i H_(t-1)[i] S_(t-1)[i]. A decay so small that nothing is left of the state has no gradient: the
  // rounding errors of `product`, times its rate, would be larger.
  template <typename Own>
  static MSOPS_BOTH void finish_step(const Task<T>& task, int64_t at, const Own& own, C first, C, C after,
                                     Sum<C>& product) {
    product += -own(kA) * first;
    assign(task.gradients[kA][at], first);
    assign(task.gradients[kR][at], after);
    assign(task.gradients[kW][at], own(kW) < kSmall<C> ? C(0) : -own(kRate) * product.total());
    product += own(kTerms) - own(kR) * after;
  }
};

}  // namespace msops::wkv7
