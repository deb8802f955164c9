// Calls a C entry of msops with tensors and attributes that lie on the stack, so that a call allocates nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kernels {

struct Dtype {
  const char* name;  // as entries get it
  const char* type;  // as a demangled name has it
  size_t bytes;
};

constexpr Dtype kDtypes[] = {
    {"bool", "bool", 1},
    {"int8", "signed char", 1},
    {"int8", "char", 1},
    {"int16", "short", 2},
    {"int32", "int", 4},
    {"int64", "long", 8},
    {"uint8", "unsigned char", 1},
    {"uint16", "unsigned short", 2},
    {"uint32", "unsigned int", 4},
    {"uint64", "unsigned long", 8},
    {"float16", "__half", 2},
    {"float32", "float", 4},
    {"float64", "double", 8},
    {"complex64", "mindspore::utils::Complex<float>", 8},
    {"complex128", "mindspore::utils::Complex<double>", 16},
};

using Function = int (*)(int nparam, void** params, int* ndims, int64_t** shapes, const char** dtypes, void* stream,
                         void* extra);

struct Entry {
  const char* name;
  Function function = nullptr;
  std::atomic<bool> is_broken{false};  // once a launch failed, such as on a GPU that the library has no code for
};

// Has the virtual functions of MindSpore's AotExtra, as far as entries use them, in the same order. Where that takes a
// std::string by value, a pointer comes to an object that begins with the pointer to its characters.
class Attributes {
 public:
  virtual ~Attributes() = default;
  virtual bool HasAttr(const char* const* name) { return find(*name) != nullptr; }
  virtual bool GetAttrBool(const char* const* name) { return GetAttrInt(name) != 0; }
  virtual int64_t GetAttrInt(const char* const* name) {
    const int64_t* found = find(*name);
    return found == nullptr ? 0 : *found;
  }

  void set(const char* name, int64_t value) {
    names_[count_] = name;
    values_[count_++] = value;
  }

 private:
  const int64_t* find(const char* name) const {
    for (int i = 0; i < count_; ++i) {
      if (std::strcmp(names_[i], name) == 0) return &values_[i];
    }
    return nullptr;
  }

  static constexpr int kMost = 20;
  const char* names_[kMost];
  int64_t values_[kMost];
  int count_ = 0;
};

class Call {
 public:
  Call& tensor(const void* data, const Dtype* dtype, const int64_t* shape, size_t rank) {
    params_[count_] = const_cast<void*>(data);
    dtypes_[count_] = dtype->name;
    shapes_[count_] = rank == 0 ? nullptr : const_cast<int64_t*>(shape);
    ranks_[count_++] = static_cast<int>(rank);
    return *this;
  }
  Call& attribute(const char* name, int64_t value) {
    attributes_.set(name, value);
    return *this;
  }

  // Returns whether the entry has done the work.
  bool run(Entry& entry, void* stream) {
    const int status = entry.function(count_, params_, ranks_, shapes_, dtypes_, stream, &attributes_);
    constexpr int kNoGpuCode = 7, kLaunchFailed = 8;
    if (status == kNoGpuCode || status == kLaunchFailed) entry.is_broken = true;
    return status == 0;
  }

  // Asks an entry's function for the sizes of scratch: see aot_kernels/common/scratch.h.
  template <typename Ask, typename Message>
  int ask(Ask function, int64_t* sizes, int room, Message* message) {
    return function(count_, ranks_, shapes_, dtypes_, &attributes_, sizes, room, message);
  }

 private:
  static constexpr int kMost = 6;
  void* params_[kMost];
  int ranks_[kMost];
  int64_t* shapes_[kMost];
  const char* dtypes_[kMost];
  int count_ = 0;
  Attributes attributes_;
};

}  // namespace kernels
