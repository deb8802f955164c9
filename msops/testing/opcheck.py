"""Tells in one call whether an operator is sound."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import mindspore
import numpy as np

from ..core.operator import Operator
from . import checks, derived, differences
from .checks import Gradient, cast, is_floating, random_like, run
from .entries import Sizes, check_entries, check_promise, has_attributes
from .report import CHECKS, ENTRY_CHECKS, OpCheckError, Skipped
from .subject import Subject, describe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mindspore import nn

    from .checks import Array, Arrays, Function, Rtol
    from .report import Report

MOST = 200  # elements of all inputs for which finite differences are taken: each takes two calls
MODES = {"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}


@checks.no_files()
def opcheck(
    op: Function,
    inputs: Arrays | Sequence[Arrays],
    reference: Function | None = None,
    *,
    other: tuple[Function, Function] | None = None,
    no_gradient: Sequence[str] = (),
    half_in_float32: bool = True,
    rtol: Rtol = None,
) -> Report:
    """Checks that an operator is sound, in graph and PyNative mode, on the current device target.

    - no crash: the C entries return, in a process of their own, for each dtype and size;
    - bounds, inputs unchanged, outputs written: an entry reads and writes no memory around its arrays, does not change
      its inputs, and writes all of its outputs;
    - wrong calls: an entry refuses wrong counts of parameters and shapes that do not fit, and then writes nothing;
    - shapes and dtypes: the results have the shapes and dtypes that the operator promises and the reference has;
    - special values: with inputs times 100, and with a NaN or an infinity in an input, the results are still those of
      the reference; a gradient is linear in the incoming gradients, and a NaN reaches it, unless the reference drops
      it;
    - large sizes: so they are beyond 10^6 elements, or as many as take a few seconds for all checks;
    - threads, no leak: bits depend neither on the number of threads nor on a call at the same time, and calls leave no
      memory allocated (on the CPU);
    - forward: in each dtype the error is at most that of the reference in this dtype, twice, plus the rounding of sums
      in any order, plus a unit in the last place;
    - gradient: for each floating input, the gradient in float64 equals finite differences of the operator, or of the
      reference if the operator takes no float64. At a kink, such as that of relu at 0 or a maximum of equal numbers, it
      lies between the differences to both sides, of each result by itself;
    - gradient's dtypes: in the other dtypes the gradient equals the gradient in float64, up to rounding;
    - second derivative: if the gradient's operator has a gradient, that equals finite differences, too;
    - graph = pynative, repeated runs, views: the bits do not depend on the mode, on earlier calls, or on strides;
    - other sizes: each size that the signature names may be 0, 1, odd, 128 and beyond 1024, unless the operator refuses
      it by a ValueError of `infer`;
    - other attributes: an entry's results do not depend on the attributes of earlier calls, for other values of each
      attribute; the operator given as `other`, called in between, returns its own results;
    - wrong inputs: they raise a TypeError or a ValueError.

    Findings that differ in sizes and dtypes alone are one. The check takes some seconds of processor time, at most
    about 15, and says on stderr every 5 s where it is. After a crash, or an access out of bounds, the checks that would
    call the entry in this process are skipped. On the GPU, reads out of bounds are found only if results depend on
    them. If the gradient is an Operator, its entry is checked, too.

    Args:
        op (Operator, function, Cell): It takes Tensors. Checks that need a C entry or a signature are made for an
            Operator only.
        inputs (list): NumPy arrays, or several such lists. Floating arrays are cast to each dtype that the operator
            takes.
        reference (callable): Takes NumPy arrays and returns one or a tuple; it computes in their dtype. Outputs that
            follow those of the reference, which a gradient may need, are not compared. Default: none; then values are
            not checked.
        other (tuple): (op, reference) with the same entry and inputs, but other attributes. Default: none.
        no_gradient (list[str]): The names of floating inputs whose gradients are not compared with finite differences.
            Default: none.
        half_in_float32 (bool): Whether float16 is held to the reference in float32, rounded once. Default: ``True`` .
        rtol (float, dict): The relative error that sums may have, in place of the bound for their length, or a dict of
            it by the name of the dtype, such as ``{"float32": 1e-4}``. Default: none; then the bound holds.

    Returns:
        Report, which prints as a table.

    Raises:
        OpCheckError: If a check fails. Its message is the report.
        ValueError: If the inputs are not as many as the operator takes, or `no_gradient` names something else.
        TypeError: If an input has integers, but the signature says that it is floating.

    Examples:
        >>> import msops, numpy
        >>> from msops.testing import opcheck
        >>> library = msops.load("twice", '''
        ... #include "common/formula.h"
        ... MSOPS_FORMULA(Twice, (x), (y), y = 2 * x)
        ... MSOPS_FORMULA(TwiceBackward, (dy), (dx), dx = 2 * dy)
        ... ''')
        >>> backward = msops.custom_op(library.TwiceBackward, "dy -> dx")
        >>> twice = msops.custom_op(library.Twice, "x -> y", gradient=backward)
        >>> report = opcheck(twice, [numpy.linspace(-3, 3, 35).reshape(5, 7)], lambda x: 2 * x)
        >>> print(report.skipped["second derivative"], report.failures)
        there is none {}
    """
    cases = [[np.asarray(a) for a in case] for case in (inputs if isinstance(inputs[0], (list, tuple)) else [inputs])]
    mode = mindspore.get_context("mode")
    subject = describe(op, reference, half_in_float32, rtol, no_gradient, cases[0])
    report = subject.report
    sizes = Sizes([], [])
    known: dict[str, Arrays] = {}
    if isinstance(op, Operator):
        sizes = Sizes.of(op, subject.taken(cases[0], subject.dtypes[-1]))
        if not all(map(is_floating, cases[0])):
            report.skipped["other sizes"] = "inputs that are not floating may depend on sizes"
        elif not any(sizes):
            report.skipped["other sizes"] = "the operator takes none"
        if other is None and not has_attributes(op):
            report.skipped["other attributes"] = "the operator has none"
        sizes, known = check_entries(subject, cases, sizes)
    else:
        report.skipped.update(dict.fromkeys((*ENTRY_CHECKS, "other sizes", "wrong inputs"), "op is not an Operator"))
        if other is None:
            report.skipped["other attributes"] = "no other operator is given"
    if report.failures.keys() & {"no crash", "bounds", "shapes and dtypes"}:  # this process might not survive the rest
        report.skipped.update(dict.fromkeys(CHECKS, "the entry is not safe to call") | report.skipped)
    else:
        kept: dict[str, Arrays] = {f"{words}, results": results for words, results in known.items()}
        gc.freeze()  # MindSpore collects garbage at each compilation: that shall not go over all modules
        try:
            for name, number in MODES.items():
                mindspore.set_context(mode=number)
                _check_in_mode(subject, name, cases, sizes, other, kept)
        finally:
            gc.unfreeze()
            mindspore.set_context(mode=mode)
    if "second derivative" not in report.made:
        report.skipped.setdefault("second derivative", "there is none in float64")
    forgotten = set(CHECKS) - report.made - report.skipped.keys()
    if report.failures:
        report.skipped.update(dict.fromkeys(forgotten, "it needs what failed"))
    else:
        report.made.update(forgotten)
        report.failures.update({check: ["was neither made nor skipped"] for check in forgotten})
    if report.failures:
        raise OpCheckError(report)
    return report


def _check_in_mode(
    subject: Subject,
    mode: str,
    cases: Sequence[Arrays],
    sizes: Sizes,
    other: tuple[Function, Function] | None,
    kept: dict[str, Arrays],
) -> None:
    """Makes the checks that need no entry. `kept` holds results that were checked before, in the other mode or of the C
    entry: the values of equal ones need no second look."""
    attempt, net = subject.report.attempt, subject.net()
    gradient = Gradient(net, len(subject.inputs))
    for _, key, arrays in subject.variants(cases):
        where = f"{mode}, {key}"
        all_outs = attempt("shapes and dtypes", where, run, net, *arrays)
        if all_outs is None:
            continue
        outs = subject.compared(all_outs)
        attempt("shapes and dtypes", where, check_promise, subject, arrays, outs)
        calls: list[tuple[nn.Cell, Arrays, Arrays]] = [(net, arrays, outs)]
        gradients = None
        if subject.differentiable:
            douts = _douts(all_outs, len(outs))
            gradients = attempt("gradient", where, run, gradient, *arrays, *douts)
            if gradients is not None:
                calls.append((gradient, [*arrays, *douts], gradients))
        results = [result for call in calls for result in call[2]]
        seen = key in kept and attempt("graph = pynative", where, _equal, results, kept[key])
        kept[key] = results
        if subject.reference and not seen:
            attempt("forward", where, subject.accurate, outs, arrays)
        if gradients is not None and not seen:
            exact = subject.in_float64(arrays) or not subject.takes_float64(arrays)
            check = "gradient" if exact else "gradient's dtypes"
            attempt(check, where, _check_gradients, subject, gradients, net, gradient, arrays, douts)
        if gradients is not None and isinstance(subject.op, Operator) and subject.in_float64(arrays):
            attempt("second derivative", where, _check_second_derivative, subject, arrays, all_outs, key, kept)
        for called, arguments, found in calls:
            for check, function in checks.CALL_CHECKS.items():
                attempt(check, where, function, called, arguments, len(found))
    arrays = subject.taken(cases[0], subject.dtypes[-1])
    if isinstance(subject.op, Operator):
        # Graph mode compiles for each size, and calls the same entry as PyNative mode: it gets what is empty, or all 1.
        few = [case for case in sizes.small if case is sizes.small[-1] or not all(a.size for a in case[1])]
        for what, changed in few if mode == "graph" else sizes.small + sizes.odd:
            attempt("other sizes", f"{mode}, {what}", _check_sizes, subject, net, gradient, changed, what, kept)
        for what, changed in derived.wrong_inputs(subject.op, arrays):
            attempt("wrong inputs", f"{mode}, {what}", check_refused, subject.op, net, changed)
    if other is not None:
        others = subject._replace(op=other[0], reference=other[1])
        attempt("other attributes", mode, _check_other, subject, arrays, others)


def _equal(results: Arrays, expected: Arrays) -> bool:
    checks.assert_equal(results, expected)
    return True


def _seen(kept: dict[str, Arrays], key: str, results: Arrays) -> bool:
    """Tells whether these results are those kept, and keeps them."""
    before = kept.get(key)
    kept[key] = results
    try:
        return before is not None and _equal(results, before)
    except AssertionError:
        return False


def _douts(outs: Arrays, results: int) -> list[Array]:
    """Returns gradients of the outputs that are compared, and zeros for the others."""
    return [dout * (i < results) for i, dout in enumerate(random_like(outs))]


def _check_gradients(
    subject: Subject,
    gradients: Arrays,
    net: nn.Cell,
    gradient: nn.Cell,
    arrays: Arrays,
    douts: Arrays,
    most: int = MOST,
) -> None:
    try:
        _compare_gradients(subject, gradients, net, gradient, arrays, douts, most)
    except AssertionError as error:
        name = next((name for name in subject.omitted if str(error).startswith(f"gradient of {name}[")), None)
        hint = f"; the gradient's operator has no output d{name}: without a gradient, no_gradient must name {name}"
        raise AssertionError(f"{error}{hint if name else ''}") from None


def _compare_gradients(
    subject: Subject, gradients: Arrays, net: nn.Cell, gradient: nn.Cell, arrays: Arrays, douts: Arrays, most: int
) -> None:
    names, which = subject.inputs, subject.differentiable
    allowance = subject.half_in_float32, subject.rtol
    if subject.in_float64(arrays):
        differences.check_finite_differences(gradients, net, arrays, douts, names, which, most // len(which))
        return
    n = len(arrays)
    if not subject.takes_float64(arrays):
        if not subject.reference:
            raise Skipped("the operator takes no float64, and there is no reference")

        def of_reference(arguments: Arrays) -> Arrays:
            """Returns finite differences of the reference where they are taken, else the gradients themselves."""
            arguments = cast(arguments, np.float64)
            expected = cast(gradients, np.float64)
            for i in which:
                elements = checks.some_elements(arguments[i], max(most // len(which) // 4, 3))
                found = differences.finite_differences(subject.reference, arguments[:n], arguments[n:], i, elements)
                expected[i].flat[elements] = found.nearest(gradients[i])
            return expected

        checks.check_gradient_dtype(gradients, of_reference, arrays, douts, names, which, *allowance, differences=True)
        return
    exact = run(net, *subject.taken(arrays, "float64"))

    def in_float64(arguments: Arrays) -> Arrays:
        douts = (dout.astype(out.dtype) for dout, out in zip(arguments[n:], exact))
        return run(gradient, *subject.taken(arguments[:n], "float64"), *douts)

    checks.check_gradient_dtype(gradients, in_float64, arrays, douts, names, which, *allowance)


def _check_second_derivative(subject: Subject, arrays: Arrays, outs: Arrays, key: str, kept: dict[str, Arrays]) -> None:
    """Requires that the gradient of the gradient's operator equals finite differences of that operator."""
    operator = subject.op.gradient
    if not isinstance(operator, Operator):
        raise Skipped("the gradient is not an Operator")
    second = operator.gradient
    if second is None:
        raise Skipped("there is none")
    takes = operator.names()[0]
    known = dict(zip(subject.inputs, arrays)) | dict(zip(subject.op.names()[1], outs))
    known |= {f"d{name}": dout for name, dout in zip(subject.op.names()[1], random_like(outs))}
    given, net = [known[name] for name in takes], checks.Net(operator)
    which = [i for i, a in enumerate(given) if a.dtype == np.float64]
    if isinstance(second, Operator):
        which = [i for i in which if f"d{takes[i]}" in second.names()[1]]
    douts = random_like(run(net, *given), seed=1)
    gradients = run(Gradient(net, len(given)), *given, *douts)
    if not _seen(kept, f"{key}, second derivative", gradients):
        most = MOST // 2 // max(len(which), 1)
        differences.check_finite_differences(gradients, net, given, douts, takes, which, most)


def _check_sizes(
    subject: Subject, net: nn.Cell, gradient: nn.Cell, arrays: Arrays, key: str, kept: dict[str, Arrays]
) -> None:
    """Makes the checks of a mode, at few elements, for inputs of other sizes."""
    all_outs = run(net, *arrays)
    outs = subject.compared(all_outs)
    subject = subject.at_sizes(arrays, "other sizes")
    check_promise(subject, arrays, outs)
    if not _seen(kept, f"{key}, results", outs) and subject.reference:
        subject.accurate(outs, arrays)
    if subject.differentiable:
        douts = _douts(all_outs, len(outs))
        gradients = run(gradient, *arrays, *douts)
        if not _seen(kept, f"{key}, gradients", gradients):
            most = max(MOST // 16, 3 * len(subject.differentiable))
            _check_gradients(subject, gradients, net, gradient, arrays, douts, most)


def check_refused(operator: Operator, net: nn.Cell, arrays: Arrays) -> None:
    """Requires that wrong inputs raise a TypeError or a ValueError."""
    try:
        operator.infer(*derived.specs_of(arrays))
    except (TypeError, ValueError):
        pass
    else:
        raise AssertionError("the operator takes that")
    try:
        with checks.quiet():  # MindSpore prints pages of text
            run(net, *arrays)
    except (TypeError, ValueError):
        return
    except Exception as error:  # noqa: BLE001 (it is what the check looks for)
        raise AssertionError(f"raises {type(error).__name__}, expected TypeError or ValueError") from None
    raise AssertionError("nothing is raised")


def _check_other(subject: Subject, arrays: Arrays, other: Subject) -> None:
    """Requires that calls of another operator with the same entry, made in between, change no result or gradient."""

    def results(of: Subject) -> list[Array]:
        net = of.net()
        all_outs = run(net, *arrays)
        outs = of.compared(all_outs)
        douts = _douts(all_outs, len(outs))
        gradient = Gradient(net, len(arrays))
        gradients = run(gradient, *arrays, *douts) if of.differentiable else ()
        if of is other:
            other.accurate(outs, arrays)
            if of.differentiable:
                _check_gradients(other, gradients, net, gradient, arrays, douts)
        return [*outs, *gradients]

    mine = results(subject)
    others = results(other)
    same = all(a.shape == b.shape and (a == b).all() for a, b in zip(mine, others))
    assert not same, "the other one gives the same results, which tells nothing"
    checks.assert_equal(results(subject), mine)
    checks.assert_equal(results(other), others)
