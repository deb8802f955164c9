"""Times logsumexp and its gradient beside the same formula of MindSpore's own operators."""

import argparse
import statistics
import time

import mindspore
from mindspore import ops

from logsumexp import logsumexp


def of_mindspore(x):
    most = ops.stop_gradient(ops.amax(x, -1, True))
    return ops.log(ops.exp(x - most).sum(-1)) + most.squeeze(-1)


def microseconds(function, x):
    """Returns the median wall time of a call, from Python to the end of the work, in half a second of calls."""
    function(x)  # the first call compiles
    times = []
    while sum(times) < 0.5:
        start = time.perf_counter()
        function(x)
        mindspore.runtime.synchronize()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times[len(times) // 10 :])  # the first calls warm up


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device-target", choices=("CPU", "GPU"), default="CPU", help="default: CPU")
    mindspore.set_device(parser.parse_args().device_target)
    for shape in ((1000, 100), (1000, 1000), (4, 1000000)):
        x = ops.standard_normal(shape)
        for what, make in (("forward", mindspore.jit), ("gradient", lambda f: mindspore.jit(mindspore.grad(f)))):
            ours, theirs = microseconds(make(logsumexp), x), microseconds(make(of_mindspore), x)
            print(f"{what} of {shape}: logsumexp {ours:.0f} us, MindSpore's own operators {theirs:.0f} us")


if __name__ == "__main__":
    main()
