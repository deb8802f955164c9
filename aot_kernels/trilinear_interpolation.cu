// out[n] = sum over the cube's corners of their weight * feats[n, corner]. With (u, v, w) = (points[n] + 1) / 2, corner
// 4 iu + 2 iv + iw has the weight (iu ? u : 1 - u) (iv ? v : 1 - v) (iw ? w : 1 - w).

#include "common/pack.h"
#include "common/sum.h"

using namespace msops;

namespace {

constexpr int kCorners = 8;

// Along each of the three directions, the weights of a cube's near and far side.
template <typename C>
struct Sides {
  C weight[3][2];

  template <typename T>
  explicit MSOPS_BOTH Sides(const T* point) {
    for (int d = 0; d < 3; ++d) {
      weight[d][1] = (Compute<T>(point[d]) + 1) / 2;
      weight[d][0] = 1 - weight[d][1];
    }
  }
  MSOPS_BOTH C side(int d, int corner) const { return corner >> (2 - d) & 1 ? weight[d][1] : weight[d][0]; }
  MSOPS_BOTH C corner(int corner) const { return side(0, corner) * side(1, corner) * side(2, corner); }
  // d corner(c) / d points[n][d]: along d, the far side's weight grows by 1/2 and the near side's shrinks by as much.
  MSOPS_BOTH C slope(int d, int corner) const {
    const C sign = corner >> (2 - d) & 1 ? C(0.5) : C(-0.5);
    return sign * side((d + 1) % 3, corner) * side((d + 2) % 3, corner);
  }
};

// Index i is a pack of N neighbouring features of one point.
template <int N, typename T>
struct Forward {
  int64_t features;
  const T *feats, *points;
  T* out;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const Index row_length = static_cast<Index>(features), n = i * N / row_length, f = i * N - n * row_length;
    const T* from = feats + n * kCorners * row_length + f;
    Pack<T, N> values[kCorners];
    for (int c = 0; c < kCorners; ++c) values[c] = load<N>(from + c * row_length);
    const Sides<Compute<T>> sides(points + n * 3);
    Compute<T> sums[N] = {};
    for (int c = 0; c < kCorners; ++c)
      for (int j = 0; j < N; ++j) sums[j] += sides.corner(c) * Compute<T>(values[c].values[j]);
    Pack<T, N> result;
    for (int j = 0; j < N; ++j) result.values[j] = T(sums[j]);
    store(out + i * N, result);
  }
};

// Index i is one lane of the team that works on one point; the lanes take turns along the features.
template <int N, int kLanes, typename T>
struct Backward {
  int64_t features;
  const T *feats, *points, *dout;
  T *dfeats, *dpoints;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const Index row_length = static_cast<Index>(features), n = i / kLanes, lane = i % kLanes;
    const Index row = n * kCorners * row_length;
    const Sides<Compute<T>> sides(points + n * 3);
    Sum<T> products[kCorners];  // of each corner's features and the gradient
    for (Index f = lane * N; f < row_length; f += kLanes * N) {
      const Pack<T, N> gradient = load<N>(dout + n * row_length + f);
      Pack<T, N> values[kCorners];
      for (int c = 0; c < kCorners; ++c) values[c] = load<N>(feats + row + c * row_length + f);
      for (int c = 0; c < kCorners; ++c) {
        Pack<T, N> result;
        Compute<T> product = 0;
        for (int j = 0; j < N; ++j) {
          const Compute<T> d = Compute<T>(gradient.values[j]);
          result.values[j] = T(sides.corner(c) * d);
          product += Compute<T>(values[c].values[j]) * d;
        }
        store(dfeats + row + c * row_length + f, result);
        products[c] += product;
      }
    }
    Compute<T> product[kCorners];
    for (int c = 0; c < kCorners; ++c) product[c] = team_sum<kLanes>(products[c].total());
    if (lane > 0) return;
    for (int d = 0; d < 3; ++d) {
      Compute<T> sum = 0;
      for (int c = 0; c < kCorners; ++c) sum += sides.slope(d, c) * product[c];
      dpoints[n * 3 + d] = T(sum);
    }
  }
};

// The same for few features, where a team's lanes would have too little of each corner: every lane takes one pack of
// the 8 * features neighbours that belong to a point, of whichever corners.
template <int N, int kLanes, typename T>
struct BackwardOfFew {
  int64_t features;
  const T *feats, *points, *dout;
  T *dfeats, *dpoints;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const int row_length = static_cast<int>(features), lane = i % kLanes;
    const Index n = i / kLanes, at = n * kCorners * row_length + lane * N;
    const Sides<Compute<T>> sides(points + n * 3);
    Compute<T> sums[3] = {};
    if (lane * N < kCorners * row_length) {
      const Pack<T, N> values = load<N>(feats + at);
      Pack<T, N> result;
      int corner = lane * N / row_length, f = lane * N % row_length;
      for (int j = 0; j < N; ++j) {
        const Compute<T> d = Compute<T>(dout[n * row_length + f]), product = Compute<T>(values.values[j]) * d;
        result.values[j] = T(sides.corner(corner) * d);
        for (int k = 0; k < 3; ++k) sums[k] += sides.slope(k, corner) * product;
        if (++f == row_length) f = 0, ++corner;
      }
      store(dfeats + at, result);
    }
    for (int k = 0; k < 3; ++k) {
      const Compute<T> sum = team_sum<kLanes>(sums[k]);
      if (lane == 0) dpoints[n * 3 + k] = T(sum);
    }
  }
};

// On the CPU: index i is one point, and loops along its features vectorize.
template <typename T>
struct ForwardOfPoint {
  int64_t features;
  const T *feats, *points;
  T* out;

  MSOPS_CPU void operator()(int64_t n) const {
    const T *from[kCorners], *point = points + n * 3;
    const Sides<Compute<T>> sides(point);
    Compute<T> weight[kCorners];
    for (int c = 0; c < kCorners; ++c) weight[c] = sides.corner(c), from[c] = feats + (n * kCorners + c) * features;
#pragma omp simd
    for (int64_t f = 0; f < features; ++f) {
      Compute<T> sum = 0;
      for (int c = 0; c < kCorners; ++c) sum += weight[c] * Compute<T>(from[c][f]);
      assign(out[n * features + f], sum);
    }
  }
};

template <typename T>
struct BackwardOfPoint {
  int64_t features;
  const T *feats, *points, *dout;
  T *dfeats, *dpoints;

  MSOPS_CPU void operator()(int64_t n) const {
    constexpr int64_t kRun = 256;  // features whose products are summed plainly
    const Sides<Compute<T>> sides(points + n * 3);
    Sum<T> products[kCorners];  // of each corner's features and the gradient
    for (int64_t f = 0; f < features; f += kRun) {
      const int64_t length = features - f < kRun ? features - f : kRun;
      const T* gradient = dout + n * features + f;
      for (int c = 0; c < kCorners; ++c) {
        const Compute<T> weight = sides.corner(c);
        const int64_t at = (n * kCorners + c) * features + f;
        Compute<T> product[kRun];
#pragma omp simd
        for (int64_t j = 0; j < length; ++j) {
          const Compute<T> d = Compute<T>(gradient[j]);
          assign(dfeats[at + j], weight * d);
          product[j] = Compute<T>(feats[at + j]) * d;
        }
        products[c] += sum_of_run(product, length);
      }
    }
    for (int d = 0; d < 3; ++d) {
      Compute<T> sum = 0;
      for (int c = 0; c < kCorners; ++c) sum += sides.slope(d, c) * products[c].total();
      dpoints[n * 3 + d] = T(sum);
    }
  }
};

}  // namespace

// (feats, points) -> (out)
MSOPS_ENTRY(TrilinearInterpolationForward) {
  const Tensor feats = call.tensor("feats", 3), points = call.tensor("points", 2), out = call.tensor("out", 2);
  const int64_t n = feats.dim(0), features = feats.dim(2);
  call.require_shape(feats, {n, kCorners, features});
  call.require_shape(points, {n, 3});
  call.require_shape(out, {n, features});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    if (call.on_cpu()) {
      const ForwardOfPoint<T> body{features, feats.as<T>(), points.as<T>(), out.as<T>()};
      return on_cpu(call, n, body, static_cast<double>(kCorners * features));
    }
    with_width<T>(false, features, {feats.as<T>(), out.as<T>()}, [&](auto width) {
      constexpr int N = decltype(width)::value;
      on_gpu(call, out.size / N, feats.size, Forward<N, T>{features, feats.as<T>(), points.as<T>(), out.as<T>()});
    });
  });
}

// (feats, points, dout) -> (dfeats, dpoints)
MSOPS_ENTRY(TrilinearInterpolationBackward) {
  const Tensor feats = call.tensor("feats", 3), points = call.tensor("points", 2), dout = call.tensor("dout", 2);
  const Tensor dfeats = call.tensor("dfeats", 3), dpoints = call.tensor("dpoints", 2);
  const int64_t n = feats.dim(0), features = feats.dim(2);
  call.require_shape(feats, {n, kCorners, features});
  call.require_shape(points, {n, 3});
  call.require_shape(dout, {n, features});
  call.require_same_shape(dfeats, feats);
  call.require_same_shape(dpoints, points);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    if (call.on_cpu()) {
      if (features < 32) {  // too few for vectors
        const Backward<1, 1, T> body{features,     feats.as<T>(),  points.as<T>(),
                                     dout.as<T>(), dfeats.as<T>(), dpoints.as<T>()};
        return on_cpu(call, n, body, static_cast<double>(2 * kCorners * features));
      }
      const BackwardOfPoint<T> body{features,     feats.as<T>(),  points.as<T>(),
                                    dout.as<T>(), dfeats.as<T>(), dpoints.as<T>()};
      return on_cpu(call, n, body, static_cast<double>(2 * kCorners * features));
    }
    const auto launch = [&](auto lanes, const auto& body) {
      constexpr int kLanes = decltype(lanes)::value;
      on_gpu(call, n * kLanes, std::max({feats.size, points.size, n * kLanes}), body);
    };
    constexpr int kPack = kPackWidth<T>;
    const bool few =
        0 < features && features < 4 * kPack && is_aligned<kPack>(feats.as<T>()) && is_aligned<kPack>(dfeats.as<T>());
    if (few) {
      with_lanes<1, 2, 4, 8, 16, 32>(kCorners * features / kPack, [&](auto lanes) {
        launch(lanes, BackwardOfFew<kPack, decltype(lanes)::value, T>{features, feats.as<T>(), points.as<T>(),
                                                                      dout.as<T>(), dfeats.as<T>(), dpoints.as<T>()});
      });
      return;
    }
    with_width<T>(false, features, {feats.as<T>(), dout.as<T>(), dfeats.as<T>()}, [&](auto width) {
      constexpr int N = decltype(width)::value;
      with_lanes<1, 4, 32>(features / N, [&](auto lanes) {
        launch(lanes, Backward<N, decltype(lanes)::value, T>{features, feats.as<T>(), points.as<T>(), dout.as<T>(),
                                                             dfeats.as<T>(), dpoints.as<T>()});
      });
    });
  });
}
