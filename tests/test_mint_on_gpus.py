"""Tests, on the CPU, too, what replaces kernels and passes of MindSpore's that are wrong on a GPU."""

import itertools

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

import msops
from msops.operators.linear import linear as own
from msops.patch import transposes
from msops.patch.mint import elementwise, linear, shape

pytestmark = pytest.mark.skipif(not hasattr(mindspore, "mint"), reason="this MindSpore does not have mint")
CUBE = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(transposes, "is_on_gpu", ops.constexpr(lambda: True))
    monkeypatch.setattr(shape, "is_on_gpu", ops.constexpr(lambda: True))
    monkeypatch.setattr(linear, "is_on_gpu", ops.constexpr(lambda: True))
    monkeypatch.setattr(elementwise, "is_on_gpu", ops.constexpr(lambda: True))
    with msops.patch_mindspore():
        yield


class InAllOrders(nn.Cell):
    def __init__(self):
        super().__init__()
        self.transpose = ops.Transpose()

    def construct(self, x):
        by_functions = ops.transpose(x, (0, 2, 1)), mint.permute(x, (2, 0, 1)), ops.swapaxes(x, 0, 1)
        return *by_functions, x.permute(1, 2, 0), x.T, self.transpose(x, (1, -1, 0)), mint.transpose(x, 1, 2)


def test_orders_of_one_tensor(mode):
    orders = (0, 2, 1), (2, 0, 1), (1, 0, 2), (1, 2, 0), (2, 1, 0), (1, 2, 0), (0, 2, 1)
    for got, order in zip(InAllOrders()(Tensor(CUBE)), orders):
        np.testing.assert_array_equal(got.asnumpy(), CUBE.transpose(order))


class Weighted(nn.Cell):
    def construct(self, x, y):
        return (ops.transpose(x, (1, 2, 0)) * y.reshape(3, 4, 2)).sum() + (ops.transpose(x, (2, 0, 1))[1] * 3.0).sum()


def test_gradient_of_two_orders(mode):
    want = np.moveaxis(CUBE.reshape(3, 4, 2), 2, 0).copy()
    want[:, :, 1] += 3
    np.testing.assert_array_equal(mindspore.grad(Weighted())(Tensor(CUBE), Tensor(CUBE)).asnumpy(), want)


class Open(nn.Cell):
    def construct(self, x):
        return ops.transpose(x, (1, 2, 0)), ops.transpose(x, (2, 0, 1))


def test_orders_of_open_sizes():
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    net = Open()
    net.set_inputs(Tensor(shape=[None, 3, None], dtype=mindspore.float32))
    first, second = net(Tensor(CUBE))
    np.testing.assert_array_equal(first.asnumpy(), CUBE.transpose(1, 2, 0))
    np.testing.assert_array_equal(second.asnumpy(), CUBE.transpose(2, 0, 1))


@pytest.mark.parametrize("n", [3, 4])
def test_each_order_has_its_own_places(n):
    places = {transposes._apart(order).places for order in itertools.permutations(range(n))}
    assert len(places) == np.prod(range(1, n + 1))


class Places(nn.Cell):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def construct(self, rows, values):
        return mint.searchsorted(rows, values, right=self.right, out_int32=self.right)


@pytest.mark.parametrize("n", [1, 2, 7, 8])
@pytest.mark.parametrize("side", ["left", "right"])
def test_places_in_rows(mode, side, n):
    rng = np.random.default_rng(n)
    rows, values = np.sort(rng.integers(9, size=(2, 3, n)), -1), rng.integers(-1, 11, (2, 3, 20))
    got = Places(side == "right")(Tensor(rows), Tensor(values))
    want = [np.searchsorted(*each, side) for each in zip(rows.reshape(-1, n), values.reshape(-1, 20))]
    np.testing.assert_array_equal(got.asnumpy(), np.reshape(want, values.shape))
    assert got.dtype == (mindspore.int32 if side == "right" else mindspore.int64)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8, np.int64, np.bool_])
def test_filling_by_numbers_of_another_dtype(dtype):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    x, mask = np.arange(4).astype(dtype), np.array([True, False, True, False])
    want = np.where(mask, np.ones(1, dtype), x)
    np.testing.assert_array_equal(ops.masked_fill(Tensor(x), Tensor(mask), 1).asnumpy(), want)
    tensor = Tensor(x)
    tensor.masked_fill_(Tensor(mask), 1)
    np.testing.assert_array_equal(tensor.asnumpy(), want)


@pytest.mark.parametrize("rows", [3, linear.MANY_ROWS])
def test_gradient_of_a_bias(mode, rows):
    rng = np.random.default_rng(0)
    x, dy = np.float32(rng.standard_normal((rows, 5))), np.float32(rng.standard_normal((rows, 7)))
    net = nn.Dense(5, 7)
    weight, bias = (each.asnumpy() for each in net.trainable_params())
    y = net(Tensor(x))

    def loss(x, dy):
        return (net(x) * dy).sum()

    _, (dweight, dbias) = mindspore.value_and_grad(loss, None, net.trainable_params())(Tensor(x), Tensor(dy))
    np.testing.assert_allclose(y.asnumpy(), x @ weight.T + bias, 1e-3, 1e-4)
    np.testing.assert_allclose(dweight.asnumpy(), dy.T @ x, 1e-3, 1e-2)
    np.testing.assert_allclose(dbias.asnumpy(), dy.sum(0), 1e-4, 1e-4)


class Layer(nn.Cell):
    def __init__(self, of):
        super().__init__()
        self.linear = of(7, 9, weight_init="normal", bias_init="normal", dtype=mindspore.float16)

    def construct(self, x):
        return self.linear(x)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("of", [mint.nn.Linear, nn.Dense])
def test_bias_that_a_product_adds(mode, of, frozen, monkeypatch):
    """Layers of many halves are one operator, whose gradients are those of the layer."""
    calls = []
    monkeypatch.setattr(linear, "_MANY", 5 * 6 * 9)
    if mode == "pynative":  # MindSpore compiles no lambda
        monkeypatch.setattr(linear, "linear", lambda *inputs: calls.append(inputs) or own(*inputs))
    rng = np.random.default_rng(1)
    x, dy = np.float16(rng.standard_normal((5, 6, 7))), np.float16(rng.standard_normal((5, 6, 9)))
    net = Layer(of)
    weight, bias = (each.asnumpy().astype(np.float32) for each in net.trainable_params())
    net.linear.weight.requires_grad = not frozen

    def loss(x, dy):
        return (net(x) * dy).sum()

    _, (dx, rest) = mindspore.value_and_grad(loss, 0, net.trainable_params())(Tensor(x), Tensor(dy))
    rows, drows = np.float32(x).reshape(-1, 7), np.float32(dy).reshape(-1, 9)
    wants = [drows.T @ rows] * (not frozen) + [drows.sum(0)]
    np.testing.assert_allclose(net(Tensor(x)).asnumpy(), np.float32(x) @ weight.T + bias, 2e-3, 2e-3)
    np.testing.assert_allclose(dx.asnumpy().reshape(-1, 7), drows @ weight, 4e-3, 4e-3)
    for each, want in zip(rest, wants, strict=True):
        np.testing.assert_allclose(each.asnumpy(), want, 4e-3, 2e-2)
    assert len(calls) == (mode == "pynative") * (1 if frozen else 2)


def test_operators_that_a_library_put_into_a_layer(monkeypatch):
    """A layer calls them."""
    monkeypatch.setattr(linear, "_MANY", 1)
    net = nn.Dense(3, 2, "ones", "zeros", dtype=mindspore.float16)
    x = Tensor(np.ones((4, 3), np.float16))
    assert net(x).asnumpy().tolist() == [[3, 3]] * 4
    net.matmul = lambda x, weight: ops.MatMul(transpose_b=True)(x, weight) * 2
    assert net(x).asnumpy().tolist() == [[6, 6]] * 4


def test_bias_of_channels(mode):
    image = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    got = ops.BiasAdd()(Tensor(image), Tensor([1, 2, 3], mindspore.float32))
    np.testing.assert_array_equal(got.asnumpy(), image + np.float32([1, 2, 3]).reshape(3, 1, 1))


class Fmod(nn.Cell):
    def construct(self, x, y):
        return mint.fmod(x, y)


class FmodOfNumbers(nn.Cell):
    def construct(self, x, n):
        return mint.fmod(x, 0.1), mint.fmod(x, float("inf")), mint.fmod(n, 0.3)


def test_fmod(mode, monkeypatch, device_target):
    """It takes Mod, which is exact on a GPU as TruncateMod is on the CPU, with a gradient of its own."""
    if device_target == "CPU":
        monkeypatch.setattr(elementwise, "_mod", elementwise._truncate_mod)
    n, x = np.arange(-5, 5, dtype=np.int32), np.random.default_rng(0).normal(0, 1000, (3, 4)).astype(np.float32)
    y = np.array([0.1, -0.37, np.inf, 3], np.float32)
    got = Fmod()(Tensor(x), Tensor(y)), *FmodOfNumbers()(Tensor(x), Tensor(n))
    dx, dy = mindspore.grad(Fmod(), (0, 1))(Tensor(x), Tensor(y))
    want = np.fmod(x, y), np.fmod(x, np.float32(0.1)), x, np.fmod(n.astype(np.float32), np.float32(0.3))
    for each, right in zip(got, want):
        np.testing.assert_array_equal(each.asnumpy(), right)
    np.testing.assert_array_equal(dx.asnumpy(), np.ones_like(x))
    np.testing.assert_allclose(dy.asnumpy(), -np.trunc(x / y).sum(0), rtol=1e-6)
