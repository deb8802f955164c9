import numpy as np
import pytest

import msops
from card import chain, length, lengths, zeros
from msops.operators.rms_norm import make_forward
from msops.testing.entry import prepare_operator
from operator_test import OperatorTest


def scale_of(x, eps):
    """Returns 1 / sqrt(mean(x^2) + eps) of each row."""
    mean = (x * x).sum(-1, keepdims=True) / x.dtype.type(max(1, x.shape[-1]))
    return 1 / np.sqrt(mean + x.dtype.type(eps))


def factor_of(weight, x, offset):
    """Returns weight + offset in the dtype of x, or 1 if there is no weight."""
    return x.dtype.type(1) if weight is None else weight.astype(x.dtype) + x.dtype.type(offset)


def rms_norm(x, weight=None, eps=1e-6, offset=0.0, casting="llama"):
    return (x * scale_of(x, eps) * factor_of(weight, x, offset),)


def case(shape, has_weight=True, **settings):
    return [shape, shape[-1:]][: 1 + has_weight], settings


class TestRmsNorm(OperatorTest):
    function = msops.rms_norm
    formulas = (rms_norm,)
    cases = {
        "small": case((3, 4, 7), eps=0.1, offset=0.5),
        "no weight": case((3, 7), False, eps=0.1),
        "no rows": case((0, 5)),
        "no columns": case((3, 0)),
        "one": case((1, 1)),
        "one row": case((9,), casting="gemma"),
        "gemma": case((70, 13), eps=1e-3, offset=1.0, casting="gemma"),
        "none": case((5, 70), casting="none"),
        "long rows": case((2, 70_001)),
        "large": case((4001, 129)),
    }
    small = "small"
    half_in_float32 = False  # the formula rounds on the way
    wrong = (
        (zeros((2, 3), 3, dtype=np.int32), {}, TypeError, "rms_norm: x must be float16, float32 or float64, got int32"),
        ([1.5], {}, TypeError, "rms_norm: x must be a Tensor, got float"),
        ([*zeros((2, 3)), 2.0], {}, TypeError, "rms_norm: weight must be a Tensor, got float"),
        ([*zeros((2, 3)), *zeros(3, dtype=np.float16)], {}, TypeError, "rms_norm: weight must be float32, got float16"),
        (zeros((2, 3), 2), {}, ValueError, "rms_norm: weight must have shape (C,) = (3,), got (2,)"),
        (zeros(()), {}, ValueError, "rms_norm: x must have shape (*S, C), got ()"),
        (zeros((2, 3)), dict(eps=-1.0), ValueError, "rms_norm: eps must be finite and at least 0, got -1.0"),
        (zeros((2, 3)), dict(eps="1"), TypeError, "rms_norm: eps must be a number, got str"),
        (zeros((2, 3)), dict(offset=float("inf")), ValueError, "rms_norm: offset must be finite, got inf"),
        (zeros((2, 3)), dict(casting="LLAMA"), ValueError, "casting must be one of llama, gemma, none, got 'LLAMA'"),
    )

    def operators(self, shapes=((1,), (1,)), eps=1e-6, offset=0.0, casting="llama"):
        forward = make_forward("", eps, offset, casting)
        return chain(forward if len(shapes) > 1 else forward.without("weight"))

    def units(self, eps=1e-6, offset=0.0, casting="llama"):
        """The normalized row, the factor and their product are rounded; "none" also rounds the mean, the mean plus eps,
        and the scale."""
        return {"gemma": 0.75, "llama": 2.75, "none": 6}[casting]

    def random_case(self, random):
        shape = (*lengths(random), length(random))
        settings = dict(eps=random.choice((1e-6, 0.1)), offset=random.choice((0.0, 1.0)))
        return case(shape, random.random() < 0.7, casting=random.choice(("llama", "gemma", "none")), **settings)


def stepwise(x, weight, eps, offset, casting):
    """Computes with NumPy as casting says. A float32 number multiplied by a float16 number gives float32."""
    kind = x.dtype.type
    mean = (x.astype(np.float32) ** 2).sum(-1, keepdims=True) / np.float32(x.shape[-1])
    if casting == "none":
        r = (1 / np.sqrt((mean.astype(kind) + kind(eps)).astype(np.float32))).astype(kind)
        return x * r * (weight.astype(kind) + kind(offset))
    r = 1 / np.sqrt(mean + np.float32(eps))
    wide = x.astype(np.float32) * r
    if casting == "llama":
        return wide.astype(kind) * (weight.astype(kind) + kind(offset))
    return (wide * (weight.astype(np.float32) + np.float32(offset))).astype(kind)


@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
@pytest.mark.parametrize("dtypes", [("float16", "float16"), ("float16", "float32"), ("float32", "float32")], ids=str)
@pytest.mark.parametrize("offset", [0.0, 0.3])
def test_castings_bit_by_bit(casting, dtypes, offset):
    """Elements are multiples of 1/4, so that the sum of squares is exact in any order."""
    rng = np.random.default_rng(0)
    x = (rng.integers(-40, 41, (300, 257)) / 4).astype(dtypes[0])
    x[:3] *= np.asarray([[2**-5], [2**-8], [2**-14]], dtypes[0])
    weight, y = rng.standard_normal(257).astype(dtypes[1]), np.empty_like(x)
    assert prepare_operator(make_forward("", 1e-3, offset, casting), [x, weight, y])() == 0
    np.testing.assert_array_equal(y, stepwise(x, weight, 1e-3, offset, casting))
