// The cross-entropy of rows of logits and their labels, and its gradient. cross_entropy/loss.h has the formulas.

#include <algorithm>

#include "common/scratch.h"
#include "cross_entropy/cpu.h"
#include "cross_entropy/settings.h"
#ifdef __CUDACC__
#include "cross_entropy/gpu.h"
#endif

using namespace msops;
using namespace msops::cross_entropy;

namespace {

// What a row has, and the weights of classes.
struct Inputs {
  Tensor logits, labels, weight;
  int64_t rows;

  Inputs(Call& call, const Settings& settings)
      : logits(call.tensor("logits", 2)),
        labels(settings.has_probabilities() ? call.tensor("labels", 2) : call.tensor_of("index", "labels", 1)),
        weight(settings.form == Form::kClasses ? call.optional("weight", 1)
                                               : call.optional_of("accumulator", "weight", 1)),
        rows(logits.dim(0)) {
    const int64_t classes = logits.dim(1);
    if (settings.has_probabilities()) {
      call.require_same_shape(labels, logits);
    } else {
      call.require_shape(labels, {rows});
    }
    call.require(classes <= kLargest32, kBadShape, "logits has too many classes");  // packs are counted in 32 bits
    if (call.has("weight")) call.require_shape(weight, {classes});
  }

  // Calls run(loss, form), where `lse` is what the rows have of it: the result, or the gradient with respect to it.
  template <typename T, typename Run>
  void with_loss(const Settings& settings, const Tensor& lse, const Tensor& masses, const Run& run) const {
    with_loss_of<T, Form::kClasses>(settings, lse, masses, run);
    with_loss_of<T, Form::kGeneral>(settings, lse, masses, run);
    with_loss_of<T, Form::kProbabilities>(settings, lse, masses, run);
  }

 private:
  template <typename T, Form kForm, typename Run>
  void with_loss_of(const Settings& of, [[maybe_unused]] const Tensor& lse, [[maybe_unused]] const Tensor& masses,
                    const Run& run) const {
    if (of.form != kForm) return;
    using C = Compute<T>;
    using L = Loss<T, kForm>;
    L loss{{},
           rows,
           logits.dim(1),
           logits.as<T>(),
           L::kHasClasses ? Labels(labels) : Labels(),
           weight.as<typename L::Weight>(),
           L::kHasClasses ? of.ignored : 0,
           of.reduction,
           C(of.smoothing),
           C(of.z),
           C(of.softcap)};
    if constexpr (kForm != Form::kClasses) loss.lse_of_rows = lse.as<C>();
    if constexpr (!L::kHasClasses) {
      loss.probabilities = labels.as<T>(), loss.masses = masses.as<C>();
      loss.is_apart = are_apart(labels.as<T>(), logits.as<T>());
    }
    run(loss, std::integral_constant<Form, kForm>{});
  }
};

// A block of the GPU adds up the losses of at least 8 rows.
int64_t most_parts(int64_t rows) { return std::max<int64_t>((rows + 7) / 8, 1); }

}  // namespace

// (logits, labels, weight?) -> (loss, lse?, stats, totals, masses?, losses, partial): `stats` has each row's RowStats,
// and `totals` the total weight, the number of rows and the mean of all classes' weights. `masses` comes with
// probabilities. `losses` and `partial` are scratch: the losses of rows, and sums over parts of the rows.
MSOPS_ENTRY(CrossEntropyForward) {
  const Settings settings(call);
  const Inputs inputs(call, settings);
  const int64_t rows = inputs.rows;
  const Tensor result = call.tensor_of("accumulator", "loss", settings.is_per_row());
  const Tensor lse = settings.lse(call, "lse", rows);
  const Tensor stats = call.tensor_of("accumulator", "stats", 2), totals = call.tensor_of("accumulator", "totals", 1);
  const Tensor masses = settings.masses(call, rows);
  const Tensor losses = call.scratch("losses", 1), partial = call.scratch("partial", 2);
  if (settings.is_per_row()) call.require_shape(result, {rows});
  call.require_shape(stats, {rows, 2});
  call.require_shape(totals, {3});
  call.require_shape(losses, {rows});
  call.require_shape(partial, {most_parts(rows), 4});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    inputs.with_loss<T>(settings, lse, masses, [&](const auto& loss, auto form) {
      constexpr Form kForm = form;
      C* const of_rows = settings.is_per_row() ? result.as<C>() : losses.as<C>();
      if (call.is_on_cpu()) {
        if (loss.kHasClasses && settings.checks_labels)
          require_classes(call, inputs.labels, loss.ignored, loss.classes);
        on_cpu(call, rows, LossOfRowOnCpu<T, kForm>{loss, of_rows, stats.as<RowStats<C>>()},
               4 * static_cast<double>(loss.classes));
        on_cpu(call, 1, TotalsOnCpu<T, kForm>{loss, of_rows, stats.as<RowStats<C>>(), result.as<C>(), totals.as<C>()},
               1);
      }
#ifdef __CUDACC__
      if (!call.is_on_cpu()) {
        const int64_t parts = rows > 0 ? launch_loss(call, loss, of_rows, stats.as<RowStats<C>>(), partial.as<C>()) : 0;
        launch_totals(call, loss, of_rows, stats.as<RowStats<C>>(), parts, partial.as<C>(), result.as<C>(),
                      totals.as<C>());
      }
#endif
    });
  });
}

MSOPS_SCRATCH(CrossEntropyForward) {
  const int64_t rows = call.tensor("logits", 2).dim(0);
  return {{rows}, {most_parts(rows), 4}};
}

// (logits, labels, weight?, stats, totals, masses?, dloss, dlse?) -> (dlogits?, dlabels?): the attribute `gives` says
// which of the two there are, where dlabels is the gradient of probabilities.
MSOPS_ENTRY(CrossEntropyBackward) {
  const Settings settings(call);
  const int64_t gives = call.attribute("gives", 1, settings.has_probabilities() ? 3 : 1);
  const Inputs inputs(call, settings);
  const int64_t rows = inputs.rows;
  const Tensor stats = call.tensor_of("accumulator", "stats", 2), totals = call.tensor_of("accumulator", "totals", 1);
  const Tensor masses = settings.masses(call, rows);
  const Tensor dloss = call.tensor_of("accumulator", "dloss", settings.is_per_row());
  const Tensor dlse = settings.lse(call, "dlse", rows);
  const Tensor dlogits = gives & 1 ? call.tensor("dlogits", 2) : Tensor{};
  const Tensor dlabels = gives & 2 ? call.tensor("dlabels", 2) : Tensor{};
  call.require_shape(stats, {rows, 2});
  call.require_shape(totals, {3});
  if (settings.is_per_row()) call.require_shape(dloss, {rows});
  if (gives & 1) call.require_same_shape(dlogits, inputs.logits);
  if (gives & 2) call.require_same_shape(dlabels, inputs.logits);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    inputs.with_loss<T>(settings, dlse, masses, [&](const auto& loss, auto form) {
      constexpr Form kForm = form;
      const bool is_per_row = settings.is_per_row();
      if (call.is_on_cpu()) {
        if (loss.kHasClasses && settings.checks_labels)
          require_classes(call, inputs.labels, loss.ignored, loss.classes);
        const GradientOfRowOnCpu<T, kForm> body{loss,       stats.as<RowStats<C>>(), totals.as<C>(), dloss.as<C>(),
                                                is_per_row, dlogits.as<T>(),         dlabels.as<T>()};
        on_cpu(call, rows, body, 4 * static_cast<double>(loss.classes));
      }
#ifdef __CUDACC__
      if (!call.is_on_cpu() && inputs.logits.size > 0)
        launch_gradient(call, loss, stats.as<RowStats<C>>(), totals.as<C>(), dloss.as<C>(), is_per_row, dlogits.as<T>(),
                        dlabels.as<T>());
#endif
    });
  });
}
