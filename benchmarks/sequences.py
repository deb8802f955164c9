"""Times operators over whole sequences through their C entries, and their peers, as one part of the benchmark.

There is one set of buffers: weights stay in the cache, as they do in training, and the activations of most cases do not
fit there. All samples have all steps.

An operator takes part if its benchmark has `sequence_sizes` of (steps, ...), and these methods:

- sequence_calls(size, precision, arrays, stream) -> (inputs, gradients of the results, a call for each direction)
- sequence_operations(size, direction) -> the operations of its products
- numpy_sequences(inputs, gradients) -> a call for each direction
- torch_sequences(inputs, gradients, named) -> (name, factor of the times, a call for each direction) of each peer

Its `sequence_sweeps` {label: (axis of a size, which sizes)} become the panels of sequences.png.
"""

from .cases import precisions, sequence_cases
from .kernels import session
from .messages import Step, say
from .parts import options_of_part

WARM_UP = 0.04  # s; less than for kernels, since there are many measurements, some of long calls


def measure(case, precision, timer, arrays):
    """Times our operator and each peer."""
    benchmark = case.benchmark
    step = f"{benchmark.name} {case.name} {precision}"
    row = dict(part="sequence", op=benchmark.name, case=case.name, dtype=precision, bytes=0, beside="")
    row.update(named=int(case.named))

    def tell(by, direction, times):
        operations = benchmark.sequence_operations(case.size, direction)
        times = dict(times._asdict(), us_step=times.us / case.size[0])
        say(row=dict(row, by=by, direction=direction, operations=operations, **times))

    with Step(step), arrays.tf32(precision == "tf32"):
        inputs, douts, calls = benchmark.sequence_calls(case.size, precision, arrays, timer.handle)
        for direction, call in calls.items():
            tell("msops", direction, timer([call]))
        for name, factor, peer_calls in arrays.sequence_peers(case, inputs, douts):
            for direction, call in peer_calls.items():
                with Step(f"{name}: {step} {direction}", silent=True):
                    times = timer([call])
                    if name.endswith("CUDA graph") and times.how != "graph":
                        raise RuntimeError("could not be captured")
                    tell(name, direction, times.scaled(factor))


def main():
    options = options_of_part()
    with session(options.device_target, WARM_UP) as (timer, arrays):
        for case in sequence_cases(options.device_target, options.op, options.quick):
            for precision in precisions(options.device_target, options.dtype):
                measure(case, precision, timer, arrays)
                arrays.free()


if __name__ == "__main__":
    main()
