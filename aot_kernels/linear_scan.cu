// h_t = a_t h_(t-1) + b_t for t = 0 ... L - 1 and h_(-1) = h0, or from the last step to the first

#include "linear_scan/columns.h"

using namespace msops;
using namespace msops::linear_scan;

namespace {

// Returns the sizes of a tensor (B, L, D).
Sizes sizes_of(Call& call, const Tensor& a) {
  return {a.dim(0), a.dim(1), a.dim(2), call.attribute("reverse", 0, 1) != 0};
}

// Returns the shape of `partial`: several parts need the States of all columns each.
std::vector<int64_t> partial_shape(const Sizes& s) {
  return s.parts() > 1 ? std::vector<int64_t>{s.parts(), s.samples, s.columns, 2} : std::vector<int64_t>(4, 1);
}

Shapes scratch_of(Call& call) { return {partial_shape(sizes_of(call, call.tensor("a", 3)))}; }

// Without steps, nothing depends on h0.
template <typename T>
struct Zeros {
  T* to;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    to[i] = T(0);
  }
};

bool is_float(const Tensor& state) { return state.dtype && std::strcmp(state.dtype, dtype_name<float>()) == 0; }

void require_state(Call& call, const Tensor& state, const Sizes& s) {
  if (state.dtype) call.require_shape(state, {s.samples, s.columns});
}

}  // namespace

// (a, b, h0?) -> (h, partial)
MSOPS_ENTRY(LinearScanForward) {
  const Tensor a = call.tensor("a", 3), b = call.tensor("b", 3), h0 = call.optional_of("common|float32", "h0", 2);
  const Tensor h = call.tensor("h", 3), partial = call.scratch("partial", 4);
  const Sizes s = sizes_of(call, a);
  for (const Tensor& tensor : {b, h}) call.require_same_shape(tensor, a);
  require_state(call, h0, s);
  call.require_shape(partial, partial_shape(s));
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    walk(call,
         Columns<Forward<T>, T>{
             s, {a.as<const T>(), b.as<const T>()}, {h.as<T>()}, h0.data, nullptr, is_float(h0), partial.as<C>()});
  });
}

MSOPS_SCRATCH(LinearScanForward) { return scratch_of(call); }

// (a, h0?, h, dh) -> (da, db, dh0?, partial)
MSOPS_ENTRY(LinearScanBackward) {
  const Tensor a = call.tensor("a", 3), h0 = call.optional_of("common|float32", "h0", 2), h = call.tensor("h", 3);
  const Tensor dh = call.tensor("dh", 3), da = call.tensor("da", 3), db = call.tensor("db", 3);
  const Tensor dh0 = call.optional_of("common|float32", "dh0", 2), partial = call.scratch("partial", 4);
  Sizes s = sizes_of(call, a);
  for (const Tensor& tensor : {h, dh, da, db}) call.require_same_shape(tensor, a);
  for (const Tensor& state : {h0, dh0}) require_state(call, state, s);
  call.require_gradient(dh0, h0);
  call.require_shape(partial, partial_shape(s));
  s.reverse = !s.reverse;
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    if (a.size == 0 && dh0.size > 0)
      return with_type<T, float>(dh0, [&](auto of_state) {
        using State = typename decltype(of_state)::type;
        parallel_for(call, dh0.size, dh0.size, Zeros<State>{dh0.as<State>()});
      });
    walk(call, Columns<Backward<T>, T>{s,
                                       {a.as<const T>(), dh.as<const T>(), h.as<const T>()},
                                       {da.as<T>(), db.as<T>()},
                                       h0.data,
                                       dh0.data,
                                       is_float(dh0),
                                       partial.as<C>()});
  });
}

MSOPS_SCRATCH(LinearScanBackward) { return scratch_of(call); }
