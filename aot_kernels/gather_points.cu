// out[b, c, m] = features[b, c, idx[b, m]], and its gradient, a sum for each point.

#include "gather/entries.h"

MSOPS_ENTRY(GatherPointsForward) { return msops::gather_forward(call, 1); }
MSOPS_ENTRY(GatherPointsBackward) { return msops::gather_backward(call, 1); }
