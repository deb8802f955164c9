// rows[positions[n, j]] = x[n] for each slot (n, j), where the rows are sorted by the experts of their slots, and the
// gradient of x, a sum over the slots of each token.
//
//   invert         sorts the slots by expert, stably (common/scatter.h).
//   Groups         counts the rows of each expert, and finds where they begin, by a scan.
//   PlaceSlots     writes the position of each slot.
//   spread         copies the tokens, and zero_rows writes zeros after them (shared/routing/spread.h).

#include "common/scatter.h"
#include "shared/routing/collect.h"
#include "shared/routing/spread.h"

using namespace msops;
using namespace msops::routing;

namespace {

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
};

// Finds where the rows of each expert begin.
struct Groups {
  using State = SumStep<int32_t>;
  Sizes sizes;
  Inverse inverse;
  int32_t *group_sizes, *counts, *begins;

  MSOPS_BOTH State read(int64_t, int64_t expert) const { return {sizes.kept(count(expert))}; }
  MSOPS_BOTH void write(int64_t, int64_t expert, const State& before) const {
    counts[expert] = count(expert);
    group_sizes[expert] = sizes.kept(count(expert));
    begins[expert] = sizes.pad ? static_cast<int32_t>(expert * sizes.capacity) : before.sum;
  }

 private:
  MSOPS_BOTH int32_t count(int64_t expert) const {
    return static_cast<int32_t>(inverse.end(0, expert) - inverse.begin(0, expert));
  }
};

// Index i is a slot, and a place among the sorted slots.
template <typename Index>
struct PlaceSlots {
  Sizes sizes;
  Inverse inverse;
  const Index* experts;
  const int32_t* begins;
  int32_t* positions;

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    if (!is_expert(experts[i])) positions[i] = -1;
    const int64_t place = i;
    if (place >= inverse.end(0, sizes.experts - 1) - inverse.order) return;
    const int32_t slot = inverse.order[place];
    const int64_t expert = experts[slot];
    const int32_t rank = static_cast<int32_t>(place - (inverse.begin(0, expert) - inverse.order));
    positions[slot] = sizes.keeps(rank) ? begins[expert] + rank : -1;
  }

 private:
  MSOPS_BOTH bool is_expert(Index expert) const { return 0 <= expert && static_cast<int64_t>(expert) < sizes.experts; }
};

// Tells which rows have a slot.
struct HasSlot {
  Sizes sizes;
  const int32_t *group_sizes, *begins;

  MSOPS_BOTH bool operator()(int64_t row) const {
    const int64_t expert = sizes.pad ? row / sizes.capacity : sizes.experts - 1;
    return row < int64_t{begins[expert]} + group_sizes[expert];
  }
};

template <typename Index>
void require_experts(Call& call, const Tensor& experts, int64_t number) {
  const auto outside = gather::Outside::of<Index>(call, experts, -1, number);
  call.require(!outside.found, kBadValue, "%s[%s] is %lld, but num_experts is %lld", experts.name, outside.place,
               outside.index, static_cast<long long>(number));
}

}  // namespace

// (x, experts) -> (rows, positions, group_sizes, counts, places, begins): what comes after counts is scratch.
MSOPS_ENTRY(MoePermuteForward) {
  const Sizes sizes(call);
  const Tensor x = call.tensor("x", 2), experts = call.tensor_of("index", "experts");
  const Tensor rows = call.tensor("rows"), positions = call.tensor_of("int32", "positions");
  const Tensor group_sizes = call.tensor_of("int32", "group_sizes", 1), counts = call.tensor_of("int32", "counts", 1);
  const Tensor places = call.tensor_of("int32", "places", 1), begins = call.tensor_of("int32", "begins", 1);
  Slots::require_ranks(call, experts, rows);
  const int64_t columns = x.dim(1), slots = experts.size;
  call.require(experts.dim(0) == x.dim(0), kBadShape, "experts has %lld tokens, x has %lld",
               static_cast<long long>(experts.dim(0)), static_cast<long long>(x.dim(0)));
  if (sizes.pad) {
    call.require_shape(rows, {sizes.experts, sizes.capacity, columns});
  } else {
    call.require_shape(rows, {slots, columns});
  }
  call.require(!sizes.pad || size_of({sizes.experts, sizes.capacity}) <= INT32_MAX, kBadShape,
               "rows has more than 2^31 - 1 rows");
  call.require_same_shape(positions, experts);
  for (const Tensor& tensor : {group_sizes, counts, begins}) call.require_shape(tensor, {sizes.experts});
  call.require_shape(places, {scatter_scratch(sizes.experts, slots)});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    with_type<int32_t, int64_t>(experts, [&](auto index) {
      using Index = typename decltype(index)::type;
      const Index* const ids = experts.as<const Index>();
      int32_t* const of_groups = group_sizes.as<int32_t>();
      int32_t* const from = begins.as<int32_t>();
      if (call.is_on_cpu()) require_experts<Index>(call, experts, sizes.experts);
      const Inverse inverse = invert(call, 1, sizes.experts, slots, ids, places.as<int32_t>());
      Scan over_experts{1, sizes.experts, ScanOrder::kAlong};
      over_experts.exclusive = true;
      scan(call, over_experts, Groups{sizes, inverse, of_groups, counts.as<int32_t>(), from});
      parallel_for(call, slots, slots, PlaceSlots<Index>{sizes, inverse, ids, from, positions.as<int32_t>()}, 4);
      const Slots all(positions, rows);
      spread(call, Copies<T>{all, x.as<const T>(), rows.as<T>()});
      zero_rows(call, all.rows, columns, HasSlot{sizes, of_groups, from}, rows.as<T>());
    });
  });
}

MSOPS_SCRATCH(MoePermuteForward) {
  const Sizes sizes(call);
  call.tensor("x", 2);
  const Tensor experts = call.tensor_of("index", "experts");
  return {{scatter_scratch(sizes.experts, experts.size)}, {sizes.experts}};
}

// (drows, positions) -> (dx)
MSOPS_ENTRY(MoePermuteBackward) {
  const Tensor drows = call.tensor("drows"), positions = call.tensor_of("index", "positions");
  const Tensor dx = call.tensor("dx", 2);
  Slots::require_ranks(call, positions, drows);
  const Slots slots(positions, drows);
  call.require_shape(dx, {slots.tokens, slots.columns});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    slots.require_positions(call, positions, drows);
    collect(call, Sums<T>{slots, OptionalNumbers<T>(Tensor{}, 1), drows.as<const T>(), dx.as<T>()});
  });
}
