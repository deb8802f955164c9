// MSOPS_FORMULA defines an operator by a formula for each element, in one line for both devices:
//
//   MSOPS_FORMULA(SwishForward, (x), (y), y = x / (1 + exp(-x)))
//   MSOPS_FORMULA(SwishBackward, (x, dy), (dx), const C s = 1 / (1 + exp(-x)); dx = dy * s * (1 + x * (1 - s)))
//
// These lines define two entries, whose tensors have one shape: first the inputs, then the outputs, up to eight each.
// In the formula, each input is a number of type C = Compute<T>, where T is the element type, and each output is a
// reference to one. On the CPU T is C, so that float16 and bfloat16 share the loop of float32. A formula may also have
// up to eight numbers of type C that are the same for all elements:
//
//   MSOPS_FORMULA_WITH(EluForward, (x), (y), (alpha), y = x > 0 ? x : alpha * expm1(x))
//
// Each number is an attribute of the operator, or a tensor of rank 0, which the signature then has after the inputs.
#pragma once

#include <array>

#include "activations.h"
#include "elementwise.h"

#define MSOPS_FORMULA(entry, inputs, outputs, ...)                                                             \
  MSOPS_FORMULA_BODY(entry, (MSOPS_EACH(MSOPS_INPUT, inputs), MSOPS_EACH(MSOPS_OUTPUT, outputs)), __VA_ARGS__) \
  MSOPS_ENTRY(entry) {                                                                                         \
    return msops::run_formula<entry##Formula>(call, {MSOPS_EACH(MSOPS_NAME, inputs)},                          \
                                              {MSOPS_EACH(MSOPS_NAME, outputs)}, msops::Names<0>{});           \
  }

#define MSOPS_FORMULA_WITH(entry, inputs, outputs, numbers, ...)                                                     \
  MSOPS_FORMULA_BODY(                                                                                                \
      entry, (MSOPS_EACH(MSOPS_INPUT, numbers), MSOPS_EACH(MSOPS_INPUT, inputs), MSOPS_EACH(MSOPS_OUTPUT, outputs)), \
      __VA_ARGS__)                                                                                                   \
  /* Python looks here when the operator is made. */                                                                 \
  extern "C" __attribute__((visibility("default"))) const char entry##Numbers[];                                     \
  const char entry##Numbers[] = MSOPS_TEXT numbers;                                                                  \
  MSOPS_ENTRY(entry) {                                                                                               \
    constexpr const char* kNumbers[] = {MSOPS_EACH(MSOPS_NAME, numbers)};                                            \
    return msops::run_formula<entry##Formula>(                                                                       \
        call, {MSOPS_EACH(MSOPS_NAME, inputs)}, {MSOPS_EACH(MSOPS_NAME, outputs)},                                   \
        msops::Names<sizeof kNumbers / sizeof *kNumbers>{MSOPS_EACH(MSOPS_NAME, numbers)});                          \
  }

#define MSOPS_FORMULA_BODY(entry, parameters, ...)                        \
  namespace {                                                             \
  template <typename T>                                                   \
  struct entry##Formula {                                                 \
    using C = msops::Compute<T>;                                          \
    MSOPS_BOTH void operator() parameters const {                         \
      using msops::abs, msops::clamp, msops::max, msops::min, msops::pow; \
      __VA_ARGS__;                                                        \
    }                                                                     \
  };                                                                      \
  }

#define MSOPS_INPUT(name) [[maybe_unused]] const C name
#define MSOPS_OUTPUT(name) C& name
#define MSOPS_NAME(name) #name

// MSOPS_EACH(f, (a, b, ...)) is f(a), f(b), ...
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

template <size_t k>
using Names = std::array<const char*, k>;

// A Number is the same for all elements. On the GPU it may be in device memory, where the kernel reads it.
template <typename T>
struct Number {
  Compute<T> value;
  const T* at;

  MSOPS_BOTH operator Compute<T>() const {
#ifdef __CUDA_ARCH__
    if (at != nullptr) return Compute<T>(*at);
#endif
    return value;
  }
};

// WithNumbers joins a formula and its numbers, which are its first arguments.
template <typename Formula, typename T, size_t k>
struct WithNumbers {
  Number<T> numbers[k];

  template <typename... Elements>
  MSOPS_BOTH void operator()(Elements&&... elements) const {
    apply(std::make_index_sequence<k>{}, elements...);
  }
  template <size_t... i, typename... Elements>
  MSOPS_BOTH void apply(std::index_sequence<i...>, Elements&... elements) const {
    Formula{}(numbers[i]..., elements...);
  }
};

// On the CPU, formulas of all types are those of Compute<T>, whose loops they share.
template <template <typename> class Formula, typename T, size_t kInputs, size_t kOutputs, size_t k>
void apply_to_arrays(Call& call, int64_t n, const std::array<Scalar, k>& scalars, const T* const (&in)[kInputs],
                     T* const (&out)[kOutputs]) {
  const auto with_numbers = [&](auto type) {
    using F = typename decltype(type)::type;
    if constexpr (k == 0) {
      return Formula<F>{};
    } else {
      WithNumbers<Formula<F>, F, k> formula;
      auto* number = formula.numbers;
      for (const Scalar& scalar : scalars) {
        const T* at = scalar.tensor.template as<T>();
        const bool is_here = at != nullptr && call.is_on_cpu();
        const Compute<F> value = is_here ? Compute<F>(*at) : Compute<F>(scalar.value);
        *number++ = {value, call.is_on_cpu() ? nullptr : scalar.tensor.template as<F>()};
      }
      return formula;
    }
  };
  if (call.is_on_cpu()) return elementwise_on_cpu<T>(call, n, with_numbers(Type<Compute<T>>{}), in, out);
  elementwise_on_gpu<T>(call, n, with_numbers(Type<T>{}), in, out);
}

template <template <typename> class Formula, size_t kInputs, size_t kOutputs, size_t kNumbers>
int run_formula(Call& call, const char* const (&inputs)[kInputs], const char* const (&outputs)[kOutputs],
                const Names<kNumbers>& names) {
  Tensor in[kInputs], out[kOutputs];
  std::array<Scalar, kNumbers> scalars;
  for (size_t i = 0; i < kInputs; ++i) in[i] = call.tensor(inputs[i]);
  const char* const* name = names.data();
  for (Scalar& scalar : scalars) scalar = call.scalar(*name++);
  for (size_t o = 0; o < kOutputs; ++o) out[o] = call.tensor(outputs[o]);
  for (const Tensor& tensor : in) call.require_same_shape(tensor, in[0]);
  for (const Tensor& tensor : out) call.require_same_shape(tensor, in[0]);
  return call.run<Half, float, double, BFloat16>([&](auto type) {
    using T = typename decltype(type)::type;
    const T* from[kInputs];
    T* to[kOutputs];
    for (size_t i = 0; i < kInputs; ++i) from[i] = in[i].template as<T>();
    for (size_t o = 0; o < kOutputs; ++o) to[o] = out[o].template as<T>();
    apply_to_arrays<Formula, T>(call, in[0].size, scalars, from, to);
  });
}

}  // namespace msops
