// y = 1 / (1 + e^-x),  dx = dy * y * (1 - y)

#include "common/formula.h"

MSOPS_FORMULA(SigmoidForward, (x), (y), y = msops::Activations<T>::sigmoid(x))
MSOPS_FORMULA(SigmoidBackward, (y, dy), (dx), dx = dy * y * (1 - y))
MSOPS_FORMULA(SigmoidBackwardBackward, (y, dy, ddx), (gradient_y, gradient_dy), gradient_y = ddx * dy * (1 - 2 * y);
              gradient_dy = ddx * y * (1 - y))
