// The attributes of cross_entropy's entries.
#pragma once

#include <cmath>

#include "loss.h"

namespace msops::cross_entropy {

// Attributes are read before the tensors' type is known.
struct Settings {
  int64_t ignored;
  Reduction reduction;
  double smoothing, z, softcap;
  bool checks_labels;  // on the CPU; otherwise a label out of range gives NaN
  Form form;

  explicit Settings(Call& call)
      : ignored(call.attribute("ignore_index", INT64_MIN, INT64_MAX)),
        reduction(static_cast<Reduction>(call.attribute("reduction", 0, 2))),
        smoothing(call.number("label_smoothing")),
        z(call.number("z_loss")),
        softcap(call.number("softcap")),
        checks_labels(call.attribute("checks_labels", 0, 1) != 0),
        form(static_cast<Form>(call.attribute("form", 0, 2))) {
    call.require(0 <= smoothing && smoothing <= 1, kBadAttribute, "label_smoothing is %g, expected 0 to 1", smoothing);
    call.require(0 <= z && std::isfinite(z), kBadAttribute, "z_loss is %g, expected at least 0", z);
    call.require(0 <= softcap && std::isfinite(softcap), kBadAttribute, "softcap is %g, expected at least 0", softcap);
  }

  bool has_probabilities() const { return form == Form::kProbabilities; }
  bool is_per_row() const { return reduction == Reduction::kNone; }

  // Takes a tensor of the rows that only some forms have.
  Tensor lse(Call& call, const char* name, int64_t rows) const {
    return form == Form::kClasses ? Tensor{} : of_rows(call, name, rows);
  }
  Tensor masses(Call& call, int64_t rows) const {
    return has_probabilities() ? of_rows(call, "masses", rows) : Tensor{};
  }

 private:
  static Tensor of_rows(Call& call, const char* name, int64_t rows) {
    const Tensor result = call.tensor_of("accumulator", name, 1);
    call.require_shape(result, {rows});
    return result;
  }
};

}  // namespace msops::cross_entropy
