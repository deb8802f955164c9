"""Tests opcheck on planted faults, which it finds, and on right kernels, whose rounding it knows."""

from pathlib import Path

import numpy as np
import pytest
from mindspore import float16, float32, float64

import msops
from card import random
from msops.testing import OpCheckError, opcheck
from msops.testing.entries import Sizes, check_entries
from msops.testing.subject import describe

pytestmark = pytest.mark.wide

FOLDER = Path(__file__).with_name("opcheck")
X = random(3, np.float64, (5, 5))


@pytest.fixture(scope="module")
def faults():
    return msops.load("opcheck_faults", FOLDER / "faults.cu", cxx_flags=["-O1"])


@pytest.fixture(scope="module")
def right():
    return msops.load("opcheck_right", FOLDER / "right.cu", cxx_flags=["-O1"])


def check_quickly(operator, inputs, reference):
    """Makes opcheck's checks of C entries, and only if they find nothing the others, which take longer."""
    subject = describe(operator, reference, True, None, (), inputs)
    check_entries(subject, [inputs], Sizes.of(operator, subject.taken(inputs, subject.dtypes[-1])))
    return subject.report.failures


def squared(x):
    return x * x


def summed(x):
    return x.sum(1)


def mean(x):
    return x.mean(1)


MAP, SUM, PRODUCT = "x(N, C) -> y(N, C)", "x(N, C) -> y(N)", "x(*S), w(*S) -> y(*S)"
GRADIENT = "x(N, C), dy(N, C) -> dx(N, C)"
BOTH = random(4, np.float64, (5, 5), (5, 5))

# what the fault is: the entry, its signature, its reference, the check that finds it, a dtype
FORWARD = {
    "stride of rows": ("StrideOfRows", SUM, summed, "other sizes"),
    "offset of 16 bits": ("OffsetOf16Bits", MAP, squared, "large sizes"),
    "unwritten tail": ("NoTail", MAP, squared, "outputs written"),
    "write past the end": ("WritesPastTheEnd", MAP, squared, "bounds"),
    "read past the end": ("ReadsPastTheEnd", MAP, squared, "bounds"),
    "one block of columns": ("OneBlockOnly", MAP, squared, "other sizes"),
    "beyond a million elements": ("BeyondAMillion", MAP, squared, "large sizes"),
    "count of 16 bits": ("CountOf16Bits", SUM, mean, "large sizes"),
    "one column": ("OneColumn", SUM, summed, "other sizes"),
    "size 0": ("DividesByZero", MAP, squared, "no crash"),
    "alignment": ("Aligned", MAP, squared, "no crash"),
    "uninitialized output": ("AddsToTheOutput", MAP, squared, "outputs written"),
    "uninitialized scratch": ("ScratchNotCleared", SUM + "; total(N)", summed, "outputs written"),
    "input changed": ("ChangesTheInput", MAP, squared, "inputs unchanged"),
    "previous call": ("OfThePreviousCall", MAP, squared, "repeated runs"),
    "leak": ("Leaks", MAP, squared, "no leak"),
    "static buffer": ("StaticBuffer", MAP, squared, "threads"),
    "shapes not checked": ("AnyShape", MAP, squared, "wrong calls"),
    "status ignored": ("StatusIgnored", MAP, squared, "wrong calls"),
    "race": ("Race", SUM, summed, "threads"),
    "order by threads": ("OrderByThreads", SUM, summed, "threads"),
    "order by more than two threads": ("OrderByManyThreads", SUM, summed, "threads"),
    "rounding at each step": ("RoundsEachStep", SUM, summed, "other sizes", float16),
    "cast to float": ("ThroughFloat", MAP, squared, "other sizes"),
    "NaN is 0": ("NanIsZero", MAP, squared, "special values"),
    "infinity": ("TanhOfInfinity", MAP, np.tanh, "special values", float32),
    "the largest number for infinity": ("LargestForInfinity", MAP, squared, "special values"),
    "subnormals flushed": ("FlushesSubnormals", MAP, squared, None),
}


@pytest.mark.parametrize("fault", FORWARD)
def test_forward(faults, fault):
    entry, signature, reference, check, dtype = (*FORWARD[fault], float64)[:5]
    found = check_quickly(msops.custom_op(getattr(faults, entry), signature, dtypes=(dtype,)), X, reference)
    assert check in found if check else not found, found


def test_attribute_of_the_first_call(faults):
    operator = msops.custom_op(faults.AttributeOfTheFirstCall, MAP, by=2.0, dtypes=(float64,))
    assert "other attributes" in check_quickly(operator, X, lambda x: 2 * x)


GRADIENTS = {
    "one input": ("Product", PRODUCT, "WrongForW", "x(*S), w(*S), dy(*S) -> dx(*S), dw(*S)", BOTH, "gradient"),
    "float16": ("Square", MAP, "WrongInFloat16", GRADIENT, X, "gradient's dtypes"),
    "rounding at each step": ("Cube", MAP, "RoundsEachStepOfGradient", GRADIENT, X, "gradient's dtypes"),
    "clipped": ("Square", MAP, "Clipped", GRADIENT, X, "special values"),
    "sum over rows": (
        *("Scaled", "x(N, C), w(C) -> y(N, C)", "MeanForW", "x(N, C), w(C), dy(N, C) -> dx(N, C), dw(C)"),
        *([X[0][:2], X[0][0]], "large sizes"),
    ),
}


@pytest.mark.parametrize("fault", GRADIENTS)
def test_gradient(faults, fault):
    entry, signature, backward, of_backward, inputs, check = GRADIENTS[fault]
    gradient = msops.custom_op(getattr(faults, backward), of_backward)
    references = {"Square": squared, "Cube": lambda x: x**3}
    reference = references.get(entry, lambda x, w: x * w)
    dtypes = (float16, float64) if check == "gradient's dtypes" else (float64,)
    operator = msops.custom_op(getattr(faults, entry), signature, gradient=gradient, dtypes=dtypes)
    assert check in check_quickly(operator, inputs, reference)


def test_second_derivative(faults):
    names = "x(N, C), dy(N, C), ddx(N, C) -> dx(N, C), ddy(N, C)"
    twice = msops.custom_op(faults.SquareBackwardTwice, names)
    gradient = msops.custom_op(faults.SquareBackward, GRADIENT, gradient=twice)
    square = msops.custom_op(faults.Square, MAP, gradient=gradient, dtypes=(float64,))
    with pytest.raises(OpCheckError) as caught:
        opcheck(square, X, squared)
    found = caught.value.report.failures
    assert set(found) == {"second derivative"}
    assert found["second derivative"][0].startswith("graph, float64: gradient of x[")


def log_sum_exp(x):
    most = x.max(1, keepdims=True, initial=-np.inf)
    return (most + np.log(np.exp(x - most).sum(1, keepdims=True)))[:, 0]


def softmax(x):
    e = np.exp(x - x.max(1, keepdims=True, initial=-np.inf))
    return e / e.sum(1, keepdims=True)


def rms(x):
    return x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6)


def layer_norm(x):
    x = x - x.mean(1, keepdims=True)
    return x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5)


RIGHT = {
    "Sum": (SUM, summed),
    "Mean": (SUM, mean),
    "Dot": ("x(N, C), z(N, C) -> y(N)", lambda x, z: (x * z).sum(1)),
    "Norm": (SUM, lambda x: np.sqrt((x * x).sum(1))),
    "Norm1": (SUM, lambda x: np.abs(x).sum(1)),
    "Variance": (SUM, lambda x: x.var(1)),
    "LogSumExp": (SUM, log_sum_exp),
    "Softmax": (MAP, softmax),
    "Rms": (MAP, rms),
    "LayerNorm": (MAP, layer_norm),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["Loop", "Pairwise", "Kahan"])
@pytest.mark.parametrize("name", RIGHT)
def test_right(right, name, way):
    """Sums in any order are right, of 1 to 10^6 columns."""
    signature, reference = RIGHT[name]
    inputs = random(5, np.float64, *[(3, 4)] * (2 if "z" in signature else 1))
    assert not check_quickly(msops.custom_op(getattr(right, name + way), signature), inputs, reference)
