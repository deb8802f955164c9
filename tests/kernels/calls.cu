#include "common/formula.h"

MSOPS_FORMULA(Difference, (x, y), (z), z = x - y)
MSOPS_FORMULA(Square, (x), (y), y = x * x)
MSOPS_FORMULA(SquareBackward, (x, dy), (dx), dx = 2 * x * dy)
MSOPS_FORMULA(TwoResults, (x), (y, z, partial), y = x * x; z = 3 * x; partial = x)
MSOPS_FORMULA(TwoGradients, (x, w, dy), (dx, dw), dx = dy * w; dw = dy * x)

using namespace msops;

struct Place {
  int64_t* out;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    out[i] = 0;
  }
};

// The place of the first element, which is 0.
MSOPS_ENTRY(First) {
  call.tensor("x");
  const Tensor place = call.tensor_of("int64", "place", 1);
  return call.run([&](auto) { parallel_for(call, place.size, place.size, Place{place.as<int64_t>()}); });
}
