"""Tests MSOPS_SCRATCH, by which a library says how much scratch its entries need."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from msops import Spec, compat, custom_op
from operator_test import Net, load_kernels

SIGNATURE = "x(N, C), bias(C)? -> y(N, C); first, sized(5), second(..., dtype=int32), third(..., dtype=common)"


@pytest.fixture(scope="module")
def library():
    return load_kernels("scratch")


def test_sizes_from_shapes_dtypes_and_attributes(mode, library):
    """The library knows sizes, dtypes, attributes, and which tensors are absent. Scratch with sizes stands between."""
    op = custom_op(library.Doubled, SIGNATURE, k=7, f=3.5)
    for dtype, sums, size in ((mindspore.float16, mindspore.float32, 4), (mindspore.float64, mindspore.float64, 8)):
        given = Spec((6, 2), dtype), Spec((2,), dtype)
        for operator, inputs, elements in ((op, given, 2), (op.without("bias"), given[:1], 0)):
            assert operator.infer(*inputs) == [
                *(given[0], Spec((4, 7), sums), Spec((5,), sums), Spec((), mindspore.int32)),
                Spec((elements, size, 3), dtype),
            ]
    x = np.ones((6, 2), np.float32)
    net = Net(op)
    np.testing.assert_array_equal(net(Tensor(x)).asnumpy(), 2 * x)
    np.testing.assert_array_equal(net(Tensor(x), Tensor(x[0])).asnumpy(), 2 * x)


@pytest.mark.skipif(compat.VERSION < (2, 7), reason="graph mode has no open sizes")
@pytest.mark.parametrize("shape", [(None, 2), (None, None)])
def test_open_sizes(library, shape):
    """The library is asked again when the graph runs."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    net = Net(custom_op(library.Doubled, SIGNATURE, k=7, f=3.5).without("bias"))
    net.set_inputs(Tensor(shape=shape, dtype=mindspore.float32))
    for rows in (1, 6, 3):
        x = np.ones((rows, 2), np.float32)
        np.testing.assert_array_equal(net(Tensor(x)).asnumpy(), 2 * x)


def test_library_without_sizes(library):
    words = (
        r"^scratch_test: first must have sizes in the signature, as in first\(8, C\), or the library must have "
        r"MSOPS_SCRATCH\(Plain\)$"
    )
    for infer in (None, lambda x: x):
        with pytest.raises(ValueError, match=words):
            custom_op(library.Plain, "x -> y; first", infer=infer)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (0, r"MSOPS_SCRATCH\(Wrong\) must return 1 shapes \(first\), got 2"),
        (1, r"MSOPS_SCRATCH\(Wrong\) must return sizes of at least 0 for first, got \(3, -1\)"),
        (2, r"x must have 9 axes \(MSOPS_SCRATCH\(Wrong\)\)"),
        (3, r"parameter 2 \(y\) is missing, got 1 \(MSOPS_SCRATCH\(Wrong\)\)"),
        (4, r"scratch has more than 256 sizes \(MSOPS_SCRATCH\(Wrong\)\)"),
        (9, r"attribute how is 9, expected 0 to 4 \(MSOPS_SCRATCH\(Wrong\)\)"),
    ],
)
def test_wrong_sizes(library, how, words):
    with pytest.raises(ValueError, match=f"^scratch_test: {words}$"):
        custom_op(library.Wrong, "x -> y; first", how=how).infer(Spec((2, 3), mindspore.float32))


def test_sizes_of_no_entry():
    """The name of an entry that does not exist is the compiler's error, not one of the first call."""
    source = '#include "common/scratch.h"\nMSOPS_ENTRY(Right) { return 0; }\nMSOPS_SCRATCH(Rihgt) { return {}; }\n'
    with pytest.raises(msops.CompileError, match="Rihgt_checked"):
        msops.load("scratch_of_no_entry", source)
