// y[i] = 1 / (1 + e^-x[i])

#include "../naive.h"

namespace {

template <typename T>
__global__ void sigmoid(const T* x, T* y, int64_t n) {
  const int64_t i = thread();
  if (i < n) y[i] = T(1 / (1 + expf(-float(x[i]))));
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

}  // namespace

EXPORT(sigmoid_forward)
EXPORT(sigmoid_backward)
