"""Makes the checks of :func:`msops.testing.opcheck`. Each raises an AssertionError that says what it saw, and where."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Tensor, nn, ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Arrays = Sequence[Array]
    Function = Callable[..., Any]


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
        size = got.dtype.itemsize
        wrong = np.argwhere(np.ascontiguousarray(got).view(f"u{size}") != np.ascontiguousarray(want).view(f"u{size}"))
        if len(wrong):
            index = tuple(wrong[0])[-got.ndim :] if got.ndim else ()
            raise AssertionError(
                f"{at(name, index)}: expected {want[index]}, got {got[index]}; {len(wrong)} of {got.size} differ"
            )


def assert_near(got: Array, want: Array, allowed: Array, name: str) -> None:
    """Requires errors of at most `allowed`, an array. Infinities and NaN must be equal."""
    with np.errstate(all="ignore"):
        error = np.where((got == want.astype(got.dtype)) | (np.isnan(got) & np.isnan(want)), 0, np.abs(got - want))
        wrong = ~(error <= allowed)
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


def assert_accurate(
    results: Arrays,
    formula: Function,
    inputs: Arrays,
    half_in_float32: bool = True,
    names: Sequence[str] | None = None,
    units: int = 1,
) -> None:
    """Requires that errors are at most twice the largest error that `formula` makes in NumPy in the inputs' dtype.

    `units` in the last place of the largest result are allowed on top, since NumPy's own error may happen to be 0. For
    float16 the bound is tighter: NumPy computes in float32, and each result may be off by 0.75 units in its own last
    place, half a unit by rounding to nearest and a quarter for unlucky ties. Results that are not floating must be
    equal.
    """
    dtype = min((a.dtype for a in inputs if is_floating(a)), key=lambda dtype: dtype.itemsize, default=None)
    in_float32 = dtype == np.float16 and half_in_float32
    with np.errstate(all="ignore"):
        try:
            exact = as_tuple(formula(*cast(inputs, np.longdouble if dtype == np.float64 else np.float64)))
        except TypeError:  # SciPy's functions and numpy.linalg's take no long double
            exact, units = as_tuple(formula(*cast(inputs, np.float64))), max(16, units)
        plain = as_tuple(formula(*(cast(inputs, np.float32) if in_float32 else inputs)))
    assert len(results) == len(exact), f"there are {len(results)} outputs, the reference has {len(exact)}"
    for i, (got, want, numpy) in enumerate(zip(results, map(np.asarray, exact), plain)):
        name = names[i] if names else f"output {i}"
        assert got.shape == want.shape, f"{name}: expected shape {want.shape}, got {got.shape}"
        if got.size == 0:
            continue
        if not is_floating(got):
            assert_equal([got], [want.astype(got.dtype)], [name])
            continue
        rounded = in_float32 and got.dtype == np.float16
        with np.errstate(all="ignore"):
            last = 0.75 * unit(want, got.dtype) if rounded else units * unit(largest(want), got.dtype)
            allowed = 2 * largest(numpy - want) + last
        assert_near(got, want, np.broadcast_to(allowed, want.shape), name)


def finite_differences(
    function: Function, inputs: Arrays, douts: Arrays, i: int, elements: Array, gradient: Array
) -> tuple[Array, float]:
    """Returns the gradient of some elements of input `i`, and the size of the sums whose difference it is.

    At a kink, such as that of relu at 0, the differences to the left and to the right disagree. Any number between them
    is right there, and the number nearest to `gradient` is returned.
    """
    step = 1e-6
    expected, size = np.empty(len(elements)), 0

    def total(moved: Array) -> Any:
        nonlocal size
        outs = map(np.asarray, as_tuple(function(*inputs[:i], moved, *inputs[i + 1 :])))
        terms = [out * dout for out, dout in zip(outs, douts) if is_floating(out)]
        size = max(size, sum(np.abs(term).sum() for term in terms))
        return sum(term.sum() for term in terms)

    here = total(inputs[i]) if len(elements) else 0
    for k, flat in enumerate(elements):
        sides = []
        for sign in (-1, 1):
            moved = np.array(inputs[i])
            moved.flat[flat] += sign * step
            sides.append(sign * (total(moved) - here) / step)
        expected[k] = (sides[0] + sides[1]) / 2
        if abs(sides[1] - sides[0]) > 1e-3 * (1e-3 + max(map(abs, sides))) + 1e-8 * size:  # more than by curvature
            expected[k] = np.clip(gradient.flat[flat], min(sides), max(sides))
    return expected, size


def some_elements(array: Array, most: int = 200) -> Array:
    """Returns the indices of all elements of an array, or of `most` elements of a larger one."""
    if array.size <= most:
        return np.arange(array.size)
    return np.r_[0, array.size - 1, np.random.default_rng(0).choice(array.size, most - 2, replace=False)]


def check_finite_differences(
    gradients: Arrays,
    net: nn.Cell,
    inputs: Arrays,
    douts: Arrays,
    names: Sequence[str] | None = None,
    which: Sequence[int] | None = None,
    most: int = 200,
) -> None:
    """Requires that gradients in float64 equal finite differences, at `most` elements of each input."""
    for i, (array, gradient) in enumerate(zip(inputs, gradients)):
        if not is_floating(array) or (which is not None and i not in which):
            continue
        name = f"gradient of {names[i] if names else f'input {i}'}"
        assert gradient.shape == array.shape, f"{name}: expected shape {array.shape}, got {gradient.shape}"
        elements = some_elements(array, most)
        expected, size = finite_differences(functools.partial(run, net), inputs, douts, i, elements, gradient)
        # The error of the quotient itself is about 1e-16 size / step + step^2.
        got = gradient.reshape(-1)[elements]
        wrong = ~(np.abs(got - expected) <= 1e-7 + 1e-9 * size + 1e-6 * np.abs(expected))
        if wrong.any():
            k = np.flatnonzero(wrong)[np.nan_to_num(np.abs(got - expected)[wrong], nan=np.inf).argmax()]
            raise AssertionError(
                f"{at(name, np.unravel_index(elements[k], array.shape))}: finite differences give {expected[k]:.9g}, "
                f"got {got[k]:.9g}; {wrong.sum()} of {len(elements)} are wrong"
            )


def check_gradient_dtype(
    gradients: Arrays,
    in_float64: Callable[[Arrays], Arrays],
    inputs: Arrays,
    douts: Arrays,
    names: Sequence[str],
    which: Sequence[int],
) -> None:
    """Requires that gradients are near those that `in_float64` returns.

    Rounding the arrays changes the gradients in float64: twice the largest change is allowed. One unit in the last
    place of the largest gradient, incoming gradients included, is allowed on top. Zeros are not rounded, since that
    could move them off a kink.
    """
    arrays = [*inputs, *douts]
    exact = in_float64(arrays)
    rng = np.random.default_rng(0)
    rounded = in_float64(
        [a + rng.choice([-0.5, 0.5], a.shape) * unit(a, a.dtype) * (a != 0) if is_floating(a) else a for a in arrays]
    )
    size = max((largest(dout) for dout in douts if is_floating(dout)), default=0)
    for i in which:
        name, got, want = f"gradient of {names[i]}", gradients[i], exact[i]
        kinds = [f"{a.dtype} {a.shape}" for a in (inputs[i], got)]
        assert kinds[0] == kinds[1], f"{name}: expected {kinds[0]}, got {kinds[1]}"
        allowed = 2 * largest(rounded[i] - want) + unit(max(largest(want), size), got.dtype)
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
    return Tensor(np.pad(a, 1))[(slice(1, -1),) * a.ndim] if a.ndim else Tensor(a)


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


def check_inputs_unchanged(net: nn.Cell, inputs: Arrays) -> None:
    """Requires that a call leaves its inputs as they are."""
    tensors = [Tensor(a) for a in inputs]
    run(net, *tensors)
    assert_equal([tensor.asnumpy() for tensor in tensors], inputs, [f"input {i}" for i in range(len(inputs))])
