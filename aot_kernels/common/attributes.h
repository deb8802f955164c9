// Reads integer attributes of an ops.Custom from the `extra` argument of a C entry.
//
// `extra` points to MindSpore's C++ class AotExtra, whose methods take a std::string by value. MindSpore's wheels are
// built with either layout of std::string, the old one from before GCC 5 or the new one, and a call with the wrong one
// crashes. So the class is called through its table of virtual functions, with a string that is valid in both layouts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace msops {

class AttributeName {
 public:
  explicit AttributeName(const char* name) {
    header_.length = header_.capacity = length_ = capacity_ = strnlen(name, sizeof characters_ - 1);
    std::memcpy(characters_, name, length_);
  }
  // Returns what this ABI passes for a std::string by value: the address of an object that the caller owns. Both
  // layouts begin with the pointer to the characters.
  const void* as_argument() const { return &data_; }

 private:
  const char* data_ = characters_;
  size_t length_, capacity_;  // new layout: in the object itself
  char unused_[16] = {};      // new layout: the rest of its local buffer
  struct {                    // old layout: directly in front of the characters
    size_t length, capacity;
    int64_t references = -1;  // "do not share": copies take their own memory
  } header_;
  char characters_[64] = {};
};

class Attributes {
 public:
  explicit Attributes(void* extra) : extra_(extra) {}

  // Reads the attribute `name` into *value. Returns false if there is no such attribute, or if it is not an integer.
  bool read(const char* name, int64_t* value) const {
    if (extra_ == nullptr) return false;
    const AttributeName key(name);
    void* const* methods = *static_cast<void* const* const*>(extra_);
    try {  // MindSpore throws if the attribute has another type
      if (!reinterpret_cast<HasAttr>(methods[kHasAttr])(extra_, key.as_argument())) return false;
      *value = reinterpret_cast<GetAttrInt>(methods[kGetAttrInt])(extra_, key.as_argument());
    } catch (...) {
      return false;
    }
    return true;
  }

 private:
  using HasAttr = bool (*)(void* self, const void* name);
  using GetAttrInt = int64_t (*)(void* self, const void* name);
  enum { kHasAttr = 2, kGetAttrInt = 4 };  // after two destructors and, between the two methods, GetAttrBool
  void* extra_;
};

}  // namespace msops
