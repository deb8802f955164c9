// A selective scan runs along L steps, for each sample b and channel d by itself. With x = delta + delta_bias and
// dt = softplus(x), or x, the N states and the outputs are
//
//   h_t[n] = e^(dt_t A[n]) h_(t-1)[n] + dt_t u_t B_t[n],   y_t = sum over n of C_t[n] h_t[n] + D u_t,   out = y silu(z)
//
// where the channels of a group share B_t and C_t. The forward pass saves the states before each chunk of steps, from
// which the backward pass computes those of the chunk again. With dy = dout silu(z), it goes back from the last step:
//
//   g_t = dy_t C_t + e^(dt_(t+1) A) g_(t+1)                     the gradient of h_t
//   dC_t = dy_t h_t,  dB_t = dt_t u_t g_t                       summed over the channels of a group
//   s1_t = sum over n of g_t B_t,  s2_t = sum over n of A p_t   where p_t = g_t e^(dt_t A) h_(t-1)
//   du = dt s1 + D dy,  ddt = s2 + u s1,  dA = sum over t of dt_t p_t
#pragma once

#include "../common/activations.h"
#include "../common/numbers.h"
#include "../common/pack.h"
#include "../common/parallel.h"
#include "../common/scratch.h"

namespace msops::selective_scan {

constexpr int kChunk = 64;  // steps

// The channels that a block of the GPU, or a thread of the CPU, takes at once. They are of one group.
template <typename T>
constexpr int kChannels = sizeof(T) == 8 ? 8 : 32;

// kWidth is the number of states that a block takes at once, at most.
constexpr int kWidth = 16;

MSOPS_BOTH int64_t ceiling(int64_t n, int64_t of) { return n / of + (n % of > 0); }

struct Sizes {
  int64_t samples, channels, steps, groups, states;
  int64_t width;  // kChannels<T>

  MSOPS_BOTH int64_t chunks() const { return ceiling(steps, kChunk); }
  MSOPS_BOTH int64_t of_group() const { return groups > 0 ? channels / groups : 0; }
  MSOPS_BOTH int64_t blocks_of_group() const { return ceiling(of_group(), width); }
  MSOPS_BOTH int64_t blocks() const { return samples * groups * blocks_of_group(); }
  // Returns the number of elements of B.
  MSOPS_BOTH int64_t of_inputs() const { return samples * groups * states * steps; }

  // Returns in how many parts of the chunks blocks share a row on the GPU. Several parts take each step twice.
  int64_t parts() const {
    constexpr int64_t kEnough = 512, kLeast = 8;  // blocks, and chunks of a part
    return blocks() == 0 ? 1 : std::max<int64_t>(1, std::min(kEnough / blocks(), chunks() / kLeast));
  }
};

// Decay computes e^(dt A), of which both may have any sign. On the GPU, floats take the instruction for powers of two,
// whose error is 2^-22, that is, a few roundings.
template <typename C>
struct Decay {
  // Returns the factor by which A is multiplied before `of` takes dt A.
  static MSOPS_BOTH C scale() {
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(C) == 4) return kLog2E<C>;
#endif
    return 1;
  }
  // Returns 1 / scale().
  static MSOPS_BOTH C inverse_scale() {
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(C) == 4) return C(0.69314718055994530942);
#endif
    return 1;
  }
  static MSOPS_BOTH C of(C x) {
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(C) == 4) return ex2_approx_ftz(x);
    return std::exp(x);
#else
    return Exponential<C>::exp_of_any(x);
#endif
  }
};

// Steps computes dt from delta.
template <typename T>
struct Steps {
  using C = Compute<T>;
  bool has_softplus;

  // Returns log(1 + e^x) = max(x, 0) + log(1 + z) with z = e^-|x|. Let s = z / (2 + z), which is at most 1/3: the
  // series log(1 + z) = 2 (s + s^3/3 + s^5/5 + ...) keeps the digits of small z.
  // On the GPU, floats take a polynomial for log(1 + z) / z, whose error is 5e-9, since it needs no reciprocal.
  static MSOPS_BOTH C softplus(C x) {
    constexpr int kTerms = sizeof(C) == 8 ? 17 : 8;
    const C z = Activations<T>::exp(-std::abs(x));
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(C) == 4) {
      constexpr float kFactors[] = {0.0198513903f,  -0.0569593984f, 0.1060364097f,
                                    -0.1530558467f, 0.1967593580f,  -0.2495413274f,
                                    0.3332996368f,  -0.4999990165f, 1};
      C sum = -0.0032440091f;
      for (const float factor : kFactors) sum = sum * z + factor;
      return (x > 0 ? x : C(0)) + z * sum;
    }
#endif
    const C s = Activations<T>::quotient(z, 2 + z);
    return (x > 0 ? x : C(0)) + 2 * s * series<kTerms - 1>(s * s, C(1) / C(2 * kTerms - 1));
  }
  MSOPS_BOTH C dt(C delta) const { return has_softplus ? softplus(delta) : delta; }
  // Replaces deltas by dt. With one branch for all, their instructions overlap.
  template <int W>
  MSOPS_BOTH void to_dt(C (&deltas)[W]) const {
    if (!has_softplus) return;
    for (C& delta : deltas) delta = softplus(delta);
  }
  // Returns the derivative of dt.
  MSOPS_BOTH C slope(C delta) const { return has_softplus ? Activations<T>::sigmoid(delta) : C(1); }

 private:
  // Returns sum * square^k + the terms square^j / (2j + 1) for j < k, by Horner's rule.
  template <int k>
  static MSOPS_BOTH C series(C square, C sum) {
    if constexpr (k == 0) {
      return sum;
    } else {
      return series<k - 1>(square, sum * square + C(1) / C(2 * k - 1));
    }
  }
};

template <typename T>
struct Problem {
  using C = Compute<T>;
  Sizes s;
  Steps<T> steps;
  const T *u, *delta, *inputs, *outputs, *z;  // inputs: B, outputs: C
  Numbers<T> A;                               // (D, N)
  OptionalNumbers<T> D, bias, initial;        // (D,), (D,), (B, D, N)
  C* states;                                  // (B, chunks, D, N): before each chunk
  int64_t parts;
  // On the GPU: each part's states, or their gradients, where the part begins with zeros, then its sum of dt: (parts,
  // B, D, N + 1).
  C* ends;

  // Returns the place of a channel's first step.
  MSOPS_BOTH int64_t row(int64_t sample, int64_t channel) const { return (sample * s.channels + channel) * s.steps; }
  // Returns the place of the first step of B_t[n] and C_t[n].
  MSOPS_BOTH int64_t row_of_state(int64_t sample, int64_t group, int64_t n) const {
    return ((sample * s.groups + group) * s.states + n) * s.steps;
  }
  // Returns the place of a state of a channel, in an array (B, D, N).
  MSOPS_BOTH int64_t at(int64_t sample, int64_t channel, int64_t n) const {
    return (sample * s.channels + channel) * s.states + n;
  }
  MSOPS_BOTH C* saved(int64_t sample, int64_t chunk, int64_t channel, int64_t n) const {
    return states + ((sample * s.chunks() + chunk) * s.channels + channel) * s.states + n;
  }
};

template <typename T>
struct ForwardProblem : Problem<T> {
  T* out;
  Compute<T>* last;  // (B, D, N)
};

template <typename T>
struct BackwardProblem : Problem<T> {
  using C = Compute<T>;
  const T* dout;
  const C* dlast;
  T *du, *ddelta, *dz;
  Numbers<T> dinitial;
  C* sums;     // of the channels of each block: (blocks of a group, 2, B, G, N, L), dB and dC
  C* dA;       // of each part and sample: (parts, B, D, N)
  C* vectors;  // dD and ddelta_bias of each part and sample: (2, parts, B, D)
  C* carry;    // e^(dt A) g of the first step of the chunk after a chunk: (parts, B, D, N)
  C* held;     // on the GPU: s1 and s2 of a chunk (parts, B, D, 2, kChunk), if there are more than kWidth states

  MSOPS_BOTH int64_t at_sums(int64_t block_of_group, int which, int64_t row_of_state) const {
    return (2 * block_of_group + which) * this->s.of_inputs() + row_of_state;
  }
  // Returns the place in `carry` and `dA`.
  MSOPS_BOTH int64_t at_part(int64_t part, int64_t sample, int64_t channel, int64_t n) const {
    return this->at(part * this->s.samples + sample, channel, n);
  }
  MSOPS_BOTH C* vector(int which, int64_t part, int64_t sample, int64_t channel) const {
    return vectors + ((which * this->parts + part) * this->s.samples + sample) * this->s.channels + channel;
  }
};

// Block is a run of channels of one group, in one sample.
struct Block {
  int64_t index, sample, group, channel;  // index: in the group; channel: the first one
  int channels;

  MSOPS_BOTH Block(const Sizes& s, int64_t item)
      : index(item % s.blocks_of_group()),
        sample(item / s.blocks_of_group() / s.groups),
        group(item / s.blocks_of_group() % s.groups),
        channel(group * s.of_group() + index * s.width) {
    const int64_t left = s.of_group() - index * s.width;
    channels = static_cast<int>(left < s.width ? left : s.width);
  }
};

}  // namespace msops::selective_scan
