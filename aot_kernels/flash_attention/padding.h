// Copies of tensors with longer rows, for the kernels for tensor cores, which copy rows by 16 bytes or by TMA where
// these are whole packs of 16 bytes. Padding lengthens other rows by zeros, if there are enough queries and keys for
// that to pay: zeros add nothing to products.
#pragma once

#include "../common/pack.h"
#include "../common/scratch.h"
#include "problem.h"

#ifdef __CUDACC__
#include "../common/launch.h"
#endif

namespace msops::flash_attention {

// RowsToCopy are contiguous rows. What is beyond from_width becomes 0.
template <typename T>
struct RowsToCopy {
  const T* from;
  T* to;
  int64_t rows, from_width, to_width;
};

#ifdef __CUDACC__

template <int kCount, typename T>
struct Copies {
  RowsToCopy<T> each[kCount];
};

constexpr int kCopyThreads = 256, kCopyPacks = 4;  // packs of a thread

// A block writes packs that follow one another. Word is a part of a pack, of which rows are made.
template <typename Word, int kCount>
__global__ void __launch_bounds__(kCopyThreads) copy_rows(const __grid_constant__ Copies<kCount, Word> copies) {
  constexpr int N = kPackWidth<Word>;
  const RowsToCopy<Word>& c = copies.each[blockIdx.y];
  const auto from_width = static_cast<unsigned>(c.from_width), to_width = static_cast<unsigned>(c.to_width);
  const int64_t size = c.rows * c.to_width, begin = int64_t{blockIdx.x} * (kCopyThreads * kCopyPacks * N);
  const int64_t first_row = begin / c.to_width;
  const auto skipped = static_cast<unsigned>(begin - first_row * c.to_width);
  const bool aligned = is_aligned<N>(c.to);
#pragma unroll
  for (int i = 0; i < kCopyPacks; ++i) {
    const unsigned place = (i * kCopyThreads + threadIdx.x) * N;
    const int64_t left = size - begin - place;
    if (left <= 0) return;
    unsigned column = (skipped + place) % to_width;
    const Word* row = c.from + (first_row + (skipped + place) / to_width) * c.from_width;
    Pack<Word, N> pack;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      pack.values[j] = j < left && column < from_width ? row[column] : Word{};
      if (++column == to_width) column = 0, row += from_width;
    }
    Word* const to = c.to + begin + place;
    if (aligned && left >= N) {
      store_at_once(to, pack);
    } else {
      for (int j = 0; j < N && j < left; ++j) to[j] = pack.values[j];
    }
  }
}

// Copies rows by words of up to 8 bytes, in one launch.
template <int kCount, typename T, typename Word = uint64_t>
void launch_copies(Call& call, const RowsToCopy<T> (&copies)[kCount]) {
  constexpr int64_t kWord = sizeof(Word) / sizeof(T), kOfBlock = kCopyThreads * kCopyPacks * kPackWidth<Word>;
  Copies<kCount, Word> words{};
  int64_t blocks = 0;
  bool fits = true;
  for (int i = 0; i < kCount; ++i) {
    const RowsToCopy<T>& c = copies[i];
    fits &= is_aligned<kWord>(c.from) && is_aligned<kWord>(c.to) && (c.from_width | c.to_width) % kWord == 0;
    words.each[i] = {reinterpret_cast<const Word*>(c.from), reinterpret_cast<Word*>(c.to), c.rows, c.from_width / kWord,
                     c.to_width / kWord};
    blocks = most(blocks, parts_of(c.rows * (c.to_width / kWord), kOfBlock));
  }
  if constexpr (kWord > 1) {
    using Shorter = std::conditional_t<sizeof(Word) == 8, uint32_t, uint16_t>;
    if (!fits) return launch_copies<kCount, T, Shorter>(call, copies);
  }
  launch(call, copy_rows<Word, kCount>, {blocks, kCount}, kCopyThreads, 0, words);
}

#endif

// Padding says how long the rows of a pass's copies are, and where these lie in scratch.
template <typename T>
class Padding {
 public:
  // Describes the copies for the forward or backward pass of a problem, which may have no data.
  Padding(const Attention<T>& a, bool is_packed, bool is_backward)
      : width_(a.width), value_width_(a.value_width), is_backward_(is_backward) {
    constexpr int64_t kPack = kPackWidth<T>, kWidest = 256, kMostRows = int64_t{1} << 48;
    const int64_t few = is_backward ? 128 : 256;  // queries or keys
    query_rows_ = is_packed ? size_of({a.heads, a.query_rows}) : size_of({a.batch, a.heads, a.queries});
    key_rows_ = is_packed ? size_of({a.kv_heads, a.key_rows}) : size_of({a.batch, a.kv_heads, a.keys});
    is_used_ = std::is_same<T, Half>::value && (a.width | a.value_width) % kPack != 0 &&
               least(a.width, a.value_width) > 0 && most(a.width, a.value_width) <= kWidest &&
               least(a.queries, a.keys) >= few && most(query_rows_, key_rows_) <= kMostRows;
    if (is_used_) width_ = parts_of(a.width, kPack) * kPack, value_width_ = parts_of(a.value_width, kPack) * kPack;
  }

  // Returns how many elements of scratch the pass needs.
  int64_t size() const {
    const int64_t inputs = q_size() + k_size() + v_size();
    return is_used_ ? (is_backward_ ? 2 : 1) * inputs + out_size() : 1;
  }

  // Returns the problem with longer rows, still with the data of the shorter ones.
  template <typename A>
  A with_long_rows(A a) const {
    const auto lengthen = [](Strides& x, int64_t from, int64_t to) {
      for (int64_t* stride : {&x.batch, &x.head, &x.row}) *stride = *stride / from * to;
    };
    if (!is_used_) return a;
    lengthen(a.of_q, a.width, width_), lengthen(a.of_k, a.width, width_);
    lengthen(a.of_v, a.value_width, value_width_), lengthen(a.of_out, a.value_width, value_width_);
    a.width = width_, a.value_width = value_width_;
    return a;
  }

#ifdef __CUDACC__
  // Calls run(problem) with the problem whose rows are whole packs, and copies its results.
  template <typename A, typename Run>
  void forward(Call& call, const A& a, T* scratch, const Run& run) const {
    if (!is_used_) return run(a);
    A copy = with_long_rows(a);
    T *const q = scratch, *const k = q + q_size(), *const v = k + k_size();
    copy.q = q, copy.k = k, copy.v = v, copy.out = v + v_size();
    launch_copies<3, T>(call, {{a.q, q, query_rows_, a.width, width_},
                               {a.k, k, key_rows_, a.width, width_},
                               {a.v, v, key_rows_, a.value_width, value_width_}});
    run(copy);
    launch_copies<1, T>(call, {{copy.out, a.out, query_rows_, value_width_, a.value_width}});
  }

  // Calls run(problem, gradient) in the same way. The copied problem has no `out`, which delta is computed from before.
  template <typename A, typename Run>
  void backward(Call& call, const A& a, const AttentionGradient<T>& g, T* scratch, const Run& run) const {
    if (!is_used_) return run(a, g);
    A copy = with_long_rows(a);
    AttentionGradient<T> to = g;
    T *const q = scratch, *const k = q + q_size(), *const v = k + k_size(), *const dout = v + v_size();
    copy.q = q, copy.k = k, copy.v = v, copy.out = nullptr, to.dout = dout;
    to.dq = dout + out_size(), to.dk = to.dq + q_size(), to.dv = to.dk + k_size();
    launch_copies<4, T>(call, {{a.q, q, query_rows_, a.width, width_},
                               {a.k, k, key_rows_, a.width, width_},
                               {a.v, v, key_rows_, a.value_width, value_width_},
                               {g.dout, dout, query_rows_, a.value_width, value_width_}});
    run(copy, to);
    launch_copies<3, T>(call, {{to.dq, g.dq, query_rows_, width_, a.width},
                               {to.dk, g.dk, key_rows_, width_, a.width},
                               {to.dv, g.dv, key_rows_, value_width_, a.value_width}});
  }
#endif

 private:
  int64_t q_size() const { return query_rows_ * width_; }
  int64_t k_size() const { return key_rows_ * width_; }
  int64_t v_size() const { return key_rows_ * value_width_; }
  int64_t out_size() const { return query_rows_ * value_width_; }

  int64_t width_, value_width_, query_rows_, key_rows_;
  bool is_backward_, is_used_;
};

}  // namespace msops::flash_attention
