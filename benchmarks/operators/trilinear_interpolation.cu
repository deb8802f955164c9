// out[n, f] = sum over the corners c of weight(n, c) * feats[n, c, f]

#include "../naive.h"

namespace {

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
void trilinear_interpolation_forward(T** a, const int64_t* n, cudaStream_t stream) {
  trilinear<<<blocks(n[0] * n[1]), kThreads, 0, stream>>>(a[0], a[1], a[2], n[0], n[1]);
}

template <typename T>
void trilinear_interpolation_backward(T** a, const int64_t* n, cudaStream_t stream) {
  trilinear_dfeats<<<blocks(n[0] * n[1]), kThreads, 0, stream>>>(a[1], a[2], a[3], n[0], n[1]);
  trilinear_dpoints<<<blocks(n[0] * 3), kThreads, 0, stream>>>(a[0], a[1], a[2], a[4], n[0], n[1]);
}

}  // namespace

EXPORT(trilinear_interpolation_forward)
EXPORT(trilinear_interpolation_backward)
