"""Makes the checks of :func:`msops.testing.opcheck`. Each raises an AssertionError that says what it saw, and where."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import numpy as np
from mindspore import Tensor, nn, ops

from ..compat import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Arrays = Sequence[Array]
    Function = Callable[..., Any]
    Rtol = Union[float, Mapping[str, float], None]


AROUND = 8  # roundings of a result, besides those of sums of inputs


class Net(nn.Cell):
    """A network of one operator."""

    def __init__(self, operator: Function, **settings: Any) -> None:
        super().__init__()
        self.operator = operator
        self.settings = settings

    def construct(self, *inputs: Tensor) -> Any:
        return self.operator(*inputs, **self.settings)


class Gradient(nn.Cell):
    """Takes the `n` inputs of `net` and gradients of its outputs; returns a tuple of gradients, or the only one."""

    def __init__(self, net: nn.Cell, n: int) -> None:
        super().__init__()
        self.net, self.n = net, n
        self.gradient = ops.GradOperation(get_all=True, sens_param=True)

    def construct(self, *arguments: Tensor) -> Any:
        douts = arguments[self.n :]
        gradients = self.gradient(self.net)(*arguments[: self.n], douts[0] if len(douts) == 1 else douts)
        return gradients[0] if self.n == 1 else gradients


def as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def run(net: nn.Cell, *inputs: Array | Tensor) -> tuple[Array, ...]:
    """Calls a Cell with NumPy arrays or Tensors, and returns NumPy arrays."""
    return tuple(out.asnumpy() for out in as_tuple(net(*(x if isinstance(x, Tensor) else Tensor(x) for x in inputs))))


def run_gradient(net: nn.Cell, inputs: Arrays, douts: Arrays) -> tuple[Array, ...]:
    return run(Gradient(net, len(inputs)), *inputs, *douts)


def is_floating(array: Array) -> bool:
    return array.dtype.kind == "f"


def cast(arrays: Arrays, dtype: npt.DTypeLike) -> list[Array]:
    """Casts floating arrays to `dtype`, and keeps the others."""
    return [a.astype(dtype) if is_floating(a) else a for a in arrays]


def random_like(arrays: Arrays, seed: int = 0) -> list[Array]:
    """Returns random gradients of these outputs, which are zeros for outputs that are not floating."""
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(a.shape) * is_floating(a), a.dtype) for a in arrays]


def at(name: str, index: Sequence[Any]) -> str:
    return f"{name}[{', '.join(map(str, index))}]" if index else name


def assert_equal(results: Arrays, expected: Arrays, names: Sequence[str] | None = None) -> None:
    """Requires that results have the expected shapes, dtypes and bits."""
    names = names or [f"output {i}" for i in range(len(expected))]
    assert len(results) == len(expected), f"there are {len(results)} outputs, expected {len(expected)}"
    for name, got, want in zip(names, results, expected):
        kinds = [f"{a.dtype} {a.shape}" for a in (want, got)]
        assert kinds[0] == kinds[1], f"{name}: expected {kinds[0]}, got {kinds[1]}"
        wrong = np.argwhere((words_of(got) != words_of(want)).any(-1))
        if len(wrong):
            index = tuple(wrong[0])
            raise AssertionError(
                f"{at(name, index)}: expected {want[index]}, got {got[index]}; {len(wrong)} of {got.size} differ"
            )


def words_of(array: Array) -> Array:
    """Returns the bits of an array, whose elements become words of at most 64 bits along a last axis."""
    size = array.dtype.itemsize
    words = np.ascontiguousarray(array).view(f"u{min(size, 8)}")
    return words.reshape(*array.shape, max(1, size // 8))


def assert_near(got: Array, want: Array, allowed: Array, name: str) -> None:
    """Requires errors of at most `allowed`, an array. Infinities and NaN must be equal."""
    with np.errstate(all="ignore"):
        error = np.where((got == want.astype(got.dtype)) | (np.isnan(got) & np.isnan(want)), 0, np.abs(got - want))
        wrong = ~((error == 0) | (error <= allowed))
    if wrong.any():
        worst = np.unravel_index(np.where(wrong, np.nan_to_num(error / allowed, nan=np.inf), -1).argmax(), wrong.shape)
        raise AssertionError(
            f"{at(name, worst)}: expected {want[worst]:.9g}, got {got[worst]:.9g}, an error of {error[worst]:.3g} "
            f"where {allowed[worst]:.3g} is allowed; {wrong.sum()} of {wrong.size} are wrong"
        )


def unit(size: Any, dtype: np.dtype[Any]) -> Any:
    """Returns the unit in the last place of numbers of this size in a dtype."""
    largest = np.nextafter(np.finfo(dtype).max, np.zeros((), dtype))  # the next number must be finite for np.spacing
    return np.spacing(np.minimum(np.abs(size), largest).astype(dtype)).astype(np.float64)


def largest(array: Array) -> Any:
    """Returns the largest finite magnitude."""
    return np.abs(array, where=np.isfinite(array), out=np.zeros_like(array)).max(initial=0)


def count_terms(function: Function, inputs: Arrays) -> list[float]:
    """Returns on how many inputs an element of each result of `function` depends, on average.

    A few inputs are changed one at a time: it is the mean number of results that change, times the number of inputs,
    over the number of results.
    """
    inputs = cast(inputs, np.float64)
    results = as_tuple(function(*inputs))
    counts = [0.0] * len(results)
    with np.errstate(all="ignore"):
        for i, a in enumerate(inputs):
            elements = some_elements(a, min(a.size, 3)) if is_floating(a) else ()
            for flat in elements:
                moved = a.copy()
                moved.flat[flat] = moved.flat[flat] * (1 + 1e-3) or 1e-3
                after = as_tuple(function(*inputs[:i], moved, *inputs[i + 1 :]))
                for j, (new, old) in enumerate(zip(after, results)):
                    changed = np.asarray(new) != np.asarray(old)
                    counts[j] += a.size / len(elements) * float(np.mean(changed) if changed.size else 0)
    return counts


def rounding(
    function: Function,
    inputs: Arrays,
    eps: float,
    rtol: float | None = None,
    terms: Sequence[float] | None = None,
    samples: int | None = None,
) -> list[Array]:
    """Returns the error that rounding may make in each element y of each result of `function`, which is precise.

    A result is right if it is the exact one for inputs, and then results, that are each off by n eps, relative to their
    size. To first order that allows n eps (|y| + sum_i |x_i dy/dx_i|), where n is AROUND more than the number of inputs
    on which y depends. For a sum this is the bound for any order of its n terms, n eps sum_i |x_i|. `rtol` takes the
    place of n eps. `terms` has for each result that number of inputs, which :func:`count_terms` finds out otherwise;
    `samples` is how often the sum over i is estimated.

    The function is a black box. The terms x_i dy/dx_i are added up with random signs; the root mean square of several
    such sums is (sum_i term_i^2)^1/2, and sum_i |term_i| is at most n^1/2 times as large.
    """
    inputs = cast(inputs, np.float64)
    rng = np.random.default_rng(0)
    terms = count_terms(function, inputs) if terms is None else terms
    results = [np.asarray(result, np.float64) for result in as_tuple(function(*inputs))]
    squares = [np.zeros(result.shape) for result in results]
    with np.errstate(all="ignore"):
        elements, step = sum(a.size for a in inputs), 1e-6
        samples = samples or (8 if elements <= 2**11 else 4 if elements <= 2**16 else 2)
        for _ in range(samples):
            signs = [a * (1 + rng.choice([-step, step], a.shape)) if is_floating(a) else a for a in inputs]
            changes = [np.asarray(new, np.float64) - old for new, old in zip(as_tuple(function(*signs)), results)]
            terms_added = [np.where(np.isfinite(change), change, 0) / step for change in changes]
            squares = [square + added**2 / samples for square, added in zip(squares, terms_added)]
    allowed = []
    for result, count, square in zip(results, terms, squares):
        n = max(1.0, count)
        size = np.abs(np.where(np.isfinite(result), result, 0)) + np.sqrt(n * square)
        allowed.append(((n + AROUND) * eps if rtol is None else rtol) * size)
    return allowed


class Expected(NamedTuple):
    """A result of a reference, and the error that an operator may make.

    Attributes:
        want (array): The result of the reference, computed precisely.
        plain (array): The result of the reference in the dtype in which the operator computes.
        allowed (function): Returns the allowed error of each element of a result of this dtype.
    """

    want: Array
    plain: Array
    allowed: Callable[[np.dtype[Any]], Array]


def expect(
    formula: Function,
    inputs: Arrays,
    half_in_float32: bool = True,
    units: int = 1,
    rtol: Rtol = None,
    terms: Sequence[float] | None = None,
) -> list[Expected]:
    """Returns what :func:`assert_accurate` compares results with; `terms` is as in :func:`rounding`."""
    dtype = min((a.dtype for a in inputs if is_floating(a)), key=lambda dtype: dtype.itemsize, default=None)
    in_float32 = dtype == np.float16 and half_in_float32
    with np.errstate(all="ignore"):
        try:
            exact = as_tuple(formula(*cast(inputs, np.longdouble if dtype == np.float64 else np.float64)))
        except TypeError:  # SciPy's functions and numpy.linalg's take no long double
            exact, units = as_tuple(formula(*cast(inputs, np.float64))), max(16, units)
        plain = as_tuple(formula(*(cast(inputs, np.float32) if in_float32 else inputs)))
        by_sums: list[Any] = [0.0] * len(exact)
        if dtype is not None:
            by_sums = rounding(formula, inputs, *precision(dtype, half_in_float32, rtol), terms)

    def expected(want: Array, numpy: Array, by_sums: Any) -> Expected:
        def allowed(dtype: np.dtype[Any]) -> Array:
            with np.errstate(all="ignore"):
                last = (
                    0.75 * unit(want, dtype)
                    if in_float32 and dtype == np.float16
                    else units * unit(largest(want), dtype)
                )
                return np.broadcast_to(2 * largest(numpy - want) + last + by_sums, want.shape)

        return Expected(want, numpy, allowed)

    return [expected(*each) for each in zip(map(np.asarray, exact), map(np.asarray, plain), by_sums)]


def precision(dtype: np.dtype[Any], half_in_float32: bool, rtol: Rtol) -> tuple[float, float | None]:
    """Returns eps of the dtype in which an operator computes, and the `rtol` for arrays of `dtype`."""
    computed = np.float32 if dtype == np.float16 and half_in_float32 else dtype
    return float(np.finfo(computed).eps), rtol.get(dtype.name) if isinstance(rtol, Mapping) else rtol


def assert_accurate(
    results: Arrays,
    formula: Function,
    inputs: Arrays,
    half_in_float32: bool = True,
    names: Sequence[str] | None = None,
    units: int = 1,
    rtol: Rtol = None,
    terms: Sequence[float] | None = None,
) -> None:
    """Requires the results of `formula`, computed in NumPy in a wider dtype, up to rounding.

    Three errors are allowed: what :func:`rounding` says of sums, in any order; twice the largest error that `formula`
    makes in NumPy in the inputs' dtype; and `units` in the last place of the largest result. For float16 NumPy computes
    in float32, and each result may be off by 0.75 units in its own last place, half a unit by rounding to nearest and a
    quarter for unlucky ties. Results that are not floating must be equal.
    """
    expected = expect(formula, inputs, half_in_float32, units, rtol, terms)
    assert len(results) == len(expected), f"there are {len(results)} outputs, the reference has {len(expected)}"
    for i, (got, (want, _, allowed)) in enumerate(zip(results, expected)):
        name = names[i] if names else f"output {i}"
        assert got.shape == want.shape, f"{name}: expected shape {want.shape}, got {got.shape}"
        if got.size == 0:
            continue
        if not is_floating(got):
            assert_equal([got], [want.astype(got.dtype)], [name])
            continue
        assert_near(got, want, allowed(got.dtype), name)


def some_elements(array: Array, most: int = 200) -> Array:
    """Returns the indices of all elements of an array, or of `most` elements of a larger one."""
    if array.size <= most:
        return np.arange(array.size)
    return np.r_[0, array.size - 1, np.random.default_rng(0).choice(array.size, most - 2, replace=False)]


def check_gradient_dtype(
    gradients: Arrays,
    in_float64: Callable[[Arrays], Arrays],
    inputs: Arrays,
    douts: Arrays,
    names: Sequence[str],
    which: Sequence[int],
    half_in_float32: bool = True,
    rtol: Rtol = None,
    differences: bool = False,
) -> None:
    """Requires that gradients are near those that `in_float64` returns.

    Three errors are allowed: what :func:`rounding` says of sums; twice the largest change of the gradients in float64
    when the arrays are rounded, since an operator may keep rounded results for its gradient; and one unit in the last
    place of the largest gradient, incoming gradients included. Zeros are not rounded, since that could move them off a
    kink. The rounding of finite `differences` hides on which inputs they depend: sums are taken to be over all.
    """
    arrays = [*inputs, *douts]
    exact = in_float64(arrays)
    rng = np.random.default_rng(0)
    rounded = in_float64(
        [a + rng.choice([-0.5, 0.5], a.shape) * unit(a, a.dtype) * (a != 0) if is_floating(a) else a for a in arrays]
    )
    size = max((largest(dout) for dout in douts if is_floating(dout)), default=0)
    dtype = min((a.dtype for a in inputs if is_floating(a)), key=lambda dtype: dtype.itemsize)
    terms, samples = ([sum(a.size for a in arrays)] * len(exact), 2) if differences else (None, None)
    sums = rounding(
        lambda *arrays: in_float64(arrays), arrays, *precision(dtype, half_in_float32, rtol), terms, samples
    )
    for i in which:
        name, got, want = f"gradient of {names[i]}", gradients[i], exact[i]
        kinds = [f"{a.dtype} {a.shape}" for a in (inputs[i], got)]
        assert kinds[0] == kinds[1], f"{name}: expected {kinds[0]}, got {kinds[1]}"
        allowed = 2 * largest(rounded[i] - want) + unit(max(largest(want), size), got.dtype) + sums[i]
        assert_near(got, want, np.broadcast_to(allowed, want.shape), name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides what C functions print to stderr."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


@contextlib.contextmanager
def no_files() -> Iterator[None]:
    """Sends what MindSpore writes after a failed compilation, the folder rank_0, to a temporary folder."""
    before = os.environ.get("MS_OM_PATH")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MS_OM_PATH"] = folder
        try:
            yield
        finally:
            del os.environ["MS_OM_PATH"]
            if before is not None:
                os.environ["MS_OM_PATH"] = before


def _turned(a: Array) -> Tensor:
    return Tensor(np.ascontiguousarray(a.T)).transpose(tuple(reversed(range(a.ndim)))) if a.ndim else Tensor(a)


def _sliced(a: Array) -> Tensor:
    if a.ndim == 0 or (VERSION < (2, 7) and a.dtype == np.uint8):  # old versions do not slice bytes
        return Tensor(a)
    return Tensor(np.pad(a, 1))[(slice(1, -1),) * a.ndim]


def check_views(net: nn.Cell, arrays: Arrays, results: int | None = None) -> None:
    """Requires the same bits from non-contiguous inputs, transposed or sliced, as from their copies."""
    expected = run(net, *arrays)[:results]
    for kind, view in (("transposed", _turned), ("sliced", _sliced)):
        try:
            assert_equal(run(net, *map(view, arrays))[:results], expected)
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from None


def check_repeats(net: nn.Cell, arrays: Arrays, results: int | None = None) -> None:
    """Requires that results are reproducible bit for bit."""
    expected = run(net, *arrays)[:results]
    for _ in range(3):
        assert_equal(run(net, *arrays)[:results], expected)


def check_inputs_unchanged(net: nn.Cell, inputs: Arrays, results: int | None = None) -> None:
    """Requires that a call leaves its inputs as they are, whatever its results."""
    tensors = [Tensor(a) for a in inputs]
    run(net, *tensors)
    assert_equal([tensor.asnumpy() for tensor in tensors], inputs, [f"input {i}" for i in range(len(inputs))])


# opcheck makes these checks of calls of a Cell and of its gradient, and tests/operator_test.py of the cards' calls.
CALL_CHECKS: dict[str, Callable[..., None]] = {
    "inputs unchanged": check_inputs_unchanged,
    "repeated runs": check_repeats,
    "views": check_views,
}
