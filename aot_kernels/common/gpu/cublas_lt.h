// CublasLt multiplies by cuBLASLt, which comes with cuBLAS, and adds a bias to products before they are stored.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "cublas.h"

namespace msops {

// A LinearProblem is y (n, m) = x (n, k) weight^T (k, m) + bias (m). Rows have no gaps.
template <typename T>
struct LinearProblem {
  int64_t m, n, k;
  const T *weight, *x, *bias;
  T* y;

  // Returns how many bytes, at most 256, divide all addresses.
  int alignment() const {
    uintptr_t bits = 256;
    for (const T* each : {weight, x, bias, static_cast<const T*>(y)}) bits |= reinterpret_cast<uintptr_t>(each);
    return static_cast<int>(bits & (~bits + 1));
  }
};

class CublasLt {
 public:
  // Returns false if cuBLASLt is not there or has no kernel. Float numbers are not rounded to TF32.
  template <typename T>
  static bool multiply(cudaStream_t stream, const LinearProblem<T>& p, void* workspace, size_t bytes) {
    static CublasLt lt;
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    int device = 0;
    if (!lt.is_there_ || p.alignment() < 16 || cudaGetDevice(&device) != cudaSuccess) return false;
    void*& handle = lt.handles_[device];
    return (handle || lt.create_(&handle) == 0) && lt.run(device, handle, stream, p, workspace, bytes);
  }

 private:
  // cublasLtMatmulHeuristicResult_t
  struct Choice {
    uint64_t algorithm[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
  };
  static constexpr int kSetTransposeA = 3, kSetEpilogue = 7, kSetBias = 8;  // cublasLtMatmulDescAttributes_t
  static constexpr int kSetWorkspace = 1, kSetAlignments[] = {5, 6, 7, 8};  // cublasLtMatmulPreferenceAttributes_t

  using Key = std::array<int64_t, 7>;  // the device, m, n, k, bytes of a number, alignment, bytes of workspace
  using Free = int(void*);
  using Set = int(void*, int, const void*, size_t);
  using Object = std::unique_ptr<void, Free*>;

  CublasLt() {
    void* const library = library_of_cuda("libcublasLt.so");
    is_there_ = library && find_function(library, "cublasLtCreate", create_) &&
                find_function(library, "cublasLtMatmulDescCreate", make_operation_) &&
                find_function(library, "cublasLtMatmulDescDestroy", free_operation_) &&
                find_function(library, "cublasLtMatmulDescSetAttribute", set_operation_) &&
                find_function(library, "cublasLtMatrixLayoutCreate", make_layout_) &&
                find_function(library, "cublasLtMatrixLayoutDestroy", free_layout_) &&
                find_function(library, "cublasLtMatmulPreferenceCreate", make_preference_) &&
                find_function(library, "cublasLtMatmulPreferenceDestroy", free_preference_) &&
                find_function(library, "cublasLtMatmulPreferenceSetAttribute", set_preference_) &&
                find_function(library, "cublasLtMatmulAlgoGetHeuristic", choose_) &&
                find_function(library, "cublasLtMatmul", multiply_);
  }

  template <typename T>
  bool run(int device, void* handle, cudaStream_t stream, const LinearProblem<T>& p, void* workspace, size_t bytes) {
    constexpr int kType = kCudaType<Compute<T>>, kTranspose = 1, kBias = 4;
    const Object operation =
        make(make_operation_, free_operation_, sizeof(T) == 8 ? kComputeDouble : kComputeFloat, kType);
    // cuBLAS takes columns: what is a row here is a column there.
    const Object a = layout<T>(p.k, p.m), b = layout<T>(p.k, p.n), c = layout<T>(p.m, p.n);
    if (!operation || !a || !b || !c || !set(set_operation_, operation, kSetTransposeA, kTranspose) ||
        !set(set_operation_, operation, kSetEpilogue, kBias) || !set(set_operation_, operation, kSetBias, p.bias))
      return false;
    const Choice& choice =
        choice_for({device, p.m, p.n, p.k, sizeof(T), p.alignment(), static_cast<int64_t>(bytes)}, [&](Choice& made) {
          const Object preference = make(make_preference_, free_preference_);
          if (!preference || !set(set_preference_, preference, kSetWorkspace, uint64_t{bytes})) return false;
          for (const int each : kSetAlignments)
            if (!set(set_preference_, preference, each, static_cast<uint32_t>(p.alignment()))) return false;
          int count = 0;
          return choose_(handle, operation.get(), a.get(), b.get(), c.get(), c.get(), preference.get(), 1, &made,
                         &count) == 0 &&
                 count == 1;
        });
    const Compute<T> one = 1, zero = 0;
    return choice.status == 0 && multiply_(handle, operation.get(), &one, p.weight, a.get(), p.x, b.get(), &zero, p.y,
                                           c.get(), p.y, c.get(), choice.algorithm, workspace, bytes, stream) == 0;
  }

  // Returns the choice for a problem, which `choose` makes once: that takes the host longer than to launch.
  template <typename F>
  const Choice& choice_for(const Key& key, const F& choose) {
    constexpr size_t kMost = 1024;
    if (choices_.size() >= kMost && !choices_.count(key)) choices_.clear();
    const auto [at, is_new] = choices_.emplace(key, Choice{});
    if (is_new && !choose(at->second)) at->second.status = -1;
    return at->second;
  }

  template <typename T>
  Object layout(int64_t rows, int64_t columns) const {
    return make(make_layout_, free_layout_, kCudaType<T>, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns),
                rows);
  }

  template <typename... Parameters, typename... Arguments>
  static Object make(int (*create)(void**, Parameters...), Free* free, Arguments... arguments) {
    void* object = nullptr;
    return Object(create(&object, arguments...) == 0 ? object : nullptr, free);
  }

  template <typename V>
  static bool set(Set* function, const Object& object, int attribute, V value) {
    return function(object.get(), attribute, &value, sizeof(value)) == 0;
  }

  bool is_there_ = false;
  int (*create_)(void**) = nullptr;
  int (*make_operation_)(void**, int, int) = nullptr;
  int (*make_layout_)(void**, int, uint64_t, uint64_t, int64_t) = nullptr;
  int (*make_preference_)(void**) = nullptr;
  Free *free_operation_ = nullptr, *free_layout_ = nullptr, *free_preference_ = nullptr;
  Set *set_operation_ = nullptr, *set_preference_ = nullptr;
  int (*choose_)(void*, void*, void*, void*, void*, void*, void*, int, Choice*, int*) = nullptr;
  int (*multiply_)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                   void*, void*, const void*, void*, size_t, cudaStream_t) = nullptr;
  std::map<int, void*> handles_;  // by device; they live as long as the process
  std::map<Key, Choice> choices_;
};

}  // namespace msops
