// Finds the row of each slot, which are sorted by expert, stably, and the rows of each expert.
//
//   device, sizes                  by                  why
//   GPU, up to kFewSlots slots     place_few_kernel    one launch: the others take longer than what few slots need
//   else                           invert, a scan      no step depends on how many slots chose an expert
#pragma once

#include "../common/scatter.h"

namespace msops::routing {

struct Sizes {
  int64_t experts, capacity;  // capacity: rows that an expert keeps at most; 0 means all
  bool pad;                   // whether each expert has `capacity` rows

  explicit Sizes(Call& call)
      : experts(call.attribute("num_experts", 1, INT32_MAX)),
        capacity(call.attribute("capacity", 0, INT32_MAX)),
        pad(call.attribute("pad", 0, 1) != 0) {
    call.require(!pad || capacity > 0, kBadAttribute, "attribute pad is 1 without a capacity");
  }

  // Returns whether an expert keeps its slot of this number.
  MSOPS_BOTH bool keeps(int32_t number) const { return capacity == 0 || number < capacity; }
  MSOPS_BOTH int32_t kept(int32_t count) const { return keeps(count) ? count : static_cast<int32_t>(capacity); }
  // Returns where an expert's rows begin, if those before it keep so many.
  MSOPS_BOTH int32_t begin(int64_t expert, int32_t before) const {
    return pad ? static_cast<int32_t>(expert * capacity) : before;
  }
};

template <typename Index>
struct Placement {
  Sizes sizes;
  int64_t slots;
  const Index* experts;                    // of the slots
  int32_t* positions;                      // of the slots
  int32_t *group_sizes, *counts, *begins;  // of the experts

  MSOPS_BOTH int32_t expert(int64_t slot) const {
    const int64_t expert = experts[slot];
    return 0 <= expert && expert < sizes.experts ? static_cast<int32_t>(expert) : -1;
  }
};

// Finds where the rows of each expert begin.
template <typename Index>
struct FindBegins {
  using State = SumStep<int32_t>;
  Placement<Index> all;
  Inverse inverse;

  MSOPS_BOTH State read(int64_t, int64_t expert) const { return {all.sizes.kept(count(expert))}; }
  MSOPS_BOTH void write(int64_t, int64_t expert, const State& before) const {
    all.counts[expert] = count(expert);
    all.group_sizes[expert] = all.sizes.kept(count(expert));
    all.begins[expert] = all.sizes.begin(expert, before.sum);
  }

 private:
  MSOPS_BOTH int32_t count(int64_t expert) const {
    return static_cast<int32_t>(inverse.end(0, expert) - inverse.begin(0, expert));
  }
};

// Index i is a slot, and a place among the sorted slots.
template <typename Index>
struct PlaceSlots {
  Placement<Index> all;
  Inverse inverse;

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    if (all.expert(i) < 0) all.positions[i] = -1;
    const int64_t place = i;
    if (place >= inverse.end(0, all.sizes.experts - 1) - inverse.order) return;
    const int32_t slot = inverse.order[place], expert = all.expert(slot);
    const int32_t number = static_cast<int32_t>(place - (inverse.begin(0, expert) - inverse.order));
    all.positions[slot] = all.sizes.keeps(number) ? all.begins[expert] + number : -1;
  }
};

#ifdef __CUDACC__
constexpr int kFewThreads = 256, kFewSlots = 512, kFewExperts = 512;

// One block does it all. It counts by comparing: with so few slots, that takes some 500 steps of a thread.
template <typename Index>
__global__ void __launch_bounds__(kFewThreads) place_few_kernel(Placement<Index> all) {
  __shared__ int32_t chosen[kFewSlots], kept[kFewExperts], begins[kFewExperts];
  const int slots = static_cast<int>(all.slots), experts = static_cast<int>(all.sizes.experts);
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < slots; i += kFewThreads) chosen[i] = all.expert(i);
  __syncthreads();
  for (int e = thread; e < experts; e += kFewThreads) {
    int32_t count = 0;
    for (int i = 0; i < slots; ++i) count += chosen[i] == e;
    all.counts[e] = count;
    all.group_sizes[e] = kept[e] = all.sizes.kept(count);
  }
  __syncthreads();
  for (int e = thread; e < experts; e += kFewThreads) {
    int32_t before = 0;
    for (int other = 0; other < e; ++other) before += kept[other];
    all.begins[e] = begins[e] = all.sizes.begin(e, before);
  }
  __syncthreads();
  for (int i = thread; i < slots; i += kFewThreads) {
    const int32_t expert = chosen[i];
    int32_t number = 0;
    for (int other = 0; other < i; ++other) number += chosen[other] == expert;
    all.positions[i] = expert >= 0 && all.sizes.keeps(number) ? begins[expert] + number : -1;
  }
}
#endif

// `scratch` has room for scatter_scratch(experts, slots) numbers.
template <typename Index>
void place(Call& call, const Placement<Index>& all, int32_t* scratch) {
#ifdef __CUDACC__
  if (!call.is_on_cpu() && all.slots <= kFewSlots && all.sizes.experts <= kFewExperts)
    return launch(call, place_few_kernel<Index>, 1, kFewThreads, 0, all);
#endif
  const Inverse inverse = invert(call, 1, all.sizes.experts, all.slots, all.experts, scratch);
  Scan over_experts{1, all.sizes.experts, ScanOrder::kAlong};
  over_experts.exclusive = true;
  scan(call, over_experts, FindBegins<Index>{all, inverse});
  parallel_for(call, all.slots, all.slots, PlaceSlots<Index>{all, inverse}, 4);
}

}  // namespace msops::routing
