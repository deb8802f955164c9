// The functions that launch MindSpore's kernels, as its plugin for GPUs declares them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

enum cudaError { cudaSuccess };
struct CUstream_st;
using Stream = CUstream_st*;
enum class BinaryOpType {};
typedef enum { kFirst } ReduceType_t;
struct __half {
  uint16_t bits;
};
using Shape = std::vector<int64_t>;
using Sizes = std::vector<size_t>;
using uint = unsigned;

namespace mindspore {
namespace utils {
template <typename T>
struct Complex {
  T real, imaginary;
};
}  // namespace utils

struct TensorStorageInfo {
  std::vector<int64_t> shape, strides;
  size_t storage_offset = 0;
  std::vector<int64_t> ori_shape, ori_strides;
  bool is_contiguous = false;
};
}  // namespace mindspore

using Info = std::shared_ptr<mindspore::TensorStorageInfo>;

struct TrinaryBroadcastStrideInfo {
  size_t in0_stride[8], in1_stride[8], in2_stride[8], out_stride[8];
};

struct TransposeInfo {
  std::vector<int64_t> input_shape;
  std::vector<int32_t> perm;
};

template <BinaryOpType kOp, typename X, typename Y, typename Z>
cudaError BinaryOpWithBroadcastCudaFunc(bool is_broadcast, const Shape& x_shape, const Shape& y_shape,
                                        const Shape& z_shape, X* x, Y* y, Z* z, size_t device, Stream stream);
template <BinaryOpType kOp, typename X, typename Y, typename A, typename Z>
cudaError BinaryExtOpWithBroadcastCudaFunc(bool is_broadcast, const Shape& x_shape, const Shape& y_shape,
                                           const Shape& z_shape, X* x, Y* y, A* alpha, Z* z, size_t device,
                                           Stream stream);
template <typename S, typename T>
cudaError Cast(int count, const S* x, T* y, Stream stream);
template <typename T>
cudaError CalSelect(const bool* condition, const T* x, const T* y, T* z, size_t count, Stream stream);
template <typename T>
cudaError CalSelectBroadcast(const bool* condition, const T* x, const T* y, T* z, size_t rank, size_t count,
                             const TrinaryBroadcastStrideInfo& strides, uint device, Stream stream);
template <typename T>
cudaError ElewiseMaskedFill(size_t inner, size_t count, const T* x, const bool* mask, T* value, T* y, uint device,
                            Stream stream);
template <typename T>
cudaError BroadcastMaskedFill(size_t inner, const Sizes& x_shape, const Sizes& mask_shape, const Sizes& y_shape,
                              const T* x, const bool* mask, T* value, T* y, uint device, Stream stream);
template <typename T>
cudaError CalAsStrided(const size_t& count, const T* x, T* y, const Info& info, const int64_t* shape,
                       const int64_t* strides, Stream stream);
template <typename T, bool kSimplify>
cudaError CalTranspose(size_t count, const T* x, const TransposeInfo& info, T* y, Stream stream);
template <typename T>
cudaError BroadcastTo(const Shape& x_shape, const Shape& y_shape, T* x, T* y, size_t device, Stream stream);
template <typename T>
cudaError CalTile(Sizes x_shape, Sizes y_shape, const T* x, T* y, Stream stream);
template <typename T>
cudaError StridedSlice(const Sizes& x_shape, const Shape& begin, const Shape& steps, const Sizes& y_shape, const T* x,
                       T* y, Stream stream);
template <typename T>
cudaError Slice1DKernel(size_t, size_t, size_t, const T* x, T* y, const uint& device, Stream stream);
template <typename T>
cudaError Slice3DKernel(size_t, size_t, size_t, size_t, size_t, size_t, size_t, size_t, size_t, const T* x, T* y,
                        const uint& device, Stream stream);

template <typename T>
cudaError StridedSliceGrad(const Sizes& dy_shape, const Shape& begin, const Shape& steps, const Sizes& dx_shape,
                           const T* dy, T* dx, Stream stream);
template <typename T>
cudaError CalTriu(size_t count, const T* x, int diagonal, int64_t rows, int64_t columns, T* y, const uint& device,
                  Stream stream);
template <typename T>
cudaError CalTril(size_t count, const T* x, int diagonal, int64_t rows, int64_t columns, T* y, const uint& device,
                  Stream stream);
template <typename T>
cudaError ArrayReduce(T* x, const Sizes& shape, bool reduces_first, ReduceType_t type, T* partial, T* y, Stream stream);
template <typename T>
cudaError CalBiasAddGradNHWC(size_t count, size_t channels, const T* dy, T* db, Stream stream);
template <typename T>
cudaError CalBiasAddGradNCHW(size_t count, size_t channels, int height, int width, const T* dy, T* db, Stream stream);

template <typename T>
cudaError ConcatKernel(size_t count, int pieces, int row, int inner, int* lengths, T** x, T* y, Stream stream);
template <typename T>
cudaError SplitKernel(size_t count, int step, int row, int inner, const T* x, T** y, Stream stream);
template <typename T>
cudaError PackKernel(size_t count, size_t pieces, size_t inner, T** x, T* y, Stream stream);
template <typename T>
cudaError UnpackKernel(size_t count, size_t pieces, size_t inner, T** y, const T* x, Stream stream);

// Returns f(pointer) for the type that a dtype means, and -1 for other dtypes.
template <typename F>
int with_type(const char* dtype, F&& f) {
  const auto is = [&](const char* name) { return std::strcmp(dtype, name) == 0; };
  if (is("bool")) return f(static_cast<bool*>(nullptr));
  if (is("int8")) return f(static_cast<int8_t*>(nullptr));
  if (is("int16")) return f(static_cast<int16_t*>(nullptr));
  if (is("int32")) return f(static_cast<int32_t*>(nullptr));
  if (is("int64")) return f(static_cast<int64_t*>(nullptr));
  if (is("uint8")) return f(static_cast<uint8_t*>(nullptr));
  if (is("uint16")) return f(static_cast<uint16_t*>(nullptr));
  if (is("uint32")) return f(static_cast<uint32_t*>(nullptr));
  if (is("uint64")) return f(static_cast<uint64_t*>(nullptr));
  if (is("float16")) return f(static_cast<__half*>(nullptr));
  if (is("float32")) return f(static_cast<float*>(nullptr));
  if (is("float64")) return f(static_cast<double*>(nullptr));
  if (is("complex64")) return f(static_cast<mindspore::utils::Complex<float>*>(nullptr));
  if (is("complex128")) return f(static_cast<mindspore::utils::Complex<double>*>(nullptr));
  return -1;
}

constexpr int kOperations = 34;  // of BinaryOpType
