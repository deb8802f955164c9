// This operator serves patch_mindspore alone: msops has no public name for it.
//
// z = x where the condition is true, else y, with broadcasting

#include "shared/broadcast/apply.h"
#include "shared/broadcast/operations.h"

using namespace msops;

namespace {

// Elements are words of their size, whatever they stand for.
template <typename Word>
struct Select {
  static constexpr int kOperands = 3;
  using First = uint8_t;
  using Rest = Word;
  using Out = Word;

  MSOPS_BOTH Select prepared() const { return *this; }

  template <int N>
  MSOPS_BOTH Pack<Word, N> operator()(const Pack<uint8_t, N>& condition, const Pack<Word, N> (&of)[2]) const {
    Pack<Word, N> z;
    for (int j = 0; j < N; ++j) z.values[j] = condition.values[j] ? of[0].values[j] : of[1].values[j];
    return z;
  }
};

}  // namespace

// (condition, x, y) -> (z)
MSOPS_ENTRY(SelectForward) {
  const Tensor inputs[] = {call.tensor_of("bool", "condition"), call.tensor("x"), call.tensor("y")};
  const Tensor z = call.tensor("z");
  const auto operands = broadcast::operands_of(call, inputs, z);
  return call.run<Half, float, double, bool, int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t>(
      [&](auto type) {
        using T = typename decltype(type)::type;
        static_assert(has_select(dtype_name<T>()), "operations.h tells callers what there is");
        broadcast::apply(call, operands, Select<Unit<sizeof(T)>>{});
      });
}
