// rows[positions[n, j]] = x[n] for each slot (n, j), where the rows are sorted by the experts of their slots, and the
// gradient of x, a sum over the slots of each token.
//
//   place          finds the row of each slot, and the rows of each expert (moe_permute/place.h).
//   spread         copies the tokens, and zero_rows writes zeros after them (shared/routing/spread.h).

#include "moe_permute/place.h"
#include "shared/routing/collect.h"
#include "shared/routing/spread.h"

using namespace msops;
using namespace msops::routing;

namespace {

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
      if (call.is_on_cpu()) require_experts<Index>(call, experts, sizes.experts);
      const Placement<Index> placement{sizes,
                                       slots,
                                       experts.as<const Index>(),
                                       positions.as<int32_t>(),
                                       group_sizes.as<int32_t>(),
                                       counts.as<int32_t>(),
                                       begins.as<int32_t>()};
      place(call, placement, places.as<int32_t>());
      const Slots all(positions, rows);
      spread(call, Copies<T>{all, x.as<const T>(), rows.as<T>()});
      zero_rows(call, all.rows, columns, HasSlot{sizes, placement.group_sizes, placement.begins}, rows.as<T>());
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
