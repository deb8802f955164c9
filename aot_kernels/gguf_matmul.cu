// out = x W^T + bias, where W lies in blocks as in GGUF files (see shared/gguf/formats.h), and the gradients of x and
// bias.
//
//   case                                        kernel           why
//   float16, up to 8 tokens, and up to 32       few.h (sm_80)    reads the weight once, at the memory's rate
//   where tiles would leave a GPU half idle
//   other float16, rows at multiples of         wgmma.h (sm_90a) tensor cores at their full rate; codes are widened in
//   16 bytes                                                     registers meanwhile
//   float16, up to 64 tokens                    few.h            on older GPUs, 8 tokens at a time
//   other float16, float32 of more than 8       tiles.h (sm_80)  tensor cores; float32 as three TF32 products
//   tokens, their gradients
//   float32 of up to 8 tokens, float64,         plain.h          any GPU
//   older GPUs, weights at odd addresses
//   the CPU                                     cpu.h            each block is unpacked once for some tokens
//
// Sums are in float32 (float64), in a fixed order that does not depend on other tokens.

#include "common/sum.h"
#include "gguf_matmul/cpu.h"
#include "gguf_matmul/gpu.h"

using namespace msops;
using namespace msops::gguf_matmul;

namespace {

struct Inputs {
  int64_t kind, tokens = 1;
  Tensor x, blocks, bias;  // x: x or dout

  Inputs(Call& call, const char* name) : kind(call.attribute("kind", 0, gguf::kKinds - 1)) {
    x = call.tensor(name), blocks = call.tensor_of("uint8", "blocks", 2);
    bias = call.optional_of("common|float32", "bias", 1);
    call.require(x.rank > 0, kBadRank, "%s has no axes", name);
    if (bias.dtype) call.require_shape(bias, {blocks.dim(0)});
    for (int i = 0; i + 1 < x.rank; ++i) tokens *= x.dim(i);
  }

  // Requires x and the result to have rows of these lengths.
  void require_rows(Call& call, int64_t length, const Tensor& out, int64_t length_of_out) const {
    if (!call.ok()) return;
    std::vector<int64_t> shape(x.shape, x.shape + x.rank);
    shape.back() = length;
    call.require_shape(x, shape);
    shape.back() = length_of_out;
    call.require_shape(out, shape);
  }

  // Returns the weight, whose rows are whole blocks.
  template <typename F>
  Weight weight() const {
    const int64_t bytes = blocks.dim(1);
    return {blocks.dim(0), bytes / F::kBytes * F::kNumbers, bytes, blocks.as<const uint8_t>()};
  }
};

template <typename F, typename P>
void multiply(Call& call, const P& p) {
  if (!call.ok() || p.tokens == 0 || p.columns() == 0) return;
  if (call.is_on_cpu()) return cpu::multiply<F>(call, p);
#ifdef __CUDACC__
  multiply_on_gpu<F>(call, p);
#endif
}

// The gradient of the bias is the sum of dout over the tokens.
template <typename T>
struct SumTokens {
  int64_t tokens, columns;
  const T* dout;
  Numbers<T> out;

  template <typename I>
  MSOPS_BOTH void operator()(I column) const {
    Sum<T> sum;
    for (int64_t t = 0; t < tokens; ++t) sum += Compute<T>(dout[t * columns + static_cast<int64_t>(column)]);
    out.set(static_cast<int64_t>(column), sum.total());
  }
};

}  // namespace

// (x, blocks, bias?) -> (out)
MSOPS_ENTRY(GgufMatmulForward) {
  const Inputs in(call, "x");
  const Tensor out = call.tensor("out");
  in.require_rows(call, gguf::numbers_of(call, in.blocks, in.kind), out, in.blocks.dim(0));
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    with_format(in.kind, [&](auto format) {
      using F = typename decltype(format)::type;
      multiply<F>(call,
                  Products<T>{in.tokens, in.weight<F>(), in.x.as<const T>(), OptionalNumbers<T>(in.bias), out.as<T>()});
    });
  });
}

// (dout, blocks, bias?) -> (dx, dbias?): `bias` gives its dtype alone.
MSOPS_ENTRY(GgufMatmulBackward) {
  const Inputs in(call, "dout");
  const Tensor dx = call.tensor("dx"), dbias = call.optional_of("common|float32", "dbias", 1);
  in.require_rows(call, in.blocks.dim(0), dx, gguf::numbers_of(call, in.blocks, in.kind));
  call.require_gradient(dbias, in.bias);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    with_format(in.kind, [&](auto format) {
      using F = typename decltype(format)::type;
      multiply<F>(call, Gradients<T>{in.tokens, in.weight<F>(), in.x.as<const T>(), dx.as<T>()});
    });
    if (dbias.size > 0)
      parallel_for(call, dbias.size, std::max(in.x.size, dbias.size),
                   SumTokens<T>{in.tokens, dbias.size, in.x.as<const T>(), Numbers<T>(dbias)},
                   static_cast<double>(in.tokens));
  });
}
