// y_j = e^x_j / sum_i e^x_i along an axis,  dx_j = y_j (dy_j - sum_i y_i dy_i)

#include "common/activations.h"
#include "common/rows.h"
#include "softmax/columns.h"
#include "softmax/joined_columns.h"
#include "softmax/short_rows.h"

using namespace msops;

namespace {

// Returns the larger number. On the GPU a NaN may be lost here: its exponential makes the sum NaN.
template <typename C>
MSOPS_BOTH C larger(C a, C b) {
#ifdef __CUDA_ARCH__
  return std::fmax(a, b);
#else
  return b > a || b != b ? b : a;
#endif
}

template <typename T>
struct Forward {
  using C = Compute<T>;
  static constexpr int kInputs = 1, kOutputs = 1, kPhases = 2;  // the largest element, the sum of exponentials
  static constexpr bool kScales = true;

  template <int phase>
  static MSOPS_BOTH C identity() {
    return phase == 0 ? C(-HUGE_VAL) : C(0);
  }
  template <int phase>
  static MSOPS_BOTH C of(const C (&in)[1], const C (&found)[2]) {
    if constexpr (phase == 0) {
      return in[0];
    } else {
#ifdef __CUDA_ARCH__
      if constexpr (std::is_same<T, Half>::value) return ex2_approx_ftz(fmaf(in[0], kLog2E<float>, -found[0]));
#endif
      return Activations<T>::exp(in[0] - found[0]);
    }
  }
  template <int phase>
  static MSOPS_BOTH C combine(C a, C b) {
    return phase == 0 ? larger(a, b) : a + b;
  }
  // In float16 the GPU computes 2^(x log2(e) - c), where c is the largest x times log2(e), rounded: its error is a
  // factor of all terms, and cancels.
  template <int phase>
  static MSOPS_BOTH C finish(C combined) {
    if constexpr (phase == 1) return 1 / combined;
#ifdef __CUDA_ARCH__
    if constexpr (std::is_same<T, Half>::value) return combined * kLog2E<float>;
#endif
    return combined;
  }
  static MSOPS_BOTH void map(const C (&in)[1], const C (&found)[2], C (&out)[1]) {
    out[0] = of<1>(in, found) * found[1];
  }
};

template <typename C>
struct Sums {
  static constexpr bool kScales = false;

  template <int phase>
  static MSOPS_BOTH C identity() {
    return 0;
  }
  template <int phase>
  static MSOPS_BOTH C combine(C a, C b) {
    return a + b;
  }
  template <int phase>
  static MSOPS_BOTH C finish(C combined) {
    return combined;
  }
};

// Inputs are y and dy.
template <typename T>
struct Backward : Sums<Compute<T>> {
  using C = Compute<T>;
  static constexpr int kInputs = 2, kOutputs = 1, kPhases = 1;

  template <int phase>
  static MSOPS_BOTH C of(const C (&in)[2], const C (&)[1]) {
    return in[0] * in[1];
  }
  static MSOPS_BOTH void map(const C (&in)[2], const C (&found)[1], C (&out)[1]) {
    out[0] = in[0] * (in[1] - found[0]);
  }
};

// Inputs are y, dy and ddx. With s = sum_i y_i dy_i and t = sum_i y_i ddx_i, the gradient of y_j is
// ddx_j (dy_j - s) - t dy_j, and that of dy_j is y_j (ddx_j - t).
template <typename T>
struct BackwardBackward : Sums<Compute<T>> {
  using C = Compute<T>;
  static constexpr int kInputs = 3, kOutputs = 2, kPhases = 2;

  template <int phase>
  static MSOPS_BOTH C of(const C (&in)[3], const C (&)[2]) {
    return in[0] * in[phase + 1];
  }
  static MSOPS_BOTH void map(const C (&in)[3], const C (&found)[2], C (&out)[2]) {
    out[0] = in[2] * (in[1] - found[0]) - found[1] * in[1];
    out[1] = in[0] * (in[2] - found[1]);
  }
};

// Follows a Program along rows.
template <typename Program, typename T>
struct AlongRows {
  using C = Compute<T>;
  using Found = C[Program::kPhases];
  softmax::Columns<Program, T> all;

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    load(row, team, std::make_index_sequence<Program::kInputs>{});
  }

 private:
  template <typename Team, size_t... a>
  MSOPS_BOTH void load(int64_t row, const Team& team, std::index_sequence<a...>) const {
    const int64_t length = all.s.length, start = row * length;
    follow(start, team, team.load(Row<const T>{all.in[a] + start, length})...);
  }

  template <typename Team, typename... In>
  MSOPS_BOTH void follow(int64_t start, const Team& team, const In&... rows) const {
    Found found;
#ifndef __CUDA_ARCH__
    // On the CPU the exponentials wait in the output for their sum, where they are not rounded.
    if constexpr (Program::kScales && std::is_same<T, C>::value) {
      constexpr int kLast = Program::kPhases - 1;
      const Row<T> out{all.out[0] + start, all.s.length};
      reduce<0, kLast>(found, team, rows...);
      team.map(of_phase<kLast>(found), out, rows...);
      const auto same = [](C term) { return term; };
      const C sum = team.reduce(Program::template identity<kLast>(), combine_phase<kLast>(), same, out);
      return team.map([scale = Program::template finish<kLast>(sum)](C term) { return term * scale; }, out, out);
    }
#endif
    reduce<0, Program::kPhases>(found, team, rows...);
    map<0>(found, start, team, rows...);
  }

  template <int phase>
  static MSOPS_BOTH auto of_phase(const Found& found) {
    return [&found](auto... v) {
      const C in[] = {v...};
      return Program::template of<phase>(in, found);
    };
  }
  template <int phase>
  static MSOPS_BOTH auto combine_phase() {
    return [](C a, C b) { return Program::template combine<phase>(a, b); };
  }

  // Finds the results of the phases in [phase, end).
  template <int phase, int end, typename Team, typename... In>
  MSOPS_BOTH void reduce(Found& found, const Team& team, const In&... rows) const {
    if constexpr (phase < end) {
      found[phase] = Program::template finish<phase>(
          team.reduce(Program::template identity<phase>(), combine_phase<phase>(), of_phase<phase>(found), rows...));
      reduce<phase + 1, end>(found, team, rows...);
    }
  }

  template <int output, typename Team, typename... In>
  MSOPS_BOTH void map(const Found& found, int64_t start, const Team& team, const In&... rows) const {
    if constexpr (output < Program::kOutputs) {
      const auto of = [&found](auto... v) {
        const C in[] = {v...};
        C out[Program::kOutputs];
        Program::map(in, found, out);
        return out[output];
      };
      team.map(of, Row<T>{all.out[output] + start, all.s.length}, rows...);
      map<output + 1>(found, start, team, rows...);
    }
  }
};

// Returns a tensor as rows of the last axis of `shape`.
Tensor as_rows(Tensor tensor, const int64_t (&shape)[2]) {
  tensor.rank = 2;
  tensor.shape = shape;
  return tensor;
}

template <typename Program, typename T, size_t... a, size_t... o>
void along_rows(Call& call, const softmax::Columns<Program, T>& all, const Tensor (&in)[sizeof...(a)],
                const Tensor (&out)[sizeof...(o)], std::index_sequence<a...>, std::index_sequence<o...>) {
  const int64_t shape[] = {all.s.outer, all.s.length};
  for_rows<T, (Program::kInputs > 1)>(call, all.s.outer, {as_rows(in[a], shape)..., as_rows(out[o], shape)...},
                                      AlongRows<Program, T>{all});
}

template <template <typename> class Program, size_t kInputs, size_t kOutputs>
int along_axis(Call& call, const char* const (&inputs)[kInputs], const char* const (&outputs)[kOutputs]) {
  Tensor in[kInputs], out[kOutputs];
  for (size_t a = 0; a < kInputs; ++a) in[a] = call.tensor(inputs[a]);
  for (size_t o = 0; o < kOutputs; ++o) out[o] = call.tensor(outputs[o]);
  const Tensor& x = in[0];
  for (const Tensor& tensor : in) call.require_same_shape(tensor, x);
  for (const Tensor& tensor : out) call.require_same_shape(tensor, x);
  const int axis = x.rank - 1 - static_cast<int>(call.attribute("from_end", 0, INT32_MAX - 1));
  call.require(axis >= 0, kBadAttribute, "%s has %d axes, and none for attribute from_end", x.name, x.rank);
  softmax::ColumnSizes s{1, x.dim(axis), 1};
  for (int i = 0; i < axis; ++i) s.outer *= x.dim(i);
  for (int i = axis + 1; i < x.rank; ++i) s.inner *= x.dim(i);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    if (x.size == 0) return;
    softmax::Columns<Program<T>, T> all{s, {}, {}};
    for (size_t a = 0; a < kInputs; ++a) all.in[a] = in[a].template as<const T>();
    for (size_t o = 0; o < kOutputs; ++o) all.out[o] = out[o].template as<T>();
    // Rows are columns without neighbours. Teams read them in packs, except for gradients of gradients, whose three
    // inputs the registers do not hold, and where a row is shorter than a pack of the CPU.
    if constexpr (kInputs <= 2) {
      if (s.inner == 1 && (!call.is_on_cpu() || s.length >= OnCpu::kWidth)) {
        if (softmax::for_short_rows(call, all)) return;
        return along_rows(call, all, in, out, std::make_index_sequence<kInputs>{},
                          std::make_index_sequence<kOutputs>{});
      }
      if (softmax::for_joined_columns(call, all)) return;
    }
    softmax::for_columns(call, all);
  });
}

}  // namespace

MSOPS_ENTRY(SoftmaxForward) { return along_axis<Forward>(call, {"x"}, {"y"}); }

MSOPS_ENTRY(SoftmaxBackward) { return along_axis<Backward>(call, {"y", "dy"}, {"dx"}); }

MSOPS_ENTRY(SoftmaxBackwardBackward) {
  return along_axis<BackwardBackward>(call, {"y", "dy", "ddx"}, {"gradient_y", "gradient_dy"});
}
