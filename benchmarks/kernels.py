"""Times kernels through their C entries, and their peers, as one part of the benchmark. timing.py describes how."""

import contextlib
import gc

import mindspore
import numpy as np

from card import input_dtypes, names_of
from msops.core.spec import dtype_name
from msops.testing.entry import outputs_of, prepare_operator

from . import naive, numpy_peers
from .cases import kernel_cases
from .messages import Step, say
from .parts import options_of_part
from .timing import WARM_UP, CpuTimer, GpuTimer, buffers

try:
    import torch

    from . import torch_peers
except ImportError:
    torch = None


class GpuArrays:
    def random(self, shape, dtype):
        return torch.randn(shape, device="cuda", dtype=getattr(torch, dtype))

    def whole(self, shape, dtype, below):
        return torch.randint(below, shape, device="cuda", dtype=getattr(torch, dtype))

    def copy(self, array, dtype):
        return torch.as_tensor(array, device="cuda", dtype=getattr(torch, dtype))

    def uniform(self, shape, dtype, bound):
        return self.empty(shape, dtype).uniform_(-bound, bound)

    def empty(self, shape, dtype):
        return torch.empty(shape, device="cuda", dtype=getattr(torch, dtype))

    def multiply(self, a, b, out=None):
        return torch.mm(a, b, out=out)

    def tf32(self, allowed):
        return torch_peers.tf32(allowed)

    def peers(self, case, sets, results, stream):
        """Yields (name, a function that returns calls, or None) of each peer."""
        if naive.available(case.op):
            calls = [naive.prepare_case(case, inputs, outs, stream) for inputs, outs in zip(sets, results)]
            yield "naive CUDA", lambda: None if None in calls else calls
        yield from torch_peers.peers(case, sets)

    def sequence_peers(self, case, inputs, douts):
        """Yields (name, factor of its times, a call for each direction) of each peer."""
        yield from case.benchmark.torch_sequences(inputs, douts, case.named)

    def free(self):
        gc.collect()
        torch.cuda.empty_cache()


class CpuArrays:
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def random(self, shape, dtype):
        return np.asarray(self.rng.standard_normal(shape, "float32"), dtype)

    def whole(self, shape, dtype, below):
        return np.asarray(self.rng.integers(below, size=shape, dtype=dtype))

    def copy(self, array, dtype):
        return np.array(array, dtype)

    def uniform(self, shape, dtype, bound):
        return np.asarray(self.rng.uniform(-bound, bound, shape), dtype)

    def empty(self, shape, dtype):
        return np.full(shape, 0, dtype)  # touches all pages, so that no kernel is timed while it gets them

    def multiply(self, a, b, out=None):
        return numpy_peers.multiply(a, b, out)

    def tf32(self, allowed):
        return contextlib.nullcontext()

    def peers(self, case, sets, results, stream):
        yield "NumPy", lambda: numpy_peers.prepare(case, sets)
        if torch is not None:
            tensors = [[torch.from_numpy(x) for x in inputs] for inputs in sets]
            for name, make in torch_peers.peers(case, tensors):
                if name != "torch.compile":
                    yield name, make

    def sequence_peers(self, case, inputs, douts):
        yield "NumPy", 1, case.benchmark.numpy_sequences(inputs, douts)
        if torch is not None:
            tensors = ([torch.from_numpy(x) for x in arrays] for arrays in (inputs, douts))
            yield from case.benchmark.torch_sequences(*tensors, case.named)

    def free(self):
        pass


def random_inputs(case, dtype, arrays):
    """Returns random arrays for the entry's inputs, each of its own dtype. Whole numbers are indices, or codes."""
    inputs = []
    dtypes = input_dtypes(case.operator, getattr(mindspore, dtype))
    for name, shape, own in zip(names_of(case.operator).inputs, case.inputs, dtypes):
        contents = case.benchmark.contents(name, case.size)
        if contents is not None:
            inputs.append(arrays.copy(contents, dtype_name(own)))
        elif own == mindspore.bool_:
            inputs.append(arrays.whole(shape, "bool", 2))
        elif own == mindspore.int8:
            inputs.append(arrays.whole(shape, "int8", 127))
        elif own in (mindspore.int32, mindspore.int64):
            inputs.append(arrays.whole(shape, dtype_name(own), case.benchmark.index_below(case.size)))
        else:
            inputs.append(arrays.random(shape, dtype_name(own)))
    return inputs


def random_sets(case, dtype, timer, arrays):
    """Returns sets of random inputs that do not stay in the cache, and of outputs, for the case's entry."""
    size = case.benchmark.bytes(case, dtype)
    sets = [random_inputs(case, dtype, arrays) for _ in range(buffers(timer.name, size))]
    kinds = outputs_of(case.operator, sets[0])
    if timer.name == "CPU":  # all calls share their outputs, since libraries that return new memory get what they freed
        return sets, [[arrays.empty(*kind) for kind in kinds]] * len(sets)
    return sets, [[arrays.empty(*kind) for kind in kinds] for _ in sets]


def prepare(case, sets, outputs, timer):
    """Returns the calls of the case's entry over these sets."""
    calls = [prepare_operator(case.operator, [*i, *o], timer.handle) for i, o in zip(sets, outputs)]
    status = calls[0]()
    if status != 0:
        raise RuntimeError(f"the entry returned {status}")
    return calls


def measure(case, dtype, timer, arrays):
    """Times our kernel and each peer."""
    size = case.benchmark.bytes(case, dtype)
    row = dict(part="kernel", op=case.op, direction=case.direction, case=case.name, dtype=dtype, bytes=size)
    row.update(named=int(case.named), beside=case.beside, operations=case.operations)

    sets, outputs = random_sets(case, dtype, timer, arrays)
    step = f"{case.op} {case.direction} {case.name} {dtype}"
    with Step(step):
        calls = prepare(case, sets, outputs, timer)
        say(row=dict(row, by="msops", **timer(calls)._asdict()))
        del calls

    results = [outs[: len(case.results)] for outs in outputs]
    for name, make in arrays.peers(case, sets, results, timer.handle):
        with Step(f"{name}: {step}", silent=True):
            calls = make()
            if calls is not None:
                say(row=dict(row, by=name, **timer(calls)._asdict()))
            del calls


def measure_device(timer):
    """Times a copy, an empty kernel and multiply-adds. All other rows are compared with these."""
    row = dict(part="device", direction="", dtype="", named=0, beside="", operations=0)
    with Step("copy of a large array", silent=True):
        size, times = timer.roof()
        say(row=dict(row, op="copy", case="large", by="the device", bytes=size, **times._asdict()))
    if timer.name == "GPU" and naive.available():
        with Step("empty kernel", silent=True):
            times = timer([naive.prepare("nothing", [], (), timer.handle)] * 2)
            say(row=dict(row, op="nothing", case="empty kernel", by="the device", bytes=0, **times._asdict()))
        with Step("multiply-adds", silent=True):
            multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
            launch, operations = naive.multiply_adds(torch.zeros(1, device="cuda"), multiprocessors, timer.handle)
            row = dict(row, op="multiply-add", case="float32", by="the device", bytes=0, operations=operations)
            say(row=dict(row, **timer([launch])._asdict()))


@contextlib.contextmanager
def session(device_target, warm_up=WARM_UP):
    """Yields the timer and arrays of a device, on the timer's stream."""
    if device_target == "GPU":
        if torch is None or not torch.cuda.is_available():
            raise SystemExit("timing kernels on the GPU needs torch with CUDA, for its memory and events")
        timer, arrays = GpuTimer(warm_up), GpuArrays()
    else:
        timer, arrays = CpuTimer(), CpuArrays()
    # The garbage collector must not run during a capture.
    gc.collect()
    gc.freeze()
    gc.disable()
    with timer.current():
        yield timer, arrays


def main():
    options = options_of_part()
    with session(options.device_target) as (timer, arrays):
        measure_device(timer)
        for case in kernel_cases(options.device_target, options.op, options.quick):
            for dtype in options.dtype:
                with Step(f"{case.op} {case.direction} {case.name} {dtype}", silent=True):
                    measure(case, dtype, timer, arrays)
                arrays.free()


if __name__ == "__main__":
    main()
