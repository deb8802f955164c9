"""Times whole Cells through MindSpore in graph or PyNative mode, beside equal networks of MindSpore's own operators.

A time is the wall time of many calls, with one synchronization at the end, divided by their number. The networks take
turns. The inputs are on the device, and rotate. The gradient is computed with respect to all inputs and Parameters.
"""

import functools
import gc
import itertools
import math
import time

import mindspore
from mindspore import ops

from .cases import cell_cases
from .messages import Step, say
from .parts import options_of_part
from .timing import Times, buffers

MOST_INPUTS = 8  # sets of inputs
TURNS = 15  # turns of each network
TURN = 0.01  # approximate length of a turn, in s
LONG = 2  # s after which two turns are enough


def random_inputs(device, shapes, dtypes, below):
    """Returns sets of inputs that do not stay in the cache. Operators compute them, so they are on the device. Whole
    numbers are indices, up to what `below` returns."""
    size = sum(math.prod(shape) * (2 if dtype == "float16" else 4) for shape, dtype in zip(shapes, dtypes))

    def random(shape, dtype):
        if dtype.startswith("int"):
            return ops.randint(0, below(), shape).astype(getattr(mindspore, dtype))
        return ops.standard_normal(shape).astype(getattr(mindspore, dtype))

    sets = [
        [random(shape, dtype) for shape, dtype in zip(shapes, dtypes)]
        for _ in range(buffers(device, size, MOST_INPUTS))
    ]
    mindspore.runtime.synchronize()
    return sets


def seconds(call, inputs, count):
    """Returns the wall time of `count` calls."""
    start = time.perf_counter()
    for _ in range(count):
        call(*next(inputs))
    mindspore.runtime.synchronize()
    return time.perf_counter() - start


def compare(calls, sets):
    """Returns the Times of each of the calls, which take turns. A call that fails is left out and reported."""
    inputs, counts = itertools.cycle(sets), {}
    for by, (step, call) in calls.items():
        with Step(step, silent=True):
            seconds(call, inputs, 1)  # compiles
            count = 1
            while seconds(call, inputs, count) < TURN / 2:
                count *= 2
            counts[by] = count
    samples = {by: [] for by in counts}
    start = time.perf_counter()
    while counts and min(map(len, samples.values())) < (TURNS if time.perf_counter() - start < LONG else 2):
        for by, count in counts.items():
            samples[by].append(1e6 * seconds(calls[by][1], inputs, count) / count)
    return {by: Times.of(us, "calls") for by, us in samples.items()}


def measure(case, dtype, mode, device):
    op = case.benchmark.name
    step = f"{mode} {op} {case.name} {dtype}"
    with Step(step):
        nets, shapes = case.benchmark.networks(case.size, dtype, device), case.benchmark.cell_inputs(case.size)
        dtypes = case.benchmark.cell_dtypes(case.size, dtype)
        sets = random_inputs(device, shapes, dtypes, functools.partial(case.benchmark.index_below, case.size))
        positions = tuple(i for i, own in enumerate(dtypes) if not own.startswith("int"))
        functions_of = {"forward": nets}
        if case.benchmark.trains:
            functions_of["forward+backward"] = {
                by: mindspore.value_and_grad(net, positions, net.trainable_params() or None) for by, net in nets.items()
            }
        for direction, functions in functions_of.items():
            calls = {by: (f"{by}: {step} {direction}", call) for by, call in functions.items()}
            for by, measured in compare(calls, sets).items():
                times = measured.scaled(3 / 4 if by.endswith("x 3/4") else 1)
                row = dict(part=mode, op=op, direction=direction, case=case.name, dtype=dtype, by=by, named=1)
                say(row=dict(row, bytes=0, beside="", operations=0, **times._asdict()))


def main():
    options = options_of_part()
    mindspore.set_device(options.device_target)
    if options.device_target == "GPU":
        mindspore.device_context.gpu.op_precision.conv_allow_tf32(False)  # torch is measured without TF32, too
    mindspore.set_context(mode=mindspore.GRAPH_MODE if options.part == "graph" else mindspore.PYNATIVE_MODE)
    for case in cell_cases(options.device_target, options.op, options.quick):
        for dtype in options.dtype:
            measure(case, dtype, options.part, options.device_target)
            gc.collect()


if __name__ == "__main__":
    main()
