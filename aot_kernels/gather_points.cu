// out[b, c, m] = features[b, c, idx[b, m]], and its gradient, a sum for each point.

#include "shared/gather/entries.h"

MSOPS_ENTRY(GatherPointsForward) { return msops::gather::forward_entry(call, 1); }
MSOPS_SCRATCH(GatherPointsForward) { return msops::gather::forward_scratch(call, 1); }

MSOPS_ENTRY(GatherPointsBackward) { return msops::gather::backward_entry(call, 1); }
MSOPS_SCRATCH(GatherPointsBackward) { return msops::gather::backward_scratch(call, 1); }
