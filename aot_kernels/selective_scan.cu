// h_t = e^(dt_t A) h_(t-1) + dt_t u_t B_t, out_t = (C_t h_t + D u_t) silu(z_t), Mamba's scan, and its gradients;
// selective_scan/problem.h has the formulas.
//
//   case                   kernels                        why
//   no steps               CopyStates                     the last state is the initial one
//   CPU                    ForwardOnCpu, BackwardOnCpu    a thread takes a block of channels; loops over 1, 8 or 16
//                                                         states vectorize
//   GPU, many rows         forward_kernel;                a block of channels walks along all steps, so that each is
//                          backward_kernel                read once
//   GPU, few rows          forward_kernel twice;          blocks fill the GPU by parts of the steps: the first launch
//                          ends_kernel, backward_kernel   computes what the parts hand on to each other
//   GPU, N <= 4; 8; more   Shape<1>; <2>; <4>             a lane holds 4 states of a channel, backward of two in
//                                                         Shape<4>; float64 has Shape<4> alone; after 16 states, a
//                                                         chunk takes another turn
//   GPU, unaligned rows    the same, without packs        packs must tile rows of all arrays

#include "common/sum.h"
#include "selective_scan/cpu.h"
#include "selective_scan/problem.h"
#ifdef __CUDACC__
#include "selective_scan/gpu_backward.h"
#include "selective_scan/gpu_forward.h"
#endif

using namespace msops;
using namespace msops::selective_scan;

namespace {

bool is_wide(const Tensor& tensor) { return tensor.dtype && std::strcmp(tensor.dtype, "float64") == 0; }

struct Inputs {
  Tensor u, delta, A, B, C, D, z, bias, initial;
  Sizes s;
  bool has_softplus;

  explicit Inputs(Call& call)
      : u(call.tensor("u", 3)),
        delta(call.tensor("delta", 3)),
        A(call.tensor_of("common|float32", "A", 2)),
        B(call.tensor("B")),
        C(call.tensor("C")),
        D(call.optional_of("common|float32", "D", 1)),
        z(call.optional("z", 3)),
        bias(call.optional_of("common|float32", "delta_bias", 1)),
        initial(call.optional_of("common|float32", "initial_state", 3)),
        s{u.dim(0), u.dim(1),
          u.dim(2), B.rank == 4 ? B.dim(1) : 1,
          A.dim(1), is_wide(u) ? kChannels<double> : kChannels<float>},
        has_softplus(call.attribute("delta_softplus", 0, 1) != 0) {}

  // Requires what the signature of the operator leaves open.
  void require_groups(Call& call) const {
    call.require(B.rank == 3 || B.rank == 4, kBadShape, "B must have shape (B, N, L) or (B, G, N, L), got rank %d",
                 B.rank);
    const bool fits = s.groups > 0 ? s.channels % s.groups == 0 : s.channels == 0;
    call.require(fits, kBadShape, "u must have a multiple of the %lld groups of B as channels, got %lld",
                 static_cast<long long>(s.groups), static_cast<long long>(s.channels));
  }
  void require(Call& call) const {
    require_groups(call);
    call.require_same_shape(delta, u);
    call.require_shape(A, {s.channels, s.states});
    if (B.rank == 4) {
      call.require_shape(B, {s.samples, s.groups, s.states, s.steps});
    } else {
      call.require_shape(B, {s.samples, s.states, s.steps});
    }
    call.require_same_shape(C, B);
    for (const Tensor& vector : {D, bias})
      if (vector.dtype) call.require_shape(vector, {s.channels});
    if (z.dtype) call.require_same_shape(z, u);
    if (initial.dtype) call.require_shape(initial, {s.samples, s.channels, s.states});
  }

  template <typename T>
  Problem<T> problem(const Tensor& states, const Tensor& ends) const {
    using Number = Compute<T>;
    return {s,
            {has_softplus},
            u.as<const T>(),
            delta.as<const T>(),
            B.as<const T>(),
            C.as<const T>(),
            z.as<const T>(),
            Numbers<T>(A),
            OptionalNumbers<T>(D),
            OptionalNumbers<T>(bias),
            OptionalNumbers<T>(initial),
            states.as<Number>(),
            s.parts(),
            ends.as<Number>()};
  }
};

// Returns the shape, or ones if the array is not needed.
std::vector<int64_t> if_needed(bool needed, const std::vector<int64_t>& shape) {
  return needed ? shape : std::vector<int64_t>(shape.size(), 1);
}

std::vector<int64_t> shape_of_states(const Sizes& s) { return {s.samples, s.chunks(), s.channels, s.states}; }

std::vector<int64_t> shape_of_ends(const Sizes& s) {
  return if_needed(s.parts() > 1, {s.parts(), s.samples, s.channels, s.states + 1});
}

// Returns the shapes of the scratch of the backward pass: ends, sums, dA, vectors, carry, held.
Shapes shapes_of_backward(const Sizes& s) {
  const int64_t parts = s.parts(), blocks = s.blocks_of_group();
  const bool any = s.blocks() > 0 && s.steps > 0;
  return {shape_of_ends(s),
          if_needed(any && s.states > 0, {blocks, 2, s.samples, s.groups, s.states, s.steps}),
          if_needed(any && s.states > 0, {parts, s.samples, s.channels, s.states}),
          if_needed(any, {2, parts, s.samples, s.channels}),
          if_needed(any && s.states > 0, {parts, s.samples, s.channels, s.states}),
          if_needed(any && s.states > kWidth, {parts, s.samples, s.channels, 2, kChunk})};
}

// Without steps, the last state is the initial one, and so is its gradient.
template <typename T>
struct CopyStates {
  OptionalNumbers<T> from;
  Numbers<T> to;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    to.set(i, from[i]);
  }
};

// out[j] = the sum of a column of partial sums, in out's dtype
template <typename T>
void sum_parts(Call& call, int64_t rows, int64_t columns, int64_t pitch, const Compute<T>* parts, const Tensor& out) {
  if (out.size == 0) return;
  with_type<T, float>(out, [&](auto type) {
    using Out = typename decltype(type)::type;
    sum_rows(call, rows, columns, pitch, parts, out.as<Out>());
  });
}

}  // namespace

// (u, delta, A, B, C, D?, z?, delta_bias?, initial_state?) -> (out, last_state, states, ends): `ends` is scratch.
MSOPS_ENTRY(SelectiveScanForward) {
  const Inputs in(call);
  const Sizes& s = in.s;
  const Tensor out = call.tensor("out", 3), last = call.tensor_of("accumulator", "last_state", 3);
  const Tensor states = call.tensor_of("accumulator", "states", 4), ends = call.scratch("ends", 4);
  in.require(call);
  call.require_same_shape(out, in.u);
  call.require_shape(last, {s.samples, s.channels, s.states});
  call.require_shape(states, shape_of_states(s));
  call.require_shape(ends, shape_of_ends(s));
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using Number = Compute<T>;
    const ForwardProblem<T> all{in.problem<T>(states, ends), out.as<T>(), last.as<Number>()};
    if (s.steps == 0)
      return parallel_for(call, last.size, last.size, CopyStates<T>{OptionalNumbers<T>(in.initial), Numbers<T>(last)});
    if (s.blocks() == 0) return;
    if (call.is_on_cpu()) {
      const double cost = static_cast<double>(s.steps * s.width) * static_cast<double>(2 * s.states + 8);
      return with_states(s.states, [&](auto width) {
        constexpr int W = width;
        on_cpu(call, s.blocks(), ForwardOnCpu<W, T>{all}, cost);
      });
    }
#ifdef __CUDACC__
    forward_on_gpu(call, all);
#endif
  });
}

MSOPS_SCRATCH(SelectiveScanForward) {
  const Inputs in(call);
  in.require_groups(call);
  return {shape_of_ends(in.s)};
}

// (u, delta, A, B, C, D?, z?, delta_bias?, initial_state?, states, dout, dlast_state) -> (du, ddelta, dA, dB, dC, dD?,
// dz?, ddelta_bias?, dinitial_state?, ends, sums, dA_parts, vectors, carry, held): from `ends` on, this is scratch.
MSOPS_ENTRY(SelectiveScanBackward) {
  const Inputs in(call);
  const Sizes& s = in.s;
  const Tensor states = call.tensor_of("accumulator", "states", 4), dout = call.tensor("dout", 3);
  const Tensor dlast = call.tensor_of("accumulator", "dlast_state", 3);
  const Tensor du = call.tensor("du", 3), ddelta = call.tensor("ddelta", 3);
  const Tensor dA = call.tensor_of("common|float32", "dA", 2), dB = call.tensor("dB"), dC = call.tensor("dC");
  const Tensor dD = call.optional_of("common|float32", "dD", 1), dz = call.optional("dz", 3);
  const Tensor dbias = call.optional_of("common|float32", "ddelta_bias", 1);
  const Tensor dinitial = call.optional_of("common|float32", "dinitial_state", 3);
  const Tensor ends = call.scratch("ends", 4), sums = call.scratch("sums", 6), dA_parts = call.scratch("dA_parts", 4);
  const Tensor vectors = call.scratch("vectors", 4), carry = call.scratch("carry", 4), held = call.scratch("held", 5);
  in.require(call);
  call.require_shape(states, shape_of_states(s));
  call.require_same_shape(dout, in.u);
  call.require_shape(dlast, {s.samples, s.channels, s.states});
  const Tensor gradients[] = {du, ddelta, dA, dB, dC, dD, dz, dbias, dinitial};
  const Tensor* const inputs[] = {&in.u, &in.delta, &in.A, &in.B, &in.C, &in.D, &in.z, &in.bias, &in.initial};
  for (int i = 0; i < 9; ++i) call.require_gradient(gradients[i], *inputs[i]);
  if (call.ok()) require_shapes(call, {ends, sums, dA_parts, vectors, carry, held}, shapes_of_backward(s));
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using Number = Compute<T>;
    const bool is_empty = s.steps == 0 || s.blocks() == 0;
    if (s.steps == 0)
      parallel_for(call, dinitial.size, dinitial.size, CopyStates<T>{OptionalNumbers<T>(dlast), Numbers<T>(dinitial)});
    const BackwardProblem<T> all{in.problem<T>(states, ends),
                                 dout.as<const T>(),
                                 dlast.as<const Number>(),
                                 du.as<T>(),
                                 ddelta.as<T>(),
                                 dz.as<T>(),
                                 Numbers<T>(dinitial),
                                 sums.as<Number>(),
                                 dA_parts.as<Number>(),
                                 vectors.as<Number>(),
                                 carry.as<Number>(),
                                 held.as<Number>()};
    if (!is_empty && call.is_on_cpu()) {
      const double cost = static_cast<double>(s.steps * s.width) * static_cast<double>(5 * s.states + 16);
      with_states(s.states, [&](auto width) {
        constexpr int W = width;
        on_cpu(call, s.blocks(), BackwardOnCpu<W, T>{all}, cost);
      });
    }
#ifdef __CUDACC__
    if (!is_empty && !call.is_on_cpu()) backward_on_gpu(call, all);
#endif
    const int64_t parts = call.is_on_cpu() ? 1 : s.parts(), rows = is_empty ? 0 : parts * s.samples;
    const int64_t of_inputs = s.of_inputs(), blocks = is_empty ? 0 : s.blocks_of_group();
    sum_parts<T>(call, rows, dA.size, dA.size, all.dA, dA);
    sum_parts<T>(call, blocks, of_inputs, 2 * of_inputs, all.sums, dB);
    sum_parts<T>(call, blocks, of_inputs, 2 * of_inputs, all.sums + of_inputs, dC);
    sum_parts<T>(call, rows, s.channels, s.channels, all.vectors, dD);
    sum_parts<T>(call, rows, s.channels, s.channels, all.vectors + s.parts() * s.samples * s.channels, dbias);
  });
}

MSOPS_SCRATCH(SelectiveScanBackward) {
  const Inputs in(call);
  in.require_groups(call);
  return call.ok() ? shapes_of_backward(in.s) : Shapes(6);
}
