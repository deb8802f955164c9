// Memory of a graph's numbers: small blocks, none of which serves twice.
//
// MindSpore copies each Python number from the host to a block of its own, so that a network has thousands. The blocks
// lie side by side in banks, and each bank has an image of the numbers, from which one copy restores them all. The
// banks lie in a pool that no other recorded work uses: what the images hold must last.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "driver.h"
#include "pool.h"

namespace graphs {

class Banks {
 public:
  static constexpr size_t kBytes = 1024;  // bytes of a block; for 4 bytes MindSpore asks for more than 512

  explicit Banks(Pool* pool) : pool_(pool) {}

  // `last_node` is what was recorded last. It tells in `write` whether anything was recorded since.
  char* allocate(Handle last_node) {
    if (banks_.empty() || banks_.back().slots.size() == kSlots) {
      char* begin = pool_->allocate(2 * kSlots * kBytes);
      if (begin == nullptr) return nullptr;
      banks_.push_back({begin, {}, false});
    }
    Bank& bank = banks_.back();
    bank.slots.push_back({last_node, {}, 0});
    ++used_;
    return bank.begin + (bank.slots.size() - 1) * kBytes;
  }

  // Notes what the host writes to a block. Makes a constant of it, and returns the place of its image, where the caller
  // writes it, too. Returns null if the address is no block of a bank, has been written before, or if work was recorded
  // since it was allocated, which may have written it.
  char* write(const void* to, const void* from, size_t bytes, Handle last_node) {
    const auto [bank, slot] = find(to);
    if (slot == nullptr) return nullptr;
    const size_t at = static_cast<const char*>(to) - bank->begin, offset = at % kBytes;
    if (offset + bytes > kBytes) return nullptr;
    const bool first = slot->content.empty() && slot->last_node == last_node;
    slot->content.assign(static_cast<const char*>(from), bytes);
    slot->offset = offset;
    if (!first) return nullptr;
    bank->has_constants = true;
    return bank->begin + kSlots * kBytes + at;
  }

  // Reads what the host has written. Returns false if it has not written these bytes.
  bool read(const void* from, void* to, size_t bytes) {
    const auto [bank, slot] = find(from);
    if (slot == nullptr) return false;
    const size_t offset = (static_cast<const char*>(from) - bank->begin) % kBytes;
    if (offset < slot->offset || offset + bytes > slot->offset + slot->content.size()) return false;
    std::memcpy(to, slot->content.data() + (offset - slot->offset), bytes);
    return true;
  }

  // Notes that MindSpore no longer uses a block. Returns false if the address is none.
  bool free(const void* address) {
    if (find(address).second == nullptr) return false;
    --used_;
    return true;
  }

  bool has(const void* address) { return find(address).second != nullptr; }

  Result restore(const Driver& driver, Handle stream) const {
    for (const Bank& bank : banks_) {
      if (!bank.has_constants) continue;
      const auto to = reinterpret_cast<Address>(bank.begin);
      const Result error = driver.within_device(to, to + kSlots * kBytes, bank.slots.size() * kBytes, stream);
      if (error != 0) return error;
    }
    return 0;
  }

  void give_back() {
    for (const Bank& bank : banks_) pool_->free(bank.begin);
    banks_.clear();
  }

  // Returns how many blocks MindSpore uses.
  long used() const { return used_; }

 private:
  static constexpr size_t kSlots = 512;  // of a bank

  struct Slot {
    Handle last_node;
    std::string content;
    size_t offset;
  };
  struct Bank {
    char* begin;  // of the blocks; as many bytes follow for the images
    std::vector<Slot> slots;
    bool has_constants;
  };

  std::pair<Bank*, Slot*> find(const void* address) {
    for (Bank& bank : banks_) {
      const auto* at = static_cast<const char*>(address);
      if (at < bank.begin || at >= bank.begin + bank.slots.size() * kBytes) continue;
      return {&bank, &bank.slots[(at - bank.begin) / kBytes]};
    }
    return {nullptr, nullptr};
  }

  Pool* pool_;
  std::vector<Bank> banks_;
  long used_ = 0;
};

}  // namespace graphs
