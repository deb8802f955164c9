// A Plan tells which item, a tile of rows with a part of the keys of a head, a block takes. How many items a sequence
// has is known on the GPU alone, so a launch before counts them, or each block does if there are few sequences. Blocks
// take items until there are no more.
//
// Rows are the tokens of a sequence for all heads that read the same keys, one head after another, or for one head.
#pragma once

#include "../common/gpu/griddepcontrol.h"
#include "../common/gpu/unrolled.h"
#include "../common/launch.h"
#include "problem.h"

#ifdef __CUDACC__

namespace msops::paged {

constexpr int kPlanThreads = 1024;
constexpr int kFewSequences = 64;

struct Plan {
  // (batch + 1): the number of the first item of each sequence, and of all items; null if each block counts them
  int64_t* first;
  int rows;                       // of a tile
  int64_t least_rows, most_rows;  // sequences with so many rows have items
  int64_t heads, group;           // rows are those of `group` heads, of which there are `heads`
  unsigned* tickets;              // a counter that starts at 0, or null

  __device__ int64_t tiles(const Sequence& s) const {
    const int64_t count = s.tokens * group;
    return least_rows <= count && count <= most_rows ? parts_of(count, rows) : 0;
  }
  template <typename P>
  __device__ int64_t items(const P& p, int64_t b) const {
    const Sequence s = p.sequence(b);
    return heads * tiles(s) * p.parts_of_sequence(s);
  }

  // Counts the items of up to kFewSequences sequences. The first warp of a block calls this.
  template <typename P>
  __device__ void count_few(const P& p, int64_t* to) const {
    constexpr int kEach = kFewSequences / 32;
    int64_t own[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int b = static_cast<int>(threadIdx.x) * kEach + i;
      own[i] = b < p.batch ? items(p, b) : 0, sum += own[i];
    }
    int64_t before = sum;
    for (int apart = 1; apart < 32; apart *= 2) {
      const int64_t other = __shfl_up_sync(~0u, before, apart);
      before += static_cast<int>(threadIdx.x) >= apart ? other : 0;
    }
    before -= sum;
    if (threadIdx.x == 0) to[0] = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) before += own[i], to[threadIdx.x * kEach + i + 1] = before;
  }

  // Returns the sequence of an item.
  __device__ int64_t find(int64_t item, int64_t batch) const {
    int64_t low = 0, high = batch;  // first[low] <= item < first[high]
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (first[middle] <= item ? low : high) = middle;
    }
    return low;
  }
  // Does the same; a whole warp calls this.
  __device__ int find_by_warp(int64_t item, int batch) const {
    int low = 0, high = batch;
    while (high - low > 1) {
      const int each = (high - low + 31) / 32, own = low + static_cast<int>(threadIdx.x) % 32 * each;
      const unsigned begun = __ballot_sync(~0u, own < high && first[own] <= item);  // always by the first lane
      low += (__popc(begun) - 1) * each, high = high < low + each ? high : low + each;
    }
    return low;
  }
};

// Plans are those of the kernels of one call, of which each computes some sequences.
struct Plans {
  Plan plan[kMostPlans];
  int count;

  // Adds a plan that a launch has to count.
  void add(const Plan& one) {
    if (one.first) plan[count++] = one;
  }
};

// Item says what to compute. Its rows are from `row` on, at most Plan::rows, of `rows` in all. Numbers within a
// sequence have 32 bits, since q has several bytes for each of them, and 64-bit division takes a hundred instructions.
struct Item {
  Sequence s;
  int64_t b;
  unsigned head, row, rows, part, tokens;
  Span keys;  // of the part, that any of its tokens sees

  template <typename P>
  static __device__ Item of(const P& p, const Plan& plan, int64_t number) {
    Item item;
    item.b = plan.find(number, p.batch), item.s = p.sequence(item.b);
    const auto rest = static_cast<unsigned>(number - plan.first[item.b]);
    const auto tiles = static_cast<unsigned>(plan.tiles(item.s)), kv_heads = static_cast<unsigned>(p.kv_heads);
    item.tokens = static_cast<unsigned>(item.s.tokens);
    item.rows = item.tokens * static_cast<unsigned>(p.group);
    const unsigned outer = rest / tiles;
    item.row = (rest - outer * tiles) * plan.rows, item.part = outer / kv_heads;
    item.head = outer - item.part * kv_heads;
    // Rows of several heads have all tokens between them.
    const unsigned last = std::min(item.row + plan.rows, item.rows) - 1;
    const bool is_one_head = item.row / item.tokens == last / item.tokens;
    const Span tokens{is_one_head ? item.row % item.tokens : 0, is_one_head ? last % item.tokens + 1 : item.tokens};
    const Span seen = p.keys_of(item.s, tokens), part = p.part(item.s, item.part);
    item.keys = {most(seen.begin, part.begin), least(seen.end, part.end)};
    return item;
  }
  __device__ bool has(int r) const { return row + r < rows; }
  template <typename P>
  __device__ int64_t head_of(const P& p, int r) const {
    return head * p.group + (row + r) / tokens;
  }
  __device__ int64_t token_of(int r) const { return (row + r) % tokens; }
};

// A block makes a plan.
template <typename P>
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const P p, const Plans plans) {
  __shared__ int64_t sums[kPlanThreads];
  Plan plan = plans.plan[0];
#pragma unroll
  for (int i = 1; i < kMostPlans; ++i)
    if (blockIdx.x == i) plan = plans.plan[i];
  const int64_t each = parts_of(p.batch, kPlanThreads), begin = least(p.batch, threadIdx.x * each),
                end = least(p.batch, begin + each);
  int64_t own = 0;
  for (int64_t b = begin; b < end; ++b) own += plan.items(p, b);
  sums[threadIdx.x] = own;
  __syncthreads();
  for (int apart = 1; apart < kPlanThreads; apart *= 2) {
    const int64_t before = static_cast<int>(threadIdx.x) >= apart ? sums[threadIdx.x - apart] : 0;
    __syncthreads();
    sums[threadIdx.x] += before;
    __syncthreads();
  }
  int64_t first = sums[threadIdx.x] - own;
  for (int64_t b = begin; b < end; ++b) plan.first[b] = first, first += plan.items(p, b);
  if (threadIdx.x != kPlanThreads - 1) return;
  plan.first[p.batch] = sums[threadIdx.x];
  if (plan.tickets) *plan.tickets = 0;
}

// Launches nothing if there are no plans.
template <typename P>
void launch_plans(Call& call, const P& p, const Plans& plans) {
  launch(call, plan_kernel<P>, plans.count, kPlanThreads, 0, p, plans);
}

constexpr int kMergeThreads = 128;
constexpr int kMergeParts = 8, kMergeColumns = 4;  // of which a lane loads the sums at once

// Adds what the parts of a sequence's keys have summed, in order. A warp takes a token and a head.
template <typename P>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const P p, int64_t most_tokens, int64_t count) {
  using C = typename P::C;
  using T = typename P::Element;
  static_assert(kMostParts <= 32 && 32 % kMergeParts == 0, "a lane has a part");
  griddepcontrol_wait();
  const int64_t row = int64_t{blockIdx.x} * (kMergeThreads / 32) + threadIdx.x / 32;
  if (row >= count) return;
  const int lane = threadIdx.x % 32;
  const int64_t head = row % p.heads, i = row / p.heads % most_tokens, b = row / p.heads / most_tokens;
  const Sequence s = p.sequence(b);
  const int parts = static_cast<int>(p.parts_of_sequence(s));
  if (i >= s.tokens || !p.is_split(s) || parts == 1) return;
  C max = C(-INFINITY), sum = 0;
  if (lane < parts) {
    const C* const stats = p.partial_stats(lane, s, b, i, head);
    max = stats[0], sum = stats[1];
  }
  C greatest = max;
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    const C other = __shfl_xor_sync(~0u, greatest, apart);
    greatest = other > greatest ? other : greatest;
  }
  const C share = max == C(-INFINITY) ? C(0) : exp(max - greatest);
  sum *= share;
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  const int64_t token = s.first + i;
  const C inverse = sum == 0 ? C(0) : 1 / sum;
  const C* const sums = p.partial_sums(0, s, b, i, head);
  const int64_t apart = p.part_size();
  for (int64_t first = 0; first < p.value_width; first += 32 * kMergeColumns) {
    C total[kMergeColumns] = {};
    for (int begin = 0; begin < parts; begin += kMergeParts) {
      C loaded[kMergeParts][kMergeColumns];
      // What a part without keys holds is not read.
      unrolled<kMergeParts, kMergeColumns>([&](int k, int c) {
        const C of_part = __shfl_sync(~0u, share, begin + k);
        const int64_t column = first + 32 * c + lane;
        loaded[k][c] = of_part != 0 && column < p.value_width ? sums[(begin + k) * apart + column] : C(0);
      });
      unrolled<kMergeParts, kMergeColumns>(
          [&](int k, int c) { total[c] += __shfl_sync(~0u, share, begin + k) * loaded[k][c]; });
    }
#pragma unroll
    for (int c = 0; c < kMergeColumns; ++c) {
      const int64_t column = first + 32 * c + lane;
      if (column < p.value_width) p.out[(token * p.heads + head) * p.value_width + column] = T(total[c] * inverse);
    }
  }
  if (lane == 0) p.lse[head * p.tokens + token] = greatest + log(sum);
}

template <typename P>
void launch_merge(Call& call, const P& p) {
  if (p.parts == 1) return;
  const int64_t most_tokens = p.has_starts ? p.most_split : 1, count = p.batch * most_tokens * p.heads;
  [[maybe_unused]] static FactOfGpu<> fact;
  const bool can_wait = fact.get([] { return int{is_compiled_for(90, merge_kernel<P>)}; });
  const Grid grid(parts_of(count, kMergeThreads / 32));
  launch(call, merge_kernel<P>, grid.programmatic(can_wait), kMergeThreads, 0, p, most_tokens, count);
}

}  // namespace msops::paged

#endif
