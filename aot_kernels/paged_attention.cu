// Attention of new tokens of several sequences to keys and values in blocks, which block tables name. paged_attention/
// problem.h says what is computed.
//
//   CPU                                                    cpu.h: tiles of flash_attention/cpu.h
//   GPU of sm_90a, float16, up to 256 features in whole
//   packs, blocks of a multiple of 8 rows, no mask, bias
//   and ALiBi: sequences with more than 64 tokens          wgmma.h
//   GPU of sm_80 and later, float16, up to 256 features
//   in whole packs of 16 bytes, also with caches of int8;
//   up to 576, if values are the first 512 of the keys     mma.h
//   other calls on a GPU                                   plain.h

#include "common/scratch.h"
#include "flash_attention/packed.h"
#include "paged_attention/cpu.h"
#ifdef __CUDACC__
#include "paged_attention/gpu.h"
#endif

using namespace msops;
using namespace msops::paged;

namespace {

// Inputs are what the entry takes first.
struct Inputs {
  static constexpr const char* kFloats = "float32|common";
  static constexpr const char* kZeros = "int8|float32|common";
  int64_t left, right, value_size;
  double scale, softcap;
  bool by_width;
  Tensor q, key_cache, value_cache, block_tables, lengths, cu_seqlens, mask, bias, alibi_slopes;
  Tensor key_scale, value_scale, key_zero_point, value_zero_point;

  explicit Inputs(Call& call) {
    constexpr int64_t kMost = INT64_C(1) << 39;
    left = call.attribute("left", -1, kMost), right = call.attribute("right", -1, kMost);
    scale = call.number("scale"), softcap = call.number("softcap"), by_width = call.attribute("by_width", 0, 1);
    value_size = call.attribute("value_size", 0, kMostFeatures);
    call.require(std::isfinite(scale), kBadAttribute, "scale must be finite");
    call.require(std::isfinite(softcap) && softcap >= 0, kBadAttribute, "softcap must be finite and at least 0");
    q = call.tensor("q", 3), key_cache = call.tensor_of("common|int8", "key_cache", 4);
    value_cache = call.optional_of("common|int8", "value_cache", 4);
    block_tables = call.tensor_of("int32", "block_tables", 2), lengths = call.tensor_of("int32", "lengths", 1);
    cu_seqlens = call.optional_of("int32", "cu_seqlens_q", 1);
    mask = call.optional_of("bool", "mask"), bias = call.optional_of(kFloats, "bias");
    alibi_slopes = call.optional_of(kFloats, "alibi_slopes");
    key_scale = call.optional_of(kFloats, "key_scale", 2), value_scale = call.optional_of(kFloats, "value_scale", 2);
    key_zero_point = call.optional_of(kZeros, "key_zero_point", 2);
    value_zero_point = call.optional_of(kZeros, "value_zero_point", 2);
    if (call.ok()) check(call);
  }

  bool has_codes() const { return key_cache.dtype && !std::strcmp(key_cache.dtype, "int8"); }
  int64_t value_width() const { return value_cache.dtype ? value_cache.dim(3) : value_size; }
  int64_t batch() const { return lengths.dim(0); }
  int64_t parts() const {
    int64_t keys = 0;
    if (__builtin_mul_overflow(block_tables.dim(1), key_cache.dim(1), &keys)) keys = INT64_MAX / 2;
    return most_parts(keys);
  }

  template <typename T, typename K>
  Paged<T, K> problem() const {
    Paged<T, K> p{};
    p.tokens = q.dim(0), p.batch = batch(), p.heads = q.dim(1), p.kv_heads = key_cache.dim(2), p.width = q.dim(2);
    p.value_width = value_width(), p.blocks = key_cache.dim(0), p.block_size = key_cache.dim(1);
    p.columns = block_tables.dim(1);
    p.divide_heads();
    p.q = q.as<const T>(), p.k = key_cache.as<const K>();
    p.v = value_cache.dtype ? value_cache.as<const K>() : p.k;
    p.v_width = value_cache.dtype ? p.value_width : p.width;
    p.block_tables = block_tables.as<const int32_t>(), p.lengths = lengths.as<const int32_t>();
    p.cu_seqlens = cu_seqlens.as<const int32_t>(), p.has_starts = cu_seqlens.dtype;
    p.scale = Compute<T>(by_width ? scale / std::sqrt(std::max(1.0, static_cast<double>(p.width))) : scale);
    p.softcap = Compute<T>(softcap), p.left = left, p.right = right, p.last_key = INT64_MAX;
    p.mask = mask.as<const bool>();
    p.bias = floats_of<T>(bias), p.slopes = floats_of<T>(alibi_slopes);
    set_strides(mask, {&p.mask_key, &p.mask_head, &p.mask_token}, &p.last_key);
    set_strides(bias, {&p.bias_key, &p.bias_head, &p.bias_token}, &p.last_key);
    p.slopes_batch = alibi_slopes.rank == 2 ? p.heads : 0;
    p.of_k = codes_of<T>(key_scale, key_zero_point);
    p.of_v = value_cache.dtype ? codes_of<T>(value_scale, value_zero_point) : p.of_k;
    p.parts = parts();
    return p;
  }

  // On the CPU, numbers that lead out of tensors are errors.
  void require_numbers(Call& call) const {
    const int32_t* const length = lengths.as<const int32_t>();
    const int64_t rows = key_cache.dim(1), blocks = key_cache.dim(0), columns = block_tables.dim(1);
    const auto number = [](int64_t x) { return static_cast<long long>(x); };
    for (int64_t b = 0; call.ok() && b < batch(); ++b) {
      call.require(0 <= length[b] && length[b] <= columns * rows, kBadValue, "lengths[%lld] is %d, expected 0 to %lld",
                   number(b), length[b], number(columns * rows));
      const int64_t needed = call.ok() ? parts_of(length[b], std::max<int64_t>(1, rows)) : 0;
      for (int64_t m = 0; call.ok() && m < needed; ++m) {
        const int32_t block = block_tables.as<const int32_t>()[b * columns + m];
        call.require(0 <= block && block < blocks, kBadValue, "block_tables[%lld, %lld] is %d, expected 0 to %lld",
                     number(b), number(m), block, number(blocks - 1));
      }
    }
    if (!cu_seqlens.dtype) return;
    const int32_t* const begin = cu_seqlens.as<const int32_t>();
    call.require(begin[0] == 0, kBadValue, "cu_seqlens_q begins with %d, expected 0", begin[0]);
    for (int64_t b = 0; call.ok() && b < batch(); ++b)
      call.require(begin[b] <= begin[b + 1], kBadValue, "cu_seqlens_q[%lld] is %d, less than the %d before it",
                   number(b + 1), begin[b + 1], begin[b]);
    call.require(begin[batch()] == q.dim(0), kBadValue, "cu_seqlens_q ends with %d, expected the %lld tokens of q",
                 begin[batch()], number(q.dim(0)));
  }

 private:
  template <typename T>
  static Floats<T> floats_of(const Tensor& x) {
    const bool is_wide = x.dtype && std::strcmp(x.dtype, dtype_name<T>()) != 0;
    return {is_wide ? nullptr : x.as<const T>(), is_wide ? x.as<const float>() : nullptr};
  }
  template <typename T>
  static Codes<T> codes_of(const Tensor& scales, const Tensor& zeros) {
    const bool is_whole = zeros.dtype && !std::strcmp(zeros.dtype, "int8");
    return {floats_of<T>(scales), is_whole ? Floats<T>{} : floats_of<T>(zeros),
            is_whole ? zeros.as<const int8_t>() : nullptr, scales.dim(1), zeros.dim(1)};
  }
  // Sets the strides of the axes, from the last one on, of a tensor that is broadcast, whose last axis bounds the keys.
  static void set_strides(const Tensor& x, std::initializer_list<int64_t*> strides, int64_t* last_key) {
    int64_t stride = 1;
    for (int d = 1; d <= x.rank; stride *= x.dim(-d), ++d) *strides.begin()[d - 1] = x.dim(-d) > 1 ? stride : 0;
    if (x.rank > 0 && x.dim(-1) != 1) *last_key = std::min(*last_key, x.dim(-1));
  }

  void check(Call& call) const {
    const int64_t heads = q.dim(1), kv_heads = key_cache.dim(2), width = q.dim(2);
    call.require(key_cache.dim(3) == width, kBadShape, "key_cache has other features than q");
    call.require(kv_heads > 0 ? heads % kv_heads == 0 : heads == 0, kBadShape,
                 "q has %lld heads, not a multiple of the %lld heads of key_cache", static_cast<long long>(heads),
                 static_cast<long long>(kv_heads));
    call.require(key_cache.dim(1) > 0, kBadShape, "key_cache has blocks of no rows");
    if (value_cache.dtype) {
      call.require_shape(value_cache, {key_cache.dim(0), key_cache.dim(1), kv_heads, value_cache.dim(3)});
      call.require(!std::strcmp(value_cache.dtype, key_cache.dtype), kBadDtype, "value_cache is %s, key_cache is %s",
                   value_cache.dtype, key_cache.dtype);
      call.require(value_size == 0, kBadAttribute, "value_size is given beside value_cache");
    }
    call.require(value_width() <= (value_cache.dtype ? kMostFeatures : width), kBadShape,
                 "values have more features than there may be");
    call.require(width <= kMostFeatures, kBadShape, "heads have more than %lld features",
                 static_cast<long long>(kMostFeatures));
    call.require_shape(block_tables, {batch(), block_tables.dim(1)});
    if (cu_seqlens.dtype)
      call.require_shape(cu_seqlens, {batch() + 1});
    else
      call.require(batch() == q.dim(0), kBadShape, "q has %lld tokens, lengths has %lld",
                   static_cast<long long>(q.dim(0)), static_cast<long long>(batch()));
    for (const Tensor* x : {&mask, &bias}) require_broadcast(call, *x);
    if (alibi_slopes.dtype && alibi_slopes.rank == 2)
      call.require_shape(alibi_slopes, {batch(), heads});
    else if (alibi_slopes.dtype)
      call.require_shape(alibi_slopes, {heads});
    const bool has_value_codes = value_cache.dtype && has_codes();
    require_codes(call, key_scale, width, has_codes(), true);
    require_codes(call, key_zero_point, width, has_codes(), false);
    require_codes(call, value_scale, value_width(), has_value_codes, true);
    require_codes(call, value_zero_point, value_width(), has_value_codes, false);
  }
  void require_codes(Call& call, const Tensor& x, int64_t width, bool may_be, bool must_be) const {
    if (!call.ok()) return;
    call.require(may_be || !x.dtype, kBadDtype, "%s is given beside a cache without codes", x.name);
    call.require(x.dtype || !may_be || !must_be, kBadParameterCount, "a cache of int8 has no scale");
    if (call.ok() && x.dtype) call.require_shape(x, {key_cache.dim(2), x.dim(1) == 1 ? 1 : width});
  }
  void require_broadcast(Call& call, const Tensor& x) const {
    if (!x.dtype) return;
    call.require(x.rank <= 3, kBadShape, "%s has rank %d, expected at most 3", x.name, x.rank);
    const int64_t full[] = {q.dim(1), q.dim(0)};
    for (int d = 2; call.ok() && d <= x.rank; ++d)
      call.require(x.dim(-d) == 1 || x.dim(-d) == full[d - 2], kBadShape,
                   "%s has length %lld along axis %d, expected 1 or %lld", x.name, static_cast<long long>(x.dim(-d)),
                   -d, static_cast<long long>(full[d - 2]));
  }
};

// Gives tokens that are in no sequence the values of those that see nothing.
template <typename T, typename K>
void fill_rest(Call& call, const Paged<T, K>& p) {
  using C = Compute<T>;
  if (!p.has_starts) return;
  const int64_t width = p.heads * p.value_width;
  using flash_attention::FillRows;
  flash_attention::fill(call, FillRows<T>{p.cu_seqlens, p.batch, INT64_MAX, width, width, 1, p.out, T(0.0f)}, p.tokens);
  flash_attention::fill(call, FillRows<C>{p.cu_seqlens, p.batch, INT64_MAX, p.heads, 1, p.tokens, p.lse, C(-HUGE_VAL)},
                        p.tokens);
}

template <typename T, typename K>
void compute(Call& call, const Paged<T, K>& p, [[maybe_unused]] int64_t* plan) {
  if (call.is_on_cpu()) return paged::cpu::forward(call, p);
#ifdef __CUDACC__
  fill_rest(call, p);
  bool is_done = false;
  if constexpr (std::is_same<T, Half>::value) is_done = launch_on_tensor_cores(call, p, plan);
  if (!is_done) plain::launch_paged(call, p, plan, 0);
  launch_merge(call, p);
#endif
}

}  // namespace

// (q, key_cache, value_cache?, block_tables, lengths, cu_seqlens_q?, mask?, bias?, alibi_slopes?, key_scale?,
// value_scale?, key_zero_point?, value_zero_point?) -> (out, lse, partial, plan): the last two are scratch.
MSOPS_ENTRY(PagedAttentionForward) {
  const Inputs inputs(call);
  const Tensor out = call.tensor("out", 3), lse = call.tensor_of("accumulator", "lse", 2);
  const Tensor partial = call.scratch("partial", 1), plan = call.tensor_of("int64", "plan", 1);
  call.require_shape(out, {inputs.q.dim(0), inputs.q.dim(1), inputs.value_width()});
  call.require_shape(lse, {inputs.q.dim(1), inputs.q.dim(0)});
  call.require_shape(plan, {plan_size(inputs.batch())});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = [&](auto cached) {
      using K = typename decltype(cached)::type;
      Paged<T, K> p = inputs.problem<T, K>();
      p.out = out.as<T>(), p.lse = lse.as<Compute<T>>(), p.partial = partial.as<Compute<T>>();
      call.require_shape(partial, {p.partial_size()});
      if (call.ok() && call.is_on_cpu()) inputs.require_numbers(call);
      if (!call.ok() || lse.size == 0) return;
      compute(call, p, plan.as<int64_t>());
    };
    inputs.has_codes() ? run(Type<int8_t>{}) : run(Type<T>{});
  });
}

MSOPS_SCRATCH(PagedAttentionForward) {
  const Inputs inputs(call);
  int64_t partial = 1;
  if (call.ok()) partial = inputs.problem<float, float>().partial_size();
  return {{partial}, {plan_size(inputs.batch())}};
}
