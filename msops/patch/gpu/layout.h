// Where a copy reads: an offset, and a stride in elements for each axis of the result.
#pragma once

#include <cstddef>
#include <cstdint>

#include "call.h"

namespace kernels {

class Layout {
 public:
  explicit Layout(int64_t offset = 0) : offset_(offset) {}

  // Adds an axis, after those that are there. It becomes one with the axis before it where the two are read as one.
  void add(int64_t length, int64_t stride) {
    if (length == 1) return;
    if (rank_ > 0 && strides_[rank_ - 1] == length * stride) {
      lengths_[rank_ - 1] *= length;
      strides_[rank_ - 1] = stride;
    } else if (rank_ == kMost) {
      is_too_long_ = true;
    } else {
      lengths_[rank_] = length;
      strides_[rank_++] = stride;
    }
  }

  bool fits() const { return !is_too_long_; }

  // Returns how many elements there must be to read from.
  int64_t reach() const {
    int64_t last = offset_;
    for (size_t i = 0; i < rank_; ++i) {
      if (strides_[i] > 0) last += (lengths_[i] - 1) * strides_[i];
    }
    return last + 1;
  }

  void add_result(Call& call, const void* y, const Dtype* dtype) const { call.tensor(y, dtype, lengths_, rank_); }

  void add_attributes(Call& call) const {
    static constexpr const char* kSizes[kMost] = {"msops_size_0", "msops_size_1", "msops_size_2", "msops_size_3",
                                                  "msops_size_4", "msops_size_5", "msops_size_6", "msops_size_7"};
    static constexpr const char* kStrides[kMost] = {"msops_stride_0", "msops_stride_1", "msops_stride_2",
                                                    "msops_stride_3", "msops_stride_4", "msops_stride_5",
                                                    "msops_stride_6", "msops_stride_7"};
    call.attribute("msops_rank", static_cast<int64_t>(rank_)).attribute("msops_offset", offset_);
    for (size_t i = 0; i < rank_; ++i) call.attribute(kSizes[i], lengths_[i]).attribute(kStrides[i], strides_[i]);
  }

 private:
  static constexpr size_t kMost = 8;
  int64_t offset_;
  int64_t lengths_[kMost] = {}, strides_[kMost] = {};
  size_t rank_ = 0;
  bool is_too_long_ = false;
};

}  // namespace kernels
