// out = (sum + bias) scale x_scale, or sum scale x_scale + bias, where the sums are x weight^T of int8, exact in int32
//
//   case                                         kernel          why
//   up to 2 rows, whole packs                    line_kernel     reads the weight once (dp4a)
//   up to 128 rows, or few tiles                 wgmma_few.h     reads the weight once, by many blocks
//   more rows                                    wgmma.h         pairs of blocks share what they read of the weight
//   up to 16 rows, whole packs, before sm_90a    line_kernel     reads the weight once for four rows
//   others, on sm_80 and later                   mma.h           tensor cores
//   others                                       plain_kernel    any GPU
//   the CPU                                      cpu.h           pairs of int16
//
// Whole packs, of 16 bytes, are in rows of x and of a weight by terms (transpose_weight). By wgmma, on sm_90a, both
// have them.

#include "int8_matmul/cpu.h"
#include "int8_matmul/gpu.h"

using namespace msops;
using namespace msops::int8_matmul;

// (x, weight, scale, x_scale?, bias?) -> out
MSOPS_ENTRY(Int8MatmulForward) {
  const Tensor x = call.tensor_of("int8", "x"), weight = call.tensor_of("int8", "weight", 2);
  const Tensor scale = call.tensor("scale", 1), x_scale = call.optional_of("float32", "x_scale");
  const Tensor bias = call.optional_of("int32|float32", "bias", 1), out = call.tensor_of("float16|float32", "out");
  const bool by_terms = call.attribute("transpose_weight", 0, 1), is_half = call.attribute("is_half", 0, 1);
  call.require(x.rank > 0, kBadRank, "x has no axes");
  const int64_t deep = x.dim(-1), outputs = weight.dim(by_terms ? 0 : 1);
  call.require_shape(weight, {by_terms ? outputs : deep, by_terms ? deep : outputs});
  call.require_shape(scale, {outputs});
  call.require(deep < 131072, kBadShape, "x has rows of %lld, expected less than 131072", static_cast<long long>(deep));
  if (x_scale.dtype) call.require_shape_of_rows(x_scale, x);
  if (bias.dtype) call.require_shape(bias, {outputs});
  int64_t tokens = 1;
  if (call.ok()) {
    std::vector<int64_t> shape(x.shape, x.shape + x.rank);
    shape.back() = outputs;
    call.require_shape(out, shape);
    call.require(!std::strcmp(out.dtype, is_half ? "float16" : "float32"), kBadDtype, "out is %s", out.dtype);
    for (int i = 0; i + 1 < x.rank; ++i) tokens *= x.dim(i);
  }
  return call.run<float>([&](auto) {
    if (tokens == 0 || outputs == 0) return;
    const bool is_whole = bias.dtype && !std::strcmp(bias.dtype, "int32");
    const Products p{tokens,
                     deep,
                     outputs,
                     x.as<int8_t>(),
                     weight.as<int8_t>(),
                     by_terms,
                     scale.as<float>(),
                     x_scale.as<float>(),
                     is_whole ? bias.as<int32_t>() : nullptr,
                     is_whole ? nullptr : bias.as<float>(),
                     out.data,
                     is_half};
    if (call.is_on_cpu()) return cpu::multiply(call, p);
#ifdef __CUDACC__
    multiply_on_gpu(call, p);
#endif
  });
}
