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

// Adds the products of 16 bytes of a row of weights with 16 bytes of two tokens.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&sums)[4], const uint4& token, const uint4& token8,
                                             const uint4& row) {
  constexpr Product kProduct = kProductOf<T>;
  using W = Word<kProduct>;
  msops::multiply_add<kProduct>(sums, {W(token.x), W(token8.x), W(token.y), W(token8.y)}, {W(row.x), W(row.y)});
  msops::multiply_add<kProduct>(sums, {W(token.z), W(token8.z), W(token.w), W(token8.w)}, {W(row.z), W(row.w)});
}

template <typename T, int kWarps>
struct Worker {
  static constexpr int kThreads = 32 * kWarps, kWord = kWordElements<T>, kUnit = kUnitElements<T>;
  const FewTokens<T>& s;
  unsigned char* shared;
  const int* cached;  // rows of each text's cache
  Ring ring, aux;
  Watch watch;
  int thread = threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __device__ void sync() const { bar_sync(1, kThreads); }
  __device__ const unsigned char* slot() const { return shared + s.at_ring + ring.slot * s.slot_bytes; }
  __device__ unsigned char* work() const { return shared + s.at_work; }
  __device__ T* residual(int which) const {
    return reinterpret_cast<T*>(shared + s.at_residual) + which * s.tokens() * s.width;
  }
  // Returns the layer's factors of norm1, norm2, q_norm and k_norm, and the bias, in shared memory.
  __device__ const unsigned char* factors(int which) const {
    return shared + s.at_aux + aux.slot * s.aux_bytes + 4 * (min(which, 2) * s.width + max(which - 2, 0) * s.head_size);
  }

  // ---- Vectors ----

  // Puts a vector of each token where multiply() reads it.
  __device__ __forceinline__ void put_operand(int token, int unit, uint2 words) const {
    *reinterpret_cast<uint2*>(work() + token * s.work_stride + 8 * unit) = words;
  }
  __device__ void read_vectors(const uint2* from, int columns, unsigned tag) {
    const int units = columns / kUnit, tokens = s.tokens();
    read_units(from, tag, thread, tokens * units, kThreads, watch, [&](int i, uint2 words) {
      const int token = tokens == 1 ? 0 : i / units;
      put_operand(token, i - token * units, words);
    });
    sync();
  }

  // Reads vectors of tokens and norms them: put(token, unit, its words). Without `from`, reads x. The residual keeps the
  // vectors as they were.
  template <typename Put>
  __device__ void read_normed(const uint2* from, unsigned tag, int first_token, int tokens, const Factors<T>& factors,
                              T* residual, const Put& put) {
    int team = kWarps;  // warps that share a token
    while (team > 1 && team * tokens > kWarps) team /= 2;
    const int units = s.width / kUnit, begin = warp % team * 32 + lane, step = 32 * team;
    float* const sums = reinterpret_cast<float*>(shared + s.at_sums);
    for (int token = warp / team; token < tokens; token += kWarps / team) {
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
        read_units(from + 2 * (first_token + token) * units, tag, begin, units, step, watch, keep);
      } else {
        const uint2* const x = reinterpret_cast<const uint2*>(s.x) + (first_token + token) * units;
        for (int unit = begin; unit < units; unit += step) keep(unit, x[unit]);
      }
      sum = sum_of_warp(sum);
      if (lane == 0) sums[token * kWarps + warp % team] = sum;
    }
    sync();
    for (int token = warp / team; token < tokens; token += kWarps / team) {
      float sum = 0;
      for (int i = 0; i < team; ++i) sum += sums[token * kWarps + i];
      const float r = 1 / sqrtf(sum / s.width + s.eps);
      const uint2* const kept = reinterpret_cast<const uint2*>(residual + token * s.width);
      for (int unit = begin; unit < units; unit += step) {
        const uint2 words = kept[unit];
        float a[kWord], b[kWord];
        for (int e = 0; e < kWord; ++e) {
          const int i = unit * kUnit + e;
          a[e] = rounded<T>(element_of<T>(words.x, e) * r) * rounded<T>(factors[i]);
          b[e] = rounded<T>(element_of<T>(words.y, e) * r) * rounded<T>(factors[i + kWord]);
        }
        put(token, unit, uint2{word_of<T>(a), word_of<T>(b)});
      }
    }
    sync();
  }

  // ---- Products ----

  // Partial sums are (group, warp, token, row) in shared memory.
  __device__ float* partial(int group, int of_warp, int token) const {
    return reinterpret_cast<float*>(shared + s.at_partial) + ((group * kWarps + of_warp) * s.tokens() + token) * kGroupRows;
  }
  __device__ float sum_of(int group, int token, int row) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += partial(group, i, token)[row];
    return sum;
  }

  // Multiplies the tokens' operands from byte `begin` of the rows by a tile.
  __device__ __forceinline__ void multiply_tile(const Matrix<T>& m, int begin, float (&sums)[2][4]) const {
    constexpr int kAhead = 4, kBytes = 64;  // of a row, that a warp takes at once
    const int bytes = min(m.chunk, m.row_bytes() - begin), row = lane / 4, at = lane % 4 * 16, tokens = s.tokens();
    const unsigned char* const weights = slot() + row * m.stride + at;
    const unsigned char* const operand = work() + row * s.work_stride + begin + at;
    for (int first = kBytes * warp; first < bytes; first += kAhead * kBytes * kWarps) {
      uint4 a[kAhead], a8[kAhead], b[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int from = first + j * kBytes * kWarps;
        const bool inside = from + at < bytes;
        const uint4 zero = {0, 0, 0, 0};
        b[j] = inside ? *reinterpret_cast<const uint4*>(weights + from) : zero;
        a[j] = inside && row < tokens ? *reinterpret_cast<const uint4*>(operand + from) : zero;
        a8[j] = inside && row + 8 < tokens ? *reinterpret_cast<const uint4*>(operand + 8 * s.work_stride + from) : zero;
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        if (first + j * kBytes * kWarps < bytes) multiply_add<T>(sums[j % 2], a[j], a8[j], b[j]);
    }
  }

  // Multiplies by the block's rows of a matrix. finish(first, count) gets the sums of some groups at a time.
  template <typename Finish>
  __device__ void multiply(const Matrix<T>& m, const Finish& finish) {
    const Range mine = part_of(m.groups(), blockIdx.x, gridDim.x);
    for (int first = mine.begin; first < mine.end; first += s.groups_at_once) {
      const int count = min(s.groups_at_once, mine.end - first);
      if (first > mine.begin) sync();  // others may still read the partial sums before these
      for (int i = 0; i < count; ++i) {
        float sums[2][4] = {};
        for (int begin = 0; begin < m.row_bytes(); begin += m.chunk) {
          ring.wait_full();
          multiply_tile(m, begin, sums);
          ring.release();
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int token = lane / 4 + 8 * half;
          if (token < s.tokens())
            *reinterpret_cast<float2*>(partial(i, warp, token) + lane % 4 * 2) = {sums[0][2 * half] + sums[1][2 * half],
                                                                                sums[0][2 * half + 1] + sums[1][2 * half + 1]};
        }
      }
      sync();
      finish(first, count);
    }
  }

  // Calls f(group, token, row in the tile, row in the matrix) for the first element of each word of the results.
  template <typename F>
  __device__ __forceinline__ void for_words(const Matrix<T>& m, int first, int count, const F& f) const {
    const int tokens = s.tokens(), words = m.rows_of_group() / kWord, all = count * words;
    for (int i = thread; i < all * tokens; i += kThreads) {
      const int token = tokens == 1 ? 0 : i / all, at = i - token * all, group = at / words, row = at % words * kWord;
      const int of_matrix = (first + group) * m.rows_of_group() + row;
      if (of_matrix < m.rows) f(group, token, row, of_matrix);
    }
  }

  // a·qkvᵀ (+ bias)
  __device__ void multiply_qkv(unsigned tag) {
    const T* const bias = reinterpret_cast<const T*>(factors(4));
    const int first_row = part_of(s.qkv.groups(), blockIdx.x, gridDim.x).begin * kGroupRows;
    multiply(s.qkv, [&](int first, int count) {
      for_words(s.qkv, first, count, [&](int group, int token, int row, int of_matrix) {
        float numbers[kWord];
        for (int e = 0; e < kWord; ++e) {
          const float sum = rounded<T>(sum_of(group, token, row + e));
          numbers[e] = s.qkv_bias ? sum + float(bias[of_matrix - first_row + e]) : sum;
        }
        publish(s.of_qkv + (token * s.qkv.rows + of_matrix) / kWord, word_of<T>(numbers), tag);
      });
    });
  }

  // residual + o·matrixᵀ
  __device__ void multiply_and_add(const Matrix<T>& m, const T* residual, uint2* to, unsigned tag) {
    multiply(m, [&](int first, int count) {
      for_words(m, first, count, [&](int group, int token, int row, int of_matrix) {
        float numbers[kWord];
        for (int e = 0; e < kWord; ++e)
          numbers[e] = float(residual[token * s.width + of_matrix + e]) + rounded<T>(sum_of(group, token, row + e));
        publish(to + (token * s.width + of_matrix) / kWord, word_of<T>(numbers), tag);
      });
    });
  }

  // silu(a·gateᵀ) · a·upᵀ
  __device__ void multiply_gates(unsigned tag) {
    multiply(s.gate_up, [&](int first, int count) {
      for_words(s.gate_up, first, count, [&](int group, int token, int row, int of_matrix) {
        float numbers[kWord];
        for (int e = 0; e < kWord; ++e) {
          const float gate = rounded<T>(sum_of(group, token, row + e));
          const float up = rounded<T>(sum_of(group, token, row + e + kGroupRows / 2));
          numbers[e] = gate * Activations<T>::sigmoid(gate) * up;
        }
        publish(s.of_hidden + (token * s.hidden + of_matrix) / kWord, word_of<T>(numbers), tag);
      });
    });
  }
};

}  // namespace msops::decoder_stack
