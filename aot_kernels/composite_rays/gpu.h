// A warp composites a ray, tile by tile. Lanes hold neighbouring samples, so that their loads and stores are coalesced;
// a scan over the lanes adds up what the samples absorb.
#pragma once

#include "../common/launch.h"
#include "samples.h"

namespace msops::composite_rays {

constexpr int kWarps = 4;  // of a block; rays end at different times

// A Tile has kEach samples of a lane: sample 32 k + lane.
template <typename T>
struct Tile {
  using C = Compute<T>;
  static constexpr int kEach = sizeof(C) == 8 ? 2 : 4, kSamples = 32 * kEach;
  C rgb[kEach][3], t[kEach], dt[kEach];  // zeros after the end of the ray
  C depth[kEach];                        // sigma dt
  C after[kEach], weight[kEach];         // `after`: what comes through up to and with the sample

  __device__ void load(const Inputs<T>& in, int64_t first, int64_t end) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int64_t sample = first + 32 * k + threadIdx.x % 32;
      const bool is_inside = sample < end;
      dt[k] = is_inside ? C(in.dts[sample]) : C(0);
      depth[k] = is_inside ? C(in.sigmas[sample]) * dt[k] : C(0);
      t[k] = is_inside ? C(in.ts[sample]) : C(0);
      for (int c = 0; c < 3; ++c) rgb[k][c] = is_inside ? C(in.rgbs[3 * sample + c]) : C(0);
    }
  }

  // Computes what the samples absorb, given what those before them did. Returns how many samples count.
  __device__ int absorb(C& before, C threshold) {
    const int lane = threadIdx.x % 32;
    C sums[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) sums[k] = depth[k];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const C earlier = __shfl_up_sync(~0u, sums[k], distance);
        if (lane >= distance) sums[k] += earlier;
      }
    C now = Light<T>::through(before);
    int count = kSamples;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      after[k] = Light<T>::through(before + sums[k]);
      const C of_lane_before = __shfl_up_sync(~0u, after[k], 1), through = lane > 0 ? of_lane_before : now;
      const unsigned dark = __ballot_sync(~0u, through < threshold);
      if (dark != 0 && count == kSamples) count = 32 * k + __ffs(static_cast<int>(dark)) - 1;
      weight[k] = 32 * k + lane < count ? through * Light<T>::absorbed(depth[k]) : C(0);
      before += __shfl_sync(~0u, sums[k], 31);
      now = __shfl_sync(~0u, after[k], 31);
    }
    return count;
  }
};

template <typename T>
struct ForwardOnGpu : Forward<T> {
  using C = Compute<T>;
  using Task = Forward<T>;
  using Task::clear, Task::in, Task::rgb, Task::depth, Task::opacity, Task::weights;

  __device__ void composite(int64_t i, int lane) const {
    const Range range = in.rays.of_ray(i);
    C before = 0, sums[5] = {};
    int64_t first = range.begin;
    for (bool goes_on = true; goes_on && first < range.end; first += Tile<T>::kSamples) {
      Tile<T> tile;
      tile.load(in, first, range.end);
      const int count = tile.absorb(before, in.threshold);
      goes_on = count == Tile<T>::kSamples;
#pragma unroll
      for (int k = 0; k < Tile<T>::kEach; ++k) {
        const int64_t sample = first + 32 * k + lane;
        const C weight = tile.weight[k];
        if (32 * k + lane < count) {  // what does not count adds nothing, not even NaN
          for (int c = 0; c < 3; ++c) sums[c] += weight * tile.rgb[k][c];
          sums[3] += weight * tile.t[k];
        }
        sums[4] += weight;
        if (sample < range.end) assign(weights[sample], weight);
      }
    }
    for (int64_t sample = first + lane; sample < range.end; sample += 32) clear(sample);
    for (int distance = 16; distance > 0; distance /= 2)
      for (C& sum : sums) sum += __shfl_xor_sync(~0u, sum, distance);
    if (lane == 0) {
      for (int c = 0; c < 3; ++c) assign(rgb[3 * i + c], sums[c]);
      assign(depth[i], sums[3]);
      assign(opacity[i], sums[4]);
    }
  }
};

template <typename T>
struct BackwardOnGpu : Backward<T> {
  using C = Compute<T>;
  using Task = Backward<T>;
  using Task::clear, Task::in, Task::drgb, Task::ddepth, Task::dopacity, Task::dweights, Task::dsigmas, Task::drgbs;

  __device__ void composite(int64_t i, int lane) const {
    const Range range = in.rays.of_ray(i);
    const C of_rgb[3] = {C(drgb[3 * i]), C(drgb[3 * i + 1]), C(drgb[3 * i + 2])};
    const C of_depth = C(ddepth[i]), of_opacity = C(dopacity[i]);
    // A sample's density takes light from all behind it: `behind` is the sum of their weights' gradients. With several
    // tiles, a first walk adds up all of them.
    C behind = 0;
    for (int pass = range.size() > Tile<T>::kSamples ? 0 : 1; pass < 2; ++pass) {
      C before = 0;
      int64_t first = range.begin;
      for (bool goes_on = true; goes_on && first < range.end; first += Tile<T>::kSamples) {
        Tile<T> tile;
        C of_weights[Tile<T>::kEach];
        tile.load(in, first, range.end);
        load_gradients(of_weights, first, range.end, lane);
        const int count = tile.absorb(before, in.threshold);
        goes_on = count == Tile<T>::kSamples;
        C inside = 0;
#pragma unroll
        for (int k = 0; k < Tile<T>::kEach; ++k) {
          of_weights[k] += of_opacity + of_depth * tile.t[k];
          for (int c = 0; c < 3; ++c) of_weights[k] += of_rgb[c] * tile.rgb[k][c];
          if (32 * k + lane < count) inside += tile.weight[k] * of_weights[k];
        }
        for (int distance = 16; distance > 0; distance /= 2) inside += __shfl_xor_sync(~0u, inside, distance);
        if (pass == 0) {
          behind += inside;
          continue;
        }
        behind = goes_on && first + Tile<T>::kSamples < range.end ? behind - inside : C(0);
        write(tile, of_weights, of_rgb, behind, first, range.end, count, lane);
      }
      if (pass == 1)
        for (int64_t sample = first + lane; sample < range.end; sample += 32) clear(sample);
    }
  }

 private:
  __device__ void load_gradients(C (&of_weights)[Tile<T>::kEach], int64_t first, int64_t end, int lane) const {
#pragma unroll
    for (int k = 0; k < Tile<T>::kEach; ++k) {
      const int64_t sample = first + 32 * k + lane;
      of_weights[k] = sample < end ? C(dweights[sample]) : C(0);
    }
  }

  // Writes the gradients of a tile, `later` being the sum over the samples behind it.
  __device__ void write(const Tile<T>& tile, const C (&of_weights)[Tile<T>::kEach], const C (&of_rgb)[3], C later,
                        int64_t first, int64_t end, int count, int lane) const {
#pragma unroll
    for (int k = Tile<T>::kEach - 1; k >= 0; --k) {
      const int64_t of_round = first + 32 * k, sample = of_round + lane;
      const bool counts = 32 * k + lane < count;
      C sum = counts ? tile.weight[k] * of_weights[k] : C(0);
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const C next = __shfl_down_sync(~0u, sum, distance);
        if (lane + distance < 32) sum += next;
      }
      const C of_next = __shfl_down_sync(~0u, sum, 1), behind = (lane < 31 ? of_next : C(0)) + later;
      if (sample < end) assign(dsigmas[sample], counts ? tile.dt[k] * (tile.after[k] * of_weights[k] - behind) : C(0));
      later += __shfl_sync(~0u, sum, 0);
      // Lanes write neighbouring numbers: number n is that of channel n % 3 of sample n / 3.
#pragma unroll
      for (int row = 0; row < 3; ++row) {
        const int n = 32 * row + lane, channel = n % 3;
        const C weight = __shfl_sync(~0u, tile.weight[k], n / 3);
        const C of_channel = channel == 0 ? of_rgb[0] : channel == 1 ? of_rgb[1] : of_rgb[2];
        const bool is_counted = 32 * k + n / 3 < count;
        if (of_round + n / 3 < end) assign(drgbs[3 * of_round + n], is_counted ? weight * of_channel : C(0));
      }
    }
  }
};

// Without rays, one warp clears the samples.
template <typename Pass>
__global__ void __launch_bounds__(32 * kWarps) composite_kernel(const Pass pass) {
  const int lane = threadIdx.x % 32;
  const int64_t i = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32, rays = pass.in.rays.rays;
  const int64_t warps = rays > 0 ? rays : 1;
  if (i < rays) pass.composite(i, lane);
  if (i < warps) pass.in.rays.for_others(i, warps, lane, 32, [&](int64_t sample) { pass.clear(sample); });
}

template <typename Pass>
void composite(Call& call, const Pass& pass) {
  const int64_t warps = std::max<int64_t>(1, pass.in.rays.rays);
  launch(call, composite_kernel<Pass>, (warps + kWarps - 1) / kWarps, 32 * kWarps, 0, pass);
}

}  // namespace msops::composite_rays
