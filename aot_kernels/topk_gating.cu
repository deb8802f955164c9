// The k experts of the greatest scores of each row of logits, in the groups that stay, and their weights:
// s = softmax(logits) or sigmoid(logits), weights = scale s_chosen, or scale s_chosen / sum of s_chosen. Their gradient
// is that of the choice as it stands.

#include "shared/gather/indices.h"
#include "topk_gating/cpu.h"
#include "topk_gating/gating.h"
#ifdef __CUDACC__
#include "topk_gating/gpu.h"
#include "topk_gating/gradient_gpu.h"
#endif

using namespace msops;
using namespace msops::gating;

namespace {

int64_t rows_of(const Tensor& logits) {
  int64_t rows = 1;
  for (int i = 0; i + 1 < logits.rank; ++i) rows *= logits.dim(i);
  return rows;
}

// Requires the shape of logits, with k numbers in place of the experts.
void require_chosen(Call& call, const Tensor& tensor, const Tensor& logits, int64_t k) {
  call.require(logits.rank > 0, kBadShape, "logits has no axes");
  if (!call.ok()) return;
  std::vector<int64_t> shape(logits.shape, logits.shape + logits.rank);
  shape.back() = k;
  call.require_shape(tensor, shape);
}

}  // namespace

// (logits, bias?) -> (weights, experts, keys): `keys` is scratch.
MSOPS_ENTRY(TopkGatingForward) {
  const Settings s(call);
  const Tensor logits = call.tensor("logits"), bias = call.optional_of("common|float32", "bias", 1);
  const Tensor weights = call.tensor("weights"), experts = call.tensor_of("int32", "experts");
  const Tensor keys = call.scratch("keys", 2);
  const int64_t size = logits.dim(-1);
  for (const Tensor& tensor : {weights, experts}) require_chosen(call, tensor, logits, s.k);
  s.require_experts(call, size);
  if (bias.dtype) call.require_shape(bias, {size});
  const int64_t rows = rows_of(logits), at_once = keys.dim(0);
  call.require(at_once > 0 || rows == 0, kBadShape, "keys has no rows");
  call.require_shape(keys, {at_once, s.room(size)});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const Row<T> all{s, size, logits.as<const T>(), OptionalNumbers<T>(bias)};
    const Choice<T> choice{all, rows, weights.as<T>(), experts.as<int32_t>(), keys.as<Compute<T>>(), at_once};
    if (call.is_on_cpu()) {
      return on_threads(call, std::min(rows, at_once), 8 * static_cast<double>(logits.size), ChooseOnCpu<T>{choice});
    }
#ifdef __CUDACC__
    choose_on_gpu(call, choice);
#endif
  });
}

MSOPS_SCRATCH(TopkGatingForward) {
  const Settings s(call);
  const Tensor logits = call.tensor("logits");
  return {{rows_at_once(rows_of(logits), logits.dim(-1)), s.room(logits.dim(-1))}};
}

// (logits, experts, dweights) -> (dlogits)
MSOPS_ENTRY(TopkGatingBackward) {
  const Settings s(call);
  const Tensor logits = call.tensor("logits"), experts = call.tensor_of("int32", "experts");
  const Tensor dweights = call.tensor("dweights"), dlogits = call.tensor("dlogits");
  const int64_t size = logits.dim(-1);
  for (const Tensor& tensor : {experts, dweights}) require_chosen(call, tensor, logits, s.k);
  call.require_same_shape(dlogits, logits);
  s.require_experts(call, size);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const Row<T> all{s, size, logits.as<const T>(), OptionalNumbers<T>(Tensor{})};
    const Gradient<T> gradient{all, rows_of(logits), experts.as<const int32_t>(), dweights.as<const T>(),
                               dlogits.as<T>()};
    if (call.is_on_cpu()) {
      gather::require_indices<int32_t>(call, experts, logits, size, "experts");
      return on_cpu(call, gradient.rows, GradientOnCpu<T>{gradient}, 8 * static_cast<double>(size));
    }
#ifdef __CUDACC__
    gradient_on_gpu(call, gradient);
#endif
  });
}
