"""Tests calls of operators that go around ops.Custom, in a process of their own: nothing switches them off again. They
are wide, since their extension takes longer to compile than all other tests' libraries."""

import os

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import msops
from msops import compat
from msops.core.primitive import Primitive

pytestmark = [
    pytest.mark.alone,
    pytest.mark.wide,
    pytest.mark.skipif(compat.VERSION != (2, 10), reason="is for MindSpore 2.10"),
]


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Returns a list to which each call adds whether it was fast."""
    if "MSOPS_ALONE" not in os.environ:  # fixtures also run in the process that starts the test's own
        return []
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    msops.use_fast_calls()
    call, fast = Primitive.fast_call, []

    def counted(*arguments):
        outputs = call(*arguments)
        fast.append(outputs is not NotImplemented)
        return outputs

    monkeypatch.setattr(Primitive, "fast_call", counted)
    return fast


def numbers(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def slow(monkeypatch, function, *inputs):
    with monkeypatch.context() as patch:
        patch.setattr(Primitive, "fast_call", None)
        outputs = function(*inputs)
        mindspore.common.api._pynative_executor.sync()
    return outputs


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.T, lambda x: x[1:], lambda x: x[:, 1:3], lambda x: x[1, 1]])
def test_same_bits(calls, monkeypatch, view):
    x = view(Tensor(numbers(3, 5)))
    assert np.array_equal(msops.sigmoid(x).asnumpy(), slow(monkeypatch, msops.sigmoid, x).asnumpy())
    assert calls == [True]


def test_scratch_parameters_and_gradients(calls, monkeypatch):
    net, x = msops.LayerNorm([7]), Tensor(numbers(4, 7))
    assert np.array_equal(net(x).asnumpy(), slow(monkeypatch, net, x).asnumpy())
    assert calls == [True]
    x, weight = numbers(6), numbers(6)
    s = 1 / (1 + np.exp(-x))
    first = mindspore.grad(lambda x: (msops.sigmoid(x) * Tensor(weight)).sum())
    np.testing.assert_allclose(first(Tensor(x)).asnumpy(), weight * s * (1 - s), rtol=1e-5)
    second = mindspore.grad(lambda x: first(x).sum())
    np.testing.assert_allclose(second(Tensor(x)).asnumpy(), weight * s * (1 - s) * (1 - 2 * s), rtol=1e-4, atol=1e-6)
    assert len(calls) > 4
    assert all(calls)


def test_order(calls):
    """A call sees what earlier operators of MindSpore wrote, and not what later ones write."""
    x = Parameter(np.zeros(1000, np.float32))
    results = []
    for _ in range(50):
        ops.assign_add(x, Tensor(np.ones(1000, np.float32)))
        results.append(msops.add(x, x))
    assert [y.asnumpy()[-1] for y in results] == [2.0 * i for i in range(1, 51)]
    assert all(calls)


def test_order_of_launches(calls):
    """A kernel of MindSpore reads what a call gave, and its memory is free only when it has run."""
    x = Tensor(numbers(2, 9, 3))
    want = 1 / (1 + np.exp(-x.asnumpy()))
    for _ in range(300):
        y = ops.concat((msops.sigmoid(x[:, :8]), msops.sigmoid(x[:, 8:])), 1)
        np.testing.assert_allclose(y.asnumpy(), want, rtol=1e-5)
    assert all(calls)


def product(x, w, out, dout):
    return dout[0] + w * dout[1], dout[0] + x * dout[1]


def of_parameters(op, x):
    """Calls a Cell with a Parameter that is used twice, and one that needs no gradient."""
    net = msops.LayerNorm([6])
    net.beta.requires_grad = False
    return mindspore.value_and_grad(lambda x: net(net(x)).sum(), 0, net.trainable_params())(x)


def of_one_output(op, x):
    return mindspore.grad(lambda x: op(x, 2 * x)[1].sum())(x)


def of_no_output(op, x):
    return mindspore.grad(lambda x: (op(x, x), x * x)[1].sum())(x)


def of_second_order(op, x):
    first = mindspore.grad(lambda x, y: (op(x, y)[1] * op(y, x)[0]).sum())
    return mindspore.grad(lambda x, y: first(x, y).sum(), (0, 1))(x, 2 * x)


def of_a_stopped_input(op, x):
    return mindspore.grad(lambda x: (op(ops.stop_gradient(x), x)[1] * msops.sigmoid(x)).sum())(x)


def with_hooks(op, x):
    def function(x):
        y = 2 * x
        y.register_hook(lambda dy: 10 * dy)
        z = op(y, x)[1]
        z.register_hook(lambda dz: 3 * dz)
        return (z * z).sum()

    return mindspore.grad(function)(x)


def of_an_integer(op, x):
    index = Tensor(np.array([[1, 0]], np.int32))
    return mindspore.grad(lambda table: msops.embedding(index, table).sum())(x.reshape(2, 3))


def of_views(op, x):
    return mindspore.grad(lambda x: op(x.reshape(2, 3).T[1:], x[:2].reshape(2, 1).broadcast_to((2, 2)))[1].sum())(x)


PROGRAMS = [
    of_parameters,
    of_one_output,
    of_no_output,
    of_second_order,
    of_a_stopped_input,
    with_hooks,
    of_an_integer,
    of_views,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_same_gradients(calls, monkeypatch, program):
    library = msops.load(
        "fast_calls_test", '#include "common/formula.h"\nMSOPS_FORMULA(Both, (x, w), (s, p), s = x + w; p = x * w)\n'
    )
    inputs = msops.custom_op(library.Both, "x, w -> s, p", gradient=product), Tensor(numbers(6))
    got = program(*inputs)
    assert calls
    assert all(calls)
    np.testing.assert_array_equal(flat(got), flat(slow(monkeypatch, program, *inputs)))


def flat(outputs):
    """Returns the numbers of nested tuples of tensors."""
    return np.concatenate([flat(x) if isinstance(x, tuple) else x.asnumpy().ravel() for x in as_tuple(outputs)])


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def test_views_are_not_copied(calls):
    """An operator reads the result of a reshape where it is; MindSpore's cast to the same dtype shows that."""
    x = ops.add(Tensor(numbers(4, 6)), 0)
    assert x.reshape(2, 12).astype(mindspore.float32)._data_ptr() == x._data_ptr()
    # Elements in another order, or not all:
    for view in (lambda x: x.T, lambda x: x[1:], lambda x: x[:2], lambda x: x[:, :3]):
        assert view(x).astype(mindspore.float32)._data_ptr() != x._data_ptr()


def test_views_of_new_tensors(calls):
    """What reads a view first, instead of its tensor, finds the numbers that the host has yet to copy."""
    held = mindspore.Parameter(Tensor(np.zeros((4, 3), np.float32)))
    for i in range(200):
        x = Tensor(np.full((2, 6), i, np.float32))
        held.set_data(Tensor(np.full((4, 3), -i, np.float32)))
        parts = x.reshape(3, 4), held.reshape(3, 4), Tensor(np.full(12, 2 * i, np.float32)).reshape(3, 4)
        np.testing.assert_array_equal(ops.concat(parts).asnumpy(), np.repeat([i, -i, 2 * i], 12).reshape(9, 4))
        new = Tensor(np.full((3, 3), i)).reshape(9).view(3, 3)
        np.testing.assert_array_equal(ops.add(new, 1).asnumpy(), np.full((3, 3), i + 1))


def test_views_in_gradients(calls):
    x, w = numbers(4, 6), numbers(8, 3)

    def loss(x, w):
        y = ops.matmul(x.reshape(3, 8), w).view(-1)
        first, second = y[:4], x.reshape(2, 3, 4).transpose(0, 2, 1).reshape(-1, 6)
        return (y * y).sum() + (first * first.reshape(2, 2).reshape(-1)).sum() + (second * x).sum()

    dx, dw = mindspore.grad(loss, (0, 1))(Tensor(x), Tensor(w))
    y = x.reshape(3, 8).astype(np.float64) @ w
    dy = 2 * y.reshape(-1)
    dy[:4] *= 2
    order = np.arange(24).reshape(2, 3, 4).transpose(0, 2, 1).reshape(-1)
    both = np.zeros(24)
    np.add.at(both, order, x.reshape(-1))
    both += x.reshape(-1)[order]
    np.testing.assert_allclose(dw.asnumpy(), x.reshape(3, 8).T @ dy.reshape(3, 3), 1e-5, 1e-5)
    np.testing.assert_allclose(dx.asnumpy().reshape(-1), (dy.reshape(3, 3) @ w.T).reshape(-1) + both, 1e-5, 1e-5)


def test_views_that_are_written(calls, device_target):
    """A gradient does not use what was written after the operator had read the view."""

    def loss(x):
        x = x * 1
        y = x.reshape(-1)
        z = y * y
        x.add_(1)
        return z.sum()

    x, gradient = Tensor(numbers(2, 3)), mindspore.grad(loss)
    with msops.patch_mindspore():
        if device_target == "GPU":  # there the patch gives a Tensor that is written new memory
            np.testing.assert_array_equal(gradient(x).asnumpy(), 2 * x.asnumpy())
            return
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient(x)


def test_error_in_a_gradient(calls):
    def gradient(x, y, dy):
        raise KeyError("here")

    x = Tensor(numbers(5))
    library = msops.load("fast_calls_none", '#include "common/formula.h"\nMSOPS_FORMULA(Twice, (x), (y), y = 2 * x)\n')
    twice = msops.custom_op(library.Twice, "x -> y", gradient=gradient)
    with pytest.raises(KeyError, match="here"):
        mindspore.grad(lambda x: twice(x).sum())(x)
    assert np.isfinite(mindspore.grad(lambda x: msops.sigmoid(x).sum())(x).asnumpy()).all()


def test_mixed_precision(calls):
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = Parameter(numbers(5))

        def construct(self, x):
            if x.shape[0] == 1:
                raise ValueError("a row")
            return msops.add(x, self.weight)

    net = Net().to_float(mindspore.float16)
    assert net(Tensor(numbers(3, 5))).dtype == mindspore.float16
    with pytest.raises(ValueError, match="a row"):
        net(Tensor(numbers(1, 5)))
    mindspore.common.api._pynative_executor.clear_res()
    assert msops.sigmoid(Tensor(numbers(5))).dtype == mindspore.float32
    assert calls == [False, True]


def test_errors(calls):
    library = msops.load("fails", '#include "common/call.h"\nMSOPS_ENTRY(Fails) { return 77; }\n')
    with pytest.raises(TypeError, match="add"):
        msops.add(Tensor(numbers(5)))
    fails = msops.custom_op(library.Fails, "x -> y")
    with pytest.raises(RuntimeError, match="Fails is 77"):
        fails(Tensor(numbers(5))).asnumpy()
    assert np.isfinite(msops.sigmoid(Tensor(numbers(5))).asnumpy()).all()


def test_graph_mode(calls):
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    x = Tensor(numbers(5))
    np.testing.assert_allclose(msops.Sigmoid()(x).asnumpy(), ops.sigmoid(x).asnumpy(), rtol=1e-5)
    assert calls == []
