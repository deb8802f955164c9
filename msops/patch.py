"""Lets MindSpore's names of transformer operators, for which it has kernels on Ascend alone, run on GPU and CPU."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING

import mindspore

from msops import replacements
from msops.attention_replacement import flash_attention_score

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType, TracebackType
    from typing import Any

# This maps each function, the operator that it calls, and each primitive to what replaces it.
_TABLE: dict[str, Callable[..., Any]] = {
    "rms_norm": replacements.rms_norm,
    "rms_norm_impl": replacements.rms_norm,
    "RmsNorm": replacements.RmsNorm,
    "add_rms_norm": replacements.add_rms_norm,
    "add_rms_norm_op": replacements.add_rms_norm,
    "AddRmsNorm": replacements.AddRmsNorm,
    "swiglu": replacements.swiglu,
    "swiglu_op": replacements.swiglu,
    "Swiglu": replacements.Swiglu,
    "flash_attention_score": flash_attention_score,
    "rotary_position_embedding": replacements.rotary_position_embedding,
    "rotary_position_embedding_op": replacements.rotary_position_embedding,
    "RotaryPositionEmbedding": replacements.RotaryPositionEmbedding,
}
_originals: dict[tuple[str, str], Any] = {}  # by module and name, while they are replaced
_patches: set[Patch] = set()  # that are not undone


def patch_mindspore() -> Patch:
    """Makes MindSpore's transformer operators, which have kernels on Ascend alone, run on GPU and CPU.

    Afterwards `mindspore.ops.rms_norm`, `add_rms_norm`, `swiglu`, `rotary_position_embedding` and
    `flash_attention_score` run by msops' kernels: they take MindSpore's arguments, return what MindSpore documents, and
    have gradients, in both modes. What msops lacks of them, such as dropout, is an error. The same holds wherever else
    in MindSpore these names stand, such as in `mindspore.ops.auto_generate`, and for the primitives `RmsNorm`,
    `AddRmsNorm`, `Swiglu` and `RotaryPositionEmbedding`. Names that a version of MindSpore does not have are left out.
    On Ascend nothing changes: choose the device first.

    Patches may overlap: MindSpore's operators are back when all are undone, in whatever order.

    Returns:
        Patch, with a method `undo()`; it is also a context manager, which undoes the patch at the end of its block.

    Raises:
        NotImplementedError: If a function of this version of MindSpore takes other arguments than those that msops
            knows. Nothing is replaced then.

    Note:
        A program that imports a primitive by `from mindspore.ops import RmsNorm` before the patch keeps MindSpore's,
        and so does what MindSpore compiled before; what a program imports or compiles during the patch stays msops'.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> x = mindspore.Tensor([[1.0, 2.0, 3.0]], mindspore.float32)
        >>> with msops.patch_mindspore():
        ...     y, rstd = ops.rms_norm(x, ops.ones(3))
        >>> print(y, rstd)
        [[0.46291 0.92582 1.38873]] [[0.46291]]
    """
    return Patch()


class Patch:
    """Keeps MindSpore's names replaced until `undo`. See :func:`msops.patch_mindspore`."""

    def __init__(self) -> None:
        if mindspore.get_context("device_target") == "Ascend":
            return
        if not _patches:
            _replace()
        _patches.add(self)

    def undo(self) -> None:
        """Ends this patch; a second call does nothing."""
        if self in _patches:
            _patches.remove(self)
            if not _patches:
                _restore()

    def __enter__(self) -> Patch:  # noqa: PYI034 (Python 3.9 has no Self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def places() -> Iterator[tuple[ModuleType, str, Any]]:
    """Yields each module of MindSpore that has a name of the table, the name, and its present value."""
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] == "mindspore":
            values = vars(module)
            for name in _TABLE.keys() & values.keys():
                yield module, name, values[name]


def _replace() -> None:
    found = list(places())
    for module, name, original in found:
        if inspect.isfunction(original) and _parameters(original) != _parameters(_TABLE[name]):
            raise NotImplementedError(
                f"patch_mindspore: {module.__name__}.{name} takes ({', '.join(_parameters(original))}) in MindSpore "
                f"{mindspore.__version__}, msops replaces the one that takes ({', '.join(_parameters(_TABLE[name]))})"
            )
    for module, name, original in found:
        _originals[module.__name__, name] = original
        setattr(module, name, _TABLE[name])


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _restore() -> None:
    """Restores what is still replaced, also in modules that were imported since then."""
    by_name = {name: original for (_, name), original in _originals.items()}
    for module, name, value in places():
        if value is _TABLE[name]:
            setattr(module, name, _originals.get((module.__name__, name), by_name[name]))
    _originals.clear()
