// Values that operators read back from the device while they were recorded, and what later replays compute in their
// place.
//
// Range, CumSum and others read their settings from tensors, which MindSpore has cast on the device, so that the values
// do not exist yet while the cast is recorded. They are known from the call before. Each replay copies what it computes
// for them to the host, so that a value that was no constant is noticed.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "driver.h"
#include "pool.h"

namespace graphs {

class Checks {
 public:
  static constexpr size_t kBytes = 256;  // of a value, at most

  explicit Checks(Pool* pool) : pool_(pool) {}

  // Records that a replay must compute these bytes at the address.
  Result add(const Driver& driver, Address at, const std::string& expected, Handle stream) {
    if (begin_ == nullptr) begin_ = pool_->allocate(kValues * kBytes);
    if (begin_ == nullptr || expected_.size() == kValues) return kOutOfMemory;
    expected_.push_back(expected);
    const auto place = reinterpret_cast<Address>(begin_) + (expected_.size() - 1) * kBytes;
    return driver.within_device(place, at, expected.size(), stream);
  }

  // Copies the values of the replay that the stream runs to the host, and compares those of the replay before the last,
  // which has ended, or nearly. Returns false if one differs.
  bool compare(const Driver& driver, Handle stream) {
    if (expected_.empty()) return true;
    Copy& copy = copies_[turn_ ^= 1];
    const bool equal = examine(driver, copy);
    if (copy.host == nullptr) {
      if (driver.allocate_on_host(&copy.host, kValues * kBytes) != 0) return false;
      if (driver.create_event(&copy.event, 0) != 0) return false;
    }
    driver.to_host(copy.host, reinterpret_cast<Address>(begin_), expected_.size() * kBytes, stream);
    copy.pending = driver.record_event(copy.event, stream) == 0;
    return equal;
  }

  // Compares the values of all replays so far.
  bool finish(const Driver& driver) {
    const bool first = examine(driver, copies_[0]);
    return examine(driver, copies_[1]) && first;
  }

  void give_back(const Driver& driver) {
    for (Copy& copy : copies_) {
      if (copy.host != nullptr) driver.free_on_host(copy.host);
      if (copy.event != nullptr) driver.destroy_event(copy.event);
      copy = {};
    }
    if (begin_ != nullptr) pool_->free(begin_);
    begin_ = nullptr;
  }

 private:
  static constexpr size_t kValues = 256;

  struct Copy {
    void* host = nullptr;
    Handle event = nullptr;
    bool pending = false;
  };

  bool examine(const Driver& driver, Copy& copy) const {
    if (!copy.pending) return true;
    copy.pending = false;
    if (driver.wait_for_event(copy.event) != 0) return false;
    for (size_t i = 0; i < expected_.size(); ++i) {
      const char* found = static_cast<const char*>(copy.host) + i * kBytes;
      if (std::memcmp(found, expected_[i].data(), expected_[i].size()) != 0) return false;
    }
    return true;
  }

  Pool* pool_;
  char* begin_ = nullptr;
  std::vector<std::string> expected_;
  Copy copies_[2];
  int turn_ = 0;
};

}  // namespace graphs
