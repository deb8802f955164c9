// An operator that is a formula for each element, in one line for both devices:
//
//   MSOPS_FORMULA(SwishForward, (x), (y), y = x / (1 + exp(-x)))
//   MSOPS_FORMULA(SwishBackward, (x, dy), (dx), const C s = 1 / (1 + exp(-x)); dx = dy * s * (1 + x * (1 - s)))
//
// defines two entries, of tensors of one shape: inputs, then outputs, up to eight each. In the formula, each input is a
// number of type C = Compute<T>, where T is the element type, and each output a reference to one.
#pragma once

#include <math.h>  // also makes exp and its like for float known without std::

#include "activations.h"
#include "elementwise.h"

#define MSOPS_FORMULA(entry, inputs, outputs, ...)                                                         \
  namespace {                                                                                              \
  template <typename T>                                                                                    \
  struct entry##Formula {                                                                                  \
    using C = msops::Compute<T>;                                                                           \
    MSOPS_BOTH void operator()(MSOPS_EACH(MSOPS_INPUT, inputs), MSOPS_EACH(MSOPS_OUTPUT, outputs)) const { \
      __VA_ARGS__;                                                                                         \
    }                                                                                                      \
  };                                                                                                       \
  }                                                                                                        \
  MSOPS_ENTRY(entry) {                                                                                     \
    return msops::run_formula<entry##Formula>(call, {MSOPS_EACH(MSOPS_NAME, inputs)},                      \
                                              {MSOPS_EACH(MSOPS_NAME, outputs)});                          \
  }

#define MSOPS_INPUT(name) [[maybe_unused]] const C name
#define MSOPS_OUTPUT(name) C& name
#define MSOPS_NAME(name) #name

// f(a), f(b), ... of f and (a, b, ...)
#define MSOPS_EACH(f, list) MSOPS_EACH_OF(f, MSOPS_STRIP list)
#define MSOPS_STRIP(...) __VA_ARGS__
#define MSOPS_EACH_OF(...) MSOPS_NINTH(__VA_ARGS__, 8, 7, 6, 5, 4, 3, 2, 1, 0)(__VA_ARGS__)
#define MSOPS_NINTH(f, a1, a2, a3, a4, a5, a6, a7, a8, n, ...) MSOPS_EACH_##n
#define MSOPS_EACH_1(f, a) f(a)
#define MSOPS_EACH_2(f, a, ...) f(a), MSOPS_EACH_1(f, __VA_ARGS__)
#define MSOPS_EACH_3(f, a, ...) f(a), MSOPS_EACH_2(f, __VA_ARGS__)
#define MSOPS_EACH_4(f, a, ...) f(a), MSOPS_EACH_3(f, __VA_ARGS__)
#define MSOPS_EACH_5(f, a, ...) f(a), MSOPS_EACH_4(f, __VA_ARGS__)
#define MSOPS_EACH_6(f, a, ...) f(a), MSOPS_EACH_5(f, __VA_ARGS__)
#define MSOPS_EACH_7(f, a, ...) f(a), MSOPS_EACH_6(f, __VA_ARGS__)
#define MSOPS_EACH_8(f, a, ...) f(a), MSOPS_EACH_7(f, __VA_ARGS__)

namespace msops {

template <template <typename> class Formula, int kInputs, int kOutputs>
int run_formula(Call& call, const char* const (&inputs)[kInputs], const char* const (&outputs)[kOutputs]) {
  Tensor in[kInputs], out[kOutputs];
  for (int i = 0; i < kInputs; ++i) in[i] = call.tensor(inputs[i]);
  for (int o = 0; o < kOutputs; ++o) out[o] = call.tensor(outputs[o]);
  for (const Tensor& tensor : in) call.require_same_shape(tensor, in[0]);
  for (const Tensor& tensor : out) call.require_same_shape(tensor, in[0]);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const T* from[kInputs];
    T* to[kOutputs];
    for (int i = 0; i < kInputs; ++i) from[i] = static_cast<const T*>(in[i].data);
    for (int o = 0; o < kOutputs; ++o) to[o] = static_cast<T*>(out[o].data);
    elementwise<T>(call, in[0].size, Formula<T>{}, from, to);
  });
}

}  // namespace msops
