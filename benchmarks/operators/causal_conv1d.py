"""Benchmarks Mamba's short convolution: four taps, a bias and silu. A size is (samples, channels, steps) and, for other
widths, the number of taps."""

import mindspore
from mindspore import nn, ops

import msops
from test_causal_conv1d import TestCausalConv1d

from ..benchmark import Benchmark, Sizes
from ..figures import Target, share, times_faster

LARGE = "8 x 2^11 x 2^13"


def width_of(size):
    return size[3] if len(size) > 3 else 4


class Theirs(nn.Cell):
    """Holds MindSpore's convolution with groups, which pads both ends, and computes silu of it."""

    def __init__(self, channels, width, dtype):
        super().__init__()
        self.padding = width - 1
        self.convolve = nn.Conv1d(
            channels, channels, width, pad_mode="pad", padding=width - 1, group=channels, has_bias=True, dtype=dtype
        )

    def construct(self, x):
        return ops.silu(self.convolve(x)[:, :, : x.shape[2]])


class Shifted(nn.Cell):
    """Adds up products of shifted copies, which takes less time on the CPU than MindSpore's convolution with groups."""

    def __init__(self, channels, width, dtype):
        super().__init__()
        self.width = width
        self.weight = mindspore.Parameter(ops.ones((channels, width), dtype), name="weight")
        self.bias = mindspore.Parameter(ops.zeros((channels, 1), dtype), name="bias")

    def construct(self, x):
        z, steps = self.bias, x.shape[2]
        extended = ops.concat((ops.zeros((x.shape[0], x.shape[1], self.width - 1), x.dtype), x), 2)
        for w in range(self.width):
            z = z + self.weight[:, w : w + 1] * extended[:, :, w : w + steps]
        return ops.silu(z)


class CausalConv1d(Benchmark):
    card = TestCausalConv1d()
    sizes = {
        "GPU": [
            Sizes(
                named=((8, 2048, 8192),),
                sweep=((1, 64, 1024), (256, 2048, 1), (1, 64, 2**20), (8, 2048, 8192, 3), (8, 2048, 2048, 32)),
                ragged={(8, 2048, 8191): (8, 2048, 8192)},
            )
        ],
        "CPU": [
            Sizes(
                named=((8, 256, 1024),),
                sweep=((64, 256, 1), (2, 64, 1024, 32)),
                ragged={(8, 256, 1023): (8, 256, 1024)},
            )
        ],
    }
    targets = {
        "GPU": [
            Target("forward, large", "share 0.9", 0.9, share(LARGE, direction="forward")),
            Target("backward, large", "share 0.8", 0.8, share(LARGE, direction="backward")),
        ],
        "CPU": [Target("whole Cells", "faster than MindSpore", 1, times_faster("MindSpore", "graph", "pynative"))],
    }

    def inputs(self, size):
        samples, channels, steps, *_ = size
        return [(samples, channels, steps), (channels, width_of(size)), (channels,)]

    def settings(self, size):
        return dict(activation="silu", has_state=False)

    def torch_formula(self, case):
        from torch.nn.functional import conv1d, silu

        steps, width = case.size[2], width_of(case.size)

        def convolve(x, weight, bias):
            padded = conv1d(x, weight.unsqueeze(1), bias, padding=width - 1, groups=x.shape[1])
            return silu(padded[:, :, :steps])

        return convolve

    def cell_inputs(self, size):
        return self.inputs(size)[:1]

    def networks(self, size, dtype, device):
        channels, width, kind = size[1], width_of(size), getattr(mindspore, dtype)
        theirs = Shifted(channels, width, kind) if device == "CPU" else Theirs(channels, width, kind)
        return {"msops": msops.CausalConv1d(channels, width, activation="silu", dtype=kind), "MindSpore": theirs}
