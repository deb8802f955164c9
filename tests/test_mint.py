"""Tests that programs that call `mindspore.mint` run on GPU and CPU, in both modes, while MindSpore is patched."""

import inspect

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

import msops
from mint_cases import cases
from msops.patch.mint.linear import composed_cdist
from msops.testing.checks import as_tuple
from operator_test import WithGradients


def parameters(is_graph):
    """Returns all cases in each of their dtypes. `make test` takes one dtype, and one case of each module in graph
    mode, which takes a second to compile one."""
    found, before = [], set()
    for case in cases():
        module = case.program.__module__.split(".")[-1]
        for dtype in case.dtypes:
            marks = [pytest.mark.wide] * (dtype != case.dtypes[0] or (is_graph and module in before))
            found.append(pytest.param(case, dtype, id=f"{module} {case.program.__name__} {dtype}", marks=marks))
            before.add(module)
    return found


# A result may be this far off, relative to the largest number.
TOLERANCE = {"float16": 4e-3, "float32": 1e-5, "float64": 1e-10, "int32": 0, "int64": 0, "bool": 0}
STEP = 1e-5  # of differences of a reference in float64


class Program(nn.Cell):
    """Calls a program with Tensors; its other arguments are constants. A class of Cells is made first."""

    def __init__(self, case):
        super().__init__()
        self.program = case.program() if inspect.isclass(case.program) else case.program

    def construct(self, *inputs):
        return self.program(*inputs)


@pytest.fixture(scope="module", autouse=True)
def patched():
    with msops.patch_mindspore():
        yield


def cast(value, dtype):
    return value.astype(dtype) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value


def is_floating(value):
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def close(got, want, tolerance, what):
    assert got.shape == np.shape(want), what
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, want, what)
        return
    finite = np.abs(want)[np.isfinite(want)]
    np.testing.assert_allclose(got, want, tolerance, tolerance * max(1, finite.max(initial=0)), err_msg=what)


@pytest.mark.parametrize(("case", "dtype"), parameters(is_graph=False))
def test_program(case, dtype, device_target):
    if device_target == "GPU" and dtype == "float64" and case.program.__name__ == "quantile":
        pytest.skip("MindSpore sorts no float64 on a GPU")
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    check_program(case, dtype)


@pytest.mark.parametrize(("case", "dtype"), parameters(is_graph=True))
def test_program_in_graph_mode(case, dtype):
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    check_program(case, dtype)


def check_program(case, dtype):
    arrays = [cast(value, dtype) for value in case.inputs]
    exact = [cast(value, np.float64) for value in arrays]
    net, want = Program(case), [np.asarray(each) for each in as_tuple(case.reference(*exact))]
    variables = [i for i, value in enumerate(arrays) if case.differentiable and is_floating(value)]
    rng = np.random.default_rng(0)
    douts = [np.asarray(rng.standard_normal(out.shape) * is_floating(out), cast(out, dtype).dtype) for out in want]
    if variables:
        results = WithGradients(net, len(arrays))(*map(Tensor, [*arrays, *douts]))
        outs, gradients = results[: len(want)], results[len(want) :]
    else:
        outs, gradients = as_tuple(net(*map(Tensor, arrays))), ()
    assert len(outs) == len(want)
    for got, expected in zip(outs, want):
        close(got.asnumpy(), expected, TOLERANCE[dtype], "the result")
    for i in variables:
        weights = [dout.astype(np.float64) for dout in douts]
        check_gradient(case, exact, i, gradients[i].asnumpy(), weights, TOLERANCE[dtype])


def check_gradient(case, exact, i, gradient, douts, tolerance):
    """Compares products of a gradient and some directions with differences of the reference along these."""
    assert gradient.shape == exact[i].shape
    rng = np.random.default_rng(1)
    for _ in range(3):
        direction = rng.standard_normal(exact[i].shape)
        ends = []
        for step in (STEP, -STEP):
            moved = [x + step * direction if j == i else x for j, x in enumerate(exact)]
            ends.append(as_tuple(case.reference(*moved)))
        terms = [
            dout * (np.asarray(after, np.float64) - before) / (2 * STEP)
            for dout, after, before in zip(douts, *ends)
            if np.asarray(after).dtype.kind == "f"
        ]
        want, size = sum(map(np.sum, terms)), sum(np.abs(term).sum() for term in terms)
        got = np.sum(gradient.astype(np.float64) * direction)
        assert abs(got - want) <= 2 * tolerance * max(1, size) + 1e-6 * size, f"the gradient of input {i}"


@mindspore.jit
def compiled_bincount(x):
    return mint.bincount(x)


def test_sizes_that_depend_on_values():
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    x, weights = np.array([3, 1, 1, 0]), np.arange(4.0, dtype=np.float32)
    np.testing.assert_array_equal(mint.bincount(Tensor(x), minlength=6).asnumpy(), np.bincount(x, minlength=6))
    got = mint.bincount(Tensor(x), Tensor(weights))
    np.testing.assert_array_equal(got.asnumpy(), np.bincount(x, weights))
    with pytest.raises(NotImplementedError, match="bincount: the result's size depends on values"):
        compiled_bincount(Tensor(x))


@pytest.mark.parametrize(
    ("equation", "words"),
    [
        ("ij,jk", "has 2 terms for 1 tensors"),
        ("ijk", "does not fit a tensor of 2 axes"),
        ("ij->iij", "must each stand once"),
        ("ij->k", "must each stand once, and in a term"),
        ("i1", "the equation has letters"),
        ("ii", "axes of one letter have sizes 3 and 4"),
    ],
)
def test_wrong_einsum(equation, words):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    with pytest.raises(ValueError, match=f"mint.einsum: .*{words}"):
        mint.einsum(equation, Tensor(np.ones((3, 4), np.float32)))


def test_unique_slices():
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    x = np.array([[1, 2], [0, 5], [1, 2]])
    found, places = mint.unique(Tensor(x), return_inverse=True, dim=0)
    want, where = np.unique(x, return_inverse=True, axis=0)
    np.testing.assert_array_equal(found.asnumpy(), want)
    np.testing.assert_array_equal(places.asnumpy(), where.reshape(-1))


def test_equal():
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    x = Tensor(np.arange(3.0))
    assert mint.equal(x, x + 0)
    assert not mint.equal(x, x + 1)
    assert not mint.equal(x, x[:2])


def test_numbers():
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    x = Tensor(np.arange(3.0))
    assert mint.allclose(x, x + 1e-9)
    assert not mint.allclose(x, x + 1)
    assert mint.item(x[2]) == 2


class Distances(nn.Cell):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def construct(self, x, y):
        return composed_cdist(x, y, self.p)


@pytest.mark.parametrize("p", [0, 0.5, 1, 1.5, 2, 3, np.inf])
def test_composed_distances(mode, p):
    """Graph mode takes these on a GPU. A distance of equal rows has no gradient."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((3, 4)), rng.standard_normal((5, 4))
    if p != 0.5:  # whose distances grow ever faster from there
        y[0] = x[0]
    net = Distances(float(p))

    def distances(x):
        return np.linalg.norm(x[:, None] - y, p, axis=-1)

    np.testing.assert_allclose(net(Tensor(x), Tensor(y)).asnumpy(), distances(x), rtol=1e-6)
    gradient = mindspore.grad(net)(Tensor(x), Tensor(y)).asnumpy()
    for place in np.ndindex(*x.shape):
        shift = np.zeros_like(x)
        shift[place] = STEP
        slope = (distances(x + shift) - distances(x - shift)) / (2 * STEP)
        np.testing.assert_allclose(gradient[place], slope.sum(), rtol=1e-5, atol=1e-5)


def test_composed_distances_of_equal_coordinates(mode):
    """Below p = 1, the slope at an equal coordinate is infinite: it has no gradient, as in MindSpore's own cdist."""
    x, y = np.array([[1.0, 2.0]]), np.array([[1.0, 6.0]])
    gradient = mindspore.grad(Distances(0.5))(Tensor(x), Tensor(y)).asnumpy()
    np.testing.assert_allclose(gradient, [[0, -1]], rtol=1e-6)
    with pytest.raises(ValueError, match=r"mint.cdist: p must be at least 0, got -1"):
        Distances(-1.0)(Tensor(x), Tensor(y))


class Numbers(nn.Cell):
    def __init__(self, *settings):
        super().__init__()
        self.settings = settings

    def construct(self, x):
        return mint.nan_to_num(x, *self.settings)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64", "uint8", "bool"])
def test_nan_to_num(mode, dtype):
    """By default, infinities become the greatest numbers of the dtype; whole numbers stay."""
    is_float = dtype.startswith("float")
    x = np.array([1, np.inf, -np.inf, np.nan, 2.5] if is_float else [0, 1, 2, 5], dtype)
    got = Numbers()(Tensor(x)).asnumpy()
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, np.nan_to_num(x))
    got = Numbers(0.1, 1e4, None)(Tensor(x)).asnumpy()
    np.testing.assert_array_equal(got, np.nan_to_num(x, nan=0.1, posinf=1e4))


@pytest.mark.parametrize("dtype", [mindspore.bfloat16, mindspore.complex64])
def test_nan_to_num_of_other_dtypes(mode, dtype, device_target):
    if device_target == "GPU" and dtype == mindspore.bfloat16:
        pytest.skip("a GPU cannot make such a Tensor")
    with pytest.raises(TypeError, match=r"mint.nan_to_num: the input must be whole, float16, float32 or float64, got"):
        Numbers()(ops.cast(Tensor([1.0, 2.0]), dtype))


class Resized(nn.Cell):
    def construct(self, x):
        return mint.nn.functional.interpolate(x, size=5, mode="linear")


def test_interpolate_refuses_whole_numbers(mode):
    """Weights between whole numbers would be cut to 0."""
    with pytest.raises(TypeError, match=r"interpolate: x must be of a floating dtype, got Int32"):
        Resized()(Tensor([[[1, 2, 3]]], mindspore.int32))
