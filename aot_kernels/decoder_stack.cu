// All layers of a Llama-like decoder in one operator; decoder_stack/stack.h has the formulas.

#include "common/scratch.h"
#include "decoder_stack/cpu.h"
#include "decoder_stack/few.h"
#include "decoder_stack/gpu.h"

using namespace msops;
using namespace msops::decoder_stack;

namespace {

constexpr int64_t kMostHeadSize = 512;

struct Inputs {
  int64_t heads, kv_heads, interleaved, bits, group;
  double eps;
  Tensor x, cos, sin, norm1, qkv, out, norm2, gate_up, down, norm, qkv_bias, q_norm, k_norm, keys, values, lengths;
  Tensor block_tables, scales[kSteps], zero_points[kSteps];

  explicit Inputs(Call& call) {
    constexpr const char* kFloats = "common|float32";
    heads = call.attribute("heads", 1, INT32_MAX), kv_heads = call.attribute("kv_heads", 1, INT32_MAX);
    interleaved = call.attribute("interleaved", 0, 1), eps = call.number("eps");
    bits = call.attribute("bits", 0, 8), group = call.attribute("group", 0, INT32_MAX);
    call.require(bits == 0 || bits == 4 || bits == 8, kBadAttribute, "attribute bits is %lld, expected 0, 4 or 8",
                 static_cast<long long>(bits));
    const bool has_zero_points = call.attribute("has_zero_points", 0, 1);
    const char* const weights = bits > 0 ? "uint8|int8" : "common";
    x = call.tensor("x", 3), cos = call.tensor_of(kFloats, "cos"), sin = call.tensor_of(kFloats, "sin");
    norm1 = call.tensor_of(kFloats, "norm1", 2), qkv = call.tensor_of(weights, "qkv", 3),
    out = call.tensor_of(weights, "out", 3);
    norm2 = call.tensor_of(kFloats, "norm2", 2), gate_up = call.tensor_of(weights, "gate_up", 3);
    down = call.tensor_of(weights, "down", 3);
    norm = call.optional_of(kFloats, "norm", 1), qkv_bias = call.optional("qkv_bias", 2);
    q_norm = call.optional_of(kFloats, "q_norm", 2), k_norm = call.optional_of(kFloats, "k_norm", 2);
    keys = call.optional("keys"), values = call.optional("values"), lengths = call.optional_of("index", "lengths", 1);
    block_tables = call.optional_of("index", "block_tables", 2);
    constexpr const char* kScales[] = {"qkv_scale", "out_scale", "gate_up_scale", "down_scale"};
    constexpr const char* kZeros[] = {"qkv_zero_point", "out_zero_point", "gate_up_zero_point", "down_zero_point"};
    for (int i = 0; i < kSteps && bits > 0; ++i) scales[i] = call.tensor_of(kFloats, kScales[i], 3);
    for (int i = 0; i < kSteps && bits > 0 && has_zero_points; ++i)
      zero_points[i] = call.tensor_of("uint8|int8|common|float32", kZeros[i], 3);
    check(call);
  }

  // Return how many blocks a layer's cache has, and how many rows a block. With four axes, the blocks of all layers are
  // one axis.
  int64_t blocks() const {
    if (keys.rank != 4) return keys.dim(1);
    return qkv.dim(0) > 0 ? keys.dim(0) / qkv.dim(0) : 0;
  }
  int64_t block_size() const { return keys.dim(-3); }

  // Returns how many rows the cache of a text has. With three axes, the rows of all layers and texts are one axis.
  int64_t room() const {
    if (block_tables.dtype) return size_of({block_tables.dim(1), block_size()});
    if (keys.rank != 3) return keys.dim(2);
    const int64_t texts = size_of({qkv.dim(0), x.dim(0)});
    return texts > 0 ? keys.dim(0) / texts : 0;
  }

  int64_t head_size() const { return qkv.dim(1) / (heads + 2 * kv_heads); }
  int64_t hidden() const { return bits > 0 ? gate_up.dim(1) / 2 : down.dim(2); }

  template <typename T>
  Stack<T> stack() const {
    Stack<T> s{};
    s.layers = qkv.dim(0), s.batch = x.dim(0), s.length = x.dim(1), s.width = x.dim(2);
    s.heads = heads, s.kv_heads = kv_heads, s.head_size = head_size(), s.hidden = hidden(), s.room = room();
    s.x = x.as<const T>(), s.cos = Numbers<T>(cos), s.sin = Numbers<T>(sin);
    s.has_table_of_text = cos.rank == 3, s.interleaved = interleaved;
    s.norm1 = Numbers<T>(norm1), s.norm2 = Numbers<T>(norm2), s.norm = Numbers<T>(norm);
    s.q_norm = Numbers<T>(q_norm), s.k_norm = Numbers<T>(k_norm);
    s.qkv_bias = qkv_bias.as<const T>(), s.has_codes = bits > 0;
    if (!s.has_codes) {
      s.qkv = qkv.as<const T>(), s.out = out.as<const T>();
      s.gate_up = gate_up.as<const T>(), s.down = down.as<const T>();
    }
    for (int i = 0; i < kSteps && s.has_codes; ++i) s.codes[i] = codes<T>(static_cast<Step>(i));
    s.keys = keys.as<const T>(), s.values = values.as<const T>();
    s.has_cache = keys.dtype, s.lengths = Integers(lengths);
    s.has_blocks = block_tables.dtype, s.tables = Integers(block_tables), s.table_columns = block_tables.dim(1);
    if (s.has_blocks) s.blocks = blocks(), s.block_size = block_size();
    s.eps = Compute<T>(eps);
    return s;
  }

  const Tensor& matrix(Step step) const {
    const Tensor* const matrices[] = {&qkv, &out, &gate_up, &down};
    return *matrices[step];
  }
  int64_t columns(Step step) const { return step == kOut ? heads * head_size() : step == kDown ? hidden() : x.dim(2); }
  int64_t groups(Step step) const { return group == 0 ? 1 : columns(step) / group + (columns(step) % group > 0); }

  // The rows of all layers are one axis.
  template <typename T>
  Codes<T> codes(Step step) const {
    const Tensor& m = matrix(step);
    return {m.as<uint8_t>(),
            m.dim(0) * m.dim(1),
            columns(step),
            static_cast<int>(bits),
            std::strcmp(m.dtype, "int8") == 0,
            false,
            group == 0 ? std::max<int64_t>(columns(step), 1) : group,
            groups(step),
            Numbers<T>(scales[step]),
            weight_quant_matmul::ZeroPoints<T>(zero_points[step]),
            nullptr};
  }

  // On the CPU, lengths must lie in the cache, and so must the blocks that they need.
  void require_rows(Call& call) const {
    const Integers rows(lengths), tables(block_tables);
    const auto number = [](int64_t value) { return static_cast<long long>(value); };
    for (int64_t b = 0; b < lengths.size && call.ok(); ++b) {
      call.require(0 <= rows[b] && rows[b] <= room(), kBadValue, "lengths has %lld, expected 0 to %lld",
                   number(rows[b]), number(room()));
      if (!block_tables.dtype) continue;
      const int64_t columns = block_tables.dim(1);
      for (int64_t m = 0; call.ok() && m * block_size() < rows[b]; ++m) {
        const int64_t block = tables[b * columns + m];
        call.require(0 <= block && block < blocks(), kBadValue, "block_tables[%lld, %lld] is %lld, expected 0 to %lld",
                     number(b), number(m), number(block), number(blocks() - 1));
      }
    }
  }

 private:
  void check(Call& call) {
    if (!call.ok()) return;
    const int64_t layers = qkv.dim(0), batch = x.dim(0), length = x.dim(1), width = x.dim(2), hidden = this->hidden();
    const int64_t of_all = heads + 2 * kv_heads, size = head_size();
    call.require(heads % kv_heads == 0, kBadAttribute, "kv_heads must divide heads");
    call.require(eps >= 0 && std::isfinite(eps), kBadAttribute, "eps must be finite and at least 0");
    call.require(qkv.dim(1) == size * of_all, kBadShape, "qkv has %lld rows, which %lld heads do not divide",
                 static_cast<long long>(qkv.dim(1)), static_cast<long long>(of_all));
    call.require(size % 2 == 0 && size > 0 && size <= kMostHeadSize, kBadShape,
                 "heads have %lld features, expected an even number of 2 to %lld", static_cast<long long>(size),
                 static_cast<long long>(kMostHeadSize));
    for (const Tensor& table : {cos, sin})
      table.rank == 3 ? call.require_shape(table, {batch, length, size / 2})
                      : call.require_shape(table, {length, size / 2});
    call.require(std::strcmp(cos.dtype, sin.dtype) == 0, kBadDtype, "sin is %s, cos is %s", sin.dtype, cos.dtype);
    call.require(cos.rank == sin.rank, kBadShape, "cos and sin differ in rank");
    call.require(hidden <= INT64_MAX / 2, kBadShape, "down is too large");
    const int64_t rows[] = {qkv.dim(1), width, 2 * hidden, width};
    for (const Step step : {kQkv, kOut, kGates, kDown}) {
      const int64_t all = columns(step);
      call.require_shape(matrix(step), {layers, rows[step], bits == 4 ? all / 2 + all % 2 : all});
      if (bits > 0) require_codes(call, step, rows[step]);
    }
    for (const Tensor& each : {norm1, norm2}) call.require_shape(each, {layers, width});
    if (norm.dtype) call.require_shape(norm, {width});
    if (qkv_bias.dtype) call.require_shape(qkv_bias, {layers, qkv.dim(1)});
    for (const Tensor& each : {q_norm, k_norm})
      if (each.dtype) call.require_shape(each, {layers, size});
    call.require(!keys.dtype == !values.dtype && !keys.dtype == !lengths.dtype, kBadShape,
                 "keys, values and lengths go together");
    call.require(!block_tables.dtype || keys.dtype, kBadShape, "block_tables is given without keys");
    if (!keys.dtype || !call.ok()) return;
    if (block_tables.dtype) require_blocks(call);
    for (const Tensor& each : {keys, values})
      block_tables.dtype ? call.require_same_shape(each, keys)
      : keys.rank == 3   ? call.require_shape(each, {size_of({layers, batch, room()}), kv_heads, size})
                         : call.require_shape(each, {layers, batch, room(), kv_heads, size});
    call.require_shape(lengths, {batch});
    call.require(room() <= INT32_MAX / 2, kBadShape, "keys has too many rows");
  }

  void require_codes(Call& call, Step step, int64_t rows) const {
    const Tensor &m = matrix(step), &scale = scales[step], &zero = zero_points[step];
    const auto is_like = [](const Tensor& a, const Tensor& b) { return std::strcmp(a.dtype, b.dtype) == 0; };
    call.require_shape(scale, {qkv.dim(0), rows, groups(step)});
    call.require(is_like(m, qkv), kBadDtype, "%s is %s, qkv is %s", m.name, m.dtype, qkv.dtype);
    call.require(is_like(scale, scales[kQkv]), kBadDtype, "%s is %s, qkv_scale is %s", scale.name, scale.dtype,
                 scales[kQkv].dtype);
    if (!zero.dtype) return;
    call.require_same_shape(zero, scale);
    call.require(is_like(zero, qkv) || is_like(zero, scale), kBadDtype,
                 "%s is %s, expected that of qkv or of qkv_scale", zero.name, zero.dtype);
    call.require(is_like(zero, zero_points[kQkv]), kBadDtype, "%s is %s, qkv_zero_point is %s", zero.name, zero.dtype,
                 zero_points[kQkv].dtype);
  }

  void require_blocks(Call& call) const {
    const int64_t layers = qkv.dim(0);
    call.require_shape(block_tables, {x.dim(0), block_tables.dim(1)});
    call.require(keys.rank == 4 || keys.rank == 5, kBadShape, "keys has %d axes, expected 4 or 5", keys.rank);
    if (!call.ok()) return;
    call.require(block_size() > 0, kBadShape, "keys has blocks of no rows");
    call.require(blocks() <= INT32_MAX, kBadShape, "keys has too many blocks");
    if (keys.rank == 4)
      call.require_shape(keys, {layers * blocks(), block_size(), kv_heads, head_size()});
    else
      call.require_shape(keys, {layers, blocks(), block_size(), kv_heads, head_size()});
  }
};

// Returns how many numbers of scratch the kernels of either device take.
template <typename T>
int64_t scratch_numbers(const Stack<T>& s) {
  int64_t numbers = std::max<int64_t>(1, cpu::Space<T>().place(s, nullptr));
#ifdef __CUDACC__
  numbers = std::max({numbers, gpu::Space<T>().place(s, nullptr), few::numbers(s)});
#endif
  return numbers;
}

}  // namespace

// (x, cos, sin, norm1, qkv, out, norm2, gate_up, down, norm?, qkv_bias?, q_norm?, k_norm?, keys?, values?, lengths?,
// block_tables?, four scales and perhaps zero points of codes) -> (y, k, v, work): the last one is scratch.
MSOPS_ENTRY(DecoderStackForward) {
  const Inputs in(call);
  const Tensor y = call.tensor("y", 3), k = call.tensor("k", 5), v = call.tensor("v", 5);
  const Tensor work = call.scratch("work", 2);
  call.require_same_shape(y, in.x);
  for (const Tensor& each : {k, v})
    call.require_shape(each, {in.qkv.dim(0), in.x.dim(0), in.x.dim(1), in.kv_heads, in.head_size()});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    Stack<T> s = in.stack<T>();
    s.y = y.as<T>(), s.k = k.as<T>(), s.v = v.as<T>();
    // A library for the CPU alone needs less than one for GPUs, so that there may be more.
    const int64_t numbers = scratch_numbers(s);
    call.require(work.dim(0) >= numbers && work.dim(1) == 1, kBadShape,
                 "work has %lld rows of %lld, expected %lld of 1", static_cast<long long>(work.dim(0)),
                 static_cast<long long>(work.dim(1)), static_cast<long long>(numbers));
    if (!call.ok()) return;
    if (s.tokens() * s.width == 0 && k.size == 0) return;
    if (call.is_on_cpu()) {
      in.require_rows(call);
      cpu::Space<T> space;
      space.place(s, work.as<Compute<T>>());
      if (call.ok()) cpu::forward(call, s, space);
      return;
    }
#ifdef __CUDACC__
    if (!few::forward(call, s, work) && call.ok()) gpu::Forward<T>(call, s, work.data).run();
#endif
  });
}

MSOPS_SCRATCH(DecoderStackForward) {
  const Inputs in(call);
  int64_t numbers = 1;
  with_type<Half, float, double>(in.x, [&](auto type) {
    if (call.ok()) numbers = scratch_numbers(in.stack<typename decltype(type)::type>());
  });
  return {{numbers, 1}};
}
