// The cross-entropy of rows of logits and their labels, and its gradient. cross_entropy/loss.h has the formulas.

#include <algorithm>
#include <cmath>

#include "common/scratch.h"
#include "cross_entropy/cpu.h"
#ifdef __CUDACC__
#include "cross_entropy/gpu.h"
#endif

using namespace msops;
using namespace msops::cross_entropy;

namespace {

// Attributes are read before the tensors' type is known.
struct Settings {
  int64_t ignored;
  Reduction reduction;
  double smoothing, z, softcap;
  bool checks_labels;  // on the CPU; otherwise a label out of range gives NaN
  bool is_general;     // lse is a result, and the weights have its dtype

  explicit Settings(Call& call)
      : ignored(call.attribute("ignore_index", INT64_MIN, INT64_MAX)),
        reduction(static_cast<Reduction>(call.attribute("reduction", 0, 2))),
        smoothing(call.number("label_smoothing")),
        z(call.number("z_loss")),
        softcap(call.number("softcap")),
        checks_labels(call.attribute("checks_labels", 0, 1) != 0),
        is_general(call.attribute("is_general", 0, 1) != 0) {
    call.require(0 <= smoothing && smoothing <= 1, kBadAttribute, "label_smoothing is %g, expected 0 to 1", smoothing);
    call.require(0 <= z && std::isfinite(z), kBadAttribute, "z_loss is %g, expected at least 0", z);
    call.require(0 <= softcap && std::isfinite(softcap), kBadAttribute, "softcap is %g, expected at least 0", softcap);
  }

  Tensor weight(Call& call) const {
    return is_general ? call.optional_of("accumulator", "weight", 1) : call.optional("weight", 1);
  }
  Tensor lse(Call& call, const char* name) const {
    return is_general ? call.tensor_of("accumulator", name, 1) : Tensor{};
  }

  // Calls run(loss), without and with what only general losses have.
  template <typename T, typename Run>
  void with_loss(const Tensor& logits, const Tensor& labels, const Tensor& weight, const Tensor& lse,
                 const Tensor& dlse, const Run& run) const {
    using C = Compute<T>;
    if (is_general) {
      run(Loss<T, true>{{lse.as<C>(), dlse.as<C>()},
                        logits.dim(0),
                        logits.dim(1),
                        logits.as<T>(),
                        Labels(labels),
                        weight.as<C>(),
                        ignored,
                        reduction,
                        C(smoothing),
                        C(z),
                        C(softcap)});
    } else {
      run(Loss<T>{{},
                  logits.dim(0),
                  logits.dim(1),
                  logits.as<T>(),
                  Labels(labels),
                  weight.as<T>(),
                  ignored,
                  reduction,
                  C(smoothing),
                  C(z),
                  C(softcap)});
    }
  }

  bool is_per_row() const { return reduction == Reduction::kNone; }
};

template <typename L>
constexpr bool kIsGeneral = false;
template <typename T>
constexpr bool kIsGeneral<const Loss<T, true>&> = true;

// A block of the GPU adds up the losses of at least 8 rows.
int64_t most_parts(int64_t rows) { return std::max<int64_t>((rows + 7) / 8, 1); }

// Packs of a row are counted in 32 bits.
void require_countable(Call& call, const Tensor& logits) {
  call.require(logits.dim(1) <= kLargest32, kBadShape, "logits has too many classes");
}

}  // namespace

// (logits, labels, weight?) -> (loss, lse?, stats, totals, losses, partial): `stats` has each row's RowStats, and
// `totals` the total weight, the number of rows and the mean of all classes' weights. `losses` and `partial` are
// scratch: the losses of rows, and sums over parts of the rows.
MSOPS_ENTRY(CrossEntropyForward) {
  const Settings settings(call);
  const Tensor logits = call.tensor("logits", 2), labels = call.tensor_of("index", "labels", 1);
  const Tensor weight = settings.weight(call);
  const Tensor result = call.tensor_of("accumulator", "loss", settings.is_per_row()), lse = settings.lse(call, "lse");
  const Tensor stats = call.tensor_of("accumulator", "stats", 2), totals = call.tensor_of("accumulator", "totals", 1);
  const Tensor losses = call.scratch("losses", 1), partial = call.scratch("partial", 2);
  const int64_t rows = logits.dim(0);
  call.require_shape(labels, {rows});
  require_countable(call, logits);
  if (call.has("weight")) call.require_shape(weight, {logits.dim(1)});
  if (settings.is_per_row()) call.require_shape(result, {rows});
  if (settings.is_general) call.require_shape(lse, {rows});
  call.require_shape(stats, {rows, 2});
  call.require_shape(totals, {3});
  call.require_shape(losses, {rows});
  call.require_shape(partial, {most_parts(rows), 4});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    settings.with_loss<T>(logits, labels, weight, lse, {}, [&](const auto& loss) {
      constexpr bool kGeneral = kIsGeneral<decltype(loss)>;
      C* const of_rows = settings.is_per_row() ? result.as<C>() : losses.as<C>();
      if (call.is_on_cpu()) {
        if (settings.checks_labels) require_classes(call, labels, loss.ignored, loss.classes);
        on_cpu(call, rows, LossOfRowOnCpu<T, kGeneral>{loss, of_rows, stats.as<RowStats<C>>()},
               4 * static_cast<double>(loss.classes));
        on_cpu(call, 1,
               TotalsOnCpu<T, kGeneral>{loss, of_rows, stats.as<RowStats<C>>(), result.as<C>(), totals.as<C>()}, 1);
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

// (logits, labels, weight?, stats, totals, dloss, dlse?) -> (dlogits)
MSOPS_ENTRY(CrossEntropyBackward) {
  const Settings settings(call);
  const Tensor logits = call.tensor("logits", 2), labels = call.tensor_of("index", "labels", 1);
  const Tensor weight = settings.weight(call);
  const Tensor stats = call.tensor_of("accumulator", "stats", 2), totals = call.tensor_of("accumulator", "totals", 1);
  const Tensor dloss = call.tensor_of("accumulator", "dloss", settings.is_per_row());
  const Tensor dlse = settings.lse(call, "dlse"), dlogits = call.tensor("dlogits", 2);
  const int64_t rows = logits.dim(0);
  call.require_shape(labels, {rows});
  require_countable(call, logits);
  if (call.has("weight")) call.require_shape(weight, {logits.dim(1)});
  call.require_shape(stats, {rows, 2});
  call.require_shape(totals, {3});
  if (settings.is_per_row()) call.require_shape(dloss, {rows});
  if (settings.is_general) call.require_shape(dlse, {rows});
  call.require_same_shape(dlogits, logits);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    settings.with_loss<T>(logits, labels, weight, {}, dlse, [&](const auto& loss) {
      constexpr bool kGeneral = kIsGeneral<decltype(loss)>;
      const bool is_per_row = settings.is_per_row();
      if (call.is_on_cpu()) {
        if (settings.checks_labels) require_classes(call, labels, loss.ignored, loss.classes);
        const GradientOfRowOnCpu<T, kGeneral> body{loss,       stats.as<RowStats<C>>(), totals.as<C>(), dloss.as<C>(),
                                                   is_per_row, dlogits.as<T>()};
        on_cpu(call, rows, body, 4 * static_cast<double>(loss.classes));
      }
#ifdef __CUDACC__
      if (!call.is_on_cpu() && logits.size > 0)
        launch_gradient(call, loss, stats.as<RowStats<C>>(), totals.as<C>(), dloss.as<C>(), is_per_row,
                        dlogits.as<T>());
#endif
    });
  });
}
