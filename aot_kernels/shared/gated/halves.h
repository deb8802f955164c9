// Applies a formula of formula.h to tensors that hold two of its inputs or outputs: the first half of the last axis has
// the one, the second half the other. They are read and written where they are, which takes as long as for tensors of
// their own, whereas to split a tensor first takes longer than all the rest.
#pragma once

#include <vector>

#include "../../common/elementwise.h"

namespace msops::gated {

// One array of a formula: runs of neighbours, of which one begins `apart` after the other.
template <typename T>
struct Part {
  T* data;
  int64_t apart;
};

// Computes N elements of a run of `length`.
template <typename T, int N, int kIn, int kOut, typename Formula>
struct ComputeRuns {
  using C = Compute<T>;
  Part<const T> in[kIn];
  Part<T> out[kOut];
  int64_t length;

  // On the CPU, N is large, and the last elements of a run may be fewer.
  MSOPS_CPU void operator()(int64_t i) const {
    const int64_t units = (length + N - 1) / N, run = i / units, first = (i - run * units) * N;
    const int64_t n = std::min<int64_t>(N, length - first);
    Map<kIn, kOut, T, Formula> map{n, Formula{}, {}, {}};
    for (int k = 0; k < kIn; ++k) map.in[k] = in[k].data + run * in[k].apart + first;
    for (int k = 0; k < kOut; ++k) map.out[k] = out[k].data + run * out[k].apart + first;
    map_run<N>(map, n);
  }
};

template <typename T, int N, int kIn, int kOut, typename Formula>
struct ComputeRunsOnGpu : ComputeRuns<T, N, kIn, kOut, Formula> {
  using C = Compute<T>;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const Index units = static_cast<Index>(this->length / N), run = i / units;
    const int64_t first = static_cast<int64_t>(i - run * units) * N;
    Pack<T, N> packs[kIn], results[kOut];
    for (int k = 0; k < kIn; ++k) packs[k] = load<N>(this->in[k].data + run * this->in[k].apart + first);
    for (int j = 0; j < N; ++j) {
      C values[kIn], computed[kOut];
      for (int k = 0; k < kIn; ++k) values[k] = C(packs[k].values[j]);
      apply_formula(Formula{}, values, computed);
      for (int k = 0; k < kOut; ++k) assign(results[k].values[j], computed[k]);
    }
    for (int k = 0; k < kOut; ++k) store(this->out[k].data + run * this->out[k].apart + first, results[k]);
  }
};

template <typename Formula, typename T, int kIn, int kOut>
void compute_runs(Call& call, int64_t runs, int64_t length, const Part<const T> (&in)[kIn],
                  const Part<T> (&out)[kOut]) {
  const auto with = [&](auto body) {
    std::copy(in, in + kIn, body.in);
    std::copy(out, out + kOut, body.out);
    body.length = length;
    return body;
  };
  if (length == 0) return;
  if (call.is_on_cpu()) {
    constexpr int kBlock = 1024;
    const int64_t units = (length + kBlock - 1) / kBlock;
    constexpr double kCost = 8;  // of an element, for its exponential
    return on_cpu(call, runs * units, with(ComputeRuns<T, kBlock, kIn, kOut, Formula>()),
                  kCost * static_cast<double>(std::min<int64_t>(length, kBlock)));
  }
  constexpr int N = kPackWidth<T>;
  bool packs = length % N == 0;
  for (const auto& each : in) packs = packs && is_aligned<N>(each.data);
  for (const auto& each : out) packs = packs && is_aligned<N>(each.data);
  const int64_t size = 2 * runs * length;
  packs ? on_gpu(call, runs * (length / N), size, with(ComputeRunsOnGpu<T, N, kIn, kOut, Formula>()))
        : on_gpu(call, runs * length, size, with(ComputeRunsOnGpu<T, 1, kIn, kOut, Formula>()));
}

// A parameter of an entry: a tensor of both halves, (*S, 2 K), or of one element for each pair, (*S, K).
struct Packed {
  const char* name;
  bool has_halves;
};

// run_on_halves<Formula, kIn, kOut>(call, {{"gate", true}, {"dout", false}}, {{"dgate", true}}) is an entry of these
// inputs and outputs, whose parts are the kIn inputs and the kOut outputs of the formula. The first input has halves.
template <template <typename> class Formula, int kIn, int kOut, size_t kInputs, size_t kOutputs>
int run_on_halves(Call& call, const Packed (&inputs)[kInputs], const Packed (&outputs)[kOutputs]) {
  Tensor in[kInputs], out[kOutputs];
  for (size_t i = 0; i < kInputs; ++i) in[i] = call.tensor(inputs[i].name);
  for (size_t o = 0; o < kOutputs; ++o) out[o] = call.tensor(outputs[o].name);
  const Tensor& both = in[0];
  call.require(both.rank > 0, kBadRank, "%s has no axes", both.name);
  call.require(both.dim(-1) % 2 == 0, kBadShape, "%s has a last axis of odd length", both.name);
  if (!call.ok()) return call.status();
  std::vector<int64_t> sizes(both.shape, both.shape + both.rank);
  sizes.back() /= 2;
  Tensor one = both;
  one.shape = sizes.data();
  for (size_t i = 0; i < kInputs; ++i) call.require_same_shape(in[i], inputs[i].has_halves ? both : one);
  for (size_t o = 0; o < kOutputs; ++o) call.require_same_shape(out[o], outputs[o].has_halves ? both : one);
  const int64_t length = sizes.back(), runs = both.size / std::max<int64_t>(1, 2 * length);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    Part<const T> from[kIn];
    Part<T> to[kOut];
    auto* input = from;
    for (size_t i = 0; i < kInputs; ++i)
      for (int half = 0; half <= inputs[i].has_halves; ++half)
        *input++ = {in[i].template as<T>() + half * length, (1 + inputs[i].has_halves) * length};
    auto* output = to;
    for (size_t o = 0; o < kOutputs; ++o)
      for (int half = 0; half <= outputs[o].has_halves; ++half)
        *output++ = {out[o].template as<T>() + half * length, (1 + outputs[o].has_halves) * length};
    compute_runs<Formula<T>>(call, runs, length, from, to);
  });
}

}  // namespace msops::gated
