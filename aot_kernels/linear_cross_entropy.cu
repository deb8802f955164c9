// The gradients of linear_cross_entropy are computed before the gradient of the loss is known. One entry computes the
// loss and these gradients by chunks of rows; one returns the loss, with these gradients among its inputs; one scales
// them by a number on the device, which has the digits of a sum, also beside float16.

#include "common/elementwise.h"
#include "common/scratch.h"
#include "cross_entropy/cpu.h"
#include "cross_entropy/settings.h"
#include "shared/product/gpu.h"
#include "shared/product/matrix.h"
#ifdef __CUDACC__
#include "cross_entropy/gpu.h"
#endif

using namespace msops;
using namespace msops::cross_entropy;

namespace {

template <typename C>
struct Scale {
  const C* factor;

  MSOPS_BOTH void operator()(C x, C& y) const { y = x * *factor; }
};

struct Copy {
  template <typename C>
  MSOPS_BOTH void operator()(C x, C& y) const {
    y = x;
  }
};

struct Factor {
  template <typename C>
  MSOPS_BOTH void operator()(C count, C& y) const {
    y = count > 0 ? 1 / count : C(1);
  }
};

// A GPU takes an eighth of the rows at once, but about kFewRows if that is more, since cuBLAS is slower with fewer. It
// takes all rows at once if there are few logits.
constexpr int64_t kChunks = 8, kFewRows = 1024, kFewLogits = int64_t{1} << 20;

int64_t rows_of_chunk(int64_t chunk, int64_t rows, int64_t classes) {
  if (chunk > 0) return std::min(chunk, rows);
  if (size_of({rows, classes}) <= kFewLogits) return rows;
  const int64_t most = std::max((rows + kChunks - 1) / kChunks, kFewRows), chunks = (rows + most - 1) / most;
  return (rows + chunks - 1) / chunks;  // chunks are as long as each other
}

// Returns the shapes of: a chunk's logits, which become their gradients; the losses and RowStats of rows; two times
// three totals; sums over parts of the rows.
Shapes scratch_of(int64_t chunk, int64_t rows, int64_t classes) {
  return {{rows_of_chunk(chunk, rows, classes), classes},
          {rows},
          {rows, 2},
          {2, 3},
          {std::clamp<int64_t>(rows / kRowsOfSum, 1, 1024), 4}};
}

// On the CPU, whose users have MindSpore's matmul, a product serves the tests.
template <typename T>
struct ProductOnCpu {
  product::Product<T> p;

  MSOPS_CPU void operator()(int64_t i) const {
    for (int64_t j = 0; j < p.m; ++j) {
      Compute<T> sum = 0;
      for (int64_t k = 0; k < p.deep; ++k) sum += p.numbers.at(i, k, p.n, p.deep) * p.weights.at(j, k, p.m, p.deep);
      p.store(i, j, sum);
    }
  }
};

// Head computes the losses of rows and their gradients. Its pointers lead to x, the weight and scratch.
template <typename T>
struct Head {
  using C = Compute<T>;
  Call& call;
  const Loss<T> all;
  const int64_t deep;
  const T *const x, *const weight;
  T* const logits;
  C* const losses;
  RowStats<C>* const stats;
  C *const ones, *const totals, *const partial;

  // Takes `length` rows at once. Each loss has the gradient 1. What is null is not computed. Float16 sums of dweight
  // are made smaller by the factor `shrink`.
  void run(int64_t length, C shrink, T* dx, T* dweight, C* loss, C* factor) const {
    const int64_t classes = all.classes;
    Loss<T> part = all;
    part.reduction = Reduction::kNone;
    add_up(part, nullptr, ones);
    for (int64_t start = 0; start < all.rows && call.ok(); start += length) {
      const int64_t rows = part.rows = std::min(length, all.rows - start);
      const T* const from = x + start * deep;
      part.labels = all.labels.from(start);
      multiply({rows, classes, deep, from, weight, logits});
      take_rows(part, start, dx || dweight);
      if (dx) multiply({rows, deep, classes, logits, {weight, true}, dx + start * deep});
      if (dweight) multiply({classes, deep, rows, {logits, true}, {from, true}, dweight, start > 0, shrink});
    }
    if (dweight && all.rows == 0) multiply({classes, deep, 0, logits, x, dweight});
    Loss<T> sum = all;
    sum.z = 0;  // the losses of rows have it
    add_up(sum, loss, totals);
    elementwise<C>(call, 1, Factor{}, {totals}, {factor});
  }

 private:
  void multiply(const product::Product<T>& p) const {
    if (call.is_on_cpu()) return on_cpu(call, p.n, ProductOnCpu<T>{p}, static_cast<double>(p.m * p.deep));
#ifdef __CUDACC__
    product::multiply(call, p);
#endif
  }

  // Computes losses and, in place of the logits, their gradients.
  void take_rows(const Loss<T>& part, int64_t start, bool wants_gradients) const {
    constexpr Form kForm = Form::kClasses;
    if (call.is_on_cpu()) {
      const double cost = 4 * static_cast<double>(part.classes);
      on_cpu(call, part.rows, LossOfRowOnCpu<T, kForm>{part, losses + start, stats + start}, cost);
      if (wants_gradients)
        on_cpu(call, part.rows, GradientOfRowOnCpu<T, kForm>{part, stats + start, ones, ones, false, logits, nullptr},
               cost);
    }
#ifdef __CUDACC__
    if (call.is_on_cpu()) return;
    launch_loss<T, kForm>(call, part, losses + start, stats + start, nullptr);
    if (wants_gradients && part.classes > 0)
      launch_gradient<T, kForm>(call, part, stats + start, ones, ones, false, logits, nullptr);
#endif
  }

  void add_up(const Loss<T>& loss, C* result, C* to) const {
    constexpr Form kForm = Form::kClasses;
    if (call.is_on_cpu()) on_cpu(call, 1, TotalsOnCpu<T, kForm>{loss, losses, stats, result, to}, 1);
#ifdef __CUDACC__
    if (!call.is_on_cpu()) launch_totals<T, kForm>(call, loss, losses, stats, 0, partial, result, to);
#endif
  }
};

}  // namespace

// (x, weight, labels) -> (loss, factor, dx?, dweight?, logits, losses, stats, totals, partial): the sum or the mean of
// the losses, and its gradient with respect to each of them. dx and dweight are for gradients of 1 instead, and float16
// dweight is `shrink` times that. What follows is scratch. A label out of range gives NaN.
MSOPS_ENTRY(LinearCrossEntropyForward) {
  const Settings settings(call);
  const int64_t chunk = call.attribute("chunk", 0, INT64_MAX);
  const double shrink = call.number("shrink");
  const Tensor x = call.tensor("x", 2), weight = call.tensor("weight", 2);
  const Tensor labels = call.tensor_of("index", "labels", 1);
  const Tensor loss = call.tensor_of("accumulator", "loss", 0), factor = call.tensor_of("accumulator", "factor", 0);
  const Tensor dx = call.optional("dx", 2), dweight = call.optional("dweight", 2), logits = call.tensor("logits", 2);
  const Tensor losses = call.scratch("losses", 1), stats = call.scratch("stats", 2);
  const Tensor totals = call.scratch("totals", 2), partial = call.scratch("partial", 2);
  const int64_t rows = x.dim(0), classes = weight.dim(0);
  call.require(settings.form == Form::kClasses && !settings.is_per_row(), kBadAttribute, "takes sums over rows");
  call.require(0 < shrink && shrink <= 1, kBadAttribute, "shrink is %g, expected more than 0 to 1", shrink);
  call.require(classes <= kLargest32, kBadShape, "weight has too many rows");  // packs of logits are counted in 32 bits
  call.require_shape(weight, {classes, x.dim(1)});
  call.require_shape(labels, {rows});
  if (dx.dtype) call.require_same_shape(dx, x);
  if (dweight.dtype) call.require_same_shape(dweight, weight);
  require_shapes(call, {logits, losses, stats, totals, partial}, scratch_of(chunk, rows, classes));
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const Loss<T> of_rows{{},
                          rows,
                          classes,
                          logits.as<T>(),
                          Labels(labels),
                          nullptr,
                          settings.ignored,
                          settings.reduction,
                          C(settings.smoothing),
                          C(settings.z),
                          C(settings.softcap)};
    const Head<T> head{call,
                       of_rows,
                       x.dim(1),
                       x.as<const T>(),
                       weight.as<const T>(),
                       logits.as<T>(),
                       losses.as<C>(),
                       stats.as<RowStats<C>>(),
                       totals.as<C>(),
                       totals.as<C>() + 3,
                       partial.as<C>()};
    head.run(logits.dim(0), sizeof(T) == 2 ? C(shrink) : C(1), dx.as<T>(), dweight.as<T>(), loss.as<C>(),
             factor.as<C>());
  });
}

MSOPS_SCRATCH(LinearCrossEntropyForward) {
  const int64_t chunk = call.attribute("chunk", 0, INT64_MAX);
  const int64_t rows = call.tensor("x", 2).dim(0), classes = call.tensor("weight", 2).dim(0);
  return scratch_of(chunk, rows, classes);
}

// (x, weight, labels, bias?, class_weight?, loss, dx?, dweight?, dbias?, factor?) -> (result): the result is the loss.
// It depends on x, weight and bias for MindSpore, to which the operator's gradient returns multiples of dx, dweight and
// dbias; or it computes these again, for which it takes the weights of classes. The CPU checks the labels.
MSOPS_ENTRY(LinearCrossEntropyResult) {
  const int64_t ignored = call.attribute("ignore_index", INT64_MIN, INT64_MAX);
  const Tensor x = call.tensor("x", 2), weight = call.tensor("weight", 2);
  const Tensor labels = call.tensor_of("index", "labels", 1), bias = call.optional("bias", 1);
  const Tensor class_weight = call.optional_of("accumulator", "class_weight", 1);
  const Tensor loss = call.tensor_of("accumulator", "loss"), dx = call.optional_of("float16|common", "dx", 2);
  const Tensor dweight = call.optional_of("float16|common", "dweight", 2);
  const Tensor dbias = call.optional_of("float16|common", "dbias", 1);
  call.optional_of("accumulator", "factor", 0);
  const Tensor result = call.tensor_of("accumulator", "result");
  call.require_shape(weight, {weight.dim(0), x.dim(1)});
  call.require_shape(labels, {x.dim(0)});
  if (call.has("bias")) call.require_shape(bias, {weight.dim(0)});
  if (call.has("class_weight")) call.require_shape(class_weight, {weight.dim(0)});
  if (call.has("dx")) call.require_same_shape(dx, x);
  if (call.has("dweight")) call.require_same_shape(dweight, weight);
  if (call.has("dbias")) call.require_shape(dbias, {weight.dim(0)});
  call.require_same_shape(result, loss);
  return call.run([&](auto type) {
    using C = Compute<typename decltype(type)::type>;
    if (call.is_on_cpu()) require_classes(call, labels, ignored, weight.dim(0));
    elementwise<C>(call, loss.size, Copy{}, {loss.as<C>()}, {result.as<C>()});
  });
}

// (x, factor) -> (y)
MSOPS_ENTRY(LinearCrossEntropyScale) {
  const Tensor x = call.tensor("x"), factor = call.tensor_of("accumulator", "factor", 0), y = call.tensor("y");
  call.require_same_shape(y, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    elementwise<T>(call, x.size, Scale<Compute<T>>{factor.as<Compute<T>>()}, {x.as<T>()}, {y.as<T>()});
  });
}
