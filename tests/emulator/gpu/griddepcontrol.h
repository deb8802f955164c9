// Launches follow each other in the emulator, so that none begins early.
#pragma once

#include "instructions.h"

namespace msops {

inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

}  // namespace msops
