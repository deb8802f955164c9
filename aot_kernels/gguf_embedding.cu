// Rows of a table that lies in blocks as in GGUF files: see shared/gguf/formats.h. On a GPU, an index that no row has
// gives zeros.

#include "shared/gather/indices.h"
#include "shared/gguf/unpack.h"

using namespace msops;

// (ids, blocks) -> (out)
MSOPS_ENTRY(GgufEmbeddingForward) {
  const int64_t kind = call.attribute("kind", 0, gguf::kKinds - 1);
  const Tensor ids = call.tensor_of("index", "ids"), blocks = call.tensor_of("uint8", "blocks", 2);
  const Tensor out = gguf::result_of(call);
  const int64_t columns = gguf::numbers_of(call, blocks, kind), rows = blocks.dim(0);
  if (call.ok()) {
    std::vector<int64_t> shape(ids.shape, ids.shape + ids.rank);
    shape.push_back(columns);
    call.require_shape(out, shape);
  }
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    if (call.is_on_cpu())
      with_type<int32_t, int64_t>(ids, [&](auto index) {
        gather::require_indices<typename decltype(index)::type>(call, ids, blocks, rows, "rows");
      });
    if (call.ok()) gguf::unpack_rows<T>(call, kind, ids.size, columns, {rows, Integers(ids)}, blocks, out);
  });
}
