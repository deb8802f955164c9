// out[n][q][m] = sum over levels l and points p of weight[n][q][m][l][p] times value[n][:][m] at
// location[n][q][m][l][p] of level l, which bilinear interpolation takes between the pixels, and its gradients

#include "ms_deform_attn/pixels.h"
#include "ms_deform_attn/rows.h"

using namespace msops;
using namespace msops::ms_deform_attn;

namespace {

struct Inputs {
  Tensor value, shapes, begins, locations, weights;
  Sizes s;

  explicit Inputs(Call& call)
      : value(call.tensor("value", 4)),
        shapes(call.tensor_of("index", "spatial_shapes", 2)),
        begins(call.tensor_of("index", "level_start_index", 1)),
        locations(call.tensor_of("common|float32", "sampling_locations", 6)),
        weights(call.tensor_of("common|float32", "attention_weights", 5)),
        s{value.dim(0), value.dim(1), value.dim(2), value.dim(3), weights.dim(1), weights.dim(3), weights.dim(4)} {}

  void require(Call& call) const {
    call.require_shape(shapes, {s.levels, 2});
    call.require_shape(begins, {s.levels});
    call.require_shape(weights, {s.samples, s.queries, s.heads, s.levels, s.points});
    call.require_shape(locations, {s.samples, s.queries, s.heads, s.levels, s.points, 2});
  }

  // Requires on the CPU that the levels are within the value. On a GPU, what is not has no pixels.
  void require_levels(Call& call) const {
    if (!call.is_on_cpu() || !call.ok()) return;
    const Integers sizes(shapes), firsts(begins);
    for (int64_t l = 0; l < s.levels; ++l) {
      const Level level{sizes[2 * l], sizes[2 * l + 1], firsts[l]};
      call.require(level.is_within(s.pixels), kBadValue,
                   "level %lld has %lld x %lld pixels from %lld on, which are not within the %lld of value",
                   static_cast<long long>(l), static_cast<long long>(level.height), static_cast<long long>(level.width),
                   static_cast<long long>(level.begin), static_cast<long long>(s.pixels));
    }
  }

  int64_t sorted_size() const {
    const int64_t sources = size_of({s.queries, s.levels, s.points});
    return size_of({s.samples, s.heads, scatter_scratch(s.pixels, sources)});
  }

  template <typename T>
  Task<T> task() const {
    return {s, value.as<const T>(), Integers(shapes), Integers(begins), Numbers<T>(locations), Numbers<T>(weights)};
  }
};

// Calls f(Constant<N>{}) with the widest pack, or one element, that tiles features that begin at these pointers.
template <typename T, typename F>
void with_pack(int64_t features, bool huge, std::initializer_list<const T*> pointers, const F& f) {
  bool fits = !huge && features % kPackWidth<T> == 0;
  for (const T* pointer : pointers) fits &= is_aligned<kPackWidth<T>>(pointer);
  fits ? f(Constant<kPackWidth<T>>{}) : f(Constant<1>{});
}

// Calls f(Constant<lanes>{}) with a number of lanes of a team: several where there are few items.
template <typename F>
void with_shares(int64_t items, const F& f) {
  constexpr int64_t kFew = 1 << 18;
  items < kFew ? f(Constant<4>{}) : f(Constant<1>{});
}

}  // namespace

// (value, spatial_shapes, level_start_index, sampling_locations, attention_weights) -> (out)
MSOPS_ENTRY(MsDeformAttnForward) {
  const Inputs in(call);
  const Sizes& s = in.s;
  const Tensor out = call.tensor("out", 3);
  in.require(call);
  call.require_shape(out, {s.samples, s.queries, s.heads * s.features});
  in.require_levels(call);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const Task<T> task = in.task<T>();
    if (out.size == 0) return;
    if (call.is_on_cpu()) {
      const double cost = static_cast<double>(4 * s.of_row() * (s.features + 4));
      return on_cpu(call, s.rows(), ForwardOnCpu<T>{task, out.as<T>()}, cost);
    }
    const bool huge = 4 * out.size > kLargest32;
    const auto launch = [&](auto width, auto shares) {
      constexpr int N = width, kShares = shares;
      on_gpu_if_huge<N == 1>(huge, call, out.size / N * kShares, Forward<N, kShares, T>{task, out.as<T>()});
    };
    with_pack<T>(s.features, huge, {in.value.as<const T>(), out.as<const T>()},
                 [&](auto width) { with_shares(out.size / width, [&](auto shares) { launch(width, shares); }); });
  });
}

// (value, spatial_shapes, level_start_index, sampling_locations, attention_weights, dout, keys, sorted) -> (dvalue,
// dsampling_locations, dattention_weights): `keys` and `sorted` are scratch.
MSOPS_ENTRY(MsDeformAttnBackward) {
  const Inputs in(call);
  const Sizes& s = in.s;
  const Tensor dout = call.tensor("dout", 3), dvalue = call.tensor("dvalue", 4);
  const Tensor dlocations = call.tensor_of("common|float32", "dsampling_locations", 6);
  const Tensor dweights = call.tensor_of("common|float32", "dattention_weights", 5);
  const Tensor keys = call.tensor_of("int32", "keys", 1), sorted = call.tensor_of("int32", "sorted", 1);
  in.require(call);
  call.require_shape(dout, {s.samples, s.queries, s.heads * s.features});
  call.require_same_shape(dvalue, in.value);
  call.require_gradient(dlocations, in.locations);
  call.require_gradient(dweights, in.weights);
  call.require_shape(keys, {in.weights.size});
  call.require_shape(sorted, {in.sorted_size()});
  call.require(s.pixels <= INT32_MAX, kBadShape, "value has more than 2^31 - 1 pixels");
  in.require_levels(call);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const Task<T> task = in.task<T>();
    parallel_for(call, in.weights.size, in.weights.size, FindKeys<T>{task, keys.as<int32_t>()}, 16);
    const Inverse inverse =
        invert(call, s.samples * s.heads, s.pixels, s.sources(), keys.as<const int32_t>(), sorted.as<int32_t>());
    if (!call.ok()) return;
    const BackwardOfRow<1, 1, T> of_row{task, dout.as<const T>(), Numbers<T>(dlocations), Numbers<T>(dweights)};
    const BackwardOfPixel<1, 1, T> of_pixel{task, inverse, dout.as<const T>(), dvalue.as<T>()};
    const int64_t rows = in.weights.size > 0 ? s.rows() : 0;  // without samples, there may be any number of rows
    if (call.is_on_cpu()) {
      on_cpu(call, rows, BackwardOfRowOnCpu<T>{of_row}, static_cast<double>(4 * s.of_row() * (s.features + 4)));
      if (dvalue.size == 0) return;
      const int64_t places = s.samples * s.pixels * s.heads;
      const double samples = static_cast<double>(in.weights.size) / static_cast<double>(places);
      return on_cpu(call, places, BackwardOfPixelOnCpu<T>{of_pixel},
                    (4 * samples + 1) * static_cast<double>(s.features));
    }
    const bool huge = 4 * dvalue.size > kLargest32 || 32 * rows > kLargest32;
    const auto of_rows = [&](auto width, auto lanes) {
      constexpr int N = width, kLanes = lanes;
      const BackwardOfRow<N, kLanes, T> body{task, of_row.dout, of_row.dlocations, of_row.dweights};
      on_gpu_if_huge<N == 1>(huge, call, rows * kLanes, body);
    };
    const auto pixels = [&](auto width, auto shares) {
      constexpr int N = width, kShares = shares;
      const BackwardOfPixel<N, kShares, T> body{task, inverse, of_pixel.dout, of_pixel.dvalue};
      on_gpu_if_huge<N == 1>(huge, call, dvalue.size / N * kShares, body);
    };
    with_pack<T>(s.features, huge, {in.value.as<const T>(), dout.as<const T>(), dvalue.as<const T>()}, [&](auto width) {
      const int64_t packs = s.features / width;
      packs <= 4   ? of_rows(width, Constant<4>{})
      : packs <= 8 ? of_rows(width, Constant<8>{})
                   : of_rows(width, Constant<32>{});
      with_shares(dvalue.size / width, [&](auto shares) { pixels(width, shares); });
    });
  });
}

MSOPS_SCRATCH(MsDeformAttnBackward) {
  const Inputs in(call);
  return {{in.weights.size}, {in.sorted_size()}};
}
