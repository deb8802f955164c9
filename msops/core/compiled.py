"""Tells whether MindSpore is compiling the code that runs, and makes constants once in such code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.primitive import PrimitiveWithInfer

from .cached import cached
from .spec import dtype_name

if TYPE_CHECKING:
    from .cached import Function


class Compiling(PrimitiveWithInfer):
    """Tells whether it is called in code that MindSpore compiles."""

    def __init__(self) -> None:
        super().__init__("Compiling")

    def __infer__(self) -> dict[str, Any]:
        return {"shape": (), "dtype": mindspore.bool_, "value": True}

    def __call__(self) -> bool:
        return False


compiling = Compiling()


def wants_gradient(x: Tensor) -> bool:
    """Tells whether the gradient of a Tensor may be asked for. Graph mode leaves out by itself what nobody asks for."""
    if compiling():
        return True
    return getattr(x, "_requires_grad", True)


@ops.constexpr
def is_on_gpu() -> bool:
    """Tells whether MindSpore's device is a GPU, also in code that MindSpore compiles."""
    return bool(mindspore.get_context("device_target") == "GPU")


@ops.constexpr
def records_gradients() -> bool:
    """Tells whether PyNative mode records what runs, to differentiate it. True where MindSpore does not say."""
    executor = mindspore.common.api._pynative_executor
    asked = getattr(executor, "requires_grad", None) or getattr(executor, "grad_flag", None)
    return asked is None or bool(asked())


def forget_recording() -> None:
    """Ends the recording of PyNative mode in graph mode.

    If a function raises while PyNative mode records it, MindSpore does not end the recording. The next graph would then
    be compiled together with its gradient, which fails for a graph that has gradients of first order in it.
    """
    executor = mindspore.common.api._pynative_executor
    try:
        # get_context takes too long for each call of an operator.
        if executor.grad_flag() and mindspore.context._context().get_mode() == mindspore.GRAPH_MODE:
            executor.set_grad_flag(False)
    except AttributeError:
        pass  # an older version lacks one of these names


@ops.constexpr
def raise_errors() -> None:
    """Waits in PyNative mode on the CPU, so that an error of an operator that runs meanwhile is raised here.

    MindSpore gives the outputs of what fails no memory, and still runs some of what was called after it, such as a
    matmul, which ends the process.
    """
    if mindspore.get_context("device_target") == "CPU":
        mindspore.common.api._pynative_executor.sync()


def keep_dtypes(cell: nn.Cell) -> None:
    """Makes PyNative mode run the operators of a Cell in the dtypes that they get, also inside of a Cell with
    `to_float`, for which MindSpore would cast every floating tensor to float16."""
    kinds = getattr(nn.cell, "MixedPrecisionType", None)
    if kinds is not None:
        cell.mixed_precision_type = kinds.NOTSET


def once(make: Function) -> Function:
    """Decorates a function of constants that makes something, such as an operator.

    The function may then also be called in code that MindSpore compiles, and it runs once for equal arguments, unless
    256 others came since. Arguments are equal if their types are, too. What is not a constant in compiled code, such as
    an open size, arrives as None.

    Examples:
        >>> import msops
        >>> @msops.once
        ... def label(n):
        ...     print("made")
        ...     return f"n = {n}"
        >>> print(label(3), label(3))
        made
        n = 3 n = 3
    """
    return ops.constexpr(cached(make), check=False)


@once
def constant(value: float, dtype: mindspore.Type, shape: tuple[int, ...] = ()) -> Tensor:
    """Returns a Tensor of one number. MindSpore would make float32 of Python's numbers."""
    return Tensor(np.full(shape, value, dtype_name(dtype)))
