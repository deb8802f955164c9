"""Samples feature maps of several sizes at places that a network chooses, as deformable DETR does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

from msops.core import settings
from msops.core.compiled import once
from msops.core.factory import custom_op
from msops.core.inputs import describe, spec_of
from msops.core.library import of_package
from msops.core.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from msops.core.inputs import Description

_NAME = "ms_deform_attn"
_SEQUENCES = (tuple, list)
_library = of_package(_NAME)
_inputs = (
    "value(N, S, M, D), spatial_shapes(L, 2, dtype=index), level_start_index(L, dtype=index), "
    "sampling_locations(N, Lq, M, L, P, 2, dtype=common|float32), "
    "attention_weights(N, Lq, M, L, P, dtype=common|float32)"
)
backward = custom_op(
    _library.MsDeformAttnBackward,
    f"{_inputs}, dout(N, Lq, M * D) -> dvalue(N, S, M, D), "
    "dsampling_locations(N, Lq, M, L, P, 2, dtype=sampling_locations), "
    "dattention_weights(N, Lq, M, L, P, dtype=attention_weights); "
    "keys(..., dtype=int32), sorted(..., dtype=int32)",
)
forward = custom_op(_library.MsDeformAttnForward, f"{_inputs} -> out(N, Lq, M * D)", gradient=backward)


def ms_deform_attn(
    value: Tensor,
    spatial_shapes: Sequence[Sequence[int]],
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    r"""Computes multi-scale deformable attention: each query takes the weighted sum of a few samples of each of several
    feature maps, the levels.

    .. math::
        \text{out}_{n,\, q,\, m D + d} = \sum_{l=1}^{L} \sum_{p=1}^{P} \text{attention\_weights}_{n q m l p}\;
        \text{value}^{(l)}_{n m d}(\text{sampling\_locations}_{n q m l p})

    :math:`\text{value}^{(l)}(x, y)` is the level `l` with bilinear interpolation, where pixel (i, j) of H x W is at
    :math:`x = (j + 1/2) / W` and :math:`y = (i + 1/2) / H`, so that 0 and 1 are the outer edges of the level. Around
    it are zeros. (This is `grid_sample` of :math:`2 x - 1` with zeros for padding and ``align_corners=False`` .) A
    location that is NaN gives NaN.

    The sums are in float32, or float64 beside float64. `value`, the locations and the weights have gradients, of first
    order; their sums have a fixed order. At a pixel's center, where the interpolation has a kink, the gradient of a
    location is that of the side towards the end of the axis.

    Args:
        value (Tensor): The levels' features one after the other, shape (N, S, M, D): S pixels of all levels together,
            row by row, with M heads of D features; float16, float32 or float64.
        spatial_shapes (tuple): (H, W) of each of the L levels. The sum of H W is S.
        sampling_locations (Tensor): Shape (N, Lq, M, L, P, 2): P places (x, y) on each level for each of Lq queries and
            each head; the dtype of `value`, or float32, which a level of more than some 30 pixels needs.
        attention_weights (Tensor): Shape (N, Lq, M, L, P), the dtype of `value`, or float32.

    Returns:
        Tensor of shape (N, Lq, M D), with the dtype of `value`.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or `spatial_shapes` is not a tuple of pairs of
            ints.
        ValueError: If an input has another shape, or a size in `spatial_shapes` is negative.

    Source:
        Zhu et al., "Deformable DETR: Deformable transformers for end-to-end object detection", 2021.

    Examples:
        >>> import mindspore, msops
        >>> value = mindspore.Tensor([[[[1.0]], [[3.0]], [[10.0]]]], mindspore.float32)  # two levels: 1 x 2 and 1 x 1
        >>> locations = mindspore.Tensor([[[[[[0.5, 0.5]], [[0.5, 0.5]]]]]], mindspore.float32)  # their centers
        >>> weights = mindspore.Tensor([[[[[1.0], [0.1]]]]], mindspore.float32)
        >>> print(msops.ms_deform_attn(value, ((1, 2), (1, 1)), locations, weights))
        [[[3.]]]
    """
    shapes, starts = _levels(spatial_shapes, describe(value))
    return forward(value, shapes, starts, sampling_locations, attention_weights)


class MSDeformAttn(nn.Cell):
    r"""The attention layer of deformable DETR: from each query, linear maps compute where to sample, relative to the
    query's reference points, and how to weight the samples, by `softmax`.

    It has the arguments and Parameters of the layer with this name in the authors' code, so that its checkpoints fit.
    At first, the heads look into different directions, a pixel further with each point, and weight all alike.

    Args:
        d_model (int): The features of queries and of the levels' pixels. Default: ``256`` .
        n_levels (int): The number of levels. Default: ``4`` .
        n_heads (int): The number of heads, which divides `d_model`. Default: ``8`` .
        n_points (int): How many samples each head takes of each level. Default: ``4`` .
        dtype (mindspore.dtype): The dtype of the Parameters. Default: ``mindspore.float32`` .

    Inputs:
        - **query** (Tensor) - Shape (N, Lq, d_model).
        - **reference_points** (Tensor) - Shape (N, Lq, n_levels, 2): (x, y) in [0, 1] for each level, to which offsets
          in pixels are added. With a last axis of 4, boxes (x, y, width, height): a box of n_points offsets is half
          as large as the reference box.
        - **input_flatten** (Tensor) - The levels' features, shape (N, S, d_model).
        - **spatial_shapes** (tuple) - As in :func:`msops.ms_deform_attn`.
        - **padding_mask** (Tensor) - Shape (N, S), bool: pixels to be taken as zeros. Default: ``None`` .

    Outputs:
        Tensor of shape (N, Lq, d_model).

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a number is not positive, or `n_heads` does not divide `d_model`.

    Source:
        Zhu et al., "Deformable DETR: Deformable transformers for end-to-end object detection", 2021.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> layer = msops.MSDeformAttn(32, n_levels=2, n_heads=4, n_points=3)
        >>> query, pixels = ops.ones((1, 5, 32)), ops.ones((1, 20, 32))
        >>> print(layer(query, ops.full((1, 5, 2, 2), 0.5, dtype=mindspore.float32), pixels, ((4, 4), (2, 2))).shape)
        (1, 5, 32)
    """

    def __init__(
        self,
        d_model: int = 256,
        n_levels: int = 4,
        n_heads: int = 8,
        n_points: int = 4,
        dtype: mindspore.Type = mindspore.float32,
    ) -> None:
        name = "MSDeformAttn"
        super().__init__()
        self.d_model = settings.positive(name, "d_model", d_model)
        self.n_levels = settings.positive(name, "n_levels", n_levels)
        self.n_heads = settings.positive(name, "n_heads", n_heads)
        self.n_points = settings.positive(name, "n_points", n_points)
        if d_model % n_heads:
            raise ValueError(f"{name}: n_heads must divide d_model, {d_model}, got {n_heads}")

        def dense(channels: int, weight: str, bias: settings.Init = "zeros") -> nn.Cell:
            weight, bias = (
                settings.parameter(name, each, init, shape, dtype).init_data()
                for each, init, shape in (("weight", weight, (channels, d_model)), ("bias", bias, (channels,)))
            )
            return nn.Dense(d_model, channels, weight, bias)  # type: ignore[attr-defined]

        samples = n_heads * n_levels * n_points
        directions = Tensor(_directions(n_heads, n_levels, n_points), dtype)
        self.sampling_offsets = dense(2 * samples, "zeros", directions)
        self.attention_weights = dense(samples, "zeros")
        self.value_proj, self.output_proj = dense(d_model, "xavier_uniform"), dense(d_model, "xavier_uniform")

    def construct(
        self,
        query: Tensor,
        reference_points: Tensor,
        input_flatten: Tensor,
        spatial_shapes: Sequence[Sequence[int]],
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        value = self.value_proj(input_flatten)
        if padding_mask is not None:
            value = ops.masked_fill(value, padding_mask.expand_dims(-1), ops.zeros((), value.dtype))
        n, queries = query.shape[:2]
        heads, levels, points = self.n_heads, self.n_levels, self.n_points
        offsets = self.sampling_offsets(query).reshape((n, queries, heads, levels, points, 2))
        weights = ops.softmax(self.attention_weights(query).reshape((n, queries, heads, levels * points)), -1)
        weights = weights.reshape((n, queries, heads, levels, points))
        references = reference_points.reshape((n, queries, 1, levels, 1, reference_points.shape[-1]))
        if reference_points.shape[-1] == 2:
            locations = references + offsets * _pixel_sizes(spatial_shapes, offsets.dtype)
        else:
            locations = references[..., :2] + offsets * references[..., 2:] * (0.5 / points)
        value = value.reshape((n, value.shape[1], heads, self.d_model // heads))
        return self.output_proj(ms_deform_attn(value, spatial_shapes, locations, weights))

    def extend_repr(self) -> str:
        return settings.shown(self, "d_model", "n_levels", "n_heads", "n_points")


def _directions(heads: int, levels: int, points: int) -> np.ndarray[Any, Any]:
    """Returns offsets in pixels: each head has a direction, in which points are 1, 2, ... pixels away, on squares."""
    angles = 2 * math.pi / heads * np.arange(heads)
    rays = np.stack((np.cos(angles), np.sin(angles)), 1)
    rays /= np.abs(rays).max(1, keepdims=True)
    offsets = rays[:, None, None] * np.arange(1, points + 1)[:, None]
    return np.broadcast_to(offsets, (heads, levels, points, 2)).reshape(-1)


@once
def _levels(spatial_shapes: Sequence[Sequence[int]], value: Description) -> tuple[Tensor, Tensor]:
    """Returns the sizes of the levels, and where they begin."""
    sizes = _sizes(spatial_shapes)
    areas = [height * width for height, width in sizes]
    spec = spec_of(value)
    if isinstance(spec, Spec) and len(spec.shape) == 4 and spec.shape[1] not in (None, sum(areas)):
        raise ValueError(
            f"{_NAME}: value must have the {sum(areas)} pixels of levels {tuple(sizes)}, got {spec.shape[1]}"
        )
    starts = [sum(areas[:level]) for level in range(len(areas))]
    return _integers(np.array(sizes).reshape(-1, 2)), _integers(np.array(starts))


@once
def _pixel_sizes(spatial_shapes: Sequence[Sequence[int]], dtype: mindspore.Type) -> Tensor:
    """Returns the width and height of a pixel of each level, shape (L, 1, 2)."""
    return Tensor(1 / np.maximum(_sizes(spatial_shapes), 1)[:, None, ::-1], dtype)


def _sizes(spatial_shapes: Any) -> list[tuple[int, ...]]:
    if not isinstance(spatial_shapes, _SEQUENCES) or not all(isinstance(pair, _SEQUENCES) for pair in spatial_shapes):
        raise TypeError(f"{_NAME}: spatial_shapes must be a tuple of (H, W), got {spatial_shapes!r}")
    return [settings.numbers(_NAME, "spatial_shapes", pair, (2,), 0) for pair in spatial_shapes]


def _integers(numbers: np.ndarray[Any, Any]) -> Tensor:
    return Tensor(numbers.astype(np.int64), mindspore.int64)
