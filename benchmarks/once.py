"""Calls kernels once each between a profiler's start and stop, on cold and random arrays.

ncu --profile-from-start off --clock-control none --csv --page raw --metrics ... \
    python -m benchmarks.once "OPERATOR backward, CASE, float16" ...

names cases as times.csv does. The script needs PyTorch with CUDA.
"""

import sys

import torch

from msops.testing.entry import outputs_of, prepare_operator

from .cases import kernel_cases
from .kernels import GpuArrays, random_inputs


def call_once(kernel, name, dtype):
    op, direction = kernel.split()
    cases = [case for case in kernel_cases("GPU", (op,)) if (case.direction, case.name) == (direction, name)]
    if not cases:
        sys.exit(f"there is no case {kernel}, {name}")
    arrays, operator = GpuArrays(), cases[0].operator
    inputs = random_inputs(cases[0], dtype, arrays)
    run = prepare_operator(operator, [*inputs, *(arrays.empty(*output) for output in outputs_of(operator, inputs))])
    run()  # loads the kernel
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(argument, flush=True)
        call_once(*argument.split(", "))
