// Chooses the kernels of paged attention on a GPU, as the table of paged_attention.cu says.
#pragma once

#include "mma.h"
#include "plain.h"
#include "wgmma.h"

#ifdef __CUDACC__

namespace msops::paged {

// Computes sequences by kernels for few and for many rows, and for many tokens.
template <int kWidth, typename P>
bool launch_of_width(Call& call, const P& p, int64_t* first) {
  using Few = MmaShape<kWidth, false, P::kHasCodes>;
  using Many = MmaShape<kWidth, true, P::kHasCodes>;
  const bool has_few = p.group <= kFewRows, has_many = p.has_starts || !has_few;
  if ((has_few && !has_mma<Few, P>()) || (has_many && !has_mma<Many, P>())) return false;
  int64_t most_rows = INT64_MAX;
  const Plan few = mma_plan<Few>(p, first, 1, kFewRows);
  Plans plans{};
  if (has_few) plans.add(few);
#if CUDART_VERSION >= 12000
  [[maybe_unused]] const auto chunks = [&] {
    if constexpr (P::kHasCodes)
      return 0;
    else
      return Chunks<kWidth>(p, first + 2 * (p.batch + 1));
  }();
  if constexpr (!P::kHasCodes) {
    if (chunks.blocks > 0) plans.add(chunks.tensors.plan), most_rows = kFewTokens * p.group;
  }
#endif
  const Plan many = mma_plan<Many>(p, first + p.batch + 1, has_few ? kFewRows + 1 : 1, most_rows);
  if (has_many) plans.add(many);
  launch_plans(call, p, plans);
  if (has_few) launch_mma<Few>(call, p, few);
  if (has_many) launch_mma<Many>(call, p, many);
#if CUDART_VERSION >= 12000
  if constexpr (!P::kHasCodes) chunks.launch(call);
#endif
  return true;
}

// Computes out and lse, or what parts of keys have summed, or returns false and does nothing. Which kernel computes a
// sequence depends on its number of tokens alone.
template <typename P>
bool launch_on_tensor_cores(Call& call, const P& p, int64_t* first) {
  const int64_t width = most(p.width, p.value_width);
  const bool is_latent = !P::kHasCodes && width > 256 && p.v == p.k && p.value_width <= 512;
  if ((width > 256 && !is_latent) || !fits_tensor_cores(p)) return false;
  if constexpr (!P::kHasCodes) {
    if (is_latent) {
      using S = MmaShape<576, true, false, true>;
      if (!has_mma<S, P>()) return false;
      const Plan plan = mma_plan<S>(p, first, 1, INT64_MAX);
      Plans plans{};
      plans.add(plan), launch_plans(call, p, plans);
      return launch_mma<S>(call, p, plan), true;
    }
  }
  if (width <= 64) return launch_of_width<64>(call, p, first);
  if (width <= 128) return launch_of_width<128>(call, p, first);
  return launch_of_width<256>(call, p, first);
}

}  // namespace msops::paged

#endif
