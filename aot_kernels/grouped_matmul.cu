// out_n = x_n W_e + bias_e for each row n of group e, where groups are as many neighbouring rows each as group_sizes
// say, and the gradients. Rows after the last group give 0 and are not used.
//
//   case                                            kernel              why
//   float16, rows of whole packs of 16 bytes        wgmma.h (sm_90a)    tensor cores, fed by TMA, in pairs of blocks
//   other float16, float32                          mma.h (sm_80)       tensor cores; float32 as three TF32 products
//   float64, older GPUs                             plain.h             any GPU
//   the CPU                                         cpu.h               panels, as in shared/product/cpu.h

#include "grouped_matmul/cpu.h"
#include "grouped_matmul/gpu.h"

using namespace msops;
using namespace msops::grouped_matmul;

namespace {

constexpr int kRunOnCpu = 64;  // columns of a sum of rows that a thread takes at once; on a GPU it takes one

struct Inputs {
  Tensor x, weight, sizes, bias;
  bool is_transposed;
  int64_t groups, rows, deep, columns;

  explicit Inputs(Call& call) : is_transposed(call.attribute("transpose_weight", 0, 1)) {
    x = call.tensor("x", 2), weight = call.tensor("weight", 3), sizes = call.tensor_of("index", "group_sizes", 1);
    bias = call.optional_of("common|float32", "bias", 2);
    groups = weight.dim(0), rows = x.dim(0), deep = x.dim(1), columns = weight.dim(is_transposed ? 1 : 2);
    call.require_shape(weight, {groups, is_transposed ? columns : deep, is_transposed ? deep : columns});
    call.require_shape(sizes, {groups});
    if (bias.dtype) call.require_shape(bias, {groups, columns});
  }

  // Writes the bounds of groups to scratch, and returns them. On the CPU, it first requires that the sizes fit.
  Groups find_groups(Call& call, const Tensor& scratch) const {
    int64_t* const bounds = scratch.as<int64_t>();
    const Groups result{groups, rows, bounds};
    const Integers size(sizes);
#ifdef __CUDACC__
    if (!call.is_on_cpu()) return launch(call, bounds_kernel<512>, 1, 512, 0, result, size, bounds), result;
#endif
    int64_t left = rows;
    for (int64_t e = 0; e < groups && call.ok(); ++e) {
      call.require(size[e] >= 0, kBadValue, "group_sizes[%lld] is %lld, expected at least 0", static_cast<long long>(e),
                   static_cast<long long>(size[e]));
      call.require(size[e] <= left, kBadValue, "group_sizes[%lld] is %lld, but x has only %lld rows left of %lld",
                   static_cast<long long>(e), static_cast<long long>(size[e]), static_cast<long long>(left),
                   static_cast<long long>(rows));
      if (call.ok()) left -= size[e];
    }
    if (!call.ok()) return result;
    bounds[0] = 0, bounds[groups + 1] = rows;
    for (int64_t e = 0; e < groups; ++e) bounds[e + 1] = bounds[e] + size[e];
    return result;
  }
};

template <typename T, template <typename> class Products>
void multiply(Call& call, const Products<T>& p) {
  if (!call.ok() || p.is_empty()) return;
  if (call.is_on_cpu()) return cpu::multiply(call, p);
#ifdef __CUDACC__
  multiply_on_gpu(call, p);
#endif
}

template <typename T>
void sum_rows(Call& call, const Groups& groups, int64_t columns, const T* from, const Tensor& out) {
  if (out.size == 0) return;
  const Numbers<T> to(out);
  if (call.is_on_cpu()) {
    using Sum = SumRows<kRunOnCpu, T>;
    const double cost = static_cast<double>(groups.rows) / static_cast<double>(groups.count) * kRunOnCpu;
    on_cpu(call, groups.count * Sum::runs(columns), Sum{groups, columns, from, to}, cost);
  } else {
    on_gpu(call, out.size, out.size, SumRows<1, T>{groups, columns, from, to});
  }
}

}  // namespace

// (x, weight, group_sizes, bias?) -> (out, bounds): the last one is scratch.
MSOPS_ENTRY(GroupedMatmulForward) {
  const Inputs in(call);
  const Tensor out = call.tensor("out", 2), bounds = call.tensor_of("int64", "bounds", 1);
  call.require_shape(out, {in.rows, in.columns});
  call.require_shape(bounds, {3 * (in.groups + 2)});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const Groups groups = in.find_groups(call, bounds);
    multiply(call, RowProducts<T>{groups, in.deep, in.columns, in.x.as<T>(), in.weight.as<T>(), in.is_transposed,
                                  OptionalNumbers<T>(in.bias), out.as<T>()});
  });
}

// (x, weight, group_sizes, bias?, dout) -> (dx, dweight, dbias?, bounds): the last one is scratch.
MSOPS_ENTRY(GroupedMatmulBackward) {
  const Inputs in(call);
  const Tensor dout = call.tensor("dout", 2), dx = call.tensor("dx", 2), dweight = call.tensor("dweight", 3);
  const Tensor dbias = call.optional_of("common|float32", "dbias", 2), bounds = call.tensor_of("int64", "bounds", 1);
  call.require_shape(dout, {in.rows, in.columns});
  call.require_same_shape(dx, in.x);
  call.require_same_shape(dweight, in.weight);
  call.require_gradient(dbias, in.bias);
  call.require_shape(bounds, {3 * (in.groups + 2)});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const T *const x = in.x.as<T>(), *const of_out = dout.as<T>();
    const Groups groups = in.find_groups(call, bounds);
    multiply(call, RowProducts<T>{groups, in.columns, in.deep, of_out, in.weight.as<T>(), !in.is_transposed,
                                  OptionalNumbers<T>({}), dx.as<T>()});
    if (in.is_transposed)
      multiply(call, WeightProducts<T>{groups, in.columns, in.deep, of_out, x, dweight.as<T>()});
    else
      multiply(call, WeightProducts<T>{groups, in.deep, in.columns, x, of_out, dweight.as<T>()});
    sum_rows(call, groups, in.columns, of_out, dbias);
  });
}
