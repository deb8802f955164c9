// On the CPU, an item is a run of neighbouring rows or columns of a matrix, along which loops vectorize.
#pragma once

#include "programs.h"

namespace msops::wkv7 {

template <typename Program, typename T>
struct OnCpu {
  using C = Compute<T>;
  static constexpr int kRun = 32, kBlock = 4;  // kBlock: terms of a sum that are added while it is in a register
  Task<T> task;

  int64_t runs() const { return (task.s.features + kRun - 1) / kRun; }

  // The matrix is (index along sums, own index); both are padded with zeros.
  struct Walk {
    int64_t matrix, first, count;
    C m[kMost][kRun], vectors[kVectors][kMost], own[kVectors][kRun], sums[3][kRun];
    Sum<C> products[kRun];
  };

  MSOPS_CPU void operator()(int64_t item) const {
    const Sizes& s = task.s;
    Walk walk{};
    walk.matrix = item / runs(), walk.first = item % runs() * kRun;
    walk.count = std::min<int64_t>(kRun, s.features - walk.first);
    for (int64_t o = 0; o < s.features; ++o)
      for (int64_t c = 0; c < walk.count; ++c) walk.m[o][c] = Program::start(task, place(walk, walk.matrix, o, c));
    const int64_t begin = s.begin(walk.matrix);
    for (int64_t i = 0; i < s.steps; ++i) {
      const int64_t step = Program::kBack ? s.steps - 1 - i : i, at = begin + step * s.stride();
      if (!Program::kRows && !Program::kBack && step % kEvery == 0) multiply_kept(walk, step);
      read(walk, at);
      sum(walk);
      update(walk);
      for (int64_t c = 0; c < walk.count; ++c) {
        const auto own = [&](int v) { return walk.own[v][c]; };
        Program::finish_step(task, at + walk.first + c, own, walk.sums[0][c], walk.sums[1][c], walk.sums[2][c],
                             walk.products[c]);
      }
      if (!Program::kRows && Program::kBack && step % kEvery == 0) keep(walk, step);
    }
    if constexpr (Program::kRows)
      for (int64_t o = 0; o < s.features; ++o)
        for (int64_t c = 0; c < walk.count; ++c) Program::finish(task, place(walk, walk.matrix, o, c), walk.m[o][c]);
  }

 private:
  // Returns where an element is in an array of matrices.
  MSOPS_CPU int64_t place(const Walk& walk, int64_t matrix, int64_t o, int64_t c) const {
    const int64_t features = task.s.features, own = walk.first + c;
    return (matrix * features + (Program::kRows ? own : o)) * features + (Program::kRows ? o : own);
  }

  MSOPS_CPU void read(Walk& walk, int64_t at) const {
    const int64_t features = task.s.features;
    for (int v = 0; v < kRate; ++v) {
      if (!Program::sums_over(v) && !Program::owns(v)) continue;
      if (v >= kInputs) {
        for (int64_t o = 0; o < features; ++o) walk.vectors[v][o] = task.computed[v - kInputs][at + o];
        continue;
      }
      const T* const from = task.inputs[v] + at;
      for (int64_t o = 0; o < features; ++o) walk.vectors[v][o] = C(from[o]);
    }
#pragma GCC ivdep
    for (int64_t o = 0; o < features; ++o) {
      const C raw = walk.vectors[kW][o], smaller = Exponential<C>::exp(-std::fabs(raw));
      const C rate = raw < 0 ? smaller : 1 / smaller;
      walk.vectors[kRate][o] = rate;
      walk.vectors[kW][o] = Exponential<C>::exp(-rate);
    }
    for (int v = 0; v < kVectors; ++v)
      if (Program::owns(v))
        for (int64_t c = 0; c < walk.count; ++c) walk.own[v][c] = walk.vectors[v][walk.first + c];
  }

  MSOPS_CPU void sum(Walk& walk) const {
    for (int c = 0; c < kRun; ++c) walk.sums[0][c] = walk.sums[1][c] = walk.sums[2][c] = 0;
    for (int64_t o = 0; o < task.s.features; o += kBlock)
#pragma GCC ivdep
      for (int c = 0; c < kRun; ++c) {
        C first = walk.sums[0][c], second = walk.sums[1][c];
        const auto own = [&](int v) { return walk.own[v][c]; };
        for (int e = 0; e < kBlock; ++e) {
          const auto x = [&](int v) { return walk.vectors[v][o + e]; };
          const C m = Program::begin(walk.m[o + e][c], x, own);
          if (Program::kBack) walk.m[o + e][c] = m;
          Program::add(m, x, first, second);
        }
        walk.sums[0][c] = first;
        walk.sums[1][c] = second;
      }
  }

  MSOPS_CPU void update(Walk& walk) const {
    for (int64_t o = 0; o < task.s.features; o += kBlock)
#pragma GCC ivdep
      for (int c = 0; c < kRun; ++c) {
        const C first = walk.sums[0][c], second = walk.sums[1][c];
        C after = walk.sums[2][c];
        const auto own = [&](int v) { return walk.own[v][c]; };
        for (int e = 0; e < kBlock; ++e) {
          const auto x = [&](int v) { return walk.vectors[v][o + e]; };
          walk.m[o + e][c] = Program::update(walk.m[o + e][c], x, own, first, second);
          Program::add_after(walk.m[o + e][c], x, after);
        }
        walk.sums[2][c] = after;
      }
  }

  MSOPS_CPU void keep(const Walk& walk, int64_t step) const {
    const int64_t matrix = task.kept_matrix(walk.matrix, step);
    for (int64_t o = 0; o < task.s.features; ++o)
      for (int64_t c = 0; c < walk.count; ++c) task.kept[place(walk, matrix, o, c)] = walk.m[o][c];
  }

  MSOPS_CPU void multiply_kept(Walk& walk, int64_t step) const {
    const int64_t matrix = task.kept_matrix(walk.matrix, step);
    C products[kRun] = {};
    for (int64_t o = 0; o < task.s.features; ++o)
      for (int64_t c = 0; c < walk.count; ++c) products[c] += walk.m[o][c] * task.kept[place(walk, matrix, o, c)];
    for (int64_t c = 0; c < walk.count; ++c) {
      walk.products[c] = {};
      walk.products[c] += products[c];
    }
  }
};

}  // namespace msops::wkv7
