"""The gradient of an operator, as a function of the kind that MindSpore compiles."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import linecache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspore import ops

from .build import default_cache_folder, digest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Bprop = Callable[..., Any]


def missing(label: str, entry: str, inputs: Sequence[str], is_zero: bool) -> Bprop:
    """The gradient of an operator that has none: zeros for outputs of whole numbers, else an error."""
    lines = [f"    return ({', '.join(f'_zeros_like({name})' for name in inputs)},)"]
    if not is_zero:
        message = (
            f"{label}: {entry} has no gradient: hand custom_op(..., gradient=...) one, or its result to "
            "mindspore.ops.stop_gradient"
        )
        lines = [f"    raise ValueError({message!r})"]
    return _compiled(label, [f"def gradient({', '.join([*inputs, '_out', '_dout'])}):", *lines], None)


def of_function(label: str, inputs: Sequence[str], outputs: Sequence[str], gradient: Bprop) -> Bprop:
    """A function that calls the author's, and requires it to return a tuple of gradients."""
    out = outputs[0] if len(outputs) == 1 else "out"
    taken = ", ".join([*inputs, out, f"d{out}"])
    try:
        inspect.signature(gradient).bind(*inputs, out, f"d{out}")
    except TypeError:
        raise TypeError(
            f"{label}: gradient must take ({taken}), got a function of {inspect.signature(gradient)}"
        ) from None
    parameters = ", ".join([*inputs, "_out", "_dout"])
    gradients = f"({', '.join(f'd{name}' for name in inputs)}{',' * (len(inputs) == 1)})"
    lines = [
        f"def gradient({parameters}):",
        f"    gradients = _gradient({parameters})",
        f"    if not isinstance(gradients, tuple) or len(gradients) != {len(inputs)}:",
        f"        raise ValueError({f'{label}: gradient must return a tuple {gradients}'!r})",
        "    return gradients",
    ]
    return _compiled(label, lines, gradient)


def of_operator(
    label: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    gradient: Bprop,
    takes: Sequence[str],
    gives: Sequence[str],
) -> Bprop:
    """A function that calls the operator `gradient`, which takes and gives tensors of these names."""
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
    # An output of another name is scratch, unless it looks like a gradient.
    strange = [name for name in gives if name not in wanted and (name.startswith("d") or "grad" in name)]
    if strange or not set(gives).intersection(wanted):
        near = difflib.get_close_matches(strange[0], wanted, 1, 0) if strange else []
        raise ValueError(
            f"{label}: gradient gives {', '.join(strange or gives)}, but the gradients of the inputs "
            f"{', '.join(inputs)} are called {', '.join(wanted)}" + (f"; did you mean {near[0]}?" if near else "")
        )
    several = len(outputs) > 1
    parameters = [*inputs, "_out", "_dout"] if several else [*inputs, *outputs, *douts]
    unpack = [f"{', '.join(outputs)} = _out", f"{', '.join(douts)} = _dout"] if several else []
    gradients = [f"d{name}" if f"d{name}" in gives else f"_zeros_like({name})" for name in inputs]
    lines = [
        f"def gradient({', '.join(parameters)}):",
        *(f"    {line}" for line in unpack),
        f"    {', '.join(gives)} = _gradient({', '.join(takes)})",
        f"    return ({', '.join(gradients)},)",
    ]
    return _compiled(label, lines, gradient)


def _compiled(label: str, lines: list[str], gradient: Bprop | None) -> Bprop:
    """The function `gradient` of a source, that may call `_gradient` and `_zeros_like`. MindSpore compiles functions
    from their source, and wants them to name their arguments: so this one has a source of its own."""
    source = "\n".join(
        [
            f"# The gradient of {label!r}",
            "def make(_gradient, _zeros_like):",
            *(f"    {line}" for line in lines),
            "    return gradient",
        ]
    )
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, _keep(source), "exec"), namespace)  # noqa: S102 (of names that the signature allows)
    return namespace["make"](gradient, ops.zeros_like)


def _keep(source: str) -> str:
    """The name of a file with this source in the cache folder, which may fail: Python and MindSpore's compiler read it
    from `linecache`, and only the lines that MindSpore's messages show from the file."""
    path = Path(f"gradient_{digest(source)}.py")
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        folder = default_cache_folder()
        path = folder / path
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(source)
    linecache.cache[str(path)] = len(source), None, source.splitlines(True), str(path)
    return str(path)
