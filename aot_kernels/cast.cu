// This operator serves patch_mindspore alone: msops has no public name for it.
//
// y = x as numbers of another dtype: rounded to nearest, or towards 0 to whole numbers; a bool is x != 0.

#include "common/pack.h"
#include "common/parallel.h"
#include "shared/broadcast/operations.h"

using namespace msops;

namespace {

template <typename To, typename From>
MSOPS_BOTH To convert(From x) {
  const Compute<From> wide = Compute<From>(x);
  if constexpr (std::is_same<To, bool>::value) {
    return wide != 0;
  } else if constexpr (std::is_same<To, Half>::value) {
    return Half(static_cast<float>(wide));
  } else {
    return static_cast<To>(wide);
  }
}

template <typename From, typename To>
struct Elements {
  const From* x;
  To* y;

  MSOPS_CPU void operator()(int64_t i) const { y[i] = convert<To>(x[i]); }
};

#ifdef __CUDACC__
// Index i is a pack of N elements.
template <int N, typename From, typename To>
struct Packs {
  int64_t size;
  const From* x;
  To* y;

  template <typename Index>
  __device__ void operator()(Index i) const {
    const int64_t begin = static_cast<int64_t>(i) * N;
    if (begin + N <= size) {
      const Pack<From, N> from = load<N>(x + begin);
      Pack<To, N> to;
#pragma unroll
      for (int j = 0; j < N; ++j) to.values[j] = convert<To>(from.values[j]);
      return store(y + begin, to);
    }
    for (int64_t j = begin; j < size; ++j) y[j] = convert<To>(x[j]);
  }
};

// The smaller of both elements fills packs of 16 bytes, as far as the larger ones fit into four of these.
template <typename From, typename To>
constexpr int kWidth = std::min<int>(16 / std::min(sizeof(From), sizeof(To)), 64 / std::max(sizeof(From), sizeof(To)));

template <typename From, typename To>
void cast_on_gpu(Call& call, int64_t size, const From* x, To* y) {
  const auto run = [&](auto width) {
    constexpr int N = width;
    on_gpu(call, (size + N - 1) / N, size, Packs<N, From, To>{size, x, y});
  };
  constexpr int N = kWidth<From, To>;
  const bool aligned = reinterpret_cast<uintptr_t>(x) % sizeof(Pack<From, N>) == 0 &&
                       reinterpret_cast<uintptr_t>(y) % sizeof(Pack<To, N>) == 0;
  aligned ? run(Constant<N>{}) : run(Constant<1>{});
}
#endif

template <typename From, typename To>
void cast(Call& call, const Tensor& x, const Tensor& y) {
  if (x.size == 0) return;
  if (call.is_on_cpu()) return on_cpu(call, x.size, Elements<From, To>{x.as<const From>(), y.as<To>()}, 1);
#ifdef __CUDACC__
  cast_on_gpu(call, x.size, x.as<const From>(), y.as<To>());
#endif
}

}  // namespace

// (x) -> (y)
MSOPS_ENTRY(CastForward) {
  const std::string to(kCastDtypes[call.attribute("to", 0, 5)]);
  const Tensor x = call.tensor("x"), y = call.tensor_of(to.c_str(), "y");
  call.require_same_shape(y, x);
  return call.run<Half, float, double, int32_t, int64_t, bool>([&](auto type) {
    using From = typename decltype(type)::type;
    const auto into = [&](auto other) {
      using To = typename decltype(other)::type;
      if constexpr (!std::is_same<From, To>::value) {
        if (to == dtype_name<To>()) cast<From, To>(call, x, y);
      }
    };
    call.require(has_cast(dtype_name<From>(), to), kBadDtype, "x is %s, y is %s", x.dtype, y.dtype);
    if (!call.ok()) return;
    into(Type<bool>{}), into(Type<float>{}), into(Type<int32_t>{}), into(Type<int64_t>{});
    // float16 is computed in float32, from which a number of float64 would be rounded twice.
    constexpr bool kIsDouble = std::is_same<From, double>::value, kIsHalf = std::is_same<From, Half>::value;
    if constexpr (!kIsDouble) into(Type<Half>{});
    if constexpr (!kIsHalf) into(Type<double>{});
  });
}
