"""Resizes images and volumes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import operations

from msops.core.compiled import compiling, once
from msops.core.inputs import lacks_rank

from .elementwise import WHOLE

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
    if compiling() and lacks_rank(x.shape):  # it is a volume, or MindSpore does not call this
        return _nearest(x, output_size, scales)
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
        # In graph mode on a GPU, MindSpore's gradient of UpsampleTrilinear3D is wrong at times.
        return _by_products(x, sizes, factors, align_corners, False)
    if factors is not None and not align_corners:
        y = _make_trilinear(align_corners)(x.reshape(x.shape[:2] + front + x.shape[2:]), None, factors)
    else:
        y = _make_trilinear(align_corners)(x.reshape(x.shape[:2] + front + x.shape[2:]), front + sizes, None)
    return y.reshape(x.shape[:2] + sizes)


def bicubic(x: Tensor, output_size: Sizes = None, scales: Scales = None, align_corners: bool = False) -> Tensor:
    """Interpolates by cubic polynomials along the last two axes."""
    _, sizes, factors = _resized("bicubic", x.shape, output_size, scales)
    return _by_products(x, sizes, factors, align_corners, True)


def _by_products(x: Tensor, sizes: tuple[int, ...], factors: Scales, align_corners: bool, is_cubic: bool) -> Tensor:
    """Interpolates along one axis after another, as products of matrices. Each axis comes last for its product, since
    MindSpore would copy a matrix for each of many products."""
    for axis, size in enumerate(sizes, 2):
        scale = None if factors is None else factors[axis - x.ndim]
        rows = ops.swapaxes(x, axis, -1)
        weights = _weights(is_cubic, rows.shape[-1], size, scale, align_corners, x.dtype)
        product = ops.matmul(rows.reshape(-1, rows.shape[-1]), weights)
        x = ops.swapaxes(product.reshape((*rows.shape[:-1], size)), axis, -1)
    return x


@once
def _has_small_matrices(shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    return all(n * size <= _MOST_WEIGHTS for n, size in zip(shape[2:], sizes))


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
    if shape is None:
        raise ValueError(f"mint.nn.functional.interpolate: {name} needs a rank that is known when MindSpore compiles")
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
def _weights(
    is_cubic: bool, n: int, size: int, scale: float | None, align_corners: bool, dtype: mindspore.Type
) -> Tensor:
    """Returns the weights (n, size) of the elements along an axis in each one of the result; for cubic polynomials,
    a = -0.75, as usual."""
    if dtype in WHOLE:
        raise TypeError(f"mint.nn.functional.interpolate: x must be of a floating dtype, got {dtype}")
    weights, steps = np.zeros((n, size)), np.arange(size)
    if align_corners:
        places = steps * ((n - 1) / (size - 1) if size > 1 else 0)
    else:
        places = (steps + 0.5) * (n / size if scale is None else 1 / scale) - 0.5
    if not is_cubic:
        places = np.clip(places, 0, n - 1)
    first = np.floor(places).astype(np.int64)
    for step in range(-1, 3) if is_cubic else range(2):
        away = np.abs(first + step - places)
        if is_cubic:
            near = (1.25 * away - 2.25) * away * away + 1
            far = -0.75 * (((away - 5) * away + 8) * away - 4)
            share = np.where(away <= 1, near, far)
        else:
            share = 1 - away
        np.add.at(weights, (np.clip(first + step, 0, n - 1), steps), share)
    return Tensor(weights, dtype)
