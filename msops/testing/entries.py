"""Makes those checks of :func:`msops.testing.opcheck` that call C entries, in a process of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..core.operator import Operator
from ..core.spec import dtype_name
from . import derived, memory
from .checks import as_tuple, is_floating, random_like
from .process import Process
from .report import ENTRY_CHECKS, Skipped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .checks import Array, Arrays
    from .subject import Subject

    Named = list[tuple[str, list[Array]]]  # (words, inputs)


class Sizes(NamedTuple):
    """Inputs of other sizes than the given ones."""

    small: Named
    odd: Named

    @classmethod
    def of(cls, operator: Operator, arrays: Arrays) -> Sizes:
        return cls(list(derived.small_inputs(operator, arrays)), list(derived.odd_inputs(operator, arrays)))


def has_attributes(operator: Operator) -> bool:
    """Tells whether the operator, or its gradient's operator, has attributes."""
    gradient = operator.gradient
    return bool(operator.settings) or (isinstance(gradient, Operator) and has_attributes(gradient))


def check_entries(subject: Subject, cases: Sequence[Arrays], sizes: Sizes) -> None:
    """Makes all checks that do without MindSpore, in each dtype."""
    with Process(memory.mindspores_device()) as process:
        for where, arrays in subject.variants(cases):
            _check_both(subject, "shapes and dtypes", where, arrays, process)
        for words, given in sizes.small + sizes.odd:
            for dtype in subject.dtypes:
                arrays = subject.taken(given, dtype)
                _check_both(subject.at_sizes(arrays), "other sizes", f"{dtype}, {words}", arrays, process)


def _check_both(subject: Subject, check: str, where: str, arrays: Arrays, process: Process) -> None:
    """Checks the entries of an operator and its gradient. A status other than 0, or a wrong result, fails `check`."""
    operator, gradient, attempt = subject.op, subject.op.gradient, subject.report.attempt
    given = check == "shapes and dtypes"
    if not attempt(check, where, check_promise, subject, arrays):
        return
    where = f"C entry on the {process.where.name}, {where}"
    call = _check_entry(subject, check, where, operator, arrays, subject.results, process)
    if not call:
        return
    if given and all(map(is_floating, arrays)):
        attempt("wrong inputs", where, memory.check_rule_agrees, call)
    if not given and subject.reference:
        attempt(check, where, subject.accurate, call.outputs(), arrays)
    if isinstance(gradient, Operator):
        named = {array.name: array.values() for array in call.arrays}
        outputs = operator.names()[1]
        named |= {f"d{name}": dout for name, dout in zip(outputs, random_like([named[name] for name in outputs]))}
        takes, gives = gradient.names()
        _check_entry(subject, check, where, gradient, [named[name] for name in takes], gives, process)


def _check_entry(
    subject: Subject,
    check: str,
    where: str,
    operator: Operator,
    arrays: Arrays,
    results: Sequence[str],
    process: Process,
) -> memory.EntryCall | None:
    report, attempt = subject.report, subject.report.attempt
    try:
        memory.require_code(operator, process.where)
    except Skipped as reason:
        report.skipped.update(dict.fromkeys(ENTRY_CHECKS, str(reason)))
        if "other attributes" not in report.made:
            report.skipped.setdefault("other attributes", str(reason))
        return None
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
    if check == "shapes and dtypes" and operator.settings:
        others = list(derived.other_attributes(operator))
        attempt("other attributes", where, memory.check_attributes, first, others, Process(process.where))
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
