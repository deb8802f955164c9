// (i, o, g) = product + bias, new_c = c + sigmoid(i) * elu(g), new_h = tanh(new_c) * sigmoid(o)

#include "../naive.h"

namespace {

__device__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }

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
void lltm_cell_forward(T** a, const int64_t* n, cudaStream_t stream) {
  lltm<<<blocks(n[0] * n[1]), kThreads, 0, stream>>>(a[0], a[1], a[2], a[3], a[4], n[0], n[1]);
}

template <typename T>
void lltm_cell_backward(T** a, const int64_t* n, cudaStream_t stream) {
  lltm_gradient<<<blocks(n[0] * n[1]), kThreads, 0, stream>>>(a[0], a[1], a[2], a[3], a[4], a[5], a[7], n[0], n[1]);
  sum<<<blocks(3 * n[1]), kThreads, 0, stream>>>(a[5], a[6], n[0], 3 * n[1], int64_t(1));  // dbias
}

}  // namespace

EXPORT(lltm_cell_forward)
EXPORT(lltm_cell_backward)
