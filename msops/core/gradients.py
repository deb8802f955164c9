"""Makes an operator's gradient a function of the kind that MindSpore compiles."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import linecache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspore import ops

from ..compat import VERSION
from .build import default_cache_folder, digest
from .definition import Definition

if TYPE_CHECKING:
    from collections.abc import Callable

    Bprop = Callable[..., Any]


def make_bprop(operator: Definition) -> Bprop | None:
    """Makes the gradient that MindSpore wants: a function of all inputs, the output and the output's gradient."""
    if operator.gradient is None:
        whole = all((out.dtype or "").startswith(("int", "uint", "bool")) for out in operator.signature.outputs)
        if VERSION < (2, 0) and not whole:
            return None  # 1.10 asks in PyNative mode for gradients that it does not need
        return _missing(operator, is_zero=whole)
    if isinstance(operator.gradient, Definition):
        return _of_operator(operator, operator.gradient)
    return _of_function(operator, operator.gradient)


def _missing(operator: Definition, is_zero: bool) -> Bprop:
    """Makes the gradient of an operator that was given none: it returns zeros if `is_zero`, and raises otherwise."""
    inputs = operator.names()[0]
    lines = [f"    return ({', '.join(f'_zeros_like({name})' for name in inputs)},)"]
    if not is_zero:
        message = (
            f"{operator.label}: {operator.entry.name} has no gradient: hand custom_op(..., gradient=...) one, or its "
            "result to mindspore.ops.stop_gradient. After an exception inside another gradient, PyNative mode asks a "
            "jit function for it once without need: then call again"
        )
        lines = [f"    raise ValueError({message!r})"]
    return _compiled(operator.label, [f"def gradient({', '.join([*inputs, '_out', '_dout'])}):", *lines], None)


def _of_function(operator: Definition, gradient: Bprop) -> Bprop:
    """Makes a function that calls the author's, and requires it to return a tuple of gradients."""
    label, full = operator.label, operator.full
    inputs, outputs = ([tensor.name for tensor in tensors] for tensors in (full.inputs, full.outputs))
    out = outputs[0] if len(outputs) == 1 else "out"
    taken = ", ".join([*inputs, out, f"d{out}"])
    try:
        inspect.signature(gradient).bind(*inputs, out, f"d{out}")
    except TypeError:
        raise TypeError(
            f"{label}: gradient must take ({taken}), got a function of {inspect.signature(gradient)}"
        ) from None
    given, returned = operator.names()
    arguments = [name if name in given else "None" for name in inputs]
    for what in ("_out", "_dout"):  # MindSpore's tuples also have the scratch
        parts = [f"{what}[{returned.index(name)}]" if name in returned else "None" for name in outputs]
        is_all = len(outputs) == len(returned) and not operator.signature.scratch
        arguments.append(what if is_all else parts[0] if len(outputs) == 1 else f"({', '.join(parts)})")
    gradients = f"({', '.join(f'd{name}' for name in inputs)}{',' * (len(inputs) == 1)})"
    kept = "".join(f"gradients[{inputs.index(name)}], " for name in given)
    lines = [
        f"def gradient({', '.join([*given, '_out', '_dout'])}):",
        f"    gradients = _gradient({', '.join(arguments)})",
        f"    if not isinstance(gradients, tuple) or len(gradients) != {len(inputs)}:",
        f"        raise ValueError({f'{label}: gradient must return a tuple {gradients}'!r})",
        "    return gradients" if given == inputs else f"    return ({kept})",
    ]
    return _compiled(label, lines, gradient)


def _of_operator(operator: Definition, gradient: Definition) -> Bprop:
    """Makes a function that calls the operator `gradient`, whose tensors are matched with this operator's by name."""
    label, (inputs, outputs), (takes, gives) = operator.label, operator.names(), gradient.names()
    douts, wanted = [f"d{out}" for out in outputs], [f"d{name}" for name in inputs]
    if unknown := set(takes).difference(inputs, outputs, douts):
        raise ValueError(
            f"{label}: gradient takes {', '.join(sorted(unknown))}; there are the inputs {', '.join(inputs)}, "
            f"the outputs {', '.join(outputs)} and their gradients {', '.join(douts)}"
        )
    if twice := set(inputs).intersection(douts):
        raise ValueError(
            f"{label}: gradient must be a function, since {', '.join(sorted(twice))} would be both an input "
            "and the gradient of an output"
        )
    if strange := [name for name in gives if name not in wanted]:
        near = difflib.get_close_matches(strange[0], wanted, 1, 0.4)
        raise ValueError(
            f"{label}: gradient gives {', '.join(strange)}, but the gradients of the inputs "
            f"{', '.join(inputs)} are called {', '.join(wanted)}"
            + (f"; did you mean {near[0]}?" if near else "; scratch follows a semicolon")
        )
    is_tuple = [len(each.signature.outputs) + len(each.signature.scratch) > 1 for each in (operator, gradient)]
    lines = [
        f"def gradient({', '.join([*inputs, '_out', '_dout'])}):",
        *(f"    {name} = _out{f'[{i}]' * is_tuple[0]}" for i, name in enumerate(outputs)),
        *(f"    {name} = _dout{f'[{i}]' * is_tuple[0]}" for i, name in enumerate(douts)),
        f"    _gradients = _gradient({', '.join(takes)})",
        *(f"    {name} = _gradients{f'[{i}]' * is_tuple[1]}" for i, name in enumerate(gives)),
        f"    return ({', '.join(name if name in gives else f'_zeros_like({name[1:]})' for name in wanted)},)",
    ]
    return _compiled(label, lines, gradient.primitive)


def _compiled(label: str, lines: list[str], gradient: Bprop | None) -> Bprop:
    """Makes the function `gradient` from source lines, which may call `_gradient` and `_zeros_like`.

    MindSpore compiles functions from their source, and requires them to name their arguments, so the source is written
    for each operator.
    """
    source = "\n".join(
        [
            f"# The gradient of {label!r}",
            "def make(_gradient, _zeros_like):",
            *(f"    {line}" for line in lines),
            "    return gradient",
        ]
    )
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, _keep(source), "exec"), namespace)  # noqa: S102 (the signature allows only identifiers)
    return namespace["make"](gradient, ops.zeros_like)


def _keep(source: str) -> str:
    """Writes a source to a file in the cache folder, and returns the file's name.

    Writing may fail: Python and MindSpore's compiler read the source from `linecache`. Only the lines that MindSpore's
    messages show come from the file.
    """
    path = Path(f"gradient_{digest(source)}.py")
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        folder = default_cache_folder()
        path = folder / path
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(source)
    linecache.cache[str(path)] = len(source), None, source.splitlines(True), str(path)
    return str(path)
