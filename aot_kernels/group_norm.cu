// y = a(xhat weight_c + bias_c) for each channel c, where xhat is x with mean 0 and variance 1 in each group of
// neighbouring channels, and a is silu, or does nothing. group_norm/problem.h has the formulas.

#include "common/scratch.h"
#include "common/sum.h"
#include "group_norm/cpu.h"
#include "group_norm/launch.h"
#include "shared/norm/settings.h"

using namespace msops;
using namespace msops::group_norm;

namespace {

// Returns into how many parts a group is cut, which are rows of `partial`: as many as fill a large GPU, or kParts, if
// these have more than a few elements; and as many as kMostChannels needs.
int64_t most_parts(int64_t size, int64_t all_groups, int64_t of_group, int64_t few) {
  const auto up = [](int64_t n, int64_t of) { return n <= 0 ? 0 : (n - 1) / of + 1; };
  const int64_t all = std::max<int64_t>(1, all_groups), fill = std::max(kParts, up(1056, all));
  return std::max<int64_t>({1, std::min<int64_t>({256, fill, up(size / all, few)}), up(of_group, kMostChannels)});
}

struct Inputs {
  Tensor x, weight, bias, dy, out, dweight, dbias, partial;
  int64_t groups, channels = 0;
  bool channels_last, silu;
  double eps;

  explicit Inputs(Call& call, bool backward) {
    x = call.tensor("x");
    weight = call.optional_of("common|float32", "weight"), bias = call.optional_of("common|float32", "bias");
    if (backward) dy = call.tensor("dy");
    out = call.tensor(backward ? "dx" : "y");
    if (backward) {
      dweight = call.optional_of("common|float32", "dweight");
      dbias = call.optional_of("common|float32", "dbias");
    }
    partial = call.scratch("partial", 2);
    eps = norm::eps_of(call);
    groups = call.attribute("num_groups", 1, INT32_MAX);
    silu = call.attribute("silu", 0, 1), channels_last = call.attribute("channels_last", 0, 1);
    call.require(x.rank >= 2, kBadRank, "x has rank %d, expected at least 2", x.rank);
    channels = x.dim(channels_last ? -1 : 1);
    call.require(channels % groups == 0, kBadShape, "num_groups is %lld, which does not divide %lld channels",
                 static_cast<long long>(groups), static_cast<long long>(channels));
    for (const Tensor& each : {weight, bias})
      if (each.dtype) call.require_shape(each, {channels});
    call.require_same_shape(out, x);
    if (backward) {
      call.require_same_shape(dy, x);
      call.require_gradient(dweight, weight);
      call.require_gradient(dbias, bias);
    }
  }

  template <typename T>
  Problem<T> problem(Call& call) const {
    using C = Compute<T>;
    Problem<T> p{x.dim(0),
                 channels,
                 1,
                 groups,
                 channels / groups,
                 channels_last,
                 silu,
                 dy.dtype != nullptr,
                 C(eps),
                 x.as<T>(),
                 dy.as<T>(),
                 out.as<T>(),
                 OptionalNumbers<T>(weight, C(1)),
                 OptionalNumbers<T>(bias),
                 partial.as<C>(),
                 partial.dim(0),
                 Numbers<T>(dweight),
                 Numbers<T>(dbias)};
    for (int axis = 1; axis < x.rank; ++axis)
      if (axis != (channels_last ? x.rank - 1 : 1)) p.positions *= x.dim(axis);
    p.channels_last |= p.positions == 1;
    const int64_t chunks = call.is_on_cpu() ? 1 : (p.of_group + kMostChannels - 1) / kMostChannels;
    const int64_t least = std::max<int64_t>(1, chunks);
    call.require(p.parts >= least, kBadShape, "partial has %lld rows, expected at least %lld",
                 static_cast<long long>(p.parts), static_cast<long long>(least));
    call.require_shape(partial, {p.parts, p.columns()});
    if (call.is_on_cpu()) p.parts = std::min(p.parts, most_parts(x.size, p.samples * groups, p.of_group, kFew));
    return p;
  }
};

Shapes scratch_of(Call& call, int sums) {
  const Tensor x = call.tensor("x");
  const int64_t groups = call.attribute("num_groups", 1, INT32_MAX), last = call.attribute("channels_last", 0, 1);
  const int64_t samples = x.dim(0), channels = x.dim(last ? -1 : 1);
  const int64_t parts = most_parts(x.size, samples * groups, channels / groups, kFewOfPhase);
  return {{parts, samples * (Problem<float>::kRecord * groups + sums * channels)}};
}

// Returns in how many rows of `partial` there are sums of channels to be added up, or -1 if they are added up.
template <bool kBackward, typename T>
int64_t normalize(Call& call, const Problem<T>& p) {
  if (!call.ok() || p.samples * p.channels * p.positions == 0) return 0;
#ifdef __CUDACC__
  if (!call.is_on_cpu()) {
    p.channels_last ? launch_on_gpu<T, true, kBackward>(call, p) : launch_on_gpu<T, false, kBackward>(call, p);
    return -1;
  }
#endif
  p.silu ? normalize_on_cpu<T, true, kBackward>(call, p) : normalize_on_cpu<T, false, kBackward>(call, p);
  return p.parts;
}

// Adds up sums of each channel over samples and parts: those of dz xhat, or those of dz.
template <typename T>
void add_up(Call& call, const Problem<T>& p, int64_t parts, bool of_dz, const Tensor& out) {
  if (!out.dtype || !call.ok() || parts < 0) return;
  Axes<1> kept, summed;
  const int64_t of_channel[] = {1}, of_part[] = {p.columns()}, of_sample[] = {2 * p.channels};
  kept.push(p.channels, of_channel);
  summed.push(parts, of_part);
  summed.push(p.samples, of_sample);
  const Compute<T>* const from = p.sums(0, 0) + (of_dz ? p.channels : 0);
  with_type<T, float>(out,
                      [&](auto type) { sum(call, kept, summed, 1, from, out.as<typename decltype(type)::type>()); });
}

}  // namespace

// (x, weight?, bias?) -> (y, partial)
MSOPS_ENTRY(GroupNormForward) {
  const Inputs in(call, false);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    normalize<false>(call, in.problem<T>(call));
  });
}

MSOPS_SCRATCH(GroupNormForward) { return scratch_of(call, 0); }

// (x, weight?, bias?, dy) -> (dx, dweight?, dbias?, partial)
MSOPS_ENTRY(GroupNormBackward) {
  const Inputs in(call, true);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const auto p = in.problem<T>(call);
    const int64_t parts = normalize<true>(call, p);
    add_up(call, p, parts, false, in.dweight);
    add_up(call, p, parts, true, in.dbias);
  });
}

MSOPS_SCRATCH(GroupNormBackward) { return scratch_of(call, 2); }
