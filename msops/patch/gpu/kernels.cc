// Puts functions of msops in the places of those that launch MindSpore's kernels on a GPU (see kernels.py).
//
// MindSpore's plugin for GPUs calls a function template of another library for each kind of kernel. Functions of ours
// stand in the places where the plugin has the addresses of the template's instances (core/relocations.h). Each calls a
// C entry of msops on the stream that MindSpore gives, or the function that was there before: where the entry has no
// kernel for the dtype, the shape or the size, and where it fails.
#include <mutex>

#include "../../core/relocations.h"
#include "copies.h"
#include "elementwise.h"
#include "joins.h"
#include "reductions.h"

namespace kernels {
namespace {

template <typename... Families>
struct Table {
  static void* choose(const char* symbol, void* original) {
    void* found = nullptr;
    ((found = found != nullptr ? found : Instances<Families>::choose(symbol, original)), ...);
    return found;
  }
  static bool accepts(const char* symbol) { return (Instances<Families>::accepts(symbol) || ...); }
  static void forget() { (Instances<Families>::forget(), ...); }
  static void list(std::string& text) { (Instances<Families>::list(text), ...); }
  static std::string names() { return ((std::string(Families::kName) + '\n') + ...); }
};

using All =
    Table<Binary, BinaryExt, Cast, Select, SelectBroadcast, MaskedFill, BroadcastMaskedFill, AsStrided, Transpose,
          Broadcast, Tile, StridedSlice, Slice<1>, Slice<2>, Slice<3>, Slice<4>, Slice<5>, Slice<6>, Slice<7>,
          StridedSliceGradient, Band<true>, Band<false>, Reduce, SumOfRows, SumOfPlanes, Concat, Stack, Split, Unstack>;

Entry* const kEntries[] = {&binary_forward,     &compare_forward, &binary_mixed_forward,   &cast_forward,
                           &binary_ext_forward, &select_forward,  &strided_copy_forward,   &strided_copy_backward,
                           &band_forward,       &reduce_forward,  &reduce_forward_scratch, &concat_forward,
                           &stack_forward,      &split_forward};

struct State {
  std::mutex lock;
  msops::Relocations places;
  std::string text;

  void put_back() {
    places.restore();
    places = {};
    All::forget();
  }
};

State& state() {
  static State all;
  return all;
}

}  // namespace
}  // namespace kernels

#define EXPORT extern "C" __attribute__((visibility("default")))

// Puts ours in place, in the libraries whose path contains `plugin`. `names` and `functions` are the entries that there
// are. Returns how many functions of MindSpore have a stand-in.
EXPORT int kernels_install(const char* plugin, int count, const char* const* names, void* const* functions,
                           int null_is_cpu) {
  using namespace kernels;
  State& s = state();
  const std::lock_guard<std::mutex> guard(s.lock);
  s.put_back();
  kernels::null_is_cpu = null_is_cpu != 0;
  for (Entry* entry : kEntries) {
    entry->function = nullptr;
    entry->is_broken = false;
    for (int i = 0; i < count; ++i) {
      if (std::strcmp(names[i], entry->name) == 0) entry->function = reinterpret_cast<Function>(functions[i]);
    }
  }
  int found = 0;
  s.places.find(plugin, [&](const char* symbol, void* original) {
    void* stand_in = All::choose(symbol, original);
    found += stand_in != nullptr;
    return stand_in;
  });
  s.places.replace();
  return found;
}

// Puts MindSpore's functions back. Ours still work for threads that are about to call them.
EXPORT void kernels_undo() {
  kernels::State& s = kernels::state();
  const std::lock_guard<std::mutex> guard(s.lock);
  s.put_back();
}

// Returns a line for each function of MindSpore that has a stand-in now.
EXPORT const char* kernels_list() {
  kernels::State& s = kernels::state();
  const std::lock_guard<std::mutex> guard(s.lock);
  s.text.clear();
  kernels::All::list(s.text);
  return s.text.c_str();
}

// Returns the names of the templates, a line each.
EXPORT const char* kernels_templates() {
  static const std::string names = kernels::All::names();
  return names.c_str();
}

// Returns the names of the entries that are called, a line each.
EXPORT const char* kernels_entries() {
  static const std::string names = [] {
    std::string text;
    for (const kernels::Entry* entry : kernels::kEntries) text += std::string(entry->name) + '\n';
    return text;
  }();
  return names.c_str();
}

// Tells, for tests, whether ours would stand for a function of this mangled name, if all entries were there.
EXPORT int kernels_accepts(const char* symbol) { return kernels::All::accepts(symbol); }
