// What the kernels of long and of short rows share: powers of e, and what a row consists of. A row may begin anywhere:
// its elements before the first whole pack and after the last one are taken one by one.
#pragma once

#include "../common/activations.h"
#include "../common/gpu/approx.h"
#include "../common/pack.h"
#include "loss.h"

namespace msops::cross_entropy {

// Returns e^(x - max) for a row's maximum. On float16, `max` and x are exact, and the difference of their products by
// log2(e) takes one instruction; all exponentials then have one common error, which `correction` undoes.
template <typename T>
class Power {
 public:
  using C = Compute<T>;

  explicit __device__ Power(C max) : max_(max == C(-HUGE_VAL) ? C(0) : max) {  // infinity - infinity would be NaN
    if constexpr (kFused) scaled_ = __fmul_rn(max_, kLog2E<float>);
  }

  __device__ C operator()(C x) const {
    if constexpr (kFused) {
      return ex2_approx_ftz(fmaf(x, kLog2E<float>, -scaled_));
    } else if constexpr (sizeof(C) == 4) {
      return ex2_approx_ftz((x - max_) * kLog2E<float>);
    } else {
      return exp(x - max_);
    }
  }

  // Returns the maximum or, where that is not finite yet, 0.
  __device__ C shift() const { return max_; }

  // Returns the factor that makes sums for an older, smaller maximum sums for this one.
  __device__ C factor(C older) const {
    if constexpr (kFused) {
      return ex2_approx_ftz(__fmul_rn(older, kLog2E<float>) - scaled_);
    } else {
      return (*this)(older);
    }
  }
  __device__ C correction() const {
    if constexpr (kFused) {
      return ex2_approx_ftz(-fmaf(max_, kLog2E<float>, -scaled_));
    } else {
      return 1;
    }
  }

 private:
  static constexpr bool kFused = std::is_same<T, Half>::value;

  C max_, scaled_ = 0;
};

// Returns the largest element of several packs. NaN is passed over: the exponentials' sum has it.
template <typename T, int N, int kCount>
__device__ __forceinline__ Compute<T> largest(const Pack<T, N> (&packs)[kCount]) {
  using C = Compute<T>;
#if __CUDA_ARCH__ >= 800  // the first that has max.f16x2
  constexpr bool kInPairs = std::is_same<T, Half>::value;
#else
  constexpr bool kInPairs = false;
#endif
  if constexpr (kInPairs) {
    uint32_t words[kCount * N / 2];
    memcpy(words, packs, sizeof words);
    for (int half = kCount * N / 4; half > 0; half /= 2)
      for (int k = 0; k < half; ++k) words[k] = max_f16x2(words[k], words[k + half]);
    Pack<Half, 2> last;
    memcpy(&last, words, sizeof last);
    return fmaxf(last.values[0], last.values[1]);
  } else {
    C values[kCount];
    for (int i = 0; i < kCount; ++i) {
      values[i] = C(-HUGE_VAL);
      for (const T& value : packs[i].values) values[i] = ::fmax(values[i], C(value));
    }
    for (int apart = 1; apart < kCount; apart *= 2)
      for (int i = 0; i < kCount; i += 2 * apart) values[i] = ::fmax(values[i], values[i + apart]);
    return values[0];
  }
}

// Loads a pack if it is in the row; else returns elements that are no row's maximum and add nothing to its sum. Packs
// of float16 are loaded as words, since a choice between two packs would take instructions for each element.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_or_lowest(const T* from, bool is_in_row) {
  Pack<T, N> pack;
  for (T& value : pack.values) value = T(-HUGE_VALF);
  if constexpr (sizeof(T) == 2) {
    Pack<uint32_t, N / 2> words;
    memcpy(&words, &pack, sizeof pack);
    if (is_in_row) words = load<N / 2>(reinterpret_cast<const uint32_t*>(from));
    memcpy(&pack, &words, sizeof pack);
  } else if (is_in_row) {
    pack = load<N>(from);
  }
  return pack;
}

// RowParts says how many elements stand before a row's whole packs, how many packs there are, and how many elements
// stand after them. Where other rows that are taken in packs together with this one are not aligned as it is, it has no
// packs: then it `is_apart`.
struct RowParts {
  int head, packs, tail;

  template <int N, typename T, typename Length>
  static __device__ RowParts of(const T* row, Length length, bool is_apart) {
    const Length to_pack = elements_to_pack<N>(row), head = to_pack < length && !is_apart ? to_pack : length;
    const Length packs = (length - head) / N;
    return {static_cast<int>(head), static_cast<int>(packs), static_cast<int>(length - head - packs * N)};
  }
};

// Returns a_j, or q_j w_j if kPlain: then there is no label smoothing.
template <bool kPlain, typename T>
__device__ __forceinline__ Compute<T> a_of(const Loss<T, Form::kProbabilities>& loss, Compute<T> spread, int64_t j,
                                           Compute<T> q) {
  if constexpr (!kPlain) q = q * (1 - loss.smoothing) + spread;
  return loss.weight ? q * loss.weight[j] : q;
}

// Returns x_j of a logit. If kPlain, there is neither softcap nor label smoothing.
template <bool kPlain, typename T, Form kForm>
__device__ __forceinline__ Compute<T> x_of(const Loss<T, kForm>& loss, Compute<T> logit) {
  if constexpr (!kPlain)
    if (loss.softcap > 0) return loss.softcap * Activations<T>::tanh(logit / loss.softcap);
  return logit;
}

}  // namespace msops::cross_entropy
