// A Window says which elements of memory a strided view has. A Copy reads them, and writes contiguous memory.
#pragma once

#include <algorithm>
#include <cstdio>

#include "../common/axes.h"
#include "../common/call.h"
#include "../common/pack.h"

namespace msops::strided_copy {

constexpr int kMostRank = 8, kMostAxes = kMostRank + 1;  // an element of several parts adds an axis
constexpr int64_t kFar = (int64_t{1} << 40) - 1;         // no attribute is larger, so that few sums overflow

struct Window {
  int rank = 0;
  int64_t offset, size[kMostAxes], stride[kMostAxes];  // in elements

  explicit Window(Call& call) {
    rank = static_cast<int>(call.attribute("rank", 0, kMostRank));
    offset = call.attribute("offset", 0, kFar);
    for (int a = 0; a < rank; ++a) {
      char size_of[24], stride_of[24];
      std::snprintf(size_of, sizeof size_of, "size_%d", a), std::snprintf(stride_of, sizeof stride_of, "stride_%d", a);
      size[a] = call.attribute(size_of, 0, kFar), stride[a] = call.attribute(stride_of, -kFar, kFar);
    }
  }

  bool is_empty() const { return std::find(size, size + rank, 0) != size + rank; }

  // Returns the window for elements that are cut into so many parts.
  Window in_parts(int parts) const {
    Window result = *this;
    if (parts == 1) return result;
    result.offset *= parts;
    for (int a = 0; a < rank; ++a) result.stride[a] *= parts;
    result.size[rank] = parts, result.stride[result.rank++] = 1;
    return result;
  }

  // Requires a tensor of the window's shape, and that the memory of `x` has all elements of the window.
  void require(Call& call, const Tensor& x, const Tensor& view) const {
    call.require_shape(view, std::vector<int64_t>(size, size + rank));
    if (!call.ok() || is_empty()) return;
    double low = static_cast<double>(offset), high = low;  // exact, or far from what they are compared with
    for (int a = 0; a < rank; ++a)
      (stride[a] < 0 ? low : high) += static_cast<double>(size[a] - 1) * static_cast<double>(stride[a]);
    call.require(low >= 0, kBadAttribute, "the strides lead to elements before the first one of %s", x.name);
    call.require(high < static_cast<double>(x.size), kBadShape, "%s has %lld elements, too few for these strides",
                 x.name, static_cast<long long>(x.size));
  }
};

// y[i] = x[sum of coordinates of i times strides], for all elements i of y
template <typename T>
struct Copy {
  Axes<1> axes;  // x's strides along y's axes
  const T* x;
  const T* memory;  // where what may be read begins
  int64_t room;     // how many elements that is
  T* y;

  int64_t length() const { return axes.count ? axes.size[axes.count - 1] : 1; }
  int64_t stride() const { return axes.count ? axes.stride[0][axes.count - 1] : 1; }  // along the rows of y
  Axes<1> outer() const {
    Axes<1> result = axes;
    result.count = std::max(0, axes.count - 1);
    return result;
  }
};

// A Scatter writes each element of contiguous dy to an element of dx, no two to the same one. Its axes go from the
// widest stride of dx to the smallest; all strides of dx are positive.
template <typename T>
struct Scatter {
  Axes<2> axes;    // strides of dx, then of dy
  const T* dy;     // the element that goes to dx[offset]
  const T* dy_at;  // the first element in memory
  T* dx;
  int64_t offset, size;  // of dx

  Scatter(const Window& w, const T* dy_, T* dx_, int64_t size_)
      : dy(dy_), dy_at(dy_), dx(dx_), offset(w.offset), size(size_) {
    int order[kMostAxes];
    int64_t apart[kMostAxes], of_dy[kMostAxes], next = 1;
    for (int a = w.rank - 1; a >= 0; next *= w.size[a--]) {
      order[a] = a, apart[a] = w.stride[a], of_dy[a] = next;
      if (apart[a] >= 0) continue;
      offset += (w.size[a] - 1) * apart[a], dy += (w.size[a] - 1) * next;
      apart[a] = -apart[a], of_dy[a] = -next;
    }
    if (w.is_empty()) {
      axes.push(0, {1, 1});
      return;
    }
    std::stable_sort(order, order + w.rank, [&](int a, int b) { return apart[a] > apart[b]; });
    for (int k = 0; k < w.rank; ++k) axes.push(w.size[order[k]], {apart[order[k]], of_dy[order[k]]});
  }

  // Returns whether no element of dx is written twice, as far as that shows by each stride being wider than all that
  // the smaller ones reach.
  bool is_distinct() const {
    double reach = 0;
    for (int a = axes.count - 1; a >= 0; --a) {
      const double apart = static_cast<double>(axes.stride[0][a]);
      if (apart <= reach) return false;
      reach += static_cast<double>(axes.size[a] - 1) * apart;
    }
    return true;
  }

  // Returns whether all of dx is written, so that it is a copy of dy in another order.
  bool is_whole() const { return axes.total() == size; }
  Copy<T> as_copy() const {
    Copy<T> copy{{}, dy, dy_at, size, dx};
    for (int a = 0; a < axes.count; ++a) copy.axes.push(axes.size[a], {axes.stride[1][a]});
    return copy;
  }
};

}  // namespace msops::strided_copy
