// RWKV-7's time mixing: a matrix for each head as a memory that each step decays, corrects and extends, and its
// gradients

#include "wkv7/chunk_columns.h"
#include "wkv7/chunk_rows.h"
#include "wkv7/cpu.h"
#include "wkv7/gpu.h"

using namespace msops;
using namespace msops::wkv7;

namespace {

struct Inputs {
  Tensor r, w, k, v, a, b, state;
  Sizes s;

  explicit Inputs(Call& call)
      : r(call.tensor("r", 4)),
        w(call.tensor("w", 4)),
        k(call.tensor("k", 4)),
        v(call.tensor("v", 4)),
        a(call.tensor("a", 4)),
        b(call.tensor("b", 4)),
        state(call.optional_of("common|float32", "state", 4)),
        s{r.dim(0), r.dim(1), r.dim(2), r.dim(3)} {}

  void require(Call& call) const {
    for (const Tensor& tensor : {w, k, v, a, b}) call.require_same_shape(tensor, r);
    call.require(s.features <= kMost, kBadShape, "there are %lld features, expected at most %d",
                 static_cast<long long>(s.features), kMost);
    require_state(call, state);
  }
  void require_state(Call& call, const Tensor& tensor) const {
    if (tensor.dtype) call.require_shape(tensor, {s.samples, s.heads, s.features, s.features});
  }

  template <typename T>
  Task<T> task() const {
    Task<T> result{};
    result.s = s;
    const Tensor* const tensors[] = {&r, &w, &k, &a, &b, &v};
    for (int i = 0; i < kDy; ++i) result.inputs[i] = tensors[i]->as<const T>();
    result.state = Numbers<T>(state);
    return result;
  }
};

template <template <typename> class Program, typename T>
void walk(Call& call, const Task<T>& task) {
  const Sizes& s = task.s;
  if (s.matrices() * s.features == 0) return;
  if (call.is_on_cpu()) {
    const OnCpu<Program<T>, T> body{task};
    const double cost = static_cast<double>((s.steps + 1) * body.kRun * (s.features + 8));
    return on_cpu(call, s.matrices() * body.runs(), body, cost);
  }
#ifdef __CUDACC__
  if constexpr (std::is_same<T, Half>::value)
    if constexpr (Program<T>::kRows) {
      if (chunks::launch_rows<Program<T>>(call, task)) return;
    } else {
      if (chunks::launch_columns<Program<T>>(call, task)) return;
    }
  s.features <= 64 ? launch_walk<Program<T>, 64>(call, task) : launch_walk<Program<T>, kMost>(call, task);
#endif
}

}  // namespace

// (r, w, k, v, a, b, state?) -> (y, last, s)
MSOPS_ENTRY(WKV7Forward) {
  const Inputs in(call);
  const Tensor y = call.tensor("y", 4), last = call.tensor_of("accumulator", "last", 4);
  const Tensor s = call.tensor_of("accumulator", "s", 4);
  in.require(call);
  for (const Tensor& tensor : {y, s}) call.require_same_shape(tensor, in.r);
  in.require_state(call, last);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    Task<T> task = in.task<T>();
    task.gradients[kDy] = y.as<T>();
    task.computed[kS - kInputs] = s.as<C>();
    task.last = last.as<C>();
    walk<Forward>(call, task);
  });
}

// (r, w, k, v, a, b, state?, s, dy, dlast) -> (dr, dw, dk, dv, da, db, dstate?, g, terms, kept): the last three are
// scratch.
MSOPS_ENTRY(WKV7Backward) {
  const Inputs in(call);
  const Tensor s = call.tensor_of("accumulator", "s", 4), dy = call.tensor("dy", 4);
  const Tensor dlast = call.tensor_of("accumulator", "dlast", 4);
  const Tensor dr = call.tensor("dr", 4), dw = call.tensor("dw", 4), dk = call.tensor("dk", 4);
  const Tensor dv = call.tensor("dv", 4), da = call.tensor("da", 4), db = call.tensor("db", 4);
  const Tensor dstate = call.optional_of("common|float32", "dstate", 4);
  const Tensor g = call.scratch("g", 4), terms = call.scratch("terms", 4), kept = call.scratch("kept", 5);
  in.require(call);
  for (const Tensor& tensor : {s, dy, dr, dw, dk, dv, da, db, g, terms}) call.require_same_shape(tensor, in.r);
  for (const Tensor& tensor : {dlast, dstate}) in.require_state(call, tensor);
  call.require_gradient(dstate, in.state);
  call.require_shape(kept, {in.s.samples, in.s.heads, in.s.kept(), in.s.features, in.s.features});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    Task<T> task = in.task<T>();
    task.inputs[kDy] = dy.as<const T>();
    const Tensor* const computed[] = {&s, &g, &terms};
    for (int i = 0; i < kComputed; ++i) task.computed[i] = computed[i]->as<C>();
    const Tensor* const gradients[] = {&dr, &dw, &dk, &da, &db, &dv};
    for (int i = 0; i < kDy; ++i) task.gradients[i] = gradients[i]->as<T>();
    task.dstate = Numbers<T>(dstate);
    task.kept = kept.as<C>();
    task.dlast = dlast.as<const C>();
    walk<RowsBack>(call, task);
    walk<ColumnsBack>(call, task);
    walk<Columns>(call, task);
  });
}
