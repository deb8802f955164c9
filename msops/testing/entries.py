"""Makes those checks of :func:`msops.testing.opcheck` that call C entries, in a process of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..core.operator import Operator
from ..core.spec import dtype_name
from . import derived, memory, trials
from .checks import as_tuple, is_floating
from .process import Process
from .report import ENTRY_CHECKS, Skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from .checks import Array, Arrays
    from .report import Report
    from .subject import Subject

    Named = list[tuple[str, list[Array]]]  # (words, inputs)


class Sizes(NamedTuple):
    """Inputs of other sizes than the given ones."""

    small: Named
    odd: Named

    @classmethod
    def of(cls, operator: Operator, arrays: Arrays) -> Sizes:
        if not all(map(is_floating, arrays)):
            return cls([], [])  # inputs that are not floating may depend on sizes
        return cls(list(derived.small_inputs(operator, arrays)), list(derived.odd_inputs(operator, arrays)))


def has_attributes(operator: Operator) -> bool:
    """Tells whether the operator, or its gradient's operator, has attributes."""
    gradient = operator.gradient
    return bool(operator.settings) or (isinstance(gradient, Operator) and has_attributes(gradient))


def check_entries(subject: Subject, cases: Sequence[Arrays], sizes: Sizes) -> None:
    """Makes all checks that do without MindSpore, in each dtype."""
    report = subject.report
    with Process(memory.mindspores_device()) as process:
        for where, arrays in subject.variants(cases):
            calls = _check_all(subject, "shapes and dtypes", where, arrays, process)
            _check_values(subject, f"C entry on the {process.where.name}, {where}", arrays, calls)
        for words, given in sizes.small + sizes.odd:
            for dtype in subject.dtypes:
                arrays = subject.taken(given, dtype)
                _check_all(subject.at_sizes(arrays), "other sizes", f"{dtype}, {words}", arrays, process)
        if report.failures.keys() & {"no crash", "bounds", "shapes and dtypes"} or "no crash" in report.skipped:
            report.skipped.setdefault("large sizes", "it needs what failed")
        else:
            trials.check_large_sizes(subject, cases[0], process)
    for check in ("special values", "threads", "no leak"):
        if check not in report.made:
            on_gpu = check != "special values" and process.where.device is not None
            why = "that is checked on the CPU" if on_gpu else "the operator takes no large sizes"
            report.skipped.setdefault(check, why)


def _check_values(subject: Subject, where: str, arrays: Arrays, calls: Sequence[memory.EntryCall]) -> None:
    """Makes the checks of other values, of dtypes and of memory on the first calls of the given inputs."""
    attempt, report = subject.report.attempt, subject.report
    if not calls or report.failures.keys() & {"no crash", "bounds"}:
        return
    attempt("special values", where, trials.check_special_values, subject, calls[0])
    for call in calls:
        if call is not calls[0]:
            if all(a.dtype == np.float64 for a in arrays if is_floating(a)):
                attempt("special values", where, trials.check_gradient_values, call)
            elif subject.takes_float64(arrays):
                attempt("gradient's dtypes", where, trials.check_dtype, subject, call)
        if call.process.where.device is None:
            attempt("no leak", where, trials.check_leak, call)
    if len(calls) > 1 and subject.in_float64(arrays):
        large = [100 * a if is_floating(a) else a for a in arrays]
        following = trials.follow(subject.op, large, lambda operator, inputs: _again(calls, operator, inputs))
        if len(following) > 1:
            attempt("gradient", f"{where}, inputs times 100", trials.check_differences, subject, *following[:2], 20)


def _again(calls: Sequence[memory.EntryCall], operator: Operator, inputs: Arrays) -> memory.EntryCall | None:
    """Makes a call of the same operator with other inputs, unless the entry refuses them."""
    (call,) = (call for call in calls if call.operator is operator)
    made = memory.EntryCall(operator, inputs, call.results, call.process)
    return None if made.status else made


def _check_all(
    subject: Subject, check: str, where: str, arrays: Arrays, process: Process
) -> Sequence[memory.EntryCall]:
    """Checks the entries of an operator, its gradient, and so on, and returns the first call of each. A status other
    than 0, or a wrong result, fails `check`."""
    operator, attempt = subject.op, subject.report.attempt
    given = check == "shapes and dtypes"
    if not attempt(check, where, check_promise, subject, arrays):
        return []
    where = f"C entry on the {process.where.name}, {where}"

    def make(following: Operator, inputs: Arrays) -> memory.EntryCall | None:
        results = subject.results if following is operator else following.names()[1]
        call = _check_entry(subject.report, check, where, following, inputs, results, process)
        if call and following is operator:
            if given and all(map(is_floating, arrays)):
                attempt("wrong inputs", where, memory.check_rule_agrees, call)
            if not given and subject.reference:
                attempt(check, where, subject.accurate, call.outputs(), arrays)
        return call

    return trials.follow(operator, arrays, make)


def _check_entry(
    report: Report,
    check: str,
    where: str,
    operator: Operator,
    arrays: Arrays,
    results: Sequence[str],
    process: Process,
) -> memory.EntryCall | None:
    try:
        memory.require_code(operator, process.where)
    except Skipped as reason:
        report.skipped.update(dict.fromkeys(ENTRY_CHECKS, str(reason)))
        if "other attributes" not in report.made:
            report.skipped.setdefault("other attributes", str(reason))
        return None
    call = check_call(report.attempt, check, where, operator, arrays, results, process)
    if call and check == "shapes and dtypes" and operator.settings:
        others = list(derived.other_attributes(operator))
        report.attempt("other attributes", where, memory.check_attributes, call, others, Process(process.where))
    return call


def check_call(
    attempt: Callable[..., Any],
    check: str,
    where: str,
    operator: Operator,
    arrays: Arrays,
    results: Sequence[str],
    process: Process,
) -> memory.EntryCall | None:
    """Makes the checks of a call of one entry, and wrong calls from it, by `attempt`, which is Report.attempt or does
    the same. opcheck makes them for users' operators, tests/test_entries.py for the package's own."""
    calls = []
    for fill in (memory.FILLS[0], *memory.FILLS):
        call = attempt("no crash", where, memory.EntryCall, operator, arrays, results, process, fill)
        if call is None or not attempt(check, where, memory.check_status, call):
            return None
        attempt("bounds", where, memory.check_bounds, call)
        attempt("inputs unchanged", where, memory.check_inputs_unchanged, call)
        calls.append(call)
    same, first, second = calls
    if attempt("repeated runs", where, memory.check_repeats, first, same):
        attempt("outputs written", where, memory.check_written, first, second)
    attempt("wrong calls", where, memory.check_wrong_calls, first)
    return first


def check_promise(subject: Subject, arrays: Arrays, outs: Arrays | None = None) -> bool:
    """Requires the shapes and dtypes that the operator promises and the reference has. float64 from the reference fits
    any floating dtype."""
    specs = _promised(subject.op, arrays) if outs is None else [(out.shape, out.dtype.name) for out in outs]
    promised = _promised(subject.op, arrays) if isinstance(subject.op, Operator) else specs
    wanted = promised
    if subject.reference:
        with np.errstate(all="ignore"):
            wanted = [(r.shape, r.dtype.name) for r in map(np.asarray, as_tuple(subject.reference(*arrays)))]
    names = subject.results or [f"output {i}" for i in range(len(specs))]
    wanted = wanted if subject.reference else wanted[: len(names)]
    assert len(wanted) == len(names), f"there are {len(names)} outputs, the reference has {len(wanted)}"
    for name, (shape, dtype), (want_shape, want_dtype), promise in zip(names, specs, wanted, promised):
        assert (shape, dtype) == promise, f"{name}: promised is {promise[1]} {promise[0]}, got {dtype} {shape}"
        assert shape == want_shape, f"{name}: the reference has shape {want_shape}, got {shape}"
        floating = dtype.startswith("float")
        fits = want_dtype in (dtype, "float64") if floating else not want_dtype.startswith("float")
        assert fits, f"{name}: the reference has {want_dtype}, got {dtype}"
    return True


def _promised(operator: Operator, arrays: Arrays) -> list[tuple[tuple[int, ...], str]]:
    return [(spec.shape, dtype_name(spec.dtype)) for spec in operator.infer(*derived.specs_of(arrays))]
