"""Tests the headers for authors in a user's library: functions, numbers, dtypes, columns, pairs."""

import re

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, ops

import msops
from child import ROOT
from msops import compat, custom_op
from operator_test import PLAIN, Net, load_kernels, run

X = np.array([-2.5, -0.5, 0.0, 0.5, 3.0, np.nan])


@pytest.fixture(scope="module")
def library():
    return load_kernels("headers")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_functions_of_formulas(library, dtype):
    x, y = X.astype(dtype), np.array([1, -1, 0.5, np.nan, 2, 1]).astype(dtype)
    op = custom_op(library.Functions, "x, y -> least, most, size, power, inside")
    least, most, size, power, inside = run(Net(op), x, y)
    np.testing.assert_array_equal(least, np.minimum(x, y))
    np.testing.assert_array_equal(most, np.maximum(x, y))
    np.testing.assert_array_equal(size, np.abs(x))
    np.testing.assert_allclose(power, np.abs(x) ** y + x**2, rtol=1e-3 if dtype == "float16" else 1e-6)
    np.testing.assert_array_equal(inside[[0, 1, 2, 4, 5]], np.array([-1, -1, 0, 2, np.nan], dtype))


@pytest.mark.parametrize("size", [1, 6, 1030])
def test_relu(mode, library, size):
    x = np.resize(X.astype(np.float32), size)
    np.testing.assert_array_equal(run(Net(custom_op(library.Relu, "x -> y")), x)[0], np.maximum(x, 0))


def test_functions_of_the_standard_library(library):
    x = X.astype(np.float32)[:-1]
    np.testing.assert_array_equal(run(Net(custom_op(library.Limits, "x -> y")), x)[0], x)


def elu(x, alpha):
    return np.where(x > 0, x, alpha * np.expm1(x))


@pytest.mark.parametrize("alpha", [0.5, 2, True])
def test_numbers_that_are_attributes(mode, library, alpha):
    op = custom_op(library.Elu, "x -> y", alpha=alpha)
    np.testing.assert_allclose(run(Net(op), X)[0], elu(X, alpha), rtol=1e-14)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numbers_that_are_tensors(mode, library, dtype):
    """Numbers in tensors may change from call to call without a new operator."""
    net = Net(custom_op(library.Affine, "x, factor() -> y", offset=1))
    x = np.resize(X.astype(dtype), 1030)
    for factor in (2, -0.5):
        np.testing.assert_array_equal(run(net, x, np.array(factor, dtype))[0], (factor * x + 1).astype(dtype))


@pytest.mark.parametrize(
    ("signature", "attributes", "message"),
    [
        ("x -> y", {}, "the formula's number alpha must be an attribute or an input alpha() after the others"),
        ("x -> y", {"alhpa": 1.0}, "the formula's number alpha must be an attribute or an input alpha() after the"),
        ("x, alpha -> y", {}, "the formula's number alpha must be an attribute or an input alpha() after the others"),
    ],
)
def test_numbers_that_are_missing(library, signature, attributes, message):
    with pytest.raises(ValueError, match=f"^headers_test: {re.escape(message)}"):
        custom_op(library.Elu, signature, **attributes)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"times": 2}, "attribute share is missing"),
        ({"tiems": 2, "share": 0.5}, "attribute times is missing"),
        ({"times": 2.0, "share": 0.5}, "attribute times must be an int, got a float"),
        ({"times": 9, "share": 0.5}, "attribute times is 9, expected 1 to 8"),
    ],
)
def test_attributes_under_the_names_that_users_gave_them(library, capfd, attributes, message):
    with pytest.raises(RuntimeError) as caught:
        run(Net(custom_op(library.Counted, "x -> y", **attributes)), X)
    assert f"{message} (Counted)" in str(caught.value) + capfd.readouterr().err  # the latter on a GPU


def test_whole_number_where_c_reads_a_float(mode, library):
    op = custom_op(library.Counted, "x -> y", times=3, share=2)
    np.testing.assert_array_equal(run(Net(op), X)[0], np.full_like(X, 6))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_whole_numbers(mode, library, dtype):
    op = custom_op(library.Next, "x -> y", dtypes=(getattr(mindspore, dtype),))
    x = np.arange(100).astype(dtype)
    (y,) = run(Net(op), x)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, x + 1)


def test_dtype_that_the_entry_does_not_run_for(library, capfd):
    with pytest.raises(RuntimeError) as caught:
        run(Net(custom_op(library.Next, "x -> y")), X)
    words = "float64 is not one of int8, uint8, int32, int64 (Next)"
    assert words in str(caught.value) + capfd.readouterr().err  # the latter on a GPU


@pytest.mark.skipif(compat.VERSION < (2, 7), reason="MindSpore's CPU backend has no bfloat16")
@pytest.mark.parametrize("entry", ["Relu", "Cube"])
def test_bfloat16(mode, library, entry, device_target):
    if device_target == "GPU":
        pytest.skip("MindSpore's GPU backend has no bfloat16")
    x = np.concatenate([X, np.random.default_rng(0).normal(0, 10, 2000)])
    op = custom_op(getattr(library, entry), "x -> y", dtypes=(mindspore.bfloat16,))
    tensor = Tensor(x, mindspore.bfloat16)
    y, exact = Net(op)(tensor), tensor.float().asnumpy()
    assert y.dtype == mindspore.bfloat16
    exact = np.maximum(exact, 0) if entry == "Relu" else exact**3
    np.testing.assert_array_equal(y.float().asnumpy(), Tensor(exact).astype(mindspore.bfloat16).float().asnumpy())


@pytest.mark.skipif(compat.VERSION < (2, 7), reason="MindSpore's CPU backend has no bfloat16")
def test_gradient_in_bfloat16(mode, library, device_target):
    if device_target == "GPU":
        pytest.skip("MindSpore's GPU backend has no bfloat16")
    dtypes = (mindspore.bfloat16, mindspore.float32)
    backward = custom_op(library.ReluBackward, "x, dy -> dx", dtypes=dtypes)
    op = custom_op(library.Relu, "x -> y", gradient=backward, dtypes=dtypes)
    dx = ops.grad(Net(op))(Tensor([-1.0, 2.0], mindspore.bfloat16))
    assert dx.dtype == mindspore.bfloat16
    assert dx.float().asnumpy().tolist() == [0, 1]


@pytest.mark.parametrize("columns", [1, 2, 5, 16, 37, 64, 300, 1024, 5000])
def test_columns_and_pairs_in_reductions(library, columns):
    x = np.random.default_rng(columns).integers(-50, 50, (3, columns)).astype(np.float32)  # has equal numbers
    y, column = run(Net(custom_op(library.ArgMax, "x(N, C) -> y(N), column(N, dtype=int64)")), x)
    np.testing.assert_array_equal(y, x.max(1))
    np.testing.assert_array_equal(column, x.argmax(1))


@pytest.mark.parametrize(("rows", "columns"), [(3, 3), (2, 70), (5, 1029), (40, 33)])
def test_columns_in_maps(mode, library, rows, columns):
    x = np.random.default_rng(0).uniform(1, 2, (rows, columns))
    (y,) = run(Net(custom_op(library.Weighted, "x(N, C) -> y(N, C)")), x)
    term = np.tril(x * np.arange(1, columns + 1))
    np.testing.assert_allclose(y, term / term.sum(1, keepdims=True) + term.max(1, keepdims=True), rtol=1e-13)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("team.map([](C v, C w) { return v + w; }, y[row], x[row]);", "a function of elements takes one of each row"),
        ("team.reduce(0, [](C a, C b) { return a + b; }, [](C v) { return v; }, x[row]);", "the identity must have"),
    ],
)
def test_functions_that_no_team_takes(body, message):
    with pytest.raises(msops.CompileError, match=message):
        msops.load(
            "no_team",
            f"""
#include "common/rows.h"

using namespace msops;

template <typename T>
struct Body {{
  using C = Compute<T>;
  Rows<const T> x;
  Rows<T> y;
  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {{ {body} }}
}};

MSOPS_ENTRY(Entry) {{
  const Tensor x = call.tensor("x", 2), y = call.tensor("y", 2);
  return call.run<float>([&](auto) {{ for_rows<float>(call, x.dim(0), {{x, y}}, Body<float>{{x, y}}); }});
}}
""",
        )


@pytest.fixture(scope="module")
def weight_gradient():
    """Returns the operator of the documentation that sums products over rows."""
    (source,) = re.findall(
        r"```cuda file=weight_gradient.cu\n(.*?)```", (ROOT / "docs/headers.md").read_text(), re.DOTALL
    )
    signature = "x(N, C), dy(N, C) -> dw(C); partial(max(1, min(N // 64, 1024)), C)"
    return custom_op(msops.load("weight_gradient", source, cxx_flags=PLAIN).WeightGradient, signature)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (63, 64), (1000, 65), (7, 1031), (20_011, 5)])
def test_sums_of_functions_over_rows(mode, weight_gradient, dtype, shape):
    x, dy = np.random.default_rng(0).standard_normal((2, *shape)).astype(dtype)
    (dw,) = run(Net(weight_gradient), Tensor(x), Tensor(dy))
    products = x.astype("float64") * dy
    # The product and its sum may each err by one eps of the dtype they are summed in, and the result by its rounding.
    unit = np.finfo(np.promote_types(dtype, "float32")).eps
    allowed = 2 * unit * np.abs(products).sum(0) + np.finfo(dtype).eps * np.abs(products.sum(0))
    assert (np.abs(dw - products.sum(0)) <= allowed).all()
