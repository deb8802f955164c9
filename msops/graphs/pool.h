// The memory of the graphs of one function. It takes segments from MindSpore's pool and gives them back as a whole.
//
// Work that is recorded reuses memory in the order of the stream, as MindSpore's own pool lets it: a block that is
// freed serves what is recorded later. Graphs of one pool never run at once, so that they share its memory. A block
// that is still used when a recording ends, such as a result that the function keeps, stays out of later recordings
// until it is freed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace graphs {

class Pool {
 public:
  static constexpr size_t kUnit = 512;                   // bytes, of which sizes are multiples, as in MindSpore's pool
  static constexpr size_t kGrain = size_t{2} << 20;      // bytes, of which smaller segments are multiples
  static constexpr size_t kLargest = size_t{128} << 20;  // bytes of a segment that is larger than what asks for it

  using Take = std::function<char*(size_t bytes)>;  // returns null if there is no memory
  using Give = std::function<void(char* base)>;

  Pool(Take take, Give give) : take_(std::move(take)), give_(std::move(give)) {}

  static size_t rounded(size_t bytes, size_t unit = kUnit) {
    return std::max<size_t>((bytes + unit - 1) / unit, 1) * unit;
  }

  // Returns the smallest free block that has room, or null if there is no memory.
  char* allocate(size_t bytes) {
    bytes = rounded(bytes);
    auto best = spare_.lower_bound({bytes, nullptr});
    if (best == spare_.end()) {
      // Segments grow with what the pool holds, so that there are few, but not far, so that little is left of the last.
      // A larger one has the size of what asks for it, since MindSpore's pool may have a block of that size.
      const size_t size = std::max(bytes, rounded(std::min(held_ / 2, kLargest), kGrain));
      char* base = take_(size);
      if (base == nullptr) return nullptr;
      held_ += size;
      segments_[base] = size;
      blocks_[base] = {size, base, false};
      best = spare_.insert({size, base}).first;
    }
    char* found = best->second;
    spare_.erase(best);
    blocks_[found].used = true;
    cut(found, bytes);
    return found;
  }

  // Makes one block to several, of these sizes; the last gets what is left.
  std::vector<char*> divide(char* address, const std::vector<size_t>& sizes) {
    std::vector<char*> parts;
    for (size_t i = 0; i < sizes.size(); ++i) {
      parts.push_back(address);
      if (i + 1 == sizes.size()) break;
      const Block block = blocks_[address];
      blocks_[address].size = sizes[i];
      blocks_[address + sizes[i]] = {block.size - sizes[i], block.segment, true};
      address += sizes[i];
    }
    return parts;
  }

  // Returns whether the address begins a block that is used.
  bool owns(const void* address) const {
    const auto found = blocks_.find(static_cast<char*>(const_cast<void*>(address)));
    return found != blocks_.end() && found->second.used;
  }

  // Returns the beginning of the used block that has the address in it, or null.
  char* block_of(const void* address) const {
    auto next = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (next == blocks_.begin()) return nullptr;
    const auto found = std::prev(next);
    return found->second.used && address < found->first + found->second.size ? found->first : nullptr;
  }

  void free(char* address) {
    auto block = blocks_.find(address);
    block->second.used = false;
    const auto next = std::next(block);
    if (next != blocks_.end() && joins(block->second, next->second)) {
      spare_.erase({next->second.size, next->first});
      block->second.size += next->second.size;
      blocks_.erase(next);
    }
    if (block != blocks_.begin()) {
      const auto previous = std::prev(block);
      if (joins(block->second, previous->second)) {
        spare_.erase({previous->second.size, previous->first});
        previous->second.size += block->second.size;
        blocks_.erase(block);
        block = previous;
      }
    }
    spare_.insert({block->second.size, block->first});
  }

  // Frees a block except for parts of it.
  void keep_parts(char* address, std::vector<std::pair<char*, size_t>> parts) {
    const Block block = blocks_[address];
    const auto outside = [&](const auto& part) { return part.first < address || part.first >= address + block.size; };
    parts.erase(std::remove_if(parts.begin(), parts.end(), outside), parts.end());
    std::sort(parts.begin(), parts.end());
    std::vector<size_t> sizes;
    std::vector<bool> kept;
    char* next = address;
    for (const auto& [begin, size] : parts) {
      if (begin > next) sizes.push_back(begin - next), kept.push_back(false);
      sizes.push_back(size), kept.push_back(true);
      next = begin + size;
    }
    if (next < address + block.size) sizes.push_back(address + block.size - next), kept.push_back(false);
    const std::vector<char*> pieces = divide(address, sizes);
    for (size_t i = 0; i < pieces.size(); ++i) {
      if (!kept[i]) free(pieces[i]);
    }
  }

  // Gives back the segments that have no used block.
  void release() {
    for (auto segment = segments_.begin(); segment != segments_.end();) {
      const auto [base, size] = *segment;
      const auto block = blocks_.find(base);
      if (block->second.used || block->second.size != size) {
        ++segment;
        continue;
      }
      spare_.erase({size, base});
      blocks_.erase(block);
      held_ -= size;
      segment = segments_.erase(segment);
      give_(base);
    }
  }

  size_t held() const { return held_; }

 private:
  struct Block {
    size_t size = 0;
    char* segment = nullptr;
    bool used = false;
  };

  static bool joins(const Block& freed, const Block& other) { return !other.used && other.segment == freed.segment; }

  // Frees what a block has beyond `bytes`.
  void cut(char* address, size_t bytes) {
    const Block block = blocks_[address];
    if (block.size == bytes) return;
    blocks_[address].size = bytes;
    blocks_[address + bytes] = {block.size - bytes, block.segment, false};
    spare_.insert({block.size - bytes, address + bytes});
  }

  Take take_;
  Give give_;
  std::map<char*, Block> blocks_;
  std::map<char*, size_t> segments_;
  std::set<std::pair<size_t, char*>> spare_;
  size_t held_ = 0;
};

}  // namespace graphs
