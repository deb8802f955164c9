"""Tests classes of primitives that mindspore.mint calls, which libraries written for Ascend hold in their Cells."""

import inspect

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.ops import operations

import msops
from msops.patch.table import PRIMITIVES

generated = pytest.importorskip("mindspore.ops.auto_generate")
CLASSES = {name: getattr(generated, name, None) for name in PRIMITIVES if not hasattr(ops, name)}
pytestmark = pytest.mark.skipif(not inspect.isclass(CLASSES["TopkExt"]), reason="this MindSpore lacks the primitives")

X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
ROWS = np.array([2, 0], np.int64)


class Held(nn.Cell):
    """Holds a primitive as a Cell of a distributed network does."""

    def __init__(self, name, settings, inputs):
        super().__init__()
        self.primitive = getattr(generated, name)(**settings)
        self.primitive.add_prim_attr("recompute", False).shard(((1, 1),))
        self.primitive.recompute(False)
        self.inputs = inputs

    def construct(self, x):
        return self.primitive(x, *self.inputs)


def chosen(x):
    return np.sort(x, 1)[:, ::-1][:, :2], np.argsort(-x, 1)[:, :2]


USES = {  # what the primitive is made with, its inputs after X, and NumPy's result
    "TopkExt": ({}, (2,), chosen),
    "SortExt": ({}, (1, True), lambda x: (np.sort(x, 1)[:, ::-1], np.argsort(-x, 1))),
    "CumsumExt": ({}, (0,), lambda x: x.cumsum(0)),
    "IndexSelect": ({}, (0, Tensor(ROWS)), lambda x: x[ROWS]),
    "SliceExt": ({}, (1, 1, -1, 2), lambda x: x[:, 1:-1:2]),
    "SplitWithSize": ({}, ((2, 4), 1), lambda x: (x[:, :2], x[:, 2:])),
    "TrilExt": ({}, (), np.tril),
    "FmodScalar": ({}, (0.75,), lambda x: np.fmod(x, np.float32(0.75))),
    "EluExt": ({"alpha": 2.0}, (), lambda x: np.where(x > 0, x, 2 * np.expm1(x))),
    "GeluExt": ({}, ("tanh",), lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))),
}


@pytest.mark.parametrize("name", USES)
def test_held_by_a_cell(name, mode):
    settings, inputs, reference = USES[name]
    with msops.patch_mindspore():
        net = Held(name, settings, inputs)
        got, wanted = net(Tensor(X)), reference(X)
        for each, right in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, wanted))):
            np.testing.assert_allclose(each.asnumpy(), right, rtol=1e-5, atol=1e-6)
        dx = mindspore.grad(net)(Tensor(X))
    assert dx.shape == X.shape
    assert np.isfinite(dx.asnumpy()).all()


class Misread(nn.Cell):
    """Drops elements of what a Morph gives, whose dtype it takes for that of the Morph's first input."""

    def __init__(self):
        super().__init__()
        self.rows = operations.Morph(self.rows_of, shape_of_rows, dtype_of_rows)
        self.drop = generated.DropoutExt()

    def rows_of(self, places, table):
        return ops.gather(table, places, 0)

    def construct(self, places, table):
        return self.drop(self.rows(places, table), 0.25, Tensor(3), Tensor(4))[0]


def shape_of_rows(places, table):
    return [*places, table[-1]]


def dtype_of_rows(places, table):
    return places


def test_dropout_after_a_morph():
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    with msops.patch_mindspore():
        got = Misread()(Tensor(ROWS), Tensor(X)).asnumpy()
    np.testing.assert_allclose(got[got != 0], (X[ROWS] / 0.75)[got != 0], rtol=1e-6)
    assert 0 < (got == 0).sum() < got.size


def test_made_with_an_axis(mode):
    places = Tensor(ROWS)
    on, off = Tensor(5.0), Tensor(1.0)
    with msops.patch_mindspore():
        rows = np.where(np.arange(3) == ROWS[:, None], 5, 1)
        for axis, wanted in ((-1, rows), (0, rows.T)):
            np.testing.assert_array_equal(generated.OneHotExt(axis)(places, 3, on, off).asnumpy(), wanted)
        pair = generated.StackExt(dim=1)((places, places)).asnumpy()
        np.testing.assert_array_equal(pair, np.stack((ROWS, ROWS), 1))


@pytest.mark.parametrize("name", CLASSES)
def test_arguments(name):
    """A function takes what the primitive's call takes, then what the primitive is made with."""
    own = CLASSES[name]
    takes, made = (list(inspect.signature(each).parameters.values())[1:] for each in (own.__call__, own.__init__))
    function = inspect.signature(PRIMITIVES[name])
    function.bind(*takes, *made)
    function.bind(*(each for each in takes if each.default is each.empty), *made)


def test_classes_are_back():
    own = dict(CLASSES)
    with msops.patch_mindspore():
        assert all(getattr(generated, name) is not value for name, value in own.items())
    assert all(getattr(generated, name) is value for name, value in own.items())
    with msops.patch_mindspore(mint=False):
        assert generated.TopkExt is own["TopkExt"]
