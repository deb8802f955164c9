"""Benchmarks convolution with separate kernels for each channel. A size is (N, C, H, W, taps of a row, stride)."""

import math

import mindspore
from mindspore import nn

import msops
from test_depthwise_conv2d import TestDepthwiseConv2d

from ..benchmark import Benchmark, Sizes
from ..figures import Target, both_directions, both_times_faster, ends, share

TORCH = ("torch", "torch channels-last")


class DepthwiseConv2d(Benchmark):
    sizes = {
        "GPU": [
            Sizes(
                named=(
                    (32, 144, 56, 56, 3, 1),
                    (128, 384, 14, 14, 3, 1),
                    (32, 96, 112, 112, 3, 2),
                    (64, 96, 56, 56, 5, 1),
                    (64, 96, 56, 56, 7, 1),
                    (32, 128, 56, 56, 31, 1),
                ),
                sweep=((1, 32, 7, 7, 3, 1), (1, 96, 28, 28, 3, 1), (8, 96, 56, 56, 3, 1), (128, 144, 112, 112, 3, 1)),
                ragged={
                    (32, 144, 57, 57, 3, 1): (32, 144, 56, 56, 3, 1),
                    (32, 96, 113, 113, 3, 2): (32, 96, 112, 112, 3, 2),
                    (64, 96, 57, 57, 7, 1): (64, 96, 56, 56, 7, 1),
                },
            )
        ],
        "CPU": [
            Sizes(
                named=(
                    (2, 144, 56, 56, 3, 1),
                    (8, 384, 14, 14, 3, 1),
                    (2, 96, 112, 112, 3, 2),
                    (2, 96, 56, 56, 5, 1),
                    (2, 96, 56, 56, 7, 1),
                    (1, 32, 56, 56, 31, 1),
                ),
                sweep=((1, 32, 7, 7, 3, 1), (1, 96, 28, 28, 3, 1)),
                ragged={(2, 144, 57, 57, 3, 1): (2, 144, 56, 56, 3, 1)},
            )
        ],
    }
    card = TestDepthwiseConv2d()
    channels_last = True
    line = "3 x 3, stride 1"
    headline = (("64x96x56x56 k7 s1", "float16"),)
    targets = {
        "GPU": [
            *(
                Target(f"3x3, {direction}, {dtype}", f"share {least:.2f}", least,
                       share(ends("k3 s1", "k3 s2"), named=True, direction=direction, dtype=dtype))
                for direction, dtype, least in (
                    ("forward", "float32", 0.85),
                    ("forward", "float16", 0.75),
                    ("backward", "float32", 0.70),
                    ("backward", "float16", 0.60),
                )
            ),
            Target("5x5 and 7x7, both directions", "5 times faster than torch and MindSpore", 5,
                   both_times_faster(ends("k5 s1", "k7 s1"), *TORCH, mindspore=True)),
            Target("5x5 and 7x7, both directions", "share 0.5", 0.5, both_directions(ends("k5 s1", "k7 s1"))),
            Target("31x31, both directions", "4 times faster than torch", 4,
                   both_times_faster(ends("k31 s1"), *TORCH)),
        ]
    }  # fmt: skip

    def describe(self, size):
        *image, kernel, stride = size
        return f"{'x'.join(map(str, image))} k{kernel} s{stride}"

    def inputs(self, size):
        *image, kernel, _ = size
        channels = image[1]
        return [tuple(image), (channels, 1, kernel, kernel), (channels,)]

    def settings(self, size):
        *_, kernel, stride = size
        return dict(stride=stride, pad_mode="pad", padding=kernel // 2)

    def cases(self, size):
        forward, backward = super().cases(size)
        channels, kernel = size[1], size[4]
        naive, outputs = (*size, kernel // 2), math.prod(forward.results[0])
        operations = 2 * kernel**2 * outputs
        yield forward._replace(naive=naive, operations=operations)
        yield backward._replace(naive=naive, operations=2 * operations, serial=outputs // channels)

    def torch_formula(self, case):
        from torch.nn.functional import conv2d

        *_, channels, _, _, kernel, stride = case.size
        return lambda x, weight, bias: conv2d(x, weight, bias, stride, kernel // 2, groups=channels)

    def on_line(self, case):
        return case.endswith("k3 s1")

    def cell_inputs(self, size):
        return self.inputs(size)[:1]

    def networks(self, size, dtype, device):
        *_, channels, _, _, kernel, stride = size
        dtype = getattr(mindspore, dtype)
        settings = dict(stride=stride, pad_mode="pad", padding=kernel // 2, has_bias=True, dtype=dtype)
        ours = msops.DepthwiseConv2d(channels, kernel, **settings)
        return {"msops": ours, "MindSpore": nn.Conv2d(channels, channels, kernel, group=channels, **settings)}
