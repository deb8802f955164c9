"""Times the kernels through their C entries on the GPU, beside PyTorch's eager operators in the same run.

    python -m benchmarks.kernels --output benchmarks/kernels-h200.csv

Each time is a median over launches between CUDA events, each launch on other buffers than the one before, so that the
L2 cache is cold. The roof is a copy of 4 GiB, measured first. A kernel's floor is the time in which the roof moves each
input and each output once, scratch not counted; its share of the roof is floor / time. Needs torch with CUDA.
"""

import argparse
import csv
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional

import msops
from msops.custom import Operator
from msops.depthwise_conv2d import _attributes, _Convolution
from msops.lltm import _Pointwise
from operator_entry import outputs_of, prepare_operator

COLD = 256 * 2**20  # bytes between two uses of a buffer: several times the L2 cache
COLUMNS = ("case", "dtype", "us", "floor_us", "share_of_roof", "torch_us", "times_faster")


class Case(NamedTuple):
    name: str
    operator: Operator
    shapes: list  # of the inputs
    peer: Callable  # takes the inputs, and returns what to time
    has_scratch: bool = False  # as the last output


def forward_of(function):
    return lambda *inputs: lambda: function(*inputs)


def backward_of(function, douts=1):
    """PyTorch's backward pass alone; the last `douts` inputs are the gradients of the outputs."""

    def peer(*inputs):
        leaves = [x.clone().requires_grad_() for x in inputs[:-douts]]
        outs = function(*leaves)
        return lambda: torch.autograd.grad(outs, leaves, inputs[-douts:], retain_graph=True)

    return peer


def elementwise():
    sigmoid, add = msops.Sigmoid(), msops.Add()
    backward = forward_of(torch.ops.aten.sigmoid_backward)
    for n in (2**28, 2**20):
        yield Case(f"sigmoid {n}", sigmoid.forward_op, [(n,)], forward_of(torch.sigmoid))
        yield Case(f"sigmoid backward {n}", sigmoid.backward_op, [(n,), (n,)], lambda y, dy: backward(dy, y))
        yield Case(f"add {n}", add.forward_op, [(n,), (n,)], forward_of(torch.add))
    rows = (2**18, 1000)
    yield Case(f"add {rows} + (1000)", add.forward_op, [rows, (1000,)], forward_of(torch.add))
    for shape, axes in (((1000,), 0), ((2**18, 1), 1), ((), (0, 1))):
        peer = forward_of(lambda dout, x, axes=axes: dout.sum(axes))
        yield Case(f"add backward {rows} to {shape}", add.backward_op, [rows, shape], peer, True)


def trilinear():
    def formula(feats, points):
        u, v, w = ((points + 1) / 2).unbind(1)
        weights = torch.stack([a * b * c for a in (1 - u, u) for b in (1 - v, v) for c in (1 - w, w)], 1)
        return (feats * weights.unsqueeze(2)).sum(1)

    cell = msops.TrilinearInterpolation()
    for n, f in ((65536, 256), (2**20, 16), (2**22, 2)):
        shapes = [(n, 8, f), (n, 3)]
        yield Case(f"trilinear {n} x {f}", cell.forward_op, shapes, forward_of(formula))
        yield Case(f"trilinear backward {n} x {f}", cell.backward_op, [*shapes, (n, f)], backward_of(formula))


def depthwise():
    for image, k, stride in (
        ((32, 144, 56, 56), 3, 1),
        ((128, 384, 14, 14), 3, 1),
        ((32, 96, 112, 112), 3, 2),
        ((64, 96, 56, 56), 5, 1),
        ((64, 96, 56, 56), 7, 1),
        ((32, 128, 56, 56), 31, 1),
    ):
        channels = image[1]

        def conv(x, weight, bias, stride=stride, k=k, channels=channels):
            return functional.conv2d(x, weight, bias, stride, k // 2, groups=channels)

        def backward(x, weight, dout, conv=conv):
            return backward_of(conv)(x, weight, weight[:, 0, 0, 0], dout)

        cell = _Convolution(_attributes("depthwise", stride, "pad", k // 2, 1, True))
        shapes, out = [image, (channels, 1, k, k)], [*image[:2], *((n - 1) // stride + 1 for n in image[2:])]
        name = f"{'x'.join(map(str, image))} k{k} s{stride}"
        yield Case(f"depthwise {name}", cell.forward_op, [*shapes, (channels,)], forward_of(conv))
        yield Case(f"depthwise backward {name}", cell.backward_op, [*shapes, out], backward, True)


def lltm():
    def formula(product, bias, c):
        i, o, g = (product + bias).chunk(3, 1)
        new_c = c + torch.sigmoid(i) * functional.elu(g)
        return torch.tanh(new_c) * torch.sigmoid(o), new_c

    cell = _Pointwise()
    for batch, hidden in ((16, 128), (64, 1024), (2**16, 1024)):
        state = (batch, hidden)
        shapes = [(batch, 3 * hidden), (3 * hidden,), state]
        yield Case(f"lltm {batch} x {hidden}", cell.forward_op, shapes, forward_of(formula))
        backward = backward_of(formula, douts=2)
        yield Case(f"lltm backward {batch} x {hidden}", cell.backward_op, [*shapes, state, state], backward, True)


def median_us(calls, repeats=50):
    """Median time of a call, taking turns among `calls`, after warming up for long enough that the clocks are up."""
    start = time.perf_counter()
    while time.perf_counter() - start < 0.1:
        for call in calls:
            call()
        torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    for i, (start, end) in enumerate(events):
        start.record()
        calls[i % len(calls)]()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in events)


def roof():
    """Bytes per microsecond of a copy, read and written."""
    source = torch.randint(256, (2**32,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_us([lambda: target.copy_(source)], 20)


def bytes_of(arrays):
    return sum(array.numel() * array.element_size() for array in arrays)


def measure(case, dtype, speed):
    """A row of the table."""
    calls, moved = [], 0
    while not calls or len(calls) < min(20, COLD // moved + 2):
        inputs = [torch.randn(shape, device="cuda", dtype=dtype) for shape in case.shapes]
        outputs = [torch.empty(s, dtype=getattr(torch, d), device="cuda") for s, d in outputs_of(case.operator, inputs)]
        calls.append((prepare_operator(case.operator, [*inputs, *outputs]), inputs))
        moved = bytes_of(inputs) + bytes_of(outputs[:-1] if case.has_scratch else outputs)
        if "AddBackward" in case.operator.func:
            moved -= bytes_of(inputs[1:])  # read for its shape alone
    if calls[0][0]() != 0:
        raise RuntimeError(f"{case.name} failed")
    us, floor = median_us([call for call, _ in calls]), moved / speed
    peer = median_us([case.peer(*inputs) for _, inputs in calls], 20)
    return case.name, str(dtype).removeprefix("torch."), us, floor, floor / us, peer, peer / us


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="CSV file to write")
    parser.add_argument(
        "--only", default="", help="run just the cases whose name has one of these words, comma-separated"
    )
    options = parser.parse_args()

    speed = roof()
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    device, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].split(", ")
    where = f"{device}, driver {driver}, torch {torch.__version__}, copy at {speed / 1e6:.3f} TB/s"
    print(where)
    print("{:48} {:8} {:>9} {:>9} {:>7} {:>9} {:>7}".format(*COLUMNS[:4], "share", "torch_us", "faster"))
    rows = []
    for case in (*elementwise(), *trilinear(), *depthwise(), *lltm()):
        if any(words in case.name for words in options.only.split(",")):
            for dtype in (torch.float32, torch.float16):
                rows.append(measure(case, dtype, speed))
                print("{:48} {:8} {:9.1f} {:9.1f} {:7.3f} {:9.1f} {:7.2f}".format(*rows[-1]), flush=True)
                torch.cuda.empty_cache()
    if options.output:
        with options.output.open("w", newline="") as file:
            file.write(f"# {where}\n")
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows([*row[:2], *(f"{value:.4g}" for value in row[2:])] for row in rows)


if __name__ == "__main__":
    main()
