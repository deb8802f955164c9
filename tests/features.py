"""Tries features of MindSpore with our operators: `python features.py DEVICE MODE FEATURE ...` names those that work.

Some versions of MindSpore crash. Then the features after that are missing.
"""

import contextlib
import ctypes
import math
import os
import shutil
import sys
import tempfile

import mindspore
import numpy as np
from mindspore import Model, Parameter, ParameterTuple, Tensor, amp, nn, ops
from mindspore.dataset import NumpySlicesDataset

import msops
from msops.compat import VERSION, jit, set_device
from msops.testing.checks import Gradient, Net, assert_equal, run, run_gradient

X = np.array([[-1, 0, 0.5], [1, 2, 3]], np.float32)
Y = 1 / (1 + np.exp(-X))
SLOPE = Y * (1 - Y)
CUBE = """
#include "common/formula.h"

MSOPS_FORMULA(Cube, (x), (y), y = x * x * x)
MSOPS_FORMULA(CubeBackward, (x, dy), (dx), dx = 3 * x * x * dy)
MSOPS_FORMULA(CubeBackwardBackward, (x, dy, ddx), (dx, ddy), dx = 6 * x * dy * ddx; ddy = 3 * x * x * ddx)

extern "C" __attribute__((visibility("default"))) int calls;
int calls = 0;
MSOPS_ENTRY(CountedCube) {
  ++calls;
  return Cube_checked(call);
}
"""


def near(got, want):
    np.testing.assert_allclose(got.asnumpy() if isinstance(got, Tensor) else got, want, rtol=1e-5, atol=1e-6)


class Network(nn.Cell):
    """Maps images (N, 2, 6, 6) to scores (N, 3) by Cells with and without parameters."""

    def __init__(self):
        super().__init__()
        self.depthwise = msops.DepthwiseConv2d(2, 3, channel_multiplier=2, has_bias=True)
        self.sigmoid = msops.Sigmoid()
        self.add = msops.Add()
        self.lltm = msops.LLTM(6, 4, batch_first=True)
        self.cell = msops.LLTMCell(4, 3)
        self.trilinear = msops.TrilinearInterpolation()
        self.dense = nn.Dense(18, 3)

    def construct(self, images):
        y = self.sigmoid(self.depthwise(images))
        y = self.add(y, images.mean((1, 2, 3), keep_dims=True))
        means = self.lltm(y.reshape((-1, 24, 6)))[0].mean(1)
        points, _ = self.cell(means, (means[:, :3], means[:, 1:]))
        return self.dense(self.trilinear(y.reshape((-1, 8, 18)), points))


class WithLoss(nn.Cell):
    """Maps images and labels to the loss."""

    def __init__(self, net):
        super().__init__(auto_prefix=False)
        self.net = net
        self.loss = nn.MSELoss()

    def construct(self, images, labels):
        return self.loss(self.net(images), labels)


def make_network(seed=0):
    mindspore.set_seed(seed)
    return Network()


def make_data(n=8):
    """Returns images, and labels that are the scaled sum of each image, three times over."""
    images = np.random.default_rng(0).standard_normal((n, 2, 6, 6)).astype(np.float32)
    return images, np.repeat(images.sum((1, 2, 3))[:, None] / 8, 3, 1)


def loss_and_gradients(net, images, labels):
    """Returns the loss and the gradients of the parameters as NumPy arrays."""
    loss, gradients = ops.value_and_grad(WithLoss(net), None, net.trainable_params())(Tensor(images), Tensor(labels))
    return [loss.asnumpy(), *(gradient.asnumpy() for gradient in gradients)]


class Scaled(nn.Cell):
    """Computes sigmoid(factor x)."""

    def __init__(self):
        super().__init__()
        self.factor = Parameter(Tensor(2.0, mindspore.float32), name="factor")

    def construct(self, x):
        return msops.sigmoid(self.factor * x)


def forward():
    near(run(msops.Sigmoid(), X)[0], Y)


def gradient():
    """An input and a Parameter get their gradients."""
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
    """One Cell, and the gradient of one, take tensors of many shapes and ranks."""
    net = msops.Sigmoid()
    gradient = Gradient(net, 1)
    for shape in ((5, 7), (6, 7), (5, 8), (1,), (), (2, 3, 4), (5, 7), (9, 7)):
        x = np.linspace(-1, 1, math.prod(shape), dtype=np.float32).reshape(shape)
        y = 1 / (1 + np.exp(-x))
        near(run(net, x)[0], y)
        near(run(gradient, x, x)[0], x * y * (1 - y))


class Outputs(nn.Cell):
    """Returns the outputs of an LLTM, without its state."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def construct(self, x):
        return self.net(x)[0]


class Squares(nn.Cell):
    """Computes the gradients of the sum of the squares of all outputs of a Cell."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.gradient = ops.GradOperation(get_all=True)

    def loss(self, *inputs):
        outs = self.net(*inputs)
        outs = outs if isinstance(outs, tuple) else (outs,)
        return sum([(out * out).sum() for out in outs])

    def construct(self, *inputs):
        return self.gradient(self.loss)(*inputs)


def check_open_sizes(net, shapes, calls):
    """Requires that a Cell and its gradients, compiled once, give the results that they give when they are compiled for
    the sizes of each call."""
    for cell in (net, Squares(net)):
        inputs = [[np.random.default_rng(0).random(shape, np.float32) for shape in call] for call in calls]
        want = [run(cell, *arrays) for arrays in inputs]
        cell.set_inputs(*(Tensor(shape=shape, dtype=mindspore.float32) for shape in shapes))
        for arrays, wanted in zip(inputs, want):
            for got, each in zip(run(cell, *arrays), wanted):
                near(got, each)


def dynamic_shape():
    """set_inputs leaves the sizes of batches and images and the numbers of steps open; mindspore.jit does so for
    batches."""
    depthwise = msops.DepthwiseConv2d(2, 3, stride=2, pad_mode="valid")
    for net, shapes, calls in (
        (make_network(), [[None, 2, 6, 6]], ([(2, 2, 6, 6)], [(5, 2, 6, 6)])),
        (nn.SequentialCell(msops.Sigmoid(), depthwise), [[None, 2, None, None]], ([(1, 2, 5, 6)], [(3, 2, 8, 4)])),
        (msops.Add(), [[None, None], [None]], ([(2, 3), (3,)], [(5, 4), (1,)])),
        (msops.TrilinearInterpolation(), [[None, 8, None], [None, 3]], ([(2, 8, 5), (2, 3)], [(3, 8, 4), (3, 3)])),
        (Outputs(msops.LLTM(3, 2)), [[None, None, 3]], ([(4, 2, 3)], [(1, 5, 3)])),
    ):
        check_open_sizes(net, shapes, calls)
    net = make_network()
    step = jit(ops.value_and_grad(WithLoss(net), None, net.trainable_params()), dynamic=1)
    for n in (2, 3, 5, 4):  # MindSpore leaves sizes open once it has seen that they change
        images, labels = make_data(n)
        loss, gradients = step(Tensor(images), Tensor(labels))
        for got, wanted in zip([loss, *gradients], loss_and_gradients(net, images, labels)):
            near(got, wanted)


def mindir():
    """A Cell runs after it was exported and loaded."""
    with tempfile.TemporaryDirectory() as folder:
        mindspore.export(msops.Sigmoid(), Tensor(X), file_name=f"{folder}/sigmoid", file_format="MINDIR")
        near(nn.GraphCell(mindspore.load(f"{folder}/sigmoid.mindir"))(Tensor(X)), Y)
        images, net = Tensor(make_data()[0]), make_network()
        mindspore.export(net, images, file_name=f"{folder}/network", file_format="MINDIR")
        near(nn.GraphCell(mindspore.load(f"{folder}/network.mindir"))(images), run(net, images)[0])


def mindir_elsewhere():
    """A network finds a library that moved after the export through an environment variable."""
    built = msops.load("features_cube", CUBE).path
    with tempfile.TemporaryDirectory() as folder:
        old, new = f"{folder}/old.so", f"{folder}/new.so"
        shutil.copy(built, old)
        net = Net(msops.custom_op(msops.Library(old, variable="FEATURES_CUBE").Cube, "x -> y"))
        mindspore.export(net, Tensor(X), file_name=f"{folder}/cube", file_format="MINDIR")
        shutil.move(old, new)
        os.environ["FEATURES_CUBE"] = new
        near(nn.GraphCell(mindspore.load(f"{folder}/cube.mindir"))(Tensor(X)), X**3)


def compiled():
    """mindspore.jit changes neither the loss nor the gradients."""
    net, (images, labels) = make_network(), make_data()
    want = loss_and_gradients(net, images, labels)
    step = jit(ops.value_and_grad(WithLoss(net), None, net.trainable_params()))
    loss, gradients = step(Tensor(images), Tensor(labels))
    for got, wanted in zip([loss, *gradients], want):
        near(got, wanted)


def model(**options):
    """Model.train lowers the loss that Model.eval finds."""
    net = make_network()
    images, labels = make_data(64)
    data = NumpySlicesDataset((images, labels), ["images", "labels"], shuffle=False).batch(16)
    trained = Model(net, nn.MSELoss(), nn.Adam(net.trainable_params(), 0.05), metrics={"loss": nn.Loss()}, **options)
    before = trained.eval(data, dataset_sink_mode=False)["loss"]
    near(before, ((net(Tensor(images)).asnumpy() - labels) ** 2).mean())
    trained.train(4, data, dataset_sink_mode=False)
    assert trained.eval(data, dataset_sink_mode=False)["loss"] < 0.5 * before


def mixed_precision():
    """to_float and the levels of amp give float16 results, and gradients that differ from exact ones by rounding."""
    images, labels = make_data()
    exact = loss_and_gradients(make_network(), images, labels)
    half = make_network().to_float(mindspore.float16)
    assert run(half, images)[0].dtype == np.float16
    assert_equal(loss_and_gradients(amp.auto_mixed_precision(make_network(), "O0"), images, labels), exact)
    levels = ("O2", "O3") if VERSION < (2, 1) else ("O1", "O2", "O3", "auto")
    for net in (half, *(amp.auto_mixed_precision(make_network(), level) for level in levels)):
        for got, want in zip(loss_and_gradients(net, images, labels), exact):
            assert 0 < np.abs(got - want).max() < 0.01


class Accumulation(nn.Cell):
    """Adds the gradients of a batch to Parameters."""

    def __init__(self, net):
        super().__init__(auto_prefix=False)
        weights = ParameterTuple(net.trainable_params())
        self.step = ops.GradOperation(get_by_list=True)(WithLoss(net), weights)
        self.totals = weights.clone("total", init="zeros")
        self.add, self.each = ops.AssignAdd(), ops.HyperMap()

    def construct(self, images, labels):
        return self.each(self.add, self.totals, self.step(images, labels))


def gradient_accumulation():
    """The mean of the gradients of two halves of a batch is the gradient of the whole batch."""
    net, (images, labels) = make_network(), make_data()
    accumulation = Accumulation(net)
    for half in (slice(0, 4), slice(4, 8)):
        accumulation(Tensor(images[half]), Tensor(labels[half]))
    for total, want in zip(accumulation.totals, loss_and_gradients(net, images, labels)[1:]):
        near(total.asnumpy() / 2, want)


def checkpoint():
    """A network that loads the Parameters of another one reproduces its results bit for bit."""
    images, _ = make_data()
    saved, loaded = make_network(1), make_network(2)
    want = run(saved, images)[0]
    assert (run(loaded, images)[0] != want).any()
    with tempfile.TemporaryDirectory() as folder:
        mindspore.save_checkpoint(saved, f"{folder}/network.ckpt")
        mindspore.load_checkpoint(f"{folder}/network.ckpt", loaded)
    assert_equal(run(loaded, images), [want])


class Block(nn.Cell):
    """Computes the cube and adds 1."""

    def __init__(self, cube):
        super().__init__()
        self.cube = cube

    def construct(self, x):
        return self.cube(self.cube(x))


def recompute():
    """MindSpore computes the forward results again for the gradient."""
    library = msops.load("features_cube", CUBE)
    calls = ctypes.c_int.in_dll(library.handle, "calls")
    cube = msops.custom_op(library.CountedCube, "x -> y", gradient=msops.custom_op(library.CubeBackward, "x, dy -> dx"))
    counts = []
    for again in (False, True):
        block = Block(cube)
        if again:
            block.recompute()
        before = calls.value
        near(ops.value_and_grad(block)(Tensor(X))[1], 9 * X**8)
        counts.append(calls.value - before)
    assert counts[0] == 2
    assert counts[1] > counts[0]
    net, (images, labels) = make_network(), make_data()
    want = loss_and_gradients(net, images, labels)
    net.recompute()
    for got, wanted in zip(loss_and_gradients(net, images, labels), want):
        near(got, wanted)


def vmap():
    near(ops.vmap(Net(msops.sigmoid))(Tensor(X)), Y)
    images, net = make_data(12)[0], make_network()
    got = ops.vmap(net)(Tensor(images.reshape(3, 4, *images.shape[1:])))
    near(got.reshape((12, -1)), run(net, images)[0])


if __name__ == "__main__":
    device, mode, *features = sys.argv[1:]
    set_device(device)
    for feature in features:
        mindspore.set_context(mode=mindspore.GRAPH_MODE if mode == "graph" else mindspore.PYNATIVE_MODE)
        with contextlib.suppress(Exception):
            globals()[feature]()
            print("works:", feature, flush=True)
