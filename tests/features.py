"""What MindSpore makes of an operator. `python features.py FEATURE MODE` fails if that does not work.

Each is tried in a process of its own, since some versions of MindSpore crash.
"""

import math
import sys
import tempfile

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import msops
from msops.compat import set_device
from msops.testing.checks import Gradient, Net, run, run_gradient

X = np.array([[-1, 0, 0.5], [1, 2, 3]], np.float32)
Y = 1 / (1 + np.exp(-X))
SLOPE = Y * (1 - Y)
CUBE = """
#include "common/formula.h"

MSOPS_FORMULA(Cube, (x), (y), y = x * x * x)
MSOPS_FORMULA(CubeBackward, (x, dy), (dx), dx = 3 * x * x * dy)
MSOPS_FORMULA(CubeBackwardBackward, (x, dy, ddx), (dx, ddy), dx = 6 * x * dy * ddx; ddy = 3 * x * x * ddx)
"""


def near(got, want):
    np.testing.assert_allclose(got.asnumpy() if isinstance(got, Tensor) else got, want, rtol=1e-5, atol=1e-6)


class Scaled(nn.Cell):
    """sigmoid(factor x)"""

    def __init__(self):
        super().__init__()
        self.factor = Parameter(Tensor(2.0, mindspore.float32), name="factor")

    def construct(self, x):
        return msops.sigmoid(self.factor * x)


def forward():
    near(run(msops.Sigmoid(), X)[0], Y)


def gradient():
    """Of an input, and of a Parameter."""
    near(run_gradient(msops.Sigmoid(), [X], [X])[0], SLOPE * X)
    net = Scaled()
    (dfactor,) = ops.GradOperation(get_by_list=True)(net, net.trainable_params())(Tensor(X / 2))
    near(dfactor, (SLOPE * X / 2).sum())


def second_order():
    library = msops.load("features_cube", CUBE)
    second = msops.custom_op(library.CubeBackwardBackward, "x, dy, ddx -> dx, ddy")
    first = msops.custom_op(library.CubeBackward, "x, dy -> dx", gradient=second)
    net = Net(msops.custom_op(library.Cube, "x -> y", gradient=first))

    class Slope(nn.Cell):
        def __init__(self):
            super().__init__()
            self.net = net

        def construct(self, x):
            return ops.grad(self.net)(x)

    near(ops.grad(Slope())(Tensor(X)), 6 * X)


def several_shapes():
    """One Cell, and the gradient of one, called with tensors of many shapes and ranks."""
    net = msops.Sigmoid()
    gradient = Gradient(net, 1)
    for shape in ((5, 7), (6, 7), (5, 8), (1,), (), (2, 3, 4), (5, 7), (9, 7)):
        x = np.linspace(-1, 1, math.prod(shape), dtype=np.float32).reshape(shape)
        y = 1 / (1 + np.exp(-x))
        near(run(net, x)[0], y)
        near(run(gradient, x, x)[0], x * y * (1 - y))


def dynamic_shape():
    """One compiled Cell for several shapes."""
    net = msops.Sigmoid()
    net.set_inputs(Tensor(shape=[None, 3], dtype=mindspore.float32))
    for rows in (1, 2):
        near(net(Tensor(X[:rows])), Y[:rows])


def mindir():
    """Exported, loaded, run."""
    with tempfile.TemporaryDirectory() as folder:
        mindspore.export(msops.Sigmoid(), Tensor(X), file_name=f"{folder}/sigmoid", file_format="MINDIR")
        near(nn.GraphCell(mindspore.load(f"{folder}/sigmoid.mindir"))(Tensor(X)), Y)


def recompute():
    """What the forward computes is computed again for the gradient."""
    net = nn.SequentialCell(msops.Sigmoid(), msops.Sigmoid())
    for cell in net:
        cell.recompute()
    z = 1 / (1 + np.exp(-Y))
    near(run_gradient(net, [X], [X])[0], X * z * (1 - z) * SLOPE)


def vmap():
    near(ops.vmap(Net(msops.sigmoid))(Tensor(X)), Y)


if __name__ == "__main__":
    feature, mode = sys.argv[1:]
    mindspore.set_context(mode=mindspore.GRAPH_MODE if mode == "graph" else mindspore.PYNATIVE_MODE)
    set_device("CPU")
    globals()[feature]()
