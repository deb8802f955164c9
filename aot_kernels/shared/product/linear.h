// The inputs of a linear layer.
#pragma once

#include <vector>

#include "../../common/call.h"
#include "../../common/scratch.h"

namespace msops::product {

// x (..., deep), weight (outputs, deep) and bias (outputs), which some entries can do without
struct LinearInputs {
  Tensor x, weight, bias;
  int64_t tokens = 1, deep = 0, outputs = 0;

  LinearInputs(Call& call, bool needs_bias) {
    x = call.tensor("x"), weight = call.tensor("weight", 2),
    bias = needs_bias ? call.tensor("bias", 1) : call.optional("bias", 1);
    call.require(x.rank > 0, kBadRank, "x has no axes");
    if (!call.ok()) return;
    deep = x.dim(-1), outputs = weight.dim(0);
    for (int i = 0; i + 1 < x.rank; ++i) tokens = size_of({tokens, x.dim(i)});
    call.require_shape(weight, {outputs, deep});
    if (needs_bias || bias.dtype) call.require_shape(bias, {outputs});
    call.require(0 < outputs && outputs <= INT32_MAX, kBadShape, "weight has %lld rows, expected 1 to 2^31 - 1",
                 static_cast<long long>(outputs));
  }

  void require_outputs(Call& call, const Tensor& y) const {
    std::vector<int64_t> shape(x.shape, x.shape + x.rank);
    shape.back() = outputs;
    call.require_shape(y, shape);
  }
};

}  // namespace msops::product
