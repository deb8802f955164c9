// This operator serves patch_mindspore alone: msops has no public name for it.
//
// y = x weight^T + bias
//
//   case                                kernel                                        why
//   cuBLASLt has one for the addresses  cuBLASLt's (common/gpu/cublas_lt.h)           y is written once
//   another GPU, other addresses        shared/product/gpu.h, then add_bias_kernel    any GPU
//   the CPU                             MultiplyRow                                   MindSpore's own runs there

#include "common/parallel.h"
#include "common/scratch.h"
#include "shared/product/cpu.h"
#include "shared/product/gpu.h"
#include "shared/product/linear.h"
#ifdef __CUDACC__
#include "common/gpu/cublas_lt.h"
#endif

using namespace msops;
using namespace msops::product;

namespace {

template <typename T>
struct MultiplyRow {
  using C = Compute<T>;
  int64_t deep, outputs;
  const T *x, *weight, *bias;
  T* y;

  MSOPS_CPU void operator()(int64_t row) const {
    const std::unique_ptr<C[]> numbers(new C[deep]), sums(new C[outputs]);
    widen(x + row * deep, numbers.get(), deep);
    run_apart(VectorProduct<T>{weight, deep, outputs, deep, numbers.get(), sums.get()});
    for (int64_t i = 0; i < outputs; ++i) sums[i] += C(bias[i]);
    narrow(sums.get(), y + row * outputs, outputs);
  }
};

#ifdef __CUDACC__
template <typename T>
__global__ void add_bias_kernel(int64_t elements, int64_t outputs, const T* bias, T* y) {
  using C = Compute<T>;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < elements; i += int64_t{gridDim.x} * blockDim.x)
    assign(y[i], C(y[i]) + C(bias[i % outputs]));
}

template <typename T>
void multiply_on_gpu(Call& call, const LinearProblem<T>& p, const Tensor& work) {
  if (p.k > 0 && CublasLt::multiply(call.stream(), p, work.data, work.size * sizeof(float))) return;
  product::multiply<T>(call, {p.n, p.m, p.k, p.x, p.weight, p.y});
  constexpr int kThreads = 256;
  const int64_t elements = p.n * p.m, blocks = std::min<int64_t>((elements + kThreads - 1) / kThreads, 1 << 16);
  launch(call, add_bias_kernel<T>, blocks, kThreads, 0, elements, p.m, p.bias, p.y);
}
#endif

// Where there is much to multiply, cuBLASLt may split sums.
int64_t scratch_numbers(const LinearInputs& in) {
  constexpr int64_t kMuch = int64_t{1} << 28, kNumbers = 1 << 20;
  return size_of({in.tokens, in.deep, in.outputs}) >= kMuch ? kNumbers : 1;
}

}  // namespace

// (x, weight, bias) -> (y, work): the last one is scratch.
MSOPS_ENTRY(LinearForward) {
  const LinearInputs in(call, true);
  const Tensor y = call.tensor("y"), work = call.scratch("work", 2);
  if (call.ok()) {
    in.require_outputs(call, y);
    call.require_shape(work, {scratch_numbers(in), 1});
  }
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const T *const x = in.x.as<const T>(), *const weight = in.weight.as<const T>(), *const bias = in.bias.as<const T>();
    if (in.tokens == 0) return;
    if (call.is_on_cpu())
      return on_cpu(call, in.tokens, MultiplyRow<T>{in.deep, in.outputs, x, weight, bias, y.as<T>()},
                    static_cast<double>(in.deep) * static_cast<double>(in.outputs));
#ifdef __CUDACC__
    multiply_on_gpu<T>(call, {in.outputs, in.tokens, in.deep, weight, x, bias, y.as<T>()}, work);
#endif
  });
}

MSOPS_SCRATCH(LinearForward) {
  const LinearInputs in(call, true);
  return {{scratch_numbers(in), 1}};
}
