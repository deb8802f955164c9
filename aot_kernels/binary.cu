// This operator serves patch_mindspore alone: msops has no public name for it.
//
// z = f(x, y) with broadcasting, for the operations that are numbered as in shared/broadcast/operations.h

#include "binary/formulas.h"

using namespace msops;
using namespace msops::binary;

namespace {

// The elements of a tensor of bool are bytes.
template <typename T>
using Stored = std::conditional_t<std::is_same<T, bool>::value, uint8_t, T>;

// Calls f(Type<T>{}), where T stores the elements of the first tensor.
template <typename F>
int run(Call& call, const F& f) {
  return call.run<Half, float, double, int32_t, int64_t, bool>([&](auto type) {
    using T = typename decltype(type)::type;
    f(Type<Stored<T>>{}, dtype_name<T>());
  });
}

}  // namespace

// (x, y) -> (z)
MSOPS_ENTRY(BinaryForward) {
  const Tensor inputs[] = {call.tensor("x"), call.tensor("y")}, z = call.tensor("z");
  const int op = static_cast<int>(call.attribute("op", kMaximum, kMulNoNan));
  call.require(is_binary(op), kBadAttribute, "operation %d is not one of these", op);
  const auto operands = broadcast::operands_of(call, inputs, z);
  return run(call, [&](auto type, const char* dtype) {
    using T = typename decltype(type)::type;
    call.require(has_binary(op, dtype), kBadDtype, "operation %d does not take %s", op, dtype);
    if (!call.ok()) return;
    if constexpr (!std::is_same<T, uint8_t>::value)
      if (op == kPow) return broadcast::apply(call, operands, Power<T>(inputs[1].size == 1));
    broadcast::apply(call, operands, Arithmetic<T>(op));
  });
}

// (x, y) -> (z), where z is bool
MSOPS_ENTRY(CompareForward) {
  const Tensor inputs[] = {call.tensor("x"), call.tensor("y")}, z = call.tensor_of("bool", "z");
  const int op = static_cast<int>(call.attribute("op", kGreater, kLogicalOr));
  const auto operands = broadcast::operands_of(call, inputs, z);
  return run(call, [&](auto type, const char* dtype) {
    using T = typename decltype(type)::type;
    call.require(has_comparison(op, dtype), kBadDtype, "operation %d does not take %s", op, dtype);
    if (call.ok()) broadcast::apply(call, operands, Comparison<T>(op));
  });
}

// (x, y) -> (z), where one is float16, and the other one and z are float32
MSOPS_ENTRY(BinaryMixedForward) {
  const Tensor inputs[] = {call.tensor("x"), call.tensor_of("float16|float32", "y")};
  const Tensor z = call.tensor_of("float32", "z");
  const int op = static_cast<int>(call.attribute("op", kMul, kDiv));
  const auto operands = broadcast::operands_of(call, inputs, z);
  return call.run<Half, float>([&](auto type) {
    using T = typename decltype(type)::type;
    using U = std::conditional_t<std::is_same<T, Half>::value, float, Half>;
    call.require(has_mixed(op, dtype_name<T>(), inputs[1].dtype), kBadDtype, "operation %d does not take %s and %s", op,
                 dtype_name<T>(), inputs[1].dtype);
    if (call.ok()) broadcast::apply(call, operands, Mixed<T, U>(op));
  });
}

// (x, y, alpha) -> (z): z = x + alpha y or x - alpha y
MSOPS_ENTRY(BinaryExtForward) {
  const Tensor inputs[] = {call.tensor("x"), call.tensor("y")}, alpha = call.tensor_of("float32|int64", "alpha", 0);
  const Tensor z = call.tensor("z");
  const int op = static_cast<int>(call.attribute("op", kAddExt, kSubExt));
  const auto operands = broadcast::operands_of(call, inputs, z);
  return run(call, [&](auto type, const char* dtype) {
    using T = typename decltype(type)::type;
    call.require(has_binary_ext(op, dtype, alpha.dtype), kBadDtype, "operation %d does not take %s and %s", op, dtype,
                 alpha.dtype);
    if constexpr (!std::is_same<T, uint8_t>::value)
      if (call.ok()) broadcast::apply(call, operands, ScaledSum<T>(alpha.data, alpha.dtype[0] == 'i', op == kSubExt));
  });
}
