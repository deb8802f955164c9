// The phases on the CPU. A loop runs along neighbours in memory, over which it vectorizes: the positions of a channel,
// or the channels of a position.
#pragma once

#include "../common/parallel.h"
#include "problem.h"

namespace msops::group_norm {

constexpr int64_t kRun = 2048;    // neighbours of which one plain sum is made
constexpr int64_t kAcross = 256;  // channels, of each position, that are added up together
constexpr int64_t kLines = 64;    // positions over which these are

// With silu, phase 2 of the backward pass puts dz where phase 3 puts dx, so that exponentials are computed once. In
// float16 that would round dz.
template <typename T, bool kSilu>
constexpr bool kKeepsDz = kSilu && !std::is_same<T, Half>::value;

// Part is a range of positions.
struct Part {
  int64_t begin, end;

  template <typename T>
  MSOPS_CPU Part(const Problem<T>& problem, int64_t part)
      : begin(part_begin(problem.positions, part, problem.parts)),
        end(part_begin(problem.positions, part + 1, problem.parts)) {}
};

// Phase 1, where the elements of a group are neighbours. Index i is a part of a group.
template <typename T>
struct StatisticsOfRuns {
  using C = Compute<T>;
  Problem<T> problem;

  MSOPS_CPU void operator()(int64_t i) const {
    const auto& p = problem;
    const int64_t part = i % p.parts, group = i / p.parts, size = p.of_group * p.positions;
    const int64_t end = part_begin(size, part + 1, p.parts);
    Statistics<C> all{};
    for (int64_t begin = part_begin(size, part, p.parts); begin < end; begin += kRun) {
      const T* from = p.x + group * size + begin;
      const int64_t n = std::min(kRun, end - begin);
      C sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < n; ++j) sum += C(from[j]);
      const C pivot = sum / C(n);
      C rest = 0, squares = 0;
#pragma omp simd reduction(+ : rest, squares)
      for (int64_t j = 0; j < n; ++j) {
        const C d = C(from[j]) - pivot;
        rest += d, squares += d * d;
      }
      all = Statistics<C>::combine(all, Statistics<C>::of(C(n), pivot, rest, squares));
    }
    std::memcpy(p.record(part, group), &all, sizeof all);
  }
};

// Phase 1, where the channels of a position are neighbours. Index i is a part of as many whole groups as kAcross
// channels have, or of one group.
template <typename T>
struct StatisticsAcross {
  using C = Compute<T>;
  Problem<T> problem;

  MSOPS_CPU int64_t together() const {
    return std::min(problem.groups, std::max<int64_t>(1, kAcross / std::max<int64_t>(1, problem.of_group)));
  }
  MSOPS_CPU int64_t bundles() const { return (problem.groups + together() - 1) / together(); }

  MSOPS_CPU void operator()(int64_t i) const {
    const auto& p = problem;
    const int64_t part = i % p.parts, sample = i / p.parts / bundles(), first = i / p.parts % bundles() * together();
    const int64_t groups = std::min(together(), p.groups - first), width = std::min(kAcross, p.of_group);
    const Part range(p, part);
    Statistics<C> all[kAcross] = {};
    for (int64_t line = range.begin; line < range.end; line += kLines) {
      const int64_t lines = std::min(kLines, range.end - line);
      for (int64_t c = 0; c < p.of_group; c += width) {  // once, unless there is one group
        const int64_t each = std::min(width, p.of_group - c), n = groups * each;
        const T* from = p.x + (sample * p.positions + line) * p.channels + first * p.of_group + c;
        C sums[kAcross] = {}, pivots[kAcross], rests[kAcross] = {}, squares[kAcross] = {};
        for (int64_t l = 0; l < lines; ++l)
#pragma omp simd
          for (int64_t j = 0; j < n; ++j) sums[j] += C(from[l * p.channels + j]);
        for (int64_t g = 0; g < groups; ++g) {
          const C pivot = total(sums + g * each, each) / C(each * lines);
          for (int64_t j = 0; j < each; ++j) pivots[g * each + j] = pivot;
        }
        for (int64_t l = 0; l < lines; ++l)
#pragma omp simd
          for (int64_t j = 0; j < n; ++j) {
            const C d = C(from[l * p.channels + j]) - pivots[j];
            rests[j] += d, squares[j] += d * d;
          }
        for (int64_t g = 0; g < groups; ++g) {
          const int64_t at = g * each;
          all[g] = Statistics<C>::combine(
              all[g],
              Statistics<C>::of(C(each * lines), pivots[at], total(rests + at, each), total(squares + at, each)));
        }
      }
    }
    for (int64_t g = 0; g < groups; ++g)
      std::memcpy(p.record(part, sample * p.groups + first + g), &all[g], sizeof all[g]);
  }
  static MSOPS_CPU C total(const C* from, int64_t n) {
    C sum = 0;
    for (int64_t j = 0; j < n; ++j) sum += from[j];
    return sum;
  }
};

// Replaces the Statistics of all parts of group i by its Group.
template <typename T>
struct CombineStatistics {
  using C = Compute<T>;
  Problem<T> problem;

  MSOPS_CPU void operator()(int64_t i) const {
    Statistics<C> all{}, one;
    for (int64_t part = 0; part < problem.parts; ++part) {
      std::memcpy(&one, problem.record(part, i), sizeof one);
      all = Statistics<C>::combine(all, one);
    }
    const auto group = Group<C>::of(all, problem.eps);
    std::memcpy(problem.record(0, i), &group, sizeof group);
  }
};

// Returns what computes a channel's elements, after CombineStatistics.
template <typename T>
MSOPS_CPU Channel<T> channel_of(const Problem<T>& p, int64_t sample, int64_t c) {
  Group<Compute<T>> group;
  std::memcpy(&group, p.record(0, sample * p.groups + c / p.of_group), sizeof group);
  return {group, p.weight[c], p.bias[c]};
}

// PartOfChannel is a part of a channel of a sample, where its positions are neighbours. Index i counts through the
// parts of a channel, then channels, then samples.
template <typename T>
struct PartOfChannel {
  int64_t part, sample, c, at;  // at: where the channel begins
  Channel<T> channel;
  Part range;

  MSOPS_CPU PartOfChannel(const Problem<T>& p, int64_t i)
      : part(i % p.parts),
        sample(i / p.parts / p.channels),
        c(i / p.parts % p.channels),
        at((sample * p.channels + c) * p.positions),
        channel(channel_of(p, sample, c)),
        range(p, part) {}
};

// Phase 2, where the positions of a channel are neighbours.
template <typename T, bool kSilu>
struct SumsOfRuns {
  using C = Compute<T>;
  Problem<T> problem;

  MSOPS_CPU void operator()(int64_t i) const {
    const auto& p = problem;
    const PartOfChannel<T> of(p, i);
    const auto channel = of.channel;
    C products = 0, terms = 0;
    for (int64_t begin = of.range.begin; begin < of.range.end; begin += kRun) {
      const T *x = p.x + of.at + begin, *dy = p.dy + of.at + begin;
      [[maybe_unused]] T* const kept = p.out + of.at + begin;
      const int64_t n = std::min(kRun, of.range.end - begin);
      C of_products = 0, of_terms = 0;
#pragma omp simd reduction(+ : of_products, of_terms)
      for (int64_t j = 0; j < n; ++j) {
        const C d = C(x[j]) - channel.pivot, dz = channel.template dz<kSilu>(d, C(dy[j]));
        of_products += dz * d, of_terms += dz;
        if constexpr (kKeepsDz<T, kSilu>) kept[j] = dz;
      }
      products += of_products, terms += of_terms;
    }
    C* const to = p.sums(of.part, of.sample) + of.c;
    to[0] = channel.sum_along(products, terms), to[p.channels] = terms;
  }
};

// Run is a part of the `n` neighbouring channels of a sample from `first` on, kAcross of them at most.
struct Run {
  int64_t part, sample, first, n;
  Part range;

  template <typename T>
  static MSOPS_CPU int64_t of_sample(const Problem<T>& p) {
    return (p.channels + kAcross - 1) / kAcross;
  }
  // Index i counts through the parts of a run, then runs, then samples.
  template <typename T>
  MSOPS_CPU Run(const Problem<T>& p, int64_t i)
      : part(i % p.parts),
        sample(i / p.parts / of_sample(p)),
        first(i / p.parts % of_sample(p) * kAcross),
        n(std::min(kAcross, p.channels - first)),
        range(p, part) {}
  // Returns where the run's channels of a position begin.
  template <typename T>
  MSOPS_CPU int64_t at(const Problem<T>& p, int64_t position) const {
    return (sample * p.positions + position) * p.channels + first;
  }
};

// Neighbours are the channels of a run. An array for each number lets loops over them vectorize.
template <typename T>
struct Neighbours {
  using C = Compute<T>;
  C pivot[kAcross], r[kAcross], shift[kAcross], factor[kAcross], term[kAcross], slope[kAcross], rest[kAcross];

  MSOPS_CPU Neighbours(const Problem<T>& p, const Run& run) {
    for (int64_t j = 0; j < run.n; ++j) {
      const Channel<T> of = channel_of(p, run.sample, run.first + j);
      pivot[j] = of.pivot, r[j] = of.r, shift[j] = of.shift, factor[j] = of.factor, term[j] = of.term;
      slope[j] = of.slope, rest[j] = of.rest;
    }
  }
  MSOPS_CPU Channel<T> operator[](int64_t j) const {
    Channel<T> of;
    of.pivot = pivot[j], of.r = r[j], of.shift = shift[j], of.factor = factor[j], of.term = term[j];
    of.slope = slope[j], of.rest = rest[j];
    return of;
  }
};

// Phase 2, where the channels of a position are neighbours. Index i is a part of a run of channels.
template <typename T, bool kSilu>
struct SumsAcross {
  using C = Compute<T>;
  Problem<T> problem;

  MSOPS_CPU void operator()(int64_t i) const {
    const auto& p = problem;
    const Run run(p, i);
    const Neighbours<T> channels(p, run);
    C products[kAcross] = {}, terms[kAcross] = {};
    for (int64_t line = run.range.begin; line < run.range.end; line += kLines) {
      C of_products[kAcross] = {}, of_terms[kAcross] = {};
      for (int64_t l = line; l < std::min(line + kLines, run.range.end); ++l) {
        const int64_t at = run.at(p, l);
        const T *x = p.x + at, *dy = p.dy + at;
        [[maybe_unused]] T* const kept = p.out + at;
#pragma omp simd
        for (int64_t j = 0; j < run.n; ++j) {
          const Channel<T> channel = channels[j];
          const C d = C(x[j]) - channel.pivot, dz = channel.template dz<kSilu>(d, C(dy[j]));
          of_products[j] += dz * d, of_terms[j] += dz;
          if constexpr (kKeepsDz<T, kSilu>) kept[j] = dz;
        }
      }
      for (int64_t j = 0; j < run.n; ++j) products[j] += of_products[j], terms[j] += of_terms[j];
    }
    C* const to = p.sums(run.part, run.sample) + run.first;
    for (int64_t j = 0; j < run.n; ++j)
      to[j] = channels[j].sum_along(products[j], terms[j]), to[p.channels + j] = terms[j];
  }
};

// Adds mean(g) and mean(g xhat) to the Group of group i.
template <typename T>
struct CombineSums {
  using C = Compute<T>;
  Problem<T> problem;

  MSOPS_CPU void operator()(int64_t i) const {
    const auto& p = problem;
    const int64_t sample = i / p.groups, first = i % p.groups * p.of_group;
    C mean = 0, along = 0;
    for (int64_t part = 0; part < p.parts; ++part) {
      const C* const from = p.sums(part, sample);
      for (int64_t c = first; c < first + p.of_group; ++c)
        along += p.weight[c] * from[c], mean += p.weight[c] * from[p.channels + c];
    }
    Group<C> group;
    std::memcpy(&group, p.record(0, i), sizeof group);
    group.mean = mean / C(p.of_all()), group.along = along / C(p.of_all());
    std::memcpy(p.record(0, i), &group, sizeof group);
  }
};

// Computes the element of `out` at an index.
template <typename T, bool kSilu, bool kBackward>
MSOPS_CPU void compute(const Problem<T>& p, const Channel<T>& channel, int64_t at) {
  using C = Compute<T>;
  if constexpr (kBackward && kKeepsDz<T, kSilu>) {
    p.out[at] = channel.template dx<false>(p.x[at], p.out[at]);
  } else if constexpr (kBackward) {
    assign(p.out[at], channel.template dx<kSilu>(C(p.x[at]), C(p.dy[at])));
  } else {
    assign(p.out[at], channel.template y<kSilu>(C(p.x[at])));
  }
}

// Computes the elements of `out` from an index on.
template <typename T, bool kSilu, bool kBackward>
struct ComputeFrom {
  Problem<T> problem;
  Channel<T> channel;
  int64_t begin;

  MSOPS_CPU void operator()(int64_t j) const { compute<T, kSilu, kBackward>(problem, channel, begin + j); }
};

// Phase 3, where the positions of a channel are neighbours.
template <typename T, bool kSilu, bool kBackward>
struct MapRuns {
  Problem<T> problem;

  MSOPS_CPU void operator()(int64_t i) const {
    const auto& p = problem;
    const PartOfChannel<T> of(p, i);
    for_elements<Compute<T>>(of.range.end - of.range.begin,
                             ComputeFrom<T, kSilu, kBackward>{p, of.channel, of.at + of.range.begin});
  }
};

// Phase 3, where the channels of a position are neighbours. Index i is a part of a run of channels.
template <typename T, bool kSilu, bool kBackward>
struct MapAcross {
  Problem<T> problem;

  MSOPS_CPU void operator()(int64_t i) const {
    const auto& p = problem;
    const Run run(p, i);
    const Neighbours<T> channels(p, run);
    for (int64_t line = run.range.begin; line < run.range.end; ++line) {
      const int64_t at = run.at(p, line);
#pragma omp simd
      for (int64_t j = 0; j < run.n; ++j) compute<T, kSilu, kBackward>(p, channels[j], at + j);
    }
  }
};

template <typename T, bool kSilu, bool kBackward>
void normalize_on_cpu(Call& call, const Problem<T>& p) {
  const int64_t groups = p.samples * p.groups;
  const double of_part = static_cast<double>(p.positions) / static_cast<double>(p.parts) + 1;
  const double of_group = of_part * static_cast<double>(p.of_group), of_row = of_part * static_cast<double>(kAcross);
  constexpr double kCost = kSilu ? 6 : 2;  // of an element
  const int64_t runs = Run::of_sample(p) * p.samples * p.parts;
  const int64_t rows = p.samples * p.channels * p.parts;
  if (p.channels_last) {
    const StatisticsAcross<T> statistics{p};
    on_cpu(call, p.samples * statistics.bundles() * p.parts, statistics,
           of_group * static_cast<double>(statistics.together()));
  } else {
    on_cpu(call, groups * p.parts, StatisticsOfRuns<T>{p}, of_group);
  }
  on_cpu(call, groups, CombineStatistics<T>{p}, 8 * static_cast<double>(p.parts));
  if constexpr (kBackward) {
    if (p.channels_last) {
      on_cpu(call, runs, SumsAcross<T, kSilu>{p}, kCost * of_row);
    } else {
      on_cpu(call, rows, SumsOfRuns<T, kSilu>{p}, kCost * of_part);
    }
    on_cpu(call, groups, CombineSums<T>{p}, 2 * static_cast<double>(p.parts * p.of_group));
  }
  if (p.channels_last) {
    on_cpu(call, runs, MapAcross<T, kSilu, kBackward>{p}, kCost * of_row);
  } else {
    on_cpu(call, rows, MapRuns<T, kSilu, kBackward>{p}, kCost * of_part);
  }
}

}  // namespace msops::group_norm
