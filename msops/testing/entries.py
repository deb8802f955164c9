"""Makes those checks of :func:`msops.testing.opcheck` that call C entries, in a process of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..core.operator import Operator
from ..core.spec import dtype_name
from . import derived, memory, trials
from .checks import as_tuple, is_floating
from .entry import Status
from .process import Process
from .report import ENTRY_CHECKS, Skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from .checks import Array, Arrays
    from .report import Report
    from .subject import Subject

    Named = list[tuple[str, list[Array]]]  # (words, inputs)

REFUSE = {Status.BAD_RANK, Status.BAD_SHAPE, Status.BAD_ATTRIBUTE, Status.BAD_VALUE}  # what an entry refuses sizes by


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


class Refusals:
    """Sizes that an entry refuses though the signature accepts them."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.found: dict[str, dict[str, str]] = {}  # by the entry and the words of the sizes: what the entry says

    def attempt_at(self, sizes: str) -> Callable[..., Any]:
        """Returns Report.attempt, except that a status that refuses these sizes is no failure yet."""

        def attempt(check: str, where: str, function: Callable[..., Any], *arguments: Any) -> Any:
            if function is memory.check_status and arguments[0].status in REFUSE:
                call = arguments[0]
                said = call.said.split(f"{call.name}: ")[-1] or f"it returns {call.status}"
                self.found.setdefault(call.name, {}).setdefault(sizes, said)
                return None
            return self.report.attempt(check, where, function, *arguments)

        return attempt

    def check(self, entry: str) -> None:
        """Fails once for all sizes that an entry refuses."""
        found = self.found[entry]
        sizes, more = "; ".join([*found][:4]), f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise AssertionError(
            f"{entry} refuses sizes that the signature accepts, {sizes}{more} ({next(iter(found.values()))}): unless "
            "the entry shall take them, the `infer` of custom_op must raise a ValueError for them"
        )


def check_entries(subject: Subject, cases: Sequence[Arrays], sizes: Sizes) -> tuple[Sizes, dict[str, Arrays]]:
    """Makes all checks that do without MindSpore, in each dtype. Returns the sizes that entries do not refuse, and by
    their words the results in the widest dtype, which have been compared with the reference's."""
    report, widest = subject.report, subject.dtypes[-1]
    refusals = Refusals(report)
    results: dict[str, Arrays] = {}
    with Process(memory.mindspores_device()) as process:
        place = f"C entry on the {process.where.name}"
        for dtype, where, arrays in subject.variants(cases):
            calls = _check_all(subject, "shapes and dtypes", where, arrays, process, report.attempt, dtype == widest)
            _check_values(subject, f"{place}, {where}", arrays, calls)
        for words, given in sizes.small + sizes.odd:
            for dtype in subject.dtypes:
                arrays = subject.taken(given, dtype)
                at_sizes, where = subject.at_sizes(arrays, "other sizes"), f"{dtype}, {words}"
                calls = _check_all(at_sizes, "other sizes", where, arrays, process, refusals.attempt_at(words))
                if calls and dtype == widest and at_sizes.reference:
                    results[words] = calls[0].outputs()
        for entry in refusals.found:
            report.attempt("other sizes", place, refusals.check, entry)
        if report.failures.keys() & {"no crash", "bounds", "shapes and dtypes"} or "no crash" in report.skipped:
            report.skipped.setdefault("large sizes", "it needs what failed")
        else:
            trials.check_large_sizes(subject, cases[0], process)
    for check in ("special values", "threads", "no leak"):
        if check not in report.made:
            on_gpu = check != "special values" and process.where.device is not None
            why = "that is checked on the CPU" if on_gpu else "the operator takes no large sizes"
            report.skipped.setdefault(check, why)
    refused = {words for found in refusals.found.values() for words in found}
    return Sizes(*([case for case in group if case[0] not in refused] for group in sizes)), results


def _check_values(subject: Subject, where: str, arrays: Arrays, calls: Sequence[memory.EntryCall]) -> None:
    """Makes the checks of other values, of dtypes and of memory on the first calls of the given inputs."""
    attempt, report = subject.report.attempt, subject.report
    if not calls or report.failures.keys() & {"no crash", "bounds"}:
        return
    attempt("special values", where, trials.check_special_values, subject, calls[0])
    for before, call in zip((None, *calls), calls):
        if before:
            if all(a.dtype == np.float64 for a in arrays if is_floating(a)):
                attempt("special values", where, trials.check_gradient_values, subject, before, call)
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
    subject: Subject,
    check: str,
    where: str,
    arrays: Arrays,
    process: Process,
    attempt: Callable[..., Any],
    once: bool = False,
) -> Sequence[memory.EntryCall]:
    """Checks the entries of an operator, its gradient, and so on, and returns the first call of each. A status other
    than 0, or a wrong result, fails `check`. With `once` it makes the checks, too, that do not depend on the dtype."""
    operator = subject.op
    if not attempt(check, where, check_promise, subject, arrays):
        return []
    where = f"C entry on the {process.where.name}, {where}"

    def make(following: Operator, inputs: Arrays) -> memory.EntryCall | None:
        results = subject.results if following is operator else following.names()[1]
        if not _can_call(subject.report, following, process):
            return None
        call = check_call(attempt, check, where, following, inputs, results, process, wrong_calls=once)
        if call and once and following.settings:
            others = list(derived.other_attributes(following))
            attempt("other attributes", where, memory.check_attributes, call, others, Process(process.where))
        if call and following is operator:
            if once and all(map(is_floating, arrays)):
                attempt("wrong inputs", where, memory.check_rule_agrees, call)
            if check == "other sizes" and subject.reference:
                attempt(check, where, subject.accurate, call.outputs(), arrays)
        return call

    return trials.follow(operator, arrays, make)


def _can_call(report: Report, operator: Operator, process: Process) -> bool:
    """Tells whether the operator has code for this device; else its checks are skipped."""
    try:
        memory.require_code(operator, process.where)
    except Skipped as reason:
        report.skipped.update(dict.fromkeys(ENTRY_CHECKS, str(reason)))
        if "other attributes" not in report.made:
            report.skipped.setdefault("other attributes", str(reason))
        return False
    return True


def check_call(
    attempt: Callable[..., Any],
    check: str,
    where: str,
    operator: Operator,
    arrays: Arrays,
    results: Sequence[str],
    process: Process,
    wrong_calls: bool = True,
) -> memory.EntryCall | None:
    """Makes the checks of a call of one entry, and wrong calls from it, by `attempt`, which is Report.attempt or does
    the same. opcheck makes them for users' operators, tests/test_entries.py for the package's own."""
    calls = []
    for fill in memory.FILLS:
        call = attempt("no crash", where, memory.EntryCall, operator, arrays, results, process, fill)
        if call is None or not attempt(check, where, memory.check_status, call):
            return None
        attempt("bounds", where, memory.check_bounds, call)
        attempt("inputs unchanged", where, memory.check_inputs_unchanged, call)
        calls.append(call)
    first, second = calls
    attempt("outputs written", where, memory.check_written, first, second)
    if wrong_calls:
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
