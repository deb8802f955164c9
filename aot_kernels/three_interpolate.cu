// out[b, c, n] = sum over three k of weight[b, n, k] features[b, c, idx[b, n, k]], and its gradients.

#include "common/scatter.h"
#include "gather/weights.h"

using namespace msops;

namespace {

constexpr int kTaps = 3;

Gather require_interpolation(Call& call, const Tensor& features, const Tensor& idx, const Tensor& weight,
                             const Tensor& out) {
  const Gather all{features.dim(0), features.dim(1), features.dim(2), idx.dim(1)};
  call.require_shape(idx, {all.lists, all.places, kTaps});
  call.require_same_shape(weight, idx);
  call.require_shape(out, {all.lists, all.channels, all.places});
  require_countable(call, all, features, kTaps);
  return all;
}

template <typename T>
struct TermOfTap {
  Gather all;
  const T *dout, *weight;

  MSOPS_BOTH Compute<T> operator()(int64_t list, int64_t channel, int64_t tap) const {
    return Compute<T>(weight[list * all.places * kTaps + tap]) *
           Compute<T>(dout[(list * all.channels + channel) * all.places + tap / kTaps]);
  }
};

template <typename T, typename Index>
struct TakeThree {
  Gather all;
  const T *features, *weight;
  const Index* index;
  T* out;

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const I places = static_cast<I>(all.places), row = i / places, list = row / static_cast<I>(all.channels);
    const int64_t at = (static_cast<int64_t>(list) * all.places + (i - row * places)) * kTaps;
    Compute<T> sum = 0;
    for (int k = 0; k < kTaps; ++k) {
      const int64_t point = index[at + k];
      if (0 <= point && point < all.points)
        sum += Compute<T>(weight[at + k]) * Compute<T>(features[static_cast<int64_t>(row) * all.points + point]);
    }
    assign(out[i], sum);
  }
};

// Index i is a place of all lists.
template <typename T, typename Index>
struct WeightGradient {
  Gather all;
  const T *features, *dout;
  const Index* index;
  T* dweight;

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const int64_t list = static_cast<int64_t>(i) / all.places, place = static_cast<int64_t>(i) - list * all.places;
    Sum<T> sums[kTaps];
    for (int64_t row = list * all.channels; row < (list + 1) * all.channels; ++row) {
      const Compute<T> gradient = Compute<T>(dout[row * all.places + place]);
      for (int k = 0; k < kTaps; ++k) {
        const int64_t point = index[static_cast<int64_t>(i) * kTaps + k];
        if (0 <= point && point < all.points) sums[k] += gradient * Compute<T>(features[row * all.points + point]);
      }
    }
    for (int k = 0; k < kTaps; ++k) assign(dweight[static_cast<int64_t>(i) * kTaps + k], sums[k].total());
  }
};

}  // namespace

// (features, idx, weight) -> (out)
MSOPS_ENTRY(ThreeInterpolateForward) {
  const Tensor features = call.tensor("features", 3), idx = call.tensor_of("index", "idx", 3);
  const Tensor weight = call.tensor("weight", 3), out = call.tensor("out", 3);
  const Gather all = require_interpolation(call, features, idx, weight, out);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    with_type<int32_t, int64_t>(idx, [&](auto index) {
      using Index = typename decltype(index)::type;
      if (call.on_cpu()) {
        require_points<Index>(call, idx, features);
        const GatherOnCpu<kTaps, T, Index> body{all, features.as<T>(), idx.as<Index>(), weight.as<T>(), out.as<T>()};
        on_cpu(call, body.items(), body, body.cost());
      } else {
        const TakeThree<T, Index> body{all, features.as<T>(), weight.as<T>(), idx.as<Index>(), out.as<T>()};
        on_gpu(call, out.size, std::max(out.size, features.size), body);
      }
    });
  });
}

// (features, idx, weight, dout, scratch) -> (dfeatures, dweight)
MSOPS_ENTRY(ThreeInterpolateBackward) {
  const Tensor features = call.tensor("features", 3), idx = call.tensor_of("index", "idx", 3);
  const Tensor weight = call.tensor("weight", 3), dout = call.tensor("dout", 3);
  const Tensor dfeatures = call.tensor("dfeatures", 3), dweight = call.tensor("dweight", 3);
  const Tensor scratch = call.tensor_of("int32", "scratch", 1);
  const Gather all = require_interpolation(call, features, idx, weight, dout);
  call.require_same_shape(dfeatures, features);
  call.require_same_shape(dweight, weight);
  call.require_shape(scratch, {all.lists * scatter_scratch(all.points, all.places * kTaps)});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    with_type<int32_t, int64_t>(idx, [&](auto index) {
      using Index = typename decltype(index)::type;
      if (call.on_cpu()) {
        require_points<Index>(call, idx, features);
        const ScatterOnCpu<kTaps, T, Index> scatter{all, dout.as<T>(), idx.as<Index>(), weight.as<T>(),
                                                    dfeatures.as<T>()};
        on_cpu(call, scatter.items(), scatter, scatter.cost());
        const WeightGradientOnCpu<kTaps, T, Index> sums{all, features.as<T>(), dout.as<T>(), idx.as<Index>(),
                                                        dweight.as<T>()};
        on_cpu(call, sums.items(), sums, sums.cost());
      } else {
        const Inverse inverse =
            invert(call, all.lists, all.points, all.places * kTaps, idx.as<const Index>(), scratch.as<int32_t>());
        scatter_add(call, inverse, all.channels, ChannelOrder::kFirst, TermOfTap<T>{all, dout.as<T>(), weight.as<T>()},
                    dfeatures.as<T>());
        const WeightGradient<T, Index> sums{all, features.as<T>(), dout.as<T>(), idx.as<Index>(), dweight.as<T>()};
        on_gpu(call, all.lists * all.places, std::max(dout.size, features.size), sums);
      }
    });
  });
}
