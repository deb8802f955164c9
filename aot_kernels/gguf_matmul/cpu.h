// Products on the CPU. Each block of the weight is unpacked once for some tokens, and its numbers are multiplied where
// they are in registers or in the first cache.
//
//   case                 body
//   up to kFew tokens    MultiplyFew: numbers go from the codes into the sums
//   other tokens         MultiplyPanels: rows are unpacked for the panels of shared/product/cpu.h
//   the gradient of x    MultiplyBack
#pragma once

#include "../shared/gguf/unpack.h"
#include "../shared/product/cpu.h"
#include "problem.h"

namespace msops::gguf_matmul::cpu {

constexpr int kFew = 4;

template <typename T>
std::unique_ptr<Compute<T>[]> widened(Call& call, const T* x, int64_t n) {
  std::unique_ptr<Compute<T>[]> result(new Compute<T>[n]);
  const auto copy = [&](int64_t part, int64_t parts) {
    const int64_t begin = part_begin(n, part, parts);
    widen(x + begin, result.get() + begin, part_begin(n, part + 1, parts) - begin);
  };
  on_threads(call, n, static_cast<double>(n), copy);
  return result;
}

// Eight lanes of numbers or of sums.
template <typename C>
struct Eight {
  C lanes[8];

  Eight() = default;
  MSOPS_BOTH explicit Eight(const gguf::Floats& numbers) {
    float each[8];
    memcpy(each, &numbers, sizeof each);
    for (int i = 0; i < 8; ++i) lanes[i] = each[i];
  }
  MSOPS_BOTH void add(const Eight& factors, const C* x) {
#pragma omp simd
    for (int i = 0; i < 8; ++i) lanes[i] += factors.lanes[i] * x[i];
  }
  MSOPS_BOTH C sum() const {
    C result = 0;
    for (const C lane : lanes) result += lane;
    return result;
  }
};
#if defined(__AVX2__) && defined(__F16C__) && !defined(__CUDA_ARCH__)
template <>
struct Eight<float> {
  EightFloats lanes;

  Eight() = default;
  MSOPS_BOTH explicit Eight(const EightFloats& numbers) : lanes(numbers) {}
  MSOPS_BOTH void add(const Eight& factors, const float* x) {
    EightFloats features;
    memcpy(&features, x, sizeof features);
    lanes += factors.lanes * features;
  }
  MSOPS_BOTH float sum() const {
    float result = 0;
    for (int i = 0; i < 8; ++i) result += lanes[i];
    return result;
  }
};
#endif

// The sums of a row of the weight with some tokens, in 16 lanes each.
template <typename F, int kTokens, typename C>
struct RowProduct {
  const uint8_t* block;
  int64_t deep;
  const C* x;
  C* sums;  // (kTokens)

  MSOPS_CPU void operator()() const {
    const RowProduct p = *this;
    Eight<C> total[kTokens][2] = {};
    const uint8_t* from = p.block;
    for (int64_t k = 0; k < p.deep; k += F::kNumbers, from += F::kBytes) {
      MSOPS_UNROLL
      for (int e = 0; e < F::kNumbers; e += F::kGroup) {
        const gguf::Scale s = F::scale(from, e);
        MSOPS_UNROLL
        for (int i = e; i < e + F::kGroup; i += 8) {
          const Eight<C> numbers(gguf::eight_of(F::template codes<uint64_t>(from, i), s));
          MSOPS_UNROLL
          for (int t = 0; t < kTokens; ++t) total[t][i / 8 % 2].add(numbers, p.x + t * p.deep + k + i);
        }
      }
    }
    for (int t = 0; t < kTokens; ++t) p.sums[t] = total[t][0].sum() + total[t][1].sum();
  }
};

// Threads take runs of the weight's rows.
template <typename F, int kTokens, typename T>
struct MultiplyFew {
  static constexpr int64_t kRun = 16;
  const Products<T>& p;
  const Compute<T>* x;
  product::Shares& shares;

  int64_t runs() const { return (p.columns() + kRun - 1) / kRun; }
  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    for (int64_t run; shares.take(0, part, parts, runs(), run);)
      for (int64_t row = run * kRun; row < std::min(p.columns(), (run + 1) * kRun); ++row) {
        Compute<T> sums[kTokens];
        product::run_apart(RowProduct<F, kTokens, Compute<T>>{p.weight.template block<F>(row, 0), p.deep(), x, sums});
        for (int t = 0; t < kTokens; ++t) assign(p.out[t * p.columns() + row], sums[t] + p.bias[row]);
      }
  }
};

// Unpacker is a function for one kind. The bodies below are the same for all kinds.
template <typename C>
struct Unpacker {
  void (*unpack)(const uint8_t*, C*, int64_t);
  int64_t bytes;  // of kRun numbers

  static constexpr int64_t kRun = 256;

  template <typename F>
  static MSOPS_CPU Unpacker of() {
    return {gguf::unpack<F, C>, kRun / F::kNumbers * F::kBytes};
  }
  // Unpacks n numbers of a row, from number k on, which is a multiple of kRun.
  MSOPS_CPU void operator()(const Weight& w, int64_t row, int64_t k, C* to, int64_t n) const {
    unpack(w.data + row * w.row_bytes + k / kRun * bytes, to, n);
  }
};

// Threads take kBlock rows of the weight. Each run of their numbers is unpacked once for kTokens tokens, and its
// products are added to the sums of the runs before.
template <typename T>
struct MultiplyPanels {
  using C = Compute<T>;
  static constexpr int64_t kRun = Unpacker<C>::kRun, kLanes = product::kMostLanes<C>, kTokens = 20 * kLanes;
  const Products<T>& p;
  Unpacker<C> unpack;
  product::Lanes<C> lanes;
  const C* panels;
  product::Shares& shares;

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    const int64_t rows = p.columns(), runs = (rows + product::kBlock - 1) / product::kBlock;
    const std::unique_ptr<C[]> numbers(new C[product::kBlock * kRun]), sums(new C[product::kBlock * kLanes]);
    const std::unique_ptr<C[]> totals(new C[product::kBlock * std::min(kTokens, lanes.places())]);
    for (int64_t run; shares.take(0, part, parts, runs, run);)
      for (int64_t token = 0; token < lanes.tokens; token += kTokens) {
        const int64_t first = run * product::kBlock, count = std::min(product::kBlock, rows - first);
        multiply(first, count, token, numbers.get(), sums.get(), totals.get());
        store(first, count, token, totals.get());
      }
  }

 private:
  MSOPS_CPU int64_t tokens_from(int64_t token) const { return std::min(kTokens, lanes.places() - token); }

  MSOPS_CPU void multiply(int64_t first, int64_t count, int64_t token, C* numbers, C* sums, C* totals) const {
    const int64_t deep = p.deep(), whole = (count + product::kRows - 1) / product::kRows * product::kRows;
    std::fill_n(totals, whole * tokens_from(token), C(0));
    for (int64_t k = 0; k < deep; k += kRun) {
      const int64_t n = std::min(kRun, deep - k);
      for (int64_t r = 0; r < count; ++r) unpack(p.weight, first + r, k, numbers + r * n, n);
      std::fill_n(numbers + count * n, (whole - count) * n, C(0));
      for (int64_t t = token; t < token + tokens_from(token); t += kLanes) {
        const int64_t pitch = lanes.pitch(t);
        product::multiply_panel(pitch, numbers, whole, n, panels + t * deep + k * pitch, sums);
        C* const to = totals + (t - token) * whole;
#pragma omp simd
        for (int64_t i = 0; i < whole * pitch; ++i) to[i] += sums[i];
      }
    }
  }

  MSOPS_CPU void store(int64_t first, int64_t count, int64_t token, const C* totals) const {
    const int64_t whole = (count + product::kRows - 1) / product::kRows * product::kRows;
    for (int64_t t = token; t < std::min(token + kTokens, lanes.tokens); ++t) {
      const int64_t panel = t / kLanes * kLanes, pitch = lanes.pitch(panel);
      const C* const from = totals + (panel - token) * whole + t - panel;
      C line[product::kBlock];
      for (int64_t r = 0; r < count; ++r) line[r] = from[r * pitch] + p.bias[first + r];
      narrow(line, p.out + t * p.columns() + first, count);
    }
  }
};

// Copies token t to its place in a panel, with zeros for places of no token.
template <typename T>
struct PutToken {
  using C = Compute<T>;
  const Products<T>& p;
  product::Lanes<C> lanes;
  C* panels;

  MSOPS_CPU void operator()(int64_t t) const {
    constexpr int64_t kRun = 256;
    const int64_t deep = p.deep(), pitch = lanes.pitch(t);
    C* const to = lanes.at(panels, t, deep);
    C line[kRun] = {};
    for (int64_t k = 0; k < deep; k += kRun) {
      const int64_t n = std::min(kRun, deep - k);
      if (t < lanes.tokens) widen(p.x + t * deep + k, line, n);
      for (int64_t i = 0; i < n; ++i) to[(k + i) * pitch] = line[i];
    }
  }
};

template <typename F, typename T>
void multiply(Call& call, const Products<T>& p) {
  using C = Compute<T>;
  const double work = static_cast<double>(p.columns()) * static_cast<double>(p.deep());
  product::Shares shares(1);
  const auto multiply_few = [&](auto tokens) {
    constexpr int kTokens = tokens;
    const auto x = widened(call, p.x, p.tokens * p.deep());
    const MultiplyFew<F, kTokens, T> body{p, x.get(), shares};
    on_threads(call, body.runs(), work * (1 + kTokens) / 8, body);
  };
  switch (p.tokens) {
    case 1:
      return multiply_few(Constant<1>{});
    case 2:
      return multiply_few(Constant<2>{});
    case 3:
      return multiply_few(Constant<3>{});
    case kFew:
      return multiply_few(Constant<kFew>{});
  }
  const product::Lanes<C> lanes{p.tokens};
  const std::unique_ptr<C[]> panels(new C[lanes.places() * p.deep()]);
  on_cpu(call, lanes.places(), PutToken<T>{p, lanes, panels.get()}, static_cast<double>(p.deep()));
  on_threads(call, (p.columns() + product::kBlock - 1) / product::kBlock, work * static_cast<double>(p.tokens) / 8,
             MultiplyPanels<T>{p, Unpacker<C>::template of<F>(), lanes, panels.get(), shares});
}

// dx of kTokens tokens and of a run of columns is the sum over the weight's rows, of which kAtOnce are unpacked.
template <typename T>
struct MultiplyBack {
  using C = Compute<T>;
  static constexpr int64_t kRun = Unpacker<C>::kRun, kTokens = 16, kAtOnce = 4;
  const Gradients<T>& p;
  Unpacker<C> unpack;
  product::Shares& shares;

  int64_t across() const { return (p.columns() + kRun - 1) / kRun; }
  int64_t items() const { return across() * ((p.tokens + kTokens - 1) / kTokens); }

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    const std::unique_ptr<C[]> rows(new C[kAtOnce * kRun]), sums(new C[kTokens * kRun]);
    for (int64_t item; shares.take(0, part, parts, items(), item);) {
      const int64_t first = item / across() * kTokens, column = item % across() * kRun;
      const int64_t tokens = std::min(kTokens, p.tokens - first), n = std::min(kRun, p.columns() - column);
      std::fill_n(sums.get(), kTokens * kRun, C(0));
      for (int64_t m = 0; m < p.deep(); m += kAtOnce) {
        const int64_t count = std::min(kAtOnce, p.deep() - m);
        std::fill_n(rows.get(), kAtOnce * kRun, C(0));
        for (int64_t r = 0; r < count; ++r) unpack(p.weight, m + r, column, rows.get() + r * kRun, n);
        for (int64_t t = 0; t < tokens; ++t) {
          C factors[kAtOnce] = {};
          for (int64_t r = 0; r < count; ++r) factors[r] = C(p.x[(first + t) * p.deep() + m + r]);
          add(rows.get(), factors, sums.get() + t * kRun);
        }
      }
      for (int64_t t = 0; t < tokens; ++t) narrow(sums.get() + t * kRun, p.out + (first + t) * p.columns() + column, n);
    }
  }

 private:
  static MSOPS_CPU void add(const C* rows, const C (&factors)[kAtOnce], C* sums) {
    static_assert(kAtOnce == 4, "four rows are written out");
#pragma omp simd
    for (int64_t i = 0; i < kRun; ++i)
      sums[i] += factors[0] * rows[i] + factors[1] * rows[kRun + i] + factors[2] * rows[2 * kRun + i] +
                 factors[3] * rows[3 * kRun + i];
  }
};

template <typename F, typename T>
void multiply(Call& call, const Gradients<T>& p) {
  product::Shares shares(1);
  const MultiplyBack<T> body{p, Unpacker<Compute<T>>::template of<F>(), shares};
  const double work = static_cast<double>(p.columns()) * static_cast<double>(p.deep());
  on_threads(call, body.items(), work * static_cast<double>(p.tokens) / 8, body);
}

}  // namespace msops::gguf_matmul::cpu
