// This operator serves patch_mindspore alone: msops has no public name for it.
//
// Steps of optimizers for many tensors in one launch, and what clips gradients by the norm of all of them.

#include "common/scratch.h"
#include "optimizer/norm.h"
#include "optimizer/update.h"

using namespace msops;
using namespace msops::optimizer;

namespace {

Number number(Call& call, const char* name) { return call.tensor_of("float32", name, 0).as<float>(); }

// Returns how many tensors of each kind there are.
int tensors_of(Call& call) { return static_cast<int>(call.attribute("tensors", 1, kMost)); }

// Holds the tensors of an update: all gradients, then numbers, all parameters, and all of each state.
template <int kStates>
struct Tensors {
  static constexpr int kKinds = kStates + 1;  // parameters and states
  int n;
  bool in_place;
  Tensor gradients[kMost], before[kKinds][kMost], after[kKinds][kMost], done;

  explicit Tensors(Call& call) : n(tensors_of(call)), in_place(call.attribute("in_place", 0, 1) != 0) {
    for (int i = 0; i < n; ++i) gradients[i] = call.tensor("gradient");
  }

  // Takes what follows the numbers. With `in_place`, the output is a number without a meaning; otherwise the outputs
  // are the parameters and states after the step.
  void take_rest(Call& call) {
    static const char* const kNames[] = {"parameter", "moment", "square", "largest"};
    for (int kind = 0; kind < kKinds; ++kind)
      for (int i = 0; i < n; ++i) before[kind][i] = call.tensor_of("accumulator", kNames[kind]);
    if (in_place) done = call.tensor_of("float32", "done", 0);
    for (int kind = 0; kind < kKinds; ++kind) {
      for (int i = 0; i < n; ++i) {
        call.require_same_shape(before[kind][i], gradients[i]);
        after[kind][i] = in_place ? before[kind][i] : call.tensor_of("accumulator", kNames[kind]);
        call.require_same_shape(after[kind][i], gradients[i]);
      }
    }
  }

  template <typename T, typename Rule>
  void update(Call& call, const Rule& rule) const {
    using Body = Update<T, Rule>;
    Table<Body::kArrays> table;
    static_assert(sizeof table + sizeof(Body) <= 4096, "older GPUs and drivers take no larger arguments");
    for (int i = 0; i < n; ++i) {
      const int place = table.add(call, gradients[i].size);
      for (int kind = 0; kind < kKinds; ++kind) {
        if (!in_place) copy<Compute<T>>(call, before[kind][i], after[kind][i]);
        table.arrays[kind][place] = after[kind][i].data;
      }
      table.arrays[kKinds][place] = gradients[i].data;
    }
    for_pieces(call, table, Body{rule, done.as<float>()}, 12);
  }

 private:
  template <typename C>
  static void copy(Call& call, const Tensor& from, const Tensor& to) {
    parallel_for(call, to.size, to.size, Copy<C>{from.as<C>(), to.as<C>()});
  }
};

template <bool kLargest>
int run_adam(Call& call) {
  Tensors<kLargest ? 3 : 2> tensors(call);
  const Number rate = number(call, "rate"), beta1 = number(call, "beta1"), beta2 = number(call, "beta2");
  const Number rest1 = number(call, "rest1"), rest2 = number(call, "rest2"), eps = number(call, "eps");
  const Number decay = number(call, "decay"), first = number(call, "first"), second = number(call, "second");
  const Number scale = number(call, "scale");
  tensors.take_rest(call);
  const int correction = static_cast<int>(call.attribute("correction", kNone, kGiven));
  const bool is_decoupled = call.attribute("decoupled", 0, 1) != 0, maximizes = call.attribute("maximize", 0, 1) != 0;
  const bool is_nesterov = call.attribute("nesterov", 0, 1) != 0;
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using Rule = Adam<Compute<T>, kLargest>;
    tensors.template update<T>(call, Rule{rate, beta1, beta2, rest1, rest2, eps, decay, first, second, scale,
                                          correction, is_decoupled, is_nesterov, maximizes});
  });
}

// Returns a Table of tensors and, if the function has such, of its outputs.
template <int kArrays>
Table<kArrays> table_of(Call& call, int n, const Tensor* inputs, const Tensor* outputs = nullptr) {
  Table<kArrays> table;
  for (int i = 0; i < n; ++i) {
    const int place = table.add(call, inputs[i].size);
    table.arrays[0][place] = inputs[i].data;
    if constexpr (kArrays == 2) table.arrays[1][place] = outputs[i].data;
  }
  return table;
}

// Holds tensors, the squares of whose elements are added up.
struct Terms {
  int n;
  Tensor tensors[kMost];

  explicit Terms(Call& call) : n(tensors_of(call)) {
    for (int i = 0; i < n; ++i) tensors[i] = call.tensor("x");
  }
};

}  // namespace

// (gradients, rate, beta1, beta2, rest1, rest2, eps, decay, first, second, scale, parameters, moments, squares,
// largest?) -> (done), or (parameters, moments, squares, largest?)
MSOPS_ENTRY(OptimizerAdam) {
  return call.attribute("amsgrad", 0, 1) != 0 ? run_adam<true>(call) : run_adam<false>(call);
}

// (gradients, rate, momentum, share, decay, scale, parameters, moments) -> (done), or (parameters, moments)
MSOPS_ENTRY(OptimizerMomentum) {
  Tensors<1> tensors(call);
  const Number rate = number(call, "rate"), momentum = number(call, "momentum"), share = number(call, "share");
  const Number decay = number(call, "decay"), scale = number(call, "scale");
  tensors.take_rest(call);
  const bool is_nesterov = call.attribute("nesterov", 0, 1) != 0, maximizes = call.attribute("maximize", 0, 1) != 0;
  const bool is_buffered = call.attribute("buffered", 0, 1) != 0;
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using Rule = Momentum<Compute<T>>;
    tensors.update<T>(call, Rule{rate, momentum, share, decay, scale, is_buffered, is_nesterov, maximizes});
  });
}

// (tensors) -> (sum, sums): the sum of the squares of all elements, and of each piece, which is scratch.
MSOPS_ENTRY(OptimizerSquares) {
  const Terms terms(call);
  const Tensor sum = call.tensor_of("accumulator", "sum", 0), sums = call.scratch("sums", 1);
  const Table<1> table = table_of<1>(call, terms.n, terms.tensors);
  call.require_shape(sums, {table.pieces});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    for_pieces(call, table, Squares<T>{sums.as<C>()}, 2);
    if (call.is_on_cpu()) {
      *sum.as<C>() = total_of(sums.as<C>(), table.pieces, 0, 1);
      return;
    }
#ifdef __CUDACC__
    launch(call, total_kernel<C>, 1, kTableThreads, 0, sums.as<C>(), table.pieces, sum.as<C>());
#endif
  });
}

MSOPS_SCRATCH(OptimizerSquares) {
  const Terms terms(call);
  return {{table_of<1>(call, terms.n, terms.tensors).pieces}};
}

// (tensors, up, down) -> (tensors times up / down)
MSOPS_ENTRY(OptimizerScale) {
  const Terms terms(call);
  const Number up = number(call, "up"), down = number(call, "down");
  Tensor outputs[kMost];
  for (int i = 0; i < terms.n; ++i) {
    outputs[i] = call.tensor("y");
    call.require_same_shape(outputs[i], terms.tensors[i]);
  }
  const Table<2> table = table_of<2>(call, terms.n, terms.tensors, outputs);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    for_pieces(call, table, Scale<T>{up, down}, 2);
  });
}
