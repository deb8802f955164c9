// A Call turns the seven raw arguments of a C entry into named, checked tensors, attributes and a stream.
//
//   MSOPS_ENTRY(SigmoidForward) {
//     const Tensor x = call.tensor("x"), y = call.tensor("y");
//     call.require_same_shape(y, x);
//     return call.run([&](auto type) { ... });
//   }
//
// The first failed check decides, and whatever follows it does nothing. On the CPU it becomes an exception if MindSpore
// calls the entry for an operator of custom_op, so that MindSpore's error tells the operator and the reason. Otherwise
// it becomes the entry's return value, and one line on stderr. A wrong number of parameters comes first: it makes
// entries take one for another.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <new>
#include <stdexcept>
#include <vector>

#include "attributes.h"
#include "dtype.h"
#include "open_sizes.h"

#define MSOPS_ENTRY(name)                                                                                             \
  static int name##_checked(msops::Call& call);                                                                       \
  extern "C" __attribute__((visibility("default"))) int name(int nparam, void** params, int* ndims, int64_t** shapes, \
                                                             const char** dtypes, void* stream, void* extra) {        \
    msops::Call call(#name, nparam, params, ndims, shapes, dtypes, stream, extra);                                    \
    return call.finish(name##_checked(call));                                                                         \
  }                                                                                                                   \
  extern "C" __attribute__((visibility("default"))) msops::Rule name##Rule;                                           \
  msops::Rule name##Rule = nullptr;                                                                                   \
  extern "C" __attribute__((visibility("default"))) msops::OpenSizes name##InferShape(int* ndims, int64_t** shapes,   \
                                                                                      void* extra) {                  \
    return msops::OpenSizes(name##Rule, ndims, shapes, extra);                                                        \
  }                                                                                                                   \
  static int name##_checked([[maybe_unused]] msops::Call& call)

// The section .comment of a library says what compiled it; 'python -m msops doctor' shows this.
#define MSOPS_TEXT(...) MSOPS_TEXT_OF(__VA_ARGS__)
#define MSOPS_TEXT_OF(...) #__VA_ARGS__
#ifdef __CUDACC__
asm(".ident \"msops: nvcc " MSOPS_TEXT(__CUDACC_VER_MAJOR__) "." MSOPS_TEXT(
    __CUDACC_VER_MINOR__) ", C++ compiler " __VERSION__ "\"");
#else
asm(".ident \"msops: C++ compiler " __VERSION__ "\"");
#endif

// GCC 11 and later compile std::vector into calls of this function, which the libstdc++ of Ubuntu 18.04 and 20.04
// lacks. Each library has it for itself.
namespace std {
[[noreturn]] __attribute__((weak)) void __throw_bad_array_new_length() { throw std::bad_array_new_length(); }
}  // namespace std
asm(".hidden _ZSt28__throw_bad_array_new_lengthv");

namespace msops {

// An entry returns one of these. MindSpore shows the number in its error.
enum Status : int {
  kOk = 0,
  kBadParameterCount = 1,
  kBadDtype = 2,
  kBadRank = 3,
  kBadShape = 4,
  kBadAttribute = 5,
  kNullPointer = 6,
  kNoGpuCode = 7,
  kLaunchFailed = 8,
  kBadValue = 9,
};

constexpr int kAnyRank = -1;

struct Tensor {
  const char* name = "";
  const char* dtype = nullptr;  // MindSpore's name; null if the tensor is absent
  void* data = nullptr;
  int rank = 0;
  const int64_t* shape = nullptr;
  int64_t size = 0;  // number of elements

  // Returns the length of axis i, where a negative i counts from the end. It is 0 for an axis that does not exist, so
  // that a check may read it whatever the rank is.
  int64_t dim(int i) const {
    const int d = i < 0 ? i + rank : i;
    return 0 <= d && d < rank ? shape[d] : 0;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// A Scalar is a number that an attribute holds, or a tensor of rank 0.
struct Scalar {
  double value = 0;
  Tensor tensor;
};

// Calls f(Type<T>{}) with the type T, out of several, of a tensor's elements; with the first type if the tensor is
// absent.
template <typename First, typename... T, typename F>
void with_type(const Tensor& tensor, F&& f) {
  dispatch(Types<First, T...>{}, tensor.dtype ? tensor.dtype : dtype_name<First>(), f);
}

class Call {
 public:
  // `params` is null in a call that asks for sizes (see scratch.h).
  Call(const char* entry, int nparam, void** params, int* ndims, int64_t** shapes, const char** dtypes, void* stream,
       void* extra)
      : entry_(entry),
        nparam_(nparam),
        params_(params),
        ndims_(ndims),
        shapes_(shapes),
        dtypes_(dtypes),
        stream_(stream),
        attributes_(extra) {}
  Call(const Call&) = delete;

  // Returns the next parameter. All parameters that it returns have one dtype, on which `run` dispatches.
  Tensor tensor(const char* name, int rank = kAnyRank) {
    const char* dtype = nullptr;
    const Tensor result = next(name, rank, &dtype);
    if (!ok()) return {};
    if (dtype_ == nullptr) dtype_ = dtype;
    require(fits(std::strcmp(dtype, dtype_) == 0), kBadDtype, "%s is %s, the others are %s", name, dtype, dtype_);
    return result;
  }

  // Returns the next parameter, which has a dtype of its own. The signature's words say which: "int32", "bool", "index"
  // (int32 or int64), "accumulator" (float64 beside float64, else float32), "common", or several with | between them.
  // "accumulator" and "common" refer to the first parameter without a dtype of its own, which must come before.
  Tensor tensor_of(const char* dtype, const char* name, int rank = kAnyRank) {
    const char* got = nullptr;
    const Tensor result = next(name, rank, &got);
    if (!ok()) return {};
    require(fits(is_one_of(got, dtype)), kBadDtype, "%s is %s, expected %s", name, got, dtype);
    return result;
  }

  // Returns the next parameter, which is scratch: float64 beside float64 tensors, float32 beside others.
  Tensor scratch(const char* name, int rank) { return tensor_of("accumulator", name, rank); }

  // Returns whether the optional tensor <name> is given.
  bool has(const char* name) {
    char key[64];
    std::snprintf(key, sizeof key, "has_%s", name);
    int64_t given = 0;
    return ok() ? attribute(key, 0, 1) != 0 : read("msops_", key, &given) && given;
  }

  // Returns the next parameter if the optional tensor <name> is given, else a tensor without data, dtype and elements.
  Tensor optional(const char* name, int rank = kAnyRank) { return has(name) ? tensor(name, rank) : Tensor{}; }
  Tensor optional_of(const char* dtype, const char* name, int rank = kAnyRank) {
    return has(name) ? tensor_of(dtype, name, rank) : Tensor{};
  }

  // Returns the attribute <name>, an int or a bool, which must lie in [low, high].
  int64_t attribute(const char* name, int64_t low, int64_t high) {
    if (!ok()) return low;
    int64_t value = 0, bits = 0;
    const bool is_whole = read("msops_", name, &value), is_float = !is_whole && read("msops_float_", name, &bits);
    require(!is_float, kBadAttribute, "attribute %s must be an int, got a float", name);
    require(is_whole, kBadAttribute, "attribute %s is missing", name);
    require(low <= value && value <= high, kBadAttribute, "attribute %s is %lld, expected %lld to %lld", name,
            static_cast<long long>(value), static_cast<long long>(low), static_cast<long long>(high));
    return ok() ? value : low;
  }

  // Returns the attribute <name>, a float or an int.
  double number(const char* name) {
    double value = 0;
    require(!ok() || find_number(name, &value), kBadAttribute, "attribute %s is missing", name);
    return value;
  }

  // Returns the attribute <name> or, if there is none, the next parameter, which then has rank 0.
  Scalar scalar(const char* name) {
    Scalar result;
    if (find_number(name, &result.value)) return result;
    result.tensor = tensor(name);
    require(result.tensor.rank == 0, kBadAttribute, "%s is neither an attribute nor an input of rank 0", name);
    return result;
  }

  __attribute__((format(printf, 4, 5))) void require(bool condition, Status status, const char* format, ...) {
    if (condition || !ok()) return;
    va_list values;
    va_start(values, format);
    std::vsnprintf(message_, sizeof message_, format, values);
    va_end(values);
    status_ = status;
  }

  void require_shape(const Tensor& tensor, std::initializer_list<int64_t> shape) {
    require_shape(tensor, shape.begin(), static_cast<int>(shape.size()));
  }
  void require_shape(const Tensor& tensor, const std::vector<int64_t>& shape) {
    require_shape(tensor, shape.data(), static_cast<int>(shape.size()));
  }
  void require_same_shape(const Tensor& tensor, const Tensor& other) { require_shape(tensor, other.shape, other.rank); }
  // Requires one element for each row: the shape of `matrix` without the last axis.
  void require_shape_of_rows(const Tensor& tensor, const Tensor& matrix) {
    require(matrix.rank > 0, kBadRank, "%s has no axes", matrix.name);
    require_shape(tensor, matrix.shape, matrix.rank - 1);
  }
  // Requires the gradient of an input, of its shape and dtype, where, and only where, the input is given.
  void require_gradient(const Tensor& gradient, const Tensor& input) {
    if (!ok()) return;
    const bool is_given = input.dtype, has_gradient = gradient.dtype;
    require(is_given == has_gradient, kBadParameterCount, "%s is given without its %s",
            is_given ? input.name : gradient.name, is_given ? "gradient" : "input");
    if (!ok() || !is_given) return;
    require_same_shape(gradient, input);
    require(std::strcmp(gradient.dtype, input.dtype) == 0, kBadDtype, "%s is %s, %s is %s", gradient.name,
            gradient.dtype, input.name, input.dtype);
  }

  // Calls `launch(Type<T>{})` for the tensors' dtype if all checks passed, and returns what the entry must return.
  // `run` accepts float16, float32 and float64; `run<int32_t, int64_t>` accepts int32 and int64 instead.
  template <typename... T, typename Launch>
  int run(Launch&& launch) {
    if constexpr (sizeof...(T) == 0) {
      return run<Half, float, double>(launch);
    } else {
      if (misread_ && next_ != nparam_) status_ = kOk;
      require(next_ == nparam_, kBadParameterCount, "takes %d parameters, got %d", next_, nparam_);
#ifndef __CUDACC__
      require(stream_ == nullptr, kNoGpuCode,
              "this library was built without nvcc and has no GPU code; put nvcc on the PATH and run 'make clean all'");
#endif
      const char* dtype = dtype_ ? dtype_ : "none";
      if (ok() && !dispatch(Types<T...>{}, dtype, launch)) {
        char known[160] = "";
        for (const char* name : {dtype_name<T>()...}) {
          if (*known) std::strcat(known, ", ");
          std::strcat(known, name);
        }
        require(false, kBadDtype, "%s is not one of %s", dtype, known);
      }
      return status_;
    }
  }

  // Returns the status that the entry returns, and tells the first failed check.
  int finish(int status) const {
    if (ok()) return status;
    char text[sizeof message_ + 128], label[65];
    if (find_label(label, sizeof label)) {
      std::snprintf(text, sizeof text, "%s: %s (%s)", label, message_, entry_);
      if (is_on_cpu()) throw std::runtime_error(text);  // on a GPU, MindSpore would lose the text
    } else {
      std::snprintf(text, sizeof text, "%s: %s", entry_, message_);
    }
    std::fprintf(stderr, "msops: %s\n", text);
    return status;
  }

  // Copies what the first failed check says.
  void copy_message(char (&message)[256]) const { std::memcpy(message, message_, sizeof message); }

  bool ok() const { return status_ == kOk; }
  int status() const { return status_; }
  bool is_on_cpu() const { return stream_ == nullptr; }

#ifdef __CUDACC__
  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_); }

  // Must follow each launch. It takes the launch's error out of the CUDA runtime, where it would stay and fail a later
  // call.
  void check_launch() {
    const cudaError_t error = cudaGetLastError();
    require(error == cudaSuccess, kLaunchFailed, "kernel launch failed: %s", cudaGetErrorString(error));
  }
#endif

 private:
  // Returns whether a dtype is one of those that the signature's words name.
  bool is_one_of(const char* dtype, const char* words) const {
    for (const char* word = words; *word;) {
      const size_t length = std::strcspn(word, "|");
      const auto is = [=](const char* name) {
        return std::strlen(name) == length && !std::strncmp(word, name, length);
      };
      if (is(dtype)) return true;
      if (is("index") && (!std::strcmp(dtype, "int32") || !std::strcmp(dtype, "int64"))) return true;
      if (is("common") && dtype_ && !std::strcmp(dtype, dtype_)) return true;
      const bool wide = dtype_ && !std::strcmp(dtype_, "float64");
      if (is("accumulator") && !std::strcmp(dtype, wide ? "float64" : "float32")) return true;
      word += length + (word[length] == '|');
    }
    return false;
  }

  bool read(const char* prefix, const char* name, int64_t* value) const {
    char key[128];
    std::snprintf(key, sizeof key, "%s%s", prefix, name);
    return attributes_.read(key, value);
  }

  // Writes the operator's label to `text`, which is empty if there is none. Each attribute has 8 of its characters.
  bool find_label(char* text, size_t room) const {
    std::memset(text, 0, room);
    int64_t characters = 0;
    char part[] = "0";
    for (char* end = text; end + sizeof characters < text + room && read("label_of_msops_", part, &characters);
         ++*part) {
      std::memcpy(end, &characters, sizeof characters);
      end += sizeof characters;
    }
    return *text != 0;
  }

  // A float attribute is passed as the bits of a double.
  bool find_number(const char* name, double* value) const {
    int64_t bits = 0;
    if (read("msops_float_", name, &bits)) return std::memcpy(value, &bits, sizeof bits), true;
    if (!read("msops_", name, &bits)) return false;
    return *value = static_cast<double>(bits), true;
  }

  // Returns whether a parameter's dtype or rank is right. It is also wrong where the entry takes another parameter for
  // this one, which `run` can tell by the number of parameters.
  bool fits(bool condition) {
    misread_ |= ok() && !condition;
    return condition;
  }

  // Counts parameters even after a failed check, for `run`.
  Tensor next(const char* name, int rank, const char** dtype) {
    const int i = next_++;
    require(i < nparam_, kBadParameterCount, "parameter %d (%s) is missing, got %d", i + 1, name, nparam_);
    if (!ok()) return {};
    Tensor result;
    result.name = name;
    result.dtype = dtypes_[i];
    result.data = params_ ? params_[i] : nullptr;
    result.rank = ndims_[i];
    result.shape = shapes_[i];
    *dtype = dtypes_[i];
    require(*dtype != nullptr, kBadDtype, "%s has no dtype", name);
    require(result.rank >= 0, kBadRank, "%s has rank %d", name, result.rank);
    require(fits(rank == kAnyRank || result.rank == rank), kBadRank, "%s has rank %d, expected %d", name, result.rank,
            rank);
    require(result.rank <= 0 || result.shape != nullptr, kNullPointer, "%s has no shape", name);
    if (!ok()) return {};
    result.size = 1;
    bool negative = false, overflow = false;
    int64_t bytes = 8;  // 8: the widest dtype; a dimension of 0 does not excuse the others
    for (int d = 0; d < result.rank; ++d) {
      const int64_t length = result.shape[d];
      negative |= length < 0;
      overflow |= __builtin_mul_overflow(bytes, length > 0 ? length : 1, &bytes);
      result.size = overflow || negative ? 0 : result.size * length;
    }
    require(!negative && !overflow, kBadShape, "%s has a shape that no memory can hold", name);
    require(result.size == 0 || result.data != nullptr || !params_, kNullPointer, "%s has no data", name);
    return ok() ? result : Tensor{};
  }

  void require_shape(const Tensor& tensor, const int64_t* shape, int rank) {
    if (!ok()) return;
    bool same = tensor.rank == rank;
    for (int d = 0; same && d < rank; ++d) same = tensor.shape[d] == shape[d];
    char got[100], expected[100];
    if (!same) {
      print_shape(got, sizeof got, tensor.shape, tensor.rank);
      print_shape(expected, sizeof expected, shape, rank);
      require(false, kBadShape, "%s has shape (%s), expected (%s)", tensor.name, got, expected);
    }
  }

  static void print_shape(char* text, size_t room, const int64_t* shape, int rank) {
    *text = 0;
    for (int d = 0; d < rank; ++d) {
      const int used = std::snprintf(text, room, d ? ", %lld" : "%lld", static_cast<long long>(shape[d]));
      if (used < 0 || static_cast<size_t>(used) >= room) return;
      text += used;
      room -= used;
    }
  }

  const char* entry_;
  int nparam_;
  void** params_;
  int* ndims_;
  int64_t** shapes_;
  const char** dtypes_;
  void* stream_;
  Attributes attributes_;
  int next_ = 0;
  const char* dtype_ = nullptr;
  bool misread_ = false;  // whether the first failed check was of a parameter's dtype or rank
  Status status_ = kOk;
  char message_[256];
};

}  // namespace msops
