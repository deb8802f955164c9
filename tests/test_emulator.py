"""Tests the emulator of a GPU: its instructions, and that it shows when a kernel does not wait."""

import ctypes

import numpy as np
import pytest

import emulator

SOURCE = r"""
#include <cuda_fp16.h>

#include "common/gpu/cluster.h"
#include "common/gpu/cp_async.h"
#include "common/gpu/ldmatrix.h"
#include "common/gpu/mma.h"

using namespace msops;

// Each thread reads what its neighbour wrote.
__global__ void neighbours_kernel(const float* x, float* y, bool waits) {
  extern __shared__ float shared[];
  shared[threadIdx.x] = x[threadIdx.x];
  if (waits) __syncthreads();
  y[threadIdx.x] = shared[(threadIdx.x + 1) % blockDim.x];
}

__global__ void copies_kernel(const float* x, float* y, bool waits) {
  __shared__ float shared[128];
  shared[threadIdx.x] = 0;
  cp_async<4>(shared + threadIdx.x, x + threadIdx.x);
  cp_async_commit();
  if (waits) cp_async_wait<0>();
  y[threadIdx.x] = shared[threadIdx.x];
}

// Adds up a block by shuffles, and the blocks of a cluster through their shared memory.
__global__ void sum_kernel(const float* x, float* y) {
  __shared__ alignas(16) float sums[4];
  float sum = x[blockIdx.x * blockDim.x + threadIdx.x];
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  cluster_arrive_wait();
  float all = 0;
  for (unsigned block = 0; block < cluster_nctarank(); ++block) {
    const auto pack = ld_shared_cluster(sums, block);
    for (const float value : pack.values) all += value;
  }
  cluster_arrive_wait();
  if (threadIdx.x == 0) y[blockIdx.x] = all;
}

// y = a b for a of 16 x 16 and b of 16 x 8, both float16.
__global__ void product_kernel(const float* from, float* y) {
  __shared__ alignas(16) uint16_t a[16][16], b[16][8];
  const unsigned lane = threadIdx.x;
  for (unsigned i = lane; i < 256; i += 32) a[i / 16][i % 16] = __half_as_ushort(__float2half_rn(from[i]));
  for (unsigned i = lane; i < 128; i += 32) b[i / 8][i % 8] = __half_as_ushort(__float2half_rn(from[256 + i]));
  __syncwarp();
  uint32_t of_a[4], of_b[4];
  float sums[4] = {};
  ldmatrix_x4(of_a, shared_address(&a[lane % 16][lane / 16 * 8]));
  ldmatrix_x4_trans(of_b, shared_address(b[lane % 16]));
  mma_m16n8k16(sums, of_a, {of_b[0], of_b[1]});
  for (unsigned i = 0; i < 4; ++i) y[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}

extern "C" {
#define EXPORT __attribute__((visibility("default")))
EXPORT void neighbours(const float* x, float* y, bool waits) { neighbours_kernel<<<1, 128, 512>>>(x, y, waits); }
EXPORT void copies(const float* x, float* y, bool waits) { copies_kernel<<<1, 128>>>(x, y, waits); }
EXPORT void product(const float* from, float* y) { product_kernel<<<1, 32>>>(from, y); }
EXPORT void sum(const float* x, float* y) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {4, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(8), config.blockDim = dim3(128), config.attrs = &attribute, config.numAttrs = 1;
  cudaLaunchKernelEx(&config, sum_kernel, x, y);
}
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    source = tmp_path_factory.mktemp("emulated") / "kernels.cu"
    source.write_text(SOURCE)
    return ctypes.CDLL(str(emulator.library(source, source.parent)))


def launch(function, x, size, *rest):
    x, y = np.asarray(x, np.float32), np.full(size, np.nan, np.float32)
    function(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), *rest)
    return y


@pytest.mark.parametrize("kernel", ["neighbours", "copies"])
def test_missing_wait_shows(library, kernel):
    x = np.arange(1, 129)
    want = np.roll(x, -1) if kernel == "neighbours" else x
    assert (launch(library[kernel], x, 128, True) == want).all()
    assert (launch(library[kernel], x, 128, False) != want).sum() >= 127


def test_clusters(library):
    x = np.arange(1024)
    np.testing.assert_array_equal(launch(library["sum"], x, 8), np.repeat(x.reshape(2, 512).sum(1), 4))


def test_product_of_matrices(library):
    a, b = np.random.default_rng(0).integers(-8, 9, (2, 16, 16)) / 4
    np.testing.assert_array_equal(launch(library["product"], np.r_[a.ravel(), b[:, :8].ravel()], (16, 8)), a @ b[:, :8])
