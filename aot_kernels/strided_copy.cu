// This operator serves patch_mindspore alone: msops has no public name for it.
//
// y = x[window], and its gradient: dx is dy in the window, and 0 elsewhere. Elements are moved as they are, by their
// size alone.

#include "strided_copy/copy.h"
#include "strided_copy/cpu.h"
#ifdef __CUDACC__
#include "strided_copy/gpu.h"
#endif

using namespace msops;
using namespace msops::strided_copy;

namespace {

struct Complex64 {
  float parts[2];
};
struct Complex128 {
  double parts[2];
};

}  // namespace

template <>
constexpr const char* msops::dtype_name<Complex64>() {
  return "complex64";
}
template <>
constexpr const char* msops::dtype_name<Complex128>() {
  return "complex128";
}

namespace {

// Calls f(Constant<bytes>{}, parts) for tensors whose elements have so many parts of so many bytes, 8 at most.
template <typename F>
int run_by_size(Call& call, const F& f) {
  return call.run<Half, float, double, bool, int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t,
                  Complex64, Complex128>([&](auto type) {
    constexpr int kBytes = sizeof(typename decltype(type)::type);
    f(Constant<(kBytes < 8 ? kBytes : 8)>{}, kBytes < 8 ? 1 : kBytes / 8);
  });
}

}  // namespace

// (x) -> (y)
MSOPS_ENTRY(StridedCopyForward) {
  const Window all(call);
  const Tensor x = call.tensor("x"), y = call.tensor("y", all.rank);
  all.require(call, x, y);
  return run_by_size(call, [&](auto bytes, int parts) {
    using T = Unit<bytes>;
    if (all.is_empty()) return;
    const Window w = all.in_parts(parts);
    Copy<T> copy{{}, x.as<const T>() + w.offset, x.as<const T>(), x.size * parts, y.as<T>()};
    for (int a = 0; a < w.rank; ++a) copy.axes.push(w.size[a], {w.stride[a]});
    if (call.is_on_cpu()) return copy_on_cpu(call, copy);
#ifdef __CUDACC__
    copy_on_gpu<bytes>(call, copy);
#endif
  });
}

// (dy, x) -> (dx), where x tells the shape of dx alone. No element of x may be in the window twice.
MSOPS_ENTRY(StridedCopyBackward) {
  const Window all(call);
  const Tensor dy = call.tensor("dy", all.rank), x = call.tensor("x"), dx = call.tensor("dx");
  call.require_same_shape(dx, x);
  all.require(call, x, dy);
  if (call.ok() && !all.is_empty())
    call.require(Scatter<char>(all, nullptr, nullptr, 0).is_distinct(), kBadAttribute,
                 "the strides lead to an element twice");
  return run_by_size(call, [&](auto bytes, int parts) {
    using T = Unit<bytes>;
    if (dx.size == 0) return;
    const Scatter<T> scatter(all.in_parts(parts), dy.as<const T>(), dx.as<T>(), dx.size * parts);
    if (call.is_on_cpu()) return scatter_on_cpu(call, scatter);
#ifdef __CUDACC__
    scatter_on_gpu<bytes>(call, scatter);
#endif
  });
}
