// The gradients of linear_cross_entropy are computed before the gradient of the loss is known. One entry returns the
// loss, with these gradients among its inputs; the other scales them by a number on the device, which has the digits of
// a sum, also beside float16.

#include "common/elementwise.h"
#include "cross_entropy/labels.h"

using namespace msops;
using namespace msops::cross_entropy;

namespace {

template <typename C>
struct Scale {
  const C* factor;

  MSOPS_BOTH void operator()(C x, C& y) const { y = x * *factor; }
};

struct Copy {
  template <typename C>
  MSOPS_BOTH void operator()(C x, C& y) const {
    y = x;
  }
};

}  // namespace

// (x, weight, labels, bias?, class_weight?, loss, dx?, dweight?, dbias?, factor?) -> (result): the result is the loss.
// It depends on x, weight and bias for MindSpore, to which the operator's gradient returns multiples of dx, dweight and
// dbias; or it computes these again, for which it takes the weights of classes. The CPU checks the labels.
MSOPS_ENTRY(LinearCrossEntropyResult) {
  const int64_t ignored = call.attribute("ignore_index", INT64_MIN, INT64_MAX);
  const Tensor x = call.tensor("x", 2), weight = call.tensor("weight", 2);
  const Tensor labels = call.tensor_of("index", "labels", 1), bias = call.optional("bias", 1);
  const Tensor class_weight = call.optional_of("accumulator", "class_weight", 1);
  const Tensor loss = call.tensor_of("accumulator", "loss"), dx = call.optional_of("float16|common", "dx", 2);
  const Tensor dweight = call.optional_of("float16|common", "dweight", 2);
  const Tensor dbias = call.optional_of("float16|common", "dbias", 1);
  call.optional_of("accumulator", "factor", 0);
  const Tensor result = call.tensor_of("accumulator", "result");
  call.require_shape(weight, {weight.dim(0), x.dim(1)});
  call.require_shape(labels, {x.dim(0)});
  if (call.has("bias")) call.require_shape(bias, {weight.dim(0)});
  if (call.has("class_weight")) call.require_shape(class_weight, {weight.dim(0)});
  if (call.has("dx")) call.require_same_shape(dx, x);
  if (call.has("dweight")) call.require_same_shape(dweight, weight);
  if (call.has("dbias")) call.require_shape(dbias, {weight.dim(0)});
  call.require_same_shape(result, loss);
  return call.run([&](auto type) {
    using C = Compute<typename decltype(type)::type>;
    if (call.is_on_cpu()) require_classes(call, labels, ignored, weight.dim(0));
    elementwise<C>(call, loss.size, Copy{}, {loss.as<C>()}, {result.as<C>()});
  });
}

// (x, factor) -> (y)
MSOPS_ENTRY(LinearCrossEntropyScale) {
  const Tensor x = call.tensor("x"), factor = call.tensor_of("accumulator", "factor", 0), y = call.tensor("y");
  call.require_same_shape(y, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    elementwise<T>(call, x.size, Scale<Compute<T>>{factor.as<Compute<T>>()}, {x.as<T>()}, {y.as<T>()});
  });
}
