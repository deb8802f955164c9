"""This operator serves patch_mindspore alone: msops has no public name for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, ops

from msops.core.factory import custom_op
from msops.core.library import of_package

from .add import backward as sum_to

if TYPE_CHECKING:
    from msops.core.spec import Spec

_library = of_package("linear")
_product, _product_of_transposed = ops.MatMul(), ops.MatMul(transpose_a=True)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    r"""Computes a linear layer, whose bias is added to its sums before they are rounded.

    .. math:: y = x\, \text{weight}^T + \text{bias}

    Inputs have the shapes (..., C), (V, C) and (V,), with V of at least 1 and less than 2^31. Gradients are products by
    MindSpore, which need rows and columns, and the sums of the rows of dy.
    """
    return forward(x, weight, bias)


def _infer(x: Spec, weight: Spec, bias: Spec) -> Spec:
    rows = weight.shape[0]
    if not 0 < rows < 2**31:
        raise ValueError(f"weight must have at least 1 row and less than 2^31, got {rows}")
    return x._replace(shape=(*x.shape[:-1], rows))


def _gradient(x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    outputs, deep = weight.shape
    rows, drows = x.reshape(-1, deep), dy.reshape(-1, outputs)
    return _product(drows, weight).reshape(x.shape), _product_of_transposed(drows, rows), sum_to(drows, bias)


forward = custom_op(
    _library.LinearForward, "x(*B, C), weight(V, C), bias(V) -> y; work", infer=_infer, gradient=_gradient
)
