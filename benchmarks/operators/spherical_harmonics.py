"""Benchmarks spherical harmonics of four degrees. A size is a number of directions."""

from mindspore import ops

import msops
from test_spherical_harmonics import TestSphericalHarmonics

from ..benchmark import Benchmark, OfFunction, Sizes
from ..figures import Target, times_faster
from ..neural_fields import NeuralField

DEGREE = 4


class SphericalHarmonics(NeuralField, Benchmark):
    card = TestSphericalHarmonics()
    sizes = {
        "GPU": [Sizes(named=(2**18, 2**21), sweep=(2**14,), ragged={2**18 + 1: 2**18})],
        "CPU": [Sizes(named=(2**16,), sweep=(2**13,), ragged={2**16 + 1: 2**16})],
    }
    targets = {
        "CPU": [Target("whole Cells", "faster than MindSpore", 1, times_faster("MindSpore", "graph", "pynative"))]
    }
    folders = {"torch-ngp": "shencoder/src"}

    def inputs(self, size):
        return [(size, 3)]

    def settings(self, size):
        return {"degree": DEGREE}

    def torch_formula(self, case):
        import torch

        return lambda directions: torch.stack(terms(*directions.unbind(1)), 1)

    def torch_ngp_forward(self, case, extension, directions):
        out = directions.new_empty(len(directions), DEGREE**2)

        def call():
            extension.sh_encode_forward(directions, out, len(directions), 3, DEGREE, None)

        return call, lambda _: (out,)

    def torch_ngp_backward(self, case, extension, directions, dout):
        """Reads the derivatives, which their forward pass writes where a gradient is wanted, outside of this time."""
        sizes = len(directions), 3, DEGREE
        slopes, ddirections = dout.new_empty(len(dout), 3 * DEGREE**2), directions.new_empty(directions.shape)
        extension.sh_encode_forward(directions, dout.new_empty(dout.shape), *sizes, slopes)

        def call():
            ddirections.zero_()
            extension.sh_encode_backward(dout, directions, *sizes, slopes, ddirections)

        return call, lambda _: (ddirections,)

    def networks(self, size, dtype, device):
        def theirs(directions):
            return ops.stack(terms(directions[:, 0], directions[:, 1], directions[:, 2]), 1)

        return {"msops": msops.SphericalHarmonics(DEGREE), "MindSpore": OfFunction(theirs)}


def terms(x, y, z):
    """Returns the 16 polynomials of four degrees."""
    xx, yy, zz = x * x, y * y, z * z
    return (
        x * 0 + 0.28209479,
        -0.48860251 * y,
        0.48860251 * z,
        -0.48860251 * x,
        1.09254843 * x * y,
        -1.09254843 * y * z,
        0.94617470 * zz - 0.31539157,
        -1.09254843 * x * z,
        0.54627422 * (xx - yy),
        0.59004359 * y * (yy - 3 * xx),
        2.89061144 * x * y * z,
        0.45704580 * y * (1 - 5 * zz),
        0.37317633 * z * (5 * zz - 3),
        0.45704580 * x * (1 - 5 * zz),
        1.44530572 * z * (xx - yy),
        0.59004359 * x * (3 * yy - xx),
    )
