from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore.common.initializer import Uniform

from msops.core import settings
from msops.core.compiled import once
from msops.core.factory import Operators, custom_op
from msops.core.inputs import describe, spec_of
from msops.core.library import of_package
from msops.core.spec import Spec

if TYPE_CHECKING:
    from typing import Any

    from msops.core.inputs import Description
    from msops.core.operator import Operator

_NAME = "hash_encoding"
_GROWTH = 2 ** (7 / 15)  # from 16 to 2048 in 16 levels
_library = of_package(_NAME)


def hash_encoding(
    points: Tensor,
    table: Tensor,
    levels: int,
    base_resolution: int,
    growth: float,
    log2_size: int,
    interpolation: str = "linear",
) -> Tensor:
    r"""Encodes points by learned features at the corners of grids of growing resolution, some of which are hashed.

    .. math::
        \text{out}_{n,\, l F + f} &= \sum_{c \in \{0, 1\}^D} \Big(\prod_d c_d\, t_d + (1 - c_d) (1 - t_d)\Big)\;
        \text{table}^{(l)}_{\,i_l(p + c),\, f}, \qquad p = \lfloor y \rfloor, \quad t = s(y - p) \\
        y &= \text{scale}_l\, x_n + \tfrac{1}{2}, \qquad
        \text{scale}_l = 2^{\,l \log_2 \text{growth}}\, \text{base\_resolution} - 1, \qquad
        R_l = \lceil \text{scale}_l \rceil + 1

    Here :math:`s(t) = t`, or :math:`3 t^2 - 2 t^3` for ``"smoothstep"`` . Level l has
    :math:`S_l = \min(8 \lceil R_l^D / 8 \rceil,\, 2^{\text{log2\_size}})` entries of F features each, and the table has
    the levels one after the other. If :math:`R_l^D \le S_l`, corner q has the entry
    :math:`i_l(q) = \sum_d q_d R_l^d \bmod S_l`, so that :math:`q_d = R_l` wraps into the next row; otherwise it has
    :math:`(\bigoplus_d q_d \pi_d \bmod 2^{32}) \bmod S_l` with the primes
    :math:`\pi` = 1, 2654435761, 805459861, 3674653429. These are the grids of tiny-cuda-nn.

    A coordinate outside of [0, 1] counts as the nearest end, where it has no gradient; at 0 and 1 itself it has one.
    NaN gives NaN in all levels of its point.

    Positions in a grid are computed in the dtype of `points` (float32 for float16), the rest in float32, or in float64
    beside a float64 table. Points and table have gradients, and these have gradients with respect to all that they are
    computed from, so that a loss may take the gradient of a field with respect to space. (Only the second derivative by
    the points has no further one.) On the line between two cells, where the linear interpolation has a kink, the
    gradient is that of the upper cell. The gradient of the table is bitwise reproducible: on a GPU it is added up as
    64-bit integers, in steps of at most :math:`N\, 2^{-60}` of the level's largest gradient, and for float64 as 128-bit
    ones.

    Args:
        points (Tensor): Shape (N, D), D from 2 to 4, in [0, 1]; float32 or float64, or the dtype of `table`. float16
            is too coarse for grids of more than some hundred cells.
        table (Tensor): Shape (entries of all levels, F), any F; float16, float32 or float64.
        levels (int): The number of levels, from 1 to 32.
        base_resolution (int): What the scale of the first level is made of, at least 1.
        growth (float): How many times finer each level is than the one before it, at least 1. No level may have more
            than 2^30 cells along an axis.
        log2_size (int): Levels have at most 2^log2_size entries, from 3 to 31.
        interpolation (str): ``"linear"`` or ``"smoothstep"`` , which is differentiable everywhere. Default:
            ``"linear"`` .

    Returns:
        Tensor of shape (N, levels F), with the dtype of `table`.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or a setting has a wrong type.
        ValueError: If an input has another shape, or a setting is out of range.

    Source:
        Müller et al., "Instant neural graphics primitives with a multiresolution hash encoding", 2022.

    Examples:
        >>> import mindspore, msops
        >>> corners = mindspore.Tensor([[0], [1], [10], [11], [0], [0], [0], [0]], mindspore.float32)
        >>> points = mindspore.Tensor([[0.25, 0.25], [0.5, 0.25]], mindspore.float32)
        >>> print(msops.hash_encoding(points, corners, 1, 2, 1.0, 4))  # 2 x 2 corners; at (0.75, 0.75), (1, 0.75)
        [[8.25]
         [8.5 ]]
    """
    axes = _axes(describe(points))
    return operators.primitive(axes, levels, base_resolution, growth, log2_size, interpolation)(points, table)


class HashEncoding(nn.Cell):
    """Encodes points by learned features at the corners of grids, which it holds as the Parameter `table`. See
    :func:`msops.hash_encoding`.

    The features start uniform in [-1e-4, 1e-4].

    Args:
        dim (int): The number D of coordinates, 2, 3 or 4. Default: ``3`` .
        levels (int): As in the function. Default: ``16`` .
        features (int): The number F of features of each level. Default: ``2`` .
        log2_size (int): As in the function. Default: ``19`` .
        base_resolution (int): As in the function. Default: ``16`` .
        growth (float): As in the function. Default: ``2 ** (7 / 15)`` , which leads from 16 to 2048 in 16 levels.
        interpolation (str): As in the function. Default: ``"linear"`` .
        dtype (mindspore.dtype): The dtype of the table, and of the results. Default: ``mindspore.float32`` .

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a number is out of range.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> encoding = msops.HashEncoding(dim=2, levels=8, log2_size=14)
        >>> print(encoding(ops.zeros((5, 2), mindspore.float32)).shape, encoding.table.shape)
        (5, 16) (42600, 2)
    """

    def __init__(
        self,
        dim: int = 3,
        levels: int = 16,
        features: int = 2,
        log2_size: int = 19,
        base_resolution: int = 16,
        growth: float = _GROWTH,
        interpolation: str = "linear",
        dtype: mindspore.Type = mindspore.float32,
    ) -> None:
        super().__init__()
        operator = operators(dim, levels, base_resolution, growth, log2_size, interpolation)  # checks them
        self.dim, self.levels, self.features, self.log2_size = dim, levels, features, log2_size
        self.base_resolution, self.growth, self.interpolation = base_resolution, growth, interpolation
        shape = (int(operator.signature.values["entries"]), settings.positive("HashEncoding", "features", features))
        self.table = settings.parameter("HashEncoding", "table", Uniform(1e-4), shape, dtype)
        self.forward_op = operator.primitive

    def construct(self, points: Tensor) -> Tensor:
        return self.forward_op(points, self.table)

    construct.__doc__ = hash_encoding.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(
            self, "dim", "levels", "features", "log2_size", "base_resolution", "growth", "interpolation"
        )


@once
def _axes(points: Description) -> int:
    """Returns the number of coordinates that points have."""
    spec = spec_of(points)
    if not isinstance(spec, Spec):
        raise TypeError(f"{_NAME}: points must be a Tensor, got {spec}")
    if len(spec.shape) != 2 or spec.shape[1] not in (2, 3, 4):
        raise ValueError(f"{_NAME}: points must have shape (N, D) with D from 2 to 4, got {spec.shape}")
    return spec.shape[1]


@Operators
def operators(
    dim: int, levels: int, base_resolution: int, growth: float, log2_size: int, interpolation: str = "linear"
) -> Operator:
    attributes = _attributes(dim, levels, base_resolution, growth, log2_size, interpolation)
    points, along = "points(N, dim, dtype=common|float32|float64)", "ddpoints(N, dim, dtype=points)"
    table, dout, dtable = "table(entries, F)", "dout(N, levels * F)", "dtable(entries, W // levels)"

    def gradient(points: Tensor, table: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        return backward_points(points, table, dout), backward_table(points, dout)

    def gradient_of_points(
        points: Tensor, table: Tensor, dout: Tensor, dpoints: Tensor, ddpoints: Tensor
    ) -> tuple[Tensor, ...]:
        """Calls the derivatives of the three operators along ddpoints."""
        return (
            along_points(points, table, dout, ddpoints),
            along_table(points, dout, ddpoints),
            along_forward(points, table, ddpoints),
        )

    def gradient_of_table(points: Tensor, dout: Tensor, dtable: Tensor, ddtable: Tensor) -> tuple[Tensor, ...]:
        """Calls the operator itself: it is linear in the table, and this is its transpose."""
        return backward_points(points, ddtable, dout), forward(points, ddtable)

    def gradient_along(
        points: Tensor, table: Tensor, ddpoints: Tensor, out: Tensor, dout: Tensor
    ) -> tuple[Tensor, ...]:
        return (
            along_points(points, table, dout, ddpoints),
            along_table(points, dout, ddpoints),
            backward_points(points, table, dout),
        )

    def gradient_of_table_along(
        points: Tensor, dout: Tensor, ddpoints: Tensor, dtable: Tensor, ddtable: Tensor
    ) -> tuple[Tensor, ...]:
        return (
            along_points(points, ddtable, dout, ddpoints),
            along_forward(points, ddtable, ddpoints),
            backward_points(points, ddtable, dout),
        )

    along_points = custom_op(
        _library.HashEncodingAlongPoints,
        f"{points}, {table}, {dout}, {along} -> dpoints(N, dim, dtype=points)",
        **attributes,
    )
    along_table = custom_op(
        _library.HashEncodingAlongTable,
        f"{points}, dout(N, W), {along} -> {dtable}; scratch(..., dtype=int32)",
        gradient=gradient_of_table_along,
        **attributes,
    )
    along_forward = custom_op(
        _library.HashEncodingAlongForward,
        f"{points}, {table}, {along} -> out(N, levels * F)",
        gradient=gradient_along,
        **attributes,
    )
    backward_points = custom_op(
        _library.HashEncodingBackwardPoints,
        f"{points}, {table}, {dout} -> dpoints(N, dim, dtype=points)",
        gradient=gradient_of_points,
        **attributes,
    )
    backward_table = custom_op(
        _library.HashEncodingBackwardTable,
        f"{points}, dout(N, W) -> {dtable}; scratch(..., dtype=int32)",
        gradient=gradient_of_table,
        **attributes,
    )
    forward = custom_op(
        _library.HashEncodingForward, f"{points}, {table} -> out(N, levels * F)", gradient=gradient, **attributes
    )
    return forward


def _attributes(
    dim: int, levels: int, base_resolution: int, growth: float, log2_size: int, interpolation: str
) -> dict[str, Any]:
    """Checks the settings, and returns what the entries read, and the number of entries."""
    whole = {"dim": dim, "levels": levels, "base_resolution": base_resolution, "log2_size": log2_size}
    limits = {"dim": (2, 4), "levels": (1, 32), "base_resolution": (1, 2**30), "log2_size": (3, 31)}
    for name, (least, most) in limits.items():
        if not least <= settings.integer(_NAME, name, whole[name]) <= most:
            raise ValueError(f"{_NAME}: {name} must be from {least} to {most}, got {whole[name]}")
    attributes: dict[str, Any] = {name: int(value) for name, value in whole.items()}
    attributes["growth"] = settings.number(_NAME, "growth", growth, 1.0)
    attributes["interpolation"] = settings.one_of(_NAME, "interpolation", interpolation, ("linear", "smoothstep"))
    attributes["entries"] = 0
    exponent = float(np.log2(np.longdouble(growth)))
    for level in range(levels):
        # The entries compute the same, with the same functions of the C library: one more cell would be another table.
        scale = float(np.exp2(np.longdouble(min(level * exponent, 99.0)))) * base_resolution - 1
        if scale >= 2**30:
            raise ValueError(f"{_NAME}: growth must keep levels to 2^30 cells along an axis, got {growth}")
        corners = (math.ceil(scale) + 1) ** dim
        attributes["entries"] += min(-(-corners // 8) * 8, 2**log2_size)
    return attributes
