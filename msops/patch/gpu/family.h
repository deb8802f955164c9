// What stands in the places of one function template of MindSpore: a function for each instance of the template.
//
// A function must know which instance it stands for, and gets nothing but MindSpore's arguments. So there are as many
// functions as a family has slots, and each knows its slot. Slots are written when the functions are put in place, and
// only read afterwards.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "names.h"
#include "thresholds.h"

namespace kernels {

using Shape = std::vector<int64_t>;
using Sizes = std::vector<size_t>;
static_assert(sizeof(long) == sizeof(int64_t), "MindSpore's std::vector<long> is read as a Shape");

// What an instance of a template is made for.
struct Instance {
  Entry* entry = nullptr;  // of msops, which does the work
  int operation = -1;
  std::vector<const Dtype*> dtypes;
};

struct Slot : Instance {
  std::string symbol;  // of MindSpore's function, whose slot it stays
  void* original = nullptr;
  size_t least = 1;  // from which number of elements on ours runs
  bool is_in_place = false;
  mutable std::atomic<size_t> done{0}, left{0};  // how many calls ours did, and left to MindSpore's function
};

// Whether the null stream means the CPU, as for entries that MindSpore calls there. Tests alone want that: on a GPU it
// is a stream like others, which our entries do not know.
inline bool null_is_cpu = false;

// Tells whether ours may run for a result of so many elements.
inline bool may_run(const Slot& slot, size_t elements, void* stream) {
  return elements >= slot.least && (stream != nullptr || null_is_cpu);
}

template <typename Numbers>
size_t product(const Numbers& numbers) {
  size_t result = 1;
  for (const auto number : numbers) result *= static_cast<size_t>(number);
  return result;
}

// A family says what the template is called, and what an instance does:
//   kName       the template's name
//   kRoom       how many instances there may be
//   Signature   MindSpore's function; all pointers to data are void*, and an enumeration is an int
//   accepts     reads the template arguments, and tells whether ours can stand for this instance
//   run         does the work, or returns false where only MindSpore's own function can
template <typename Family, typename Signature = typename Family::Signature>
struct Instances;

template <typename Family, typename... Arguments>
struct Instances<Family, int(Arguments...)> {
  static inline Slot slots[Family::kRoom];

  // Once for all slots.
  __attribute__((noinline)) static bool run(const Slot& slot, Arguments... arguments) {
    return Family::run(slot, arguments...);
  }

  template <size_t kSlot>
  static int stand_in(Arguments... arguments) {
    const Slot& slot = slots[kSlot];
    const bool is_done = !slot.entry->is_broken && run(slot, arguments...);
    (is_done ? slot.done : slot.left).fetch_add(1, std::memory_order_relaxed);
    if (is_done) return 0;
    return reinterpret_cast<int (*)(Arguments...)>(slot.original)(arguments...);
  }

  template <size_t... kSlots>
  static void* stand_in_of(size_t slot, std::index_sequence<kSlots...>) {
    static void* const all[] = {reinterpret_cast<void*>(&stand_in<kSlots>)...};
    return all[slot];
  }

  static bool accepts(const char* symbol) {
    Instance read;
    return is_instance(symbol, Family::kName) && Family::accepts(template_arguments(symbol), read);
  }

  // Returns what stands for MindSpore's function from now on, or null to leave it.
  static void* choose(const char* symbol, void* original) {
    if (!is_instance(symbol, Family::kName)) return nullptr;
    size_t i = 0;
    while (i < Family::kRoom && !slots[i].symbol.empty() && slots[i].symbol != symbol) ++i;
    if (i == Family::kRoom) return nullptr;
    Slot& slot = slots[i];
    if (slot.symbol.empty()) {
      Instance read;
      if (!Family::accepts(template_arguments(symbol), read)) return nullptr;
      static_cast<Instance&>(slot) = std::move(read);
      slot.symbol = symbol;
      slot.least = threshold_of(Family::kName);
    }
    if (slot.entry->function == nullptr) return nullptr;
    slot.original = original;
    slot.is_in_place = true;
    slot.done = slot.left = 0;
    return stand_in_of(i, std::make_index_sequence<Family::kRoom>());
  }

  static void forget() {
    for (Slot& slot : slots) slot.is_in_place = false;
  }

  // Appends a line for each function that is in place: how many calls ours did and left, the name, the
  // operation's number, and the dtypes.
  static void list(std::string& text) {
    for (const Slot& slot : slots) {
      if (!slot.is_in_place) continue;
      text += std::to_string(slot.done) + ' ' + std::to_string(slot.left) + ' ';
      text += std::string(Family::kName) + ' ' + std::to_string(slot.operation);
      for (const Dtype* dtype : slot.dtypes) text += std::string(" ") + dtype->name;
      text += '\n';
    }
  }
};

}  // namespace kernels
