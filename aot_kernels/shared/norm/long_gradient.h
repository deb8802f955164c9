// The kernel of NormGradient for long rows, see long_rows.h.
#pragma once

#include "gradient.h"
#include "long_rows.h"

namespace msops::norm {

#ifdef __CUDACC__
// LongGradient has what NormGradient computes from the sums over a row: xhat_j = (x_j - mean) r + shift, and
// dx_j = r (g_j - rest - xhat_j along). If kFolds, r is already a factor of `rest` and `along`.
template <typename T, bool kCentred>
struct LongGradient {
  static constexpr bool kFolds = kCentred && sizeof(T) == 2;  // fewer instructions, with more roundings
  float r, along, mean, shift, rest;

  // Takes the sums of u^2 and of u g, where u = x - pivot and, if kCentred, those of u and of g between them.
  template <int kSums>
  __device__ LongGradient(const SumsAbout<float, kSums>& about, float inverse, float eps) {
    const auto& sums = about.sums.of;
    const Normal<T, kCentred> normal(about.pivot, sums[0] * inverse, kCentred ? sums[1] * inverse : 0, 1, eps);
    r = normal.r, mean = about.pivot, shift = normal.shift;
    rest = kCentred ? sums[kSums - 1] * inverse : 0;
    along = r * (sums[kCentred ? 2 : 1] * inverse) + shift * rest;
    if constexpr (kFolds) along *= r, rest *= r;
  }
  __device__ float normal(float x) const {
    if constexpr (!kCentred) return x * r;
    return (x - mean) * r + shift;
  }
  __device__ float operator()(float xhat, float g) const {
    if constexpr (kFolds) return r * g - (xhat * along + rest);
    return r * ((kCentred ? g - rest : g) - xhat * along);
  }
};

template <typename T>
constexpr int kGradientStages = sizeof(T) == 2 ? 2 : 3;  // as many as leave room for two blocks of 512 threads, or one

// There are `size` elements in all rows.
template <typename T, bool kCentred, bool kAdds>
__global__ void __launch_bounds__(1024, 1) long_gradient_kernel(int64_t size, NormGradient<T, kCentred, kAdds> body,
                                                                PartialSums<float, 1 + kCentred> partial) {
  constexpr int N = kPackWidth<T>, kSums = 2 + 2 * kCentred, kStages = kGradientStages<T>;
  extern __shared__ Bytes16 stages[];
  __shared__ SharedOfLongRows shared;
  if (!has_instructions_of(90)) return;
  const unsigned part = blockIdx.x / cluster_nctarank(), parts = gridDim.x / cluster_nctarank();
  LongRows<T, 2, kStages, kCentred> team(shared, stages, body.x.columns);
  int64_t offset = part * body.x.columns;  // of the row
  const int64_t step = parts * body.x.columns;
  const auto begin = [&](int ahead) { team.begin({body.x.data, body.dy.data}, ahead, offset + ahead * step, size); };
  for (int ahead = 0; ahead < kStages - 1; ++ahead) begin(ahead);
  team.keep(0, [&](int column) { return parameter(body.weight, column) + body.offset; });
  float of_weight[kLongPacks][N] = {}, of_bias[kLongPacks][N] = {};
  for (; offset < size; offset += step, team.advance()) {
    begin(kStages - 1);
    Pack<T, N> added[kLongPacks];
    if constexpr (kAdds) team.each([&](int i, int column) { added[i] = load<N>(body.added.data + offset + column); });
    team.wait();

    float sums[kSums] = {}, pivot = 0;
    if constexpr (kCentred) pivot = team.pivot();
    team.each([&](int i, int) {
      float v[N], g[N], f[N];
      team.load(v, 0, i), team.load(g, 1, i), team.load_kept(f, 0, i);
      for (int k = 0; k < N; ++k) {
        const float u = v[k] - pivot, of_g = g[k] * f[k];
        sums[0] += u * u;
        if constexpr (kCentred) {
          sums[1] += u, sums[2] += u * of_g, sums[3] += of_g;
        } else {
          sums[1] += u * of_g;
        }
      }
    });
    const auto gradient = team.over_cluster(
        sums, pivot, [&](const auto& all) { return LongGradient<T, kCentred>(all, body.inverse, body.eps); });
    team.each([&](int i, int column) {
      float v[N], d[N], f[N];
      team.load(v, 0, i), team.load(d, 1, i), team.load_kept(f, 0, i);
      for (int k = 0; k < N; ++k) {
        const float xhat = gradient.normal(v[k]);
        f[k] = gradient(xhat, d[k] * f[k]);
        if constexpr (kAdds) f[k] += added[i].values[k];
        of_weight[i][k] += d[k] * xhat;
        if constexpr (kCentred) of_bias[i][k] += d[k];
      }
      store_at_once(body.dx.data + offset + column, rounded_pack<T>(f));
    });
  }
  const auto store_sums = [&](int sum, const float (&of_columns)[kLongPacks][N]) {
    team.each([&](int i, int column) {
      Pack<float, N> pack;
      for (int k = 0; k < N; ++k) pack.values[k] = of_columns[i][k];
      store(partial.row(sum, part).data + column, pack);
    });
  };
  store_sums(0, of_weight);
  if constexpr (kCentred) store_sums(1, of_bias);
}

// Runs the gradient of rows that packs tile, with sums in at most `parts` rows of scratch. Returns how many of these it
// filled, or 0 if the GPU does not have what it takes.
template <typename T, bool kCentred, bool kAdds>
int64_t long_gradient(Call& call, int64_t rows, const NormGradient<T, kCentred, kAdds>& body, int64_t parts,
                      float* const (&sums)[2]) {
  const int64_t columns = body.x.columns;
  PartialSums<float, 1 + kCentred> partial{{}, columns};
  std::copy_n(sums, 1 + kCentred, partial.data);
  [[maybe_unused]] static FactOfGpu<kLongKeys> fact;
  return launch_long_rows<T>(call, long_gradient_kernel<T, kCentred, kAdds>, columns,
                             long_places<T>(2, kGradientStages<T>, 1), std::min(parts, rows), fact, rows * columns,
                             body, partial);
}
#endif

}  // namespace msops::norm
