// A driver whose device is the CPU, for test_cuda.py.

#include <stdlib.h>
#include <string.h>

typedef unsigned long long CUdeviceptr;
static int initialized, allocations, context;
static __thread void* current;

int cuInit(unsigned int flags) {
  initialized = flags == 0;
  return initialized ? 0 : 1;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return !initialized ? 3 : ordinal < 2 ? 0 : 101;
}
int cuDevicePrimaryCtxRetain(void** made, int device) {
  *made = &context;
  return device < 2 ? 0 : 101;
}
int cuCtxSetCurrent(void* made) {
  current = made;
  return made == &context ? 0 : 201;
}
int cuCtxSynchronize(void) { return !current ? 201 : getenv("ILLEGAL_ADDRESS") ? 700 : 0; }
int cuMemAlloc_v2(CUdeviceptr* pointer, size_t size) {
  if (!current) return 201;
  if (size == 0 || size >> 40) return size ? 2 : 1;
  *pointer = (CUdeviceptr)malloc(size);
  ++allocations;
  return 0;
}
int cuMemFree_v2(CUdeviceptr pointer) {
  if (!current) return 201;
  free((void*)pointer);
  --allocations;
  return 0;
}
int cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t size) {
  if (!current) return 201;
  memcpy((void*)to, from, size);
  return 0;
}
int cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t size) {
  if (!current) return 201;
  memcpy(to, (const void*)from, size);
  return 0;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == 2     ? "out of memory"
          : error == 101 ? "invalid device ordinal"
          : error == 700 ? "an illegal memory access was encountered"
                         : NULL;
  return *text ? 0 : 1;
}
int allocated(void) { return allocations; }
