"""Describes the subject of opcheck: an operator, a Cell or a function, with its reference."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore
import numpy as np
from mindspore import nn

from ..core.operator import Operator
from ..core.spec import FLOATS, dtype_called, dtype_name
from . import checks
from .checks import Net, as_tuple, cast, is_floating, run
from .report import Report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .checks import Array, Arrays, Function, Rtol

EVALUATIONS = 12  # of the reference for a result, about
LEFT = {"other sizes": 4.0, "large sizes": 3.0}  # seconds of processor time for the reference


class Subject(NamedTuple):
    """An operator, a Cell or a function, with all that its checks need to know."""

    report: Report
    op: Any  # Operator, Cell or function
    reference: Any  # function of arrays, or None
    half_in_float32: bool
    rtol: Rtol
    dtypes: list[str] | list[None]
    inputs: list[str]  # names
    results: list[str]  # names of the outputs that the reference has; empty if they are unknown
    differentiable: list[int]  # indices of inputs
    omitted: list[str]  # names of differentiable inputs whose gradient the gradient's operator does not return
    counts: dict[Any, list[float]]  # by the reference and shapes: on how many inputs its results depend
    known: dict[Any, bool]  # by the check and shapes: whether the reference is used for them
    left: dict[str, float]  # by the check: seconds that the reference may still take

    def taken(self, arrays: Arrays, dtype: str | None) -> list[Array]:
        """Casts arrays as the operator takes them when its common dtype is `dtype`; None leaves them. A floating array
        that may have several dtypes gets the widest."""
        if dtype is None:
            return list(arrays)
        if not isinstance(self.op, Operator):
            return cast(arrays, dtype)
        signature, taken = self.op.signature, []
        dtypes: dict[str, mindspore.Type] = {}
        for tensor, a in zip(signature.inputs, arrays):
            if tensor.dtype:
                allowed = signature.allowed(tensor, getattr(mindspore, dtype), dtypes)
                widest = max(allowed, key=lambda dtype: np.dtype(dtype_name(dtype)).itemsize)
                own = dtype_called(a.dtype.name)
                dtypes[tensor.name] = own if own in allowed and not is_floating(a) else widest
                taken.append(a.astype(dtype_name(dtypes[tensor.name])))
            else:
                dtypes[tensor.name] = getattr(mindspore, dtype)
                taken += cast([a], dtype)
        return taken

    def in_float64(self, arrays: Arrays) -> bool:
        """Tells whether all gradients of these arrays are float64."""
        return all(arrays[i].dtype == np.float64 for i in self.differentiable)

    def takes_float64(self, arrays: Arrays) -> bool:
        return "float64" in self.dtypes and self.in_float64(self.taken(arrays, "float64"))

    def variants(self, cases: Sequence[Arrays]) -> Iterator[tuple[str | None, str, list[Array]]]:
        """Yields (dtype, words, inputs) for each case and dtype."""
        for i, case in enumerate(cases):
            for dtype in self.dtypes:
                yield dtype, f"{dtype or 'as given'}{f', case {i}' if len(cases) > 1 else ''}", self.taken(case, dtype)

    def net(self) -> nn.Cell:
        return self.op if isinstance(self.op, nn.Cell) else Net(self.op)

    def compared(self, outs: Arrays) -> Arrays:
        """Returns the outputs that the reference has."""
        return outs[: len(self.results) or None]

    def seconds(self, arrays: Arrays) -> float | None:
        """Returns the processor time that the reference takes, or None if there is none or it fails."""
        begin = time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.reference(*arrays)
        except Exception:  # noqa: BLE001 (a reference may raise anything)
            return None
        return time.process_time() - begin

    def at_sizes(self, arrays: Arrays, check: str) -> Subject:
        """Returns the subject, without its reference if that fails for arrays of these sizes, or if it would take
        longer than a check may."""
        key = check, tuple((a.shape, a.dtype.name) for a in arrays)
        if key not in self.known:
            seconds = self.seconds(arrays)
            self.known[key] = seconds is not None and EVALUATIONS * seconds <= self.left[check]
            if self.known[key]:
                self.left[check] -= EVALUATIONS * (seconds or 0.0)
            elif seconds is not None:
                self.report.skipped[check] = "the reference is too slow for some"
        return self if self.known[key] else self._replace(reference=None)

    def terms(self, arrays: Arrays) -> list[float]:
        """Counts on how many inputs the reference's results depend, once for arrays of these shapes."""
        key = self.reference, tuple(a.shape for a in arrays)
        if key not in self.counts:
            self.counts[key] = checks.count_terms(self.reference, arrays)
        return self.counts[key]

    def accurate(self, results: Arrays, arrays: Arrays) -> None:
        settings: dict[str, Any] = {"rtol": self.rtol, "terms": self.terms(arrays)}
        checks.assert_accurate(results, self.reference, arrays, self.half_in_float32, self.results, **settings)


def describe(
    op: Any,
    reference: Function | None,
    half_in_float32: bool,
    rtol: Rtol,
    no_gradient: Sequence[str],
    inputs: Arrays,
) -> Subject:
    """Makes the Subject of opcheck's arguments, with a report that says what cannot be checked."""
    is_operator = isinstance(op, Operator)
    name = op.label if is_operator else getattr(op, "__name__", type(op).__name__)
    names = [f"input {i}" for i in range(len(inputs))]
    results: list[str] = []
    if is_operator:
        names, _ = op.names()
        if len(names) != len(inputs):
            raise ValueError(f"opcheck of {name}: inputs must be {len(names)} arrays, got {len(inputs)}")
        results = op.names()[1]
        _require_dtypes(op, inputs)
    if isinstance(no_gradient, str) or not set(no_gradient) <= set(names):
        raise ValueError(
            f"opcheck of {name}: no_gradient must be names of inputs ({', '.join(names)}), got {no_gradient!r}"
        )
    differentiable, omitted = [], []
    if not is_operator or op.gradient:
        differentiable = [i for i, a in enumerate(inputs) if is_floating(a) and names[i] not in no_gradient]
    if is_operator and isinstance(op.gradient, Operator):
        omitted = [names[i] for i in differentiable if f"d{names[i]}" not in op.gradient.names()[1]]
    dtypes = _dtypes(op, inputs)
    shown = [dtype for dtype in dtypes if dtype] or list(dict.fromkeys(a.dtype.name for a in inputs))
    report = Report.of(name, tuple(shown))
    if not differentiable:
        reason = "no_gradient names all inputs" if no_gradient else "there is no gradient"
        report.skipped.update(dict.fromkeys(("gradient", "gradient's dtypes"), reason))
    elif no_gradient:
        report.skipped["gradient"] = f"no_gradient names {', '.join(no_gradient)}"
    if reference is None:
        report.skipped["forward"] = "there is no reference"
    about = names, results, differentiable, omitted
    subject = Subject(report, op, reference, half_in_float32, rtol, dtypes, *about, {}, {}, dict(LEFT))
    if is_operator and reference:
        results = results[: len(as_tuple(reference(*subject.taken(inputs, dtypes[-1]))))]
        subject = subject._replace(results=results)
    if dtypes == ["float64"]:
        report.skipped.setdefault("gradient's dtypes", "the operator takes only float64")
    elif not subject.takes_float64(inputs):
        report.skipped.setdefault("gradient's dtypes", "the operator takes no float64")
    return subject


def _require_dtypes(operator: Operator, inputs: Arrays) -> None:
    """Requires that integers are not given for a tensor that the signature says is floating."""
    for tensor, a in zip(operator.signature.inputs, inputs):
        if tensor.dtype is None and not is_floating(a) and set(operator.signature.dtypes) <= set(FLOATS):
            sizes = tensor.words()[1:-1].rstrip(",") or "..."
            raise TypeError(
                f"opcheck of {operator.label}: {tensor.name} is {a.dtype}, which the signature must say: "
                f"{tensor.name}({sizes}, dtype={a.dtype}); if it is floating, give floating numbers"
            )


def _dtypes(op: Any, inputs: Arrays) -> list[str] | list[None]:
    """Returns the floating dtypes that the operator takes, or [None] if opcheck cannot choose them."""
    names = [dtype_name(dtype) for dtype in FLOATS]
    if not any(map(is_floating, inputs)):
        return [None]
    if isinstance(op, Operator):
        return [name for name in names if getattr(mindspore, name) in op.signature.dtypes] or [None]

    def takes(name: str) -> bool:
        try:
            return bool(run(op if isinstance(op, nn.Cell) else Net(op), *cast(inputs, name)))
        except TypeError:
            return False

    return [name for name in names if takes(name)] or names
