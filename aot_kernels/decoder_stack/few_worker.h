// Worker is what the warps that compute share: it reads vectors that all blocks have written, multiplies them by the
// block's rows of a matrix, and hands out the sums.
#pragma once

#include "../common/activations.h"
#include "../common/gpu/barrier.h"
#include "../common/gpu/product.h"
#include "../common/pack.h"
#include "few_ring.h"
#include "few_words.h"

namespace msops::decoder_stack {

template <typename T>
constexpr Product kProductOf = sizeof(T) == 2 ? Product::kHalf : Product::kFloat;

__device__ __forceinline__ float sum_of_warp(float value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

// Adds the products of 16 bytes of a row of weights with 16 bytes of two tokens, whose words are in the order 0, 2,
// 1, 3.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&sums)[4], const uint4& token, const uint4& token8,
                                             const uint4& row) {
  constexpr Product kProduct = kProductOf<T>;
  using W = Word<kProduct>;
  msops::multiply_add<kProduct>(sums, {W(token.x), W(token8.x), W(token.z), W(token8.z)}, {W(row.x), W(row.y)});
  msops::multiply_add<kProduct>(sums, {W(token.y), W(token8.y), W(token.w), W(token8.w)}, {W(row.z), W(row.w)});
}

// Does the same for one token, without another operand to fill: words 0 and 1 stand for the token of the tensor core,
// and 2 and 3 for the one 8 after it. So sums[0][0] and sums[0][1] count, and sums[1][2] and sums[1][3].
template <typename T>
__device__ __forceinline__ void multiply_add(float (&sums)[2][4], const uint4& token, const uint4& row) {
  constexpr Product kProduct = kProductOf<T>;
  using W = Word<kProduct>;
  const W words[4] = {W(token.x), W(token.y), W(token.z), W(token.w)};
  msops::multiply_add<kProduct>(sums[0], words, {W(row.x), W(row.y)});
  msops::multiply_add<kProduct>(sums[1], words, {W(row.z), W(row.w)});
}

template <typename T, int kMost>
struct Worker {
  static constexpr int kWarps = warps_for(kMost), kThreads = 32 * kWarps, kWord = kWordElements<T>,
                       kUnit = kUnitElements<T>;
  static constexpr bool kHasMany = kMost > 8;
  const FewTokens<T>& s;
  unsigned char* shared;
  const Work& of_block;
  Ring ring, aux;
  Watch watch;
  int thread = threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // Hides from the compiler what it knows of the thread, so that it does not compute ahead, and keep in registers, what
  // each step of a layer needs.
  __device__ __forceinline__ void forget() {
    asm volatile("" : "+r"(thread));
    warp = thread / 32, lane = thread % 32;
  }

  __device__ int tokens() const { return kMost == 1 ? 1 : s.tokens(); }
  __device__ int length() const { return kMost == 1 ? 1 : s.length; }
  __device__ void sync() const { bar_sync(1, kThreads); }
  __device__ const unsigned char* slot() const { return shared + s.at_ring + ring.slot * s.slot_bytes; }
  __device__ unsigned char* work() const { return shared + s.at_work; }
  __device__ T* residual(int which) const {
    return reinterpret_cast<T*>(shared + s.at_residual) + which * tokens() * s.width;
  }
  __device__ const float* tables() const { return reinterpret_cast<const float*>(shared + s.at_tables); }
  // Returns the layer's factors of norm1, norm2, q_norm and k_norm, and the bias, in shared memory.
  __device__ const unsigned char* factors(int which) const {
    return shared + s.at_aux + aux.slot * s.aux_bytes + s.at_factors[which];
  }

  // ---- Vectors ----

  // Puts a vector of each token where multiply() reads it: the words of 16 bytes in the order 0, 2, 1, 3.
  __device__ __forceinline__ void put_operand(int token, int unit, uint2 words) const {
    unsigned* const to = reinterpret_cast<unsigned*>(work() + token * s.work_stride + 16 * (unit / 2)) + unit % 2;
    to[0] = words.x, to[2] = words.y;
  }
  // Reads a vector of each token: put_unit(token, unit, its words).
  template <typename Put>
  __device__ void read_vectors(const uint2* from, int columns, unsigned tag, const Put& put_unit) {
    const int units = columns / kUnit, all = tokens() * units;
    const auto put = [&](int i, uint2 words) {
      const int token = tokens() == 1 ? 0 : i / units;
      put_unit(token, i - token * units, words);
    };
    if (all > 4 * kThreads) {
      read_units<8>(from, tag, thread, all, kThreads, watch, put);
    } else {
      read_units<4>(from, tag, thread, all, kThreads, watch, put);
    }
    sync();
  }

  // Reads vectors of tokens and norms them: put(token, unit, its words). Without `from`, reads x. The residual keeps
  // the vectors as they were.
  template <typename Put>
  __device__ void read_normed(const uint2* from, unsigned tag, int first_token, int tokens, const Factors<T>& factors,
                              T* residual, const Put& put) {
    int team_log2 = kWarps == 8 ? 3 : 2;  // warps that share a token
    while (team_log2 > 0 && tokens << team_log2 > kWarps) --team_log2;
    const int team = 1 << team_log2, in_team = warp & (team - 1), teams = kWarps >> team_log2;
    const int units = s.width / kUnit, begin = in_team * 32 + lane, step = 32 << team_log2;
    float* const sums = reinterpret_cast<float*>(shared + s.at_sums);
    for (int token = warp >> team_log2; token < tokens; token += teams) {
      float sum = 0;
      uint2* const kept = reinterpret_cast<uint2*>(residual + token * s.width);
      const auto keep = [&](int unit, uint2 words) {
        kept[unit] = words;
        for (int e = 0; e < kWord; ++e) {
          const float a = element_of<T>(words.x, e), b = element_of<T>(words.y, e);
          sum += a * a + b * b;
        }
      };
      if (from) {
        read_units<4>(from + 2 * (first_token + token) * units, tag, begin, units, step, watch, keep);
      } else {
        const uint2* const x = reinterpret_cast<const uint2*>(s.x) + (first_token + token) * units;
        for (int unit = begin; unit < units; unit += step) keep(unit, x[unit]);
      }
      sum = sum_of_warp(sum);
      if (lane == 0) sums[token * kWarps + in_team] = sum;
    }
    sync();
    for (int token = warp >> team_log2; token < tokens; token += teams) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) sum += i < team ? sums[token * kWarps + i] : 0;
      const float r = rsqrtf(sum * s.reciprocal_width + s.eps);
      const uint2* const kept = reinterpret_cast<const uint2*>(residual + token * s.width);
      constexpr int kAhead = kMost == 1 ? 4 : 1;
      for (int first = begin; first < units; first += kAhead * step) {
        uint2 words[kAhead];
        Pack<T, kUnit> by[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j)
          if (first + j * step < units) {
            words[j] = kept[first + j * step];
            by[j] = factors.unit(kUnit * (first + j * step));
          }
#pragma unroll
        for (int j = 0; j < kAhead; ++j)
          if (first + j * step < units) {
            float a[kWord], b[kWord];
            for (int e = 0; e < kWord; ++e) {
              a[e] = rounded<T>(element_of<T>(words[j].x, e) * r) * float(by[j].values[e]);
              b[e] = rounded<T>(element_of<T>(words[j].y, e) * r) * float(by[j].values[kWord + e]);
            }
            put(token, first + j * step, uint2{word_of<T>(a), word_of<T>(b)});
          }
      }
    }
    sync();
  }

  // ---- Products ----

  // Partial sums are (group, warp, token, row) in shared memory.
  __device__ float* partial(int group, int of_warp, int token) const {
    return reinterpret_cast<float*>(shared + s.at_partial) +
           ((group * kWarps + of_warp) * tokens() + token) * kGroupRows;
  }
  // Adds up the warps' sums, and rounds the results to T.
  __device__ __forceinline__ void sum(int group, int token, int row, float (&sums)[kWord]) const {
#pragma unroll
    for (int e = 0; e < kWord; ++e) sums[e] = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const Pack<float, kWord> pack = load<kWord>(partial(group, i, token) + row);
#pragma unroll
      for (int e = 0; e < kWord; ++e) sums[e] += pack.values[e];
    }
#pragma unroll
    for (int e = 0; e < kWord; ++e) sums[e] = rounded<T>(sums[e]);
  }

  static __device__ __forceinline__ void add_products(float (&to)[2][4], const uint4& token, const uint4& token8,
                                                      const uint4& row) {
    if constexpr (kHasMany) {
      multiply_add<T>(to[0], token, token8, row);
    } else {
      multiply_add<T>(to, token, row);
    }
  }

  // Multiplies the tokens' operands by a tile: by 64 bytes of its rows after another, of which a warp takes every
  // kWarps-th. Pointers are the lane's, at its first 16 bytes. `operand8` has the tokens from 8 on, if there are any.
  __device__ __forceinline__ void multiply_tile(const unsigned char* weights, const unsigned char* operand,
                                                const unsigned char* operand8, int bytes,
                                                float (&sums)[2][2][4]) const {
    constexpr int kBytes = 64, kStep = kBytes * kWarps;
    const auto load = [](const unsigned char* from) { return *reinterpret_cast<const uint4*>(from); };
    int from = kBytes * warp;
    const auto has = [&](int count) { return from + (count - 1) * kStep + kBytes <= bytes; };
    // Takes up to `most` times 64 bytes, of which there are at least so many. All loads come first.
    const auto take = [&](auto least, auto most) {
      uint4 a[most], a8[most], b[most];
#pragma unroll
      for (int j = 0; j < most; ++j) {
        const int at = j < least || has(j + 1) ? from + j * kStep : from;
        b[j] = load(weights + at), a[j] = load(operand + at);
        if (kHasMany) a8[j] = load(operand8 + at);
      }
#pragma unroll
      for (int j = 0; j < most; ++j)
        if (j < least || has(j + 1)) add_products(sums[j % 2], a[j], a8[j], b[j]);
      from += most * kStep;
    };
    while (has(8)) take(Constant<8>{}, Constant<8>{});
    if (has(5)) {
      take(Constant<5>{}, Constant<7>{});
    } else {
      if (has(4)) take(Constant<4>{}, Constant<4>{});
      if (has(1)) take(Constant<1>{}, Constant<3>{});
    }
    const int whole = bytes / kBytes;
    if (kBytes * whole < bytes && whole % kWarps == warp) {
      from = kBytes * whole;
      const bool inside = from + lane % 4 * 16 < bytes;
      const uint4 zero = {0, 0, 0, 0};
      add_products(sums[0], inside ? load(operand + from) : zero, inside && kHasMany ? load(operand8 + from) : zero,
                   inside ? load(weights + from) : zero);
    }
  }

  // Multiplies by the block's rows of a matrix, some groups at a time, and publishes the step's results.
  __device__ __forceinline__ void multiply(Step step, unsigned tag) {
    const Matrix<T>& m = s.matrices[step];
    const Range mine = of_block.mine[step];
    const int last = tokens() - 1, at = lane % 4 * 16, row = lane / 4 * m.stride + at;
    int bytes = m.row_bytes(), chunk = m.chunk;
    asm volatile("" : "+r"(bytes), "+r"(chunk));  // else, each tile would load them again
    // What stands for tokens that there are not may be anything.
    const unsigned char* const operand = work() + min(lane / 4, last) * s.work_stride + at;
    const unsigned char* const operand8 = work() + min(lane / 4 + 8, last) * s.work_stride + at;
    for (int first = mine.begin; first < mine.end; first += s.groups_at_once) {
      const int count = min(s.groups_at_once, mine.end - first);
      if (first > mine.begin) sync();  // others may still read the partial sums before these
      for (int i = 0; i < count; ++i) {
        float sums[2][2][4] = {};
        for (int begin = 0; begin < bytes; begin += chunk) {
          ring.wait_full();
          multiply_tile(slot() + row, operand + begin, operand8 + begin, min(chunk, bytes - begin), sums);
          ring.release();
        }
        const auto put = [&](int token, float a, float b) {
          if (token <= last) *reinterpret_cast<float2*>(partial(i, warp, token) + lane % 4 * 2) = {a, b};
        };
        const auto both = [&](int of, int number) { return sums[0][of][number] + sums[1][of][number]; };
        if (kHasMany) {
          put(lane / 4, both(0, 0), both(0, 1));
          put(lane / 4 + 8, both(0, 2), both(0, 3));
        } else {
          put(lane / 4, both(0, 0) + both(1, 2), both(0, 1) + both(1, 3));
        }
      }
      sync();
      finish(step, first, count, tag);
    }
  }

  // Publishes what the sums of some groups give: q, k and v; gates; or the residual.
  __device__ __forceinline__ void finish(Step step, int first, int count, unsigned tag) const {
    const Matrix<T>& m = s.matrices[step];
    const T* const bias = reinterpret_cast<const T*>(factors(4)) - of_block.mine[kQkv].begin * kGroupRows;
    const int tokens = this->tokens(), words_log2 = (m.is_pair ? 2 : 3) - (kWord == 2 ? 1 : 0),
              all = count << words_log2;
    for (int i = thread; i < all * tokens; i += kThreads) {
      const int token = tokens == 1 ? 0 : i / all, at = i - token * all, group = at >> words_log2;
      const int row = (at & ((1 << words_log2) - 1)) * kWord, of_matrix = (first + group) * m.rows_of_group() + row;
      if (of_matrix >= m.rows) continue;
      float numbers[kWord];
      sum(group, token, row, numbers);
      if (step == kGates) {
        float up[kWord];
        sum(group, token, row + kGroupRows / 2, up);
#pragma unroll
        for (int e = 0; e < kWord; ++e) numbers[e] *= Activations<T>::sigmoid(numbers[e]) * up[e];
      } else if (step != kQkv || s.qkv_bias) {
        const T* const from = step == kQkv ? bias + of_matrix : residual(step / 2) + token * s.width + of_matrix;
        const Pack<T, kWord> added = load<kWord>(from);
#pragma unroll
        for (int e = 0; e < kWord; ++e) numbers[e] += float(added.values[e]);
      }
      publish(s.results[step] + (token * m.rows + of_matrix) / kWord, word_of<T>(numbers), tag);
    }
  }
};

}  // namespace msops::decoder_stack
