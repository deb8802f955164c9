"""Custom CUDA operators for MindSpore, on the GPU and, where there is none, on the CPU."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .build import CompileError, load
    from .check import Spec
    from .custom import Operator, custom_op, once
    from .library import Entry, Library, get_include
    from .operators.add import Add, add
    from .operators.depthwise_conv2d import DepthwiseConv2d, depthwise_conv2d
    from .operators.lltm import LLTMCell, lltm_cell
    from .operators.lltm_sequence import LLTM, lltm
    from .operators.sigmoid import Sigmoid, sigmoid
    from .operators.trilinear_interpolation import TrilinearInterpolation, trilinear_interpolation
    from .rules import broadcast, scratch
    from .signature import Signature

__all__ = [
    "LLTM",
    "Add",
    "CompileError",
    "DepthwiseConv2d",
    "Entry",
    "LLTMCell",
    "Library",
    "Operator",
    "Sigmoid",
    "Signature",
    "Spec",
    "TrilinearInterpolation",
    "add",
    "broadcast",
    "custom_op",
    "depthwise_conv2d",
    "get_include",
    "lltm",
    "lltm_cell",
    "load",
    "once",
    "scratch",
    "sigmoid",
    "trilinear_interpolation",
]
__version__ = "0.1.0"

_MODULES = "library", "build", "check", "signature", "rules", "custom", "operators"  # each needs those before it


if not TYPE_CHECKING:  # to which every name would be one

    def __getattr__(name: str) -> object:
        """A public name, imported when it is first asked for: `python -m msops` runs where MindSpore or a library does
        not load, and tells why."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        modules = (importlib.import_module(f".{module}", __name__) for module in _MODULES)
        globals()[name] = value = next(vars(module)[name] for module in modules if name in vars(module))
        return value


def __dir__() -> list[str]:
    """What completion offers: not the modules and helpers that this one imports."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
