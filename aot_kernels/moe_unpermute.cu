// out[n] = sum over j of weights[n, j] rows[positions[n, j]], and its gradients: of a row, weights[n, j] dout[n] of the
// slot (n, j) whose position it is, and of a weight, the product of dout[n] and the slot's row.

#include "common/scratch.h"
#include "moe_unpermute/gradient.h"
#include "shared/routing/collect.h"

using namespace msops;
using namespace msops::routing;

// (rows, positions, weights?) -> (out)
MSOPS_ENTRY(MoeUnpermuteForward) {
  const Tensor rows = call.tensor("rows"), positions = call.tensor_of("index", "positions");
  const Tensor weights = call.optional_of("common|float32", "weights"), out = call.tensor("out", 2);
  Slots::require_ranks(call, positions, rows);
  const Slots slots(positions, rows);
  if (weights.dtype) call.require_same_shape(weights, positions);
  call.require_shape(out, {slots.tokens, slots.columns});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    slots.require_positions(call, positions, rows);
    collect(call, Sums<T>{slots, OptionalNumbers<T>(weights, 1), rows.as<const T>(), out.as<T>()});
  });
}

// (rows, positions, weights?, dout) -> (drows, dweights?, owners): `owners` is scratch.
MSOPS_ENTRY(MoeUnpermuteBackward) {
  const Tensor rows = call.tensor("rows"), positions = call.tensor_of("index", "positions");
  const Tensor weights = call.optional_of("common|float32", "weights"), dout = call.tensor("dout", 2);
  const Tensor drows = call.tensor("drows"), dweights = call.optional_of("common|float32", "dweights");
  const Tensor owners = call.tensor_of("int32", "owners", 1);
  Slots::require_ranks(call, positions, rows);
  const Slots slots(positions, rows);
  if (weights.dtype) call.require_same_shape(weights, positions);
  call.require_shape(dout, {slots.tokens, slots.columns});
  call.require_same_shape(drows, rows);
  call.require_gradient(dweights, weights);
  call.require_shape(owners, {slots.rows});
  call.require(slots.tokens * slots.choices <= INT32_MAX, kBadShape, "more than 2^31 - 1 positions");
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    slots.require_positions(call, positions, rows);
    unpermute_gradients(
        call, UnpermuteGradients<T>{slots, OptionalNumbers<T>(weights, 1), rows.as<const T>(), dout.as<const T>(),
                                    drows.as<T>(), Numbers<T>(dweights), owners.as<int32_t>()});
  });
}

MSOPS_SCRATCH(MoeUnpermuteBackward) {
  const Tensor rows = call.tensor("rows"), positions = call.tensor_of("index", "positions");
  return {{Slots(positions, rows).rows}};
}
