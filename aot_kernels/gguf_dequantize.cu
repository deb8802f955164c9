// The numbers of blocks of GGUF files: see shared/gguf/formats.h.

#include "shared/gguf/unpack.h"

using namespace msops;

// (blocks) -> (out)
MSOPS_ENTRY(GgufDequantizeForward) {
  const int64_t kind = call.attribute("kind", 0, gguf::kKinds - 1);
  const Tensor blocks = call.tensor_of("uint8", "blocks"), out = gguf::result_of(call);
  call.require(blocks.rank > 0, kBadRank, "blocks has no axes");
  const int64_t columns = gguf::numbers_of(call, blocks, kind);
  if (call.ok()) {
    std::vector<int64_t> shape(blocks.shape, blocks.shape + blocks.rank);
    shape.back() = columns;
    call.require_shape(out, shape);
  }
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t rows = columns > 0 ? out.size / columns : 0;
    gguf::unpack_rows<T>(call, kind, rows, columns, {rows, Integers()}, blocks, out);
  });
}
