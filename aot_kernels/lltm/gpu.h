// The time loop on the GPU.
#pragma once

#include "../common/call.h"
#include "sequence.h"

namespace msops {

template <typename T>
void forward_on_gpu(Call& call, const SequenceForward<T>&, Compute<T>*, bool) {
  call.require(false, kNoGpuCode, "has no GPU code yet");
}

template <typename T>
void backward_on_gpu(Call& call, const SequenceBackward<T>&, Compute<T>*, bool) {
  call.require(false, kNoGpuCode, "has no GPU code yet");
}

}  // namespace msops
