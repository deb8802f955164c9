// Finds the row of each slot, which are sorted by expert, stably, and the rows of each expert.
//
//   device, sizes                  by                  why
//   GPU, up to kFewSlots slots     place_few_kernel    one launch: the others take longer than what few slots need
//   GPU, up to kManySlots slots    two kernels         chunks of slots are counted, then placed after those before
//   else                           invert, a scan      no step depends on how many slots chose an expert
//
// The first two need at most kFewExperts experts.
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

// A block takes a chunk of neighbouring slots, of which each warp has as many.
constexpr int kChunkThreads = 256, kChunkWarps = kChunkThreads / 32, kMostChunks = 128;
constexpr int64_t kManySlots = int64_t{1} << 20;

struct Chunks {
  int64_t of_warp, number;  // slots of a warp, a multiple of 32

  explicit Chunks(int64_t slots) {
    const int64_t warps = std::min<int64_t>(kMostChunks * kChunkWarps, (slots + 127) / 128);
    of_warp = ((slots + warps - 1) / warps + 31) / 32 * 32;
    number = (slots - 1) / (of_warp * kChunkWarps) + 1;
  }
  __device__ int64_t first() const { return (blockIdx.x * int64_t{kChunkWarps} + threadIdx.x / 32) * of_warp; }
};

// Calls f(slot, expert, lanes with the same expert) for the warp's slots, in their order. Slots without an expert have
// the expert -1.
template <typename Index, typename F>
__device__ void for_slots(const Placement<Index>& all, const Chunks& chunks, const F& f) {
  const int64_t end = min(chunks.first() + chunks.of_warp, all.slots);
  for (int64_t first = chunks.first(); first < end; first += 32) {
    const int64_t slot = first + threadIdx.x % 32;
    const int32_t expert = slot < end ? all.expert(slot) : -1;
    f(slot, expert, __match_any_sync(~0u, expert));
    __syncwarp();
  }
}

// Counts the slots of each expert in the warps of a block: counts[warp * experts + expert].
template <typename Index>
__device__ void count_in_warps(const Placement<Index>& all, const Chunks& chunks, int32_t* counts) {
  const int experts = static_cast<int>(all.sizes.experts), lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kChunkWarps * experts; i += kChunkThreads) counts[i] = 0;
  __syncthreads();
  int32_t* const own = counts + threadIdx.x / 32 * experts;
  for_slots(all, chunks, [&](int64_t, int32_t expert, unsigned same) {
    if (expert >= 0 && lane == __ffs(static_cast<int>(same)) - 1) own[expert] += __popc(same);
  });
  __syncthreads();
}

// of_chunks[chunk * experts + expert] = slots of the expert in the chunk
template <typename Index>
__global__ void __launch_bounds__(kChunkThreads)
    count_chunks_kernel(Placement<Index> all, Chunks chunks, int32_t* of_chunks) {
  extern __shared__ int32_t counts[];
  const int experts = static_cast<int>(all.sizes.experts);
  count_in_warps(all, chunks, counts);
  for (int e = threadIdx.x; e < experts; e += kChunkThreads) {
    int32_t sum = 0;
    for (int w = 0; w < kChunkWarps; ++w) sum += counts[w * experts + e];
    of_chunks[int64_t{blockIdx.x} * experts + e] = sum;
  }
}

// Each block adds up the counts of all chunks, and then places its own slots. `counts` also has the places where
// experts begin, and how many slots of each come in the chunks before.
template <typename Index>
__global__ void __launch_bounds__(kChunkThreads)
    place_chunks_kernel(Placement<Index> all, Chunks chunks, const int32_t* of_chunks) {
  extern __shared__ int32_t counts[];
  const int experts = static_cast<int>(all.sizes.experts), lane = threadIdx.x % 32;
  int32_t* const begins = counts + kChunkWarps * experts;
  count_in_warps(all, chunks, counts);
  for (int e = threadIdx.x; e < experts; e += kChunkThreads) {
    int32_t count = 0, before = 0;
#pragma unroll 8
    for (int chunk = 0; chunk < static_cast<int>(chunks.number); ++chunk) {
      const int32_t of_chunk = of_chunks[chunk * experts + e];
      count += of_chunk;
      before += chunk < static_cast<int>(blockIdx.x) ? of_chunk : 0;
    }
    for (int w = 0; w < kChunkWarps; ++w) {
      const int32_t of_warp = counts[w * experts + e];
      counts[w * experts + e] = before;
      before += of_warp;
    }
    begins[e] = all.sizes.kept(count);
    if (blockIdx.x == 0) all.counts[e] = count, all.group_sizes[e] = all.sizes.kept(count);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int32_t before = 0;
    for (int first = 0; first < experts; first += 32) {
      const int32_t kept = first + lane < experts ? begins[first + lane] : 0;
      int32_t sum = kept;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int32_t other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += other;
      }
      if (first + lane < experts) begins[first + lane] = all.sizes.begin(first + lane, before + sum - kept);
      before += __shfl_sync(~0u, sum, 31);
    }
  }
  __syncthreads();
  if (blockIdx.x == 0)
    for (int e = threadIdx.x; e < experts; e += kChunkThreads) all.begins[e] = begins[e];
  int32_t* const own = counts + threadIdx.x / 32 * experts;  // how many slots of each expert come before
  for_slots(all, chunks, [&](int64_t slot, int32_t expert, unsigned same) {
    const int32_t number = expert >= 0 ? own[expert] + __popc(same & ((1u << lane) - 1)) : 0;
    __syncwarp();
    if (expert >= 0 && lane == __ffs(static_cast<int>(same)) - 1) own[expert] += __popc(same);
    if (slot < all.slots) all.positions[slot] = expert >= 0 && all.sizes.keeps(number) ? begins[expert] + number : -1;
  });
}
#endif

// `scratch` has room for scatter_scratch(experts, slots) numbers.
template <typename Index>
void place(Call& call, const Placement<Index>& all, int32_t* scratch) {
#ifdef __CUDACC__
  if (!call.is_on_cpu() && all.slots <= kFewSlots && all.sizes.experts <= kFewExperts)
    return launch(call, place_few_kernel<Index>, 1, kFewThreads, 0, all);
  if (!call.is_on_cpu() && all.slots <= kManySlots && all.sizes.experts <= kFewExperts) {
    const Chunks chunks(all.slots);
    const int64_t bytes = (kChunkWarps + 1) * all.sizes.experts * static_cast<int64_t>(sizeof(int32_t));
    launch(call, count_chunks_kernel<Index>, chunks.number, kChunkThreads, bytes, all, chunks, scratch);
    return launch(call, place_chunks_kernel<Index>, chunks.number, kChunkThreads, bytes, all, chunks, scratch);
  }
#endif
  const Inverse inverse = invert(call, 1, all.sizes.experts, all.slots, all.experts, scratch);
  Scan over_experts{1, all.sizes.experts, ScanOrder::kAlong};
  over_experts.exclusive = true;
  scan(call, over_experts, FindBegins<Index>{all, inverse});
  parallel_for(call, all.slots, all.slots, PlaceSlots<Index>{all, inverse}, 4);
}

}  // namespace msops::routing
