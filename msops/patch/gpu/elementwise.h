// Stands in for MindSpore's functions of two tensors, and for those that choose between two by a condition.
#pragma once

#include <string_view>

#include "family.h"
#include "shared/broadcast/operations.h"

namespace kernels {

inline Entry binary_forward{"BinaryForward"}, compare_forward{"CompareForward"}, binary_ext_forward{"BinaryExtForward"},
    binary_mixed_forward{"BinaryMixedForward"}, select_forward{"SelectForward"}, cast_forward{"CastForward"};

// Reads "(BinaryOpType)10, float, ...".
inline bool read_operation(const std::vector<std::string>& arguments, size_t dtypes, Instance& made) {
  if (arguments.size() != dtypes + 1) return false;
  made.operation = enumerator(arguments[0]);
  for (size_t i = 1; i <= dtypes; ++i) made.dtypes.push_back(dtype_of(arguments[i]));
  for (const Dtype* each : made.dtypes) {
    if (each == nullptr) return false;
  }
  return true;
}

// The shapes of x and y in MindSpore's three cases. Where nothing is broadcast, it takes no note of them but for a
// single element.
class Operands {
 public:
  Operands(bool is_broadcast, const Shape& x, const Shape& y, const Shape& z) {
    if (is_broadcast) {
      x_ = &x, y_ = &y, z_ = &z;
      return;
    }
    flat_[0] = static_cast<int64_t>(product(z));
    const bool y_is_number = y.size() == 1 && y[0] == 1;
    x_length_ = !y_is_number && x.size() == 1 && x[0] == 1 ? 1 : flat_[0];
    y_length_ = y_is_number ? 1 : flat_[0];
  }

  void add(Call& call, const Slot& slot, const void* x, const void* y) const {
    if (z_ == nullptr) {
      call.tensor(x, slot.dtypes[0], &x_length_, 1).tensor(y, slot.dtypes[1], &y_length_, 1);
    } else {
      call.tensor(x, slot.dtypes[0], x_->data(), x_->size()).tensor(y, slot.dtypes[1], y_->data(), y_->size());
    }
  }
  void add_result(Call& call, const Slot& slot, void* z) const {
    const Dtype* dtype = slot.dtypes.back();
    z_ == nullptr ? call.tensor(z, dtype, flat_, 1) : call.tensor(z, dtype, z_->data(), z_->size());
  }

 private:
  const Shape *x_ = nullptr, *y_ = nullptr, *z_ = nullptr;
  int64_t x_length_ = 0, y_length_ = 0, flat_[1] = {};
};

struct Binary {
  static constexpr const char* kName = "BinaryOpWithBroadcastCudaFunc";
  static constexpr size_t kRoom = 160;
  using Signature = int(bool, const Shape&, const Shape&, const Shape&, void*, void*, void*, size_t, void*);

  static bool accepts(const std::vector<std::string>& arguments, Instance& made) {
    if (!read_operation(arguments, 3, made)) return false;
    const std::string_view x = made.dtypes[0]->name, y = made.dtypes[1]->name, z = made.dtypes[2]->name;
    if (msops::has_mixed(made.operation, x, y)) {
      made.entry = &binary_mixed_forward;
      return z == "float32";
    }
    const bool is_comparison = msops::has_comparison(made.operation, x) && z == "bool";
    made.entry = is_comparison ? &compare_forward : &binary_forward;
    return x == y && (is_comparison || (msops::has_binary(made.operation, x) && z == x));
  }

  static bool run(const Slot& slot, bool is_broadcast, const Shape& x_shape, const Shape& y_shape, const Shape& z_shape,
                  void* x, void* y, void* z, size_t, void* stream) {
    if (!may_run(slot, product(z_shape), stream)) return false;
    const Operands operands(is_broadcast, x_shape, y_shape, z_shape);
    Call call;
    operands.add(call, slot, x, y);
    operands.add_result(call, slot, z);
    return call.attribute("msops_op", slot.operation).run(*slot.entry, stream);
  }
};

struct BinaryExt {
  static constexpr const char* kName = "BinaryExtOpWithBroadcastCudaFunc";
  static constexpr size_t kRoom = 40;
  using Signature = int(bool, const Shape&, const Shape&, const Shape&, void*, void*, void*, void*, size_t, void*);

  static bool accepts(const std::vector<std::string>& arguments, Instance& made) {
    if (!read_operation(arguments, 4, made)) return false;
    made.entry = &binary_ext_forward;
    const auto dtype = [&](int i) { return std::string_view(made.dtypes[i]->name); };
    return dtype(0) == dtype(1) && dtype(0) == dtype(3) && msops::has_binary_ext(made.operation, dtype(0), dtype(2));
  }

  static bool run(const Slot& slot, bool is_broadcast, const Shape& x_shape, const Shape& y_shape, const Shape& z_shape,
                  void* x, void* y, void* alpha, void* z, size_t, void* stream) {
    if (!may_run(slot, product(z_shape), stream)) return false;
    const Operands operands(is_broadcast, x_shape, y_shape, z_shape);
    Call call;
    operands.add(call, slot, x, y);
    call.tensor(alpha, slot.dtypes[2], nullptr, 0);
    operands.add_result(call, slot, z);
    return call.attribute("msops_op", slot.operation).run(*slot.entry, stream);
  }
};

struct Cast {
  static constexpr const char* kName = "Cast";
  static constexpr size_t kRoom = 40;
  using Signature = int(int, const void*, void*, void*);

  static bool accepts(const std::vector<std::string>& arguments, Instance& made) {
    for (const std::string& each : arguments) made.dtypes.push_back(dtype_of(each));
    made.entry = &cast_forward;
    return made.dtypes.size() == 2 && made.dtypes[0] != nullptr && made.dtypes[1] != nullptr &&
           msops::has_cast(made.dtypes[0]->name, made.dtypes[1]->name);
  }

  static bool run(const Slot& slot, int elements, const void* x, void* y, void* stream) {
    if (elements < 0 || !may_run(slot, static_cast<size_t>(elements), stream)) return false;
    const int64_t shape[] = {elements};
    Call call;
    call.tensor(x, slot.dtypes[0], shape, 1).tensor(y, slot.dtypes[1], shape, 1);
    return call.attribute("msops_to", msops::cast_place(slot.dtypes[1]->name)).run(*slot.entry, stream);
  }
};

// What the families that choose have in common.
struct Selecting {
  static constexpr size_t kRoom = 16;
  static bool accepts(const std::vector<std::string>& arguments, Instance& made) {
    if (arguments.size() != 1) return false;
    made.dtypes.push_back(dtype_of(arguments[0]));
    made.entry = &select_forward;
    return made.dtypes[0] != nullptr && msops::has_select(made.dtypes[0]->name);
  }
};

struct Select : Selecting {
  static constexpr const char* kName = "CalSelect";
  using Signature = int(const void*, const void*, const void*, void*, size_t, void*);

  static bool run(const Slot& slot, const void* condition, const void* x, const void* y, void* z, size_t elements,
                  void* stream) {
    if (!may_run(slot, elements, stream)) return false;
    const int64_t shape[] = {static_cast<int64_t>(elements)};
    Call call;
    call.tensor(condition, &kDtypes[0], shape, 1).tensor(x, slot.dtypes[0], shape, 1);
    return call.tensor(y, slot.dtypes[0], shape, 1).tensor(z, slot.dtypes[0], shape, 1).run(*slot.entry, stream);
  }
};

// MindSpore's strides of a condition, two inputs and an output. A stride of an axis of length 1 is 0.
struct SelectStrides {
  static constexpr size_t kMost = 8;
  size_t inputs[3][kMost], output[kMost];
};

struct SelectBroadcast : Selecting {
  static constexpr const char* kName = "CalSelectBroadcast";
  using Signature = int(const void*, const void*, const void*, void*, size_t, size_t, const SelectStrides&, uint32_t,
                        void*);

  static bool run(const Slot& slot, const void* condition, const void* x, const void* y, void* z, size_t rank,
                  size_t elements, const SelectStrides& strides, uint32_t, void* stream) {
    constexpr size_t kMost = SelectStrides::kMost;
    if (!may_run(slot, elements, stream) || rank == 0 || rank > kMost) return false;
    int64_t shape[kMost], shapes[3][kMost];
    for (size_t i = 0; i < rank; ++i) {
      const size_t outer = i == 0 ? elements : strides.output[i - 1];
      if (strides.output[i] == 0 || outer % strides.output[i] != 0) return false;
      shape[i] = static_cast<int64_t>(outer / strides.output[i]);
    }
    for (int k = 0; k < 3; ++k) {
      int64_t stride = 1;
      for (size_t i = rank; i-- > 0; stride *= shapes[k][i]) {
        shapes[k][i] = strides.inputs[k][i] == 0 ? 1 : shape[i];
        if (shapes[k][i] != 1 && strides.inputs[k][i] != static_cast<size_t>(stride)) return false;
      }
    }
    Call call;
    call.tensor(condition, &kDtypes[0], shapes[0], rank).tensor(x, slot.dtypes[0], shapes[1], rank);
    return call.tensor(y, slot.dtypes[0], shapes[2], rank)
        .tensor(z, slot.dtypes[0], shape, rank)
        .run(*slot.entry, stream);
  }
};

// y = mask ? value : x, where `inner` elements in a row have one value.
struct MaskedFill : Selecting {
  static constexpr const char* kName = "ElewiseMaskedFill";
  using Signature = int(size_t, size_t, const void*, const void*, void*, void*, uint32_t, void*);

  static bool run(const Slot& slot, size_t inner, size_t elements, const void* x, const void* mask, void* value,
                  void* y, uint32_t, void* stream) {
    if (!may_run(slot, elements, stream) || inner == 0) return false;
    if (inner < elements && elements % inner != 0) return false;
    const int64_t rows = inner < elements ? static_cast<int64_t>(elements / inner) : 1;
    const int64_t shape[] = {rows, static_cast<int64_t>(elements) / rows}, values[] = {rows, 1};
    Call call;
    call.tensor(mask, &kDtypes[0], shape, 2).tensor(value, slot.dtypes[0], values, 2);
    return call.tensor(x, slot.dtypes[0], shape, 2).tensor(y, slot.dtypes[0], shape, 2).run(*slot.entry, stream);
  }
};

struct BroadcastMaskedFill : Selecting {
  static constexpr const char* kName = "BroadcastMaskedFill";
  using Signature = int(size_t, const Sizes&, const Sizes&, const Sizes&, const void*, const void*, void*, void*,
                        uint32_t, void*);

  static bool run(const Slot& slot, size_t inner, const Sizes& x_shape, const Sizes& mask_shape, const Sizes& y_shape,
                  const void* x, const void* mask, void* value, void* y, uint32_t, void* stream) {
    const size_t elements = product(y_shape);
    if (!may_run(slot, elements, stream) || inner < elements) return false;
    constexpr int64_t kOne[] = {1};
    const auto shape = [](const Sizes& sizes) { return reinterpret_cast<const int64_t*>(sizes.data()); };
    Call call;
    call.tensor(mask, &kDtypes[0], shape(mask_shape), mask_shape.size()).tensor(value, slot.dtypes[0], kOne, 1);
    call.tensor(x, slot.dtypes[0], shape(x_shape), x_shape.size());
    return call.tensor(y, slot.dtypes[0], shape(y_shape), y_shape.size()).run(*slot.entry, stream);
  }
};

}  // namespace kernels
