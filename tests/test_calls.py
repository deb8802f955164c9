"""Tests how operators may be called and differentiated, and the messages for calls that are not allowed."""

import re

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import msops
from msops import compat, custom_op
from operator_test import Net, load_kernels

X = Tensor(np.array([1, 2, 3], np.float32))


@pytest.fixture(scope="module")
def library():
    return load_kernels("calls")


def test_inputs_by_their_names(mode, library):
    op = custom_op(library.Difference, "x, y -> z")
    for z in (op(X, y=2 * X), op(y=2 * X, x=X), op(X, 2 * X)):
        np.testing.assert_array_equal(z.asnumpy(), -X.asnumpy())
    for wrong, words in (({"z": X}, "1 without and z by name"), ({"x": X, "y": X}, "1 without and x, y by name")):
        with pytest.raises(TypeError, match=f"^calls_test: takes the inputs x, y, got {words}$"):
            op(X, **wrong)


@pytest.mark.skipif(compat.VERSION < (2, 7), reason="MindSpore before 2.7 has its own words")
def test_inputs_by_their_names_where_they_are_compiled(library):
    op = custom_op(library.Difference, "x, y -> z")

    @compat.jit
    def function(x):
        return op(x=x, y=x)

    with pytest.raises(
        TypeError, match=r"calls_test: takes its inputs without names where it is compiled, as \(x, y\)"
    ):
        function(X)


@pytest.mark.skipif(compat.VERSION < (2, 7), reason="MindSpore before 2.7 has its own words")
def test_operator_that_is_made_where_it_is_compiled(library):
    @compat.jit
    def function(x):
        return custom_op(library.Square, "x -> y")(x)

    with pytest.raises(RuntimeError, match=r"custom_op: an operator must be made before .* decorated with msops\.once"):
        function(X)


@msops.once
def power(exponent):
    return custom_op(load_kernels("calls").Square, "x -> y", exponent=exponent)


def test_operator_that_is_made_by_once(library):
    @compat.jit
    def function(x):
        return power(2)(x)

    np.testing.assert_array_equal(function(X).asnumpy(), X.asnumpy() ** 2)


@pytest.mark.skipif(compat.VERSION < (2, 0), reason="MindSpore 1.10 has its own words")
@pytest.mark.parametrize("derivatives", [1, 2])
def test_gradient_that_is_missing(mode, library, derivatives):
    """The message names the C function, and so tells which of several operators has no gradient."""
    if mode == "pynative" and compat.VERSION == (2, 0) and derivatives == 2:
        pytest.skip("MindSpore 2.0 crashes")
    backward = custom_op(library.SquareBackward, "x, dy -> dx") if derivatives == 2 else None
    net, entry = Net(custom_op(library.Square, "x -> y", gradient=backward)), ("Square", "SquareBackward")
    for _ in range(derivatives):
        net = ops.grad(net)
    words = f"calls_test: {entry[derivatives - 1]} has no gradient: hand .* to mindspore.ops.stop_gradient"
    with pytest.raises(ValueError, match=words):
        net(X).asnumpy()


@pytest.mark.skipif(compat.VERSION < (2, 7), reason="before 2.7 MindSpore has no jvp of Cells")
def test_jvp_of_what_has_no_gradient(mode, library):
    net = Net(custom_op(library.Square, "x -> y"))
    with pytest.raises(ValueError, match="calls_test: Square has no gradient"):
        ops.jvp(net, X, X)


class Around(nn.Cell):
    """Multiplies x by the operator's result, through which no gradient flows to x."""

    def __init__(self, op, where):
        super().__init__()
        self.op, self.where, self.constant = op, where, Tensor(np.ones(3, np.float32))

    def construct(self, x):
        if self.where == "result":
            return x * ops.stop_gradient(self.op(x))
        if self.where == "input":
            return x * self.op(ops.stop_gradient(x))
        return x * self.op(self.constant)


@pytest.mark.parametrize("where", ["result", "input", "constant"])
def test_gradient_that_nobody_needs(mode, library, where):
    gradient = ops.grad(Around(custom_op(library.Square, "x -> y"), where))(X)
    expected = np.ones(3) if where == "constant" else X.asnumpy() ** 2
    np.testing.assert_array_equal(gradient.asnumpy(), expected)


class Gathered(nn.Cell):
    def __init__(self, op):
        super().__init__()
        self.op = op

    def construct(self, x):
        return ops.gather(x * x, self.op(x), 0)


def test_whole_numbers_have_no_gradient(mode, library):
    """No gradient flows through integers such as indices."""
    gradient = ops.grad(Gathered(custom_op(library.First, "x -> place(1, dtype=int64)")))(X)
    np.testing.assert_array_equal(gradient.asnumpy(), [2, 0, 0])


@pytest.mark.skipif(compat.VERSION < (2, 7), reason="MindSpore's own words, which are older")
def test_grad_of_an_operator(mode, library):
    backward = custom_op(library.SquareBackward, "x, dy -> dx")
    op = custom_op(library.Square, "x -> y", gradient=backward)
    ours, theirs = "calls_test: mindspore.grad and its like take functions and Cells", "must be a 'Function' or 'Cell'"
    with pytest.raises((AttributeError, RuntimeError), match=ours if mode == "pynative" else theirs):
        mindspore.grad(op)(X)


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        (
            "dx, dweight",
            "gradient gives dweight, but the gradients of the inputs x, w are called dx, dw; did you mean dw?",
        ),
        (
            "dx, grad_w",
            "gradient gives grad_w, but the gradients of the inputs x, w are called dx, dw; did you mean dw?",
        ),
        ("gx, gw", "gradient gives gx, gw, but the gradients of the inputs x, w are called dx, dw; did you mean dx?"),
        (
            "dx, partial",
            "gradient gives partial, but the gradients of the inputs x, w are called dx, dw; "
            "scratch follows a semicolon",
        ),
    ],
)
def test_gradient_of_no_input(library, gives, message):
    backward = custom_op(library.TwoGradients, f"x, w, dy -> {gives}")
    with pytest.raises(ValueError, match=f"^calls_test: {re.escape(message)}$"):
        custom_op(library.Difference, "x, w -> y", gradient=backward)


@pytest.mark.parametrize("gives", ["dx; partial(3)", "dw; partial(3)"])
def test_scratch_beside_gradients(mode, library, gives):
    """Inputs without a gradient get zeros, and scratch does not count as a gradient."""
    backward = custom_op(library.TwoGradients, f"x, w, dy -> {gives}")
    net = Net(custom_op(library.Difference, "x, w -> y", gradient=backward))
    dx, dw = ops.grad(net, (0, 1))(X, 2 * X)
    np.testing.assert_array_equal(dx.asnumpy(), 2 * X.asnumpy() if "dx" in gives else 0 * X.asnumpy())
    np.testing.assert_array_equal(dw.asnumpy(), 2 * X.asnumpy() if "dw" in gives else 0 * X.asnumpy())


def only_the_first(x, y, dy):
    return (2 * x * dy + ops.zeros_like(y),)


def both_results(x, out, dout):
    y, z = out
    dy, dz = dout
    return (2 * x * dy + 3 * dz + ops.zeros_like(y + z),)


def test_scratch_is_hidden(mode, library):
    """Neither the value of a call nor the arguments of a gradient function contain scratch."""
    one = Net(custom_op(library.TwoResults, "x(N) -> y(N); z(N), partial(N)", gradient=only_the_first))
    np.testing.assert_array_equal(one(X).asnumpy(), [1, 4, 9])
    np.testing.assert_array_equal(ops.grad(one)(X).asnumpy(), [2, 4, 6])
    two = Net(custom_op(library.TwoResults, "x(N) -> y(N), z(N); partial(N)", gradient=both_results))
    y, z = two(X)
    np.testing.assert_array_equal(y.asnumpy() + z.asnumpy(), [4, 10, 18])
    np.testing.assert_array_equal(ops.grad(two)(X).asnumpy(), [5, 7, 9])


def test_scratch_of_gradients_operator_and_forward(mode, library):
    backward = custom_op(library.TwoResults, "dy -> dx; unused(3), partial(3)")
    net = Net(custom_op(library.TwoResults, "x(N) -> y(N); z(N), partial(N)", gradient=backward))
    np.testing.assert_array_equal(ops.grad(net)(X).asnumpy(), [1, 1, 1])


def test_scratch_beside_infer(mode, library):
    """With `infer`, scratch has its sizes in the signature, too."""
    op = custom_op(library.TwoResults, "x(N) -> y; z(N, dtype=float32), partial(N)", infer=lambda x: x)
    f32, f64 = mindspore.float32, mindspore.float64
    assert op.infer(msops.Spec((3,), f64)) == [msops.Spec((3,), f64), msops.Spec((3,), f32), msops.Spec((3,), f64)]
    np.testing.assert_array_equal(Net(op)(X).asnumpy(), [1, 4, 9])


def test_shapes_that_change(mode, library):
    """An operator works when shapes change, also in MindSpore 2.0, which then asks the C function for sizes even in
    PyNative mode."""
    backward = custom_op(library.SquareBackward, "x(*S), dy(*S) -> dx(*S)")
    gradient = ops.grad(Net(custom_op(library.Square, "x -> y", gradient=backward)))
    for n in (3, 1, 5, 2, 4):
        np.testing.assert_array_equal(gradient(Tensor(np.full(n, 2, np.float32))).asnumpy(), [4] * n)
