"""This operator serves patch_mindspore alone: msops has no public name for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msops.core.factory import custom_op
from msops.core.library import of_package

if TYPE_CHECKING:
    from mindspore import Tensor

_library = of_package("swiglu_halves")
backward_backward = custom_op(
    _library.SwigluHalvesBackwardBackward, "x(A, 2, B), dout(A, B), ddx(A, 2, B) -> dx(A, 2, B), ddout(A, B)"
)
backward = custom_op(_library.SwigluHalvesBackward, "x(A, 2, B), dout(A, B) -> dx(A, 2, B)", gradient=backward_backward)
forward = custom_op(_library.SwigluHalvesForward, "x(A, 2, B) -> out(A, B)", gradient=backward)


def swiglu_halves(x: Tensor) -> Tensor:
    r"""Computes `swiglu` of the halves of one tensor of shape (A, 2, B), which is read where it is.

    .. math:: \text{out}_{ab} = x_{a1b} x_{a0b} s, \qquad s = \frac{1}{1 + e^{-x_{a0b}}}

    MindSpore's `swiglu` takes its input so; to split it first would take longer than all the rest.
    """
    return forward(x)
