#include "common/scatter.h"

using namespace msops;

namespace {

template <typename T>
struct Gathered {
  const T* dout;
  int64_t channels, sources;
  bool channels_last;

  MSOPS_BOTH Compute<T> operator()(int64_t list, int64_t channel, int64_t source) const {
    const int64_t first = channels_last ? source : channel, second = channels_last ? channel : source;
    return Compute<T>(
        dout[(list * (channels_last ? sources : channels) + first) * (channels_last ? channels : sources) + second]);
  }
};

template <typename Index>
int gather_gradient(Call& call, const char* index_dtype) {
  const Tensor dout = call.tensor("dout", 3), index = call.tensor_of(index_dtype, "index", 2);
  const Tensor dx = call.tensor("dx", 3), scratch = call.tensor_of("int32", "scratch", 2);
  const bool last = call.attribute("last", 0, 1);
  const int64_t lists = index.dim(0), sources = index.dim(1), channels = dx.dim(last ? 2 : 1);
  const int64_t targets = dx.dim(last ? 1 : 2);
  call.require_shape(scratch, {lists, scatter_scratch(targets, sources)});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const Inverse inverse = invert(call, lists, targets, sources, index.as<const Index>(), scratch.as<int32_t>());
    scatter_add(call, inverse, channels, last ? ChannelOrder::kLast : ChannelOrder::kFirst,
                Gathered<T>{dout.as<T>(), channels, sources, last}, dx.as<T>());
  });
}

Shapes scratch_of(Call& call) {
  call.tensor("dout", 3);
  const Tensor index = call.tensor_of("index", "index", 2);
  return {{index.dim(0), scatter_scratch(call.attribute("targets", 0, INT32_MAX), index.dim(1))}};
}

}  // namespace

MSOPS_ENTRY(GatherGradient32) { return gather_gradient<int32_t>(call, "int32"); }
MSOPS_SCRATCH(GatherGradient32) { return scratch_of(call); }
MSOPS_ENTRY(GatherGradient64) { return gather_gradient<int64_t>(call, "int64"); }
MSOPS_SCRATCH(GatherGradient64) { return scratch_of(call); }
