// Stands in for MindSpore's functions that join tensors and cut them. The addresses of the pieces lie on the device.
#pragma once

#include <string_view>

#include "family.h"

namespace kernels {

inline Entry concat_forward{"ConcatForward"}, stack_forward{"StackForward"}, split_forward{"SplitForward"};

// Elements are moved as they are: a complex number is one or two numbers of 8 bytes.
struct Units {
  const Dtype* dtype;
  int64_t each;  // how many units an element has

  explicit Units(const Dtype* elements) : dtype(elements), each(1) {
    if (std::string_view(elements->name).substr(0, 7) != "complex") return;
    dtype = dtype_of("double");
    each = static_cast<int64_t>(elements->bytes / dtype->bytes);
  }
};

template <Entry& kEntry>
struct Moving {
  static constexpr size_t kRoom = 16;

  static bool accepts(const std::vector<std::string>& arguments, Instance& made) {
    made.entry = &kEntry;
    made.dtypes.push_back(arguments.empty() ? nullptr : dtype_of(arguments[0]));
    return made.dtypes[0] != nullptr;
  }

  // Tells whether numbers are what entries take.
  template <typename... Numbers>
  static bool fits(Numbers... numbers) {
    constexpr int64_t kMost = int64_t{1} << 31;
    return ((0 < static_cast<int64_t>(numbers) && static_cast<int64_t>(numbers) < kMost) && ...);
  }
  static bool fits_whole(int64_t units) { return units <= (int64_t{1} << 31) - 65537; }

  static void add_pieces(Call& call, const void* pieces, const int64_t& count) {
    call.tensor(pieces, dtype_of("long"), &count, 1);
  }
};

struct Concat : Moving<concat_forward> {
  static constexpr const char* kName = "ConcatKernel";
  using Signature = int(size_t, int, int, int, int*, void**, void*, void*);

  static bool run(const Slot& slot, size_t elements, int pieces, int row, int inner, int* lengths, void** x, void* y,
                  void* stream) {
    const Units units(slot.dtypes[0]);
    const int64_t count = pieces, whole = static_cast<int64_t>(elements) * units.each;
    const int64_t row_units = row * units.each, inner_units = inner * units.each;
    if (!may_run(slot, elements, stream) || !fits(count, row_units, inner_units) || !fits_whole(whole)) return false;
    Call call;
    add_pieces(call, x, count);
    call.tensor(lengths, dtype_of("int"), &count, 1).tensor(y, units.dtype, &whole, 1);
    return call.attribute("msops_row", row_units).attribute("msops_inner", inner_units).run(*slot.entry, stream);
  }
};

struct Stack : Moving<stack_forward> {
  static constexpr const char* kName = "PackKernel";
  using Signature = int(size_t, size_t, size_t, void**, void*, void*);

  static bool run(const Slot& slot, size_t elements, size_t pieces, size_t inner, void** x, void* y, void* stream) {
    const Units units(slot.dtypes[0]);
    const int64_t count = static_cast<int64_t>(pieces), whole = static_cast<int64_t>(elements) * units.each;
    const int64_t length = static_cast<int64_t>(inner) * units.each;
    if (!may_run(slot, elements, stream) || !fits(count, length) || !fits_whole(whole)) return false;
    Call call;
    add_pieces(call, x, count);
    call.tensor(y, units.dtype, &whole, 1);
    return call.attribute("msops_length", length).run(*slot.entry, stream);
  }
};

// What the families that cut have in common: the whole is runs of `length` elements, which go to the pieces in turns.
struct Cutting : Moving<split_forward> {
  static bool cut(const Slot& slot, size_t elements, const void* x, size_t run_length, size_t pieces, void** y,
                  void* stream) {
    const Units units(slot.dtypes[0]);
    const int64_t count = static_cast<int64_t>(pieces), whole = static_cast<int64_t>(elements) * units.each;
    const int64_t length = static_cast<int64_t>(run_length) * units.each;
    if (!may_run(slot, elements, stream) || !fits(count, length) || !fits_whole(whole)) return false;
    Call call;
    call.tensor(x, units.dtype, &whole, 1);
    add_pieces(call, y, count);
    return call.attribute("msops_length", length).run(*slot.entry, stream);
  }
};

struct Split : Cutting {
  static constexpr const char* kName = "SplitKernel";
  using Signature = int(size_t, int, int, int, const void*, void**, void*);

  static bool run(const Slot& slot, size_t elements, int step, int row, int inner, const void* x, void** y,
                  void* stream) {
    const int64_t length = int64_t{step} * inner;
    if (length <= 0 || row % length != 0) return false;
    return cut(slot, elements, x, static_cast<size_t>(length), static_cast<size_t>(row / length), y, stream);
  }
};

struct Unstack : Cutting {
  static constexpr const char* kName = "UnpackKernel";
  using Signature = int(size_t, size_t, size_t, void**, const void*, void*);

  static bool run(const Slot& slot, size_t elements, size_t pieces, size_t inner, void** y, const void* x,
                  void* stream) {
    return cut(slot, elements, x, inner, pieces, y, stream);
  }
};

}  // namespace kernels
