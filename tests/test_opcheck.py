"""Tests that sound operators pass opcheck, and that each check finds an operator that is unsound in just that way."""

import re
import tempfile
from pathlib import Path

import mindspore
import numpy as np
import pytest
from mindspore import nn

import msops
import test_sigmoid
from card import random
from msops.operators.add import forward as _add
from msops.operators.sigmoid import forward as _sigmoid
from msops.testing import OpCheckError, derived, opcheck, worker
from msops.testing.checks import check_inputs_unchanged
from msops.testing.derived import odd_inputs, small_inputs
from msops.testing.opcheck import check_refused
from msops.testing.report import CHECKS
from operator_test import PLAIN

SOURCE = Path(__file__).with_name("opcheck") / "unsound.cu"
X = random(3, np.float64, (35,))


@pytest.fixture(scope="module")
def library():
    return msops.load("opcheck_tests", SOURCE, cxx_flags=PLAIN)


@pytest.fixture(autouse=True)
def less_large(monkeypatch):
    """Makes large sizes less large, to be quicker: test_opcheck_faults.py has faults that only these show."""
    monkeypatch.setattr(derived, "LARGE", 2**14)


@pytest.fixture
def square(library):
    """Returns a function that makes an operator from entries that should compute squares."""

    def make(forward="Square", backward="SquareBackward", signature="x(N) -> y(N)", **settings):
        gradient = msops.custom_op(getattr(library, backward), "x, dy -> dx")
        settings = dict(dtypes=(mindspore.float64,), gradient=gradient) | settings
        return msops.custom_op(getattr(library, forward), signature, name="square", **settings)

    return make


def squared(x):
    return x * x


def failures(*arguments, **settings):
    """Returns {check: what it found}."""
    with pytest.raises(OpCheckError) as caught:
        opcheck(*arguments, **settings)
    found = caught.value.report.failures
    for check, lines in found.items():
        assert f"  {check:<18} FAILED" in str(caught.value)
        assert all(f"    {line}" in str(caught.value) for line in lines)
    return found


@pytest.mark.parametrize("changed", [0, 1])
def test_inputs_of_functions_are_unchanged(changed):
    def function(*inputs):
        inputs[changed][2] = 5
        return inputs[0] + inputs[1]

    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    with pytest.raises(AssertionError, match=rf"^input {changed}\[2\]: expected "):
        check_inputs_unchanged(function, [*X, *X])


@pytest.mark.parametrize(
    ("operator", "shapes", "reference"),
    [
        pytest.param(_sigmoid, [(7, 13)], test_sigmoid.sigmoid, marks=pytest.mark.wide),
        (_add, [(3, 1, 4), (5, 1)], lambda x, y: x + y),
        (msops.Sigmoid(), [(7, 13)], test_sigmoid.sigmoid),
        pytest.param(msops.add, [(3, 1, 4), (5, 1)], lambda x, y: x + y, marks=pytest.mark.wide),
    ],
    ids=["sigmoid", "add", "Cell", "function"],
)
def test_sound(operator, shapes, reference):
    report = opcheck(operator, random(1, np.float64, *shapes), reference)
    assert report.made | set(report.skipped) == set(CHECKS)
    assert report.failures == {}
    if isinstance(operator, msops.Operator):
        without = {"second derivative"} if operator is _add else set()
        assert set(report.skipped) == {"other attributes"} | without


@pytest.mark.wide
def test_sound_with_attribute(square):
    operators = [square("ByAttribute", gradient=None, by=by) for by in (2.5, 3.0)]
    references = [lambda x: 2.5 * x * x, lambda x: 3 * x * x]
    report = opcheck(operators[0], X, references[0], other=(operators[1], references[1]))
    assert set(report.skipped) == {"gradient", "gradient's dtypes", "second derivative"}
    assert report.skipped["gradient"] == report.skipped["gradient's dtypes"] == "there is no gradient"


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [mindspore.float16, mindspore.float32], ids=str)
def test_gradient_without_float64(square, dtype):
    """Without float64, the gradient is held to finite differences of the reference."""
    report = opcheck(square(dtypes=(dtype,)), X, squared)
    assert report.skipped["gradient's dtypes"] == "the operator takes no float64"
    found = failures(square("Square", "HalfTheGradient", "x -> y", dtypes=(dtype,)), X, squared)
    assert set(found) == {"gradient", "other sizes"}
    assert f"graph, {str(dtype).lower()}: gradient of x[" in found["gradient"][0]
    assert {line.split(", ")[0] for line in found["other sizes"]} == {"graph", "pynative"}
    report = opcheck(square(dtypes=(dtype,)), X)
    assert report.skipped["gradient"] == "the operator takes no float64, and there is no reference"


@pytest.mark.parametrize("factor", [pytest.param(1, marks=pytest.mark.wide), 2])
def test_gradient_of_an_input_in_float32(library, factor):
    """opcheck checks the gradient of an input in float32 beside inputs of any dtype."""
    names = {1: "TwoDtypesBackward", 2: "HalfTheGradientOfTwoDtypes"}
    signature = "x(N), w(N, dtype=float32), dy(N) -> dx(N), dw(N, dtype=float32)"
    backward = msops.custom_op(getattr(library, names[factor]), signature)
    product = msops.custom_op(library.TwoDtypes, "x(N), w(N, dtype=float32) -> y(N)", gradient=backward)
    arguments = product, random(8, np.float64, (9,), (9,)), lambda x, w: (x * w).astype(x.dtype)
    if factor == 1:
        assert opcheck(*arguments).skipped["gradient's dtypes"] == "the operator takes no float64"
    else:
        assert "graph, float16: gradient of w[" in failures(*arguments)["gradient"][0]


def test_every_check_is_made_or_skipped(square, monkeypatch):
    """Checks that need what failed are skipped; otherwise a forgotten check is a failure."""
    report = opcheck(square(signature="x(35) -> y(35)"), X)
    assert report.skipped["other sizes"] == "the operator takes none"
    assert report.skipped["gradient's dtypes"] == "the operator takes only float64"
    assert report.made | set(report.skipped) == set(CHECKS)

    class Raises(nn.Cell):
        def __call__(self, x):
            raise TypeError("no")

    with pytest.raises(OpCheckError, match=r"graph = pynative   skipped: it needs what failed"):
        opcheck(Raises(), X)
    monkeypatch.setitem(opcheck.__wrapped__.__globals__, "_check_in_mode", lambda *arguments: None)
    found = failures(square(), X, squared)
    assert found["views"] == ["was neither made nor skipped"]


def test_sound_with_indices(library):
    """Integer inputs keep their values and have no gradient."""
    gradient = msops.custom_op(library.TakeBackward, "x(M), index(N, dtype=int32), dy(N) -> dx(M)")
    take = msops.custom_op(library.Take, "x(M), index(N, dtype=int32) -> y(N)", gradient=gradient)
    report = opcheck(take, [np.linspace(-1, 1, 5), np.array([0, 4, 0, 2])], lambda x, index: x[index])
    assert "gradient" in report.made
    assert set(report.skipped) == {"other attributes", "other sizes", "second derivative"}


def test_sound_without_floats(library):
    after = msops.custom_op(library.Next, "x(N) -> y(N)", dtypes=(mindspore.int32,))
    assert "forward" in opcheck(after, [np.arange(5, dtype=np.int32)], lambda x: x + 1).made
    assert "expected 2, got 1" in failures(after, [np.arange(5, dtype=np.int32)], lambda x: x + 2)["forward"][0]


@pytest.mark.parametrize(
    "reference",
    [pytest.param(None, marks=pytest.mark.wide, id="no reference"), pytest.param(lambda x: x.sum(0), id="reference")],
)
def test_sound_with_scratch(reference):
    """The documentation's operator with scratch passes."""
    text = (Path(__file__).resolve().parents[1] / "docs" / "headers.md").read_text()
    (source,) = re.findall(r"```cuda file=column_sum.cu\n(.*?)```", text, re.DOTALL)
    signature = "x(N, C) -> y(C); partial(max(1, min(N // 64, 1024)), C)"
    assert signature in text
    column_sum = msops.custom_op(msops.load("column_sum", source, cxx_flags=PLAIN).ColumnSum, signature)
    report = opcheck(column_sum, random(9, np.float64, (200, 3)), reference)
    assert ("forward" in report.made) == (reference is not None)


@pytest.mark.wide
def test_several_cases(square):
    cases = [X, random(4, np.float64, (2,))]
    opcheck(square(), cases, squared)
    found = failures(square("WrongForOne"), [*cases, np.full((1, 1), 3.0)], squared)
    assert re.fullmatch(
        r"graph, float64, case 2: y\[0\]: expected 9, got 3, an error of 6 where \S*e-14 is allowed; 1 of 1 are wrong",
        found["forward"][0],
    )


def test_report(square):
    """The report is a table, and an error names every check that failed."""
    lines = str(opcheck(square(), X, squared)).splitlines()
    assert lines[0] == "opcheck of square"
    assert "  bounds             ok" in lines
    assert "  other attributes   skipped: the operator has none" in lines
    found = failures(square("ChangesInput", "HalfTheGradient"), X, lambda x: x * x + 1)
    assert {"inputs unchanged", "gradient", "forward"} <= set(found)
    assert "graph" in {line.split(",")[0] for line in found["forward"]}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("check", "entries", "words"),
    [
        ("bounds", ["PastTheEnd"], "float64: PastTheEnd writes element 35 of y, after its end: it has shape (35,)"),
        ("bounds", ["BeforeTheBeginning"], "float64: BeforeTheBeginning writes element -1 of y, before its beginning"),
        ("bounds", ["NarrowOffset"], "float64, N = 1031: NarrowOffset reads element -512 of y, before its beginning"),
        ("no crash", ["ReadsNull"], "float64, N = 3: ReadsNull crashes: SIGSEGV, Segmentation fault"),
        ("no crash", ["Aborts"], "float64: Aborts crashes: SIGABRT, Aborted (that was too much)"),
        ("no crash", ["Exits"], "float64: Exits ends the process with exit status 3"),
        ("no crash", ["Square", "AbortsBackward"], "float64: AbortsBackward crashes: SIGABRT"),
        ("outputs written", ["AllButTheLast"], "AllButTheLast: y[34] is not written; 1 of 35 are not"),
        ("forward", ["FloatForAll"], "graph, float64: y["),
        ("inputs unchanged", ["ChangesInput"], "ChangesInput: x[34]: expected "),
        ("wrong calls", ["AnyShape"], "AnyShape accepts x (34,) beside y (35,): call.require_same_shape(y, x) is"),
        ("gradient", ["Square", "HalfTheGradient"], "float64: gradient of x["),
        ("gradient's dtypes", ["Square", "RoughInFloat32"], "float32: gradient of x["),
        ("repeated runs", ["OtherEveryTime"], "two equal calls of OtherEveryTime differ: y[0]: expected "),
        ("other sizes", ["WrongForOne"], "N = 1: y[0]: expected "),
        ("other sizes", ["NotEmpty"], "NotEmpty refuses sizes that the signature accepts, N = 0 (x is empty): unless"),
    ],
    ids=str,
)
def test_unsound(square, check, entries, words, device_target):
    if device_target == "GPU" and check in ("no crash", "bounds") and "writes" not in words:
        pytest.skip("is an error of the host, or is found by guard pages")
    dtypes = (mindspore.float32, mindspore.float64) if "dtypes" in check else (mindspore.float64,)
    found = failures(square(*entries, dtypes=dtypes), X, squared)
    assert words in "\n".join(found[check])
    assert check in ("bounds", "no crash") or not {"bounds", "no crash"} & set(found)
    modes = {re.split("[,:]", line)[0] for line in found[check]}
    entry = {f"C entry on the {device_target}"}
    if check == "inputs unchanged":  # on the GPU, graph mode works on copies of the inputs
        assert modes == entry | {"graph", "pynative"} - ({"graph"} if device_target == "GPU" else set())
    else:
        assert modes <= entry or "graph" in modes  # and in PyNative mode, if that has other bits


def product(library, backward):
    takes, gives = ("w, dy", "dx") if backward == "NoneForW" else ("x, w, dy", "dx, dw")
    gradient = msops.custom_op(getattr(library, backward), f"{takes} -> {gives}")
    settings = dict(dtypes=(mindspore.float64,), gradient=gradient)
    return msops.custom_op(library.Product, "x(N), w(N) -> y(N)", name="product", **settings)


PRODUCT = random(6, np.float64, (4,), (4,)), lambda x, w: x * w


def test_gradient_of_the_second_input(library):
    opcheck(product(library, "ProductBackward"), *PRODUCT)
    wrong = "\n".join(failures(product(library, "WrongForW"), *PRODUCT)["gradient"])
    assert "graph, float64: gradient of w[" in wrong
    assert "no_gradient" not in wrong


def test_missing_gradient(library):
    """opcheck finds a missing gradient, unless `no_gradient` names the input."""
    found = failures(product(library, "NoneForW"), *PRODUCT)
    assert (
        "the gradient's operator has no output dw: without a gradient, no_gradient must name w" in found["gradient"][0]
    )
    report = opcheck(product(library, "NoneForW"), *PRODUCT, no_gradient=["w"])
    assert "gradient  " in str(report)
    assert report.skipped["gradient"] == "no_gradient names w"
    assert "gradient" in report.made
    report = opcheck(product(library, "WrongForW"), *PRODUCT, no_gradient=["w", "x"])
    assert report.skipped["gradient"] == "no_gradient names all inputs"
    for wrong in (["z"], "x"):
        with pytest.raises(ValueError, match=r"opcheck of product: no_gradient must be names of inputs \(x, w\), got"):
            opcheck(product(library, "NoneForW"), *PRODUCT, no_gradient=wrong)


@pytest.mark.parametrize("dtype", [pytest.param(mindspore.float32, marks=pytest.mark.wide), mindspore.float64], ids=str)
def test_kink(square, dtype):
    """At a kink, only a gradient between those on both sides is right."""
    x = [np.array([-2.0, 0.0, 1e-7, -1e-7, 0.0, 3.0])]

    def relu(backward):
        return square("Relu", backward, dtypes=(dtype,)), x, lambda x: np.where(x > 0, x, 0)  # np.maximum keeps NaN

    assert "gradient" in opcheck(*relu("ReluBackward")).made
    assert re.search(r"x\[(1|4)\]", failures(*relu("ReluTwiceAtZero"))["gradient"][0])
    assert "gradient of x[" in "\n".join(failures(*relu("ReluHalf"))["gradient"])


def test_crash_in_one_dtype(library):
    """After a crash in one dtype, opcheck still checks the other dtypes."""
    operator = msops.custom_op(library.AbortsInFloat16, "x(N) -> y(N)")
    with pytest.raises(OpCheckError) as caught:
        opcheck(operator, X, squared)
    report = caught.value.report
    assert set(report.failures) == {"no crash"}
    assert {re.search("float16|float32|float64", line)[0] for line in report.failures["no crash"]} == {"float16"}
    assert {"bounds", "outputs written"} <= report.made
    assert report.skipped["forward"] == "the entry is not safe to call"
    assert "  dtypes             float16, float32, float64" in str(report)


@pytest.mark.wide
def test_endless_call(square, monkeypatch):
    monkeypatch.setattr(worker, "LIMIT", 1)
    found = failures(square("Endless"), X, squared)
    assert "Endless does not return within 1 s" in found["no crash"][0]


def test_leaves_no_files_and_is_silent(square, tmp_path, monkeypatch, capfd):
    """opcheck leaves no files and prints nothing, though MindSpore writes what it could not compile, and MindSpore and
    the entries complain of its wrong calls."""
    temporary, current = tmp_path / "temporary", tmp_path / "current"
    for folder in (temporary, current):
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.chdir(current)
    opcheck(square(), X, squared)
    assert not [*temporary.iterdir(), *current.iterdir()]
    assert capfd.readouterr() == ("", "")


def test_sizes(library):
    """opcheck tries odd sizes, sizes of whole packs and sizes beyond a block of threads, each together with small sizes
    or, where the operator refuses these, with the given ones."""
    mean = msops.custom_op(library.SumInFloat16, "x(N, C) -> y(N)")
    shapes = [x.shape for _, (x,) in odd_inputs(mean, random(5, np.float64, (4, 6)))]
    assert shapes == [(3, 5), (128, 5), (3, 128), (1031, 5), (3, 1031)]

    def even(x):
        if x.shape[0] % 2:
            raise ValueError("N must be even")
        return x._replace(shape=x.shape[:1])

    even_rows = msops.custom_op(library.SumInFloat16, "x(N, C) -> y", infer=even)
    shapes = [x.shape for _, (x,) in odd_inputs(even_rows, random(5, np.float64, (4, 6)))]
    assert shapes == [(4, 7), (128, 5), (4, 128), (4, 1031)]
    any_shape = msops.custom_op(library.Square, "x -> y")
    assert [words for words, _ in odd_inputs(any_shape, X)] == [*("shape (3, 5)", "shape (3, 128)", "shape (3, 1031)")]


def test_count_of_parameters(square):
    found = failures(square("AnyCount", dtypes=(mindspore.float32,), gradient=None), X, squared)
    assert found == {"wrong calls": [found["wrong calls"][0], *found["wrong calls"][1:]]}
    assert "AnyCount accepts one parameter too few" in found["wrong calls"][0]


def test_rounding(library):
    """opcheck finds sums in float16 inaccurate, and accepts sums in float32."""
    mean = msops.custom_op(library.SumInFloat16, "x(N, C) -> y(N)")
    found = failures(mean, random(5, np.float64, (3, 500)), lambda x: x.sum(1))
    assert {line.split(": ")[0] for line in found.pop("forward")} == {"graph, float16"}
    assert set(found) == {"other sizes", "special values"}
    assert all("float16" in line for lines in found.values() for line in lines)


@pytest.mark.parametrize(
    ("promise", "words"),
    [
        (lambda x: x._replace(shape=(*x.shape, 1)), "y: the reference has shape (35,), got (35, 1)"),
        (lambda x: x._replace(shape=x.shape * 2), "y: the reference has shape (35,), got (35, 35)"),
        (lambda x: x._replace(dtype=mindspore.int32), "y: the reference has float32, got int32"),
        (lambda x: x._replace(dtype=mindspore.float32), "y: the reference has float16, got float32"),
    ],
    ids=["another rank", "another size", "int32", "float32 beside float16"],
)
def test_promise(library, promise, words):
    dtypes = (mindspore.float16 if "float16" in words else mindspore.float32,)
    operator = msops.custom_op(library.AnyShape, "x -> y", infer=promise, dtypes=dtypes)
    assert words in "\n".join(failures(operator, X, squared)["shapes and dtypes"])


def test_rule_that_takes_what_the_entry_refuses(library):
    operator = msops.custom_op(library.Product, "x, w -> y", name="product")
    found = failures(operator, random(6, np.float64, (4,), (4,)), lambda x, w: x * w)
    assert list(found) == ["wrong inputs"]
    assert "the operator takes x (3,) instead of (4,), but Product returns 4" in found["wrong inputs"][0]
    assert found["wrong inputs"][0].endswith("; if all have one shape, the signature is x(*S), w(*S) -> y(*S)")


def test_wrong_inputs_that_are_taken(square, monkeypatch):
    monkeypatch.setattr(msops.Signature, "_check_dtypes", lambda *arguments: None)
    found = failures(square(), X, squared)
    assert "graph, x of int8: the operator takes that" in found["wrong inputs"]


class Takes(nn.Cell):
    def construct(self, x):
        return x


class Breaks(nn.Cell):
    def construct(self, x):
        raise RuntimeError("no words of the operator's")


@pytest.mark.parametrize(
    ("net", "words"),
    [(Takes, "nothing is raised"), (Breaks, "raises RuntimeError, expected TypeError or ValueError")],
)
def test_wrong_inputs_that_the_network_does_not_refuse(square, net, words):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    with pytest.raises(AssertionError, match=f"^{words}$"):
        check_refused(square(), net(), [np.zeros(3, "int8")])


def test_small_sizes_that_the_operator_refuses(square):
    def infer(x):
        if x.size == 0:
            raise ValueError("x must not be empty")
        return x

    op = square(signature="x(N) -> y", infer=infer)
    assert [words for words, _ in small_inputs(op, X)] == ["N = 1", "all sizes 1"]
    assert "other sizes" in opcheck(op, X, squared).made


def test_attribute_of_the_first_call(square):
    """opcheck finds an entry that keeps the attribute of its first call, also without the argument `other`."""
    op = square("ByFirstAttribute", gradient=None, by=2.0)
    words = "ByFirstAttribute: y[0]: expected "
    (found,) = failures(op, X)["other attributes"]
    assert words in found
    assert found.endswith("an earlier call with other attributes changes the call with by = 3.0")
    other = square("ByFirstAttribute", gradient=None, by=3.0), lambda x: 3 * x * x
    found = failures(op, X, lambda x: 2 * x * x, other=other)["other attributes"]
    assert {line.split(":")[0] for line in found} == {found[0].split(":")[0], "graph", "pynative"}
    same = square("ByAttribute", gradient=None, by=2.0), lambda x: 2 * x * x
    assert "the same results" in failures(*same[:1], X, same[1], other=same)["other attributes"][0]


class Unsteady(nn.Cell):
    """Gives results that depend on the mode and on strides."""

    def construct(self, x):
        return x * x

    def __call__(self, x):
        pynative = mindspore.get_context("mode") == mindspore.PYNATIVE_MODE
        return super().__call__(x) + (1e-3 if pynative else 0) + (0 if x.is_contiguous() else 1)


def test_modes_and_views():
    found = failures(Unsteady(), random(7, np.float64, (3, 4)))
    assert found["graph = pynative"][0].startswith("pynative, float16: output 0[0, 0]: expected ")
    assert "transposed: output 0[0, 0]: expected " in "\n".join(found["views"])


def test_leaves_the_mode(square, mode):
    before = mindspore.get_context("mode")
    opcheck(square(), X, squared)
    assert mindspore.get_context("mode") == before


def test_wrong_arguments(square):
    with pytest.raises(ValueError, match="opcheck of square: inputs must be 1 arrays, got 2"):
        opcheck(square(), [*X, *X], squared)


@pytest.mark.wide
def test_reference_without_long_double(square):
    """A reference may lack long double, as SciPy's functions do."""

    def only_double(x):
        if x.dtype == np.longdouble:
            raise TypeError("no loop matching the specified signature")
        return x * x

    assert "forward" in opcheck(square(), X, only_double).made
    assert "forward" in failures(square(), X, lambda x: only_double(x) * (1 + 1e-13))
