// y = x s(x),  dx = dy s(x) (1 + x s(-x)),  s(x) = 1 / (1 + e^-x)

#include "common/formula.h"

MSOPS_FORMULA(SwishForward, (x), (y), y = x * msops::Activations<T>::sigmoid(x))
MSOPS_FORMULA(SwishBackward, (x, dy), (dx), using S = msops::Activations<T>;
              dx = dy * S::sigmoid(x) * (1 + x * S::sigmoid(-x)))
