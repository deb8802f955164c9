from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from mindspore import Tensor, nn, ops

from msops.core import settings
from msops.core.compiled import Operators, once
from msops.core.factory import custom_op
from msops.core.inputs import describe, spec_of
from msops.core.library import of_package

if TYPE_CHECKING:
    from typing import Any

    from msops.core.inputs import Description
    from msops.core.operator import Operator
    from msops.core.spec import Spec

_NAME = "rotary_embedding"
_library = of_package(_NAME)
_SIZES = {"BHTD": "B, H, T, D", "BTHD": "B, T, H, D"}


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, layout: str = "BHTD") -> Tensor:
    r"""Turns pairs of features by angles that depend on the place in a sequence.

    .. math:: (a, b) \mapsto (a \cos\theta - b \sin\theta,\; b \cos\theta + a \sin\theta)

    `cos` and `sin` hold the angles of d/2 pairs for each of T places. The first d of the D features are turned, the
    others pass. `x` has a gradient of any order: it is turned by the negative angles.

    Args:
        x (Tensor): Queries or keys, shape (B, H, T, D) or, if `layout` says so, (B, T, H, D); float16, float32 or
            float64.
        cos (Tensor): Shape (T, d/2), or (B, T, d/2) for angles of each sample; the dtype of `x` or float32. It has no
            gradient.
        sin (Tensor): The shape and dtype of `cos`. It has no gradient.
        interleaved (bool): Whether the pairs are the features (2i, 2i + 1), as in GPT-J. Default: ``False`` , the pairs
            (i, i + d/2), as in Llama.
        layout (str): ``"BHTD"`` or ``"BTHD"`` , the order of the axes of `x`. Default: ``"BHTD"`` .

    Returns:
        Tensor of the shape and dtype of `x`. It is computed in float32, or in float64 if `x` is float64, and rounded
        once.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or another argument has a wrong type.
        ValueError: If a shape does not fit, or `layout` is another str.

    Source:
        Su et al., "RoFormer: Enhanced transformer with rotary position embedding", 2021.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> x = mindspore.Tensor([[[[1.0, 2.0, 3.0, 4.0, 5.0]]]], mindspore.float32)
        >>> quarter = ops.zeros((1, 2)), ops.ones((1, 2))
        >>> print(msops.rotary_embedding(x, *quarter)[0, 0, 0])
        [-3. -4.  1.  2.  5.]
        >>> print(msops.rotary_embedding(x, *quarter, interleaved=True)[0, 0, 0])
        [-2.  1. -4.  3.  5.]
    """
    return operators.primitive(interleaved, layout)(x, cos, sin)


class RotaryEmbedding(nn.Cell):
    r"""Turns pairs of features by angles that grow with the place in a sequence. See :func:`msops.rotary_embedding`.

    Pair i of d/2 is turned by :math:`\theta_i = t\, \text{base}^{-2i/d}` at place t. The tables of cosines and sines
    are computed in float64 and kept in float32; they are not Parameters, so that checkpoints do not have them.

    Args:
        dim (int): d, the number of features that are turned; even.
        max_length (int): The tables have the places 0 to `max_length` - 1.
        base (int, float): The largest wavelength is nearly 2 pi `base` . Default: ``10000.0`` .
        interleaved (bool): As in the function. Default: ``False`` .
        layout (str): As in the function. Default: ``"BHTD"`` .

    Inputs:
        - **x** (Tensor) - As in the function.
        - **start** (int) - The place of the first of the T elements. Default: ``0`` .

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range, or `start` + T is larger than `max_length` .

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> turn = msops.RotaryEmbedding(64, 2048)
        >>> print(turn(ops.ones((1, 8, 10, 64))).shape, turn(ops.ones((1, 8, 1, 64)), 10).shape)
        (1, 8, 10, 64) (1, 8, 1, 64)
    """

    def __init__(
        self, dim: int, max_length: int, base: float = 10000.0, interleaved: bool = False, layout: str = "BHTD"
    ) -> None:
        name = "RotaryEmbedding"
        super().__init__()
        self.dim = settings.positive(name, "dim", dim)
        if self.dim % 2:
            raise ValueError(f"{name}: dim must be even, got {dim}")
        self.max_length = settings.positive(name, "max_length", max_length)
        if not settings.number(name, "base", base) > 0:
            raise ValueError(f"{name}: base must be positive, got {base}")
        self.base, self.interleaved, self.layout = base, interleaved, layout
        self.forward_op = operators.primitive(interleaved, layout)
        self.axis = layout.index("T")
        angles = np.outer(np.arange(self.max_length), float(base) ** (-np.arange(0, self.dim, 2) / self.dim))
        self.cos, self.sin = (Tensor(table.astype(np.float32)) for table in (np.cos(angles), np.sin(angles)))

    def construct(self, x: Tensor, start: int = 0) -> Tensor:
        end = _end(describe(x), self.axis, start, self.max_length)
        if end is None:
            end = start + x.shape[self.axis]
            return self.forward_op(x, self.cos[start:end], self.sin[start:end])
        first, sizes = (start, 0), (end - start, self.cos.shape[1])
        return self.forward_op(x, ops.slice(self.cos, first, sizes), ops.slice(self.sin, first, sizes))  # as vmap needs

    construct.__doc__ = rotary_embedding.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "dim", "max_length", "base", "interleaved", "layout")


@once
def _end(x: Description, axis: int, start: int, max_length: int) -> int | None:
    """Returns the place after the last one, or None if the size of `x` is open."""
    spec = spec_of(x)
    if isinstance(spec, str):
        raise TypeError(f"RotaryEmbedding: x must be a Tensor, got {spec}")
    if len(spec.shape) != 4:
        raise ValueError(f"RotaryEmbedding: x must have four axes, got shape {spec.shape}")
    settings.integer("RotaryEmbedding", "start", start)
    length = spec.shape[axis]
    if start < 0 or start + (length or 0) > max_length:
        raise ValueError(
            f"RotaryEmbedding: start must be at least 0, and start + T at most max_length = {max_length}, got {start} "
            f"and T = {length}"
        )
    return None if length is None else start + length


@Operators
def operators(interleaved: bool, layout: str) -> Operator:
    def gradient_of_backward(
        dout: Tensor, cos: Tensor, sin: Tensor, dx: Tensor, ddx: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return forward(ddx, cos, sin), ops.zeros_like(cos), ops.zeros_like(sin)

    tables = "cos(*P, T, R, dtype=float32|common), sin(*P, T, R, dtype=cos)"
    settings.one_of(_NAME, "layout", layout, tuple(_SIZES))
    attributes: dict[str, Any] = dict(
        interleaved=int(settings.boolean(_NAME, "interleaved", interleaved)), heads_first=int(layout == "BHTD")
    )
    backward = custom_op(
        _library.RotaryEmbeddingBackward,
        f"dout({_SIZES[layout]}), {tables} -> dx",
        infer=_infer,
        gradient=gradient_of_backward,
        **attributes,
    )
    forward = custom_op(
        _library.RotaryEmbeddingForward,
        f"x({_SIZES[layout]}), {tables} -> out",
        infer=_infer,
        gradient=backward,
        **attributes,
    )
    return forward


def _infer(x: Spec, cos: Spec, sin: Spec, **attributes: int) -> Spec:
    (batch, *_, width), (*samples, length, turned) = x.shape, cos.shape
    if samples not in ([], [batch]):
        raise ValueError(
            f"cos must have shape (T, d/2) = {(length, turned)} or (B, T, d/2) = {(batch, length, turned)}, "
            f"got {cos.shape}"
        )
    if 2 * turned > width:
        raise ValueError(f"cos must have at most half as many angles as the {width} features of x, got {turned}")
    return x
