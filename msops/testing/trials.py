"""Makes further checks of :func:`msops.testing.opcheck` on calls of C entries: other values, large sizes, threads."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.operator import Operator
from . import checks, memory
from .checks import Expected, as_tuple, assert_equal, assert_near, at, is_floating, largest, random_like, unit
from .derived import large_inputs
from .entry import Status
from .memory import EntryCall
from .report import Skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .checks import Array, Arrays
    from .process import Process
    from .subject import Subject

    Case = tuple[str, list[Array]]

SECONDS = 1.0  # how long a call at a large size, and its reference, may take
THREADS = (1, 4, 4, 2, 4)  # in further calls at a large size


def follow(operator: Operator, arrays: Arrays, make: Callable[[Operator, Arrays], EntryCall | None]) -> list[EntryCall]:
    """Makes calls of an operator's entry, of its gradient's, and so on, until one is None. A gradient takes by name the
    inputs and results of earlier calls, and random gradients of these results."""
    known, calls = dict(zip(operator.names()[0], arrays)), []
    following: Any = operator
    while isinstance(following, Operator):
        takes, gives = following.names()
        call = make(following, [known[name] for name in takes])
        if call is None:
            break
        calls.append(call)
        results = {array.name: array.values().copy() for array in call.arrays[call.inputs :] if array.name in gives}
        known |= results
        known |= {f"d{name}": dout for name, dout in zip(results, random_like(list(results.values())))}
        following = following.gradient
    return calls


def inputs_of(call: EntryCall) -> list[Array]:
    """Returns copies of the inputs that a call was first made with."""
    return [array.values(array.before).copy() for array in call.arrays[: call.inputs]]


def fresh(call: EntryCall, inputs: Arrays | None = None) -> EntryCall:
    """Makes a call again in memory of its own."""
    inputs = inputs_of(call) if inputs is None else inputs
    again = EntryCall(call.operator, inputs, call.results, call.process)
    memory.check_status(again)
    return again


def check_special_values(subject: Subject, call: EntryCall) -> None:
    """Requires the results of the reference for inputs times 100, and with a NaN or an infinity in an input.

    An element that is NaN in the reference because of a NaN must be NaN, and one that an infinity changes may be NaN,
    as the infinity's difference from itself is; if it is infinite in the reference, it must not be finite. Where the
    reference is finite, also in the dtype itself, all other results must be right.
    """
    if not subject.reference:
        raise Skipped("there is no reference")
    call, given = fresh(call), inputs_of(call)
    cases = [("inputs times 100", 0.0, [np.asarray(100 * a, a.dtype) if is_floating(a) else a for a in given])]
    for i, a in enumerate(given):
        if is_floating(a) and a.size:
            where = np.unravel_index(np.random.default_rng(0).integers(a.size), a.shape)
            for value in (np.nan, np.inf, -np.inf):
                changed = a.copy()
                changed[where] = value
                words = f"with {at(call.arrays[i].name, where)} = {value}"
                cases.append((words, value, [*given[:i], changed, *given[i + 1 :]]))
    with np.errstate(all="ignore"):
        before = [np.asarray(want) for want in as_tuple(subject.reference(*given))]
    for words, value, arrays in cases:
        with np.errstate(all="ignore"):
            after = [np.asarray(want) for want in as_tuple(subject.reference(*arrays))]
            expected = checks.expect(subject.reference, arrays, subject.half_in_float32, rtol=subject.rtol)
        try:
            results = call.of(*arrays)
        except AssertionError:
            if call.status == Status.BAD_VALUE:
                continue  # the entry refuses this value
            raise
        for name, got, each, *change in zip(call.results, results, expected, before, after):
            if is_floating(got):
                may_be_nan = (change[0] != change[1]) & bool(np.isinf(value))
                _require_special(f"{words}: {name}", got, each, value, may_be_nan)


def _require_special(name: str, got: Array, expected: Expected, value: float, may_be_nan: Array) -> None:
    want, plain, allowed = expected
    finite = np.isfinite(want) & np.isfinite(plain) & ~(may_be_nan & np.isnan(got))
    lost = np.zeros(want.shape, bool)
    if np.isnan(value):
        lost = np.isnan(want) & ~np.isnan(got)
    elif np.isinf(value):
        lost = np.isinf(want) & np.isfinite(got)
    if lost.any():
        index = np.unravel_index(int(lost.argmax()), lost.shape)
        raise AssertionError(f"{at(name, index)}: the reference gives {want[index]}, got {got[index]}")
    assert_near(np.where(finite, got, 0), np.where(finite, want, 0), np.nan_to_num(allowed(got.dtype)), name)


def check_gradient_values(call: EntryCall) -> None:
    """Requires that a gradient's results are linear in the incoming gradients, and that a NaN reaches them."""
    call, given = fresh(call), inputs_of(call)
    takes = [array.name for array in call.arrays[: call.inputs]]
    results = call.of(*given)
    incoming = [i for i, name in enumerate(takes) if _is_incoming(name, takes) and is_floating(given[i])]
    times = 1024.0
    scaled = call.of(*(np.asarray(times * a, a.dtype) if i in incoming else a for i, a in enumerate(given)))
    for name, got, want in zip(call.results, scaled, results):
        if is_floating(got):
            linear = np.asarray(want, np.float64) * times
            fits = np.abs(linear) < np.finfo(got.dtype).max / 2
            linear = np.where(fits, linear, 0)
            allowed = np.sqrt(np.finfo(got.dtype).eps) * (np.abs(linear) + largest(linear))
            assert_near(np.where(fits, got, 0), linear, allowed, f"with gradients times {times:g}: {name}")
    for i, a in enumerate(given):
        for flat in checks.some_elements(a, min(a.size, 3)) if is_floating(a) else ():
            where = np.unravel_index(flat, a.shape)
            changed, lost = a.copy(), a.copy()
            changed[where], lost[where] = a[where] * 1.25 or 1, np.nan
            moved = call.of(*given[:i], changed, *given[i + 1 :])
            depends = any((new != old).any() for new, old in zip(moved, results) if is_floating(new))
            if depends and not any(np.isnan(out).any() for out in call.of(*given[:i], lost, *given[i + 1 :])):
                raise AssertionError(f"with {at(takes[i], where)} = nan: no result is nan, though results depend on it")


def _is_incoming(name: str, takes: Sequence[str]) -> bool:
    """Tells whether an input of a gradient's operator is the gradient of a result. A gradient's gradient takes the
    incoming gradients of both; it is linear in the latter."""
    order = max(len(each) - len(each.lstrip("d")) for each in takes)
    return len(name) - len(name.lstrip("d")) == order


def check_dtype(subject: Subject, call: EntryCall) -> None:
    """Requires that a gradient's entry gives what it gives in float64 for the same values, up to rounding."""
    given = inputs_of(call)
    wide = subject._replace(op=call.operator).taken(given, "float64")
    precise = fresh(call, wide)
    dtype = min((a.dtype for a in given if is_floating(a)), key=lambda dtype: dtype.itemsize)
    sums = checks.rounding(precise.of, wide, *checks.precision(dtype, subject.half_in_float32, subject.rtol))
    for name, got, want, by_sums in zip(call.results, call.outputs(), precise.of(*wide), sums):
        if is_floating(got) and got.size:
            rounded = got.dtype == np.float16 and subject.half_in_float32
            last = 0.75 * unit(want, got.dtype) if rounded else unit(largest(want), got.dtype)
            assert_near(got, want, last + by_sums, f"{call.name}: {name} beside float64")


def check_differences(subject: Subject, forward: EntryCall, gradient: EntryCall, most: int) -> None:
    """Requires that a gradient's entry equals finite differences of the entry whose gradient it is."""
    inputs = inputs_of(forward)
    moved = fresh(forward)
    moved.results = [
        array.name for array in forward.arrays[forward.inputs :] if array.name in forward.operator.names()[1]
    ]
    taken = {array.name: array.values(array.before) for array in gradient.arrays[: gradient.inputs]}
    given = dict(zip(gradient.results, gradient.outputs()))
    douts = [taken.get(f"d{name}", np.zeros(())) for name in moved.results]
    for i in subject.differentiable:
        name = f"d{forward.arrays[i].name}"
        if name in given:
            elements = checks.some_elements(inputs[i], most)
            with np.errstate(all="ignore"):
                expected, size = checks.finite_differences(moved.of, inputs, douts, i, elements, given[name])
            known = np.isfinite(expected)
            checks.assert_differences(given[name], expected[known], size, elements[known], f"{gradient.name}: {name}")


def check_leak(call: EntryCall) -> None:
    """Requires that calls leave no memory allocated."""
    again = fresh(call)
    leak = again.answer(again.request(), leaks=True)["leak"]
    assert leak <= 0, f"{call.name}: each call leaves {leak} bytes allocated"


def check_threads(call: EntryCall) -> None:
    """Requires the same bits from any number of threads, and from calls at the same time with other inputs."""
    names, want = [f"{call.name}: {name}" for name in call.results], call.outputs()
    for threads in THREADS:
        call.again(threads=threads)
        try:
            assert_equal(call.outputs(), want, names)
        except AssertionError as error:
            raise AssertionError(f"{error}: that depends on the number of threads, or on chance") from None


def check_at_once(call: EntryCall) -> None:
    """Requires the same bits when two threads make calls at the same time, as MindSpore may do."""
    names, given = [f"{call.name}: {name}" for name in call.results], inputs_of(call)
    try:
        beside = fresh(call, [np.roll(a.reshape(-1), 1).reshape(a.shape) if is_floating(a) else a for a in given])
    except AssertionError:
        raise Skipped("the entry refuses other inputs of this size") from None
    want = call.outputs(), beside.outputs()
    for _ in range(6):
        call.answer(call.request(), beside.request(), threads=1)
        for each, outputs in zip((call, beside), want):
            try:
                assert_equal(each.outputs(), outputs, names)
            except AssertionError as error:
                raise AssertionError(f"{error}: a call of another thread, made at the same time, changes it") from None


def check_large_sizes(subject: Subject, given: Arrays, process: Process) -> None:
    """Checks the entries with each size so large that an input has more than 2^20 elements, or as large as takes about
    a second."""
    report, attempt = subject.report, subject.report.attempt
    widest = subject.dtypes[-1]
    place = f"C entry on the {process.where.name}"
    # float32 where there is one, since NumPy's long double is slow; float64 for finite differences.
    dtypes = ["float32" if "float32" in subject.dtypes else widest]
    dtypes += (
        ["float64"]
        if dtypes[0] != "float64" and isinstance(subject.op.gradient, Operator) and widest == "float64"
        else []
    )
    for part in large_inputs(subject.op, subject.taken(given, widest)):
        case = attempt("large sizes", place, _grown, subject, part, process)
        if case is None:
            continue
        words, arrays = case
        for dtype in dtypes:
            taken, where = subject.taken(arrays, dtype), f"{place}, {dtype}, {words}"
            calls = follow(
                subject.op, taken, functools.partial(_make_large, subject, where, dtype == dtypes[0], process)
            )
            if not calls:
                continue
            plain = subject.at_sizes(taken)
            floating = all(map(is_floating, taken))  # other inputs may depend on sizes
            if plain.reference and floating and dtype == dtypes[0]:
                attempt("large sizes", where, plain.accurate, calls[0].outputs(), taken)
            if len(calls) > 1 and floating and subject.in_float64(taken):
                attempt("large sizes", where, check_differences, subject, *calls[:2], 4)
    if "large sizes" not in report.made:
        report.skipped.setdefault("large sizes", "the operator takes none")


def _make_large(
    subject: Subject, where: str, threads: bool, process: Process, operator: Operator, inputs: Arrays
) -> EntryCall | None:
    attempt = subject.report.attempt
    results = subject.results if operator is subject.op else operator.names()[1]
    call: EntryCall | None = attempt("no crash", where, EntryCall, operator, inputs, results, process)
    if call is None or not attempt("large sizes", where, memory.check_status, call):
        return None
    attempt("bounds", where, memory.check_bounds, call)
    if threads and process.where.device is None:
        attempt("threads", where, check_threads, call)
        attempt("threads", where, check_at_once, call)
    return call


def _grown(subject: Subject, part: Callable[[int], Case | None], process: Process) -> Case | None:
    """Returns the largest of the inputs that the entries and the reference are quick enough for."""
    found, before = None, 0.0
    for divisor in (64, 16, 4, 1):
        case = part(divisor)
        if case is None:
            continue
        if divisor == 1:
            return case
        begin = time.process_time()
        calls = follow(subject.op, case[1], lambda operator, inputs: EntryCall(operator, inputs, (), process))
        if any(call.status == Status.BAD_VALUE for call in calls):
            return found  # a value does not fit sizes that are so large
        if subject.reference:
            with np.errstate(all="ignore"):
                as_tuple(subject.at_sizes(case[1]).reference and subject.reference(*case[1]))
        seconds = time.process_time() - begin + sum(call.seconds for call in calls)
        found = case
        if seconds * max(4.0, seconds / before if before else 4.0) > SECONDS:
            break
        before = seconds
    return found
