"""Provides custom CUDA operators for MindSpore, which run on the GPU or, where there is none, on the CPU.

`__init__.pyi` lists the public names. A name is imported when it is first used, together with its own module only: an
operator whose library does not load breaks no other operator, and `python -m msops` runs where MindSpore does not load.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
from pathlib import Path

# This maps each public name to its module, from lines `from .module import name as name`.
_MODULES = {
    name.name: f".{node.module}"
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(node, ast.ImportFrom)
    for name in node.names
}
__all__ = sorted(_MODULES)  # noqa: PLE0605 (is a list)


def __getattr__(name: str) -> object:
    if name == "__version__":
        globals()[name] = told = importlib.import_module(".version", __name__).version()
        return told
    if name == "_":  # MindSpore's parser imports it from a module before it looks into the module's dictionary
        _import_all()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_MODULES[name], __name__)
    if _MODULES[name].startswith(".operators."):
        importlib.import_module(".compat", __name__).keep_functions(module)
    globals()[name] = value = getattr(module, name)
    return value


def _import_all() -> None:
    """Imports what can be imported, for `getattr(msops, name)` in code that MindSpore compiles, which calls no
    `__getattr__`."""
    for name in _MODULES:
        if name not in globals():
            with contextlib.suppress(ImportError, OSError):  # the name raises this when it is used
                __getattr__(name)


def __dir__() -> list[str]:
    """Lists what completion offers, without the modules and helpers that this module imports."""
    return sorted({*__all__, "__version__", *(name for name in globals() if name.startswith("__"))})
