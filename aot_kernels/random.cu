// This operator serves patch_mindspore alone: msops has no public name for it.
//
// Random numbers, which depend on the seed, the offset and the index alone: uniform and normal ones, whole numbers of a
// range, permutations, and dropout.

#include "common/functions.h"
#include "common/pack.h"
#include "common/parallel.h"
#include "common/philox.h"

using namespace msops;

namespace {

constexpr int kBlock = 4;                        // elements that share the four words of a counter
constexpr uint64_t kSecond = uint64_t{1} << 63;  // added to a block's index, for four more words
constexpr double kPhiloxCost = 8;                // of a block's words on the CPU, in units of one simple element

struct Source {
  uint64_t seed, offset;

  MSOPS_BOTH Words words(uint64_t block) const { return philox(seed, block, offset); }
};

// The numbers may be in device memory, where the kernel reads them.
struct SourceAt {
  const int64_t *seed, *offset;

  MSOPS_BOTH Source operator*() const { return {static_cast<uint64_t>(*seed), static_cast<uint64_t>(*offset)}; }
};

template <typename T>
struct Uniform {
  using Out = T;
  using C = Compute<T>;

  MSOPS_BOTH void operator()(const Source& source, uint64_t block, const C (&)[kBlock], C (&y)[kBlock]) const {
    constexpr bool kWide = sizeof(C) == 8;
    const Words high = source.words(block), low = kWide ? source.words(block | kSecond) : high;
    for (int j = 0; j < kBlock; ++j) y[j] = uniform_of<T>(high.at[j], low.at[j]);
  }
};

// Box and Muller's method: words 0 and 1 give two numbers, words 2 and 3 give two more.
template <typename T>
struct Normal {
  using Out = T;
  using C = Compute<T>;

  MSOPS_BOTH void operator()(const Source& source, uint64_t block, const C (&)[kBlock], C (&y)[kBlock]) const {
    constexpr bool kWide = sizeof(C) == 8;
    const Words high = source.words(block), low = kWide ? source.words(block | kSecond) : high;
    for (int j = 0; j < kBlock; j += 2) {
      const C radius = sqrt(-2 * log_of(high.at[j], low.at[j]));
      const C angle = C(6.283185307179586) * fraction(high.at[j + 1], low.at[j + 1]);
      y[j] = radius * cos(angle);
      y[j + 1] = radius * sin(angle);
    }
  }
  // Returns (high, low) / 2^64, rounded.
  static MSOPS_BOTH C fraction(uint32_t high, uint32_t low) {
    if constexpr (sizeof(C) == 8) return static_cast<C>(uint64_t{high} << 32 | low) * C(0x1p-64);
    return static_cast<C>(high) * C(0x1p-32);
  }
  // Returns log(u) of a u in (0, 1]. Near 1 it is computed from 1 - u, which has all its bits.
  static MSOPS_BOTH C log_of(uint32_t high, uint32_t low) {
    constexpr C kStep = sizeof(C) == 8 ? C(0x1p-64) : C(0x1p-32);
    if (high >> 31) return log1p(-fraction(~high, ~low));
    int exponent;  // glibc's log for double would need version 2.29
    const C mantissa = frexp(fraction(high, low) + kStep, &exponent);
    return log1p(mantissa - 1) + static_cast<C>(exponent) * C(0.6931471805599453);
  }
};

// y = x kept / (1 - p), and its gradients are equal, where an element is kept if its word is at least p 2^32.
template <typename T>
struct Dropout {
  using Out = T;
  using C = Compute<T>;
  uint64_t threshold;
  C scale;

  MSOPS_BOTH void operator()(const Source& source, uint64_t block, const C (&x)[kBlock], C (&y)[kBlock]) const {
    const Words words = source.words(block);
    for (int j = 0; j < kBlock; ++j) y[j] = words.at[j] >= threshold ? x[j] * scale : C(0);
  }
};

// Returns the high half of the product of a number of 64 bits, given by its halves, and another.
MSOPS_BOTH uint64_t multiply_high(uint32_t high, uint32_t low, uint64_t factor) {
  const uint64_t upper = factor >> 32, lower = factor & 0xffffffff;
  const uint64_t middle = high * lower + (low * lower >> 32);
  const uint64_t other = low * upper + (middle & 0xffffffff);
  return high * upper + (middle >> 32) + (other >> 32);
}

// y is the whole part of low + u (high - low), where u has 64 bits.
template <typename T>
struct Integers {
  using Out = int64_t;
  using C = Compute<T>;
  const int64_t *low, *high;

  MSOPS_BOTH void operator()(const Source& source, uint64_t block, const C (&)[kBlock], int64_t (&y)[kBlock]) const {
    const Words upper = source.words(block), lower = source.words(block | kSecond);
    const uint64_t from = static_cast<uint64_t>(*low), range = static_cast<uint64_t>(*high) - from;
    for (int j = 0; j < kBlock; ++j) y[j] = static_cast<int64_t>(from + multiply_high(upper.at[j], lower.at[j], range));
  }
};

// Computes blocks of elements. The formulas that take no input have x = nullptr.
template <typename T, typename Formula>
struct Draw {
  using C = Compute<T>;
  using Out = typename Formula::Out;
  static constexpr int kInPack = kPackWidth<T> < kBlock ? kPackWidth<T> : kBlock;
  static constexpr int kOutPack = kPackWidth<Out> < kBlock ? kPackWidth<Out> : kBlock;
  Formula formula;
  int64_t n;
  SourceAt source;
  const T* x;
  Out* y;
  bool packs;

  MSOPS_BOTH void compute(const Source& from, int64_t block) const {
    const int64_t begin = block * kBlock;
    const int count = n - begin < kBlock ? static_cast<int>(n - begin) : kBlock;
    C in[kBlock] = {};
    Compute<Out> out[kBlock];
    if (packs && count == kBlock) {
      if (x != nullptr)
        for (int j = 0; j < kBlock; j += kInPack) {
          const Pack<T, kInPack> pack = load<kInPack>(x + begin + j);
          for (int k = 0; k < kInPack; ++k) in[j + k] = C(pack.values[k]);
        }
      formula(from, block, in, out);
      for (int j = 0; j < kBlock; j += kOutPack) {
        Pack<Out, kOutPack> pack;
        for (int k = 0; k < kOutPack; ++k) assign(pack.values[k], out[j + k]);
        store(y + begin + j, pack);
      }
    } else {
      for (int j = 0; j < count; ++j) in[j] = x != nullptr ? C(x[begin + j]) : C(0);
      formula(from, block, in, out);
      for (int j = 0; j < count; ++j) assign(y[begin + j], out[j]);
    }
  }
};

template <typename T, typename Formula>
struct DrawOnGpu : Draw<T, Formula> {
  template <typename Index>
  MSOPS_BOTH void operator()(Index block) const {
    this->compute(*this->source, block);
  }
};

template <typename T, typename Formula>
struct DrawOnCpu : Draw<T, Formula> {
  MSOPS_CPU void operator()(int64_t block) const { this->compute(*this->source, block); }
};

// The tensors that all entries take.
struct Tensors {
  Tensor x, seed, offset;

  explicit Tensors(Call& call, const char* name = "x", int rank = kAnyRank)
      : x(call.tensor(name, rank)),
        seed(call.tensor_of("int64", "seed", 0)),
        offset(call.tensor_of("int64", "offset", 0)) {}
  SourceAt source() const { return {seed.as<const int64_t>(), offset.as<const int64_t>()}; }
};

template <typename T, typename Formula>
void draw(Call& call, const Tensors& tensors, const Tensor& y, Formula formula, const T* x, double cost) {
  using D = Draw<T, Formula>;
  auto* to = y.as<typename Formula::Out>();
  const bool packs = is_aligned<D::kOutPack>(to) && (x == nullptr || is_aligned<D::kInPack>(x));
  const D body{formula, y.size, tensors.source(), x, to, packs};
  const int64_t blocks = (y.size + kBlock - 1) / kBlock;
  if (call.is_on_cpu()) return on_cpu(call, blocks, DrawOnCpu<T, Formula>{body}, kPhiloxCost + cost);
  on_gpu(call, blocks, y.size, DrawOnGpu<T, Formula>{body});
}

// Draws numbers that depend on no input. `cost` is the work of a block after its words.
template <template <typename> class Formula>
int draw_all(Call& call, double cost) {
  const Tensors tensors(call);
  const Tensor y = call.tensor("y");
  call.require_same_shape(y, tensors.x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    draw<T>(call, tensors, y, Formula<T>{}, nullptr, cost);
  });
}

int drop(Call& call, const char* from, const char* to) {
  const Tensors tensors(call, from);
  const Tensor y = call.tensor(to);
  const double p = call.number("p");
  call.require_same_shape(y, tensors.x);
  call.require(p >= 0 && p <= 1, kBadAttribute, "attribute p is %g, expected 0 to 1", p);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const Dropout<T> formula{static_cast<uint64_t>(p * 0x1p32 + 0.5), p < 1 ? C(1 / (1 - p)) : C(0)};
    draw<T>(call, tensors, y, formula, tensors.x.as<const T>(), kBlock);
  });
}

// A permutation of [0, 2^(2 half)) by a Feistel network, whose keys are random words. Where an image is not below n,
// the permutation is applied again, until it is: that is a permutation of [0, n).
struct Shuffle {
  static constexpr int kRounds = 16;
  uint32_t keys[kRounds];
  int half;
  uint32_t mask;

  MSOPS_BOTH Shuffle(const Source& source, int64_t n) : half(4) {
    while (half < 31 && int64_t{1} << 2 * half < n) ++half;
    mask = (uint32_t{1} << half) - 1;
    for (int i = 0; i < kRounds; i += kBlock) {
      const Words words = source.words(static_cast<uint64_t>(i / kBlock));
      for (int j = 0; j < kBlock; ++j) keys[i + j] = words.at[j];
    }
  }

  // Wellons' lowbias32 lets each bit of its argument change each bit of its value with a probability near one half.
  static MSOPS_BOTH uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352d;
    x = (x ^ x >> 15) * 0x846ca68b;
    return x ^ x >> 16;
  }
  MSOPS_BOTH int64_t image(int64_t i, int64_t n) const {
    do {
      uint32_t left = static_cast<uint32_t>(i >> half), right = static_cast<uint32_t>(i) & mask;
      for (int round = 0; round < kRounds; ++round) {
        const uint32_t next = (left ^ mix(mix(right) + keys[round])) & mask;
        left = right;
        right = next;
      }
      i = static_cast<int64_t>(left) << half | right;
    } while (i >= n);
    return i;
  }
};

struct Permute {
  int64_t n;
  SourceAt source;
  int64_t* y;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    y[i] = Shuffle(*source, n).image(i, n);
  }
};

struct PermuteRuns {
  static constexpr int kRun = 1024;
  Permute all;

  MSOPS_CPU void operator()(int64_t run) const {
    const Shuffle shuffle(*all.source, all.n);
    const int64_t end = std::min<int64_t>(all.n, (run + 1) * kRun);
    for (int64_t i = run * kRun; i < end; ++i) all.y[i] = shuffle.image(i, all.n);
  }
};

}  // namespace

MSOPS_ENTRY(RandomUniform) { return draw_all<Uniform>(call, kBlock); }

MSOPS_ENTRY(RandomNormal) { return draw_all<Normal>(call, 32 * kBlock); }

MSOPS_ENTRY(RandomIntegers) {
  const Tensors tensors(call);
  const Tensor low = call.tensor_of("int64", "low", 0), high = call.tensor_of("int64", "high", 0);
  const Tensor y = call.tensor_of("int64", "y");
  call.require_same_shape(y, tensors.x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    draw<T>(call, tensors, y, Integers<T>{low.as<const int64_t>(), high.as<const int64_t>()}, nullptr, kPhiloxCost);
  });
}

MSOPS_ENTRY(RandomPermutation) {
  const Tensors tensors(call, "x", 1);
  const Tensor y = call.tensor_of("int64", "y", 1);
  call.require_same_shape(y, tensors.x);
  return call.run([&](auto) {
    const Permute body{y.size, tensors.source(), y.as<int64_t>()};
    if (!call.is_on_cpu()) return on_gpu(call, y.size, y.size, body);
    on_cpu(call, (y.size + PermuteRuns::kRun - 1) / PermuteRuns::kRun, PermuteRuns{body}, 64.0 * PermuteRuns::kRun);
  });
}

MSOPS_ENTRY(RandomDropout) { return drop(call, "x", "y"); }

MSOPS_ENTRY(RandomDropoutBackward) { return drop(call, "dy", "dx"); }

MSOPS_ENTRY(RandomDropoutBackwardBackward) { return drop(call, "ddx", "ddy"); }
