// Stands in for MindSpore's functions that copy elements to other places: views, transposes, broadcasts, slices.
#pragma once

#include <memory>
#include <string_view>

#include "family.h"
#include "layout.h"

namespace mindspore {

// As MindSpore's header ir/tensor_storage_info.h has it.
struct TensorStorageInfo {
  std::vector<int64_t> shape, strides;
  size_t storage_offset;
  std::vector<int64_t> ori_shape, ori_strides;
  bool is_contiguous;
};

}  // namespace mindspore

namespace kernels {

inline Entry strided_copy_forward{"StridedCopyForward"}, strided_copy_backward{"StridedCopyBackward"},
    band_forward{"BandForward"};

// What the families of copies have in common.
struct Copying {
  static constexpr size_t kRoom = 16;

  static bool accepts(const std::vector<std::string>& arguments, Instance& made) {
    made.entry = &strided_copy_forward;
    made.dtypes.push_back(arguments.empty() ? nullptr : dtype_of(arguments[0]));
    return made.dtypes[0] != nullptr;
  }

  // Copies from x, which has so many elements, to y.
  static bool copy(const Slot& slot, const void* x, int64_t length, const Layout& layout, void* y, void* stream) {
    if (!layout.fits() || layout.reach() > length) return false;
    Call call;
    call.tensor(x, slot.dtypes[0], &length, 1);
    layout.add_result(call, y, slot.dtypes[0]);
    layout.add_attributes(call);
    return call.run(*slot.entry, stream);
  }
};

struct AsStrided : Copying {
  static constexpr const char* kName = "CalAsStrided";
  using Info = mindspore::TensorStorageInfo;
  using Signature = int(const size_t&, const void*, void*, const std::shared_ptr<Info>&, const int64_t*, const int64_t*,
                        void*);

  static bool run(const Slot& slot, const size_t& elements, const void* x, void* y, const std::shared_ptr<Info>& info,
                  const int64_t*, const int64_t*, void* stream) {
    if (!may_run(slot, elements, stream) || !info || info->shape.size() != info->strides.size()) return false;
    if (product(info->shape) != elements) return false;  // complex numbers as pairs
    Layout layout(static_cast<int64_t>(info->storage_offset));
    for (size_t i = 0; i < info->shape.size(); ++i) layout.add(info->shape[i], info->strides[i]);
    return copy(slot, x, layout.reach(), layout, y, stream);
  }
};

struct TransposeInfo {
  std::vector<int64_t> shape;
  std::vector<int32_t> order;
};

struct Transpose : Copying {
  static constexpr const char* kName = "CalTranspose";
  static constexpr size_t kRoom = 32;
  using Signature = int(size_t, const void*, const TransposeInfo&, void*, void*);

  static bool run(const Slot& slot, size_t elements, const void* x, const TransposeInfo& info, void* y, void* stream) {
    constexpr size_t kMost = 26;
    const size_t rank = info.shape.size();
    if (!may_run(slot, elements, stream) || rank > kMost || info.order.size() != rank) return false;
    int64_t strides[kMost], stride = 1;
    for (size_t i = rank; i-- > 0; stride *= info.shape[i]) strides[i] = stride;
    if (stride != static_cast<int64_t>(elements)) return false;
    Layout layout;
    for (const int32_t axis : info.order) {
      if (axis < 0 || axis >= static_cast<int32_t>(rank)) return false;
      layout.add(info.shape[axis], strides[axis]);
    }
    return copy(slot, x, stride, layout, y, stream);
  }
};

struct Broadcast : Copying {
  static constexpr const char* kName = "BroadcastTo";
  using Signature = int(const Shape&, const Shape&, void*, void*, size_t, void*);

  static bool run(const Slot& slot, const Shape& x_shape, const Shape& y_shape, void* x, void* y, size_t,
                  void* stream) {
    if (!may_run(slot, product(y_shape), stream) || x_shape.size() != y_shape.size()) return false;
    int64_t stride = static_cast<int64_t>(product(x_shape));
    const int64_t length = stride;
    Layout layout;
    for (size_t i = 0; i < y_shape.size(); ++i) {
      stride /= x_shape[i];
      if (x_shape[i] != 1 && x_shape[i] != y_shape[i]) return false;
      layout.add(y_shape[i], x_shape[i] == 1 ? 0 : stride);
    }
    return copy(slot, x, length, layout, y, stream);
  }
};

struct Tile : Copying {
  static constexpr const char* kName = "CalTile";
  // MindSpore passes the shapes by value, which is a pointer to a copy.
  using Signature = int(const Sizes&, const Sizes&, const void*, void*, void*);

  static bool run(const Slot& slot, const Sizes& x_shape, const Sizes& y_shape, const void* x, void* y, void* stream) {
    if (!may_run(slot, product(y_shape), stream) || x_shape.size() != y_shape.size()) return false;
    int64_t stride = static_cast<int64_t>(product(x_shape));
    const int64_t length = stride;
    Layout layout;
    for (size_t i = 0; i < y_shape.size(); ++i) {
      const auto from = static_cast<int64_t>(x_shape[i]), to = static_cast<int64_t>(y_shape[i]);
      if (from == 0 || to % from != 0) return false;
      stride /= from;
      layout.add(to / from, 0);
      layout.add(from, stride);
    }
    return copy(slot, x, length, layout, y, stream);
  }
};

// Returns where a slice with steps lies in a tensor of this shape.
inline Layout layout_of_slice(const Sizes& whole, const Shape& begin, const Shape& steps, const Sizes& part) {
  int64_t offset = 0, strides[8], stride = 1;
  for (size_t i = part.size(); i-- > 0; stride *= static_cast<int64_t>(whole[i])) {
    strides[i] = whole[i] == 1 ? 0 : stride;
    offset += begin[i] * strides[i];
  }
  Layout layout(offset);
  for (size_t i = 0; i < part.size(); ++i) layout.add(static_cast<int64_t>(part[i]), steps[i] * strides[i]);
  return layout;
}

inline bool is_slice(const Sizes& whole, const Shape& begin, const Shape& steps, const Sizes& part) {
  const size_t rank = part.size();
  return rank <= 8 && whole.size() == rank && begin.size() == rank && steps.size() == rank;
}

struct StridedSlice : Copying {
  static constexpr const char* kName = "StridedSlice";
  using Signature = int(const Sizes&, const Shape&, const Shape&, const Sizes&, const void*, void*, void*);

  static bool run(const Slot& slot, const Sizes& x_shape, const Shape& begin, const Shape& steps, const Sizes& y_shape,
                  const void* x, void* y, void* stream) {
    if (!may_run(slot, product(y_shape), stream) || !is_slice(x_shape, begin, steps, y_shape)) return false;
    const auto length = static_cast<int64_t>(product(x_shape));
    return copy(slot, x, length, layout_of_slice(x_shape, begin, steps, y_shape), y, stream);
  }
};

// The first N lengths say where a slice begins, the next N how long it is, the last N how long the tensor is.
template <size_t kRank, typename Lengths = std::make_index_sequence<3 * kRank>>
struct Slice;

template <size_t>
using Length = size_t;

template <size_t kRank, size_t... i>
struct Slice<kRank, std::index_sequence<i...>> : Copying {
  static constexpr const char* kNames[] = {"Slice1DKernel", "Slice2DKernel", "Slice3DKernel", "Slice4DKernel",
                                           "Slice5DKernel", "Slice6DKernel", "Slice7DKernel"};
  static constexpr const char* kName = kNames[kRank - 1];
  using Signature = int(Length<i>..., const void*, void*, const uint32_t&, void*);

  static bool run(const Slot& slot, Length<i>... lengths, const void* x, void* y, const uint32_t&, void* stream) {
    const size_t all[] = {lengths...};
    const size_t *begin = all, *part = all + kRank, *whole = all + 2 * kRank;
    size_t elements = 1;
    int64_t offset = 0, strides[kRank], stride = 1;
    for (size_t axis = kRank; axis-- > 0; stride *= static_cast<int64_t>(whole[axis])) {
      elements *= part[axis];
      strides[axis] = stride;
      offset += static_cast<int64_t>(begin[axis]) * stride;
    }
    if (!may_run(slot, elements, stream)) return false;
    Layout layout(offset);
    for (size_t axis = 0; axis < kRank; ++axis) layout.add(static_cast<int64_t>(part[axis]), strides[axis]);
    return copy(slot, x, stride, layout, y, stream);
  }
};

// What the families of slices' gradients have in common: dx is dy where the slice is, and 0 elsewhere.
struct Spreading : Copying {
  static bool accepts(const std::vector<std::string>& arguments, Instance& made) {
    const bool is_known = Copying::accepts(arguments, made);
    made.entry = &strided_copy_backward;
    return is_known;
  }

  static bool spread(const Slot& slot, const void* dy, const Layout& layout, void* dx, int64_t length, void* stream) {
    if (!layout.fits() || layout.reach() > length) return false;
    Call call;
    layout.add_result(call, dy, slot.dtypes[0]);
    call.tensor(dx, slot.dtypes[0], &length, 1).tensor(dx, slot.dtypes[0], &length, 1);
    layout.add_attributes(call);
    return call.run(*slot.entry, stream);
  }
};

struct StridedSliceGradient : Spreading {
  static constexpr const char* kName = "StridedSliceGrad";
  using Signature = int(const Sizes&, const Shape&, const Shape&, const Sizes&, const void*, void*, void*);

  static bool run(const Slot& slot, const Sizes& dy_shape, const Shape& begin, const Shape& steps,
                  const Sizes& dx_shape, const void* dy, void* dx, void* stream) {
    if (!may_run(slot, product(dx_shape), stream) || !is_slice(dx_shape, begin, steps, dy_shape)) return false;
    const auto length = static_cast<int64_t>(product(dx_shape));
    return spread(slot, dy, layout_of_slice(dx_shape, begin, steps, dy_shape), dx, length, stream);
  }
};

// Keeps the upper or the lower triangle of matrices, and writes 0 elsewhere.
template <bool kUpper>
struct Band : Copying {
  static constexpr const char* kName = kUpper ? "CalTriu" : "CalTril";
  using Signature = int(size_t, const void*, int, int64_t, int64_t, void*, const uint32_t&, void*);

  static bool accepts(const std::vector<std::string>& arguments, Instance& made) {
    const bool is_known = Copying::accepts(arguments, made);
    made.entry = &band_forward;
    return is_known && made.dtypes[0]->bytes <= 8;
  }

  static bool run(const Slot& slot, size_t elements, const void* x, int diagonal, int64_t rows, int64_t columns,
                  void* y, const uint32_t&, void* stream) {
    const int64_t matrix = rows * columns;
    if (!may_run(slot, elements, stream) || matrix <= 0 || elements % matrix != 0) return false;
    const int64_t shape[] = {static_cast<int64_t>(elements) / matrix, rows, columns};
    // A complex number of 8 bytes is moved like another number of 8 bytes.
    const bool is_complex = slot.dtypes[0]->name == std::string_view("complex64");
    const Dtype* dtype = is_complex ? dtype_of("double") : slot.dtypes[0];
    Call call;
    call.tensor(x, dtype, shape, 3).tensor(y, dtype, shape, 3);
    return call.attribute("msops_upper", kUpper).attribute("msops_diagonal", diagonal).run(*slot.entry, stream);
  }
};

}  // namespace kernels
