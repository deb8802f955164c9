// MSOPS_SCRATCH tells msops how much scratch an entry needs, so that sizes which depend on the kernels are written
// where the kernels are. It follows the entry:
//
//   MSOPS_SCRATCH(ColumnSum) {
//     const Tensor x = call.tensor("x", 2);
//     return {{std::clamp<int64_t>(x.dim(0) / 64, 1, 1024), x.dim(1)}};
//   }
//
// It returns the shape of each scratch tensor that has no sizes in the signature. Its `call` has the inputs, which it
// takes in order, and the attributes, but no data. Since msops has checked the inputs, and the entry checks them again,
// it may leave out checks; yet it must not divide by a size that can be 0. After a check that fails, as in an entry,
// tensors are empty, and the call goes on to its end.
#pragma once

#include <algorithm>
#include <vector>

#include "call.h"

#define MSOPS_SCRATCH(name)                                                                                 \
  static msops::Shapes name##_scratch(msops::Call& call);                                                   \
  extern "C" __attribute__((visibility("default"))) int name##Scratch(                                      \
      int inputs, int* ndims, int64_t** shapes, const char** dtypes, void* extra, int64_t* sizes, int room, \
      char (*message)[256]) {                                                                               \
    static_cast<void>(name##_checked); /* MSOPS_ENTRY(name) must come before */                             \
    msops::Call call(#name, inputs, nullptr, ndims, shapes, dtypes, nullptr, extra);                        \
    return msops::write_shapes(name##_scratch(call), sizes, room, call, *message);                          \
  }                                                                                                         \
  static msops::Shapes name##_scratch([[maybe_unused]] msops::Call& call)

namespace msops {

using Shapes = std::vector<std::vector<int64_t>>;

// Returns the product of sizes, or 2^61 if it is larger: no tensor has as many elements, and two such numbers add up.
inline int64_t size_of(std::initializer_list<int64_t> sizes) {
  constexpr int64_t kMost = int64_t{1} << 61;
  int64_t product = 1;
  bool is_empty = false, overflows = false;
  for (const int64_t size : sizes) {
    is_empty |= size == 0;
    overflows |= __builtin_mul_overflow(product, std::max<int64_t>(size, 1), &product);
  }
  return is_empty ? 0 : overflows ? kMost : std::min(product, kMost);
}

// Requires tensors to have these shapes.
inline void require_shapes(Call& call, std::initializer_list<Tensor> tensors, const Shapes& shapes) {
  auto shape = shapes.begin();
  for (const Tensor& tensor : tensors) call.require_shape(tensor, *shape++);
}

// Writes the rank and the sizes of each shape to `sizes`, which has room for `room` numbers, and returns the number of
// shapes; or writes to `message` why not, and returns -1.
inline int write_shapes(const Shapes& shapes, int64_t* sizes, int room, Call& call, char (&message)[256]) {
  int64_t numbers = 0;
  for (const auto& shape : shapes) numbers += 1 + static_cast<int64_t>(shape.size());
  call.require(numbers <= room, kBadShape, "scratch has more than %d sizes", room);
  if (!call.ok()) return call.copy_message(message), -1;
  for (const auto& shape : shapes) {
    *sizes++ = static_cast<int64_t>(shape.size());
    sizes = std::copy(shape.begin(), shape.end(), sizes);
  }
  return static_cast<int>(shapes.size());
}

}  // namespace msops
