// y = x s,  dx = dy s (1 + x (1 - s)), where s = 1 / (1 + e^-x)

#include "common/formula.h"

MSOPS_FORMULA(SiluForward, (x), (y), y = x * msops::Activations<T>::sigmoid(x))
MSOPS_FORMULA(SiluBackward, (x, dy), (dx), const C s = msops::Activations<T>::sigmoid(x);
              dx = dy * s * (1 + x * (1 - s)))
MSOPS_FORMULA(SiluBackwardBackward, (x, dy, ddx), (dx, ddy), const C s = msops::Activations<T>::sigmoid(x);
              dx = ddx * dy * s * (1 - s) * (2 + x * (1 - 2 * s)); ddy = ddx * s * (1 + x * (1 - s)))
