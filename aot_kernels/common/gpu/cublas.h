// Cublas multiplies by cuBLAS, the one that the process has: MindSpore's and PyTorch's GPU packages load it.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <map>
#include <mutex>
#include <string>

#include "../dtype.h"

namespace msops {

// Returns a library of CUDA 11 to 13, such as "libcublas.so", that the process has, else one that it can load, or null.
inline void* library_of_cuda(const char* name) {
  void* library = nullptr;
  for (int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW})
    for (const char* version : {".13", ".12", ".11"})
      if (!library) library = dlopen((std::string(name) + version).c_str(), flags);
  return library;
}

// Sets a pointer to a function of a library. Returns whether the library has it.
template <typename F>
bool find_function(void* library, const char* name, F*& function) {
  function = reinterpret_cast<F*>(dlsym(library, name));
  return function != nullptr;
}

// The numbers of cudaDataType for double, float and half.
template <typename T>
constexpr int kCudaType = sizeof(T) == 8   ? 1
                          : sizeof(T) == 4 ? 0
                                           : 2;

// The numbers of cublasComputeType_t.
constexpr int kComputeFloat = 68, kComputeDouble = 70, kComputeTf32 = 77;

// This class declares the few functions and constants of cuBLAS 11 to 13 that it needs, since nvcc can lack the
// headers.
class Cublas {
 public:
  // Calls `f(cublas, handle)` with the current device's handle on the stream, one thread at a time. Returns what `f`
  // returns, or false if there is no handle.
  template <typename F>
  static bool with_handle(cudaStream_t stream, F&& f) {
    static Cublas cublas;
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    int device = 0;
    if (!cublas.multiply_ || cudaGetDevice(&device) != cudaSuccess) return false;
    void*& handle = cublas.handles_[device];
    if (!handle && cublas.create_(&handle) != 0) return false;
    return cublas.set_stream_(handle, stream) == 0 && f(cublas, handle);
  }

  // sums (n, m) = scale * numbers times weights, or this is added to sums of R, which is T or Compute<T>. The weights
  // are (m, k) if `transposed`, else (k, m); the numbers are (k, n) if `by_columns`, else (n, k). Rows have no gaps.
  template <typename T, typename R>
  bool multiply(void* handle, bool transposed, int64_t m, int64_t n, int64_t k, const T* weights, const T* numbers,
                R* sums, bool allow_tf32, bool adds = false, bool by_columns = false, Compute<T> scale = 1) const {
    const Compute<T> factor = adds;
    const int compute = sizeof(T) == 8 ? kComputeDouble : sizeof(T) == 4 && allow_tf32 ? kComputeTf32 : kComputeFloat;
    // cuBLAS takes columns: what is a row here is a column there.
    return multiply_(handle, transposed, by_columns, static_cast<int>(m), static_cast<int>(n), static_cast<int>(k),
                     &scale, weights, kCudaType<T>, static_cast<int>(transposed ? k : m), numbers, kCudaType<T>,
                     static_cast<int>(by_columns ? n : k), &factor, sums, kCudaType<R>, static_cast<int>(m), compute,
                     -1) == 0;
  }

 private:
  Cublas() {
    void* const library = library_of_cuda("libcublas.so");
    if (library && find_function(library, "cublasCreate_v2", create_) &&
        find_function(library, "cublasSetStream_v2", set_stream_))
      find_function(library, "cublasGemmEx", multiply_);
  }

  int (*create_)(void**) = nullptr;
  int (*set_stream_)(void*, cudaStream_t) = nullptr;
  int (*multiply_)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
                   const void*, void*, int, int, int, int) = nullptr;
  std::map<int, void*> handles_;  // by device; they live as long as the process
};

}  // namespace msops
