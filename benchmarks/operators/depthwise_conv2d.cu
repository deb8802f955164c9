// out[n, c, y, x] = bias[c] + sum over a, b of weight[c, a, b] * x[n, c, y s - p + a, x s - p + b]

#include "../naive.h"

namespace {

struct Convolution {
  int n, channels, height, width, kernel, stride, padding, out_height, out_width;
  explicit Convolution(const int64_t* s)
      : n(s[0]),
        channels(s[1]),
        height(s[2]),
        width(s[3]),
        kernel(s[4]),
        stride(s[5]),
        padding(s[6]),
        out_height((height + 2 * padding - kernel) / stride + 1),
        out_width((width + 2 * padding - kernel) / stride + 1) {}
};

template <typename T>
__global__ void depthwise(const T* x, const T* weight, const T* bias, T* out, Convolution s) {
  const int i = thread();
  if (i >= s.n * s.channels * s.out_height * s.out_width) return;
  const int column = i % s.out_width, row = i / s.out_width % s.out_height;
  const int image = i / (s.out_width * s.out_height), c = image % s.channels;
  float total = float(bias[c]);
  for (int a = 0; a < s.kernel; ++a)
    for (int b = 0; b < s.kernel; ++b) {
      const int h = row * s.stride - s.padding + a, w = column * s.stride - s.padding + b;
      if (h >= 0 && h < s.height && w >= 0 && w < s.width)
        total += float(weight[(c * s.kernel + a) * s.kernel + b]) * float(x[(image * s.height + h) * s.width + w]);
    }
  out[i] = T(total);
}

template <typename T>
__global__ void depthwise_dx(const T* weight, const T* dout, T* dx, Convolution s) {
  const int i = thread();
  if (i >= s.n * s.channels * s.height * s.width) return;
  const int w = i % s.width, h = i / s.width % s.height, image = i / (s.width * s.height), c = image % s.channels;
  float total = 0;
  for (int a = 0; a < s.kernel; ++a)
    for (int b = 0; b < s.kernel; ++b) {
      const int row = h + s.padding - a, column = w + s.padding - b;
      if (row < 0 || column < 0 || row % s.stride || column % s.stride) continue;
      if (row / s.stride < s.out_height && column / s.stride < s.out_width)
        total += float(weight[(c * s.kernel + a) * s.kernel + b]) *
                 float(dout[(image * s.out_height + row / s.stride) * s.out_width + column / s.stride]);
    }
  dx[i] = T(total);
}

// Each tap of each channel has a thread, and each channel's bias has one more.
template <typename T>
__global__ void depthwise_dweight(const T* x, const T* dout, T* dweight, T* dbias, Convolution s) {
  const int i = thread(), taps = s.kernel * s.kernel, c = i / (taps + 1), tap = i % (taps + 1);
  if (c >= s.channels) return;
  float total = 0;
  for (int n = 0; n < s.n; ++n)
    for (int row = 0; row < s.out_height; ++row)
      for (int column = 0; column < s.out_width; ++column) {
        const float d = float(dout[((n * s.channels + c) * s.out_height + row) * s.out_width + column]);
        const int h = row * s.stride - s.padding + tap / s.kernel, w = column * s.stride - s.padding + tap % s.kernel;
        if (tap == taps)
          total += d;
        else if (h >= 0 && h < s.height && w >= 0 && w < s.width)
          total += d * float(x[((n * s.channels + c) * s.height + h) * s.width + w]);
      }
  if (tap == taps)
    dbias[c] = T(total);
  else
    dweight[c * taps + tap] = T(total);
}

template <typename T>
void depthwise_conv2d_forward(T** a, const int64_t* sizes, cudaStream_t stream) {
  const Convolution s(sizes);
  const int outputs = s.n * s.channels * s.out_height * s.out_width;
  depthwise<<<blocks(outputs), kThreads, 0, stream>>>(a[0], a[1], a[2], a[3], s);
}

template <typename T>
void depthwise_conv2d_backward(T** a, const int64_t* sizes, cudaStream_t stream) {
  const Convolution s(sizes);
  const int inputs = s.n * s.channels * s.height * s.width, sums = s.channels * (s.kernel * s.kernel + 1);
  depthwise_dx<<<blocks(inputs), kThreads, 0, stream>>>(a[1], a[2], a[3], s);
  depthwise_dweight<<<blocks(sums), kThreads, 0, stream>>>(a[0], a[2], a[4], a[5], s);
}

}  // namespace

EXPORT(depthwise_conv2d_forward)
EXPORT(depthwise_conv2d_backward)
