"""Resizes images and volumes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import operations

from msops.core.compiled import once

if TYPE_CHECKING:
    from collections.abc import Callable

    import mindspore

    Sizes = tuple[int, ...] | None
    Scales = tuple[float, ...] | None
    Operator = Callable[..., Any]

_MOST_WEIGHTS = 2**24  # of a matrix that resizes an axis
_nearest: Operator = operations.UpsampleNearest3D()


def nearest(x: Tensor, output_size: Sizes = None, scales: Scales = None) -> Tensor:
    """Copies the nearest elements of an input of one, two or three axes after the first two."""
    front, sizes, factors = _resized("nearest", x.shape, output_size, scales)
    if factors is not None:
        y = _nearest(x.reshape(x.shape[:2] + front + x.shape[2:]), None, factors)
    else:
        y = _nearest(x.reshape(x.shape[:2] + front + x.shape[2:]), front + sizes, None)
    return y.reshape(x.shape[:2] + sizes)


def linear(x: Tensor, output_size: Sizes = None, scales: Scales = None, align_corners: bool = False) -> Tensor:
    """Interpolates linearly along one, two or three axes after the first two."""
    front, sizes, factors = _resized("linear", x.shape, output_size, scales)
    if x.ndim == 4 and (factors is None or align_corners):
        return _make_bilinear(align_corners)(x, sizes)
    if _has_small_matrices(x.shape, sizes):
        return _by_products(x, sizes, factors, align_corners)
    if factors is not None and not align_corners:
        y = _make_trilinear(align_corners)(x.reshape(x.shape[:2] + front + x.shape[2:]), None, factors)
    else:
        y = _make_trilinear(align_corners)(x.reshape(x.shape[:2] + front + x.shape[2:]), front + sizes, None)
    return y.reshape(x.shape[:2] + sizes)


def _by_products(x: Tensor, sizes: tuple[int, ...], factors: Scales, align_corners: bool) -> Tensor:
    """Interpolates linearly along one axis after another, as products of matrices: in graph mode on a GPU, MindSpore's
    gradient of UpsampleTrilinear3D is wrong at times."""
    for axis, size in enumerate(sizes):
        scale = None if factors is None else factors[axis - len(sizes)]
        weights = _linear_weights(x.shape[axis + 2], size, scale, align_corners, x.dtype)
        rows, resized = _rows_along(x.shape, axis + 2, size)
        x = ops.matmul(weights, x.reshape(rows)).reshape(resized)
    return x


@once
def _has_small_matrices(shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    return all(n * size <= _MOST_WEIGHTS for n, size in zip(shape[2:], sizes))


@once
def _rows_along(shape: tuple[int, ...], axis: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of matrices whose rows stand along an axis, and the shape with `size` of them there."""
    before, after = shape[:axis], shape[axis + 1 :]
    return (math.prod(before), shape[axis], math.prod(after)), (*before, size, *after)


def bicubic(x: Tensor, output_size: Sizes = None, scales: Scales = None, align_corners: bool = False) -> Tensor:
    """Interpolates by cubic polynomials along the last two axes, as products of matrices."""
    _, sizes, factors = _resized("bicubic", x.shape, output_size, scales)
    scale = (None, None, None) if factors is None else factors
    rows = _cubic_weights(x.shape[2], sizes[0], scale[1], align_corners, x.dtype)
    columns = _cubic_weights(x.shape[3], sizes[1], scale[2], align_corners, x.dtype)
    return ops.matmul(rows, ops.matmul(x, columns.swapaxes(0, 1)))


@once
def _make_bilinear(align_corners: bool) -> Operator:
    return operations.ResizeBilinearV2(align_corners, not align_corners)


@once
def _make_trilinear(align_corners: bool) -> Operator:
    return operations.UpsampleTrilinear3D(align_corners=align_corners)


@once
def _resized(
    name: str, shape: tuple[int, ...], output_size: Any, scales: Any
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...] | None]:
    """Returns axes of 1 that make the input a volume, the sizes of the result, and the factors along all three axes
    where these are not the quotients of the sizes.
    """
    rank = len(shape) - 2
    front = (1,) * (3 - rank)
    if (output_size is None) == (scales is None):
        raise ValueError(f"mint.nn.functional.interpolate: {name} needs either size or scale_factor")
    given = output_size if scales is None else scales
    numbers = (given,) * rank if isinstance(given, (int, float)) else tuple(given)
    if len(numbers) != rank or min(numbers) <= 0:
        raise ValueError(
            f"mint.nn.functional.interpolate: {name} needs {rank} positive numbers for an input of shape {shape}, "
            f"got {given}"
        )
    if scales is None:
        return front, tuple([int(each) for each in numbers]), None
    sizes = tuple([math.floor(n * scale) for n, scale in zip(shape[2:], numbers)])
    exact = all(n * scale == size for n, scale, size in zip(shape[2:], numbers, sizes))
    return front, sizes, None if exact else (*(1.0,) * len(front), *[float(scale) for scale in numbers])


@once
def _cubic_weights(n: int, size: int, scale: float | None, align_corners: bool, dtype: mindspore.Type) -> Tensor:
    """Returns the weights (size, n) of the elements along an axis in each one of the result; a = -0.75, as usual."""
    weights, steps = np.zeros((size, n)), np.arange(size)
    places = _places(n, size, scale, align_corners)
    first = np.floor(places).astype(np.int64)
    for step in range(-1, 3):
        away = np.abs(first + step - places)
        near = (1.25 * away - 2.25) * away * away + 1
        far = -0.75 * (((away - 5) * away + 8) * away - 4)
        np.add.at(weights, (steps, np.clip(first + step, 0, n - 1)), np.where(away <= 1, near, far))
    return Tensor(weights, dtype)


@once
def _linear_weights(n: int, size: int, scale: float | None, align_corners: bool, dtype: mindspore.Type) -> Tensor:
    """Returns the weights (size, n) of the elements along an axis in each one of the result."""
    weights, steps = np.zeros((size, n)), np.arange(size)
    places = np.clip(_places(n, size, scale, align_corners), 0, n - 1)
    first = np.floor(places).astype(np.int64)
    np.add.at(weights, (steps, first), first + 1 - places)
    np.add.at(weights, (steps, np.minimum(first + 1, n - 1)), places - first)
    return Tensor(weights, dtype)


def _places(n: int, size: int, scale: float | None, align_corners: bool) -> np.ndarray[Any, Any]:
    """Returns where the elements of the result stand along an axis of n elements."""
    steps = np.arange(size)
    if align_corners:
        return steps * ((n - 1) / (size - 1) if size > 1 else 0)
    return (steps + 0.5) * (n / size if scale is None else 1 / scale) - 0.5
