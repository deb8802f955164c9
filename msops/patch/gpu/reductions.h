// Stands in for MindSpore's functions that reduce axes.
#pragma once

#include <string_view>

#include "family.h"

namespace kernels {

inline Entry reduce_forward{"ReduceForward"}, reduce_forward_scratch{"ReduceForwardScratch"};

enum Reduction : int { kSum, kProd, kMax, kMin, kMean, kAny, kAll };  // the numbers of MindSpore's ReduceType_t

// Reduces and keeps the axes of x in turns.
class Reducer {
 public:
  Reducer(const Slot& slot, const int64_t* shape, size_t rank, bool first, int operation)
      : slot_(slot), shape_(shape), rank_(rank), first_(first), operation_(operation) {
    for (size_t i = first ? 1 : 0; i < rank && rank <= kMost; i += 2) kept_[axes_++] = shape[i];
  }

  // Partial results go to memory of so many bytes.
  bool run(const void* x, void* partial, size_t bytes, void* y, void* stream) const {
    if (rank_ == 0 || rank_ > kMost) return false;
    const Dtype* dtype = slot_.dtypes[0];
    const Dtype* accumulator = dtype_of(dtype->name == std::string_view("float64") ? "double" : "float");
    int64_t parts[] = {1, 1};
    ask_for_parts(x, parts);
    const int64_t room = static_cast<int64_t>(bytes / accumulator->bytes) / parts[1];
    if (parts[0] > room) parts[0] = room;
    if (parts[0] <= 1) parts[0] = parts[1] = 1;
    Call call;
    call.tensor(x, dtype, shape_, rank_).tensor(y, dtype, kept_, axes_).tensor(partial, accumulator, parts, 2);
    return call.attribute("msops_op", operation_).attribute("msops_first", first_).run(*slot_.entry, stream);
  }

 private:
  static constexpr size_t kMost = 3;

  // Asks into how many parts the terms of each result are best split, and how many numbers a part has.
  void ask_for_parts(const void* x, int64_t (&parts)[2]) const {
    using Ask = int (*)(int, int*, int64_t**, const char**, void*, int64_t*, int, char (*)[256]);
    constexpr int64_t kFew = 8192;  // elements that are never split
    if (reduce_forward_scratch.function == nullptr || product_of(shape_, rank_) < kFew) return;
    Call call;
    call.tensor(x, slot_.dtypes[0], shape_, rank_);
    call.attribute("msops_op", operation_).attribute("msops_first", first_);
    int64_t sizes[3];  // the rank, then the lengths
    char message[256];
    if (call.ask(reinterpret_cast<Ask>(reduce_forward_scratch.function), sizes, 3, &message) != 1 || sizes[0] != 2)
      return;
    parts[0] = sizes[1];
    parts[1] = sizes[2];
  }

  static int64_t product_of(const int64_t* shape, size_t rank) {
    int64_t result = 1;
    for (size_t i = 0; i < rank; ++i) result *= shape[i];
    return result;
  }

  const Slot& slot_;
  const int64_t* shape_;
  size_t rank_;
  bool first_;
  int operation_;
  int64_t kept_[kMost];
  size_t axes_ = 0;
};

struct Reducing {
  static constexpr size_t kRoom = 16;

  static bool accepts(const std::vector<std::string>& arguments, Instance& made) {
    made.entry = &reduce_forward;
    made.dtypes.push_back(arguments.empty() ? nullptr : dtype_of(arguments[0]));
    if (made.dtypes[0] == nullptr) return false;
    for (const std::string_view name : {"float16", "float32", "float64", "int32", "int64", "bool"}) {
      if (name == made.dtypes[0]->name) return true;
    }
    return false;
  }
};

struct Reduce : Reducing {
  static constexpr const char* kName = "ArrayReduce";
  using Signature = int(void*, const Sizes&, bool, int, void*, void*, void*);

  static bool run(const Slot& slot, void* x, const Sizes& shape, bool first, int operation, void* partial, void* y,
                  void* stream) {
    const size_t elements = product(shape);
    if (!may_run(slot, elements, stream) || !has(slot, operation)) return false;
    // MindSpore's memory for partial results has the size of x.
    const Reducer reducer(slot, reinterpret_cast<const int64_t*>(shape.data()), shape.size(), first, operation);
    return reducer.run(x, partial, elements * slot.dtypes[0]->bytes, y, stream);
  }

  static bool has(const Slot& slot, int operation) {
    const bool is_float = std::string_view(slot.dtypes[0]->name).substr(0, 5) == "float";
    const bool is_bool = std::string_view(slot.dtypes[0]->name) == "bool";
    return operation == kMean ? is_float : operation != kAny && operation != kAll ? operation >= kSum : is_bool;
  }
};

// The sums of the rows of a matrix. There is no memory for partial results.
struct SumOfRows : Reducing {
  static constexpr const char* kName = "CalBiasAddGradNHWC";
  using Signature = int(size_t, size_t, const void*, void*, void*);

  static bool run(const Slot& slot, size_t elements, size_t columns, const void* dy, void* db, void* stream) {
    if (!may_run(slot, elements, stream) || columns == 0 || elements % columns != 0) return false;
    const int64_t shape[] = {static_cast<int64_t>(elements / columns), static_cast<int64_t>(columns)};
    return Reducer(slot, shape, 2, true, kSum).run(dy, db, 0, db, stream);
  }
};

// The sums over all but the second of four axes.
struct SumOfPlanes : Reducing {
  static constexpr const char* kName = "CalBiasAddGradNCHW";
  using Signature = int(size_t, size_t, int, int, const void*, void*, void*);

  static bool run(const Slot& slot, size_t elements, size_t channels, int height, int width, const void* dy, void* db,
                  void* stream) {
    const int64_t plane = int64_t{height} * width, image = plane * static_cast<int64_t>(channels);
    if (!may_run(slot, elements, stream) || image <= 0 || elements % image != 0) return false;
    const int64_t shape[] = {static_cast<int64_t>(elements) / image, static_cast<int64_t>(channels), plane};
    return Reducer(slot, shape, 3, true, kSum).run(dy, db, 0, db, stream);
  }
};

}  // namespace kernels
