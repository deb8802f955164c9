// decoder_stack on a GPU:
//
//   case                                            kernels                              why
//   up to 16 tokens, sm_80 or later, whole packs,   few_tokens_kernel, all layers        launches take longer than work
//     matrices of numbers
//   products of more tokens                         cuBLAS, where the process has it     tensor cores
//   products without cuBLAS                         product_kernel                       any GPU, any dtype
//   products of up to 16 tokens with codes          weight_quant_matmul/few.h, or        streams codes
//                                                     product_kernel where it refuses
//   products of 17 to 64 tokens with codes whose    weight_quant_matmul/wgmma.h          widens codes where they are
//     scales are float16, sm_90a                                                           multiplied
//   products of more tokens with codes              WidenPacks or WidenCodes before      codes of a layer are widened
//                                                     those of numbers                     once
//   attention, float16, 64 or more new tokens       flash_attention/mma_forward.h,       tensor cores
//     of each text, heads up to 128                   or wgmma_forward.h on sm_90a
//   attention, float16, fewer new tokens with a     flash_attention/mma_decode.h         tensor cores; reads the cache
//     cache, heads up to 128, sm_80 or later                                               where it is
//   the same with a cache in blocks                 paged_attention/mma.h                the same
//   other attention                                 attention_kernel                     any GPU, any dtype
//   what is between                                 norm_kernel, turn_kernel,            one for each step; these begin
//                                                     gate_kernel                          before the one before ends
#pragma once

#ifdef __CUDACC__

#include "../common/gpu/griddepcontrol.h"
#include "../common/parallel.h"
#include "../common/scratch.h"
#include "../common/sum.h"
#include "../flash_attention/mma_forward.h"
#include "../flash_attention/wgmma.h"
#include "../shared/product/gpu.h"
#include "../weight_quant_matmul/few.h"
#include "../weight_quant_matmul/wgmma.h"
#include "block_attention.h"
#include "few_plan.h"
#include "tiles.h"

namespace msops::decoder_stack::gpu {

using flash_attention::least;
using flash_attention::most;
using flash_attention::parts_of;
using product::product_kernel;
using weight_quant_matmul::kMostFew;  // tokens, up to which products read codes where they are

constexpr int64_t kTileLength = 64;  // new tokens of a text, from which on tiles of queries attend

// Space is the scratch of a call.
template <typename T>
struct Space {
  T *h, *a, *rows, *q, *o, *gates, *hidden;  // (tokens, C), twice; (tokens, qkv_rows); (tokens, heads D), twice; ...
  T *keys, *values;                          // the rows that count, one after another: (B, S + T, kv_heads D)
  float *lse, *partial;                      // partial: what splits of the cached rows sum
  int32_t* lengths;                          // (B): how many rows queries see, without the new ones unless by tiles
  int32_t *tables, *counts;                  // what find_blocks finds: (B, M), (B)
  int64_t* plan;                             // (B + 1): of attention to blocks
  T* weights;                                // a matrix that codes stand for

  static bool uses_tensor_cores(const Stack<T>& s) { return std::is_same<T, Half>::value && s.head_size <= 128; }
  static bool uses_tiles(const Stack<T>& s) { return uses_tensor_cores(s) && s.length >= kTileLength; }
  static bool widens(const Stack<T>& s) { return s.has_codes && s.tokens() > kMostFew; }
  static bool uses_splits(const Stack<T>& s) { return uses_tensor_cores(s) && s.length < kTileLength && s.has_cache; }

  // Lays the scratch out from `data` on, which may be null. Returns how many numbers of Compute<T> it takes.
  int64_t place(const Stack<T>& s, void* data) {
    constexpr int64_t kAlign = 256, kMost = INT64_C(1) << 60;
    int64_t at = 0;
    const auto take = [&](int64_t n, int64_t each) {
      char* const begin = data ? static_cast<char*>(data) + at : nullptr;
      at = least(kMost, at + parts_of(least(kMost, size_of({n, each})), kAlign) * kAlign);
      return begin;
    };
    const auto numbers = [&](int64_t n) { return reinterpret_cast<T*>(take(n, sizeof(T))); };
    const int64_t tokens = s.tokens();
    h = numbers(size_of({tokens, s.width})), a = numbers(size_of({tokens, s.width}));
    rows = numbers(size_of({tokens, s.qkv_rows()}));
    q = numbers(size_of({tokens, s.of_heads()})), o = numbers(size_of({tokens, s.of_heads()}));
    gates = numbers(size_of({tokens, 2, s.hidden})), hidden = numbers(size_of({tokens, s.hidden}));
    const int64_t kept = s.has_cache && uses_tiles(s) ? size_of({s.batch, s.room + s.length, s.of_kv_heads()}) : 0;
    keys = numbers(kept), values = numbers(kept);
    lse = reinterpret_cast<float*>(take(uses_tiles(s) ? size_of({tokens, s.heads}) : 0, sizeof(float)));
    partial = reinterpret_cast<float*>(take(uses_splits(s) ? split_numbers(s) : 0, sizeof(float)));
    lengths = reinterpret_cast<int32_t*>(take(s.has_cache && uses_tensor_cores(s) ? s.batch : 0, sizeof(int32_t)));
    const int64_t texts = s.has_blocks ? s.batch : 0;
    tables = reinterpret_cast<int32_t*>(take(size_of({texts, s.table_columns}), sizeof(int32_t)));
    counts = reinterpret_cast<int32_t*>(take(texts, sizeof(int32_t)));
    plan = reinterpret_cast<int64_t*>(take(s.has_blocks && uses_splits(s) ? s.batch + 1 : 0, sizeof(int64_t)));
    int64_t widened = 0;
    for (int i = 0; i < kSteps && widens(s); ++i)
      widened = most(widened, size_of({s.rows(static_cast<Step>(i)), s.columns(static_cast<Step>(i))}));
    weights = numbers(widened);
    return parts_of(at, sizeof(Compute<T>));
  }
};

constexpr int kNormThreads = 512;

// Returns the sum of what the threads of a block of kNormThreads have.
template <typename C>
__device__ __forceinline__ C sum_of_block(C sum) {
  __shared__ C sums[kNormThreads / 32];
  sum = team_sum<32>(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (const C each : sums) sum += each;
  return sum;
}

// Norms rows of `width` numbers, to which it first adds `added`, unless that is null; a block takes a row. `to` may be
// `added`.
template <typename T>
__global__ void __launch_bounds__(kNormThreads)
    norm_kernel(T* rows, int64_t width, Numbers<T> factors, Compute<T> eps, const T* added, T* to) {
  using C = Compute<T>;
  const int64_t first = blockIdx.x * width;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  C sum = 0;
  for (int64_t i = threadIdx.x; i < width; i += kNormThreads) {
    if (added) assign(rows[first + i], C(rows[first + i]) + C(added[first + i]));
    sum += C(rows[first + i]) * C(rows[first + i]);
  }
  const C reciprocal = 1 / std::sqrt(sum_of_block(sum) / C(width) + eps);
  for (int64_t i = threadIdx.x; i < width; i += kNormThreads)
    assign(to[first + i], normed<T>(rows[first + i], reciprocal, factors[i]));
}

// PackedNorm tells for which rows packed_norm_kernel does the same: for those of whole packs that registers hold, up to
// kKept packs a thread.
template <typename T>
struct PackedNorm {
  static constexpr int N = kPackWidth<T>, kKept = 2;

  static bool fits(int64_t width, const T* to) {
    return width % N == 0 && width <= kNormThreads * kKept * N && is_aligned<N>(to);
  }
};
template <typename T>
__global__ void __launch_bounds__(kNormThreads)
    packed_norm_kernel(T* rows, int64_t width, Numbers<T> factors, Compute<T> eps, const T* added, T* to) {
  using C = Compute<T>;
  constexpr int N = PackedNorm<T>::N, kKept = PackedNorm<T>::kKept;
  Pack<T, N> numbers[kKept], more[kKept];
  C of_place[kKept][N], sum = 0;
  const int64_t first = blockIdx.x * width;
  const auto at = [&](int k) { return static_cast<int64_t>(k * kNormThreads + threadIdx.x) * N; };
  griddepcontrol_launch_dependents();
  unrolled<kKept, N>([&](int k, int j) {
    if (at(k) < width) of_place[k][j] = factors[at(k) + j];
  });
  griddepcontrol_wait();
  unrolled<kKept>([&](int k) {
    if (at(k) >= width) return;
    numbers[k] = load<N>(rows + first + at(k));
    if (added) more[k] = load<N>(added + first + at(k));
  });
  unrolled<kKept>([&](int k) {
    if (at(k) >= width) return;
    if (added) {
      for (int j = 0; j < N; ++j) numbers[k].values[j] = T(C(numbers[k].values[j]) + C(more[k].values[j]));
      store(rows + first + at(k), numbers[k]);
    }
    for (int j = 0; j < N; ++j) sum += C(numbers[k].values[j]) * C(numbers[k].values[j]);
  });
  const C reciprocal = 1 / std::sqrt(sum_of_block(sum) / C(width) + eps);
  unrolled<kKept>([&](int k) {
    if (at(k) >= width) return;
    for (int j = 0; j < N; ++j)
      numbers[k].values[j] = T(normed<T>(C(numbers[k].values[j]), reciprocal, of_place[k][j]));
    store(to + first + at(k), numbers[k]);
  });
}

// Adds the bias to the rows of q, k and v, norms and rotates heads of q and k, and stores all. A warp takes a head of a
// token.
template <typename T>
__global__ void __launch_bounds__(256)
    turn_kernel(const __grid_constant__ Stack<T> s, const __grid_constant__ Layer<T> layer, const T* rows, T* q) {
  using C = Compute<T>;
  const int64_t heads = s.heads + 2 * s.kv_heads, item = int64_t{blockIdx.x} * 8 + threadIdx.x / 32;
  const int64_t t = item / heads, head = item % heads, size = s.head_size, of_kv = head - s.heads;
  const int lane = threadIdx.x % 32;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  if (t >= s.tokens()) return;
  const T* const from = rows + item * size;
  const T* const bias = layer.qkv_bias ? layer.qkv_bias + head * size : nullptr;
  const auto number = [&](int64_t i) { return bias ? rounded<T>(C(from[i]) + C(bias[i])) : C(from[i]); };
  if (of_kv >= s.kv_heads) {
    T* const to = layer.v + (t * s.kv_heads + of_kv - s.kv_heads) * size;
    for (int64_t i = lane; i < size; i += 32) assign(to[i], number(i));
    return;
  }
  T* const to = of_kv < 0 ? q + (t * s.heads + head) * size : layer.k + (t * s.kv_heads + of_kv) * size;
  const Numbers<T>& factors = of_kv < 0 ? layer.q_norm : layer.k_norm;
  C reciprocal = 1;
  if (factors.data) {
    C sum = 0;
    for (int64_t i = lane; i < size; i += 32) sum += number(i) * number(i);
    reciprocal = 1 / std::sqrt(team_sum<32>(sum) / C(size) + s.eps);
  }
  const int64_t angles = (s.has_table_of_text ? t : t % s.length) * (size / 2);
  for (int64_t i = lane; i < size / 2; i += 32) {
    const Pair pair(i, size, s.interleaved);
    C a = number(pair.first), b = number(pair.second);
    if (factors.data)
      a = normed<T>(a, reciprocal, factors[pair.first]), b = normed<T>(b, reciprocal, factors[pair.second]);
    const C cos = s.cos[angles + i], sin = s.sin[angles + i];
    assign(to[pair.first], a * cos - b * sin);
    assign(to[pair.second], b * cos + a * sin);
  }
}

// Computes heads of o: a block takes a head of a token, and each of its warps every fourth group of keys. A lane has
// every 32nd of up to 32 kPerLane features.
template <typename T, int kPerLane>
__global__ void __launch_bounds__(128)
    attention_kernel(const __grid_constant__ Stack<T> s, const __grid_constant__ Layer<T> layer, Compute<T> scale,
                     const T* q, T* o) {
  using C = Compute<T>;
  constexpr int kWarps = 4, kKeys = 4;  // keys of a group: a warp has their sums at once
  const int64_t item = blockIdx.x, t = item / s.heads, head = item % s.heads, b = t / s.length, kv = head / s.group();
  const int64_t cached = s.cached(b), seen = cached + t % s.length + 1, width = s.of_kv_heads(), size = s.head_size;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto row = [&](const T* cache, const T* added, int64_t j) {
    return (j < cached ? cache + s.row_of_cache(b, j) * width : added + (b * s.length + j - cached) * width) +
           kv * size;
  };
  C mine[kPerLane], total[kPerLane] = {}, max = C(-HUGE_VAL), sum = 0;
  for (int e = 0; e < kPerLane; ++e) mine[e] = lane + 32 * e < size ? C(q[item * size + lane + 32 * e]) * scale : C(0);
  for (int64_t first = warp * kKeys; first < seen; first += kWarps * kKeys) {
    C dots[kKeys];
    for (int k = 0; k < kKeys; ++k) {
      dots[k] = 0;
      const T* const key = row(layer.keys, layer.k, least(first + k, seen - 1));
      for (int e = 0; e < kPerLane; ++e)
        if (lane + 32 * e < size) dots[k] += mine[e] * C(key[lane + 32 * e]);
    }
    C greatest = max;
    for (int k = 0; k < kKeys; ++k) {
      dots[k] = first + k < seen ? team_sum<32>(dots[k]) : (team_sum<32>(dots[k]), C(-HUGE_VAL));
      greatest = dots[k] > greatest ? dots[k] : greatest;
    }
    const C factor = std::exp(max - greatest);
    max = greatest, sum *= factor;
    for (C& each : total) each *= factor;
    for (int k = 0; k < kKeys; ++k) {
      const C weight = std::exp(dots[k] - max);
      sum += weight;
      const T* const value = row(layer.values, layer.v, least(first + k, seen - 1));
      for (int e = 0; e < kPerLane; ++e)
        if (lane + 32 * e < size) total[e] += weight * C(value[lane + 32 * e]);
    }
  }
  __shared__ C maxima[kWarps], sums[kWarps], totals[kWarps][32 * kPerLane];
  if (lane == 0) maxima[warp] = max, sums[warp] = sum;
  for (int e = 0; e < kPerLane; ++e) totals[warp][lane + 32 * e] = total[e];
  __syncthreads();
  max = maxima[0];  // the first warp has a key
  for (const C each : maxima) max = each > max ? each : max;
  sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += sums[w] * std::exp(maxima[w] - max);
  for (int i = threadIdx.x; i < size; i += 128) {
    C all = 0;
    for (int w = 0; w < kWarps; ++w) all += totals[w][i] * std::exp(maxima[w] - max);
    assign(o[item * size + i], all / sum);
  }
}

// Index b is a text.
template <typename T>
struct Lengths {
  Stack<T> s;
  int64_t added;
  int32_t* to;

  template <typename Index>
  MSOPS_BOTH void operator()(Index b) const {
    to[b] = static_cast<int32_t>(s.cached(b) + added);
  }
};

// Puts the cached rows that count, and the new ones, one after another: index i is an element of keys and values.
template <typename T>
struct JoinRows {
  Stack<T> s;
  Layer<T> layer;
  Space<T> space;

  template <typename Index>
  MSOPS_BOTH void operator()(Index index) const {
    const int64_t i = index, width = s.of_kv_heads(), rows = s.room + s.length;
    const int64_t b = i / (rows * width), j = i / width % rows, c = i % width, cached = s.cached(b);
    if (j >= cached + s.length) return;
    const int64_t from = (j < cached ? s.row_of_cache(b, j) : b * s.length + j - cached) * width + c;
    space.keys[i] = (j < cached ? layer.keys : layer.k)[from];
    space.values[i] = (j < cached ? layer.values : layer.v)[from];
  }
};

// CodesProduct is a product with a layer's codes.
template <typename T>
struct CodesProduct : product::Product<T> {
  struct Rows {
    Codes<T> codes;

    MSOPS_BOTH Compute<T> at(int64_t row, int64_t column, int64_t, int64_t) const { return codes.value(row, column); }
  };
  Rows weights;
};

// Index i is eight neighbours of a layer's matrix, whose rows and groups they tile.
struct WidenPacks {
  Codes<Half> codes;
  Half* to;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const auto packs = static_cast<Index>(codes.columns) / 8, row = i / packs;
    const int64_t place = codes.place(row, (i - row * packs) * 8);
    const float scale = codes.scale[place], zero = codes.zero[place];
    const auto each =
        codes.bits == 4 ? widened(load<4>(codes.data + int64_t{i} * 4)) : load<8>(codes.data + int64_t{i} * 8);
    float numbers[8];
    for (int j = 0; j < 8; ++j) numbers[j] = (codes.number(each.values[j]) - zero) * scale;
    store(to + int64_t{i} * 8, rounded_pack<Half>(numbers));
  }

  static MSOPS_BOTH Pack<uint8_t, 8> widened(const Pack<uint8_t, 4>& pairs) {
    Pack<uint8_t, 8> codes;
    for (int j = 0; j < 8; ++j) codes.values[j] = j % 2 ? pairs.values[j / 2] >> 4 : pairs.values[j / 2] & 15;
    return codes;
  }
};

// Index i is a number of a layer's matrix.
template <typename T>
struct WidenCodes {
  Codes<T> codes;
  T* to;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const auto columns = static_cast<Index>(codes.columns), row = i / columns;
    assign(to[i], codes.value(row, i - row * columns));
  }
};

// Index i is a number that is added to another.
template <typename T>
struct Add {
  const T* from;
  T* to;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    assign(to[i], Compute<T>(to[i]) + Compute<T>(from[i]));
  }
};

// A block takes 256 hidden features of a token.
template <typename T>
__global__ void __launch_bounds__(256) gate_kernel(const T* gates, T* to, int64_t hidden) {
  const int64_t of_token = parts_of(hidden, 256), token = blockIdx.x / of_token;
  const int64_t i = blockIdx.x % of_token * 256 + threadIdx.x;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const T* const row = gates + token * 2 * hidden + i;
  if (i < hidden) assign(to[token * hidden + i], gated<T>(row[0], row[hidden]));
}

template <typename T>
class Forward {
 public:
  using C = Compute<T>;

  Forward(Call& call, const Stack<T>& stack, void* scratch) : call_(call), s(stack) { space_.place(s, scratch); }

  void run() {
    const int64_t tokens = s.tokens();
    cudaMemcpyAsync(space_.h, s.x, static_cast<size_t>(tokens * s.width) * sizeof(T), cudaMemcpyDeviceToDevice,
                    call_.stream());
    if (s.has_blocks) find_blocks(call_, s, space_.tables, space_.counts);
    if (s.has_cache && Space<T>::uses_tensor_cores(s))
      on_gpu(call_, s.batch, s.batch, Lengths<T>{s, Space<T>::uses_tiles(s) ? s.length : 0, space_.lengths});
    for (int64_t i = 0; i < s.layers && call_.ok(); ++i) {
      const Layer<T> layer = s.layer(i);
      norm(layer.norm1, space_.a, i > 0);
      multiply(s.weights(layer, kQkv), space_.a, space_.rows, false);
      launch(call_, turn_kernel<T>, early(parts_of(tokens * (s.heads + 2 * s.kv_heads), 8)), 256, 0, s, layer,
             space_.rows, space_.q);
      attend(layer);
      multiply(s.weights(layer, kOut), space_.o, space_.h, true);
      norm(layer.norm2, space_.a);
      multiply(s.weights(layer, kGates), space_.a, space_.gates, false);
      launch(call_, gate_kernel<T>, early(tokens * parts_of(s.hidden, 256)), 256, 0, space_.gates, space_.hidden,
             s.hidden);
      multiply(s.weights(layer, kDown), space_.hidden, space_.h, true);
    }
    if (s.norm.data) return norm(s.norm, s.y);
    const int64_t numbers = tokens * s.width;
    if (has_sum_) on_gpu(call_, numbers, numbers, Add<T>{space_.a, space_.h});
    cudaMemcpyAsync(s.y, space_.h, static_cast<size_t>(tokens * s.width) * sizeof(T), cudaMemcpyDeviceToDevice,
                    call_.stream());
  }

 private:
  // A kernel that waits for the one before it may begin early. Each of its blocks waits, so that a later kernel, which
  // waits for this one, has waited for all that ran before.
  bool can_wait() const {
    [[maybe_unused]] static FactOfGpu<> fact;
    return fact.get([] { return int{is_compiled_for(90, norm_kernel<T>)}; }) != 0;
  }
  Grid early(int64_t blocks) const { return Grid(blocks).programmatic(can_wait()); }

  void norm(const Numbers<T>& factors, T* to, bool is_after_kernel = true) {
    const bool has_packs = PackedNorm<T>::fits(s.width, to);
    const auto kernel = has_packs ? packed_norm_kernel<T> : norm_kernel<T>;
    launch(call_, kernel, is_after_kernel ? early(s.tokens()) : Grid(s.tokens()), kNormThreads, 0, space_.h, s.width,
           factors, s.eps, has_sum_ ? space_.a : nullptr, to);
    has_sum_ = false;
  }

  // to (tokens, rows) = numbers (tokens, columns) times weights (rows, columns), or is added to, perhaps later.
  void multiply(const Weights<T>& weights, const T* numbers, T* to, bool adds) {
    product::Product<T> p{s.tokens(), weights.rows, weights.columns, numbers, weights.numbers, to, adds};
    if (weights.codes) {
      if constexpr (std::is_same<T, Half>::value) {
        const weight_quant_matmul::Products<Half> codes{
            p.n, p.deep, p.m, numbers, rows_of(weights), true, OptionalNumbers<T>({}), adds ? space_.a : to};
        if (weight_quant_matmul::multiply_few(call_, codes, can_wait()) ||
            weight_quant_matmul::multiply_low_by_wgmma(call_, codes))
          return void(has_sum_ = adds);
      }
      if (!Space<T>::widens(s)) {
        const CodesProduct<T> direct{p, {rows_of(weights)}};
        return launch(call_, product_kernel<T, CodesProduct<T>>, product::plain_tiles(p.n, p.m), product::kPlainThreads,
                      0, direct);
      }
      widen(weights);
      p.weights = space_.weights;
    }
    product::multiply(call_, p);
  }

  // Returns the codes of a layer alone.
  static Codes<T> rows_of(const Weights<T>& weights) {
    Codes<T> codes = *weights.codes;
    codes.rows = weights.rows, codes.data += weights.first * codes.pitch();
    const int64_t numbers = weights.first * codes.groups;
    codes.scale = codes.scale.from(numbers), codes.zero = codes.zero.from(numbers);
    return codes;
  }

  void widen(const Weights<T>& weights) {
    const int64_t n = weights.rows * weights.columns;
    const Codes<T> codes = rows_of(weights);
    if constexpr (std::is_same<T, Half>::value) {
      if (codes.columns % 8 == 0 && (codes.groups == 1 || codes.group % 8 == 0) && codes.have_rows_at(codes.bits))
        return on_gpu(call_, n / 8, n, WidenPacks{codes, space_.weights});
    }
    on_gpu(call_, n, n, WidenCodes<T>{codes, space_.weights});
  }

  void attend(const Layer<T>& layer) {
    if constexpr (std::is_same<T, Half>::value) {
      if (Space<T>::uses_tiles(s) && attend_by_tiles(layer)) return;
      if (Space<T>::uses_splits(s) && attend_by_splits(layer)) return;
    }
    const auto go = [&](auto per_lane) {
      launch(call_, attention_kernel<T, per_lane>, s.tokens() * s.heads, 128, 0, s, layer, s.scale(), space_.q,
             space_.o);
    };
    s.head_size <= 64 ? go(Constant<2>{}) : s.head_size <= 256 ? go(Constant<8>{}) : go(Constant<16>{});
  }

  // Returns false, and does nothing, if the GPU lacks the instructions.
  bool attend_by_tiles(const Layer<T>& layer) {
    flash_attention::Attention<Half> a = attention_of(s, layer, space_);
    a.partial = reinterpret_cast<float*>(space_.a);  // a counter of items; nothing else needs `a` meanwhile
    if (!flash_attention::fits_tensor_cores(a)) return false;
    return s.head_size <= 64 ? launch_tiles<64>(layer, a) : launch_tiles<128>(layer, a);
  }

  bool attend_by_splits(const Layer<T>& layer) {
    if (s.has_blocks) {
      const CachedBlocks rows = blocks_of(s, layer, space_.q, space_.partial);
      if (!paged::fits_tensor_cores(rows)) return false;
      return s.head_size <= 64 ? attend_to_blocks<64>(call_, s, layer, rows, space_.plan, space_.o)
                               : attend_to_blocks<128>(call_, s, layer, rows, space_.plan, space_.o);
    }
    const flash_attention::Attention<Half> a = attention_to_cache(s, layer, space_.q, space_.lengths, space_.partial);
    if (!flash_attention::fits_tensor_cores(a)) return false;
    return s.head_size <= 64 ? attend_to_cache<64>(call_, s, layer, a, space_.o)
                             : attend_to_cache<128>(call_, s, layer, a, space_.o);
  }

  template <int kWidth>
  bool launch_tiles(const Layer<T>& layer, const flash_attention::Attention<Half>& a) {
    using namespace flash_attention;
    using S = ForwardShape<Half, kWidth>;
    const auto tiles = mma_forward<S, flash_attention::Attention<Half>>;
    if (!is_compiled_for(80, tiles) || Gpu().dynamic_bytes() < S::kBytes) return false;
    if (s.has_cache) {
      const int64_t n = s.batch * (s.room + s.length) * s.of_kv_heads();
      on_gpu(call_, n, n, JoinRows<T>{s, layer, space_});
    }
    const int rows = aligned_rows(a);
#if CUDART_VERSION >= 12000
    if (rows == 15 && launch_wgmma_forward<kWidth, false>(call_, a, nullptr)) return true;
#endif
    const double bytes = 2. * a.keys * (a.width + a.value_width) / a.group();
    const Order order = order_of(a.batch * a.heads, parts_of(a.queries, S::kQueries), bytes, true);
    return launch_on_tensor_cores<S>(call_, tiles, order.count(), a, order, order.count(), rows);
  }

  Call& call_;
  Stack<T> s;
  Space<T> space_;
  bool has_sum_ = false;  // whether space_.a is still to be added to space_.h
};

}  // namespace msops::decoder_stack::gpu

#endif
