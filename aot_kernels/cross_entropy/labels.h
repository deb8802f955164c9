// The labels of rows.
#pragma once

#include "../common/call.h"

namespace msops::cross_entropy {

// Labels are int32 or int64.
struct Labels {
  const void* data = nullptr;
  bool is_wide = false;

  Labels() = default;
  explicit Labels(const Tensor& labels)
      : data(labels.data), is_wide(labels.dtype && !std::strcmp(labels.dtype, "int64")) {}
  // Returns the labels of the rows from this one on.
  Labels from(int64_t row) const {
    Labels result = *this;
    result.data = static_cast<const char*>(data) + row * (is_wide ? 8 : 4);
    return result;
  }
  MSOPS_BOTH int64_t operator[](int64_t row) const {
    return is_wide ? static_cast<const int64_t*>(data)[row] : static_cast<const int32_t*>(data)[row];
  }
};

// Requires, on the CPU, that each label is a class or ignored.
inline void require_classes(Call& call, const Tensor& tensor, int64_t ignored, int64_t classes) {
  const Labels labels(tensor);
  for (int64_t i = 0; i < tensor.size && call.ok(); ++i) {
    const int64_t label = labels[i];
    call.require(label == ignored || (0 <= label && label < classes), kBadValue,
                 "labels[%lld] is %lld, expected a class from 0 to %lld, or ignore_index", static_cast<long long>(i),
                 static_cast<long long>(label), static_cast<long long>(classes - 1));
  }
}

}  // namespace msops::cross_entropy
