// out_i = sum_j softmax_j(scale q_i k_j) v_j over the keys j that query i sees, and the gradients of q, k and v.
// flash_attention/problem.h has the formulas.

#include "common/scratch.h"
#include "flash_attention/cpu_bias.h"
#include "flash_attention/mask_bits.h"
#include "flash_attention/packed.h"
#include "flash_attention/padding.h"
#ifdef __CUDACC__
#include "flash_attention/gpu.h"
#endif

using namespace msops;
using flash_attention::Attention;
using flash_attention::AttentionGradient;
using flash_attention::BiasGradient;
using flash_attention::ExtendedAttention;
using flash_attention::Floats;
using flash_attention::MaskBits;
using flash_attention::Padding;
using flash_attention::QuerySums;
using flash_attention::Strides;

namespace {

constexpr int64_t kMostFeatures = 512;

// Layout says how the axes of a tensor lie: (batch, head, row), (batch, row, head) or, packed, (row, head).
enum Layout : int64_t { kHeadFirst, kRowFirst, kPacked };

Strides strides_of(int64_t axes, int64_t heads, int64_t rows, int64_t width) {
  if (axes == kHeadFirst) return {heads * rows * width, rows * width, width};
  return {axes == kPacked ? 0 : rows * heads * width, width, heads * width};
}

struct HeadShape {
  int64_t batch, heads, rows, width;
  Strides strides;

  HeadShape(const Tensor& x, int64_t axes)
      : batch(axes == kPacked ? 1 : x.dim(0)),
        heads(axes == kHeadFirst ? x.dim(1) : x.dim(-2)),
        rows(axes == kHeadFirst  ? x.dim(2)
             : axes == kRowFirst ? x.dim(1)
                                 : x.dim(0)),
        width(x.dim(-1)),
        strides(strides_of(axes, heads, rows, width)) {}
};

// Inputs are what all entries take first.
struct Inputs {
  int64_t axes, left, right, most_queries = 0, most_keys = 0;
  double scale, softcap, dropout_p = 0;
  bool by_width;  // whether the scale is divided by the square root of the width
  Tensor q, k, v, kv_lengths, mask, bias, alibi_slopes, seed, cu_seqlens_q, cu_seqlens_k;

  explicit Inputs(Call& call, bool needs_bias = false) {
    constexpr int64_t kMost = INT64_C(1) << 39;
    axes = call.attribute("axes", kHeadFirst, kPacked);
    left = call.attribute("left", -1, kMost), right = call.attribute("right", -1, kMost);
    scale = call.number("scale"), softcap = call.number("softcap"), by_width = call.attribute("by_width", 0, 1);
    call.require(std::isfinite(scale), kBadAttribute, "scale must be finite");
    call.require(std::isfinite(softcap) && softcap >= 0, kBadAttribute, "softcap must be finite and at least 0");
    const int rank = axes == kPacked ? 3 : 4;
    q = call.tensor("q", rank), k = call.tensor("k", rank), v = call.tensor("v", rank);
    if (axes == kPacked) {
      most_queries = call.attribute("most_queries", 0, kMost), most_keys = call.attribute("most_keys", 0, kMost);
      cu_seqlens_q = call.tensor_of("int32", "cu_seqlens_q", 1);
      cu_seqlens_k = call.tensor_of("int32", "cu_seqlens_k", 1);
    } else {
      dropout_p = call.number("dropout_p");
      call.require(dropout_p >= 0 && dropout_p < 1, kBadAttribute, "dropout_p must be at least 0 and less than 1");
      kv_lengths = call.optional_of("int32", "kv_lengths", 1), mask = call.optional_of("bool", "mask");
      constexpr const char* kFloats = "float32|common";
      bias = needs_bias ? call.tensor_of(kFloats, "bias") : call.optional_of(kFloats, "bias");
      alibi_slopes = call.optional_of(kFloats, "alibi_slopes");
      seed = call.optional_of("int64", "seed", 0);
    }
    check(call);
  }

  // Returns what the kernels need, except for results and scratch.
  template <typename T>
  ExtendedAttention<T> problem() const {
    const HeadShape of_q(q, axes), of_k(k, axes), of_v(v, axes);
    ExtendedAttention<T> a{};
    a.batch = batch(), a.heads = of_q.heads, a.kv_heads = of_k.heads;
    a.query_rows = of_q.rows, a.key_rows = of_k.rows, a.width = of_q.width, a.value_width = of_v.width;
    a.queries = axes == kPacked ? std::min(most_queries, of_q.rows) : of_q.rows;
    a.keys = axes == kPacked ? std::min(most_keys, of_k.rows) : of_k.rows;
    a.q = q.as<const T>(), a.k = k.as<const T>(), a.v = v.as<const T>();
    a.of_q = of_q.strides, a.of_k = of_k.strides, a.of_v = of_v.strides;
    a.of_out = strides_of(axes, a.heads, a.query_rows, a.value_width);
    a.of_lse = {axes == kPacked ? 0 : a.heads * a.query_rows, a.query_rows, 1};
    a.scale = Compute<T>(by_width ? scale / std::sqrt(std::max(1.0, static_cast<double>(a.width))) : scale);
    a.softcap = Compute<T>(softcap), a.left = left, a.right = right, a.splits = 1;
    a.kv_lengths = kv_lengths.as<const int32_t>(), a.mask = mask.as<const bool>();
    a.cu_seqlens_q = cu_seqlens_q.as<const int32_t>(), a.cu_seqlens_k = cu_seqlens_k.as<const int32_t>();
    set_strides(mask, {&a.mask_key, &a.mask_query, &a.mask_head, &a.mask_batch});
    a.bias = floats_of<T>(bias), a.slopes = floats_of<T>(alibi_slopes);
    set_strides(bias, {&a.bias_key, &a.bias_query, &a.bias_head, &a.bias_batch});
    a.slopes_batch = alibi_slopes.rank == 2 ? a.heads : 0;
    a.seed = dropout_p > 0 ? seed.as<const int64_t>() : nullptr;
    a.threshold = static_cast<uint64_t>(dropout_p * 0x1p32), a.kept = Compute<T>(1 / (1 - dropout_p));
    return a;
  }

  // Returns whether a tensor is of float32 beside another T.
  template <typename T>
  static bool is_wide(const Tensor& x) {
    return x.dtype && std::strcmp(x.dtype, dtype_name<T>()) != 0;
  }
  template <typename T>
  static Floats<T> floats_of(const Tensor& x) {
    return {is_wide<T>(x) ? nullptr : x.as<const T>(), is_wide<T>(x) ? x.as<const float>() : nullptr};
  }

  // Returns the lengths of the bias's axes, of which it may lack the first ones.
  template <typename T>
  BiasGradient<T> gradient_of_bias(const Tensor& dbias) const {
    const auto length = [&](int d) { return d <= bias.rank ? bias.dim(-d) : 1; };
    T* const narrow = is_wide<T>(bias) ? nullptr : dbias.as<T>();
    return {narrow, narrow ? nullptr : dbias.as<float>(), length(4), length(3), length(2), length(1)};
  }

  // Returns how many words of scratch the bits of the mask take, at least one.
  template <typename T>
  int64_t mask_words(const Attention<T>& a, bool transposed) const {
    if (!mask.dtype || !MaskBits::are_used(a, transposed)) return 1;
    return std::max<int64_t>(1, MaskBits::of(a, transposed).size());
  }

  int64_t batch() const { return axes == kPacked ? cu_seqlens_q.dim(0) - 1 : q.dim(0); }

  // Returns how many numbers a gradient computes of all queries: delta, and the rest where logits have bias or ALiBi.
  int64_t numbers_of_queries() const {
    const HeadShape of_q(q, axes);
    return size_of({of_q.batch, of_q.heads, of_q.rows, bias.dtype || alibi_slopes.dtype ? 2 : 1});
  }

  void require_lse(Call& call, const Tensor& lse) const {
    const HeadShape of_q(q, axes);
    axes == kPacked ? call.require_shape(lse, {of_q.heads, of_q.rows})
                    : call.require_shape(lse, {of_q.batch, of_q.heads, of_q.rows});
  }
  void require_out(Call& call, const Tensor& out) const {
    const int64_t w = v.dim(-1);
    axes == kPacked ? call.require_shape(out, {q.dim(0), q.dim(1), w})
                    : call.require_shape(out, {q.dim(0), q.dim(1), q.dim(2), w});
  }

  // On the CPU, sequences must lie one after another in the packed tensors.
  void require_sequences(Call& call) const {
    const int64_t longest[] = {most_queries, most_keys}, rows[] = {q.dim(0), k.dim(0)};
    const Tensor* const both[] = {&cu_seqlens_q, &cu_seqlens_k};
    for (int t = 0; axes == kPacked && t < 2; ++t) {
      const int32_t* const begin = both[t]->as<const int32_t>();
      for (int64_t b = 0; b < batch() && call.ok(); ++b) {
        const int64_t first = begin[b], end = begin[b + 1];
        call.require(0 <= first && first <= end && end <= rows[t], kBadValue,
                     "%s has %lld before %lld, expected numbers that grow from 0 to at most %lld", both[t]->name,
                     static_cast<long long>(first), static_cast<long long>(end), static_cast<long long>(rows[t]));
        call.require(end - first <= longest[t], kBadValue, "%s has a sequence of %lld, longer than the longest of %lld",
                     both[t]->name, static_cast<long long>(end - first), static_cast<long long>(longest[t]));
      }
    }
  }

 private:
  void check(Call& call) {
    if (!call.ok()) return;
    const HeadShape of_q(q, axes), of_k(k, axes), of_v(v, axes);
    call.require(of_k.batch == of_q.batch && of_v.batch == of_q.batch, kBadShape, "q, k and v differ in their batch");
    call.require(of_v.heads == of_k.heads && of_v.rows == of_k.rows, kBadShape, "v has other rows than k");
    call.require(of_k.width == of_q.width, kBadShape, "k has other features than q");
    call.require(of_k.heads > 0 ? of_q.heads % of_k.heads == 0 : of_q.heads == 0, kBadShape,
                 "q has %lld heads, not a multiple of the %lld heads of k", static_cast<long long>(of_q.heads),
                 static_cast<long long>(of_k.heads));
    call.require(of_q.width <= kMostFeatures && of_v.width <= kMostFeatures, kBadShape,
                 "heads have more than %lld features", static_cast<long long>(kMostFeatures));
    if (kv_lengths.dtype) call.require_shape(kv_lengths, {of_q.batch});
    if (axes == kPacked) {
      call.require(cu_seqlens_q.dim(0) >= 1, kBadShape, "cu_seqlens_q is empty");
      call.require_same_shape(cu_seqlens_k, cu_seqlens_q);
    }
    const int64_t full[] = {of_q.batch, of_q.heads, of_q.rows, of_k.rows};
    require_broadcast(call, mask, full);
    require_broadcast(call, bias, full);
    if (alibi_slopes.dtype && alibi_slopes.rank == 2)
      call.require_shape(alibi_slopes, {of_q.batch, of_q.heads});
    else if (alibi_slopes.dtype)
      call.require_shape(alibi_slopes, {of_q.heads});
    call.require(seed.dtype || dropout_p == 0, kBadAttribute, "seed is missing beside dropout_p");
  }

  static void require_broadcast(Call& call, const Tensor& x, const int64_t (&full)[4]) {
    if (!x.dtype) return;
    call.require(x.rank <= 4, kBadShape, "%s has rank %d, expected at most 4", x.name, x.rank);
    for (int d = 1; call.ok() && d <= x.rank; ++d)
      call.require(x.dim(-d) == 1 || x.dim(-d) == full[4 - d], kBadShape,
                   "%s has length %lld along axis %d, expected 1 or %lld", x.name, static_cast<long long>(x.dim(-d)),
                   -d, static_cast<long long>(full[4 - d]));
  }

  // Sets the strides of the axes, from the last one on, of a tensor that is broadcast.
  static void set_strides(const Tensor& x, std::initializer_list<int64_t*> strides) {
    int64_t stride = 1;
    for (int d = 1; d <= x.rank; stride *= x.dim(-d), ++d) *strides.begin()[d - 1] = x.dim(-d) > 1 ? stride : 0;
  }
};

// Known is what both gradients take after the inputs, the results of the forward pass and their gradients.
struct Known {
  Tensor out, lse, dout, dlse;

  Known(Call& call, const Inputs& inputs) {
    const int rank = inputs.axes == kPacked ? 3 : 4;
    out = call.tensor("out", rank), lse = call.tensor_of("accumulator", "lse", rank - 1);
    dout = call.tensor("dout", rank), dlse = call.tensor_of("accumulator", "dlse", rank - 1);
    inputs.require_out(call, out);
    inputs.require_lse(call, lse);
    call.require_same_shape(dout, out);
    call.require_same_shape(dlse, lse);
  }

  // Returns the problem, and its gradient without results. `delta` also holds the rests where there are any.
  template <typename T>
  std::pair<ExtendedAttention<T>, AttentionGradient<T>> problem(const Inputs& inputs, const Tensor& delta) const {
    using C = Compute<T>;
    ExtendedAttention<T> a = inputs.problem<T>();
    a.out = out.as<T>(), a.lse = lse.as<C>();
    return {a,
            {dout.as<const T>(),
             dlse.as<const C>(),
             delta.as<C>(),
             a.adds_to_logits() ? delta.as<C>() + lse.size : nullptr,
             nullptr,
             nullptr,
             nullptr,
             {}}};
  }
};

// Returns over how many blocks the keys are split. `rows` queries of each of `heads` heads read the same keys.
//
// A block for each of the heads would leave a large GPU idle if there are few. So there are about 256 blocks, with at
// least 128 keys for each, unless many rows read the same keys or there are few keys. More blocks take longer, since
// each one has to begin and end.
int64_t splits_of(int64_t heads, int64_t rows, int64_t keys) {
  if (rows > 64 || keys < 512) return 1;
  return std::max<int64_t>(1, std::min<int64_t>({keys / 128, 256 / std::max<int64_t>(1, heads), 64}));
}

}  // namespace

// (q, k, v, kv_lengths?, mask?, bias?, alibi_slopes?, seed?) or (q, k, v, cu_seqlens_q, cu_seqlens_k) -> (out, lse,
// partial, mask_bits, padded). `partial` is scratch: sums over as many splits of the keys as it has rows. If the keys
// are not split, a kernel may count items with it. `mask_bits` is scratch for MaskBits, where a kernel may use them,
// and `padded` for the copies of Padding.
MSOPS_ENTRY(FlashAttentionForward) {
  const Inputs inputs(call);
  const bool packed = inputs.axes == kPacked;
  const Tensor out = call.tensor("out", packed ? 3 : 4), lse = call.tensor_of("accumulator", "lse", packed ? 2 : 3);
  const Tensor partial = call.scratch("partial", 2), mask_bits = call.scratch("mask_bits", 1);
  const Tensor padded = call.tensor("padded", 1);
  inputs.require_out(call, out);
  inputs.require_lse(call, lse);
  // Where out and lse have wrong shapes, the product could overflow.
  const int64_t splits = partial.dim(0), numbers = call.ok() ? lse.size * (inputs.v.dim(-1) + 2) : 0;
  call.require(splits >= 1 && (splits == 1 || !packed), kBadShape, "partial has %lld rows",
               static_cast<long long>(splits));
  call.require_shape(partial, {splits, splits > 1 ? numbers : 1});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    ExtendedAttention<T> a = inputs.problem<T>();
    a.out = out.as<T>(), a.lse = lse.as<Compute<T>>(), a.splits = splits, a.partial = partial.as<Compute<T>>();
    const Padding<T> padding(a, packed, false);
    call.require_shape(mask_bits, {inputs.mask_words(padding.with_long_rows(a), false)});
    call.require_shape(padded, {padding.size()});
    if (!call.ok() || lse.size == 0) return;
    if (call.is_on_cpu()) {
      inputs.require_sequences(call);
      flash_attention::fill_results(call, a);
      flash_attention::cpu::forward(call, a);
    }
#ifdef __CUDACC__
    if (!call.is_on_cpu())
      flash_attention::forward_on_gpu(call, a, padding, padded.as<T>(), static_cast<uint32_t*>(mask_bits.data));
#endif
  });
}

MSOPS_SCRATCH(FlashAttentionForward) {
  const Inputs inputs(call);
  const bool packed = inputs.axes == kPacked;
  const HeadShape q(inputs.q, inputs.axes), k(inputs.k, inputs.axes);
  int64_t words = 1, padded = 1;
  with_type<Half, float, double>(inputs.q, [&](auto type) {
    using T = typename decltype(type)::type;
    if (!call.ok()) return;
    const auto a = inputs.problem<T>();
    const Padding<T> padding(a, packed, false);
    words = inputs.mask_words(padding.with_long_rows(a), false), padded = padding.size();
  });
  if (packed) return {{1, 1}, {words}, {padded}};
  const int64_t splits = splits_of(q.batch * k.heads, q.rows * (q.heads / std::max<int64_t>(1, k.heads)), k.rows);
  return {{splits, splits > 1 ? q.batch * q.heads * q.rows * (inputs.v.dim(-1) + 2) : 1}, {words}, {padded}};
}

// (the inputs of FlashAttentionForward, out, lse, dout, dlse) -> (dq, dk, dv, delta, query_sums, mask_bits, padded).
// The last four are scratch. `query_sums`, `mask_bits` and `padded` have one number where no kernel would use them.
MSOPS_ENTRY(FlashAttentionBackward) {
  const Inputs inputs(call);
  const bool packed = inputs.axes == kPacked;
  const int rank = packed ? 3 : 4;
  const Known known(call, inputs);
  const Tensor dq = call.tensor("dq", rank), dk = call.tensor("dk", rank), dv = call.tensor("dv", rank);
  const Tensor delta = call.scratch("delta", 1), query_sums = call.scratch("query_sums", 1);
  const Tensor mask_bits = call.scratch("mask_bits", 1), padded = call.tensor("padded", 1);
  call.require_same_shape(dq, inputs.q);
  call.require_same_shape(dk, inputs.k);
  call.require_same_shape(dv, inputs.v);
  call.require_shape(delta, {inputs.numbers_of_queries()});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    auto [a, g] = known.problem<T>(inputs, delta);
    g.dq = dq.as<T>(), g.dk = dk.as<T>(), g.dv = dv.as<T>();
    const Padding<T> padding(a, packed, true);
    const int64_t tiles = QuerySums::count(padding.with_long_rows(a), packed);
    call.require_shape(query_sums, {QuerySums::scratch(tiles)});
    call.require_shape(mask_bits, {inputs.mask_words(padding.with_long_rows(a), true)});
    call.require_shape(padded, {padding.size()});
    if (!call.ok()) return;
    if (tiles > 0) {
      float* const numbers = query_sums.as<float>();
      unsigned* const counters = reinterpret_cast<unsigned*>(numbers + tiles * QuerySums::kNumbers);
      g.query_sums = {numbers, tiles, counters, counters + tiles};
    }
    if (inputs.q.size + inputs.k.size + inputs.v.size == 0) return;
    if (call.is_on_cpu()) {
      inputs.require_sequences(call);
      flash_attention::fill_gradients(call, a, g);
      flash_attention::cpu::backward(call, a, g);
    }
#ifdef __CUDACC__
    if (!call.is_on_cpu())
      flash_attention::backward_on_gpu(call, a, g, padding, padded.as<T>(), static_cast<uint32_t*>(mask_bits.data));
#endif
  });
}

MSOPS_SCRATCH(FlashAttentionBackward) {
  const Inputs inputs(call);
  const bool packed = inputs.axes == kPacked;
  int64_t tiles = 0, words = 1, padded = 1;
  with_type<Half, float, double>(inputs.q, [&](auto type) {
    using T = typename decltype(type)::type;
    if (!call.ok()) return;
    const auto a = inputs.problem<T>();
    const Padding<T> padding(a, packed, true);
    const auto on_gpu = padding.with_long_rows(a);
    tiles = QuerySums::count(on_gpu, packed), words = inputs.mask_words(on_gpu, true), padded = padding.size();
  });
  return {{inputs.numbers_of_queries()}, {QuerySums::scratch(tiles)}, {words}, {padded}};
}

// (the inputs of FlashAttentionForward, of which the bias is given, out, lse, dout, dlse) -> (dbias, delta). It is
// apart from FlashAttentionBackward, so that nothing is computed for a bias whose gradient is not asked for.
MSOPS_ENTRY(FlashAttentionBiasBackward) {
  const Inputs inputs(call, true);
  call.require(inputs.axes != kPacked, kBadAttribute, "packed sequences have no bias");
  const Known known(call, inputs);
  const Tensor dbias = call.tensor_of("float32|common", "dbias"), delta = call.scratch("delta", 1);
  if (call.ok())
    call.require(!std::strcmp(dbias.dtype, inputs.bias.dtype), kBadDtype, "dbias is %s, bias is %s", dbias.dtype,
                 inputs.bias.dtype);
  call.require_same_shape(dbias, inputs.bias);
  call.require_shape(delta, {inputs.numbers_of_queries()});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const auto [a, g] = known.problem<T>(inputs, delta);
    const BiasGradient<T> to = inputs.gradient_of_bias<T>(dbias);
    if (dbias.size == 0) return;
    if (call.is_on_cpu()) flash_attention::cpu::bias_backward(call, a, g, to);
#ifdef __CUDACC__
    if (!call.is_on_cpu()) flash_attention::bias_backward_on_gpu(call, a, g, to);
#endif
  });
}

MSOPS_SCRATCH(FlashAttentionBiasBackward) { return {{Inputs(call, true).numbers_of_queries()}}; }
