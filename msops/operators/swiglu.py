from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn

from msops.core.factory import custom_op
from msops.core.library import of_package

if TYPE_CHECKING:
    from msops.core.spec import Spec

_library = of_package("swiglu")
backward_backward = custom_op(
    _library.SwigluBackwardBackward,
    "gate(*S), up(*S), dout(*S), ddgate(*S), ddup(*S) -> dgate(*S), dup(*S), ddout(*S)",
)
backward = custom_op(
    _library.SwigluBackward, "gate(*S), up(*S), dout(*S) -> dgate(*S), dup(*S)", gradient=backward_backward
)
forward = custom_op(_library.SwigluForward, "gate(*S), up(*S) -> out(*S)", gradient=backward)


def half(gate: Spec, **attributes: int) -> Spec:
    """Returns the Spec of a result whose inputs are the halves of one tensor."""
    if not gate.shape or gate.shape[-1] % 2:
        raise ValueError(f"gate must have a last axis of even length where there is no up, got shape {gate.shape}")
    return gate._replace(shape=(*gate.shape[:-1], gate.shape[-1] // 2))


packed_backward_backward = custom_op(
    _library.SwigluPackedBackwardBackward,
    "gate(*S, K), dout(*S, K // 2), ddgate(*S, K) -> dgate(*S, K), ddout(*S, K // 2)",
)
packed_backward = custom_op(
    _library.SwigluPackedBackward,
    "gate(*S, K), dout(*S, K // 2) -> dgate(*S, K)",
    gradient=packed_backward_backward,
)
packed_forward = custom_op(_library.SwigluPackedForward, "gate -> out", infer=half, gradient=packed_backward)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    r"""Multiplies one tensor by the sigmoid linear unit of another, element by element.

    .. math:: \text{out} = \text{up} \cdot \text{gate} \cdot s, \qquad s = \frac{1}{1 + e^{-\text{gate}}}

    This is the gated activation of a feed-forward layer: `gate` and `up` are two linear maps of its input. Where one
    matrix computes both, its result is the only input, which is read where it is. Inputs have gradients, of second
    order, too.

    Args:
        gate (Tensor): Any shape; float16, float32 or float64. Without `up`, shape (..., 2 K): the first half of the
            last axis is the gate, the second half is what it multiplies.
        up (Tensor): The shape and dtype of `gate`. Default: ``None`` , the second half of `gate`.

    Returns:
        Tensor of the dtype of `gate` and of its shape or, without `up`, of shape (..., K).

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or the dtypes differ.
        ValueError: If the shapes differ, or the last axis of `gate` has an odd length where there is no `up`.

    Source:
        Shazeer, "GLU variants improve transformer", 2020.

    Examples:
        >>> import mindspore, msops
        >>> gate = mindspore.Tensor([-1.0, 0.0, 1.0], mindspore.float32)
        >>> print(msops.swiglu(gate, mindspore.Tensor([2.0, 2.0, 2.0], mindspore.float32)))
        [-0.53788286  0.          1.4621172 ]
        >>> print(msops.swiglu(mindspore.Tensor([-1.0, 0.0, 1.0, 2.0, 2.0, 2.0], mindspore.float32)))
        [-0.53788286  0.          1.4621172 ]
    """
    if up is None:
        return packed_forward(gate)
    return forward(gate, up)


class SwiGLU(nn.Cell):
    """Multiplies one tensor by the sigmoid linear unit of another. See :func:`msops.swiglu`."""

    def construct(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        if up is None:
            return packed_forward(gate)
        return forward(gate, up)

    construct.__doc__ = swiglu.__doc__  # for help()
