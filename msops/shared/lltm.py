"""Has the operators of all steps of the LLTM, and their gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Tensor, nn, ops

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.inputs import cast_as, has_zero, unless_zero
from msops.core.library import of_package
from msops.operators.add import backward as add_backward

if TYPE_CHECKING:
    from msops.core.operator import Operator


class _SequenceGradient(nn.Cell):
    """Adds to the gradients of the recurrence what its backward kernel leaves out: a matmul and a sum."""

    def __init__(self, backward: Operator) -> None:
        super().__init__()
        self.backward = backward

    def gradient(
        self,
        product: Tensor,
        weight: Tensor,
        bias: Tensor,
        h: Tensor,
        c: Tensor,
        lengths: Tensor,
        out: tuple[Tensor, ...],
        dout: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        output, _, _, gates, cells = out
        doutput, dlast_h, dlast_c, _, _ = dout
        dproduct, hidden_before, dh, dc = self.backward(
            weight, gates, cells, output, h, lengths, doutput, dlast_h, dlast_c
        )
        rows = product.shape[0] * product.shape[1]
        dgates = ops.reshape(dproduct, (rows, weight.shape[0]))
        dweight = _weight_gradient(dgates, hidden_before, weight, rows)
        dbias = add_backward(dgates, bias)
        return dproduct, cast_as(dweight, weight), dbias, dh, dc, ops.zeros_like(lengths)


# This is a function of its own, since MindSpore 1.10 cannot compile an `if` that follows a call of an operator.
def _weight_gradient(dgates: Tensor, hidden_before: Tensor, weight: Tensor, rows: Any) -> Tensor:
    if has_zero(rows, weight.shape[1]):
        return ops.zeros_like(weight)
    dweight = _transposed_times(dgates, ops.reshape(hidden_before, (rows, weight.shape[1])))
    return unless_zero(dweight, rows)


@Operators
def operators(reverse: bool, allow_tf32: bool) -> Operator:
    """Returns the operator that computes all steps."""
    attributes = _attributes(reverse, allow_tf32)
    return custom_op(
        of_package("lltm").LLTMForward,
        "product(T, B, 3 * H), weight(3 * H, H), bias(3 * H), h(B, H), c(B, H), lengths(B, dtype=int32) -> "
        "output(T, B, H), last_h(B, H), last_c(B, H), gates(T, B, 3 * H), cells(T, B, H); scratch",
        gradient=_SequenceGradient(backward_operators(reverse, allow_tf32)).gradient,
        **attributes,
    )


@Operators
def backward_operators(reverse: bool, allow_tf32: bool) -> Operator:
    """Returns the operator that computes all steps of the gradient."""
    attributes = _attributes(reverse, allow_tf32)
    return custom_op(
        of_package("lltm").LLTMBackward,
        "weight(3 * H, H), gates(T, B, 3 * H), cells(T, B, H), output(T, B, H), h(B, H), lengths(B, dtype=int32), "
        "doutput(T, B, H), dlast_h(B, H), dlast_c(B, H) -> "
        "dgates(T, B, 3 * H), hidden_before(T, B, H), dh(B, H), dc(B, H); scratch",
        **attributes,
    )


def _attributes(reverse: bool, allow_tf32: bool) -> dict[str, Any]:
    return dict(
        reverse=settings.boolean("lltm", "reverse", reverse),
        allow_tf32=settings.boolean("lltm", "allow_tf32", allow_tf32),
    )


def _no_second_order(dx: Tensor, zero: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    raise ValueError("lltm: its gradients have no gradients of their own")


def _last_gradient(dx: Tensor) -> Tensor:
    """Returns dx, as the result of an operator whose own gradient is an error."""
    return _copy(dx, ops.cast(_ZERO, dx.dtype))


_ZERO = Tensor(np.zeros(1, np.float32))
_copy = custom_op(
    of_package("add").AddForward,
    "x, zero(1) -> out",
    infer=lambda x, zero: x,
    gradient=_no_second_order,
    name="lltm",
)
# PyNative mode treats the gradient of a reshape as a constant, so gradients of gradients would silently be 0 or wrong.
refuse_second = ops.InsertGradientOf(_last_gradient)
_transposed_times = ops.MatMul(transpose_a=True)
