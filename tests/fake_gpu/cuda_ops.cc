// Stands for the library of MindSpore's kernels: functions that do nothing but count their calls, and fail.
#include "cuda_ops.h"

#include "common/attributes.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

int calls = 0;

// Every call returns the number of an error that ours never returns.
cudaError fail() {
  ++calls;
  return static_cast<cudaError>(77);
}

}  // namespace

EXPORT int ops_calls() { return calls; }

// Reads an attribute as an entry does. Returns -2^63 if there is none.
EXPORT int64_t ops_attribute(void* extra, const char* name) {
  int64_t value = INT64_MIN;
  msops::Attributes(extra).read(name, &value);
  return value;
}

template <BinaryOpType kOp, typename X, typename Y, typename Z>
cudaError BinaryOpWithBroadcastCudaFunc(bool, const Shape&, const Shape&, const Shape&, X*, Y*, Z*, size_t, Stream) {
  return fail();
}
template <BinaryOpType kOp, typename X, typename Y, typename A, typename Z>
cudaError BinaryExtOpWithBroadcastCudaFunc(bool, const Shape&, const Shape&, const Shape&, X*, Y*, A*, Z*, size_t,
                                           Stream) {
  return fail();
}
template <typename S, typename T>
cudaError Cast(int, const S*, T*, Stream) {
  return fail();
}
template <typename T>
cudaError CalSelect(const bool*, const T*, const T*, T*, size_t, Stream) {
  return fail();
}
template <typename T>
cudaError CalSelectBroadcast(const bool*, const T*, const T*, T*, size_t, size_t, const TrinaryBroadcastStrideInfo&,
                             uint, Stream) {
  return fail();
}
template <typename T>
cudaError ElewiseMaskedFill(size_t, size_t, const T*, const bool*, T*, T*, uint, Stream) {
  return fail();
}
template <typename T>
cudaError BroadcastMaskedFill(size_t, const Sizes&, const Sizes&, const Sizes&, const T*, const bool*, T*, T*, uint,
                              Stream) {
  return fail();
}
template <typename T>
cudaError CalAsStrided(const size_t&, const T*, T*, const Info&, const int64_t*, const int64_t*, Stream) {
  return fail();
}
template <typename T, bool kSimplify>
cudaError CalTranspose(size_t, const T*, const TransposeInfo&, T*, Stream) {
  return fail();
}
template <typename T>
cudaError BroadcastTo(const Shape&, const Shape&, T*, T*, size_t, Stream) {
  return fail();
}
template <typename T>
cudaError CalTile(Sizes, Sizes, const T*, T*, Stream) {
  return fail();
}
template <typename T>
cudaError StridedSlice(const Sizes&, const Shape&, const Shape&, const Sizes&, const T*, T*, Stream) {
  return fail();
}
template <typename T>
cudaError Slice1DKernel(size_t, size_t, size_t, const T*, T*, const uint&, Stream) {
  return fail();
}
template <typename T>
cudaError Slice3DKernel(size_t, size_t, size_t, size_t, size_t, size_t, size_t, size_t, size_t, const T*, T*,
                        const uint&, Stream) {
  return fail();
}

template <typename T>
cudaError StridedSliceGrad(const Sizes&, const Shape&, const Shape&, const Sizes&, const T*, T*, Stream) {
  return fail();
}
template <typename T>
cudaError CalTriu(size_t, const T*, int, int64_t, int64_t, T*, const uint&, Stream) {
  return fail();
}
template <typename T>
cudaError CalTril(size_t, const T*, int, int64_t, int64_t, T*, const uint&, Stream) {
  return fail();
}
template <typename T>
cudaError ArrayReduce(T*, const Sizes&, bool, ReduceType_t, T*, T*, Stream) {
  return fail();
}
template <typename T>
cudaError CalBiasAddGradNHWC(size_t, size_t, const T*, T*, Stream) {
  return fail();
}
template <typename T>
cudaError CalBiasAddGradNCHW(size_t, size_t, int, int, const T*, T*, Stream) {
  return fail();
}

template <typename T>
cudaError ConcatKernel(size_t, int, int, int, int*, T**, T*, Stream) {
  return fail();
}
template <typename T>
cudaError SplitKernel(size_t, int, int, int, const T*, T**, Stream) {
  return fail();
}
template <typename T>
cudaError PackKernel(size_t, size_t, size_t, T**, T*, Stream) {
  return fail();
}
template <typename T>
cudaError UnpackKernel(size_t, size_t, size_t, T**, const T*, Stream) {
  return fail();
}

// Makes the compiler keep functions that the plugin may call.
void* volatile kept = nullptr;
template <typename... Functions>
void exist(Functions... functions) {
  ((kept = reinterpret_cast<void*>(functions)), ...);
}

template <typename T, int... kOp>
void make_binary(std::integer_sequence<int, kOp...>) {
  exist(&BinaryOpWithBroadcastCudaFunc<BinaryOpType{kOp}, T, T, T>...);
  exist(&BinaryOpWithBroadcastCudaFunc<BinaryOpType{kOp}, T, T, bool>...);
}

EXPORT void ops_make(const char* dtype) {
  exist(&BinaryOpWithBroadcastCudaFunc<BinaryOpType{12}, __half, float, float>, &Cast<float, bool>,
        &Cast<double, __half>);
  with_type(dtype, [](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    make_binary<T>(std::make_integer_sequence<int, kOperations>());
    exist(&BinaryExtOpWithBroadcastCudaFunc<BinaryOpType{32}, T, T, float, T>,
          &BinaryExtOpWithBroadcastCudaFunc<BinaryOpType{33}, T, T, int64_t, T>);
    exist(&CalSelect<T>, &CalSelectBroadcast<T>, &ElewiseMaskedFill<T>, &BroadcastMaskedFill<T>, &CalAsStrided<T>,
          &CalTranspose<T, true>, &CalTranspose<T, false>, &BroadcastTo<T>, &CalTile<T>, &StridedSlice<T>,
          &Slice1DKernel<T>, &Slice3DKernel<T>, &StridedSliceGrad<T>, &CalTriu<T>, &CalTril<T>, &ArrayReduce<T>,
          &CalBiasAddGradNHWC<T>, &CalBiasAddGradNCHW<T>, &ConcatKernel<T>, &SplitKernel<T>, &PackKernel<T>,
          &UnpackKernel<T>);
    return 0;
  });
}
