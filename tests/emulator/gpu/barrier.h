// Barriers of a part of a block's threads in the emulator.
#pragma once

#include "instructions.h"

namespace msops {

inline void bar_sync(int barrier, int threads) { emulator::barrier(barrier, threads); }
inline void bar_arrive(int barrier, int threads) { emulator::barrier(barrier, threads, false); }
template <int kRegisters>
void setmaxnreg_dec() {}
template <int kThreads, int kOfFirst, int kRegisters>
void setmaxnreg_inc() {}

}  // namespace msops
