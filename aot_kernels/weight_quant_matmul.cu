// out = x W^T + bias for weights W that are codes of 4 or 8 bits with a scale, and perhaps a zero point, for each group
// of neighbours, and the gradients of x and bias
//
//   case                                                 kernel          why
//   float16, up to 16 rows of whole packs of 16 bytes,
//     groups of 32 n, W by rows of outputs               few.h           reads codes once, in a stream
//   up to 8 of these rows, 4 bits, groups of 128 n,
//     a large matrix                                     stream.h        x stays in shared memory, masks alone widen
//   other float16, rows of whole packs, groups of 32 n   wgmma.h         codes are widened where they are multiplied
//                                                                        (sm_90a)
//   other dtypes and sizes, up to 16 rows                plain.h         a warp for each output
//   other float16, float32                               tiles.h         tensor cores; float32 as three TF32 products
//   float64, older GPUs                                  plain.h         any GPU
//   the CPU                                              cpu.h           widens codes in registers, or once a block

#include "common/sum.h"
#include "weight_quant_matmul/cpu.h"
#include "weight_quant_matmul/gpu.h"

using namespace msops;
using namespace msops::weight_quant_matmul;

namespace {

struct Inputs {
  Tensor x, weight, scale, zero, table, bias;
  int bits;
  bool is_transposed;
  int64_t group, tokens = 1, deep, outputs;

  explicit Inputs(Call& call)
      : bits(static_cast<int>(call.attribute("bits", 4, 8))),
        is_transposed(call.attribute("transpose_weight", 0, 1)),
        group(call.attribute("group", 0, INT32_MAX)) {
    call.require(bits == 4 || bits == 8, kBadAttribute, "attribute bits is %d, expected 4 or 8", bits);
    x = call.tensor("x"), weight = call.tensor_of("uint8|int8", "weight", 2);
    scale = call.tensor_of("common|float32", "scale", 2);
    zero = call.optional_of("uint8|int8|common|float32", "zero_point", 2);
    table = call.optional_of("float32", "codebook", 1), bias = call.optional_of("common|float32", "bias", 1);
    call.require(x.rank > 0, kBadRank, "x has no axes");
    if (!call.ok()) return;
    deep = x.dim(-1), outputs = scale.dim(is_transposed ? 0 : 1);
    for (int i = 0; i + 1 < x.rank; ++i) tokens *= x.dim(i);
    const int64_t rows = is_transposed ? outputs : deep, columns = is_transposed ? deep : outputs;
    call.require_shape(weight, {rows, bits == 8 ? columns : columns / 2 + columns % 2});
    const int64_t groups = groups_of();
    call.require_shape(scale, {is_transposed ? outputs : groups, is_transposed ? groups : outputs});
    if (zero.dtype) {
      call.require_same_shape(zero, scale);
      call.require(!std::strcmp(zero.dtype, weight.dtype) || !std::strcmp(zero.dtype, scale.dtype), kBadDtype,
                   "zero_point is %s, expected that of weight or of scale", zero.dtype);
      call.require(!table.dtype, kBadParameterCount, "zero_point and codebook are both given");
    }
    if (table.dtype) {
      call.require_shape(table, {int64_t{1} << bits});
      call.require(!std::strcmp(weight.dtype, "uint8"), kBadDtype, "weight is %s, expected uint8 beside a codebook",
                   weight.dtype);
    }
    if (bias.dtype) call.require_shape(bias, {outputs});
  }

  int64_t groups_of() const { return group == 0 ? 1 : deep / group + (deep % group > 0); }

  template <typename T>
  Codes<T> codes() const {
    return {weight.as<uint8_t>(),
            is_transposed ? outputs : deep,
            is_transposed ? deep : outputs,
            bits,
            std::strcmp(weight.dtype, "int8") == 0,
            !is_transposed,
            group == 0 ? std::max<int64_t>(deep, 1) : group,
            groups_of(),
            Numbers<T>(scale),
            ZeroPoints<T>(zero),
            table.as<float>()};
  }

  void require_result(Call& call, const Tensor& tensor) const {
    if (!call.ok()) return;
    std::vector<int64_t> shape(x.shape, x.shape + x.rank);
    shape.back() = outputs;
    call.require_shape(tensor, shape);
  }
};

template <typename T>
void multiply(Call& call, const Products<T>& p) {
  if (!call.ok() || p.tokens == 0 || p.outputs == 0) return;
  if (call.is_on_cpu()) return cpu::multiply(call, p);
#ifdef __CUDACC__
  multiply_on_gpu(call, p);
#endif
}

// The gradient of the bias is the sum of the rows of dout. Index i is a run of kRun columns.
template <int kRun, typename T>
struct SumRows {
  int64_t rows, columns;
  const T* from;
  Numbers<T> to;

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const int64_t first = int64_t{i} * kRun, count = columns - first < kRun ? columns - first : kRun;
    Compute<T> sums[kRun] = {};
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t j = 0; j < count; ++j) sums[j] += Compute<T>(from[row * columns + first + j]);
    for (int64_t j = 0; j < count; ++j) to.set(first + j, sums[j]);
  }
};

template <typename T>
void sum_rows(Call& call, const Inputs& in, const T* from, const Tensor& to) {
  constexpr int kRunOnCpu = 64;
  if (!to.dtype) return;
  if (call.is_on_cpu()) {
    const SumRows<kRunOnCpu, T> sum{in.tokens, in.outputs, from, Numbers<T>(to)};
    on_cpu(call, (in.outputs + kRunOnCpu - 1) / kRunOnCpu, sum, static_cast<double>(in.tokens) * kRunOnCpu);
  } else {
    on_gpu(call, in.outputs, in.outputs, SumRows<1, T>{in.tokens, in.outputs, from, Numbers<T>(to)});
  }
}

}  // namespace

// (x, weight, scale, zero_point?, codebook?, bias?) -> out
MSOPS_ENTRY(WeightQuantMatmulForward) {
  const Inputs in(call);
  const Tensor out = call.tensor("out");
  in.require_result(call, out);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    multiply(call, Products<T>{in.tokens, in.deep, in.outputs, in.x.as<T>(), in.codes<T>(), in.is_transposed,
                               OptionalNumbers<T>(in.bias), out.as<T>()});
  });
}

// (x, weight, scale, zero_point?, codebook?, bias?, dout) -> (dx, dbias?): of x, its shape alone is used.
MSOPS_ENTRY(WeightQuantMatmulBackward) {
  const Inputs in(call);
  const Tensor dout = call.tensor("dout"), dx = call.tensor("dx");
  const Tensor dbias = call.optional_of("common|float32", "dbias", 1);
  in.require_result(call, dout);
  call.require_same_shape(dx, in.x);
  call.require_gradient(dbias, in.bias);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    multiply(call, Products<T>{in.tokens, in.outputs, in.deep, dout.as<T>(), in.codes<T>(), !in.is_transposed,
                               OptionalNumbers<T>({}), dx.as<T>()});
    sum_rows(call, in, dout.as<T>(), dbias);
  });
}
