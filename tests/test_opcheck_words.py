"""Tests what opcheck says of the mistakes that authors make first: what is wrong, once, and which line mends it."""

import re
from pathlib import Path

import numpy as np
import pytest
from mindspore import float64

import msops
from card import random
from msops.testing import OpCheckError, advice, opcheck, report
from msops.testing.entries import Sizes, check_entries
from msops.testing.subject import describe
from operator_test import PLAIN

MAP = "x(N, C) -> y(N, C)"
X = random(3, np.float64, (5, 7))


@pytest.fixture(scope="module")
def library():
    return msops.load("opcheck_careless", Path(__file__).with_name("opcheck") / "careless.cu", cxx_flags=PLAIN)


def squared(x):
    return x * x


def check_quickly(operator, inputs, reference):
    """Makes opcheck's checks of C entries alone, and returns the report."""
    subject = describe(operator, reference, True, None, (), inputs)
    check_entries(subject, [inputs], Sizes.of(operator, subject.taken(inputs, subject.dtypes[-1])))
    return subject.report


def test_one_finding_for_all_sizes(library):
    found = check_quickly(msops.custom_op(library.PastTheEnd, MAP), X, squared)
    assert found.failures["bounds"] == [
        "C entry on the CPU, float16: PastTheEnd writes element 35 of y, after its end: it has shape (5, 7)"
    ]
    (line,) = (line for line in str(found).splitlines() if "PastTheEnd" in line)
    assert int(line.split(", and ")[1].removesuffix(" more")) >= 25


def test_size_that_the_entry_refuses(library):
    """A size that the entry alone refuses is said once, with how to declare it, and not tried in MindSpore."""

    def at_least_three(x):
        if x.shape[1] < 3:
            raise ValueError("C must be at least 3")
        return x

    with pytest.raises(OpCheckError) as caught:
        opcheck(msops.custom_op(library.AtLeastThree, MAP, dtypes=(float64,)), X, squared)
    assert caught.value.report.failures == {
        "other sizes": [
            "C entry on the CPU: AtLeastThree refuses sizes that the signature accepts, C = 0; C = 1; all sizes 1 "
            "(C is 0): unless the entry shall take them, the `infer` of custom_op must raise a ValueError for them"
        ]
    }
    declared = msops.custom_op(library.AtLeastThree, "x(N, C) -> y", infer=at_least_three, dtypes=(float64,))
    assert not check_quickly(declared, X, squared).failures


def test_missing_check_of_shapes(library):
    (line,) = check_quickly(msops.custom_op(library.NoShape, MAP), X, squared).failures["wrong calls"]
    assert line.endswith("NoShape accepts x (4, 7) beside y (5, 7): call.require_same_shape(y, x) is missing")


@pytest.mark.parametrize(
    ("signature", "i", "right", "wrong", "lacks"),
    [
        ("x -> y", 0, (3,), (2,), "call.require_same_shape(y, x)"),
        ("x(N, C), w(C) -> y(N, C)", 1, (13,), (12,), "call.require_shape(w, {x.dim(1)})"),
        ("x(*S, K) -> y(*S)", 1, (3, 4), (3, 3), "call.require_shape_of_rows(y, x)"),
        ("x(N, L) -> y(N, L // 2)", 0, (3, 4), (3, 3), "call.require_shape(y, {x.dim(0), x.dim(1) / 2})"),
        ("x(N, 3) -> y(N, 2)", 0, (5, 3), (5, 2), "call.require_shape(x, {x.dim(0), 3})"),
        ("x(N, 3) -> y(N)", 1, (5,), (5, 1), 'the rank in call.tensor("y", 1)'),
        ("x, w -> y", 1, (3,), (2,), "a check of w's shape"),
    ],
)
def test_advice_of_shapes(library, signature, i, right, wrong, lacks):
    assert advice.of_shape(msops.custom_op(library.Square, signature), i, right, wrong)[1] == lacks


def test_race_comes_first(library):
    """Where two equal calls differ, all else that is wrong may follow from it."""
    found = check_quickly(msops.custom_op(library.Races, MAP, dtypes=(float64,)), X, squared)
    lines = str(found).splitlines()
    assert {"repeated runs", "other sizes"} <= set(found.failures)
    assert lines[2].endswith("repeated runs      FAILED")
    assert "a race, or state that a call leaves: two equal calls of Races differ: y[2, 3]: " in lines[3]


def test_indices(library):
    """Says which dtype of its own a tensor needs, in the signature or in the entry; the reference gets that dtype."""
    take, common = "x(M), idx(N, dtype=int32) -> y(N)", "x(M), idx(N) -> y(N)"
    inputs = [np.linspace(-1, 1, 5), np.array([0, 4, 0, 2], np.int32)]

    def reference(x, idx):
        return x[idx]

    with pytest.raises(TypeError, match=r"idx is int32, which the signature must say: idx\(N, dtype=int32\)"):
        opcheck(msops.custom_op(library.Take, common), inputs, reference)
    (line,) = check_quickly(msops.custom_op(library.TakeCommon, take), inputs, reference).failures["shapes and dtypes"]
    assert "TakeCommon: idx is int32, the others are float16" in line
    assert line.endswith('by the signature, it is taken by call.tensor_of("int32", "idx")')
    assert not check_quickly(msops.custom_op(library.Take, take), [X[0][0], np.array([0.0, 2.0])], reference).failures


def test_gradient_that_drops_a_nan(library):
    """The finding names the gradient's entry, and a reference that drops the NaN, too, argues with it."""
    gradient = msops.custom_op(library.DropsNan, "x(N, C), dy(N, C) -> dx(N, C)")
    square = msops.custom_op(library.Square, MAP, gradient=gradient, dtypes=(float64,))
    (line,) = check_quickly(square, X, squared).failures["special values"]
    assert "DropsNan with x[0, 0] = nan: no result is nan, though results depend on it" in line
    found = check_quickly(square, X, lambda x: np.where(np.isnan(x), 0, x * x)).failures["special values"]
    assert not any("DropsNan" in line for line in found)  # but Square keeps it


def test_sign_of_life(library, monkeypatch, capfd):
    monkeypatch.setattr(report, "LIFE", 0)
    check_quickly(msops.custom_op(library.Square, MAP, dtypes=(float64,)), X, squared)
    assert "opcheck of opcheck_careless: bounds, C entry on the CPU, float64, C = 1 (0 s)\n" in capfd.readouterr().err


def test_whole_packs(library):
    found = check_quickly(msops.custom_op(library.WrongInColumn15, MAP, dtypes=(float64,)), X, squared).failures
    assert re.search(r"N = 3, C = 128: y\[\d, 15\]: expected ", found["other sizes"][0])


@pytest.mark.wide
def test_slow_references(library):
    """What a slow reference would take too long for is skipped, and the report says so."""

    def rows_by_themselves(x):
        return np.array([[v * sum(row, 0 * v) for v in row] for row in x], x.dtype).reshape(x.shape)

    report = opcheck(msops.custom_op(library.AllPairs, MAP), X, rows_by_themselves)
    assert not report.failures
    assert report.skipped["large sizes"] == "the reference is too slow for some"
