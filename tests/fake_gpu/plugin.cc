// Operators as MindSpore's plugin for GPUs runs them: memory from its pool, numbers copied from the host for each call.
#include <cstdlib>

#include "pool.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {
void* fake_stream();
int cudaMalloc(void** found, size_t bytes);
int cudaFree(void* base);
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream);
int cudaMemcpy(void* to, const void* from, size_t bytes, int kind);
int cudaMemset(void* to, int value, size_t bytes);
int cudaStreamSynchronize(void* stream);
int curandGenerateUniform(void* generator, float* to, size_t n);
int fake_scale(const float* x, const float* number, float* y, int n, void* stream);
}

namespace {

class OfDevice : public mindspore::device::DynamicMemPoolBestFit {
  void* Take(size_t size) override {
    void* found = nullptr;
    cudaMalloc(&found, size);
    return found;
  }
  void Give(void* address) override { cudaFree(address); }
};

class OfHost : public mindspore::device::DynamicMemPoolBestFit {
  void* Take(size_t size) override { return std::malloc(size); }
  void Give(void* address) override { std::free(address); }
};

// MindSpore calls its pools by the virtual base, and a few functions by the class.
mindspore::device::DynamicMemPoolBestFit* const own = new OfDevice;
mindspore::device::DynamicMemPool* const device = own;
mindspore::device::DynamicMemPool* const host = new OfHost;

float* allocate(int n) { return static_cast<float*>(device->AllocTensorMem(n * sizeof(float))); }

}  // namespace

EXPORT float* op_allocate(int n) { return allocate(n); }
EXPORT float* op_allocate_by_class(int n) {
  return static_cast<float*>(own->AllocTensorMem(n * sizeof(float), 0, 0, 0));
}
EXPORT float* op_allocate_on_host(int n) { return static_cast<float*>(host->AllocTensorMem(n * sizeof(float))); }
EXPORT void op_free(float* x) { device->FreeTensorMem(x); }
EXPORT void op_free_on_host(float* x) { host->FreeTensorMem(x); }
EXPORT int op_write(float* to, const float* from, int n) {
  const int error = cudaMemcpyAsync(to, from, n * sizeof(float), 1, fake_stream());
  return error != 0 ? error : cudaStreamSynchronize(fake_stream());
}
EXPORT int op_read(float* to, const float* from, int n) { return cudaMemcpy(to, from, n * sizeof(float), 2); }
EXPORT int op_clear(float* x, int n) { return cudaMemset(x, 0, n * sizeof(float)); }
EXPORT int op_random(float* x, int n) { return curandGenerateUniform(nullptr, x, n); }

// Returns x * number in new memory.
EXPORT float* op_scale(const float* x, float number, int n) {
  float* constant = allocate(1);
  op_write(constant, &number, 1);
  float* y = allocate(n);
  fake_scale(x, constant, y, n, fake_stream());
  device->FreeTensorMem(constant);
  return y;
}

// Returns x * number, as operators do that take the number's memory from CUDA and give it back at once.
EXPORT float* op_scale_by_own_memory(const float* x, float number, int n) {
  void* constant = nullptr;
  cudaMalloc(&constant, sizeof(float));
  op_write(static_cast<float*>(constant), &number, 1);
  float* y = allocate(n);
  fake_scale(x, static_cast<float*>(constant), y, n, fake_stream());
  cudaFree(constant);
  return y;
}

EXPORT int op_take(void** found, size_t bytes) { return cudaMalloc(found, bytes); }
EXPORT int op_give(void* address) { return cudaFree(address); }

// Scales in place by a constant, which is doubled before: the recorded work writes into its own constant.
EXPORT void op_scale_by_changed_constant(float* x, float number, int n) {
  float* constant = allocate(1);
  op_write(constant, &number, 1);
  fake_scale(constant, constant, constant, 1, fake_stream());
  fake_scale(x, constant, x, n, fake_stream());
  device->FreeTensorMem(constant);
}

EXPORT void op_allocate_several(float** found, int count, int n) {
  const std::vector<size_t> sizes(count, n * sizeof(float));
  const auto parts = device->AllocContinuousTensorMem(sizes);
  for (int i = 0; i < count; ++i) found[i] = static_cast<float*>(parts[i]);
}

EXPORT void op_free_except(float* x, float* keep, int n) {
  device->FreePartTensorMems({x}, {keep}, {n * sizeof(float)});
}

EXPORT void op_share(float* x) { device->RecordEvent(0, 1, {{0, x}}, std::make_shared<mindspore::DeviceEvent>()); }
