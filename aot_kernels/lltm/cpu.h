// This is the time loop on the CPU, in one call of its threads. Each thread takes some of the samples through all
// steps. Where there are too few samples, it takes some of the hidden units, and waits for the other threads after each
// step.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "../common/parallel.h"
#include "sequence.h"

namespace msops::lltm::cpu {

// The weights are copied to panels of three vectors a row, which are multiplied with four samples at once: twelve sums
// hide the latency of multiply-add, and fit into the 16 vector registers.
constexpr int kSamples = 4, kVectors = kGates;
template <typename C>
constexpr int kWidth = 32 / sizeof(C);
template <typename C>
constexpr int kColumns = kVectors * kWidth<C>;

constexpr int64_t tiles(int64_t length, int64_t tile) { return (length + tile - 1) / tile; }

// sums[r][column] = sum over k of x[r][k] * panel[k][column] for kRows samples or, if `rows` is less, that many.
template <int kRows, typename C>
MSOPS_CPU void multiply(const C* x, int64_t pitch, int rows, const C* panel, int64_t depth,
                        C (&sums)[kSamples][kColumns<C>]) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply<kRows - 1>(x, pitch, rows, panel, depth, sums);
  }
  constexpr int kSets = kSamples / kRows;  // sets of sums take turns
  C parts[kSets][kRows][kVectors][kWidth<C>] = {};
  int64_t k = 0;
  for (; k + kSets <= depth; k += kSets)
    for (int s = 0; s < kSets; ++s)
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v)
#pragma omp simd
          for (int w = 0; w < kWidth<C>; ++w)
            parts[s][r][v][w] += x[r * pitch + k + s] * panel[((k + s) * kVectors + v) * kWidth<C> + w];
  for (; k < depth; ++k)
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v)
#pragma omp simd
        for (int w = 0; w < kWidth<C>; ++w)
          parts[0][r][v][w] += x[r * pitch + k] * panel[(k * kVectors + v) * kWidth<C> + w];
  for (int s = 1; s < kSets; ++s)
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v)
#pragma omp simd
        for (int w = 0; w < kWidth<C>; ++w) parts[0][r][v][w] += parts[s][r][v][w];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v)
#pragma omp simd
      for (int w = 0; w < kWidth<C>; ++w) sums[r][v * kWidth<C> + w] = parts[0][r][v][w];
}

// Threads wait for each other at a Barrier.
class Barrier {
 public:
  MSOPS_CPU void wait(int64_t threads, int64_t& waits) {
    const int64_t all = threads * ++waits;
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == all) return;
    for (int spins = 0; arrived_.load(std::memory_order_acquire) < all; ++spins)
      if (spins > 1000) std::this_thread::yield();
  }

 private:
  std::atomic<int64_t> arrived_{0};
};

// Share is what a thread has of the samples, in blocks of kSamples, and of the hidden units, in panels of `width`.
struct Share {
  int64_t blocks, panels, first_block, end_block, first_panel, end_panel, first_sample, end_sample, first_unit,
      end_unit;
  bool waits;

  MSOPS_CPU Share(const Sequence& s, int64_t width, int64_t part, int64_t parts)
      : blocks(tiles(s.batch, kSamples)), panels(tiles(s.hidden, width)) {
    // Waiting takes a thread as long as some 2^14 multiplications.
    waits = blocks % parts != 0 && blocks < 4 * parts && kGates * s.batch * s.hidden * s.hidden > parts << 14;
    first_block = waits ? 0 : part_begin(blocks, part, parts);
    end_block = waits ? blocks : part_begin(blocks, part + 1, parts);
    first_panel = waits ? part_begin(panels, part, parts) : 0;
    end_panel = waits ? part_begin(panels, part + 1, parts) : panels;
    first_sample = first_block * kSamples, end_sample = std::min(end_block * kSamples, s.batch);
    first_unit = first_panel * width, end_unit = std::min(end_panel * width, s.hidden);
  }
};

// Calls `f(at, sample, unit)` for each of a share's elements of arrays (batch, hidden).
template <typename F>
MSOPS_CPU void for_each(const Share& share, int64_t hidden, const F& f) {
  for (int64_t sample = share.first_sample; sample < share.end_sample; ++sample)
    for (int64_t unit = share.first_unit; unit < share.end_unit; ++unit) f(sample * hidden + unit, sample, unit);
}

// Multiplies a share, and calls `store(sample, unit, n, sums)` with the sums of n neighbouring units.
template <typename C, typename Store>
MSOPS_CPU void multiply(const Share& share, const C* x, int64_t depth, const C* panels, int64_t width,
                        const Store& store) {
  for (int64_t panel = share.first_panel; panel < share.end_panel; ++panel)
    for (int64_t block = share.first_block; block < share.end_block; ++block) {
      const int64_t first = block * kSamples, unit = panel * width;
      const int rows = static_cast<int>(std::min<int64_t>(kSamples, share.end_sample - first));
      C sums[kSamples][kColumns<C>];
      multiply<kSamples>(x + first * depth, depth, rows, panels + panel * depth * kColumns<C>, depth, sums);
      for (int r = 0; r < rows; ++r) store(first + r, unit, std::min(width, share.end_unit - unit), sums[r]);
    }
}

template <typename T>
struct Forward {
  using C = Compute<T>;
  static constexpr int kUnits = kWidth<C>;  // of a panel: a vector of each gate
  SequenceForward<T> s;
  C *panels, *products, *h, *c;  // h before and after a step take turns
  Barrier* barrier;

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    const Share share(s, kUnits, part, parts);
    const int64_t states = s.batch * s.hidden, end_packing = part_begin(share.panels, part + 1, parts);
    int64_t waits = 0;
    for (int64_t panel = part_begin(share.panels, part, parts); panel < end_packing; ++panel) pack(panel);
    for_each(share, s.hidden, [&](int64_t at, int64_t sample, int64_t unit) {
      const auto state = s.begin(sample, unit);
      h[at] = state.h, c[at] = state.c;
    });
    barrier->wait(parts, waits);
    for (int64_t step = 0; step < s.steps; ++step) {
      const C* before = h + step % 2 * states;
      C* after = h + (step + 1) % 2 * states;
      multiply(share, before, s.hidden, panels, kUnits,
               [&](int64_t sample, int64_t unit, int64_t n, const C* sums) __attribute__((always_inline)) {
                 for (int gate = 0; gate < kGates; ++gate)
                   std::copy_n(sums + gate * kUnits, n, products + (sample * kGates + gate) * s.hidden + unit);
               });
      for (int64_t sample = share.first_sample; sample < share.end_sample; ++sample)
        advance(s.time(step), sample, share.first_unit, share.end_unit - share.first_unit, before, after);
      if (share.waits) barrier->wait(parts, waits);
    }
    const C* last = h + s.steps % 2 * states;
    for_each(share, s.hidden,
             [&](int64_t at, int64_t sample, int64_t unit) { s.end({last[at], c[at]}, sample, unit); });
  }

  // Advances h and c of n neighbouring units by one step.
  MSOPS_CPU void advance(int64_t time, int64_t sample, int64_t unit, int64_t n, const C* before, C* after) const {
    const bool active = s.active(time, sample);
    const int64_t state = sample * s.hidden + unit;
    const int64_t at = s.at(time, sample, unit), gates_at = s.at(time, sample, kI, unit);
    const T *product = s.product + gates_at, *bias = s.bias + unit;
    const C* sums = products + s.at(0, sample, kI, unit);
    T *output = s.output + at, *cells = s.cells + at, *gates = s.gates + gates_at;
    C* cell_state = c + state;
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      C g[kGates];
      for (int gate = 0; gate < kGates; ++gate) {
        const int64_t i = gate * s.hidden + j;
        g[gate] = C(product[i]) + C(bias[i]) + sums[i];
        assign(gates[i], g[gate]);
      }
      const Cell<T> cell(g[kI], g[kO], g[kG], cell_state[j]);
      assign(cells[j], cell_state[j]);
      assign(output[j], active ? cell.tanh_c * cell.o : C(0));
      cell_state[j] = active ? cell.new_c : cell_state[j];
    }
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) after[state + j] = active ? C(output[j]) : before[state + j];
  }

  // Copies the rows of the weights for some units' gates, as columns.
  MSOPS_CPU void pack(int64_t panel) const {
    C* to = panels + panel * s.hidden * kColumns<C>;
    for (int gate = 0; gate < kGates; ++gate)
      for (int j = 0; j < kUnits; ++j) {
        const int64_t unit = panel * kUnits + j;
        const T* row = s.weight + (gate * s.hidden + unit) * s.hidden;
        for (int64_t k = 0; k < s.hidden; ++k)
          to[(k * kGates + gate) * kUnits + j] = unit < s.hidden ? C(row[k]) : C(0);
      }
  }
};

template <typename T>
struct Backward {
  using C = Compute<T>;
  static constexpr int kUnits = kColumns<C>;
  SequenceBackward<T> s;
  C *panels, *dgates, *dh, *dc;  // the gates' gradients of two steps take turns
  Barrier* barrier;

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    const Share share(s, kUnits, part, parts);
    const int64_t gates = kGates * s.hidden, end_packing = part_begin(share.panels, part + 1, parts);
    int64_t waits = 0;
    for (int64_t panel = part_begin(share.panels, part, parts); panel < end_packing; ++panel) pack(panel);
    for_each(share, s.hidden, [&](int64_t at, int64_t sample, int64_t unit) {
      const auto state = s.begin(sample, unit);
      dh[at] = state.h, dc[at] = state.c;
    });
    barrier->wait(parts, waits);
    for (int64_t step = s.steps - 1; step >= 0; --step) {
      C* of_step = dgates + step % 2 * s.batch * gates;
      for (int64_t sample = share.first_sample; sample < share.end_sample; ++sample)
        advance(step, sample, share.first_unit, share.end_unit - share.first_unit,
                of_step + sample * gates + share.first_unit);
      if (share.waits) barrier->wait(parts, waits);
      multiply(share, of_step, gates, panels, kUnits,
               [&](int64_t sample, int64_t first, int64_t n, const C* sums) __attribute__((always_inline)) {
                 if (s.active(s.time(step), sample)) std::copy_n(sums, n, dh + sample * s.hidden + first);
               });
    }
    for_each(share, s.hidden, [&](int64_t at, int64_t sample, int64_t unit) { s.end({dh[at], dc[at]}, sample, unit); });
  }

  // Computes the gradients of the gates, and of c before a step, from the gradients of n neighbouring units' h and c
  // after it.
  MSOPS_CPU void advance(int64_t step, int64_t sample, int64_t unit, int64_t n, C* of_step) const {
    const int64_t time = s.time(step), state = sample * s.hidden + unit;
    const int64_t at = s.at(time, sample, unit), gates_at = s.at(time, sample, kI, unit);
    const T *gates = s.gates + gates_at, *cells = s.cells + at, *doutput = s.doutput + at;
    const C* dnew_h = dh + state;
    C* dcell = dc + state;
    T *to = s.dgates + gates_at, *hidden_before = s.hidden_before + at;
    if (!s.active(time, sample)) {
      for (int gate = 0; gate < kGates; ++gate) {
        std::fill_n(to + gate * s.hidden, n, T(C(0)));
        std::fill_n(of_step + gate * s.hidden, n, C(0));
      }
      std::fill_n(hidden_before, n, T(C(0)));
      return;
    }
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      const Cell<T> cell{C(gates[j]), C(gates[s.hidden + j]), C(gates[2 * s.hidden + j]), C(cells[j])};
      const Gradient<T> d(cell, dnew_h[j] + C(doutput[j]), dcell[j]);
      for (int gate = 0; gate < kGates; ++gate) assign(to[gate * s.hidden + j], d.gates[gate]);
      dcell[j] = d.c;
    }
    for (int gate = 0; gate < kGates; ++gate)
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) of_step[gate * s.hidden + j] = C(to[gate * s.hidden + j]);
    const bool first = step == 0 || !s.active(s.time(step - 1), sample);
    std::copy_n(first ? s.h + state : s.output + s.at(s.time(step - 1), sample, unit), n, hidden_before);
  }

  // Copies some of the columns of the weights.
  MSOPS_CPU void pack(int64_t panel) const {
    C* to = panels + panel * kGates * s.hidden * kUnits;
    for (int64_t k = 0; k < kGates * s.hidden; ++k)
      for (int64_t j = 0, unit = panel * kUnits; j < kUnits; ++j, ++unit)
        to[k * kUnits + j] = unit < s.hidden ? C(s.weight[k * s.hidden + unit]) : C(0);
  }
};

// Allocates panels for all weights, of `rows` rows each.
template <typename C>
std::unique_ptr<C[]> room_for_panels(int64_t rows, int64_t panels) {
  return std::unique_ptr<C[]>(new C[rows * panels * kColumns<C>]);
}

// A step costs its products, a vector of them at once, and the exponentials.
inline double work(const Sequence& s) {
  const double hidden = static_cast<double>(s.hidden);
  return static_cast<double>(s.steps * s.batch) * hidden * (hidden / 4 + 16);
}

template <typename T>
void forward(Call& call, const SequenceForward<T>& s, Compute<T>* scratch) {
  using Body = Forward<T>;
  const int64_t panels = tiles(s.hidden, Body::kUnits), states = s.batch * s.hidden;
  const auto room = room_for_panels<Compute<T>>(s.hidden, panels);
  Barrier barrier;
  const Body body{s, room.get(), scratch, scratch + 3 * states, scratch + 5 * states, &barrier};
  on_threads(call, states == 0 ? 0 : std::max(panels, tiles(s.batch, kSamples)), work(s), body);
}

template <typename T>
void backward(Call& call, const SequenceBackward<T>& s, Compute<T>* scratch) {
  using Body = Backward<T>;
  const int64_t panels = tiles(s.hidden, Body::kUnits), states = s.batch * s.hidden;
  const auto room = room_for_panels<Compute<T>>(kGates * s.hidden, panels);
  Barrier barrier;
  const Body body{s, room.get(), scratch, scratch + 6 * states, scratch + 7 * states, &barrier};
  on_threads(call, states == 0 ? 0 : std::max(panels, tiles(s.batch, kSamples)), work(s), body);
}

}  // namespace msops::lltm::cpu
