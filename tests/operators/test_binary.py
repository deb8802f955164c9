"""This operator serves patch_mindspore alone: msops has no public name for it."""

import itertools

import mindspore
import numpy as np
import pytest

from card import DTYPES, Call, Card, chain, lengths, results_of
from gpu import BIG
from msops.core.factory import custom_op
from msops.operators.binary import ARITHMETIC, COMPARISONS, MIXED, SCALED_SUMS, operators
from msops.testing.entry import Status, prepare_operator

INTEGERS = ("int32", "int64")
ALL = (*DTYPES, *INTEGERS, "bool")


def nearest_zero(x):
    """Returns the least number that div_no_nan and mul_no_nan do not take for zero."""
    return {2: 1e-5, 4: np.float32(2e-7)}.get(x.dtype.itemsize, 2e-15)


def no_nan(function):
    def formula(x, y):
        near = np.abs(y) < nearest_zero(y)
        return np.where(near, 0, function(x, np.where(near, 1, y)))

    return formula


def whole_power(x, y):
    """Computes in x's dtype, where products wrap around."""
    power = np.ones_like(x * y)
    for _ in range(y.max(initial=0)):
        power, y = np.where(y > 0, power * x, power), y - 1
    return power


def power(x, y):
    if x.dtype.kind == "f":
        return x**y
    return np.where(y >= 0, whole_power(x, y), np.where(x == 1, 1, np.where(x == -1, 1 - 2 * (y % 2), 0)))


FORMULAS = {
    "maximum": lambda x, y: np.where(x > y, x, y),
    "minimum": lambda x, y: np.where(x < y, x, y),
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "real_div": lambda x, y: x / y,
    "pow": power,
    "squared_difference": lambda x, y: (x - y) * (x - y),
    "div_no_nan": no_nan(lambda x, y: x / y),
    "mul_no_nan": no_nan(lambda x, y: x * y),
    "add_ext": lambda x, y, alpha: x + alpha.astype(x.dtype) * y,
    "sub_ext": lambda x, y, alpha: x - alpha.astype(x.dtype) * y,
    **{name: getattr(np, name) for name in COMPARISONS},
}

SHAPES = {
    "empty": ((0, 3), (3,)),
    "empty row": ((4, 0), (1, 1)),
    "scalars": ((), ()),
    "one": ((1,), (1, 1)),
    "odd": ((7, 13), (7, 13)),
    "prime": ((10_007,), (10_007,)),
    "large": ((64, 1024), (64, 1024)),
    "one element": ((70, 64), ()),
    "one element first": ((1, 1), (37, 29)),
    "row": ((48, 64), (64,)),
    "odd row": ((91, 33), (33,)),
    "short row": ((300, 3), (3,)),
    "column": ((48, 64), (48, 1)),
    "odd column": ((91, 33), (91, 1)),
    "short column": ((300, 3), (300, 1)),
    "adaptive norm": ((3, 20, 32), (3, 1, 32)),
    "adaptive norm, odd": ((3, 20, 13), (3, 1, 13)),
    "channels": ((4, 6, 5, 7), (6, 1, 1)),
    "even channels": ((4, 6, 8, 8), (6, 1, 1)),
    "outer": ((70, 1), (1, 64)),
    "both rows": ((5, 1, 32), (1, 7, 32)),
    "six axes": ((3, 1, 4, 1, 5, 16), (1, 2, 1, 6, 1, 16)),
    "alternating": ((1, 2) * 4, (2, 1) * 4),
    "sixteen axes": ((1, 2) * 8, (2, 1) * 8),
    "two blocks": ((300, 512), (512,)),
}
TURNS = ("add", "real_div", "sub", "mul", "maximum", "add_ext", "greater", "pow", "minimum", "sub_ext", "less_equal")


def cases():
    """Yields each case with a function of two tensors, and with both tensors in either place."""
    turns = itertools.cycle(TURNS)
    for name, shapes in SHAPES.items():
        for suffix, pair in (("", shapes), (", swapped", shapes[::-1])):
            function = next(turns)
            yield f"{name}{suffix}", ([*pair, *[()] * (function in SCALED_SUMS)], {"function": function})


FUNCTIONS = (*ARITHMETIC, *COMPARISONS, *SCALED_SUMS)


def values(dtype, function, shape, seed):
    """Returns numbers of a dtype, some of them equal, and special ones where the function has an exact result."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in INTEGERS:
        most = 9 if function == "pow" else np.iinfo(dtype).max
        return np.where(rng.random(shape) < 0.5, rng.integers(-most, most, shape), rng.integers(-2, 3, shape)).astype(
            dtype
        )
    x = rng.standard_normal(shape).round(1)
    special = rng.choice([0, -0.0, np.nan, np.inf, -np.inf, 1e-6, -1e-6, 1e-8], shape)
    return np.where(rng.random(shape) < 0.3, special, x).astype(dtype)


def dtypes_of(function):
    """Returns the pairs of a common dtype and alpha's that the table of operations.h has."""
    if function in SCALED_SUMS:
        return [
            (x, alpha)
            for x in (*DTYPES, *INTEGERS)
            for alpha in ("float32", "int64")
            if x in DTYPES or alpha != "float32"
        ]
    if function in COMPARISONS:
        return [(x, None) for x in ALL]
    return [(str(x).lower().replace("bool_", "bool"), None) for x in ARITHMETIC[function][1]]


def mixed_calls(function):
    for kinds in (("float16", "float32"), ("float32", "float16")):
        for shapes in (((9, 32), (32,)), ((9, 7), (9, 1)), ((5, 16), ()), ((), (3, 5)), ((4, 64), (4, 64))):
            inputs = [values(kind, function, shape, seed) for seed, (kind, shape) in enumerate(zip(kinds, shapes))]
            yield Call(operators(function), inputs, results_of(operators(function), *inputs), [])


class Binary(Card):
    cases = dict(cases())
    further = {
        **{name: ([(5, 16), (16,)], {"function": name}) for name in (*ARITHMETIC, *COMPARISONS)},
        **{name: ([(5, 16), (16,), ()], {"function": name}) for name in SCALED_SUMS},
    }
    small = "odd"
    hostile = ("real_div", "add_ext", "less")  # others take int32 in all places

    def operators(self, shapes=(), function="add"):
        return chain(operators(function))

    def formula(self, *inputs, function="add"):
        return (FORMULAS[function](*inputs),)

    formulas = property(lambda self: (self.formula,))

    def units(self, function="add"):
        """A difference is rounded before it is squared, which doubles its relative error."""
        return super().units() + 2 * (function == "squared_difference")

    def inputs(self, shapes, dtype, seed=1, function="add"):
        x, y, *alpha = super().inputs(shapes, dtype, seed)
        if function == "pow":
            x = np.asarray(np.abs(x) + 0.25, dtype)
        if "div" in function or function == "mul_no_nan":
            y = np.asarray(np.where(y < 0, y - 0.25, y + 0.25), dtype)
        return [x, y, *(np.asarray(each, np.float32) for each in alpha)]

    others = (*FUNCTIONS, *MIXED)

    def other_calls(self, function):
        if function in MIXED:
            yield from mixed_calls(function)
            return
        for dtype, alpha in dtypes_of(function):
            for shapes in (((9, 32), (32,)), ((9, 7), (9, 1)), ((5, 16), ()), ((), (3, 5))):
                inputs = [values(dtype, function, shape, seed) for seed, shape in enumerate(shapes)]
                inputs += [np.array(-3, alpha)] if alpha else []
                yield Call(operators(function), inputs, results_of(operators(function), *inputs), [])

    huge = ((BIG // 3,),)

    def check_huge(self, gpu, rows):
        x, y = gpu.random(rows, 3), gpu.random(3)
        (z,) = gpu.run(operators("add"), x, y)
        gpu.assert_equal(z, x + y)
        (z,) = gpu.run(operators("mul"), x, x[:, :1].contiguous())
        gpu.assert_equal(z, x * x[:, :1])

    def random_case(self, random):
        axes = [random.choice(((n, n), (n, 1), (1, n))) for n in lengths(random)]
        function = random.choice((*ARITHMETIC, *COMPARISONS, *SCALED_SUMS))
        shapes = [tuple(pair[k] for pair in axes) for k in (0, 1)]
        return [*shapes, *[()] * (function in SCALED_SUMS)], {"function": function}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_dtype(function):
    """Each function gives NumPy's numbers in each of its dtypes, also where numbers are special."""
    roundings = {"pow": 4, "add_ext": 1, "sub_ext": 1}.get(function, 0)
    for call in Binary().other_calls(function):
        [z], dtype = call.results, call.inputs[0].dtype
        wide = roundings and function != "pow" and dtype.kind == "f"
        inputs = [x.astype(np.longdouble) for x in call.inputs] if wide else call.inputs
        with np.errstate(all="ignore"):
            want = FORMULAS[function](*inputs).astype(z.dtype)
        np.testing.assert_allclose(z, want, rtol=roundings * np.finfo(dtype).eps if dtype.kind == "f" else 0)


@pytest.mark.parametrize("function", MIXED)
def test_two_dtypes(function):
    formula = np.multiply if function == "mul_mixed" else np.divide
    with np.errstate(all="ignore"):
        for call in mixed_calls(function):
            np.testing.assert_array_equal(call.results[0], formula(*(x.astype(np.float32) for x in call.inputs)))
    with pytest.raises(TypeError, match="y must not be float16 as x is"):
        operators(function)(*[mindspore.Tensor(np.zeros(3, np.float16))] * 2)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_other_dtypes_are_refused(function, capfd):
    """The table in operations.h, which callers ask, is that of the Python module."""
    for kinds in itertools.product(ALL, ("float32", "int64") if function in SCALED_SUMS else (None,)):
        if kinds not in dtypes_of(function):
            x = np.ones(3, kinds[0])
            alpha = [np.ones((), kinds[1])] if kinds[1] else []
            assert prepare_operator(operators(function), [x, x, *alpha, x])() == Status.BAD_DTYPE
            assert "does not take" in capfd.readouterr().err


@pytest.mark.parametrize("op", [16, 20, 22, 26])
def test_operations_of_mindspore_are_refused(op, capfd):
    x = np.ones(3, np.float32)
    other = custom_op(operators("add").entry, "x, y -> z", infer=lambda x, y, op: x, op=op)
    assert prepare_operator(other, [x, x, x])() == Status.BAD_ATTRIBUTE


@pytest.mark.parametrize("exponent", [2, 3, 0.5, -0.5, -1, 1, 0, 2.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_exponent(dtype, exponent):
    """An exponent of one element gives what the same exponents of the base's shape give."""
    x = values(dtype, "pow", (5, 50), 3)
    full = np.full_like(x, exponent)
    results = [results_of(operators("pow"), x, y)[0] for y in (np.asarray(exponent, dtype), full)]
    np.testing.assert_allclose(*results, rtol=2 * np.finfo(dtype).eps)
    np.testing.assert_array_equal(*(np.signbit(np.nan_to_num(y)) for y in results))  # of zeros
