// One call runs all steps of the LLTM over whole sequences, after one matmul of all inputs. See lltm/sequence.h.

#include "common/scratch.h"
#include "lltm/cpu.h"
#ifdef __CUDACC__
#include "lltm/gpu.h"
#endif

using namespace msops;
using namespace msops::lltm;

namespace {

// Returns how many numbers of scratch all ways to run the steps need at most.
int64_t scratch_size(Call& call, int64_t batch, int64_t hidden) {
  int64_t size = 0;
  const bool too_large = __builtin_mul_overflow((batch + 7) / 8, (hidden + 31) / 32, &size) ||
                         __builtin_mul_overflow(size, 8 * 8 * 32, &size) || __builtin_add_overflow(size, 1024, &size);
  call.require(!too_large, kBadShape, "h has a shape that no memory can hold");
  return size;
}

}  // namespace

// (product, weight, bias, h, c, lengths) -> (output, last_h, last_c, gates, cells, scratch)
MSOPS_ENTRY(LLTMForward) {
  const Tensor product = call.tensor("product", 3), weight = call.tensor("weight", 2), bias = call.tensor("bias", 1);
  const Tensor h = call.tensor("h", 2), c = call.tensor("c", 2), lengths = call.tensor_of("int32", "lengths", 1);
  const Tensor output = call.tensor("output", 3), last_h = call.tensor("last_h", 2);
  const Tensor last_c = call.tensor("last_c", 2), gates = call.tensor("gates", 3), cells = call.tensor("cells", 3);
  const Tensor scratch = call.scratch("scratch", 1);
  const bool reverse = call.attribute("reverse", 0, 1);
  [[maybe_unused]] const bool allow_tf32 = call.attribute("allow_tf32", 0, 1);
  const int64_t steps = product.dim(0), batch = h.dim(0), hidden = h.dim(1);
  call.require_shape(product, {steps, batch, kGates * hidden});
  call.require_shape(weight, {kGates * hidden, hidden});
  call.require_shape(bias, {kGates * hidden});
  call.require_shape(lengths, {batch});
  for (const Tensor& tensor : {output, cells}) call.require_shape(tensor, {steps, batch, hidden});
  for (const Tensor& tensor : {c, last_h, last_c}) call.require_same_shape(tensor, h);
  call.require_same_shape(gates, product);
  call.require_shape(scratch, {scratch_size(call, batch, hidden)});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const SequenceForward<T> body{{steps, batch, hidden, reverse, lengths.as<int32_t>()},
                                  product.as<T>(),
                                  weight.as<T>(),
                                  bias.as<T>(),
                                  h.as<T>(),
                                  c.as<T>(),
                                  output.as<T>(),
                                  last_h.as<T>(),
                                  last_c.as<T>(),
                                  gates.as<T>(),
                                  cells.as<T>()};
    if (call.is_on_cpu()) return cpu::forward(call, body, scratch.as<Compute<T>>());
#ifdef __CUDACC__
    forward_on_gpu(call, body, scratch.as<Compute<T>>(), allow_tf32);
#endif
  });
}

MSOPS_SCRATCH(LLTMForward) {
  const Tensor product = call.tensor("product", 3);
  return {{scratch_size(call, product.dim(1), product.dim(2) / kGates)}};
}

// (weight, gates, cells, output, h, lengths, doutput, dlast_h, dlast_c) -> (dgates, hidden_before, dh, dc, scratch)
MSOPS_ENTRY(LLTMBackward) {
  const Tensor weight = call.tensor("weight", 2), gates = call.tensor("gates", 3), cells = call.tensor("cells", 3);
  const Tensor output = call.tensor("output", 3), h = call.tensor("h", 2);
  const Tensor lengths = call.tensor_of("int32", "lengths", 1), doutput = call.tensor("doutput", 3);
  const Tensor dlast_h = call.tensor("dlast_h", 2), dlast_c = call.tensor("dlast_c", 2);
  const Tensor dgates = call.tensor("dgates", 3), hidden_before = call.tensor("hidden_before", 3);
  const Tensor dh = call.tensor("dh", 2), dc = call.tensor("dc", 2), scratch = call.scratch("scratch", 1);
  const bool reverse = call.attribute("reverse", 0, 1);
  [[maybe_unused]] const bool allow_tf32 = call.attribute("allow_tf32", 0, 1);
  const int64_t steps = gates.dim(0), batch = h.dim(0), hidden = h.dim(1);
  call.require_shape(weight, {kGates * hidden, hidden});
  call.require_shape(gates, {steps, batch, kGates * hidden});
  call.require_shape(lengths, {batch});
  for (const Tensor& tensor : {cells, output, doutput, hidden_before})
    call.require_shape(tensor, {steps, batch, hidden});
  for (const Tensor& tensor : {dlast_h, dlast_c, dh, dc}) call.require_same_shape(tensor, h);
  call.require_same_shape(dgates, gates);
  call.require_shape(scratch, {scratch_size(call, batch, hidden)});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const SequenceBackward<T> body{{steps, batch, hidden, reverse, lengths.as<int32_t>()},
                                   weight.as<T>(),
                                   gates.as<T>(),
                                   cells.as<T>(),
                                   output.as<T>(),
                                   h.as<T>(),
                                   doutput.as<T>(),
                                   dlast_h.as<T>(),
                                   dlast_c.as<T>(),
                                   dgates.as<T>(),
                                   hidden_before.as<T>(),
                                   dh.as<T>(),
                                   dc.as<T>()};
    if (call.is_on_cpu()) return cpu::backward(call, body, scratch.as<Compute<T>>());
#ifdef __CUDACC__
    backward_on_gpu(call, body, scratch.as<Compute<T>>(), allow_tf32);
#endif
  });
}

MSOPS_SCRATCH(LLTMBackward) {
  const Tensor weight = call.tensor("weight", 2), gates = call.tensor("gates", 3);
  return {{scratch_size(call, gates.dim(1), weight.dim(1))}};
}
