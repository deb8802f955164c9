// The sums over rows that the gradients of norms have, and which kernel adds them up.
#pragma once

#include "long_gradient.h"

namespace msops::norm {

// What for_rows_with_sums adds up: partial sums in scratch, and the results, which are absent where their parameters
// are. Without parameters the sums are not used: that costs hardly any time, and no other kernels.
struct NormSums {
  Tensor weight, bias, partial;

  template <typename T, bool kBias, Kernels kKernels, typename Body, typename Groups = Constant<1>>
  void run(Call& call, int64_t rows, std::initializer_list<RowLayout<T>> places, const Body& body,
           Groups heads = {}) const {
    using C = Compute<T>;
    const int64_t columns = places.begin()->columns * heads, parts = partial.dim(0);
    C *const of_weight = partial.as<C>(), *const of_bias = of_weight + parts * columns;
    if constexpr (kBias) {
      const int64_t used =
          for_rows_with_sums<T, 2, kKernels>(call, rows, places, body, {of_weight, of_bias}, parts, heads);
      add_parts<T>(call, used, columns, of_weight, weight);
      add_parts<T>(call, used, columns, of_bias, bias);
    } else {
      const int64_t used = for_rows_with_sums<T, 1, kKernels>(call, rows, places, body, {of_weight}, parts, heads);
      add_parts<T>(call, used, columns, of_weight, weight);
    }
  }

  // Runs the kernel for long rows where it fits, or does the same as run(), which is faster up to kLongColumns.
  template <typename T, bool kCentred, bool kAdds>
  void run_gradient(Call& call, int64_t rows, std::initializer_list<RowLayout<T>> places,
                    const NormGradient<T, kCentred, kAdds>& body) const {
#ifdef __CUDACC__
    if constexpr (kOnGpu<T> && kMovesPacks<T>) {
      const int64_t columns = body.x.columns, parts = partial.dim(0);
      float *const of_weight = partial.as<float>(), *const of_bias = of_weight + parts * columns;
      const bool fits = call.ok() && !call.is_on_cpu() && rows > 0 && packs_tile(places);
      if (fits && columns > kLongColumns)
        if (const int64_t used = long_gradient(call, rows, body, parts, {of_weight, of_bias})) {
          add_parts<T>(call, used, columns, of_weight, weight);
          if constexpr (kCentred) add_parts<T>(call, used, columns, of_bias, bias);
          return;
        }
    }
#endif
    run<T, kCentred, Kernels::kAll>(call, rows, places, body);
  }

  // Returns the shape of the scratch for `sums` numbers for each column, added up over the rows of x.
  static Shapes scratch(const Tensor& x, int64_t columns, int64_t sums) {
    return {{row_parts(x.size / std::max<int64_t>(1, columns), columns), size_of({sums, columns})}};
  }

  // Requires scratch of the right shape.
  void check(Call& call, int64_t columns, int sums) const {
    call.require(partial.dim(0) >= 1, kBadShape, "partial has no rows");
    call.require_shape(partial, {partial.dim(0), size_of({sums, columns})});
  }

 private:
  template <typename T>
  static void add_parts(Call& call, int64_t parts, int64_t columns, const Compute<T>* sums, const Tensor& out) {
    if (!out.dtype) return;
    with_type<T, float>(out, [&](auto type) {
      using Out = typename decltype(type)::type;
      sum_rows(call, parts, out.size, columns, sums, out.as<Out>());
    });
  }
};

}  // namespace msops::norm
