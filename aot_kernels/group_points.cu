// out[b, c, m, s] = features[b, c, idx[b, m, s]], and its gradient, a sum for each point.

#include "shared/gather/entries.h"

MSOPS_ENTRY(GroupPointsForward) { return msops::gather::forward_entry(call, 2); }
MSOPS_SCRATCH(GroupPointsForward) { return msops::gather::forward_scratch(call, 2); }

MSOPS_ENTRY(GroupPointsBackward) { return msops::gather::backward_entry(call, 2); }
MSOPS_SCRATCH(GroupPointsBackward) { return msops::gather::backward_scratch(call, 2); }
