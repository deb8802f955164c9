// The pointwise part of the LLTM cell. With gates = product + bias, split along a row into i, o, g:
//   new_c = c + sigmoid(i) elu(g),  new_h = tanh(new_c) sigmoid(o)

#include <algorithm>

#include "common/activations.h"
#include "common/pack.h"
#include "common/sum.h"

using namespace msops;

namespace {

// All that one element computes, forward and again backward.
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

enum Gate { kI, kO, kG, kGates };

// The gradients of one element's gates and old c.
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

// The gates of N neighbouring hidden units.
template <int N, typename T>
struct GatePacks {
  Pack<T, N> values[kGates];

  template <typename Index>
  MSOPS_BOTH GatePacks(const T* row, Index hidden) {
    for (int gate = 0; gate < kGates; ++gate) values[gate] = load<N>(row + gate * hidden);
  }
  MSOPS_BOTH Compute<T> operator()(int gate, int j) const { return Compute<T>(values[gate].values[j]); }
};

// Index i is a pack of N neighbouring hidden units of one sample.
template <int N, typename T>
struct Forward {
  int64_t hidden;
  const T *product, *bias, *c;
  T *new_h, *new_c;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const Index units = static_cast<Index>(hidden), sample = i * N / units, unit = i * N - sample * units;
    const GatePacks<N, T> p(product + sample * kGates * units + unit, units), b(bias + unit, units);
    const Pack<T, N> old_c = load<N>(c + i * N);
    Pack<T, N> h_pack, c_pack;
    for (int j = 0; j < N; ++j) {
      const Cell<T> cell(p(kI, j) + b(kI, j), p(kO, j) + b(kO, j), p(kG, j) + b(kG, j), Compute<T>(old_c.values[j]));
      h_pack.values[j] = T(cell.tanh_c * cell.o);
      c_pack.values[j] = T(cell.new_c);
    }
    store(new_h + i * N, h_pack);
    store(new_c + i * N, c_pack);
  }
};

// The same on the CPU, in a loop that vectorizes: index i is a run of neighbouring hidden units of one sample.
constexpr int64_t kRun = 256;

template <typename T>
struct ForwardOfRun {
  int64_t hidden, runs;
  const T *product, *bias, *c;
  T *new_h, *new_c;

  MSOPS_CPU void operator()(int64_t i) const {
    const int64_t sample = i / runs, first = (i - sample * runs) * kRun, end = std::min(first + kRun, hidden);
    const T* p = product + sample * kGates * hidden;
#pragma omp simd
    for (int64_t unit = first; unit < end; ++unit) {
      Compute<T> gates[kGates];
      for (int g = 0; g < kGates; ++g)
        gates[g] = Compute<T>(p[g * hidden + unit]) + Compute<T>(bias[g * hidden + unit]);
      const int64_t at = sample * hidden + unit;
      const Cell<T> cell(gates[kI], gates[kO], gates[kG], Compute<T>(c[at]));
      assign(new_h[at], cell.tanh_c * cell.o);
      assign(new_c[at], cell.new_c);
    }
  }
};

// Index i is a pack of N neighbouring hidden units of a group of samples, one row of `partial`: the bias gradient's sum
// over the group. dc and the gradient of the product are complete.
template <int N, typename T>
struct Backward {
  int64_t batch, hidden, groups;
  const T *product, *bias, *c, *dnew_h, *dnew_c;
  T *dproduct, *dc;
  Compute<T>* partial;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const Index units = static_cast<Index>(hidden), group = i * N / units, unit = i * N - group * units;
    const Index samples = static_cast<Index>(batch), parts = static_cast<Index>(groups);
    const Index end = part_begin<Index>(samples, group + 1, parts);
    const GatePacks<N, T> b(bias + unit, units);
    Sum<T> sums[kGates][N];
    for (Index sample = part_begin<Index>(samples, group, parts); sample < end; ++sample) {
      const Index at = sample * units + unit, gates_at = sample * kGates * units + unit;
      const GatePacks<N, T> p(product + gates_at, units);
      const Pack<T, N> old_c = load<N>(c + at), dh = load<N>(dnew_h + at), dc_out = load<N>(dnew_c + at);
      Pack<T, N> dgates[kGates], dc_pack;
      for (int j = 0; j < N; ++j) {
        using C = Compute<T>;
        const Cell<T> cell(p(kI, j) + b(kI, j), p(kO, j) + b(kO, j), p(kG, j) + b(kG, j), C(old_c.values[j]));
        const Gradient<T> d(cell, C(dh.values[j]), C(dc_out.values[j]));
        for (int gate = 0; gate < kGates; ++gate) {
          dgates[gate].values[j] = T(d.gates[gate]);
          sums[gate][j] += d.gates[gate];
        }
        dc_pack.values[j] = T(d.c);
      }
      for (int gate = 0; gate < kGates; ++gate) store(dproduct + gates_at + gate * units, dgates[gate]);
      store(dc + at, dc_pack);
    }
    for (int gate = 0; gate < kGates; ++gate)
      for (int j = 0; j < N; ++j) partial[(group * kGates + gate) * units + unit + j] = sums[gate][j].total();
  }
};

// The same on the CPU, of a run of neighbouring hidden units.
template <typename T>
struct BackwardOfRun {
  int64_t batch, hidden, groups, runs;
  const T *product, *bias, *c, *dnew_h, *dnew_c;
  T *dproduct, *dc;
  Compute<T>* partial;

  MSOPS_CPU void operator()(int64_t i) const {
    using C = Compute<T>;
    const int64_t group = i / runs, first = (i - group * runs) * kRun, length = std::min(kRun, hidden - first);
    const int64_t end = part_begin(batch, group + 1, groups);
    Sum<T> sums[kGates][kRun];
    for (int64_t sample = part_begin(batch, group, groups); sample < end; ++sample) {
      const int64_t at = sample * hidden + first, gates_at = sample * kGates * hidden + first;
#pragma omp simd
      for (int64_t j = 0; j < length; ++j) {
        C gates[kGates];
        for (int g = 0; g < kGates; ++g)
          gates[g] = C(product[gates_at + g * hidden + j]) + C(bias[first + g * hidden + j]);
        const Cell<T> cell(gates[kI], gates[kO], gates[kG], C(c[at + j]));
        const Gradient<T> d(cell, C(dnew_h[at + j]), C(dnew_c[at + j]));
        for (int g = 0; g < kGates; ++g) {
          assign(dproduct[gates_at + g * hidden + j], d.gates[g]);
          sums[g][j] += d.gates[g];
        }
        assign(dc[at + j], d.c);
      }
    }
    for (int g = 0; g < kGates; ++g)
      for (int64_t j = 0; j < length; ++j) partial[(group * kGates + g) * hidden + first + j] = sums[g][j].total();
  }
};

constexpr double kCost = 16;  // of one element's exponentials

}  // namespace

// (product, bias, c) -> (new_h, new_c)
MSOPS_ENTRY(LLTMForward) {
  const Tensor product = call.tensor("product", 2), bias = call.tensor("bias", 1), c = call.tensor("c", 2);
  const Tensor new_h = call.tensor("new_h", 2), new_c = call.tensor("new_c", 2);
  const int64_t batch = c.dim(0), hidden = c.dim(1);
  call.require_shape(product, {batch, kGates * hidden});
  call.require_shape(bias, {kGates * hidden});
  call.require_same_shape(new_h, c);
  call.require_same_shape(new_c, c);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const auto pointers = {product.as<const T>(), bias.as<const T>(), c.as<const T>(), new_h.as<const T>(),
                           new_c.as<const T>()};
    if (call.on_cpu()) {
      const int64_t runs = (hidden + kRun - 1) / kRun;
      const ForwardOfRun<T> body{hidden, runs, product.as<T>(), bias.as<T>(), c.as<T>(), new_h.as<T>(), new_c.as<T>()};
      return on_cpu(call, batch * runs, body, kCost * static_cast<double>(std::min(kRun, hidden)));
    }
    with_width<T>(false, hidden, pointers, [&](auto width) {
      constexpr int N = decltype(width)::value;
      const Forward<N, T> body{hidden, product.as<T>(), bias.as<T>(), c.as<T>(), new_h.as<T>(), new_c.as<T>()};
      on_gpu(call, c.size / N, product.size, body);
    });
  });
}

// (product, bias, c, dnew_h, dnew_c) -> (dproduct, dbias, dc, partial). `partial` is scratch: a row of 3H sums for each
// of the groups that the batch is split into.
MSOPS_ENTRY(LLTMBackward) {
  const Tensor product = call.tensor("product", 2), bias = call.tensor("bias", 1), c = call.tensor("c", 2);
  const Tensor dnew_h = call.tensor("dnew_h", 2), dnew_c = call.tensor("dnew_c", 2);
  const Tensor dproduct = call.tensor("dproduct", 2), dbias = call.tensor("dbias", 1), dc = call.tensor("dc", 2);
  const Tensor partial = call.scratch("partial", 2);
  const int64_t batch = c.dim(0), hidden = c.dim(1), groups = partial.dim(0);
  call.require_shape(product, {batch, kGates * hidden});
  call.require_shape(bias, {kGates * hidden});
  for (const Tensor& tensor : {dnew_h, dnew_c, dc}) call.require_same_shape(tensor, c);
  call.require_same_shape(dproduct, product);
  call.require_same_shape(dbias, bias);
  call.require(groups >= 1, kBadShape, "partial has no rows");
  call.require_shape(partial, {groups, kGates * hidden});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const auto pointers = {product.as<const T>(), bias.as<const T>(),     c.as<const T>(), dnew_h.as<const T>(),
                           dnew_c.as<const T>(),  dproduct.as<const T>(), dc.as<const T>()};
    if (call.on_cpu()) {
      const int64_t runs = (hidden + kRun - 1) / kRun;
      const BackwardOfRun<T> body{batch,           hidden,           groups,     runs,
                                  product.as<T>(), bias.as<T>(),     c.as<T>(),  dnew_h.as<T>(),
                                  dnew_c.as<T>(),  dproduct.as<T>(), dc.as<T>(), partial.as<C>()};
      const double samples = static_cast<double>(batch) / static_cast<double>(groups);
      on_cpu(call, groups * runs, body, kCost * samples * static_cast<double>(std::min(kRun, hidden)));
    } else {
      with_width<T>(false, hidden, pointers, [&](auto width) {
        constexpr int N = decltype(width)::value;
        const Backward<N, T> body{batch,          hidden,         groups,         product.as<T>(),  bias.as<T>(),
                                  c.as<T>(),      dnew_h.as<T>(), dnew_c.as<T>(), dproduct.as<T>(), dc.as<T>(),
                                  partial.as<C>()};
        on_gpu(call, groups * hidden / N, std::max({product.size, partial.size, batch}), body);
      });
    }
    sum_rows(call, groups, kGates * hidden, kGates * hidden, partial.as<const C>(), dbias.as<T>());
  });
}
