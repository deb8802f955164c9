"""Sound operators pass opcheck, and each of its checks finds an operator that is unsound in just that way."""

import re
from pathlib import Path

import mindspore
import numpy as np
import pytest
from mindspore import nn

import msops
import test_lltm
import test_sigmoid
import test_trilinear_interpolation as trilinear
from msops.operators.add import _add
from msops.operators.lltm import _pointwise
from msops.operators.sigmoid import _sigmoid
from msops.operators.trilinear_interpolation import _trilinear_interpolation
from msops.testing import OpCheckError, opcheck
from msops.testing.derived import small_inputs
from msops.testing.opcheck import CHECKS, _check_refused
from operator_test import random

SOURCE = r"""
#include "common/formula.h"
#include "common/sum.h"

MSOPS_FORMULA(Square, (x), (y), y = x * x)
MSOPS_FORMULA(SquareBackward, (x, dy), (dx), dx = 2 * x * dy)
MSOPS_FORMULA(HalfTheGradient, (x, dy), (dx), dx = x * dy)
MSOPS_FORMULA(RoughInFloat32, (x, dy), (dx), dx = 2 * x * dy * (sizeof(T) == 4 ? 1.0001 : 1))
MSOPS_FORMULA(Product, (x, w), (y), y = x * w)

// Squares of the n numbers x, and then what is wrong, by one thread. What that needs of the call is `by`.
#define SQUARES(name, requires, wrong)                                                                \
  template <typename T>                                                                               \
  struct name##Body {                                                                                 \
    T *x, *y;                                                                                         \
    int64_t n;                                                                                        \
    double by;                                                                                        \
    template <typename I>                                                                             \
    MSOPS_BOTH void operator()(I) const {                                                             \
      for (int64_t i = 0; i < n; ++i) y[i] = T(msops::Compute<T>(x[i]) * msops::Compute<T>(x[i]));    \
      if (n > 0) { wrong; }                                                                           \
    }                                                                                                 \
  };                                                                                                  \
  MSOPS_ENTRY(name) {                                                                                 \
    const auto in = call.tensor("x"), out = call.tensor("y");                                         \
    double by = 0;                                                                                    \
    requires;                                                                                         \
    return call.run([&](auto type) {                                                                  \
      using T = typename decltype(type)::type;                                                        \
      msops::parallel_for(call, 1, 1, name##Body<T>{in.as<T>(), out.as<T>(), in.size, by});           \
    });                                                                                               \
  }
#define SHAPE call.require_same_shape(out, in)
SQUARES(PastTheEnd, SHAPE, y[n] = y[0])
SQUARES(BeforeTheBeginning, SHAPE, y[-1] = y[0])
SQUARES(ChangesInput, SHAPE, x[n - 1] = y[0])
SQUARES(ReadsPastTheEnd, SHAPE, if (!(x[n] > 0)) y[0] = x[n])
SQUARES(WrongForOne, SHAPE, if (n == 1) y[0] = x[0])
SQUARES(OtherEveryTime, SHAPE; static double calls = 0; by = ++calls, y[0] = T(msops::Compute<T>(by)))
SQUARES(NotEmpty, SHAPE; call.require(in.size > 0, msops::kBadShape, "x is empty"), )
SQUARES(AnyShape, , )
SQUARES(ByAttribute, SHAPE; by = call.number("by"),
        for (int64_t i = 0; i < n; ++i) y[i] = T(msops::Compute<T>(by * y[i])))
SQUARES(ByFirstAttribute, SHAPE; static const double first = call.number("by"); by = first,
        for (int64_t i = 0; i < n; ++i) y[i] = T(msops::Compute<T>(by * y[i])))

template <typename T>
struct SquareOf {
  const T* x;
  T* y;
  template <typename I>
  MSOPS_BOTH void operator()(I i) const { y[i] = T(x[i] * x[i]); }
};
MSOPS_ENTRY(AllButTheLast) {
  const auto x = call.tensor("x"), y = call.tensor("y");
  call.require_same_shape(y, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t n = x.size > 0 ? x.size - 1 : 0;
    msops::parallel_for(call, n, n, SquareOf<T>{x.as<T>(), y.as<T>()});
  });
}

template <typename T>
struct RoughSum {
  const T* x;
  T* y;
  int64_t columns;
  template <typename I>
  MSOPS_BOTH void operator()(I row) const {
    T rough = T(0);
    msops::Sum<T> sum;
    for (const T* from = x + row * columns; from < x + (row + 1) * columns; ++from) {
      rough = T(rough + *from);
      sum += *from;
    }
    y[row] = sizeof(T) == 2 ? rough : T(sum.total());
  }
};
MSOPS_ENTRY(SumInFloat16) {
  const auto x = call.tensor("x", 2), y = call.tensor("y", 1);
  call.require_shape(y, {x.dim(0)});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    msops::parallel_for(call, x.dim(0), x.size, RoughSum<T>{x.as<T>(), y.as<T>(), x.dim(1)});
  });
}

// y = x w, where w is float32
template <typename T>
struct ProductOfTwo {
  const T* x;
  const float* w;
  T* y;
  template <typename I>
  MSOPS_BOTH void operator()(I i) const { y[i] = T(msops::Compute<T>(x[i]) * w[i]); }
};
MSOPS_ENTRY(TwoDtypes) {
  const auto x = call.tensor("x", 1), w = call.tensor_of("float32", "w", 1), y = call.tensor("y", 1);
  call.require_same_shape(w, x);
  call.require_same_shape(y, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    msops::parallel_for(call, x.size, x.size, ProductOfTwo<T>{x.as<T>(), w.as<float>(), y.as<T>()});
  });
}
template <typename T>
struct ProductOfTwoBackward {
  const T* x;
  const float* w;
  const T* dy;
  T* dx;
  float* dw;
  float factor;
  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const msops::Compute<T> d = dy[i];
    dx[i] = T(d * w[i]);
    dw[i] = float(factor * d * x[i]);
  }
};
#define TWO_DTYPES_BACKWARD(name, factor)                                                                              \
  MSOPS_ENTRY(name) {                                                                                                  \
    const auto x = call.tensor("x", 1), w = call.tensor_of("float32", "w", 1), dy = call.tensor("dy", 1);              \
    const auto dx = call.tensor("dx", 1), dw = call.tensor_of("float32", "dw", 1);                                     \
    for (const auto& tensor : {w, dy, dx, dw}) call.require_same_shape(tensor, x);                                     \
    return call.run([&](auto type) {                                                                                   \
      using T = typename decltype(type)::type;                                                                         \
      msops::parallel_for(call, x.size, x.size,                                                                        \
                          ProductOfTwoBackward<T>{x.as<T>(), w.as<float>(), dy.as<T>(), dx.as<T>(), dw.as<float>(),    \
                                                  factor});                                                            \
    });                                                                                                                \
  }
TWO_DTYPES_BACKWARD(TwoDtypesBackward, 1)
TWO_DTYPES_BACKWARD(HalfTheGradientOfTwoDtypes, 0.5f)

#define C_ENTRY(name) \
  extern "C" __attribute__((visibility("default"))) int name(int nparam, void** params, int* ranks, int64_t** shapes, \
                                                             const char** dtypes, void* stream, void* extra)
C_ENTRY(AnyCount) { return Square(2 + 0 * nparam, params, ranks, shapes, dtypes, stream, extra); }

// y_i = x[index_i]
template <typename T>
struct Taken {
  const T* x;
  const int32_t* index;
  T* y;
  template <typename I>
  MSOPS_BOTH void operator()(I i) const { y[i] = x[index[i]]; }
};
MSOPS_ENTRY(Take) {
  const auto x = call.tensor("x", 1), index = call.tensor_of("int32", "index", 1), y = call.tensor("y", 1);
  call.require_same_shape(y, index);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    msops::parallel_for(call, y.size, y.size, Taken<T>{x.as<T>(), index.as<int32_t>(), y.as<T>()});
  });
}
template <typename T>
struct TakenBackward {
  const int32_t* index;
  const T* dy;
  T* dx;
  int64_t n;
  template <typename I>
  MSOPS_BOTH void operator()(I j) const {
    msops::Compute<T> sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += index[i] == static_cast<int64_t>(j) ? msops::Compute<T>(dy[i]) : 0;
    dx[j] = T(sum);
  }
};
MSOPS_ENTRY(TakeBackward) {
  const auto x = call.tensor("x", 1), index = call.tensor_of("int32", "index", 1), dy = call.tensor("dy", 1);
  const auto dx = call.tensor("dx", 1);
  call.require_same_shape(dy, index);
  call.require_same_shape(dx, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    msops::parallel_for(call, dx.size, dx.size,
                        TakenBackward<T>{index.as<int32_t>(), dy.as<T>(), dx.as<T>(), dy.size});
  });
}

// y = x + 1, of int32
struct NextOf {
  const int32_t* x;
  int32_t* y;
  template <typename I>
  MSOPS_BOTH void operator()(I i) const { y[i] = x[i] + 1; }
};
C_ENTRY(Next) {
  if (nparam != 2 || ranks[0] != 1 || ranks[1] != 1 || shapes[0][0] != shapes[1][0]) return 3;
  msops::Call call("Next", nparam, params, ranks, shapes, dtypes, stream, extra);
  const int64_t n = shapes[0][0];
  msops::parallel_for(call, n, n, NextOf{static_cast<int32_t*>(params[0]), static_cast<int32_t*>(params[1])});
  return call.ok() ? 0 : msops::kLaunchFailed;
}
"""
X = random(3, np.float64, (35,))


@pytest.fixture(scope="module")
def library():
    return msops.load("opcheck_tests", SOURCE)


@pytest.fixture
def square(library):
    """Makes an operator of entries that shall square."""

    def make(forward="Square", backward="SquareBackward", signature="x(N) -> y(N)", **settings):
        gradient = msops.custom_op(getattr(library, backward), "x, dy -> dx")
        settings = dict(dtypes=(mindspore.float64,), gradient=gradient) | settings
        return msops.custom_op(getattr(library, forward), signature, name="square", **settings)

    return make


def squared(x):
    return x * x


def failures(*arguments, **settings):
    """check -> what it found"""
    with pytest.raises(OpCheckError) as caught:
        opcheck(*arguments, **settings)
    found = caught.value.report.failures
    for check, lines in found.items():
        assert f"  {check:<18} FAILED" in str(caught.value)
        assert all(f"    {line}" in str(caught.value) for line in lines)
    return found


@pytest.mark.parametrize(
    ("operator", "shapes", "reference"),
    [
        (_sigmoid, [(7, 13)], test_sigmoid.TestSigmoid.reference),
        (_add, [(3, 1, 4), (5, 1)], lambda x, y: x + y),
        (_pointwise, [(3, 12), (12,), (3, 4)], test_lltm.TestPointwise.reference),
        (
            _trilinear_interpolation,
            [(3, 8, 4), (3, 3)],
            trilinear.TestTrilinearInterpolation.reference,
        ),
        (msops.Sigmoid(), [(7, 13)], test_sigmoid.TestSigmoid.reference),
        (msops.add, [(3, 1, 4), (5, 1)], lambda x, y: x + y),
    ],
    ids=["sigmoid", "add", "lltm", "trilinear", "Cell", "function"],
)
def test_sound(operator, shapes, reference):
    report = opcheck(operator, random(1, np.float64, *shapes), reference)
    assert report.made | set(report.skipped) == set(CHECKS)
    assert report.failures == {}
    if isinstance(operator, msops.Operator):
        assert set(report.skipped) == {"other instance"}


def test_sound_with_attribute(square):
    operators = [square("ByAttribute", gradient=None, by=by) for by in (2.5, 3.0)]
    references = [lambda x: 2.5 * x * x, lambda x: 3 * x * x]
    report = opcheck(operators[0], X, references[0], other=(operators[1], references[1]))
    assert report.skipped == {"gradient": "there is no gradient", "gradient's dtypes": "there is no gradient"}


@pytest.mark.parametrize("dtype", [mindspore.float16, mindspore.float32], ids=str)
def test_gradient_without_float64(square, dtype):
    """Is held to finite differences of the reference."""
    report = opcheck(square(dtypes=(dtype,)), X, squared)
    assert report.skipped["gradient's dtypes"] == "the operator takes no float64"
    found = failures(square("Square", "HalfTheGradient", "x -> y", dtypes=(dtype,)), X, squared)
    assert set(found) == {"gradient", "small sizes"}
    for mode in ("graph", "pynative"):
        assert f"{mode}, {str(dtype).lower()}: gradient of x[" in "\n".join(found["gradient"])
        assert {line.split(": ")[0] for line in found["small sizes"]} >= {f"{mode}, shape (1,)", f"{mode}, shape ()"}
    report = opcheck(square(dtypes=(dtype,)), X)
    assert report.skipped["gradient"] == "the operator takes no float64, and there is no reference"


@pytest.mark.parametrize("factor", [1, 2])
def test_gradient_of_an_input_in_float32(library, factor):
    """Beside others in any dtype."""
    names = {1: "TwoDtypesBackward", 2: "HalfTheGradientOfTwoDtypes"}
    signature = "x(N), w(N, dtype=float32), dy(N) -> dx(N), dw(N, dtype=float32)"
    backward = msops.custom_op(getattr(library, names[factor]), signature)
    product = msops.custom_op(library.TwoDtypes, "x(N), w(N, dtype=float32) -> y(N)", gradient=backward)
    arguments = product, random(8, np.float64, (9,), (9,)), lambda x, w: (x * w).astype(x.dtype)
    if factor == 1:
        assert opcheck(*arguments).skipped["gradient's dtypes"] == "the operator takes no float64"
    else:
        assert "graph, float64: gradient of w[" in "\n".join(failures(*arguments)["gradient"])


def test_every_check_is_made_or_skipped(square, monkeypatch):
    """Those that need what failed are skipped; else it is a failure that one is forgotten."""
    report = opcheck(square(signature="x(35) -> y(35)"), X)
    assert report.skipped["small sizes"] == "the operator takes none"
    assert report.skipped["gradient's dtypes"] == "the operator takes only float64"
    assert report.made | set(report.skipped) == set(CHECKS)

    class Raises(nn.Cell):
        def __call__(self, x):
            raise TypeError("no")

    with pytest.raises(OpCheckError, match=r"graph = pynative   skipped: it needs what failed"):
        opcheck(Raises(), X)
    monkeypatch.setitem(opcheck.__globals__, "_check_in_mode", lambda *arguments: None)
    found = failures(square(), X, squared)
    assert found["views"] == ["was neither made nor skipped"]


def test_is_silent(square, capfd):
    """Though it makes wrong calls, of which MindSpore and the entries print much."""
    opcheck(square(), X, squared)
    assert capfd.readouterr() == ("", "")


def test_sound_with_indices(library):
    """Whole numbers stay, and have no gradient."""
    gradient = msops.custom_op(library.TakeBackward, "x(M), index(N, dtype=int32), dy(N) -> dx(M)")
    take = msops.custom_op(library.Take, "x(M), index(N, dtype=int32) -> y(N)", gradient=gradient)
    report = opcheck(take, [np.linspace(-1, 1, 5), np.array([0, 4, 0, 2])], lambda x, index: x[index])
    assert "gradient" in report.made
    assert set(report.skipped) == {"other instance", "small sizes"}


def test_sound_without_floats(library):
    after = msops.custom_op(library.Next, "x(N) -> y(N)", dtypes=(mindspore.int32,))
    assert "forward" in opcheck(after, [np.arange(5, dtype=np.int32)], lambda x: x + 1).made
    assert "expected 2, got 1" in failures(after, [np.arange(5, dtype=np.int32)], lambda x: x + 2)["forward"][0]


@pytest.mark.parametrize("reference", [None, lambda x: x.sum(0)], ids=["no reference", "reference"])
def test_sound_with_scratch(reference):
    """The operator that the documentation shows."""
    text = (Path(__file__).resolve().parents[1] / "docs" / "headers.md").read_text()
    (source,) = re.findall(r"```cuda file=column_sum.cu\n(.*?)```", text, re.DOTALL)
    signature = "x(N, C) -> y(C), partial(max(1, min(N // 64, 1024)), C, dtype=accumulator)"
    assert signature in text
    column_sum = msops.custom_op(msops.load("column_sum", source).ColumnSum, signature)
    report = opcheck(column_sum, random(9, np.float64, (200, 3)), reference)
    assert ("forward" in report.made) == (reference is not None)


def test_several_cases(square):
    cases = [X, random(4, np.float64, (2,))]
    opcheck(square(), cases, squared)
    found = failures(square("WrongForOne"), [*cases, np.full((1, 1), 3.0)], squared)
    assert found["forward"][0] == (
        "graph, float64, case 2: y[0]: expected 9, got 3, an error of 6 where 1.78e-15 is allowed; 1 of 1 are wrong"
    )


def test_report(square):
    """Is a table, and names every check that failed, of all kinds."""
    lines = str(opcheck(square(), X, squared)).splitlines()
    assert lines[0] == "opcheck of square"
    assert "  bounds             ok" in lines
    assert "  other instance     skipped: no other operator is given" in lines
    found = failures(square("ChangesInput", "HalfTheGradient"), X, lambda x: x * x + 1)
    assert {"inputs unchanged", "gradient", "forward"} <= set(found)
    assert {line.split(",")[0] for line in found["forward"]} == {"graph", "pynative"}


@pytest.mark.parametrize(
    ("check", "entries", "words"),
    [
        ("bounds", ["PastTheEnd"], "C entry, float64: PastTheEnd writes behind the end of y, up to 8 bytes away"),
        ("bounds", ["BeforeTheBeginning"], "BeforeTheBeginning writes before the beginning of y, up to 8 bytes away"),
        ("outputs written", ["AllButTheLast"], "AllButTheLast: y[34]: expected nan, got "),
        ("outputs written", ["ReadsPastTheEnd"], "ReadsPastTheEnd: y[0]: expected nan"),
        ("inputs unchanged", ["ChangesInput"], "ChangesInput: x[34]: expected "),
        ("wrong calls", ["AnyShape"], "AnyShape returns 0 for x (34,) instead of (35,)"),
        ("gradient", ["Square", "HalfTheGradient"], "float64: gradient of x["),
        ("gradient's dtypes", ["Square", "RoughInFloat32"], "float32: gradient of x["),
        ("repeated runs", ["OtherEveryTime"], "float64: output 0[0]: expected "),
        ("small sizes", ["WrongForOne"], "N = 1: y[0]: expected "),
        ("small sizes", ["NotEmpty"], "N = 0: RuntimeError: "),
    ],
    ids=str,
)
def test_unsound(square, check, entries, words, device_target):
    dtypes = (mindspore.float32, mindspore.float64) if "dtypes" in check else (mindspore.float64,)
    found = failures(square(*entries, dtypes=dtypes), X, squared)
    assert words in "\n".join(found[check])
    assert check == "bounds" or "bounds" not in found
    modes = {line.split(",")[0] for line in found[check]}
    if check == "inputs unchanged":  # on the GPU, graph mode works on copies of them
        assert modes == {"C entry", "graph", "pynative"} - ({"graph"} if device_target == "GPU" else set())
    else:
        assert modes <= {"C entry"} or {"graph", "pynative"} <= modes


def test_count_of_parameters(square):
    found = failures(square("AnyCount", dtypes=(mindspore.float32,), gradient=None), X, squared)
    assert found == {"wrong calls": [found["wrong calls"][0], *found["wrong calls"][1:]]}
    assert "AnyCount returns 0 for one parameter too few" in found["wrong calls"][0]


def test_rounding(library):
    """Sums in float16 are too rough, those in float32 are not."""
    mean = msops.custom_op(library.SumInFloat16, "x(N, C) -> y(N)")
    found = failures(mean, random(5, np.float64, (3, 500)), lambda x: x.sum(1))
    assert {line.split(": ")[0] for line in found.pop("forward")} == {"graph, float16", "pynative, float16"}
    assert found == {}


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


def test_wrong_inputs_that_are_taken(square, monkeypatch):
    monkeypatch.setattr(msops.Signature, "_check_dtype", lambda *arguments: None)
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
        _check_refused(square(), net(), [np.zeros(3, "int8")])


def test_small_sizes_that_the_operator_refuses(square):
    def infer(x):
        if x.size == 0:
            raise ValueError("x must not be empty")
        return x

    op = square(signature="x(N) -> y", infer=infer)
    assert [words for words, _ in small_inputs(op, X)] == ["N = 1", "all sizes 1"]
    assert "small sizes" in opcheck(op, X, squared).made


def test_shared_results(square):
    operators = [square("ByFirstAttribute", gradient=None, by=by) for by in (2.0, 3.0)]
    other = operators[1], lambda x: 3 * x * x
    found = failures(operators[0], X, lambda x: 2 * x * x, other=other)
    assert list(found) == ["other instance"]
    assert {line.split(":")[0] for line in found["other instance"]} == {"graph", "pynative"}
    found = failures(operators[0], X, lambda x: 2 * x * x, other=(operators[0], lambda x: 2 * x * x))
    assert "the same results" in found["other instance"][0]


class Unsteady(nn.Cell):
    """Depends on the mode and on strides."""

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


def test_reference_without_long_double(square):
    """Such as those of SciPy."""

    def only_double(x):
        if x.dtype == np.longdouble:
            raise TypeError("no loop matching the specified signature")
        return x * x

    assert "forward" in opcheck(square(), X, only_double).made
    assert "forward" in failures(square(), X, lambda x: only_double(x) * (1 + 1e-13))
