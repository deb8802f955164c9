// These functions compute the depthwise convolution on the CPU, except for the widest dilations, strides and paddings.
//
// A tile of an image is copied in the type of computation, with zeros where the padding is, and with positions side by
// side whose distance is the stride. In the copy, each tap of the kernel meets neighbouring inputs in neighbouring
// outputs, at an offset of its own. Since rows of results have the stride of the copy's rows, all rows of a tile are
// one long row; what is computed between two rows of results is not used.
#pragma once

#include <algorithm>
#include <numeric>

#include "convolution.h"
#include "cpu_strips.h"
#include "cpu_tiles.h"

namespace msops::depthwise::cpu {

constexpr int kMostStride = 16;  // larger ones leave most of the input unread

// Reads is what one direction of a tile reads. There is a copy for each class of taps: tap k is of class k % period,
// and its input for output o is position o + k / period * shift of the class.
struct Reads {
  int64_t copies, period, shift, reach;

  static Reads forward(const Axis& axis) {
    const int64_t common = std::gcd(axis.stride, axis.dilation), period = axis.stride / common;
    const int64_t shift = axis.dilation / common;
    return {std::min(axis.kernel, period), period, shift, (axis.kernel - 1) / period * shift};
  }
};

// Backward, positions of dx whose distance is the stride are results of one convolution of dout, with the taps that
// meet them: tap k meets position stride i + phase in output i + at(phase, k).
struct Meets {
  int64_t stride, pad, dilation, lowest, reach;

  explicit Meets(const Axis& axis) : stride(axis.stride), pad(axis.pad), dilation(axis.dilation) {
    const int64_t first = pad - (axis.kernel - 1) * dilation;  // of phase 0 and the last tap, times the stride
    lowest = first >= 0 ? first / stride : -((stride - 1 - first) / stride);
    reach = (stride - 1 + pad) / stride - lowest;
  }
  bool whole(int64_t phase, int64_t k) const { return (phase + pad - k * dilation) % stride == 0; }
  int64_t at(int64_t phase, int64_t k) const { return (phase + pad - k * dilation) / stride; }
};

// Input makes the copies of x, forward and for the weights' gradient: one for each class of taps in both directions.
struct Input {
  Convolution s;
  Reads h, w;
  Tiling tiling;
  int offsets[kMostTaps];  // of the copy's elements that the first result's taps meet

  explicit Input(const Convolution& convolution)
      : s(convolution), h(Reads::forward(s.h)), w(Reads::forward(s.w)), tiling() {}
  bool fit() {
    if (!tiling.fit(s.h.out, s.w.out, h.copies * w.copies, h.reach, w.reach)) return false;
    for (int64_t tap = 0; tap < s.taps(); ++tap) offsets[tap] = offset(tap / s.w.kernel, tap % s.w.kernel);
    return true;
  }

  template <typename T, typename C>
  MSOPS_CPU void copy(const T* image, const Tile& tile, C* to) const {
    for (int64_t a = 0; a < h.copies; ++a) {
      const Steps rows{s.h.start(tile.row) + a * s.h.dilation, s.h.stride, s.h.in, tiling.rows + h.reach};
      for (int64_t b = 0; b < w.copies; ++b, to += tiling.plane) {
        const Steps columns{s.w.start(tile.column) + b * s.w.dilation, s.w.stride, s.w.in, tiling.pitch};
        if (s.w.stride == 2 && s.w.dilation == 1 && w.copies == 2) {
          copy_pairs(image, s.w.in, rows, columns, to, to + tiling.plane);
          ++b, to += tiling.plane;
        } else {
          cpu::copy(image, s.w.in, rows, columns, to);
        }
      }
    }
    fill_slack(to);
  }

 private:
  int offset(int64_t a, int64_t b) const {
    return static_cast<int>((a % h.period * w.copies + b % w.period) * tiling.plane +
                            a / h.period * h.shift * tiling.pitch + b / w.period * w.shift);
  }
};

// Correlates a tile with taps, which are in the order of their offsets. Returns true if the results are in `out`
// instead of `result`: strips write there where `out` is not null, has numbers of type C, and is as wide as a strip.
// kStride is the largest stride of strips.
template <int kStride, typename T, typename C>
MSOPS_CPU bool correlate_tile(const Convolution& s, int64_t stride, const Tiling& tiling, const Tile& tile,
                              const C* from, const Taps<C>& taps, bool add, C start, C* result, T* out,
                              int64_t out_pitch) {
  if constexpr (std::is_same_v<T, float>) {  // others would take long to compile
    const int64_t strip = add || stride > kStride ? 0 : strip_columns(s.h, s.w);
    if (strip > 0) {
      const bool direct = out && tile.columns >= strip;
      correlate_strips<kStride>(s.h.kernel, stride, from, tile, tiling.pitch, taps, start, direct ? out : result,
                                direct ? out_pitch : tiling.pitch);
      return direct;
    }
  }
  const bool meets_neighbours = s.h.stride == 1 && s.w.stride == 1 && s.h.dilation == 1;
  const Kernel<C> kernel{s.h.kernel, s.w.kernel, s.w.dilation, taps.weights};
  if (add || !meets_neighbours || !correlate_blocks(from, tile, tiling.pitch, kernel, start, result))
    correlate(from, tile.length, taps, add, start, result);
  return false;
}

// Index i is a tile of one image of x, for all kernels that read it.
template <typename T>
struct Forward : Input {
  const T *x, *weight, *bias;
  T* out;

  MSOPS_CPU void operator()(int64_t i) const {
    using C = Compute<T>;
    C input[kRoom + kSlack<C>], result[kRoom + kSlack<C>], weights[kMostTaps];
    const int64_t plane = i / tiling.tiles();
    const Tile tile(tiling, i % tiling.tiles(), s.h.out, s.w.out);
    copy(x + plane * s.h.in * s.w.in, tile, input);
    const Taps<C> taps{static_cast<int>(s.taps()), offsets, weights};
    for (int64_t j = 0; j < s.multiplier; ++j) {
      const int64_t oc = plane % s.channels * s.multiplier + j;
      const C start = bias ? C(bias[oc]) : C(0);
      for (int t = 0; t < taps.count; ++t) weights[t] = C(weight[oc * taps.count + t]);
      T* to = out + ((plane * s.multiplier + j) * s.h.out + tile.row) * s.w.out + tile.column;
      if (correlate_tile<2>(s, s.h.stride, tiling, tile, input, taps, false, start, result, to, s.w.out)) continue;
      for (int64_t r = 0; r < tile.rows; ++r) narrow(result + r * tiling.pitch, to + r * s.w.out, tile.columns);
    }
  }
};

// Index i is a tile of one image of dx. Each of its rows and columns stands for as many results as the stride.
template <typename T>
struct InputGradient {
  Convolution s;
  Meets h, w;
  Tiling tiling;
  const T *weight, *dout;
  T* dx;
  // The taps of phase p = phase_h stride_w + phase_w are those from begin[p] to begin[p + 1], by rising offset.
  int begin[kMostStride * kMostStride + 1] = {}, which[kMostTaps] = {}, offsets[kMostTaps] = {};

  InputGradient(const Convolution& convolution, const T* weights, const T* gradient, T* result)
      : s(convolution), h(s.h), w(s.w), tiling(), weight(weights), dout(gradient), dx(result) {}
  bool fit() {
    const int64_t rows = (s.h.in + s.h.stride - 1) / s.h.stride, columns = (s.w.in + s.w.stride - 1) / s.w.stride;
    if (!tiling.fit(rows, columns, 1, h.reach, w.reach)) return false;
    int found = 0;
    for (int64_t phase = 0; phase < s.h.stride * s.w.stride; ++phase) {
      const int64_t phase_h = phase / s.w.stride, phase_w = phase % s.w.stride;
      for (int64_t tap = s.taps() - 1; tap >= 0; --tap) {
        const int64_t a = tap / s.w.kernel, b = tap % s.w.kernel;
        if (!h.whole(phase_h, a) || !w.whole(phase_w, b)) continue;
        which[found] = static_cast<int>(tap);
        offsets[found++] = static_cast<int>((h.at(phase_h, a) - h.lowest) * tiling.pitch + w.at(phase_w, b) - w.lowest);
      }
      begin[phase + 1] = found;
    }
    return true;
  }

  MSOPS_CPU void operator()(int64_t i) const {
    using C = Compute<T>;
    C gradient[kRoom + kSlack<C>], results[2][kRoom + kSlack<C>], weights[kMostTaps];
    const int64_t plane = i / tiling.tiles(), all_columns = (s.w.in + s.w.stride - 1) / s.w.stride;
    for (int64_t phase_h = 0; phase_h < s.h.stride; ++phase_h)
      for (int64_t phase_w = 0; phase_w < s.w.stride; phase_w += 2) {  // two phases at once
        const int64_t rows = (s.h.in - phase_h + s.h.stride - 1) / s.h.stride;
        const int64_t phases = std::min<int64_t>(2, s.w.stride - phase_w);
        const Tile tile(tiling, i % tiling.tiles(), rows, all_columns);
        T* to = dx + plane * s.h.in * s.w.in + (tile.row * s.h.stride + phase_h) * s.w.in + tile.column * s.w.stride +
                phase_w;
        bool written = false;
        for (int64_t j = 0; j < s.multiplier; ++j) {
          const T* kernel = weight + (plane % s.channels * s.multiplier + j) * s.taps();
          if (s.multiplier > 1 || phase_h + phase_w == 0) {
            copy(dout + (plane * s.multiplier + j) * s.h.out * s.w.out, s.w.out,
                 {tile.row + h.lowest, 1, s.h.out, tiling.rows + h.reach},
                 {tile.column + w.lowest, 1, s.w.out, tiling.pitch}, gradient);
            fill_slack(gradient + tiling.plane);
          }
          for (int64_t p = 0; p < phases; ++p) {
            const int* range = begin + phase_h * s.w.stride + phase_w + p;
            const Taps<C> taps{range[1] - range[0], offsets + range[0], weights};
            for (int t = 0; t < taps.count; ++t) weights[t] = C(kernel[which[range[0] + t]]);
            written = correlate_tile<1>(s, s.h.stride * s.w.stride, tiling, tile, gradient, taps, j > 0, C(0),
                                        results[p], s.multiplier == 1 ? to : nullptr, s.w.in);
          }
        }
        if (written) continue;
        for (int64_t r = 0; r < tile.rows; ++r)
          store(results[0] + r * tiling.pitch, results[1] + r * tiling.pitch, phases, tile,
                s.w.in - tile.column * s.w.stride - phase_w, to + r * s.h.stride * s.w.in);
      }
  }

 private:
  // Stores a row of one or two phases, whose first result is for to[0], and the last one for an element before
  // to[room].
  template <typename C>
  MSOPS_CPU void store(const C* first, const C* second, int64_t phases, const Tile& tile, int64_t room, T* to) const {
    const int64_t step = s.w.stride, most = tile.columns, count = std::min(most, (room + step - 1) / step);
    const int64_t seconds = phases < 2 ? 0 : std::min(most, (room + step - 2) / step);
    if (step == 1) {
      narrow(first, to, count);
    } else if (step == 2) {
#pragma omp simd
      for (int64_t c = 0; c < seconds; ++c) assign(to[2 * c], first[c]), assign(to[2 * c + 1], second[c]);
      for (int64_t c = seconds; c < count; ++c) assign(to[2 * c], first[c]);
    } else {
      for (int64_t c = 0; c < count; ++c) assign(to[c * step], first[c]);
      for (int64_t c = 0; c < seconds; ++c) assign(to[c * step + 1], second[c]);
    }
  }
};

// Index i is a row of `partial` and a kernel, whose sums are over the row's part of all tiles of the batch.
template <typename T>
struct WeightGradient : Input {
  using C = Compute<T>;
  const T *x, *dout;
  int64_t splits;
  C* partial;

  MSOPS_CPU void operator()(int64_t i) const {
    const int64_t kernels = s.channels * s.multiplier, split = i / kernels, oc = i % kernels;
    const int64_t all = s.batch * tiling.tiles();
    const int64_t first = part_begin(all, split, splits), last = part_begin(all, split + 1, splits);
    C* of_bias = partial + split * kernels * (s.taps() + 1) + kernels * s.taps() + oc;
    C* of_taps = of_bias - oc + (oc - kernels) * s.taps();
    if constexpr (std::is_same_v<T, float>)
      if (strip_columns(s.h, s.w) > 0) return by_strips(oc, first, last, of_taps, of_bias);
    by_tiles(oc, first, last, of_taps, of_bias);
  }

 private:
  // Copies a tile of x and returns where the tile of dout begins.
  MSOPS_CPU const T* start_tile(int64_t oc, int64_t n, const Tile& tile, C* input) const {
    copy(x + (n * s.channels + oc / s.multiplier) * s.h.in * s.w.in, tile, input);
    return dout + ((n * s.channels * s.multiplier + oc) * s.h.out + tile.row) * s.w.out + tile.column;
  }

  MSOPS_CPU void by_tiles(int64_t oc, int64_t first, int64_t last, C* of_taps, C* of_bias) const {
    constexpr int kAtOnce = 9;  // taps, of the 16 vector registers
    C input[kRoom + kSlack<C>], gradient[kRoom + kSlack<C>];
    Sum<T> sums[kMostTaps], bias;
    const int taps = static_cast<int>(s.taps());
    for (int64_t at = first; at < last; ++at) {
      const Tile tile(tiling, at % tiling.tiles(), s.h.out, s.w.out);
      const T* d = start_tile(oc, at / tiling.tiles(), tile, input);
      // The copy is zero between two rows, so that the products there are zero, too.
      cpu::copy(d, s.w.out, {0, 1, tile.rows, tile.rows}, {0, 1, tile.columns, tiling.pitch}, gradient);
      fill_slack(gradient + tile.length);
      for (int64_t q = 0; q < tile.length; q += 128)
        bias += sum_of_run(gradient + q, std::min<int64_t>(128, tile.length - q));
      for (int t = 0; t < taps; t += kAtOnce)
        dot_products<kAtOnce>(gradient, input, tile.length, std::min(kAtOnce, taps - t), offsets + t, sums + t);
    }
    for (int t = 0; t < taps; ++t) of_taps[t] = sums[t].total();
    *of_bias = bias.total();
  }

  MSOPS_CPU void by_strips(int64_t oc, int64_t first, int64_t last, C* of_taps, C* of_bias) const {
    C input[kRoom + kSlack<C>];
    Strip<C> d;
    LaneSums<T> sums(static_cast<int>(s.taps()) + 1);
    for (int64_t at = first; at < last; ++at) {
      const Tile tile(tiling, at % tiling.tiles(), s.h.out, s.w.out);
      const T* gradient = start_tile(oc, at / tiling.tiles(), tile, input);
      for (int64_t row = 0; row < tile.rows; row += kStripRows)
        for (int64_t column = 0; column < tile.columns; column += kWidth<C>) {
          // The last strip begins earlier, and has zeros where the one before has been.
          const int64_t rows = std::min(kStripRows, tile.rows - row);
          const int64_t begin = std::min(column, std::max<int64_t>(0, tile.columns - kWidth<C>));
          sums.make_room(rows);
          copy_strip(gradient + row * s.w.out + begin, s.w.out, rows, column - begin, tile.columns - begin, d,
                     sums.plain[s.taps()]);
          const C* image = input + row * tiling.pitch + begin;
          if (s.h.kernel == 3) {
            add_products<3>(d, rows, image, tiling.pitch, h.period, offsets, sums.plain);
          } else {
            add_products<5>(d, rows, image, tiling.pitch, h.period, offsets, sums.plain);
          }
        }
    }
    for (int64_t t = 0; t < s.taps(); ++t) of_taps[t] = sums.total(t);
    *of_bias = sums.total(s.taps());
  }
};

// These return false, and do nothing, if the convolution is not for these kernels.

inline bool takes(const Convolution& s) {
  return s.taps() <= kMostTaps && std::max(s.h.stride, s.w.stride) <= kMostStride && s.channels > 0;
}

// Each number of a tile costs some work of copying, and for each tap a part of a vector's multiplication.
inline double cost(const Convolution& s, const Tiling& tiling) {
  return static_cast<double>(tiling.rows * tiling.columns) * (4 + static_cast<double>(s.taps()) / 4);
}

template <typename T>
bool forward(Call& call, const Convolution& s, const T* x, const T* weight, const T* bias, T* out) {
  Input input(s);
  if (!takes(s) || !input.fit()) return false;
  on_cpu(call, s.batch * s.channels * input.tiling.tiles(), Forward<T>{input, x, weight, bias, out},
         cost(s, input.tiling) * static_cast<double>(s.multiplier));
  return true;
}

template <typename T>
bool input_gradient(Call& call, const Convolution& s, const T* weight, const T* dout, T* dx) {
  if (!takes(s)) return false;
  InputGradient<T> body(s, weight, dout, dx);
  if (!body.fit()) return false;
  on_cpu(call, s.batch * s.channels * body.tiling.tiles(), body,
         cost(s, body.tiling) * static_cast<double>(s.multiplier));
  return true;
}

template <typename T>
bool weight_gradient(Call& call, const Convolution& s, const T* x, const T* dout, Compute<T>* partial, int64_t splits) {
  Input input(s);
  if (!takes(s) || !input.fit()) return false;
  const double tiles = static_cast<double>(s.batch * input.tiling.tiles()) / static_cast<double>(splits);
  on_cpu(call, s.channels * s.multiplier * splits, WeightGradient<T>{input, x, dout, splits, partial},
         cost(s, input.tiling) * tiles);
  return true;
}

}  // namespace msops::depthwise::cpu
