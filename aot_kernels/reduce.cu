// This operator serves patch_mindspore alone: msops has no public name for it.
//
// y = x reduced over every other axis: its sum, product, largest or smallest element, mean, or whether any or all of
// its elements are true. As MindSpore does before its kernels, the caller joins neighbouring axes, so that there are at
// most three.

#include "reduce/cpu.h"
#include "reduce/operations.h"
#ifdef __CUDACC__
#include "reduce/gpu.h"
#endif
#include "common/scratch.h"

using namespace msops;
using namespace msops::reduce;

namespace {

// A Problem is Across where the last axis is kept, and Along where it is reduced.
struct Problem {
  bool is_across = true;
  Across across{1, 1, 1};
  Along along{1, 1, 1};
  std::vector<int64_t> kept;

  Problem(Call& call, const Tensor& x) {
    const bool first = call.attribute("first", 0, 1) != 0;
    call.require(1 <= x.rank && x.rank <= 3, kBadShape, "x has %d axes, expected 1 to 3", x.rank);
    if (!call.ok()) return;
    for (int axis = first; axis < x.rank; axis += 2) kept.push_back(x.dim(axis));
    is_across = (x.rank % 2 == 0) == first;
    if (is_across) {
      across = {x.rank == 3 ? x.dim(0) : 1, x.rank == 1 ? 1 : x.dim(-2), x.dim(-1)};
    } else {
      along = {x.rank == 3 ? x.dim(0) : 1, x.rank == 1 ? 1 : x.dim(-2), x.dim(-1)};
      if (along.length == 1) is_across = true, across = {1, along.outer, along.outputs};
    }
  }

  int64_t outputs() const { return is_across ? across.outer * across.inner : along.outputs; }
  int64_t terms() const { return is_across ? across.terms : along.outer * along.length; }

  // Returns how many packs the outputs that are neighbours are, if all are read in packs of so many elements.
  int64_t packs(int64_t pack) const { return across.outer * ((across.inner + pack - 1) / pack); }
  // Returns how many blocks there are if the terms of an output are not split, or at most a few too many.
  int64_t blocks(int64_t pack) const { return is_across ? (packs(pack) + 31) / 32 : outputs(); }

  // Returns into how many parts the terms of each output may be split, so that there is work for a whole GPU, but each
  // thread has some.
  int64_t most_parts(int64_t pack) const {
    constexpr int64_t kBlocks = 2048, kThreads = 256, kLoads = 8, kSmall = 1 << 16;
    if (outputs() * terms() < kSmall) return 1;  // a second launch takes longer
    const int64_t threads = is_across ? std::max<int64_t>(8, kThreads / packs(pack)) : kThreads;
    const int64_t loads = is_across ? terms() : terms() / pack;
    return std::clamp<int64_t>(std::min(kBlocks / blocks(pack), loads / (threads * kLoads)), 1, kBlocks);
  }
};

int64_t bytes_of(const Tensor& x) {
  for (const char* name : {"float64", "int64"})
    if (x.dtype && !std::strcmp(x.dtype, name)) return 8;
  return x.dtype && !std::strcmp(x.dtype, "float16") ? 2 : x.dtype && !std::strcmp(x.dtype, "bool") ? 1 : 4;
}

// Returns how many elements of scratch the number of a part takes: scratch beside int64 is float32.
int64_t words_of(const Tensor& x) { return x.dtype && !std::strcmp(x.dtype, "int64") ? 2 : 1; }

// Calls f(operation) with an object of the operation's type.
template <typename T, typename F>
void with_operation(int64_t kind, const F& f) {
  if constexpr (std::is_same<T, bool>::value) {
    kind == kProd || kind == kMin || kind == kAll ? f(Minimum{}) : f(Maximum{});
  } else {
    if (kind == kProd) return f(Multiply{});
    if (kind == kMax) return f(Maximum{});
    if (kind == kMin) return f(Minimum{});
    f(std::conditional_t<std::is_same<T, Half>::value, AddShort, Add>{});
  }
}

template <typename Operation, typename T>
void reduce_on_cpu(Call& call, const Problem& p, const T* x, const Output<Compute<T>, T>& y) {
  const double terms = static_cast<double>(p.terms());
  if (p.is_across) return on_cpu(call, p.outputs(), ReduceAcross<Operation, T>{p.across, x, y}, terms);
  on_cpu(call, p.outputs(), ReduceAlong<Operation, T>{p.along, x, y}, terms);
}

#ifdef __CUDACC__
// A kernel of float numbers also takes those of parts of float16, and rounds them.
template <typename T>
using Rounded = std::conditional_t<std::is_same<T, float>::value, Half, T>;

template <typename Operation, typename T>
void reduce_on_gpu(Call& call, const Problem& p, int64_t most, void* scratch, const T* x, void* y, Compute<T> divisor) {
  using C = Compute<T>;
  using OfParts = std::conditional_t<std::is_same<Operation, AddShort>::value, Add, Operation>;
  constexpr bool kRounds = std::is_same<T, Half>::value;
  const auto reduce = [&](const Output<C, Rounded<T>>& to, int64_t parts) {
    p.is_across ? across<Operation>(call, p.across, parts, x, to) : along<Operation>(call, p.along, parts, x, to);
  };
  [[maybe_unused]] static FactOfGpu<2> at_once;  // blocks
  const int64_t blocks = at_once.get(
      [&] {
        return p.is_across ? blocks_at_once(Gpu(), across_kernel<true, Operation, T, C, Rounded<T>>, kBlock, 0)
                           : blocks_at_once(Gpu(), along_kernel<Operation, T, C, Rounded<T>>, kBlock, 0);
      },
      p.is_across);
  const int64_t parts = std::clamp<int64_t>(blocks / p.blocks(kPackWidth<T>), 1, most);
  if (parts == 1 || reinterpret_cast<uintptr_t>(scratch) % sizeof(C) != 0) return reduce({y, divisor, kRounds}, 1);
  reduce({scratch, C(1), false}, parts);
  across<OfParts>(call, {1, parts, p.outputs()}, 1, static_cast<const C*>(scratch),
                  Output<C, Rounded<C>>{y, divisor, kRounds});
}
#endif

}  // namespace

// (x) -> (y, partial): `partial` is scratch for the numbers of the parts that the terms of each output are split into;
// it is (1, 1) if they are not split. Fewer parts than MSOPS_SCRATCH returns are allowed.
MSOPS_ENTRY(ReduceForward) {
  const Tensor x = call.tensor("x"), y = call.tensor("y"), partial = call.scratch("partial", 2);
  const Problem p(call, x);
  const int64_t kind = call.attribute("op", kSum, kAll), parts = partial.dim(0);
  call.require_shape(y, p.kept);
  call.require(parts >= 1, kBadShape, "partial has no rows");
  call.require_shape(partial, {parts, parts > 1 ? p.outputs() * words_of(x) : 1});
  const bool is_bool = call.ok() && !std::strcmp(x.dtype, "bool");
  const bool is_whole = call.ok() && !std::strncmp(x.dtype, "int", 3);
  call.require(kind != kMean || !(is_bool || is_whole), kBadAttribute, "there is no mean of %s", x.dtype);
  call.require((kind != kAny && kind != kAll) || is_bool, kBadAttribute, "any and all take bool, got %s", x.dtype);
  return call.run<Half, float, double, int32_t, int64_t, bool>([&](auto type) {
    using T = typename decltype(type)::type;
    using Stored = typename StoredOf<T>::type;
    using C = Compute<Stored>;
    const C divisor = kind == kMean ? static_cast<C>(p.terms()) : C(1);
    if (p.outputs() == 0) return;
    with_operation<T>(kind, [&](auto operation) {
      using Operation = decltype(operation);
      if (call.is_on_cpu())
        return reduce_on_cpu<Operation>(call, p, x.as<const Stored>(), Output<C, Stored>{y.data, divisor, true});
#ifdef __CUDACC__
      reduce_on_gpu<Operation>(call, p, parts, partial.data, x.as<const Stored>(), y.data, divisor);
#endif
    });
  });
}

MSOPS_SCRATCH(ReduceForward) {
  const Tensor x = call.tensor("x");
  const Problem p(call, x);
  const int64_t parts = p.most_parts(16 / bytes_of(x));
  return {{parts, parts > 1 ? p.outputs() * words_of(x) : 1}};
}
