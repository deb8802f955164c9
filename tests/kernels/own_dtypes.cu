#include "common/call.h"

using namespace msops;

// y[m] = x[idx[m]], or 0 where the mask is true.
MSOPS_ENTRY(Take) {
  const Tensor x = call.tensor("x", 1), idx = call.tensor_of("index", "idx", 1);
  const Tensor mask = call.optional_of("bool", "mask", 1), y = call.tensor("y", 1);
  call.require_shape(y, {idx.dim(0)});
  if (call.has("mask")) call.require_same_shape(mask, idx);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    with_type<int32_t, int64_t>(idx, [&](auto index) {
      using I = typename decltype(index)::type;
      for (int64_t m = 0; m < y.size; ++m)
        y.as<T>()[m] = mask.dtype && mask.as<bool>()[m] ? T(0) : x.as<T>()[idx.as<I>()[m]];
    });
  });
}

template <typename T, typename W>
void scale(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& y) {
  const int64_t columns = weight.size;
  for (int64_t i = 0; i < y.size; ++i) {
    const auto shift = bias.dtype ? Compute<T>(bias.as<T>()[i % columns]) : 0;
    y.as<T>()[i] = T(Compute<T>(x.as<T>()[i]) * Compute<T>(weight.as<W>()[i % columns]) + shift);
  }
}

MSOPS_ENTRY(Scale) {
  const Tensor x = call.tensor("x", 2), weight = call.tensor_of("float32|common", "weight", 1);
  const Tensor bias = call.optional("bias", 1), y = call.tensor("y", 2);
  call.require_shape(weight, {x.dim(1)});
  call.require_same_shape(y, x);
  if (call.has("bias")) call.require_same_shape(bias, weight);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    with_type<float, T>(weight, [&](auto own) { scale<T, typename decltype(own)::type>(x, weight, bias, y); });
  });
}

MSOPS_ENTRY(ScaleBackward) {
  const Tensor x = call.tensor("x", 2), weight = call.tensor_of("float32|common", "weight", 1);
  const Tensor dy = call.tensor("dy", 2), dx = call.tensor("dx", 2);
  const Tensor dweight = call.tensor_of("float32|common", "dweight", 1), dbias = call.optional("dbias", 1);
  call.require_shape(weight, {x.dim(1)});
  call.require_same_shape(dy, x);
  call.require_same_shape(dx, x);
  call.require_same_shape(dweight, weight);
  if (call.has("dbias")) call.require_same_shape(dbias, weight);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    with_type<float, T>(weight, [&](auto own) {
      using W = typename decltype(own)::type;
      scale<T, W>(dy, weight, Tensor{}, dx);
      for (int64_t c = 0; c < weight.size; ++c) {
        double of_weight = 0, of_bias = 0;
        for (int64_t i = c; i < x.size; i += weight.size) {
          of_weight += double(x.as<T>()[i]) * double(dy.as<T>()[i]);
          of_bias += double(dy.as<T>()[i]);
        }
        dweight.as<W>()[c] = W(of_weight);
        if (dbias.dtype) dbias.as<T>()[c] = T(of_bias);
      }
    });
  });
}

// The places of the first elements.
MSOPS_ENTRY(First) {
  call.tensor("x", 2);
  const Tensor idx = call.tensor_of("int32", "idx", 2);
  return call.run([&](auto) {
    for (int64_t i = 0; i < idx.size; ++i) idx.as<int32_t>()[i] = static_cast<int32_t>(i % idx.dim(1));
  });
}
