from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from mindspore import Tensor, nn, ops

from msops.core import settings
from msops.core.compiled import once
from msops.core.factory import Operators, custom_op
from msops.core.inputs import describe, spec_of
from msops.core.library import of_package

if TYPE_CHECKING:
    from typing import Any

    from msops.core.inputs import Description
    from msops.core.operator import Operator
    from msops.core.spec import Spec

_NAME = "rotary_embedding"
_library = of_package(_NAME)
_SIZES = {"BHTD": "B, H, T, D", "BTHD": "B, T, H, D", "THD": "T, H, D"}


def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    layout: str = "BHTD",
    position_ids: Tensor | None = None,
) -> Tensor:
    r"""Turns pairs of features by angles that depend on the place in a sequence.

    .. math:: (a, b) \mapsto (a \cos\theta - b \sin\theta,\; b \cos\theta + a \sin\theta)

    `cos` and `sin` hold the angles of d/2 pairs for each of T places. The first d of the D features are turned, the
    others pass. `x` has a gradient of any order: it is turned by the negative angles.

    A table of D columns has every angle twice: for both features of each pair, and d is D. If these copies differ, that
    is an error on the CPU; on a GPU, which does not wait for what a kernel finds, the two features become NaN. Both
    only look at the rows that they read, whose copies are next to the angles. A narrower table has each angle once.

    Args:
        x (Tensor): Queries or keys, shape (B, H, T, D) or, if `layout` says so, (B, T, H, D) or (T, H, D); float16,
            float32 or float64.
        cos (Tensor): Shape (T, d/2), or (T, D) with every angle twice; the dtype of `x` or float32. Also
            (1, T, ...), or (B, T, ...) for angles of each sample, and (B, 1, T, ...). It has no gradient.
        sin (Tensor): The shape and dtype of `cos`. It has no gradient.
        interleaved (bool): Whether the pairs are the features (2i, 2i + 1), as in GPT-J. Default: ``False`` , the pairs
            (i, i + d/2), as in Llama.
        layout (str): ``"BHTD"`` , ``"BTHD"`` or ``"THD"`` , the axes of `x`; B is 1 for the last. Default: ``"BHTD"`` .
        position_ids (Tensor): Which row of the tables each place has; the tables then may have any number of rows.
            Shape (T,), (1, T) or (B, T), int32 or int64. A number that is no row is an error on the CPU; on a GPU, the
            features that it turns become NaN. Default: ``None`` , place t has row t.

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
    if position_ids is None:
        return operators.primitive(interleaved, layout)(x, cos, sin)
    return operators.primitive(interleaved, layout, True)(x, cos, sin, position_ids)


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
        - **position_ids** (Tensor) - As in the function: the places of the T elements, beside a `start` of 0.
          Default: ``None`` .

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
        self.by_positions_op = operators.primitive(interleaved, layout, True)
        self.axis = layout.index("T")
        angles = np.outer(np.arange(self.max_length), float(base) ** (-np.arange(0, self.dim, 2) / self.dim))
        self.cos, self.sin = (Tensor(table.astype(np.float32)) for table in (np.cos(angles), np.sin(angles)))

    def construct(self, x: Tensor, start: int = 0, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is not None:
            _end(describe(x), self.layout, self.dim, start, self.max_length, True)
            return self.by_positions_op(x, self.cos, self.sin, position_ids)
        end = _end(describe(x), self.layout, self.dim, start, self.max_length, False)
        if end is None:
            end = start + x.shape[self.axis]
            return self.forward_op(x, self.cos[start:end], self.sin[start:end])
        first, sizes = (start, 0), (end - start, self.cos.shape[1])
        return self.forward_op(x, ops.slice(self.cos, first, sizes), ops.slice(self.sin, first, sizes))  # as vmap needs

    construct.__doc__ = rotary_embedding.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "dim", "max_length", "base", "interleaved", "layout")


@once
def _end(x: Description, layout: str, dim: int, start: int, max_length: int, has_positions: bool) -> int | None:
    """Returns the place after the last one. It is None if the size of `x` is open, or if positions are given."""
    spec = spec_of(x)
    if isinstance(spec, str):
        raise TypeError(f"RotaryEmbedding: x must be a Tensor, got {spec}")
    if len(spec.shape) != len(layout):
        raise ValueError(f"RotaryEmbedding: x must have {len(layout)} axes, got shape {spec.shape}")
    if spec.shape[-1] is not None and spec.shape[-1] < dim:
        raise ValueError(f"RotaryEmbedding: x must have at least dim = {dim} features, got shape {spec.shape}")
    settings.integer("RotaryEmbedding", "start", start)
    if has_positions:
        if start != 0:
            raise ValueError(f"RotaryEmbedding: start must be 0 beside position_ids, got {start}")
        return None
    length = spec.shape[layout.index("T")]
    if start < 0 or start + (length or 0) > max_length:
        raise ValueError(
            f"RotaryEmbedding: start must be at least 0, and start + T at most max_length = {max_length}, got {start} "
            f"and T = {length}"
        )
    return None if length is None else start + length


@Operators
def operators(interleaved: bool, layout: str, has_positions: bool = False) -> Operator:
    def gradient_of_backward(
        dout: Tensor, cos: Tensor, sin: Tensor, dx: Tensor, ddx: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return forward(ddx, cos, sin), ops.zeros_like(cos), ops.zeros_like(sin)

    def gradient_by_positions(
        dout: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, dx: Tensor, ddx: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        of_x = forward(ddx, cos, sin, position_ids)
        return of_x, ops.zeros_like(cos), ops.zeros_like(sin), ops.zeros_like(position_ids)

    rows = "L" if has_positions else "T"
    tables = f"cos(*P, {rows}, R, dtype=float32|common), sin(*P, {rows}, R, dtype=cos)"
    if has_positions:
        tables += ", position_ids(*Q, T, dtype=index)"
    settings.one_of(_NAME, "layout", layout, tuple(_SIZES))
    attributes: dict[str, Any] = dict(
        interleaved=int(settings.boolean(_NAME, "interleaved", interleaved)),
        heads_first=int(layout == "BHTD"),
        has_batch=int(layout != "THD"),
        has_position_ids=int(has_positions),
    )
    backward = custom_op(
        _library.RotaryEmbeddingBackward,
        f"dout({_SIZES[layout]}), {tables} -> dx",
        infer=_infer,
        gradient=gradient_by_positions if has_positions else gradient_of_backward,
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


def _infer(x: Spec, cos: Spec, sin: Spec, position_ids: Spec | None = None, **attributes: int) -> Spec:
    batch, width = x.shape[0] if attributes["has_batch"] else 1, x.shape[-1]
    *samples, length, columns = cos.shape
    if samples not in ([], [1], [batch], [1, 1], [batch, 1]):
        raise ValueError(
            f"cos must have shape (T, d/2) = {(length, columns)} or (B, T, d/2) = {(batch, length, columns)}, or "
            f"(B, 1, T, d/2), got {cos.shape}"
        )
    if columns == width and width % 2:
        raise ValueError(f"cos must not have every angle twice for an odd number of features, {width}")
    if 2 * columns > width and columns != width:
        raise ValueError(
            f"cos must have at most half as many angles as the {width} features of x, or each of them twice, "
            f"got {columns}"
        )
    if position_ids is not None and position_ids.shape[:-1] not in ((), (1,), (batch,)):
        raise ValueError(f"position_ids must have shape (T,) or (B, T), got {position_ids.shape}")
    return x
