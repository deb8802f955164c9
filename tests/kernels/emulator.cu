#include <cuda_fp16.h>

#include "common/gpu/cluster.h"
#include "common/gpu/counter.h"
#include "common/gpu/cp_async.h"
#include "common/gpu/ldmatrix.h"
#include "common/gpu/mma.h"
#include "common/launch.h"
#include "common/rows_sums.h"

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

// Counts the blocks in `counter`. Each block waits for all of them.
__global__ void meeting_kernel(unsigned* counter, bool waits) {
  red_release_add(counter);
  while (waits && ld_acquire(counter) < gridDim.x * gridDim.y) {
  }
}

// Adds up the rows of a matrix.
struct SumOfRows {
  static constexpr int kRows = 1;
  Rows<const float> x;

  template <typename Team>
  MSOPS_BOTH auto load(int64_t row, Team&& team) const {
    return loaded(team.load(x[row]));
  }
  template <typename Team, typename Held, typename Sums>
  MSOPS_BOTH void operator()(int64_t, const Team&, const Held& held, Sums& sums) const {
    sums.template add<0>([](float v) { return v; }, std::get<0>(held));
  }
};

template <typename... P>
int run(void (*kernel)(P...), const Grid& grid, int threads, int bytes, const P&... arguments) {
  Call call("Emulated", 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr);
  launch(call, kernel, grid, threads, bytes, arguments...);
  return call.status();
}

extern "C" {
#define EXPORT __attribute__((visibility("default")))
EXPORT void neighbours(const float* x, float* y, bool waits) { run(neighbours_kernel, 1, 128, 512, x, y, waits); }
EXPORT void copies(const float* x, float* y, bool waits) { run(copies_kernel, 1, 128, 0, x, y, waits); }
EXPORT void product(const float* from, float* y) { run(product_kernel, 1, 32, 0, from, y); }
EXPORT void sum(const float* x, float* y) { run(sum_kernel, Grid(8).in_clusters(4), 128, 0, x, y); }
EXPORT int clusters(int blocks) { return clusters_at_once(sum_kernel, Grid(8).in_clusters(blocks), 128, 0); }
EXPORT int count(int64_t x, int64_t y, unsigned* counter) { return run(meeting_kernel, {x, y}, 1, 0, counter, false); }
EXPORT int meet(unsigned* counter) { return run(meeting_kernel, Grid(3, 2).cooperative(), 1, 0, counter, true); }
EXPORT int parts_of_sums(int gpu, const float* x, float* partial, int64_t rows) {
  emulator::gpu = gpu;
  Call call("Emulated", 0, nullptr, nullptr, nullptr, nullptr, &call, nullptr);
  const SumOfRows body{{x, 4}};
  const int64_t parts = for_rows_with_sums<float, 1>(call, rows, {body.x}, body, {partial}, rows);
  emulator::gpu = 0;
  return static_cast<int>(parts);
}
EXPORT int fail_and_count(unsigned* counter) {
  emulator::pending_error = cudaErrorUnknown;
  Call call("Emulated", 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr);
  for (int i = 0; i < 2; ++i) launch(call, meeting_kernel, 1, 1, 0, counter, false);
  return call.status();
}
}
