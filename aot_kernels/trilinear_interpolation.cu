// out[n] = sum over the cube's corners of their weight * feats[n, corner]. With (u, v, w) = (points[n] + 1) / 2, corner
// 4 iu + 2 iv + iw has the weight (iu ? u : 1 - u) (iv ? v : 1 - v) (iw ? w : 1 - w).

#include "common/pack.h"
#include "common/sum.h"

#ifdef __CUDACC__
#include <cuda_pipeline.h>
#endif
using namespace msops;

namespace {

constexpr int kCorners = 8;

// Sides are the weights of a cube's near and far side, along each of the three directions.
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
  // Returns d corner(c) / d points[n][d]: along d, the far side's weight grows by 1/2 and the near side's shrinks by as
  // much.
  MSOPS_BOTH C slope(int d, int corner) const {
    const C sign = corner >> (2 - d) & 1 ? C(0.5) : C(-0.5);
    return sign * side((d + 1) % 3, corner) * side((d + 2) % 3, corner);
  }
};

// Index i is a pack of N neighbouring features of one point or, if lanes share the corners of a row of kPacks packs,
// one of kShares lanes, of which lane k sums over corners k, k + kShares and so on.
template <int N, int kPacks, int kShares, typename T>
struct Forward {
  int64_t features;
  const T *feats, *points;
  T* out;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const Index row_length = static_cast<Index>(features), packs = kShares == 1 ? row_length / N : Index(kPacks);
    const Index n = i / (packs * kShares), lane = i - n * (packs * kShares);
    const Index k = kShares == 1 ? 0 : lane / packs, f = (lane - k * packs) * N;
    const T* from = feats + (n * kCorners + k) * row_length + f;
    Pack<T, N> values[kCorners / kShares];
    for (int c = 0; c < kCorners / kShares; ++c) values[c] = load<N>(from + c * kShares * row_length);
    const Sides<Compute<T>> sides(points + n * 3);
    Compute<T> sums[N] = {};
    for (int c = 0; c < kCorners / kShares; ++c)
      for (int j = 0; j < N; ++j)
        sums[j] += sides.corner(c * kShares + static_cast<int>(k)) * Compute<T>(values[c].values[j]);
    Pack<T, N> result;
    for (int j = 0; j < N; ++j) result.values[j] = T(team_sum<kPacks * kShares, kPacks>(sums[j]));
    if (k == 0) store(out + n * row_length + f, result);
  }
};

// Index i is one lane of the team that works on one point. A pack holds the rows of kRows neighbouring corners (or a
// part of one row, if kRows is 1). kLanes lanes take turns along the rows. There are kShares groups of so many lanes,
// which take turns along the corners.
template <int N, int kRows, int kLanes, int kShares, typename T>
struct Backward {
  int64_t features;
  const T *feats, *points, *dout;
  T *dfeats, *dpoints;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    constexpr int kTeam = kLanes * kShares, kPacks = kCorners / (kRows * kShares), kFeatures = N / kRows;
    const Index row_length = kRows > 1 ? Index(kFeatures) : static_cast<Index>(features);
    const Index n = i / kTeam;
    const int lane = static_cast<int>(i % kTeam), first = lane / kLanes * kRows;
    const Sides<Compute<T>> sides(points + n * 3);
    ShortSum<T> products[kPacks][kRows];  // of each corner's features and the gradient
    for (Index f = lane % kLanes * kFeatures; f < row_length; f += kLanes * kFeatures) {
      const Index at = (n * kCorners + first) * row_length + f, step = kRows * kShares * row_length;
      const Pack<T, kFeatures> gradient = load<kFeatures>(dout + n * row_length + f);
      Pack<T, N> values[kPacks];
      for (int p = 0; p < kPacks; ++p) values[p] = load<N>(feats + at + p * step);
      for (int p = 0; p < kPacks; ++p) {
        Pack<T, N> result;
        for (int r = 0; r < kRows; ++r) {
          const Compute<T> weight = sides.corner(p * kRows * kShares + first + r);
          Compute<T> product = 0;
          for (int j = 0; j < kFeatures; ++j) {
            const Compute<T> d = Compute<T>(gradient.values[j]);
            result.values[r * kFeatures + j] = T(weight * d);
            product += Compute<T>(values[p].values[r * kFeatures + j]) * d;
          }
          products[p][r] += product;
        }
        store(dfeats + at + p * step, result);
      }
    }
    Compute<T> sums[3] = {};
    for (int p = 0; p < kPacks; ++p)
      for (int r = 0; r < kRows; ++r)
        for (int d = 0; d < 3; ++d) sums[d] += sides.slope(d, p * kRows * kShares + first + r) * products[p][r].total();
    for (int d = 0; d < 3; ++d) {
      const Compute<T> sum = team_sum<kTeam>(sums[d]);
      if (lane == 0) dpoints[n * 3 + d] = T(sum);
    }
  }
};

#ifdef __CUDACC__
// Where packs do not tile the rows, a block moves the rows of `count` points, which together are whole packs, through
// shared memory. Small blocks were best: one loads while others compute.
constexpr int kTileThreads = 64;

template <typename T>
struct PointTile {
  static constexpr int64_t kBytes = 12 << 10, kMost = 48 << 10;
  int64_t n;
  int features, count;

  // Returns the bytes of one point: the corners' features and weights, the gradient, the point, and its gradient.
  static int64_t bytes(int64_t features) {
    return ((kCorners + 1) * features + 2 * 3) * static_cast<int64_t>(sizeof(T)) +
           kCorners * static_cast<int64_t>(sizeof(Compute<T>));
  }
  static bool fits(int64_t features, std::initializer_list<const T*> pointers) {
    bool fits = bytes(features) <= kMost;
    for (const T* p : pointers) fits &= is_aligned<kPackWidth<T>>(p);
    return fits;
  }
  // A tile has a multiple of `at_once` points, which the block's threads work on at once, if these fit.
  PointTile(int64_t n, int64_t features, int64_t at_once) : n(n), features(static_cast<int>(features)) {
    const int64_t most = std::min((n + 511) / 512, kBytes / bytes(features));
    const int64_t whole = std::max<int64_t>(1, (most + at_once - 1) / at_once) * at_once;
    count = static_cast<int>(whole * bytes(features) <= kMost ? whole : 1);
  }

  __device__ int64_t first() const { return static_cast<int64_t>(blockIdx.x) * count; }
  __device__ int points() const { return static_cast<int>(n - first() < count ? n - first() : count); }
};

// Copies packs to shared memory, without waiting for them.
template <typename T>
__device__ void start_copy(T* to, const T* from, int size) {
  constexpr int N = kPackWidth<T>;
  for (int at = threadIdx.x * N; at < size; at += kTileThreads * N)
    __pipeline_memcpy_async(to + at, from + at, sizeof(Pack<T, N>));
  __pipeline_commit();
}

template <typename T>
__global__ void __launch_bounds__(kTileThreads)
    forward_tile(PointTile<T> tile, const T* feats, const T* points, T* out) {
  using C = Compute<T>;
  using Weights = Pack<C, kPackWidth<C>>;
  extern __shared__ __align__(16) char memory[];
  const int thread = threadIdx.x, count = tile.points(), features = tile.features, row = kCorners * features;
  const int64_t first = tile.first();
  T* values = reinterpret_cast<T*>(memory);
  C* weights = reinterpret_cast<C*>(values + tile.count * row);
  start_copy(values, feats + first * row, count * row);
  for (int k = thread; k < count * kCorners; k += kTileThreads)
    weights[k] = Sides<C>(points + (first + k / kCorners) * 3).corner(k % kCorners);
  __pipeline_wait_prior(0);
  __syncthreads();
  const int points_apart = kTileThreads / features, features_apart = kTileThreads % features;
  int point = thread / features, f = thread % features;
  for (int at = thread; at < count * features; at += kTileThreads) {
    C weight[kCorners], sum = 0;
    for (int c = 0; c < kCorners; c += kPackWidth<C>)
      *reinterpret_cast<Weights*>(weight + c) = load<kPackWidth<C>>(weights + point * kCorners + c);
    for (int c = 0; c < kCorners; ++c) sum += weight[c] * C(values[point * row + c * features + f]);
    out[first * features + at] = T(sum);
    point += points_apart, f += features_apart;
    if (f >= features) f -= features, ++point;
  }
}

template <int kLanes, int kShares, typename T>
__global__ void __launch_bounds__(kTileThreads)
    backward_tile(PointTile<T> tile, const T* feats, const T* points, const T* dout, T* dfeats, T* dpoints) {
  constexpr int N = kPackWidth<T>;
  extern __shared__ __align__(16) char memory[];
  const int thread = threadIdx.x, count = tile.points(), features = tile.features, row = kCorners * features;
  const int64_t first = tile.first();
  T* values = reinterpret_cast<T*>(memory);  // the features, then their gradients
  T* gradients = values + tile.count * row;
  T *places = gradients + tile.count * features, *dplaces = places + tile.count * 3;
  start_copy(values, feats + first * row, count * row);
  for (int k = thread; k < count * features; k += kTileThreads) gradients[k] = dout[first * features + k];
  for (int k = thread; k < count * 3; k += kTileThreads) places[k] = points[first * 3 + k];
  __pipeline_wait_prior(0);
  __syncthreads();
  const Backward<1, 1, kLanes, kShares, T> body{features, values, places, gradients, values, dplaces};
  constexpr int kTeams = 32 / (kLanes * kShares);  // of a warp, which works on as many points at once
  for (int k = thread; k / 32 * kTeams < count; k += kTileThreads) body(static_cast<uint32_t>(k));
  __syncthreads();
  for (int at = thread * N; at < count * row; at += kTileThreads * N)
    store(dfeats + first * row + at, load<N>(values + at));
  for (int k = thread; k < count * 3; k += kTileThreads) dpoints[first * 3 + k] = dplaces[k];
}

template <typename T, typename... Arrays>
void launch_tiles(Call& call, const PointTile<T>& tile, void (*kernel)(PointTile<T>, Arrays*...), Arrays*... arrays) {
  if (tile.n == 0) return;
  const int64_t blocks = (tile.n - 1) / tile.count + 1;
  launch(call, kernel, blocks, kTileThreads, tile.count * PointTile<T>::bytes(tile.features), tile, arrays...);
}
#endif

// On the CPU, index i is one point, and loops along its features vectorize.
template <typename T>
struct ForwardOfPoint {
  int64_t features;
  const T *feats, *points;
  T* out;

  // It is inlined, since a call would take as long as a point of few features.
  MSOPS_CPU __attribute__((always_inline)) void operator()(int64_t n) const {
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
    if (call.is_on_cpu()) {
      const ForwardOfPoint<T> body{features, feats.as<T>(), points.as<T>(), out.as<T>()};
      return on_cpu(call, n, body, static_cast<double>(kCorners * features));
    }
#ifdef __CUDACC__
    // Shorter rows, and wider elements, are as fast without tiles.
    if constexpr (sizeof(T) == 2)
      if (features % 2 != 0 && features > 16 && PointTile<T>::fits(features, {feats.as<T>()}))
        return launch_tiles(call, PointTile<T>(n, features, 1), forward_tile<T>, feats.as<const T>(),
                            points.as<const T>(), out.as<T>());
#endif
    const int64_t each = kCorners * features;  // elements of a point
    const bool huge = each > kLargest32;       // then there are no packs: a kernel of 64 bits exists only for N = 1
    with_width<T>(huge, features, {feats.as<T>(), out.as<T>()}, [&](auto width) {
      constexpr int N = width;
      const auto launch = [&](auto packs, auto shares) {
        constexpr int kPacks = packs, kShares = shares;
        in_runs(n, each, [&](int64_t first, int64_t count) {
          const Forward<N, kPacks, kShares, T> body{features, feats.as<T>() + first * each, points.as<T>() + first * 3,
                                                    out.as<T>() + first * features};
          const int64_t threads = count * features / N * kShares;
          on_gpu_if_huge<N == 1>(huge, call, threads, body);
        });
      };
      // Lanes that would read fewer than 64 neighbouring bytes share the corners, which are neighbours, too.
      if constexpr (N == kPackWidth<T>) {
        if (features == N) return launch(Constant<1>{}, Constant<4>{});
        if (features == 2 * N) return launch(Constant<2>{}, Constant<2>{});
      }
      launch(Constant<1>{}, Constant<1>{});
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
    if (call.is_on_cpu()) {
      const double cost = static_cast<double>(2 * kCorners * features);
      const T *from = feats.as<T>(), *at = points.as<T>(), *gradient = dout.as<T>();
      T *to = dfeats.as<T>(), *dat = dpoints.as<T>();
      // So few features do not fill vectors.
      return features < 32 ? on_cpu(call, n, Backward<1, 1, 1, 1, T>{features, from, at, gradient, to, dat}, cost)
                           : on_cpu(call, n, BackwardOfPoint<T>{features, from, at, gradient, to, dat}, cost);
    }
    const int64_t each = kCorners * features;  // elements of a point
    const bool huge = each > kLargest32;
    const auto launch = [&](auto width, auto rows, auto lanes, auto shares) {
      constexpr int N = width, kRows = rows;
      constexpr int kLanes = lanes, kShares = shares, kTeam = kLanes * kShares;
      in_runs(n, std::max<int64_t>(each, kTeam), [&](int64_t first, int64_t count) {
        const Backward<N, kRows, kLanes, kShares, T> body{features,
                                                          feats.as<T>() + first * each,
                                                          points.as<T>() + first * 3,
                                                          dout.as<T>() + first * features,
                                                          dfeats.as<T>() + first * each,
                                                          dpoints.as<T>() + first * 3};
        on_gpu_if_huge<N == 1 && kTeam == 32>(huge, call, count * kTeam, body);
      });
    };
    constexpr Constant<1> one;
    constexpr Constant<2> two;
    constexpr Constant<4> four;
    if (huge) return launch(one, one, Constant<32>{}, one);
    // A pack holds whole rows of few features.
    constexpr int kPack = kPackWidth<T>;
    constexpr Constant<kPack> whole;
    if (is_aligned<kPack>(feats.as<T>()) && is_aligned<kPack>(dfeats.as<T>()) && is_aligned<kPack / 2>(dout.as<T>())) {
      if (features == kPack / 2) return launch(whole, two, one, four);
      if constexpr (kPack >= 4)
        if (features == kPack / 4) return launch(whole, four, one, two);
      if constexpr (kPack >= 8)
        if (features == kPack / 8) return launch(whole, Constant<8>{}, one, one);
      if (features == 3) return launch(Constant<3 * kPack>{}, whole, one, Constant<kCorners / kPack>{});
    }
#ifdef __CUDACC__
    if (features % kPack != 0 && PointTile<T>::fits(features, {feats.as<T>(), dfeats.as<T>()})) {
      const auto with_team = [&](auto lanes, auto shares) {
        constexpr int kLanes = lanes, kShares = shares;
        return launch_tiles(call, PointTile<T>(n, features, kTileThreads / (kLanes * kShares)),
                            backward_tile<kLanes, kShares, T>, feats.as<const T>(), points.as<const T>(),
                            dout.as<const T>(), dfeats.as<T>(), dpoints.as<T>());
      };
      return features <= 80 ? with_team(one, Constant<8>{}) : with_team(Constant<32>{}, one);
    }
#endif
    with_width<T>(false, features, {feats.as<T>(), dout.as<T>(), dfeats.as<T>()}, [&](auto width) {
      const int64_t packs = features / width;
      if constexpr (width != kPackWidth<T>) {  // unaligned, or rows too long for tiles
        if (packs <= 2) return launch(width, one, one, four);
        if (packs <= 16) return launch(width, one, Constant<8>{}, two);
        launch(width, one, Constant<32>{}, one);
      } else {
        if (packs <= 1) return launch(width, one, one, four);
        if (packs <= 2) return launch(width, one, two, two);
        if (packs <= 4) return launch(width, one, four, two);
        if (packs <= 8) return launch(width, one, Constant<8>{}, two);
        launch(width, one, Constant<16>{}, two);
      }
    });
  });
}
