// The operators as one writes them first: a thread for each element of the result, no tiles, no packs, no scratch.
// What the tuned kernels are measured against. Each function takes float or half arrays, inputs then outputs, and
// sizes.

#include <cuda_fp16.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;

unsigned blocks(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

__device__ int64_t thread() { return int64_t(blockIdx.x) * kThreads + threadIdx.x; }
__device__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// ---- add: out[i] = x[i] + y[i mod m]; m = n without broadcasting, a row's length with it

template <typename T>
__global__ void add(const T* x, const T* y, T* out, int64_t n, int64_t m) {
  const int64_t i = thread();
  if (i < n) out[i] = T(float(x[i]) + float(y[i % m]));
}

// dx[k] = sum over o, i of dout[o, k, i]
template <typename T>
__global__ void sum(const T* dout, T* dx, int64_t outer, int64_t kept, int64_t inner) {
  const int64_t k = thread();
  if (k >= kept) return;
  float total = 0;
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t i = 0; i < inner; ++i) total += float(dout[(o * kept + k) * inner + i]);
  dx[k] = T(total);
}

template <typename T>
void add_forward(T** a, const int64_t* n, cudaStream_t stream) {
  add<<<blocks(n[0]), kThreads, 0, stream>>>(a[0], a[1], a[2], n[0], n[1]);
}

template <typename T>
void add_backward(T** a, const int64_t* n, cudaStream_t stream) {
  sum<<<blocks(n[1]), kThreads, 0, stream>>>(a[0], a[1], n[0], n[1], n[2]);
}

// ---- sigmoid

template <typename T>
__global__ void sigmoid(const T* x, T* y, int64_t n) {
  const int64_t i = thread();
  if (i < n) y[i] = T(sigmoid(float(x[i])));
}

template <typename T>
__global__ void sigmoid_gradient(const T* y, const T* dy, T* dx, int64_t n) {
  const int64_t i = thread();
  if (i < n) dx[i] = T(float(dy[i]) * float(y[i]) * (1 - float(y[i])));
}

template <typename T>
void sigmoid_forward(T** a, const int64_t* n, cudaStream_t stream) {
  sigmoid<<<blocks(n[0]), kThreads, 0, stream>>>(a[0], a[1], n[0]);
}

template <typename T>
void sigmoid_backward(T** a, const int64_t* n, cudaStream_t stream) {
  sigmoid_gradient<<<blocks(n[0]), kThreads, 0, stream>>>(a[0], a[1], a[2], n[0]);
}

// ---- trilinear: out[n, f] = sum over the corners c of weight(n, c) * feats[n, c, f]

template <typename T>
__device__ float side(const T* point, int d, int corner) {
  const float far = (float(point[d]) + 1) / 2;
  return corner >> (2 - d) & 1 ? far : 1 - far;
}

template <typename T>
__global__ void trilinear(const T* feats, const T* points, T* out, int64_t n, int64_t features) {
  const int64_t i = thread(), row = i / features, f = i % features;
  if (row >= n) return;
  const T* p = points + row * 3;
  float total = 0;
  for (int c = 0; c < 8; ++c)
    total += side(p, 0, c) * side(p, 1, c) * side(p, 2, c) * float(feats[(row * 8 + c) * features + f]);
  out[i] = T(total);
}

template <typename T>
__global__ void trilinear_dfeats(const T* points, const T* dout, T* dfeats, int64_t n, int64_t features) {
  const int64_t i = thread(), row = i / features, f = i % features;
  if (row >= n) return;
  const T* p = points + row * 3;
  for (int c = 0; c < 8; ++c)
    dfeats[(row * 8 + c) * features + f] = T(side(p, 0, c) * side(p, 1, c) * side(p, 2, c) * float(dout[i]));
}

template <typename T>
__global__ void trilinear_dpoints(const T* feats, const T* points, const T* dout, T* dpoints, int64_t n,
                                  int64_t features) {
  const int64_t i = thread(), row = i / 3;
  const int d = i % 3, e = (d + 1) % 3, g = (d + 2) % 3;
  if (row >= n) return;
  const T* p = points + row * 3;
  float total = 0;
  for (int c = 0; c < 8; ++c) {
    const float slope = (c >> (2 - d) & 1 ? 0.5f : -0.5f) * side(p, e, c) * side(p, g, c);
    for (int64_t f = 0; f < features; ++f)
      total += slope * float(feats[(row * 8 + c) * features + f]) * float(dout[row * features + f]);
  }
  dpoints[i] = T(total);
}

template <typename T>
void trilinear_forward(T** a, const int64_t* n, cudaStream_t stream) {
  trilinear<<<blocks(n[0] * n[1]), kThreads, 0, stream>>>(a[0], a[1], a[2], n[0], n[1]);
}

template <typename T>
void trilinear_backward(T** a, const int64_t* n, cudaStream_t stream) {
  trilinear_dfeats<<<blocks(n[0] * n[1]), kThreads, 0, stream>>>(a[1], a[2], a[3], n[0], n[1]);
  trilinear_dpoints<<<blocks(n[0] * 3), kThreads, 0, stream>>>(a[0], a[1], a[2], a[4], n[0], n[1]);
}

// ---- depthwise: out[n, c, y, x] = bias[c] + sum over a, b of weight[c, a, b] * x[n, c, y s - p + a, x s - p + b]

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

// A thread for each tap of each channel; one more for each channel's bias.
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
void depthwise_forward(T** a, const int64_t* sizes, cudaStream_t stream) {
  const Convolution s(sizes);
  const int outputs = s.n * s.channels * s.out_height * s.out_width;
  depthwise<<<blocks(outputs), kThreads, 0, stream>>>(a[0], a[1], a[2], a[3], s);
}

template <typename T>
void depthwise_backward(T** a, const int64_t* sizes, cudaStream_t stream) {
  const Convolution s(sizes);
  const int inputs = s.n * s.channels * s.height * s.width, sums = s.channels * (s.kernel * s.kernel + 1);
  depthwise_dx<<<blocks(inputs), kThreads, 0, stream>>>(a[1], a[2], a[3], s);
  depthwise_dweight<<<blocks(sums), kThreads, 0, stream>>>(a[0], a[2], a[4], a[5], s);
}

// ---- LLTM: (i, o, g) = product + bias, new_c = c + sigmoid(i) * elu(g), new_h = tanh(new_c) * sigmoid(o)

struct Gates {
  float i, o, g, elu, new_c;
  template <typename T>
  __device__ Gates(const T* product, const T* bias, const T* c, int64_t row, int64_t column, int64_t hidden) {
    const T* gates = product + row * 3 * hidden;
    i = sigmoid(float(gates[column]) + float(bias[column]));
    o = sigmoid(float(gates[hidden + column]) + float(bias[hidden + column]));
    g = float(gates[2 * hidden + column]) + float(bias[2 * hidden + column]);
    elu = g > 0 ? g : expm1f(g);
    new_c = float(c[row * hidden + column]) + i * elu;
  }
};

template <typename T>
__global__ void lltm(const T* product, const T* bias, const T* c, T* new_h, T* new_c, int64_t batch, int64_t hidden) {
  const int64_t t = thread();
  if (t >= batch * hidden) return;
  const Gates gates(product, bias, c, t / hidden, t % hidden, hidden);
  new_c[t] = T(gates.new_c);
  new_h[t] = T(tanhf(gates.new_c) * gates.o);
}

template <typename T>
__global__ void lltm_gradient(const T* product, const T* bias, const T* c, const T* dnew_h, const T* dnew_c,
                              T* dproduct, T* dc, int64_t batch, int64_t hidden) {
  const int64_t t = thread(), row = t / hidden, column = t % hidden;
  if (row >= batch) return;
  const Gates gates(product, bias, c, row, column, hidden);
  const float tanh_c = tanhf(gates.new_c), dh = float(dnew_h[t]);
  const float d = float(dnew_c[t]) + dh * gates.o * (1 - tanh_c * tanh_c);
  T* to = dproduct + row * 3 * hidden + column;
  to[0] = T(d * gates.elu * gates.i * (1 - gates.i));
  to[hidden] = T(dh * tanh_c * gates.o * (1 - gates.o));
  to[2 * hidden] = T(d * gates.i * (gates.g > 0 ? 1 : gates.elu + 1));
  dc[t] = T(d);
}

template <typename T>
void lltm_forward(T** a, const int64_t* n, cudaStream_t stream) {
  lltm<<<blocks(n[0] * n[1]), kThreads, 0, stream>>>(a[0], a[1], a[2], a[3], a[4], n[0], n[1]);
}

template <typename T>
void lltm_backward(T** a, const int64_t* n, cudaStream_t stream) {
  lltm_gradient<<<blocks(n[0] * n[1]), kThreads, 0, stream>>>(a[0], a[1], a[2], a[3], a[4], a[5], a[7], n[0], n[1]);
  sum<<<blocks(3 * n[1]), kThreads, 0, stream>>>(a[5], a[6], n[0], 3 * n[1], int64_t(1));  // dbias
}

// ---- the device itself

__global__ void nothing() {}

// Chains of multiply-adds that wait for nothing: 2 * kChains * rounds operations a thread.
constexpr int kChains = 8;

__global__ void multiply_add(float* out, int64_t rounds) {
  float x[kChains];
  for (int j = 0; j < kChains; ++j) x[j] = float(threadIdx.x + j);
#pragma unroll 16
  for (int64_t i = 0; i < rounds; ++i)
    for (int j = 0; j < kChains; ++j) x[j] = fmaf(x[j], 0.999f, 0.5f);
  float total = 0;
  for (int j = 0; j < kChains; ++j) total += x[j];
  if (total == -1) out[0] = total;  // never: keeps the compiler from leaving it all out
}

}  // namespace

#define ENTRY extern "C" __attribute__((visibility("default"))) int

// naive_NAME(half, arrays, sizes, stream) launches on arrays of half or float, and returns CUDA's error.
#define EXPORT(NAME)                                                                       \
  ENTRY naive_##NAME(int half, void** arrays, const int64_t* sizes, cudaStream_t stream) { \
    half ? NAME(reinterpret_cast<__half**>(arrays), sizes, stream)                         \
         : NAME(reinterpret_cast<float**>(arrays), sizes, stream);                         \
    return cudaGetLastError();                                                             \
  }

EXPORT(add_forward)
EXPORT(add_backward)
EXPORT(sigmoid_forward)
EXPORT(sigmoid_backward)
EXPORT(trilinear_forward)
EXPORT(trilinear_backward)
EXPORT(depthwise_forward)
EXPORT(depthwise_backward)
EXPORT(lltm_forward)
EXPORT(lltm_backward)

ENTRY naive_nothing(int, void**, const int64_t*, cudaStream_t stream) {
  nothing<<<1, 1, 0, stream>>>();
  return cudaGetLastError();
}

// sizes: blocks, threads of a block, rounds
ENTRY naive_multiply_add(int, void** arrays, const int64_t* sizes, cudaStream_t stream) {
  multiply_add<<<unsigned(sizes[0]), unsigned(sizes[1]), 0, stream>>>(static_cast<float*>(arrays[0]), sizes[2]);
  return cudaGetLastError();
}
