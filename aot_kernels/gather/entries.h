// The entries of gather_points and group_points differ in the rank of their indices alone.
#pragma once

#include "../common/scatter.h"
#include "cpu.h"

namespace msops {

// Requires the shapes (lists, channels, points) of `features`, (lists, ...) of `idx` and (lists, channels, ...) of
// `out`, where idx has `axes` axes beside that of the lists.
inline Gather require_gather(Call& call, const Tensor& features, const Tensor& idx, const Tensor& out, int axes) {
  Gather all{features.dim(0), features.dim(1), features.dim(2), 1};
  for (int d = 1; d <= axes; ++d) all.places *= idx.dim(d);
  if (axes == 1) {
    call.require_shape(idx, {all.lists, idx.dim(1)});
    call.require_shape(out, {all.lists, all.channels, idx.dim(1)});
  } else {
    call.require_shape(idx, {all.lists, idx.dim(1), idx.dim(2)});
    call.require_shape(out, {all.lists, all.channels, idx.dim(1), idx.dim(2)});
  }
  require_countable(call, all, features, 1);
  return all;
}

template <typename T>
struct TakeOne {
  Gather all;
  const T* features;
  const void* index;
  bool is_long;
  T* out;

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const I places = static_cast<I>(all.places), row = i / places, list = row / static_cast<I>(all.channels);
    const int64_t at = static_cast<int64_t>(list * places + (i - row * places));
    const int64_t point = is_long ? static_cast<const int64_t*>(index)[at] : static_cast<const int32_t*>(index)[at];
    const bool inside = 0 <= point && point < all.points;
    out[i] = inside ? features[static_cast<int64_t>(row) * all.points + point] : T(0.0f);
  }
};

// (features, idx) -> (out)
inline int gather_forward(Call& call, int axes) {
  const Tensor features = call.tensor("features", 3), idx = call.tensor_of("index", "idx", 1 + axes);
  const Tensor out = call.tensor("out", 2 + axes);
  const Gather all = require_gather(call, features, idx, out, axes);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    with_type<int32_t, int64_t>(idx, [&](auto index) {
      using Index = typename decltype(index)::type;
      if (call.on_cpu()) {
        require_points<Index>(call, idx, features);
        const GatherOnCpu<1, T, Index> body{all, features.as<T>(), idx.as<Index>(), nullptr, out.as<T>()};
        on_cpu(call, body.items(), body, body.cost());
      } else {
        const TakeOne<T> body{all, features.as<T>(), idx.data, sizeof(Index) == 8, out.as<T>()};
        on_gpu(call, out.size, std::max(out.size, features.size), body);
      }
    });
  });
}

template <typename T>
struct TermOfPlace {
  Gather all;
  const T* dout;

  MSOPS_BOTH Compute<T> operator()(int64_t list, int64_t channel, int64_t place) const {
    return Compute<T>(dout[(list * all.channels + channel) * all.places + place]);
  }
};

// (idx, dout, features, scratch) -> (dfeatures): `features` gives its shape alone.
inline int gather_backward(Call& call, int axes) {
  const Tensor idx = call.tensor_of("index", "idx", 1 + axes), dout = call.tensor("dout", 2 + axes);
  const Tensor features = call.tensor("features", 3), dfeatures = call.tensor("dfeatures", 3);
  const Tensor scratch = call.tensor_of("int32", "scratch", 1);
  const Gather all = require_gather(call, features, idx, dout, axes);
  call.require_same_shape(dfeatures, features);
  call.require_shape(scratch, {all.lists * scatter_scratch(all.points, all.places)});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    with_type<int32_t, int64_t>(idx, [&](auto index) {
      using Index = typename decltype(index)::type;
      if (call.on_cpu()) {
        require_points<Index>(call, idx, features);
        const ScatterOnCpu<1, T, Index> body{all, dout.as<T>(), idx.as<Index>(), nullptr, dfeatures.as<T>()};
        on_cpu(call, body.items(), body, body.cost());
      } else {
        const Inverse inverse =
            invert(call, all.lists, all.points, all.places, idx.as<const Index>(), scratch.as<int32_t>());
        scatter_add(call, inverse, all.channels, ChannelOrder::kFirst, TermOfPlace<T>{all, dout.as<T>()},
                    dfeatures.as<T>());
      }
    });
  });
}

}  // namespace msops
