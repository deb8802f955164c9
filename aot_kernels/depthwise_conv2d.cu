// out[n, oc, oh, ow] = bias[oc] + sum over (kh, kw) of
//   weight[oc, 0, kh, kw] * x[n, oc / multiplier, oh sh - top + kh dh, ow sw - left + kw dw],   x being 0 outside

#include <algorithm>
#include <type_traits>

#include "common/scratch.h"
#include "common/sum.h"
#include "depthwise_conv2d/cpu.h"
#include "depthwise_conv2d/gpu.h"

using namespace msops;
using depthwise::Axis;
using depthwise::Convolution;

namespace {

// Range holds the whole numbers q with 0 <= first + step q < length, within [0, count).
template <typename I>
struct Range {
  I begin, end;

  MSOPS_BOTH Range(I first, I step, I length, I count) {
    begin = first < 0 ? (step - 1 - first) / step : 0;
    end = first < length ? (length - 1 - first) / step + 1 : 0;
    if (end > count) end = count;
  }
};

// These bodies take any kernel size, stride, dilation and multiplier, on both devices. An index is one element of the
// result.

template <typename T>
struct Forward {
  Convolution s;
  const T *x, *weight, *bias;
  T* out;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    using I = std::make_signed_t<Index>;
    const I w_out = s.w.out, h_out = s.h.out, w_in = s.w.in, kw = s.w.kernel, dh = s.h.dilation, dw = s.w.dilation;
    const I row = I(i) / w_out, plane = row / h_out, channels_out = s.channels * s.multiplier;
    const I n = plane / channels_out, oc = plane % channels_out, c = oc / I(s.multiplier);
    const I top = s.h.start(row % h_out), left = s.w.start(I(i) % w_out);
    const Range<I> rows(top, dh, s.h.in, s.h.kernel), columns(left, dw, w_in, kw);
    const T* image = x + (n * I(s.channels) + c) * I(s.h.in) * w_in;
    const T* taps = weight + oc * I(s.h.kernel) * kw;
    Compute<T> sum = bias ? Compute<T>(bias[oc]) : 0;
    for (I a = rows.begin; a < rows.end; ++a)
      for (I b = columns.begin; b < columns.end; ++b)
        sum += Compute<T>(taps[a * kw + b]) * Compute<T>(image[(top + a * dh) * w_in + left + b * dw]);
    out[i] = T(sum);
  }
};

template <typename T>
struct InputGradient {
  Convolution s;
  const T *weight, *dout;
  T* dx;

  // Returns the output whose window has its tap k at input position `at`, or -1.
  template <typename I>
  static MSOPS_BOTH I output_at(const Axis& axis, I at, I k) {
    const I distance = at + I(axis.pad) - k * I(axis.dilation), o = distance / I(axis.stride);
    return distance >= 0 && o * I(axis.stride) == distance && o < I(axis.out) ? o : -1;
  }

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    using I = std::make_signed_t<Index>;
    const I w_in = s.w.in, h_in = s.h.in, w_out = s.w.out, h_out = s.h.out, multiplier = s.multiplier;
    const I row = I(i) / w_in, at_w = I(i) % w_in, at_h = row % h_in, plane = row / h_in;
    const I first = plane * multiplier;  // n * channels * multiplier + c * multiplier
    const I first_kernel = plane % I(s.channels) * multiplier;
    Compute<T> sum = 0;
    for (I a = 0; a < I(s.h.kernel); ++a) {
      const I oh = output_at(s.h, at_h, a);
      if (oh < 0) continue;
      for (I b = 0; b < I(s.w.kernel); ++b) {
        const I ow = output_at(s.w, at_w, b);
        if (ow < 0) continue;
        for (I j = 0; j < multiplier; ++j)
          sum += Compute<T>(weight[((first_kernel + j) * I(s.h.kernel) + a) * I(s.w.kernel) + b]) *
                 Compute<T>(dout[((first + j) * h_out + oh) * w_out + ow]);
      }
    }
    dx[i] = T(sum);
  }
};

// Computes one sum of `partial`: for one tap of one kernel or, after all taps, for one bias, over one part of the
// output's rows.
template <typename T>
struct WeightGradient {
  Convolution s;
  int64_t splits;
  const T *x, *dout;
  Compute<T>* partial;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    using I = std::make_signed_t<Index>;
    const I channels_out = s.channels * s.multiplier, taps = s.h.kernel * s.w.kernel;
    const I split = I(i) / (channels_out * (taps + 1)), which = I(i) % (channels_out * (taps + 1));
    const bool is_bias = which >= channels_out * taps;
    const I oc = is_bias ? which - channels_out * taps : which / taps, tap = is_bias ? 0 : which % taps;
    const I a = tap / I(s.w.kernel) * I(s.h.dilation), b = tap % I(s.w.kernel) * I(s.w.dilation);
    const I h_out = s.h.out, w_out = s.w.out, w_in = s.w.in, h_in = s.h.in, stride = s.w.stride;
    const I first = b - I(s.w.pad);
    const Range<I> columns(first, stride, w_in, w_out);
    const I rows = w_out == 0 ? 0 : s.batch * s.h.out, end = part_begin<I>(rows, split + 1, splits);
    Sum<T> sum;
    for (I row = part_begin<I>(rows, split, splits); row < end; ++row) {
      const I n = row / h_out, at_h = s.h.start(row % h_out) + a;
      if (!is_bias && (at_h < 0 || at_h >= h_in)) continue;
      const T* d = dout + ((n * channels_out + oc) * h_out + row % h_out) * w_out;
      const T* line = is_bias ? nullptr : x + ((n * I(s.channels) + oc / I(s.multiplier)) * h_in + at_h) * w_in;
      const I last = is_bias ? w_out : columns.end;
      for (I ow = is_bias ? 0 : columns.begin; ow < last;) {
        constexpr I kRun = 64;  // terms that are summed plainly
        Compute<T> of_run = 0;
        for (const I run_end = ow + kRun < last ? ow + kRun : last; ow < run_end; ++ow)
          of_run += Compute<T>(d[ow]) * (is_bias ? Compute<T>(1) : Compute<T>(line[first + ow * stride]));
        sum += of_run;
      }
    }
    partial[i] = sum.total();
  }
};

// Adds up one column of `partial`, by a team of 2^lane_bits threads: like sum_rows, but in one launch for both
// gradients.
template <typename T>
struct Finish {
  int64_t parts, sums, weights;
  int lane_bits;
  const Compute<T>* partial;
  T *dweight, *dbias;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const Index lanes = Index(1) << lane_bits, k = i >> lane_bits, lane = i & (lanes - 1);
    const Index end = static_cast<Index>(parts), first_bias = static_cast<Index>(weights);
    Sum<T> sum;
    for (Index part = lane; part < end; part += lanes) sum += partial[part * static_cast<Index>(sums) + k];
    Compute<T> total[] = {sum.total()};
    team_sum(total, static_cast<unsigned>(lanes));
    if (lane == 0) (k < first_bias ? dweight[k] : dbias[k - first_bias]) = T(total[0]);
  }
};

// Half of all 32-bit indices are reserved for the positions that kernels address above images. On the GPU, a batch that
// needs more runs in parts.
constexpr int64_t kIndices = 2;

enum PadMode { kValid, kSame, kPad };

// Reads one direction's attributes, and checks that they turn the input's size into the output's.
Axis axis_of(Call& call, const char* name, int64_t in, int64_t out, int64_t kernel, const char* stride,
             const char* dilation, const char* before, const char* after) {
  constexpr int64_t kMost = INT32_MAX;
  Axis axis{in, out, kernel, call.attribute(stride, 1, kMost), call.attribute(dilation, 1, kMost), 0, 0};
  const int64_t mode = call.attribute("pad_mode", kValid, kPad);
  const int64_t given_before = call.attribute(before, 0, kMost), given_after = call.attribute(after, 0, kMost);
  if (!call.ok()) return axis;
  int64_t reach = 0;  // from the first to the last tap
  call.require(kernel >= 1 && !__builtin_mul_overflow(kernel - 1, axis.dilation, &reach) && reach < kMost * 8,
               kBadShape, "weight has a kernel of size %lld", static_cast<long long>(kernel));
  if (!call.ok()) return axis;
  if (mode == kSame) {
    axis.padding = std::max<int64_t>(0, ((in + axis.stride - 1) / axis.stride - 1) * axis.stride + reach + 1 - in);
    axis.pad = axis.padding / 2;
  } else if (mode == kPad) {
    axis.padding = given_before + given_after;
    axis.pad = given_before;
  }
  const int64_t room = in + axis.padding - reach - 1;
  const int64_t expected = room < 0 ? 0 : room / axis.stride + 1;
  call.require(out == expected, kBadShape, "%s has %lld rows or columns, expected %lld", name,
               static_cast<long long>(out), static_cast<long long>(expected));
  return axis;
}

Convolution convolution_of(Call& call, const Tensor& x, const Tensor& weight, const Tensor& out) {
  const int64_t channels = x.dim(1), out_channels = weight.dim(0);
  call.require(channels > 0 ? out_channels > 0 && out_channels % channels == 0 : out_channels == 0, kBadShape,
               "weight has %lld kernels, no multiple of the %lld channels of x", static_cast<long long>(out_channels),
               static_cast<long long>(channels));
  call.require_shape(weight, {out_channels, 1, weight.dim(2), weight.dim(3)});
  call.require_shape(out, {x.dim(0), out_channels, out.dim(2), out.dim(3)});
  const int64_t multiplier = channels > 0 ? out_channels / channels : 1;
  return {
      x.dim(0), channels, multiplier,
      axis_of(call, out.name, x.dim(2), out.dim(2), weight.dim(2), "stride_h", "dilation_h", "pad_top", "pad_bottom"),
      axis_of(call, out.name, x.dim(3), out.dim(3), weight.dim(3), "stride_w", "dilation_w", "pad_left", "pad_right")};
}

}  // namespace

// (x, weight[, bias]) -> (out)
MSOPS_ENTRY(DepthwiseConv2dForward) {
  const Tensor x = call.tensor("x", 4), weight = call.tensor("weight", 4), bias = call.optional("bias", 1);
  const Tensor out = call.tensor("out", 4);
  const Convolution s = convolution_of(call, x, weight, out);
  if (call.has("bias")) call.require_shape(bias, {weight.dim(0)});
  const int64_t samples = std::max<int64_t>(1, s.batch), of_x = x.size / samples, of_out = out.size / samples;
  const int64_t each = std::max(of_x, of_out);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = [&](const Convolution& part, const T* from, T* to) {
      const int64_t largest = part.largest(std::max({part.batch * each, weight.size}));
      if (call.is_on_cpu() && depthwise::cpu::forward(call, part, from, weight.as<T>(), bias.as<T>(), to)) return;
#ifdef __CUDACC__
      if constexpr (!std::is_same<T, double>::value) {
        for (const auto kernel : depthwise::forward_kernels<T>())
          if (!call.is_on_cpu() && kernel(call, part, largest, from, weight.as<T>(), bias.as<T>(), to)) return;
      }
#endif
      const Forward<T> body{part, from, weight.as<T>(), bias.as<T>(), to};
      parallel_for(call, part.batch * of_out, largest, body, static_cast<double>(part.taps()));
    };
    if (call.is_on_cpu()) return run(s, x.as<T>(), out.as<T>());
    in_runs(s.batch, kIndices * each, [&](int64_t first, int64_t count) {
      run(s.part(count), x.as<T>() + first * of_x, out.as<T>() + first * of_out);
    });
  });
}

// (x, weight, dout) -> (dx, dweight[, dbias]; partial). `partial` is scratch: it has a row for each part that the sums
// over batch and positions are split into, with the sums for dweight and then the sums for dbias.
MSOPS_ENTRY(DepthwiseConv2dBackward) {
  const Tensor x = call.tensor("x", 4), weight = call.tensor("weight", 4), dout = call.tensor("dout", 4);
  const Tensor dx = call.tensor("dx", 4), dweight = call.tensor("dweight", 4), dbias = call.optional("dbias", 1);
  const bool has_dbias = call.has("dbias");
  const Tensor partial = call.scratch("partial", 2);
  const Convolution s = convolution_of(call, x, weight, dout);
  const int64_t splits = partial.dim(0), sums = weight.size + weight.dim(0);
  call.require_same_shape(dx, x);
  call.require_same_shape(dweight, weight);
  if (has_dbias) call.require_shape(dbias, {weight.dim(0)});
  call.require(splits >= 1 && splits <= 65535, kBadShape, "partial has %lld rows, expected 1 to 65535",
               static_cast<long long>(splits));
  call.require_shape(partial, {splits, sums});
  const int64_t samples = std::max<int64_t>(1, s.batch), of_x = x.size / samples, of_dout = dout.size / samples;
  const int64_t each = std::max(of_x, of_dout);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const auto run = [&](const Convolution& part, const T* from, const T* gradient, T* to, C* sums_to, int64_t rows) {
      const int64_t largest = part.largest(std::max({part.batch * each, weight.size, rows * sums}));
#ifdef __CUDACC__
      if constexpr (!std::is_same<T, double>::value) {
        for (const auto kernel : depthwise::backward_kernels<T>()) {
          if (call.is_on_cpu()) break;
          const int64_t parts = kernel(call, part, largest, from, weight.as<T>(), gradient, to, sums_to, rows);
          if (parts > 0) return parts;
        }
      }
#endif
      if (!call.is_on_cpu() || !depthwise::cpu::input_gradient(call, part, weight.as<T>(), gradient, to))
        parallel_for(call, part.batch * of_x, largest, InputGradient<T>{part, weight.as<T>(), gradient, to},
                     static_cast<double>(part.taps() * part.multiplier));
      if (!call.is_on_cpu() || !depthwise::cpu::weight_gradient(call, part, from, gradient, sums_to, rows))
        parallel_for(call, rows * sums, largest, WeightGradient<T>{part, rows, from, gradient, sums_to},
                     static_cast<double>(part.batch * part.h.out * part.w.out / rows));
      return rows;
    };
    int64_t parts = 0, runs = 0;
    in_runs(s.batch, kIndices * each, [&](int64_t, int64_t) { ++runs; });
    if (call.is_on_cpu() || runs == 0 || runs > splits) {
      parts = run(s, x.as<T>(), dout.as<T>(), dx.as<T>(), partial.as<C>(), splits);
    } else {
      in_runs(s.batch, kIndices * each, [&](int64_t first, int64_t count) {
        parts += run(s.part(count), x.as<T>() + first * of_x, dout.as<T>() + first * of_dout, dx.as<T>() + first * of_x,
                     partial.as<C>() + parts * sums, (splits - parts) / runs--);
      });
    }
    const int lane_bits = call.is_on_cpu() || parts <= 1 ? 0 : parts <= 8 ? 3 : 5;
    const Finish<T> body{parts, sums, weight.size, lane_bits, partial.as<const C>(), dweight.as<T>(), dbias.as<T>()};
    const int64_t threads = (has_dbias ? sums : weight.size) << lane_bits;
    parallel_for(call, threads, std::max(partial.size, threads), body, static_cast<double>(parts));
  });
}

// There are only so many parts that each multiprocessor of a GPU gets a few blocks, and that each block has enough
// work.
MSOPS_SCRATCH(DepthwiseConv2dBackward) {
  const Tensor x = call.tensor("x", 4), weight = call.tensor("weight", 4), dout = call.tensor("dout", 4);
  const int64_t kernels = weight.dim(0), positions = x.dim(0) * dout.dim(2) * dout.dim(3);
  const int64_t parts = std::min(positions / 4096, 2048 / std::max<int64_t>(1, kernels));
  return {{std::max<int64_t>(1, parts), weight.size + kernels}};
}
