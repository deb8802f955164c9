// scan() computes prefix scans along rows, by any associative function, in a fixed order and on both devices. An
// example is the linear recurrence h_t = a_t h_(t-1) + b_t, where each row has `length` steps:
//
//   template <typename T>
//   struct Recurrence {
//     using State = LinearStep<Compute<T>>;
//     int64_t length;
//     const T *a, *b;
//     T* h;
//
//     MSOPS_BOTH State read(int64_t row, int64_t t) const {
//       return {Compute<T>(a[row * length + t]), Compute<T>(b[row * length + t])};
//     }
//     MSOPS_BOTH void write(int64_t row, int64_t t, const State& prefix) const {
//       assign(h[row * length + t], prefix.b);
//     }
//   };
//
// This is the body of scan(call, Scan{rows, length, ScanOrder::kAlong}, body, scratch). A State has up to 32 bytes. Its
// default is the identity, and State::combine(earlier, later) joins two neighbouring parts of a row. `write` takes the
// combination of the row's steps up to and including t or, if the scan is exclusive, of the steps before t. It may
// write where `read` reads.
#pragma once

#include <algorithm>
#include <type_traits>

#include "parallel.h"

namespace msops {

// LinearStep is one step x -> a x + b; combine() chains two steps.
template <typename C>
struct LinearStep {
  C a = 1, b = 0;

  static MSOPS_BOTH LinearStep combine(const LinearStep& earlier, const LinearStep& later) {
    return {later.a * earlier.a, later.a * earlier.b + later.b};
  }
};

// SumStep is a term of a cumulative sum, of numbers of any type.
template <typename C>
struct SumStep {
  C sum = 0;

  static MSOPS_BOTH SumStep combine(const SumStep& earlier, const SumStep& later) { return {earlier.sum + later.sum}; }
};

// ScanOrder says what is contiguous in memory: the steps of a row, or one step of neighbouring rows.
enum class ScanOrder { kAlong, kAcross };

struct Scan {
  int64_t rows, length;
  ScanOrder order;
  bool reverse = false, exclusive = false;  // reverse: from the last step to the first
  // Few long rows are scanned in several parts at once; then `scratch` has room for rows * parts States.
  int64_t parts = 1;

  MSOPS_BOTH int64_t step(int64_t i) const { return reverse ? length - 1 - i : i; }
};

// ScanPart is a part of a row, in the order of the scan. The first pass computes each part's State; the second pass
// starts each part from the States of the parts before it.
template <typename Body>
struct ScanPart {
  using State = typename Body::State;
  static_assert(std::is_trivially_copyable<State>::value && sizeof(State) <= 32,
                "scan: a State must be a struct of up to 32 bytes that memcpy may copy");
  Scan scan;
  Body body;
  State* partial;  // (rows, parts)

  MSOPS_BOTH int64_t begin(int64_t part) const { return part_begin(scan.length, part, scan.parts); }
  MSOPS_BOTH State read(int64_t row, int64_t i) const { return body.read(row, scan.step(i)); }
  MSOPS_BOTH void write(int64_t row, int64_t i, const State& before, const State& after) const {
    body.write(row, scan.step(i), scan.exclusive ? before : after);
  }
};

// One thread walks along a part of a row. If kWrites, this is the second pass, else the first.
template <bool kWrites, typename Body>
struct ScanByThread {
  using State = typename Body::State;
  ScanPart<Body> all;

  // Index i is a part of a row; neighbours are parts of neighbouring rows.
  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    run<1>(static_cast<int64_t>(i) % all.scan.rows, 1, static_cast<int64_t>(i) / all.scan.rows);
  }

  // Walks along `rows` neighbouring rows together, at most kRows.
  template <int kRows>
  MSOPS_BOTH void run(int64_t row, int64_t rows, int64_t part) const {
    State states[kRows];
    if (kWrites)
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t p = 0; p < part; ++p)
          states[r] = State::combine(states[r], all.partial[(row + r) * all.scan.parts + p]);
    for (int64_t i = all.begin(part), end = all.begin(part + 1); i < end; ++i)
      for (int64_t r = 0; r < rows; ++r) {
        const State after = State::combine(states[r], all.read(row + r, i));
        if (kWrites) all.write(row + r, i, states[r], after);
        states[r] = after;
      }
    if (!kWrites)
      for (int64_t r = 0; r < rows; ++r) all.partial[(row + r) * all.scan.parts + part] = states[r];
  }
};

template <bool kWrites, typename Body>
struct ScanOnCpu {
  static constexpr int kRun = 64;  // rows that are neighbours in memory
  ScanByThread<kWrites, Body> by_thread;

  int64_t runs() const {
    return by_thread.all.scan.order == ScanOrder::kAlong ? by_thread.all.scan.rows
                                                         : (by_thread.all.scan.rows + kRun - 1) / kRun;
  }
  MSOPS_CPU void operator()(int64_t item) const {
    const int64_t part = item / runs(), run = item % runs();
    if (by_thread.all.scan.order == ScanOrder::kAlong) return by_thread.template run<1>(run, 1, part);
    by_thread.template run<kRun>(run * kRun, std::min<int64_t>(kRun, by_thread.all.scan.rows - run * kRun), part);
  }
};

#ifdef __CUDACC__
// A warp walks along a part of a row in tiles. Each lane combines some neighbouring steps, and gets the State before
// them from the lanes before it.
template <typename Body>
class WarpScan {
 public:
  using State = typename Body::State;
  static constexpr int kSteps = 4;  // of a lane, in a tile

  // Continues `carry` over read(i) for i in [begin, end), and calls write(i, before, after) for each.
  template <typename Read, typename Write>
  static __device__ State run(State carry, int64_t begin, int64_t end, const Read& read, const Write& write) {
    const int lane = threadIdx.x % 32;
    for (int64_t tile = begin; tile < end; tile += 32 * kSteps) {
      const int64_t first = tile + lane * kSteps;
      State steps[kSteps], total;
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        if (first + k < end) steps[k] = read(first + k);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) total = State::combine(total, steps[k]);
      for (int distance = 1; distance < 32; distance *= 2) {
        const State earlier = from_lane(total, lane - distance);
        if (lane >= distance) total = State::combine(earlier, total);
      }
      const State of_lanes_before = from_lane(total, lane - 1);
      State before = lane > 0 ? State::combine(carry, of_lanes_before) : carry;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const State after = State::combine(before, steps[k]);
        if (first + k < end) write(first + k, before, after);
        before = after;
      }
      carry = State::combine(carry, from_lane(total, 31));
    }
    return carry;
  }

 private:
  static __device__ State from_lane(const State& state, int lane) {
    constexpr int kWords = (sizeof(State) + 3) / 4;
    uint32_t words[kWords] = {};
    memcpy(words, &state, sizeof state);
    for (uint32_t& word : words) word = __shfl_sync(~0u, word, lane);
    State result;
    memcpy(&result, words, sizeof result);
    return result;
  }
};

template <bool kWrites, typename Body>
__global__ void __launch_bounds__(kThreads) scan_kernel(ScanPart<Body> all) {
  using State = typename Body::State;
  using Warp = WarpScan<Body>;
  const int64_t item = blockIdx.x * int64_t{kThreads / 32} + threadIdx.x / 32, parts = all.scan.parts;
  const int64_t row = item / parts, part = item % parts;
  if (row >= all.scan.rows) return;
  const auto read = [&](int64_t i) { return all.read(row, i); };
  const auto nothing = [](int64_t, const State&, const State&) {};
  if (kWrites) {
    const State* const of_row = all.partial + row * parts;
    const State carry = Warp::run(State(), 0, part, [&](int64_t p) { return of_row[p]; }, nothing);
    Warp::run(carry, all.begin(part), all.begin(part + 1), read,
              [&](int64_t i, const State& before, const State& after) { all.write(row, i, before, after); });
  } else {
    const State total = Warp::run(State(), all.begin(part), all.begin(part + 1), read, nothing);
    if (threadIdx.x % 32 == 0) all.partial[item] = total;
  }
}
#endif

// Runs one of the two passes.
//
//   order            by           why
//   CPU              a thread     up to 64 rows at once, where these are neighbours in memory
//   kAcross          a thread     neighbouring threads read neighbouring rows' steps
//   length up to 16  a thread     a warp would have few steps for its lanes
//   kAlong           a warp       neighbouring lanes read neighbouring steps
template <bool kWrites, typename Body>
void scan_pass(Call& call, const ScanPart<Body>& all) {
  const Scan& s = all.scan;
  const ScanByThread<kWrites, Body> by_thread{all};
  if (call.is_on_cpu()) {
    const ScanOnCpu<kWrites, Body> body{by_thread};
    const int64_t items = body.runs() * s.parts;
    return on_cpu(call, items, body,
                  4 * static_cast<double>(s.rows * s.length) / static_cast<double>(std::max<int64_t>(1, items)));
  }
  if (s.order == ScanOrder::kAcross || s.length <= 16) return on_gpu_with<int64_t>(call, s.rows * s.parts, by_thread);
#ifdef __CUDACC__
  const int64_t blocks = (s.rows * s.parts - 1) / (kThreads / 32) + 1;
  launch(call, scan_kernel<kWrites, Body>, blocks, kThreads, 0, all);
#endif
}

// Scans all rows. Results depend on `parts`, since the steps of a part are combined before the States of the parts
// before it are known. With one part, a thread combines the steps from the first to the last.
template <typename Body>
void scan(Call& call, const Scan& s, const Body& body, void* scratch = nullptr) {
  if (!call.ok() || s.rows == 0 || s.length == 0) return;
  const ScanPart<Body> all{s, body, static_cast<typename Body::State*>(scratch)};
  if (s.parts > 1) scan_pass<false>(call, all);
  scan_pass<true>(call, all);
}

}  // namespace msops
