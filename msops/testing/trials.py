"""Makes further checks of :func:`msops.testing.opcheck` on calls of C entries: other values, large sizes, threads."""

from __future__ import annotations

import functools
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.operator import Operator
from . import checks, differences, memory
from .checks import Expected, as_tuple, assert_equal, assert_near, at, is_floating, largest, random_like, unit
from .derived import large_inputs
from .entry import Status
from .memory import EntryCall
from .report import Skipped

if TYPE_CHECKING:
    from collections.abc import Callable

    from .checks import Array, Arrays
    from .process import Process
    from .subject import Subject

    Case = tuple[str, list[Array]]

SECONDS = 4.0  # of processor time that all checks at large sizes may take
CALLS = 24  # how often they call an entry and its reference, about
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
            how: dict[str, Any] = {"rtol": subject.rtol, "terms": subject.terms(given)}
            expected = checks.expect(subject.reference, arrays, subject.half_in_float32, **how)
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


def check_gradient_values(subject: Subject, before: EntryCall, call: EntryCall) -> None:
    """Requires that results of the gradient of the call `before` are linear in the incoming gradients, and that a NaN
    reaches them from each input on which they depend smoothly.

    A maximum's gradient depends on the inputs by comparisons alone, and a NaN chooses like any number. Where the
    reference drops the NaN of an input, or of a result, the gradient may, too.
    """
    call, given = fresh(call), inputs_of(call)
    takes = [array.name for array in call.arrays[: call.inputs]]
    results = call.of(*given)
    incoming = {f"d{name}" for name in before.operator.names()[1]}
    times = 1024.0
    scaled = call.of(*(np.asarray(times * a, a.dtype) if name in incoming else a for name, a in zip(takes, given)))
    for name, got, want in zip(call.results, scaled, results):
        if is_floating(got):
            linear = np.asarray(want, np.float64) * times
            fits = np.abs(linear) < np.finfo(got.dtype).max / 2
            linear = np.where(fits, linear, 0)
            allowed = np.sqrt(np.finfo(got.dtype).eps) * (np.abs(linear) + largest(linear))
            words = f"{call.name} with gradients times {times:g}: {name}"
            assert_near(np.where(fits, got, 0), linear, allowed, words)
    for i, (name, a) in enumerate(zip(takes, given)):
        if not is_floating(a) or (name not in incoming and _drops_nan(subject, before, name)):
            continue
        for flat in checks.some_elements(a, min(a.size, 3)):
            where = np.unravel_index(flat, a.shape)
            changed, lost = a.copy(), a.copy()
            changed[where], lost[where] = a[where] * (1 + 1e-6) or 1e-6, np.nan
            moved = call.of(*given[:i], changed, *given[i + 1 :])
            changes = [(np.abs(new - old), largest(old)) for new, old in zip(moved, results) if is_floating(new)]
            depends = any(((change > 0) & (change < 1e-3 * size)).any() for change, size in changes)  # no jump
            if depends and not any(np.isnan(out).any() for out in call.of(*given[:i], lost, *given[i + 1 :])):
                raise AssertionError(
                    f"{call.name} with {at(name, where)} = nan: no result is nan, though results depend on it; where "
                    "that is right, the reference drops the nan, too"
                )


def _drops_nan(subject: Subject, before: EntryCall, name: str) -> bool:
    """Tells whether the reference has no NaN in the results for a NaN in the input `name` or, if that is the name of a
    result, for one in any input."""
    if subject.reference is None or before.operator is not subject.op:
        return False
    given = inputs_of(before)
    names = [array.name for array in before.arrays[: before.inputs]]
    if name in names:
        arrays = [np.full_like(a, np.nan) if each == name else a for each, a in zip(names, given)]
    else:
        arrays = [np.full_like(a, np.nan) if is_floating(a) else a for a in given]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [np.asarray(result) for result in as_tuple(subject.reference(*arrays))]
    return not any(np.isnan(result).any() for result in results if is_floating(result))


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
                found = differences.finite_differences(moved.of, inputs, douts, i, elements).finite()
            names = [array.name for array in forward.arrays[: forward.inputs]]
            differences.assert_differences(given[name], found, f"{gradient.name}: {name}", names, inputs, i)


def check_leak(call: EntryCall) -> None:
    """Requires that calls leave no memory allocated."""
    again = fresh(call)
    leak = again.answer(again.request(), leaks=True)["leak"]
    assert leak <= 0, f"{call.name}: each call leaves {leak} bytes allocated"


def check_threads(call: EntryCall) -> None:
    """Requires the same bits from any number of threads, and from calls at the same time with other inputs."""
    names, want = [f"{call.name}: {name}" for name in call.results], call.outputs()
    before: dict[int, list[Array]] = {}
    for threads in THREADS:
        call.again(threads=threads)
        memory.check_repeats(call, before.setdefault(threads, call.outputs()), f"with {threads} threads ")
    for threads, outputs in before.items():
        try:
            assert_equal(outputs, want, names)
        except AssertionError as error:
            raise AssertionError(f"{error} with {threads} threads: that depends on the number of threads") from None


def check_at_once(call: EntryCall) -> None:
    """Requires the same bits when two threads make calls at the same time, as MindSpore may do."""
    names, given = [f"{call.name}: {name}" for name in call.results], inputs_of(call)
    try:
        beside = fresh(call, [np.roll(a.reshape(-1), 1).reshape(a.shape) if is_floating(a) else a for a in given])
    except AssertionError:
        raise Skipped("the entry refuses other inputs of this size") from None
    want = call.outputs(), beside.outputs()
    for _ in range(4):
        call.answer(call.request(), beside.request(), threads=1)
        for each, outputs in zip((call, beside), want):
            try:
                assert_equal(each.outputs(), outputs, names)
            except AssertionError as error:
                raise AssertionError(f"{error}: a call of another thread, made at the same time, changes it") from None


def check_large_sizes(subject: Subject, given: Arrays, process: Process) -> None:
    """Checks the entries with each size so large that an input has more than 2^20 elements, or as large as takes
    SECONDS for all sizes."""
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
    parts = list(large_inputs(subject.op, subject.taken(given, widest)))
    for part in parts:
        case = attempt("large sizes", place, _grown, subject, part, process, SECONDS / len(parts) / CALLS)
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
            floating = all(map(is_floating, taken))  # other inputs may depend on sizes
            if floating and dtype == dtypes[0] and subject.at_sizes(taken, "large sizes").reference:
                attempt("large sizes", where, subject.accurate, calls[0].outputs(), taken)
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


def _grown(subject: Subject, part: Callable[[int], Case | None], process: Process, limit: float) -> Case | None:
    """Returns the largest of the inputs that the entries and the reference take at most `limit` seconds for."""
    found, before = None, 0.0
    for divisor in (256, 64, 16, 4, 1):
        case = part(divisor)
        if case is None:
            continue
        if divisor == 1:
            return case
        seconds, begin = subject.seconds(case[1]) or 0.0, time.process_time()
        calls = follow(subject.op, case[1], lambda operator, inputs: EntryCall(operator, inputs, (), process))
        if any(call.status == Status.BAD_VALUE for call in calls):
            return found  # a value does not fit sizes that are so large
        seconds += time.process_time() - begin + sum(call.seconds for call in calls)
        found = case
        if seconds * max(4.0, seconds / before if before else 4.0) > limit:
            break
        before = seconds
    return found
