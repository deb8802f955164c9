// griddepcontrol lets a launch begin before the one before it has ended (programmatic dependent launch), on sm_90 and
// later. The launch needs cudaLaunchAttributeProgrammaticStreamSerialization.
#pragma once

#include "instructions.h"

namespace msops {

// Waits until the launch before this one has ended, and what it wrote is visible. If all its blocks wait, too, this
// also holds for the launches before it.
__device__ __forceinline__ void griddepcontrol_wait() { MSOPS_SM90("griddepcontrol.wait;" : : : "memory"); }

// Lets the next launch use what this one leaves free.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  MSOPS_SM90("griddepcontrol.launch_dependents;" : : : "memory");
}

}  // namespace msops
