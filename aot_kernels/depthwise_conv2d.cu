// out[n, oc, oh, ow] = bias[oc] + sum over (kh, kw) of
//   weight[oc, 0, kh, kw] * x[n, oc / multiplier, oh sh - top + kh dh, ow sw - left + kw dw],   x being 0 outside

#include <algorithm>
#include <type_traits>

#include "common/sum.h"

using namespace msops;

namespace {

// One spatial direction.
struct Axis {
  int64_t in, out, kernel, stride, dilation;
  int64_t pad, padding;  // before the first element, and altogether

  int64_t largest() const { return in + padding + dilation * kernel + stride; }

  // Where the window of output o begins in the input; may be negative.
  template <typename I>
  MSOPS_BOTH I start(I o) const {
    return o * static_cast<I>(stride) - static_cast<I>(pad);
  }
};

struct Shape {
  int64_t batch, channels, multiplier;
  Axis h, w;

  int64_t taps() const { return h.kernel * w.kernel; }
  // No index of the kernels is larger; padded coordinates included.
  int64_t largest(int64_t sizes) const { return std::max({sizes, h.largest(), w.largest()}); }
};

// The whole numbers q with 0 <= first + step q < length, at most [0, count).
template <typename I>
struct Range {
  I begin, end;

  MSOPS_BOTH Range(I first, I step, I length, I count) {
    begin = first < 0 ? (step - 1 - first) / step : 0;
    end = first < length ? (length - 1 - first) / step + 1 : 0;
    if (end > count) end = count;
  }
};

// ---- Any kernel size, stride, dilation and multiplier, both devices: an index is one element of the result. ----

template <typename T>
struct Forward {
  Shape s;
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
  Shape s;
  const T *weight, *dout;
  T* dx;

  // The output whose window has its tap k at input position `at`, or -1.
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

// One sum of `partial`: of one tap of one kernel, or (behind all of those) of one bias, over one part of the output's
// rows.
template <typename T>
struct WeightGradient {
  Shape s;
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
    const I rows = s.batch * s.h.out, end = part_begin<I>(rows, split + 1, splits);
    Sum<T> sum;
    for (I row = part_begin<I>(rows, split, splits); row < end; ++row) {
      const I n = row / h_out, at_h = s.h.start(row % h_out) + a;
      const T* d = dout + ((n * channels_out + oc) * h_out + row % h_out) * w_out;
      Compute<T> of_row = 0;
      if (is_bias) {
#pragma omp simd reduction(+ : of_row)
        for (I ow = 0; ow < w_out; ++ow) of_row += Compute<T>(d[ow]);
      } else if (at_h >= 0 && at_h < h_in) {
        const T* line = x + ((n * I(s.channels) + oc / I(s.multiplier)) * h_in + at_h) * w_in;
#pragma omp simd reduction(+ : of_row)
        for (I ow = columns.begin; ow < columns.end; ++ow)
          of_row += Compute<T>(d[ow]) * Compute<T>(line[first + ow * stride]);
      }
      sum += of_row;
    }
    partial[i] = sum.total();
  }
};

// ---- GPU, square kernels of K = 3, 5 or 7 with stride S = 1 or 2, no dilation, multiplier 1. A thread walks down
// kRows rows and keeps the K x K window that the rows share in registers; neighbouring threads take neighbouring
// columns. ----

#ifdef __CUDACC__

constexpr int kRows = 8;

template <int K, int S, typename T>
struct FastForward {
  Shape s;
  int strips;  // of kRows output rows
  const T *x, *weight, *bias;
  T* out;

  template <typename Index>
  __device__ void operator()(Index i) const {
    const int w_out = s.w.out, h_out = s.h.out, w_in = s.w.in, h_in = s.h.in;
    const int ow = i % w_out, strip = i / w_out % strips, plane = i / w_out / strips, oc = plane % int(s.channels);
    const int left = ow * S - int(s.w.pad);
    const T* image = x + static_cast<Index>(plane) * h_in * w_in;
    const auto load_row = [&](int row, float (&values)[K]) {
      for (int b = 0; b < K; ++b) {
        const int column = left + b;
        const bool inside = row >= 0 && row < h_in && column >= 0 && column < w_in;
        values[b] = inside ? float(image[row * w_in + column]) : 0;
      }
    };
    float taps[K][K], window[K][K];
    for (int a = 0; a < K; ++a)
      for (int b = 0; b < K; ++b) taps[a][b] = weight[(oc * K + a) * K + b];
    const float start = bias ? float(bias[oc]) : 0;
    int top = strip * kRows * S - int(s.h.pad);
    for (int a = S; a < K; ++a) load_row(top + a - S, window[a]);
    const int rows = min(kRows, h_out - strip * kRows);
    T* to = out + (static_cast<Index>(plane) * h_out + strip * kRows) * w_out + ow;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) break;
      for (int a = 0; a < K - S; ++a)
        for (int b = 0; b < K; ++b) window[a][b] = window[a + S][b];
      for (int a = K - S; a < K; ++a) load_row(top + a, window[a]);
      float sum = start;
      for (int a = 0; a < K; ++a)
        for (int b = 0; b < K; ++b) sum += taps[a][b] * window[a][b];
      to[r * w_out] = T(sum);
      top += S;
    }
  }
};

// All three gradients from one reading of x and dout. In coordinates of the padded input, position S q + a (a < S)
// meets tap a + S t in the output at q - t, whatever the padding: a thread takes the S x S inputs at each q of its
// column, for which it needs dout at (q - t, q' - u) for t, u < kReach. One block: one channel, one part of all
// columns' strips.
template <int K, int S, typename T>
__global__ void __launch_bounds__(kThreads)
    fast_backward_kernel(Shape s, int q_rows, int q_columns, int strips, const T* x, const T* weight, const T* dout,
                         T* dx, float* partial) {
  constexpr int kReach = (K - 1) / S + 1, kSums = K * K + 1;
  const int w_out = s.w.out, h_out = s.h.out, w_in = s.w.in, h_in = s.h.in, channels = s.channels;
  const int c = blockIdx.x, split = blockIdx.y, splits = gridDim.y;
  float taps[K][K], sums[kSums] = {};  // the last one is of the bias
  for (int a = 0; a < K; ++a)
    for (int b = 0; b < K; ++b) taps[a][b] = weight[(c * K + a) * K + b];
  const int tasks = s.batch * strips * q_columns, end = part_begin(tasks, split + 1, splits);
  for (int task = part_begin(tasks, split, splits) + threadIdx.x; task < end; task += kThreads) {
    const int column = task % q_columns, strip = task / q_columns % strips, n = task / q_columns / strips;
    const T* image = x + (n * channels + c) * h_in * w_in;
    T* to = dx + (n * channels + c) * h_in * w_in;
    const T* gradient = dout + (n * channels + c) * h_out * w_out;
    const auto load_row = [&](int q, float (&values)[kReach]) {
      for (int u = 0; u < kReach; ++u) {
        const bool inside = q >= 0 && q < h_out && column - u >= 0 && column - u < w_out;
        values[u] = inside ? float(gradient[q * w_out + column - u]) : 0;
      }
    };
    float window[kReach][kReach];  // [t][u]
    for (int t = 0; t < kReach - 1; ++t) load_row(strip * kRows - 1 - t, window[t]);
    const int q_end = min(q_rows, (strip + 1) * kRows);
    for (int q = strip * kRows; q < q_end; ++q) {
      for (int t = kReach - 1; t > 0; --t)
        for (int u = 0; u < kReach; ++u) window[t][u] = window[t - 1][u];
      load_row(q, window[0]);
      sums[K * K] += window[0][0];
      for (int a = 0; a < S; ++a) {
        for (int b = 0; b < S; ++b) {
          const int row = S * q + a - int(s.h.pad), at = S * column + b - int(s.w.pad);
          const bool inside = row >= 0 && row < h_in && at >= 0 && at < w_in;
          const float value = inside ? float(image[row * w_in + at]) : 0;
          float sum = 0;
          for (int t = 0; a + S * t < K; ++t) {
            for (int u = 0; b + S * u < K; ++u) {
              sum += taps[a + S * t][b + S * u] * window[t][u];
              sums[(a + S * t) * K + b + S * u] += value * window[t][u];
            }
          }
          if (inside) to[row * w_in + at] = T(sum);
        }
      }
    }
  }
  __shared__ float of_warp[kThreads / 32][kSums];
  for (int k = 0; k < kSums; ++k) {
    const float sum = team_sum<32>(sums[k]);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32][k] = sum;
  }
  __syncthreads();
  float* to = partial + static_cast<int64_t>(split) * channels * kSums;
  for (int k = threadIdx.x; k < kSums; k += kThreads) {
    float sum = 0;
    for (int warp = 0; warp < kThreads / 32; ++warp) sum += of_warp[warp][k];
    to[k < K * K ? c * K * K + k : channels * K * K + c] = sum;
  }
}

template <int K, int S>
struct Fast {
  static constexpr int kernel = K, stride = S;
};

// Calls `f(Fast<K, S>{})` if the convolution is one that the kernels above take; false if not.
template <typename T, typename F>
bool with_fast(const Call& call, const Shape& s, int64_t largest, F&& f) {
  const int64_t k = s.h.kernel, stride = s.h.stride;
  if (call.on_cpu() || std::is_same<T, double>::value || largest > kLargest32 || s.multiplier != 1 || s.w.kernel != k ||
      s.w.stride != stride || s.h.dilation != 1 || s.w.dilation != 1)
    return false;
  if constexpr (!std::is_same<T, double>::value) {
    if (k == 3 && stride == 1) return f(Fast<3, 1>{}), true;
    if (k == 3 && stride == 2) return f(Fast<3, 2>{}), true;
    if (k == 5 && stride == 1) return f(Fast<5, 1>{}), true;
    if (k == 5 && stride == 2) return f(Fast<5, 2>{}), true;
    if (k == 7 && stride == 1) return f(Fast<7, 1>{}), true;
    if (k == 7 && stride == 2) return f(Fast<7, 2>{}), true;
  }
  return false;
}

#endif

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

Shape shape_of(Call& call, const Tensor& x, const Tensor& weight, const Tensor& out) {
  const int64_t channels = x.dim(1), out_channels = weight.dim(0);
  call.require(out_channels == 0 || (channels > 0 && out_channels % channels == 0), kBadShape,
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
  const bool has_bias = call.attribute("has_bias", 0, 1);
  const Tensor x = call.tensor("x", 4), weight = call.tensor("weight", 4);
  const Tensor bias = has_bias ? call.tensor("bias", 1) : Tensor{};
  const Tensor out = call.tensor("out", 4);
  const Shape s = shape_of(call, x, weight, out);
  if (has_bias) call.require_shape(bias, {weight.dim(0)});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t largest = s.largest(std::max({x.size, weight.size, out.size}));
#ifdef __CUDACC__
    const bool launched = with_fast<T>(call, s, largest, [&](auto fast) {
      using F = decltype(fast);
      const int strips = static_cast<int>((s.h.out + kRows - 1) / kRows);
      const FastForward<F::kernel, F::stride, T> body{s, strips, x.as<T>(), weight.as<T>(), bias.as<T>(), out.as<T>()};
      parallel_for(call, s.batch * s.channels * strips * s.w.out, largest, body);
    });
    if (launched) return;
#endif
    const Forward<T> body{s, x.as<T>(), weight.as<T>(), bias.as<T>(), out.as<T>()};
    parallel_for(call, out.size, largest, body, static_cast<double>(s.taps()));
  });
}

// (x, weight, dout) -> (dx, dweight[, dbias], partial). `partial` is scratch: a row for each part that the sums over
// batch and positions are split into, with the sums for dweight and then those for dbias.
MSOPS_ENTRY(DepthwiseConv2dBackward) {
  const bool has_bias = call.attribute("has_bias", 0, 1);
  const Tensor x = call.tensor("x", 4), weight = call.tensor("weight", 4), dout = call.tensor("dout", 4);
  const Tensor dx = call.tensor("dx", 4), dweight = call.tensor("dweight", 4);
  const Tensor dbias = has_bias ? call.tensor("dbias", 1) : Tensor{};
  const Tensor partial = call.scratch("partial", 2);
  const Shape s = shape_of(call, x, weight, dout);
  const int64_t splits = partial.dim(0), sums = weight.size + weight.dim(0);
  call.require_same_shape(dx, x);
  call.require_same_shape(dweight, weight);
  if (has_bias) call.require_shape(dbias, {weight.dim(0)});
  call.require(splits >= 1 && splits <= 65535, kBadShape, "partial has %lld rows, expected 1 to 65535",
               static_cast<long long>(splits));
  call.require_shape(partial, {splits, sums});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const int64_t largest = s.largest(std::max({x.size, weight.size, dout.size, partial.size}));
    bool launched = false;
#ifdef __CUDACC__
    const int64_t q_rows = std::max(s.h.out, (s.h.in + s.h.pad - 1) / s.h.stride + 1);
    const int64_t q_columns = std::max(s.w.out, (s.w.in + s.w.pad - 1) / s.w.stride + 1);
    const int64_t strips = (q_rows + kRows - 1) / kRows;
    launched = with_fast<T>(call, s, std::max(largest, s.batch * strips * q_columns), [&](auto fast) {
      constexpr int K = decltype(fast)::kernel, S = decltype(fast)::stride;
      if (s.channels == 0) return;
      const dim3 grid(static_cast<unsigned>(s.channels), static_cast<unsigned>(splits));
      fast_backward_kernel<K, S, T><<<grid, kThreads, 0, call.stream()>>>(
          s, q_rows, q_columns, strips, x.as<T>(), weight.as<T>(), dout.as<T>(), dx.as<T>(), partial.as<float>());
      call.check_launch();
    });
#endif
    if (!launched) {
      parallel_for(call, dx.size, largest, InputGradient<T>{s, weight.as<T>(), dout.as<T>(), dx.as<T>()},
                   static_cast<double>(s.taps() * s.multiplier));
      parallel_for(call, partial.size, largest, WeightGradient<T>{s, splits, x.as<T>(), dout.as<T>(), partial.as<C>()},
                   static_cast<double>(s.batch * s.h.out * s.w.out / splits));
    }
    sum_rows(call, splits, weight.size, sums, partial.as<const C>(), dweight.as<T>());
    if (has_bias) sum_rows(call, splits, weight.dim(0), sums, partial.as<const C>() + weight.size, dbias.as<T>());
  });
}
