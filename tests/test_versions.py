"""What docs/versions.md says of the MindSpore at hand is so. `make test-matrix` asks the other versions."""

import sys

import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops

import features
import msops
from matrix import FEATURES, TABLE, here, rows_of, works
from msops.compat import VERSION
from msops.testing.checks import assert_equal


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature, mode, device_target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MindSpore leaves files
    version, python_version, variables = here()
    row = rows_of(TABLE.read_text()).get((version, python_version, device_target, mode))
    if row is None:
        pytest.skip(f"docs/versions.md has no row of MindSpore {version} with Python {python_version}, {device_target}")
    if row[list(FEATURES).index(feature)] == "yes":
        getattr(features, feature)()
    else:  # in a process of its own, which may crash
        assert works(sys.executable, variables, feature, device_target, mode) == "no"


@pytest.mark.parametrize("level", ["O2", "O3", "auto"])
def test_model_in_mixed_precision(level, mode):
    scaled = amp.FixedLossScaleManager(2**10, drop_overflow_update=False)
    features.model(amp_level=level, loss_scale_manager=scaled)


CELLS = (
    (msops.Add, (), [(2, 3), (3,)]),
    (msops.Sigmoid, (), [(2, 3)]),
    (msops.DepthwiseConv2d, (2, 3), [(1, 2, 5, 5)]),
    (msops.TrilinearInterpolation, (), [(2, 8, 3), (2, 3)]),
    (msops.LLTMCell, (3, 4), [(2, 3), ((2, 4), (2, 4))]),
    (msops.LLTM, (3, 4, 2), [(5, 2, 3), ((2, 2, 4), (2, 2, 4))]),
)


def tensors(shapes):
    return [
        tuple(tensors(shape)) if shape and isinstance(shape[0], tuple) else Tensor(np.full(shape, 0.3, np.float32))
        for shape in shapes
    ]


def arrays(results):
    if isinstance(results, Tensor):
        return [results.asnumpy()]
    return [array for result in results for array in arrays(result)]


@pytest.mark.parametrize(("cell", "settings", "shapes"), CELLS, ids=lambda value: getattr(value, "__name__", ""))
def test_cell_in_level_o1(mode, monkeypatch, tmp_path, cell, settings, shapes):
    """MindSpore rewrites the source of the Cell, which has no operator of the list that O1 runs in float16."""
    monkeypatch.chdir(tmp_path)  # the rewritten source goes into a folder
    net, inputs = cell(*settings), tensors(shapes)
    want = arrays(net(*inputs))
    assert_equal(arrays(amp.auto_mixed_precision(net, "O1")(*inputs)), want)


class Slope(nn.Cell):
    """The sum of the squares of a function's gradient."""

    def __init__(self, function):
        super().__init__()
        self.function, self.gradient = function, ops.GradOperation()

    def loss(self, x):
        out = self.function(x)
        return (out * out).sum()

    def construct(self, x):
        dx = self.gradient(self.loss)(x)
        return (dx * dx).sum()


def through_reshape(x):
    return ops.tanh(ops.reshape(ops.tanh(x), (-1,)))


def plain(x):
    return ops.tanh(ops.tanh(x))


@pytest.mark.skipif(VERSION < (2, 7), reason="older versions have other faults")
def test_second_order_through_a_reshape(mode):
    """What docs/versions.md says of MindSpore's own operators."""
    x = Tensor(np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3))
    got, want = (ops.GradOperation()(Slope(function))(x).asnumpy() for function in (through_reshape, plain))
    assert np.allclose(got, want, rtol=1e-5) == (mode == "graph")
