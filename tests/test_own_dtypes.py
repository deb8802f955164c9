"""Tests parameters of a dtype of their own, optional parameters, and sizes from attributes: calls that work through
MindSpore, and calls that are refused."""

import re

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from msops import Signature, Spec, custom_op
from msops.core.gradients import make_bprop
from msops.testing import derived, opcheck
from msops.testing.entry import Status, call
from operator_test import Net, load_kernels

X = np.array([1, 2, 3, 4], np.float32)
F16, F32, F64 = mindspore.float16, mindspore.float32, mindspore.float64
I32, I64, BOOL = mindspore.int32, mindspore.int64, mindspore.bool_


@pytest.fixture(scope="module")
def library():
    if mindspore.get_context("device_target") != "CPU":
        pytest.skip("these entries read memory on the CPU")
    return load_kernels("own_dtypes")


def take_gradient(x, idx, mask, y, dy):
    kept = dy if mask is None else dy * (1 - ops.cast(mask, dy.dtype))
    dx = ops.tensor_scatter_elements(ops.zeros_like(x), idx, kept, 0, "add")
    return dx, ops.zeros_like(idx), None if mask is None else ops.zeros_like(mask)


def make_take(library, gradient=None):
    signature = "x(N), idx(M, dtype=index), mask(M, dtype=bool)? -> y(M)"
    return custom_op(library.Take, signature, gradient=gradient)


def make_scale(library):
    backward = custom_op(
        library.ScaleBackward,
        "x(N, C), weight(C, dtype=float32|common), dy(N, C) -> dx(N, C), dweight(C, dtype=weight), dbias(C)?",
    )
    signature = "x(N, C), weight(C, dtype=float32|common), bias(C)? -> y(N, C)"
    return custom_op(library.Scale, signature, gradient=backward)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_indices_and_masks(mode, library, kind):
    take = make_take(library, gradient=take_gradient)
    idx, mask = Tensor(np.array([3, 0, 3], kind)), Tensor([False, True, False])
    for inputs, y, dx in (
        ((idx,), [4, 1, 4], [1, 0, 0, 2]),
        ((idx, None), [4, 1, 4], [1, 0, 0, 2]),
        ((idx, mask), [4, 0, 4], [0, 0, 0, 2]),
    ):
        net = Net(take)
        np.testing.assert_array_equal(net(Tensor(X), *inputs).asnumpy(), y)
        np.testing.assert_array_equal(ops.grad(net)(Tensor(X), *inputs).asnumpy(), dx)


class Scaled(nn.Cell):
    """Takes a bias or None, as the package's Cells do."""

    def __init__(self, scale, weight, bias):
        super().__init__()
        self.scale, self.weight = scale, mindspore.Parameter(weight, name="weight")
        self.bias = None if bias is None else mindspore.Parameter(bias, name="bias")

    def construct(self, x):
        return self.scale(x, self.weight, self.bias)


@pytest.mark.parametrize("has_bias", [False, True], ids=["without bias", "bias"])
@pytest.mark.parametrize("own", ["float16", "float32"])
def test_weight_of_its_own_dtype(mode, library, own, has_bias):
    x, weight, bias = np.float16([[1, 2], [3, 4]]), np.array([2, 3], own), np.float16([10, 20])
    net = Scaled(make_scale(library), Tensor(weight), Tensor(bias) if has_bias else None)
    y = net(Tensor(x)).asnumpy()
    assert y.dtype == np.float16
    np.testing.assert_array_equal(y, x * weight.astype(np.float16) + has_bias * bias)
    dx, gradients = ops.grad(net, 0, net.trainable_params())(Tensor(x))
    np.testing.assert_array_equal(dx.asnumpy(), [[2, 3], [2, 3]])
    assert [str(gradient.dtype).lower() for gradient in gradients] == [own, "float16"][: 1 + has_bias]
    for gradient, want in zip(gradients, ([4, 6], [2, 2])):
        np.testing.assert_array_equal(gradient.asnumpy(), want)


def test_sizes_from_attributes(mode, library):
    first = custom_op(library.First, "x(B, N) -> idx(B, npoint, dtype=int32)", npoint=3)
    idx = Net(first)(Tensor(np.ones((2, 5), np.float32)))
    np.testing.assert_array_equal(idx.asnumpy(), [[0, 1, 2]] * 2)
    assert idx.dtype == I32


def test_operators_without_optional_tensors(library):
    scale = make_scale(library)
    plain = scale.without("bias")
    assert plain is scale.without("bias")
    assert plain.without("bias") is plain
    assert (scale.attributes, plain.attributes) == ({"has_bias": 1}, {"has_bias": 0})
    assert [operator.names()[0] for operator in (scale, plain)] == [["x", "weight", "bias"], ["x", "weight"]]
    assert plain.infer(Spec((2, 3), F16), Spec((3,), F32)) == [Spec((2, 3), F16)]
    of_plain = plain.gradient
    assert of_plain is scale.gradient.without("dbias")
    assert of_plain.infer(*(Spec(shape, F16) for shape in ((2, 3), (3,), (2, 3)))) == [
        Spec((2, 3), F16),
        Spec((3,), F16),
    ]
    with pytest.raises(ValueError, match=r"weight must be optional, as in bias\(K\)\?, to be absent"):
        scale.without("weight")


def test_gradients_of_inputs_after_an_absent_one(library):
    def gradient(x, weight, bias, y, dy):
        return dy, None, 7

    scale = custom_op(library.Scale, "x(N, C), weight(C)?, bias(C)? -> y(N, C)", gradient=gradient)
    assert make_bprop(scale.without("weight"))(1, 2, 3, 5) == (5, 7)


def test_optional_inputs_by_name(library):
    take = make_take(library)
    idx, mask = Tensor([1, 2]), Tensor([True, False])
    for inputs, named in (((), dict(idx=idx, mask=mask)), ((idx,), dict(mask=mask)), ((idx,), {})):
        want = [0 if "mask" in named else 2, 3]
        np.testing.assert_array_equal(take(Tensor(X), *inputs, **named).asnumpy(), want)
    with pytest.raises(TypeError, match="takes the inputs x, idx, mask, got 1 without and mask by name"):
        take(Tensor(X), mask=mask)


@pytest.mark.parametrize("inputs", [(Tensor(X),), (None, Tensor([1])), (Tensor(X), Tensor([1]), None, None)])
def test_inputs_that_must_be_there(mode, library, inputs):
    with pytest.raises(TypeError, match=re.escape("own_dtypes_test: takes the inputs x, idx, mask?, got ")):
        Net(make_take(library))(*inputs)


def test_infer_gets_none_for_absent_inputs(mode, library):
    def infer(x, idx, mask):
        assert mask is None or mask.dtype == BOOL
        return x._replace(shape=idx.shape)

    take = custom_op(library.Take, "x(N), idx(M, dtype=index), mask(M, dtype=bool)? -> y", infer=infer)
    for mask in (None, Tensor([False])):
        assert Net(take)(Tensor(X), Tensor([2]), mask).asnumpy() == [3]


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [
        ("i(N, dtype=index), x(N) -> y, j(N, dtype=i)", [I32, F64], [F64, I32]),
        ("i(N, dtype=index), x(N) -> y, j(N, dtype=i)", [I64, F16], [F16, I64]),
        ("w(N, dtype=float32|common), x(N) -> y, s(N, dtype=w)", [F32, F16], [F16, F32]),
        ("w(N, dtype=float32|common), x(N) -> y, s(N, dtype=w)", [F64, F64], [F64, F64]),
        ("x(N), m(N, dtype=bool) -> y(N, dtype=bool)", [F32, BOOL], [BOOL]),
        ("x(N), v(N, dtype = accumulator | common) -> y(N, dtype=common)", [F16, F32], [F16]),
        ("x(N), v(N, dtype=float32|common), u(N, dtype=v) -> y", [F16, F32, F32], [F16]),
    ],
)
def test_dtypes(text, inputs, outputs):
    assert [spec.dtype for spec in Signature(text).infer("op", *(Spec((4,), dtype) for dtype in inputs))] == outputs


@pytest.mark.parametrize(
    ("text", "inputs", "message"),
    [
        ("x(N), i(N, dtype=index) -> y", [F32, F32], "op: i must be int32 or int64, got float32"),
        ("x(N), m(N, dtype=bool) -> y", [F32, I32], "op: m must be bool, got int32"),
        ("x(N), w(N, dtype=float32|common) -> y", [F16, F64], "op: w must be float32 or float16, got float64"),
        ("x(N), w(N, dtype=float32|common) -> y", [F32, F16], "op: w must be float32, got float16"),
        ("w(N, dtype=float32|common), x(N), v(N, dtype=w) -> y", [F32, F16, F16], "op: v must be float32, got float16"),
    ],
)
def test_dtypes_that_do_not_fit(text, inputs, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        Signature(text).infer("op", *(Spec((4,), dtype) for dtype in inputs))


@pytest.mark.parametrize(
    ("entry", "dtypes", "attributes", "status"),
    [
        ("Take", ["float32", "int32", "float32"], {"has_mask": 0}, Status.OK),
        ("Take", ["float32", "int64", "float32"], {"has_mask": 0}, Status.OK),
        ("Take", ["float32", "int64", "bool", "float32"], {"has_mask": 1}, Status.OK),
        ("Take", ["float32", "int16", "float32"], {"has_mask": 0}, Status.BAD_DTYPE),
        ("Take", ["float32", "int64", "int8", "float32"], {"has_mask": 1}, Status.BAD_DTYPE),
        ("Take", ["float32", "int64", "float32"], {"has_mask": 1}, Status.BAD_PARAMETER_COUNT),
        ("Take", ["float32", "int64", "bool", "float32"], {"has_mask": 0}, Status.BAD_PARAMETER_COUNT),
        ("Take", ["float32", "int64", "float32"], {}, Status.BAD_ATTRIBUTE),
        ("Take", ["float32", "int64", "float32"], {"has_mask": 2}, Status.BAD_ATTRIBUTE),
        ("ScaleRow", ["float16", "float32", "float16"], {"has_bias": 0}, Status.OK),
        ("ScaleRow", ["float16", "float16", "float16"], {"has_bias": 0}, Status.OK),
        ("ScaleRow", ["float16", "float64", "float16"], {"has_bias": 0}, Status.BAD_DTYPE),
        ("ScaleRow", ["float64", "float16", "float64"], {"has_bias": 0}, Status.BAD_DTYPE),
    ],
)
def test_entries_check_dtypes(library, entry, dtypes, attributes, status):
    arrays = [np.zeros(1, dtype) for dtype in dtypes]
    if entry == "ScaleRow":
        arrays = [arrays[0][None], arrays[1], arrays[2][None]]
    assert call(getattr(library, entry.replace("Row", "")), arrays, attributes) == status


@pytest.mark.parametrize("dtypes", [["float32", "float32"], ["float32"] * 4, ["float32"]], ids=len)
def test_entries_tell_that_the_number_of_parameters_is_wrong(library, capfd, dtypes):
    """A parameter that is missing or too many makes an entry take one for another, whose dtype then seems wrong."""
    arrays = [np.zeros(1, dtype) for dtype in dtypes]
    assert call(library.Take, arrays, {"has_mask": 0}) == Status.BAD_PARAMETER_COUNT
    wanted = {1: "parameter 2 (idx) is missing, got 1"}.get(len(dtypes), f"takes 3 parameters, got {len(dtypes)}")
    assert capfd.readouterr().err == f"msops: Take: {wanted}\n"


@pytest.mark.wide
def test_sound(library, monkeypatch):
    """opcheck takes indices, masks and optional inputs."""
    monkeypatch.setattr(derived, "LARGE", 2**14)

    def reference(x, idx, mask=None):
        return x[idx] if mask is None else x[idx] * ~mask

    take, idx, mask = make_take(library), np.array([3, 0, 3]), np.array([False, True, False])
    opcheck(take, [X, idx, mask], reference)
    opcheck(take.without("mask"), [X, idx.astype(np.int32)], reference)
    scale, inputs = make_scale(library), [np.linspace(-1, 1, 6).reshape(2, 3), np.linspace(1, 2, 3), np.ones(3)]
    opcheck(scale, inputs, lambda x, weight, bias: x * weight.astype(x.dtype) + bias)
    opcheck(scale.without("bias"), inputs[:2], lambda x, weight: x * weight.astype(x.dtype))
