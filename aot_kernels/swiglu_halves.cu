// This operator serves patch_mindspore alone: msops has no public name for it.
//
// swiglu (see swiglu.cu) of the halves of one tensor along an axis: gate, then up, and their gradients in the same way.

#include "common/activations.h"
#include "common/pack.h"
#include "common/parallel.h"

using namespace msops;

namespace {

template <typename T>
struct Formulas {
  using C = Compute<T>;

  // (gate, up) -> (out)
  static MSOPS_BOTH void compute(const C (&in)[2], C (&out)[1]) {
    out[0] = in[0] * Activations<T>::sigmoid(in[0]) * in[1];
  }

  // (gate, up, dout) -> (dgate, dup)
  static MSOPS_BOTH void compute(const C (&in)[3], C (&out)[2]) {
    const C gate = in[0], up = in[1], dout = in[2], s = Activations<T>::sigmoid(gate);
    out[0] = dout * up * (s * (1 + gate * (1 - s)));
    out[1] = dout * (gate * s);
  }

  // (gate, up, dout, ddgate, ddup) -> (dgate, dup, ddout)
  static MSOPS_BOTH void compute(const C (&in)[5], C (&out)[3]) {
    const C gate = in[0], up = in[1], dout = in[2], ddgate = in[3], ddup = in[4];
    const C s = Activations<T>::sigmoid(gate), slope = s * (1 + gate * (1 - s));
    out[0] = dout * (ddgate * up * (s * (1 - s) * (2 + gate * (1 - 2 * s))) + ddup * slope);
    out[1] = dout * ddgate * slope;
    out[2] = ddgate * up * slope + ddup * (gate * s);
  }
};

// Parts of an array, `length` elements each, of which one begins `apart` after the other.
template <typename T>
struct Parts {
  T* data;
  int64_t apart;
};

// Computes N elements of a part.
template <typename T, int N, int kIn, int kOut>
struct ComputePacks {
  using C = Compute<T>;
  Parts<const T> in[kIn];
  Parts<T> out[kOut];
  int64_t length;

  // On the CPU, N is large, and the last elements of a part may be fewer.
  MSOPS_CPU void operator()(int64_t i) const {
    const int64_t units = (length + N - 1) / N, part = i / units, first = (i - part * units) * N;
    const int64_t n = std::min<int64_t>(N, length - first);
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      C values[kIn], results[kOut];
      for (int k = 0; k < kIn; ++k) values[k] = C(in[k].data[part * in[k].apart + first + j]);
      Formulas<T>::compute(values, results);
      for (int k = 0; k < kOut; ++k) assign(out[k].data[part * out[k].apart + first + j], results[k]);
    }
  }
};

template <typename T, int N, int kIn, int kOut>
struct ComputePacksOnGpu : ComputePacks<T, N, kIn, kOut> {
  using C = Compute<T>;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const Index units = static_cast<Index>(this->length / N), part = i / units;
    const int64_t first = static_cast<int64_t>(i - part * units) * N;
    Pack<T, N> packs[kIn], results[kOut];
    for (int k = 0; k < kIn; ++k) packs[k] = load<N>(this->in[k].data + part * this->in[k].apart + first);
    for (int j = 0; j < N; ++j) {
      C values[kIn], computed[kOut];
      for (int k = 0; k < kIn; ++k) values[k] = C(packs[k].values[j]);
      Formulas<T>::compute(values, computed);
      for (int k = 0; k < kOut; ++k) assign(results[k].values[j], computed[k]);
    }
    for (int k = 0; k < kOut; ++k) store(this->out[k].data + part * this->out[k].apart + first, results[k]);
  }
};

template <typename T, int kIn, int kOut>
void compute(Call& call, int64_t parts, int64_t length, const Parts<const T> (&in)[kIn], const Parts<T> (&out)[kOut]) {
  const auto with = [&](auto body) {
    std::copy(in, in + kIn, body.in);
    std::copy(out, out + kOut, body.out);
    body.length = length;
    return body;
  };
  if (length == 0) return;
  if (call.is_on_cpu()) {
    constexpr int kBlock = 256;
    const int64_t units = (length + kBlock - 1) / kBlock;
    constexpr double kCost = 8;  // of an element, for its exponential
    return on_cpu(call, parts * units, with(ComputePacks<T, kBlock, kIn, kOut>()),
                  kCost * static_cast<double>(std::min<int64_t>(length, kBlock)));
  }
  constexpr int N = kPackWidth<T>;
  bool packs = length % N == 0;
  for (const auto& each : in) packs = packs && is_aligned<N>(each.data);
  for (const auto& each : out) packs = packs && is_aligned<N>(each.data);
  const int64_t size = 2 * parts * length;
  packs ? on_gpu(call, parts * (length / N), size, with(ComputePacksOnGpu<T, N, kIn, kOut>()))
        : on_gpu(call, parts * length, size, with(ComputePacksOnGpu<T, 1, kIn, kOut>()));
}

// The tensors are (parts, 2, length) or, for what has no halves, (parts, length).
struct Halves {
  int64_t parts, length;

  Halves(Call& call, const Tensor& x, const Tensor& out) : parts(x.dim(0)), length(x.dim(2)) {
    call.require_shape(x, {parts, 2, length});
    call.require_shape(out, {parts, length});
  }
  template <typename T>
  Parts<T> first(const Tensor& x) const {
    return {x.as<T>(), 2 * length};
  }
  template <typename T>
  Parts<T> second(const Tensor& x) const {
    return {x.as<T>() + length, 2 * length};
  }
  template <typename T>
  Parts<T> whole(const Tensor& x) const {
    return {x.as<T>(), length};
  }
};

}  // namespace

MSOPS_ENTRY(SwigluHalvesForward) {
  const Tensor x = call.tensor("x", 3), out = call.tensor("out", 2);
  if (!call.ok()) return call.status();
  const Halves h(call, x, out);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    compute<T, 2, 1>(call, h.parts, h.length, {h.first<const T>(x), h.second<const T>(x)}, {h.whole<T>(out)});
  });
}

MSOPS_ENTRY(SwigluHalvesBackward) {
  const Tensor x = call.tensor("x", 3), dout = call.tensor("dout", 2), dx = call.tensor("dx", 3);
  if (!call.ok()) return call.status();
  const Halves h(call, x, dout);
  call.require_same_shape(dx, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    compute<T, 3, 2>(call, h.parts, h.length, {h.first<const T>(x), h.second<const T>(x), h.whole<const T>(dout)},
                     {h.first<T>(dx), h.second<T>(dx)});
  });
}

MSOPS_ENTRY(SwigluHalvesBackwardBackward) {
  const Tensor x = call.tensor("x", 3), dout = call.tensor("dout", 2), ddx = call.tensor("ddx", 3);
  const Tensor dx = call.tensor("dx", 3), ddout = call.tensor("ddout", 2);
  if (!call.ok()) return call.status();
  const Halves h(call, x, dout);
  call.require_same_shape(ddx, x);
  call.require_same_shape(dx, x);
  call.require_same_shape(ddout, dout);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    compute<T, 5, 3>(call, h.parts, h.length,
                     {h.first<const T>(x), h.second<const T>(x), h.whole<const T>(dout), h.first<const T>(ddx),
                      h.second<const T>(ddx)},
                     {h.first<T>(dx), h.second<T>(dx), h.whole<T>(ddout)});
  });
}
