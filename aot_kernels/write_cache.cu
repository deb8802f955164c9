// cache[slots[t] / S, slots[t] % S] = rows[t], in place. Where several slots are equal, the last one's row is written,
// and nothing of the others, so that it does not matter which thread comes first.
//
//   up to kScan slots, on a GPU   a row's warp looks for its slot among those after it
//   others                        a table (write_cache/table.h) tells the last place of each slot

#include "common/pack.h"
#include "common/scratch.h"
#include "shared/gather/indices.h"
#include "write_cache/table.h"

using namespace msops;
using namespace msops::write_cache;

namespace {

constexpr int64_t kScan = 2048;  // slots, so that the scan takes no longer than the copy of a row of 2 KiB

struct Sizes {
  int64_t places, columns, count;  // rows of the cache, elements of a row, slots

  template <typename Index>
  MSOPS_BOTH bool has(Index slot) const {
    return slot >= 0 && static_cast<int64_t>(slot) < places;
  }
};

template <typename T, typename Index>
struct Write {
  Sizes sizes;
  const T* rows;
  const Index* slots;
  T* cache;
  int32_t* written;
  Table table;  // without entries where it is not used
};

// On the CPU, index t is a row.
template <typename T, typename Index>
struct CopyRow {
  Write<T, Index> all;

  MSOPS_CPU void operator()(int64_t t) const {
    const Index slot = all.slots[t];
    const bool is_last = all.sizes.has(slot) && all.table.find(slot) == t;
    all.written[t] = is_last;
    const int64_t columns = all.sizes.columns;
    if (is_last && columns > 0) memcpy(all.cache + slot * columns, all.rows + t * columns, columns * sizeof(T));
  }
};

#ifdef __CUDACC__
constexpr int kWarps = 4, kLoads = 4;  // rows of a block; packs that a lane loads before it stores them

template <typename Index>
__global__ void __launch_bounds__(kThreads) fill_table(const Sizes sizes, const Index* slots, const Table table) {
  const int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t < sizes.count && sizes.has(slots[t])) table.add(slots[t], t);
}

// Returns whether row t is the last one with its slot. All lanes of a warp ask.
template <typename T, typename Index>
__device__ __forceinline__ bool is_last(const Write<T, Index>& all, Index slot, int64_t t) {
  if (all.table.entries > 0) return all.table.find(slot) == t;
  bool found = false;
#pragma unroll 4
  for (int64_t other = t + 1 + threadIdx.x % 32; other < all.sizes.count; other += 32)
    found |= all.slots[other] == slot;
  return !__any_sync(~0u, found);
}

// A warp takes row t. It loads the first packs before it looks for the slot, so that both take their time at once.
template <int N, typename T, typename Index>
__global__ void __launch_bounds__(32 * kWarps) copy_rows(const Write<T, Index> all) {
  const int64_t t = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (t >= all.sizes.count) return;
  const int lane = threadIdx.x % 32;
  const Index slot = all.slots[t];
  const int64_t packs = all.sizes.columns / N;
  const T* const from = all.rows + t * all.sizes.columns;
  const bool is_inside = all.sizes.has(slot);
  Pack<T, N> kept[kLoads] = {};
#pragma unroll
  for (int j = 0; j < kLoads; ++j)
    if (is_inside && lane + 32 * j < packs) kept[j] = load<N>(from + int64_t{lane + 32 * j} * N);
  const bool writes = is_inside && is_last(all, slot, t);
  if (lane == 0) all.written[t] = writes;
  if (!writes) return;
  T* const to = all.cache + static_cast<int64_t>(slot) * all.sizes.columns;
#pragma unroll
  for (int j = 0; j < kLoads; ++j)
    if (lane + 32 * j < packs) store(to + int64_t{lane + 32 * j} * N, kept[j]);
#pragma unroll 4
  for (int64_t i = lane + 32 * kLoads; i < packs; i += 32) store(to + i * N, load<N>(from + i * N));
}

template <typename T, typename Index>
void write_on_gpu(Call& call, Write<T, Index> all) {
  if (all.sizes.count > kScan) {
    cudaMemsetAsync(all.table.slots, 0xff, all.table.bytes(), call.stream());
    launch(call, fill_table<Index>, (all.sizes.count + kThreads - 1) / kThreads, kThreads, 0, all.sizes, all.slots,
           all.table);
  } else {
    all.table.entries = 0;
  }
  with_width<T>(false, all.sizes.columns, {all.rows, all.cache}, [&](auto width) {
    constexpr int N = width;
    launch(call, copy_rows<N, T, Index>, (all.sizes.count + kWarps - 1) / kWarps, 32 * kWarps, 0, all);
  });
}
#endif

}  // namespace

// (cache, rows, slots) -> (written, table): `cache` is written, and written[t] tells whether row t was. `table` is
// scratch.
MSOPS_ENTRY(WriteCacheForward) {
  const Tensor cache = call.tensor("cache"), rows = call.tensor("rows"), slots = call.tensor_of("index", "slots", 1);
  const Tensor written = call.tensor_of("int32", "written", 1), table = call.tensor_of("int64", "table", 1);
  call.attribute("writes", 1, 1);
  call.require(cache.rank >= 2 && rows.rank == cache.rank - 1, kBadShape, "rows has rank %d, cache has rank %d",
               rows.rank, cache.rank);
  call.require(slots.dim(0) == rows.dim(0), kBadShape, "slots has %lld numbers, rows has %lld rows",
               static_cast<long long>(slots.dim(0)), static_cast<long long>(rows.dim(0)));
  int64_t columns = 1;
  for (int d = 1; call.ok() && d < rows.rank; ++d) {
    call.require(rows.dim(d) == cache.dim(d + 1), kBadShape, "rows has length %lld along axis %d, cache has %lld",
                 static_cast<long long>(rows.dim(d)), d, static_cast<long long>(cache.dim(d + 1)));
    columns *= rows.dim(d);
  }
  call.require_same_shape(written, slots);
  call.require_shape(table, {Table::scratch(slots.size)});
  return call.run<Half, float, double, int8_t>([&](auto type) {
    using T = Unit<sizeof(typename decltype(type)::type)>;
    with_type<int32_t, int64_t>(slots, [&](auto index) {
      using Index = typename decltype(index)::type;
      const Sizes sizes{cache.dim(0) * cache.dim(1), columns, slots.size};
      if (call.is_on_cpu()) gather::require_indices<Index>(call, slots, cache, sizes.places, "rows", INT64_MIN);
      if (!call.ok() || slots.size == 0) return;
      const Write<T, Index> all{
          sizes,         rows.as<const T>(),    slots.as<const Index>(),
          cache.as<T>(), written.as<int32_t>(), Table::at(table.as<unsigned long long>(), slots.size)};
      if (call.is_on_cpu()) {
        memset(all.table.slots, 0xff, all.table.bytes());
        for (int64_t t = 0; t < sizes.count; ++t)
          if (sizes.has(all.slots[t])) all.table.add(all.slots[t], t);
        on_cpu(call, sizes.count, CopyRow<T, Index>{all}, 1 + static_cast<double>(columns * sizeof(T)) / 8);
      }
#ifdef __CUDACC__
      if (!call.is_on_cpu()) write_on_gpu(call, all);
#endif
    });
  });
}

MSOPS_SCRATCH(WriteCacheForward) {
  call.tensor("cache"), call.tensor("rows");
  return {{Table::scratch(call.tensor_of("index", "slots", 1).size)}};
}
