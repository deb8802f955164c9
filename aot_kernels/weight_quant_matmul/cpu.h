// Products on the CPU:
//
//   case                                       way              why
//   up to 4 tokens, groups of whole runs       DotRows          codes are widened in registers
//   terms lie close together                   TermBlocks       tokens are lanes (see shared/product/cpu.h)
//   outputs lie close together                 OutputBlocks     outputs are lanes
//
// Codes of a block of weights are widened once for all tokens. A number's sum has its terms in the same order whatever
// the number of tokens is, from 5 on.
#pragma once

#include "widen.h"

namespace msops::weight_quant_matmul::cpu {

using product::Lanes;

constexpr int64_t kDeep = 256;  // terms that are multiplied at once

// Threads take blocks of the weights' rows, one after another.
struct DotRows {
  static constexpr int64_t kBlock = 16, kMost = 4;
  template <typename T>
  static bool takes(const Products<T>& p) {
    return p.tokens <= kMost && p.by_terms && takes(p.weights);
  }
  template <typename T>
  static bool takes(const Codes<T>& w) {
    return std::is_same<Compute<T>, float>::value && !w.groups_rows && !w.table && w.columns % kRun == 0 &&
           (w.groups == 1 || w.group % kRun == 0);
  }

  // Computes the sums of a row's products with kTokens tokens.
  template <int kBits, int kSigned, int kTokens, typename T>
  static MSOPS_CPU void multiply(const Codes<T>& codes, int64_t row, const float* x, float (&results)[kTokens]) {
    constexpr int kVectors = kRun / 8;
    const int64_t deep = codes.columns;
    const uint8_t* from = codes.at(row, 0);
    Floats sums[kTokens] = {};
    for (int64_t group = 0, first = 0; first < codes.columns; ++group, first += codes.group) {
      const int64_t place = row * codes.groups + group, end = std::min(codes.columns, first + codes.group);
      const float scale = codes.scale[place], zero = codes.zero[place];
      Floats total[kTokens][kVectors] = {};
      for (int64_t k = first; k < end; k += kRun, from += kRun * kBits / 8, x += kRun) {
        const Run run = widened_run<kBits, kSigned>(from);
        MSOPS_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          const Floats weights = run.eights[v] - zero;
          MSOPS_UNROLL
          for (int t = 0; t < kTokens; ++t) {
            Floats numbers;
            memcpy(&numbers, x + t * deep + 8 * v, sizeof numbers);
            total[t][v] += weights * numbers;
          }
        }
      }
      MSOPS_UNROLL
      for (int t = 0; t < kTokens; ++t) sums[t] += scale * ((total[t][0] + total[t][1]) + (total[t][2] + total[t][3]));
    }
    for (int t = 0; t < kTokens; ++t) {
      float lanes[8];
      memcpy(lanes, &sums[t], sizeof lanes);
      results[t] = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
    }
  }
  template <int kBits, int kSigned, int kTokens, typename T>
  static MSOPS_CPU void multiply(const Products<T>& p, int64_t row, int64_t token, const float* x) {
    float sums[kTokens];
    multiply<kBits, kSigned>(p.weights, row, x, sums);
    for (int t = 0; t < kTokens; ++t) p.store(token + t, row, sums[t]);
  }

  // Multiplies a thread's share of the blocks.
  template <int kBits, int kSigned, typename T>
  struct Part {
    const Products<T>& p;
    const float* x;
    product::Shares& shares;

    MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
      const int64_t blocks = blocks_of(p);
      for (int64_t i; shares.take(0, part, parts, blocks, i);)
        for (int64_t j = i * kBlock; j < std::min(p.outputs, (i + 1) * kBlock); ++j) {
          int64_t t = 0;
          for (; t + 2 <= p.tokens; t += 2) multiply<kBits, kSigned, 2>(p, j, t, x + t * p.deep);
          if (t < p.tokens) multiply<kBits, kSigned, 1>(p, j, t, x + t * p.deep);
        }
    }
  };

  template <typename T>
  static int64_t blocks_of(const Products<T>& p) {
    return (p.outputs + kBlock - 1) / kBlock;
  }
  template <typename T>
  static void multiply(Call& call, const Products<T>& p) {
    const std::unique_ptr<float[]> x(new float[p.tokens * p.deep]);
    widen(p.x, x.get(), p.tokens * p.deep);
    product::Shares shares(1);
    with_kind(p.weights, [&](auto bits, auto is_signed) {
      const Part<decltype(bits)::value, decltype(is_signed)::value, T> part{p, x.get(), shares};
      on_threads(call, blocks_of(p), static_cast<double>(p.outputs) * static_cast<double>(p.deep * p.tokens) / 8, part);
    });
  }
};

// A panel of tokens is multiplied by kBlock outputs at a time.
template <typename T>
struct TermBlocks {
  using C = Compute<T>;
  static constexpr int64_t kBlock = 32;
  const Products<T>& p;
  const C* panels;
  product::Shares& shares;

  // One token has lanes, too.
  static MSOPS_CPU Lanes<C> lanes_of(int64_t tokens) { return {std::max<int64_t>(tokens, 2)}; }
  int64_t blocks() const { return (p.outputs + kBlock - 1) / kBlock; }

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    const int64_t most = std::min(kDeep, p.deep);
    const std::unique_ptr<C[]> weights(new C[kBlock * most]), totals(new C[kBlock * lanes_of(p.tokens).places()]);
    const std::unique_ptr<C[]> sums(new C[kBlock * product::kMostLanes<C>]);
    Lines<T> lines(most);
    for (int64_t block; shares.take(0, part, parts, blocks(), block);)
      multiply(block * kBlock, lines, weights.get(), totals.get(), sums.get());
  }

 private:
  MSOPS_CPU void multiply(int64_t first, Lines<T>& lines, C* weights, C* totals, C* sums) const {
    const Lanes<C> lanes = lanes_of(p.tokens);
    const int64_t n = std::min(kBlock, p.outputs - first);
    std::fill_n(totals, kBlock * lanes.places(), C(0));
    for (int64_t k = 0; k < p.deep; k += kDeep) {
      const int64_t terms = std::min(kDeep, p.deep - k);
      for (int64_t r = 0; r < n; ++r) lines.widen(p.weights, first + r, k, terms, weights + r * terms);
      std::fill(weights + n * terms, weights + kBlock * terms, C(0));
      for (int64_t t = 0; t < p.tokens; t += product::kMostLanes<C>) {
        const int64_t pitch = lanes.pitch(t);
        product::multiply_panel(pitch, weights, n, terms, panels + t * p.deep + k * pitch, sums);
        C* const to = totals + t * kBlock;
#pragma omp simd
        for (int64_t i = 0; i < n * pitch; ++i) to[i] += sums[i];
      }
    }
    for (int64_t t = 0; t < p.tokens; ++t) {
      const int64_t pitch = lanes.pitch(t);
      const C* const from = lanes.at(totals, t, kBlock);
      for (int64_t r = 0; r < n; ++r) p.store(t, first + r, from[r * pitch]);
    }
  }
};

// Puts a token among the lanes.
template <typename T>
struct PutToken {
  using C = Compute<T>;
  const Products<T>& p;
  C* panels;
  Lanes<C> lanes;

  MSOPS_CPU void operator()(int64_t t) const {
    const int64_t pitch = lanes.pitch(t);
    C* const to = lanes.at(panels, t, p.deep);
    for (int64_t k = 0; k < p.deep; ++k) to[k * pitch] = t < p.tokens ? C(p.x[t * p.deep + k]) : C(0);
  }
};

// kColumns outputs, which are panels of lanes, are multiplied by all tokens at a time.
template <typename T>
struct OutputBlocks {
  using C = Compute<T>;
  static constexpr int64_t kLanes = product::kMostLanes<C>, kColumns = 4 * kLanes, kWidth = product::kWidth<C>;
  const Products<T>& p;
  const C* rows;  // of each kDeep terms: (places, terms), where tokens take whole groups of places
  int64_t places;
  product::Shares& shares;

  int64_t blocks() const { return (p.outputs + kColumns - 1) / kColumns; }

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    const int64_t most = std::min(kDeep, p.deep);
    const std::unique_ptr<C[]> panels(new C[kColumns * most]), totals(new C[kColumns * p.tokens]);
    const std::unique_ptr<C[]> sums(new C[kLanes * places]);
    Lines<T> lines(kColumns);
    for (int64_t block; shares.take(0, part, parts, blocks(), block);)
      multiply(block * kColumns, lines, panels.get(), totals.get(), sums.get());
  }

 private:
  MSOPS_CPU void multiply(int64_t first, Lines<T>& lines, C* panels, C* totals, C* sums) const {
    const int64_t n = std::min(kColumns, p.outputs - first);
    C line[kColumns];
    std::fill_n(totals, kColumns * p.tokens, C(0));
    for (int64_t k = 0; k < p.deep; k += kDeep) {
      const int64_t terms = std::min(kDeep, p.deep - k);
      const C* const x = rows + k * places;
      if (p.tokens == 1) {
        for (int64_t r = 0; r < terms; ++r) {
          lines.widen(p.weights, k + r, first, n, line);
          const C number = x[r];
#pragma omp simd
          for (int64_t j = 0; j < n; ++j) totals[j] += number * line[j];
        }
        continue;
      }
      for (int64_t r = 0; r < terms; ++r) {
        lines.widen(p.weights, k + r, first, n, line);
        std::fill(line + n, line + kColumns, C(0));
        for (int64_t j = 0; j < n; j += kLanes) {
          const int64_t pitch = pitch_of(n - j);
          std::copy_n(line + j, pitch, panels + j * terms + r * pitch);
        }
      }
      for (int64_t j = 0; j < n; j += kLanes) {
        const int64_t pitch = pitch_of(n - j), count = std::min(pitch, n - j);
        product::multiply_panel(pitch, x, p.tokens, terms, panels + j * terms, sums);
        for (int64_t t = 0; t < p.tokens; ++t)
          for (int64_t l = 0; l < count; ++l) totals[t * kColumns + j + l] += sums[t * pitch + l];
      }
    }
    for (int64_t t = 0; t < p.tokens; ++t)
      for (int64_t j = 0; j < n; ++j) p.store(t, first + j, totals[t * kColumns + j]);
  }
  static MSOPS_CPU int64_t pitch_of(int64_t columns) {
    return std::min(kLanes, (columns + kWidth - 1) / kWidth * kWidth);
  }
};

template <typename T>
void multiply(Call& call, const Products<T>& p) {
  using C = Compute<T>;
  if (DotRows::takes(p)) {
    if constexpr (std::is_same<C, float>::value) DotRows::multiply(call, p);
    return;
  }
  const double work =
      static_cast<double>(p.outputs) * static_cast<double>(p.deep) * (static_cast<double>(p.tokens) / 8 + 1);
  product::Shares shares(1);
  if (p.by_terms) {
    const Lanes<C> lanes = TermBlocks<T>::lanes_of(p.tokens);
    const std::unique_ptr<C[]> panels(new C[lanes.places() * p.deep]);
    on_cpu(call, lanes.places(), PutToken<T>{p, panels.get(), lanes}, static_cast<double>(p.deep));
    const TermBlocks<T> blocks{p, panels.get(), shares};
    return on_threads(call, blocks.blocks(), work, blocks);
  }
  const int64_t places = p.tokens == 1 ? 1 : (p.tokens + product::kRows - 1) / product::kRows * product::kRows;
  const std::unique_ptr<C[]> rows(new C[places * p.deep]());
  for (int64_t k = 0; k < p.deep; k += kDeep) {
    const int64_t terms = std::min(kDeep, p.deep - k);
    for (int64_t t = 0; t < p.tokens; ++t) widen(p.x + t * p.deep + k, &rows[k * places + t * terms], terms);
  }
  const OutputBlocks<T> blocks{p, rows.get(), places, shares};
  on_threads(call, blocks.blocks(), work, blocks);
}

}  // namespace msops::weight_quant_matmul::cpu
