#include "common/elementwise.h"
#include "common/scratch.h"

using namespace msops;

namespace {

struct Double {
  template <typename C>
  MSOPS_BOTH void operator()(C x, C& y) const {
    y = 2 * x;
  }
};

Shapes shapes_of(Call& call, const Tensor& x, const Tensor& bias) {
  const int64_t bytes = x.dtype && !std::strcmp(x.dtype, "float64") ? 8 : 4;
  const int64_t k = call.attribute("k", 1, 9), f = static_cast<int64_t>(call.number("f"));
  return {{x.dim(0) / 2 + 1, k}, {}, {bias.size, bytes, f}};
}

}  // namespace

MSOPS_ENTRY(Doubled) {
  const Tensor x = call.tensor("x", 2), bias = call.optional("bias", 1), y = call.tensor("y", 2);
  const Tensor first = call.scratch("first", 2), sized = call.scratch("sized", 1);
  const Tensor second = call.tensor_of("int32", "second", 0), third = call.tensor_of("common", "third", 3);
  require_shapes(call, {first, second, third}, shapes_of(call, x, bias));
  call.require_shape(sized, {5});
  call.require_same_shape(y, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    elementwise<T>(call, x.size, Double{}, {x.as<const T>()}, {y.as<T>()});
  });
}

MSOPS_SCRATCH(Doubled) {
  const Tensor x = call.tensor("x", 2), bias = call.optional("bias", 1);
  return shapes_of(call, x, bias);
}

MSOPS_ENTRY(Plain) {
  return call.run([](auto) {});
}

MSOPS_ENTRY(Wrong) {
  return call.run([](auto) {});
}

MSOPS_SCRATCH(Wrong) {
  const Tensor x = call.tensor("x");
  switch (call.attribute("how", 0, 4)) {
    case 0:
      return {{1}, {2}};
    case 1:
      return {{3, -1}};
    case 2:
      call.require(x.rank == 9, kBadShape, "x must have 9 axes");
      return {{1}};
    case 3:
      call.tensor("y");
      return {{1}};
    default:
      return {std::vector<int64_t>(1000, 1)};
  }
}
