// y = x s,  dx = dy s (1 + x (1 - s)),  s = 1 / (1 + e^-x)

#include "common/formula.h"

MSOPS_FORMULA(SwishForward, (x), (y), y = x * msops::Activations<T>::sigmoid(x))
MSOPS_FORMULA(SwishBackward, (x, dy), (dx), const C s = msops::Activations<T>::sigmoid(x);
              dx = dy * s * (1 + x * (1 - s)))
