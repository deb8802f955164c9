// Operators as MindSpore's plugin for GPUs runs them: by functions that launch kernels, which another library has.
#include <functional>
#include <numeric>

#include "cuda_ops.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Numbers {
  const int64_t* data;
  int count;

  template <typename Vector>
  operator Vector() const {
    return Vector(data, data + count);
  }
  size_t product() const { return std::accumulate(data, data + count, size_t{1}, std::multiplies<size_t>()); }
};

// Writes the strides of a contiguous tensor, with 0 for axes of length 1.
void write_strides(Numbers shape, size_t (&strides)[8]) {
  size_t stride = 1;
  for (int i = shape.count; i-- > 0; stride *= shape.data[i]) strides[i] = shape.data[i] == 1 ? 0 : stride;
}

template <typename T, typename Z, int... kOp>
int binary(int op, bool is_broadcast, const Shape (&shapes)[3], T* x, T* y, Z* z, Stream stream,
           std::integer_sequence<int, kOp...>) {
  int result = -1;
  ((op == kOp ? void(result = BinaryOpWithBroadcastCudaFunc<BinaryOpType{kOp}>(is_broadcast, shapes[0], shapes[1],
                                                                               shapes[2], x, y, z, 0, stream))
              : void()),
   ...);
  return result;
}

}  // namespace

EXPORT int op_binary(int op, const char* dtype, int to_bool, int is_broadcast, Numbers x_shape, Numbers y_shape,
                     Numbers z_shape, void* x, void* y, void* z, Stream stream) {
  const Shape shapes[] = {x_shape, y_shape, z_shape};
  constexpr std::make_integer_sequence<int, kOperations> kAll;
  return with_type(dtype, [&](auto* type) {
    auto *in0 = static_cast<decltype(type)>(x), *in1 = static_cast<decltype(type)>(y);
    if (to_bool != 0) return binary(op, is_broadcast, shapes, in0, in1, static_cast<bool*>(z), stream, kAll);
    return binary(op, is_broadcast, shapes, in0, in1, static_cast<decltype(type)>(z), stream, kAll);
  });
}

// x + alpha * y for a float alpha, x - alpha * y for an int64 alpha.
EXPORT int op_binary_ext(const char* dtype, int is_float, int is_broadcast, Numbers x_shape, Numbers y_shape,
                         Numbers z_shape, void* x, void* y, void* alpha, void* z, Stream stream) {
  return with_type(dtype, [&](auto* type) -> int {
    using T = decltype(type);
    auto *in0 = static_cast<T>(x), *in1 = static_cast<T>(y), *out = static_cast<T>(z);
    if (is_float != 0)
      return BinaryExtOpWithBroadcastCudaFunc<BinaryOpType{32}>(is_broadcast, x_shape, y_shape, z_shape, in0, in1,
                                                                static_cast<float*>(alpha), out, 0, stream);
    return BinaryExtOpWithBroadcastCudaFunc<BinaryOpType{33}>(is_broadcast, x_shape, y_shape, z_shape, in0, in1,
                                                              static_cast<int64_t*>(alpha), out, 0, stream);
  });
}

// Multiplies float16 and float32.
EXPORT int op_mixed(Numbers x_shape, Numbers y_shape, Numbers z_shape, void* x, void* y, void* z, Stream stream) {
  return BinaryOpWithBroadcastCudaFunc<BinaryOpType{12}>(true, x_shape, y_shape, z_shape, static_cast<__half*>(x),
                                                         static_cast<float*>(y), static_cast<float*>(z), 0, stream);
}

// Casts float32 to bool, or float64 to float16, which msops leaves to MindSpore.
EXPORT int op_cast(int to_bool, size_t count, void* x, void* y, Stream stream) {
  const int size = static_cast<int>(count);
  if (to_bool) return Cast(size, static_cast<const float*>(x), static_cast<bool*>(y), stream);
  return Cast(size, static_cast<const double*>(x), static_cast<__half*>(y), stream);
}

EXPORT int op_select(const char* dtype, const bool* condition, void* x, void* y, void* z, size_t count, Stream stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return CalSelect<T>(condition, static_cast<T*>(x), static_cast<T*>(y), static_cast<T*>(z), count, stream);
  });
}

EXPORT int op_select_broadcast(const char* dtype, Numbers condition_shape, Numbers x_shape, Numbers y_shape,
                               Numbers z_shape, const bool* condition, void* x, void* y, void* z, Stream stream) {
  TrinaryBroadcastStrideInfo strides;
  write_strides(condition_shape, strides.in0_stride);
  write_strides(x_shape, strides.in1_stride);
  write_strides(y_shape, strides.in2_stride);
  size_t stride = 1;
  for (int i = z_shape.count; i-- > 0; stride *= z_shape.data[i]) strides.out_stride[i] = stride;
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return CalSelectBroadcast<T>(condition, static_cast<T*>(x), static_cast<T*>(y), static_cast<T*>(z), z_shape.count,
                                 z_shape.product(), strides, 0, stream);
  });
}

EXPORT int op_masked_fill(const char* dtype, size_t inner, size_t count, void* x, const bool* mask, void* value,
                          void* y, Stream stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return ElewiseMaskedFill<T>(inner, count, static_cast<T*>(x), mask, static_cast<T*>(value), static_cast<T*>(y), 0,
                                stream);
  });
}

EXPORT int op_broadcast_masked_fill(const char* dtype, size_t inner, Numbers x_shape, Numbers mask_shape,
                                    Numbers y_shape, void* x, const bool* mask, void* value, void* y, Stream stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return BroadcastMaskedFill<T>(inner, x_shape, mask_shape, y_shape, static_cast<T*>(x), mask, static_cast<T*>(value),
                                  static_cast<T*>(y), 0, stream);
  });
}

EXPORT int op_as_strided(const char* dtype, Numbers shape, Numbers strides, size_t offset, size_t count, void* x,
                         void* y, Stream stream) {
  const auto info = std::make_shared<mindspore::TensorStorageInfo>();
  info->shape = Shape(shape);
  info->strides = Shape(strides);
  info->storage_offset = offset;
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return CalAsStrided<T>(count, static_cast<T*>(x), static_cast<T*>(y), info, nullptr, nullptr, stream);
  });
}

EXPORT int op_transpose(const char* dtype, int simplify, Numbers shape, Numbers order, void* x, void* y,
                        Stream stream) {
  const TransposeInfo info{shape, order};
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto *in = static_cast<T*>(x), *out = static_cast<T*>(y);
    return simplify != 0 ? CalTranspose<T, true>(shape.product(), in, info, out, stream)
                         : CalTranspose<T, false>(shape.product(), in, info, out, stream);
  });
}

EXPORT int op_broadcast_to(const char* dtype, Numbers x_shape, Numbers y_shape, void* x, void* y, Stream stream) {
  return with_type(dtype, [&](auto* type) {
    return BroadcastTo(x_shape, y_shape, static_cast<decltype(type)>(x), static_cast<decltype(type)>(y), 0, stream);
  });
}

EXPORT int op_tile(const char* dtype, Numbers x_shape, Numbers y_shape, void* x, void* y, Stream stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return CalTile<T>(x_shape, y_shape, static_cast<T*>(x), static_cast<T*>(y), stream);
  });
}

EXPORT int op_strided_slice(const char* dtype, Numbers x_shape, Numbers begin, Numbers steps, Numbers y_shape, void* x,
                            void* y, Stream stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return StridedSlice<T>(x_shape, begin, steps, y_shape, static_cast<T*>(x), static_cast<T*>(y), stream);
  });
}

// A slice of a tensor with 1 or 3 axes.
EXPORT int op_slice(const char* dtype, Numbers begin, Numbers part, Numbers whole, void* x, void* y, Stream stream) {
  const uint device = 0;
  const Sizes b = begin, p = part, w = whole;
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto *in = static_cast<T*>(x), *out = static_cast<T*>(y);
    if (b.size() == 1) return Slice1DKernel<T>(b[0], p[0], w[0], in, out, device, stream);
    return Slice3DKernel<T>(b[0], b[1], b[2], p[0], p[1], p[2], w[0], w[1], w[2], in, out, device, stream);
  });
}

EXPORT int op_strided_slice_grad(const char* dtype, Numbers dy_shape, Numbers begin, Numbers steps, Numbers dx_shape,
                                 void* dy, void* dx, Stream stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return StridedSliceGrad<T>(dy_shape, begin, steps, dx_shape, static_cast<T*>(dy), static_cast<T*>(dx), stream);
  });
}

EXPORT int op_band(const char* dtype, int upper, size_t count, int diagonal, int64_t rows, int64_t columns, void* x,
                   void* y, Stream stream) {
  const uint device = 0;
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto *in = static_cast<T*>(x), *out = static_cast<T*>(y);
    return upper != 0 ? CalTriu<T>(count, in, diagonal, rows, columns, out, device, stream)
                      : CalTril<T>(count, in, diagonal, rows, columns, out, device, stream);
  });
}

EXPORT int op_reduce(const char* dtype, Numbers shape, int reduces_first, int reduction, void* x, void* partial,
                     void* y, Stream stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return ArrayReduce<T>(static_cast<T*>(x), shape, reduces_first, static_cast<ReduceType_t>(reduction),
                          static_cast<T*>(partial), static_cast<T*>(y), stream);
  });
}

// The gradient of a bias, whose axis is the last one or, with a height and a width, the second of four.
EXPORT int op_bias_grad(const char* dtype, size_t count, size_t channels, int height, int width, void* dy, void* db,
                        Stream stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto *in = static_cast<T*>(dy), *out = static_cast<T*>(db);
    return height == 0 ? CalBiasAddGradNHWC<T>(count, channels, in, out, stream)
                       : CalBiasAddGradNCHW<T>(count, channels, height, width, in, out, stream);
  });
}

EXPORT int op_concat(const char* dtype, size_t count, int pieces, int row, int inner, int* lengths, void** x, void* y,
                     Stream stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return ConcatKernel<T>(count, pieces, row, inner, lengths, reinterpret_cast<T**>(x), static_cast<T*>(y), stream);
  });
}

EXPORT int op_split(const char* dtype, size_t count, int step, int row, int inner, void* x, void** y, Stream stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return SplitKernel<T>(count, step, row, inner, static_cast<T*>(x), reinterpret_cast<T**>(y), stream);
  });
}

EXPORT int op_stack(const char* dtype, size_t count, size_t pieces, size_t inner, void** x, void* y, Stream stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return PackKernel<T>(count, pieces, inner, reinterpret_cast<T**>(x), static_cast<T*>(y), stream);
  });
}

EXPORT int op_unstack(const char* dtype, size_t count, size_t pieces, size_t inner, void** y, void* x, Stream stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return UnpackKernel<T>(count, pieces, inner, reinterpret_cast<T**>(y), static_cast<T*>(x), stream);
  });
}
