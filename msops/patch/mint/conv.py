"""Computes convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspore import ops
from mindspore.ops import operations

from msops.core.compiled import once

if TYPE_CHECKING:
    from collections.abc import Callable

    from mindspore import Tensor

    Numbers = int | tuple[int, ...]
    Operator = Callable[..., Any]


def convolution(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers | str = 0,
    dilation: Numbers = 1,
    groups: int = 1,
) -> Tensor:
    """Convolves along the last axes, as many as the weight has after the first two; the input may lack the first."""
    rank = weight.ndim - 2
    if input.ndim == rank + 1:
        return _of_batch(input.expand_dims(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    return _of_batch(input, weight, bias, stride, padding, dilation, groups)


def _of_batch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Numbers,
    padding: Numbers | str,
    dilation: Numbers,
    groups: int,
) -> Tensor:
    operator = _make_convolution(weight.shape, x.shape, stride, padding, dilation, groups)
    if weight.ndim == 3:
        y = operator(x.expand_dims(2), weight.expand_dims(2))
        return _with_bias(y, bias).squeeze(2)
    return _with_bias(operator(x, weight), bias)


def _with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return x
    return _add_bias(x, bias) if x.ndim == 4 else _add_bias_of_volume(x, bias)


_add_bias = operations.BiasAdd()
_add_bias_of_volume = operations.BiasAdd(data_format="NCDHW")


@once
def _make_convolution(
    weight: tuple[int, ...],
    x: tuple[int, ...],
    stride: Numbers,
    padding: Numbers | str,
    dilation: Numbers,
    groups: int,
) -> Operator:
    rank = len(weight) - 2
    name = f"mint.nn.functional.conv{rank}d"
    if len(x) != rank + 2:
        raise ValueError(f"{name}: input must have {rank + 1} or {rank + 2} axes, got shape {x}")
    if x[1] != weight[1] * groups:
        raise ValueError(f"{name}: input must have {weight[1] * groups} channels for {groups} groups, got shape {x}")
    kernel, strides, dilations = weight[2:], along(name, stride, rank), along(name, dilation, rank)
    if padding == "same":
        if max(strides) > 1:
            raise ValueError(f"{name}: padding 'same' needs a stride of 1, got {stride}")
        totals = [step * (size - 1) for step, size in zip(dilations, kernel)]
        pads = [each for total in totals for each in (total // 2, total - total // 2)]
    elif padding == "valid":
        pads = [0] * (2 * rank)
    else:
        pads = [each for pad in along(name, padding, rank) for each in (pad, pad)]
    if rank == 1:
        kernel, strides, dilations, pads = (1, *kernel), (1, *strides), (1, *dilations), [0, 0, *pads]
    make = operations.Conv3D if rank == 3 else operations.Conv2D
    settings = {"pad_mode": "pad", "pad": tuple(pads), "stride": strides, "dilation": dilations, "group": groups}
    return make(weight[0], kernel, **settings)


def conv_tbc(input: Tensor, weight: Tensor, bias: Tensor, pad: int = 0) -> Tensor:  # noqa: A002
    """Convolves along the first axis of (times, batch, channels); the weight is (width, channels, outputs)."""
    if input.ndim != 3 or weight.ndim != 3:
        raise ValueError(f"mint.conv_tbc: input and weight must have 3 axes, got {input.ndim} and {weight.ndim}")
    if input.shape[2] != weight.shape[1]:
        raise ValueError(f"mint.conv_tbc: input must have {weight.shape[1]} channels, got shape {input.shape}")
    width, channels, outputs = weight.shape
    if pad:
        zeros = ops.zeros((pad, *input.shape[1:]), input.dtype)
        input = ops.concat((zeros, input, zeros), 0)  # noqa: A001
    count = input.shape[0] - width + 1
    windows = [input[first : first + count] for first in range(width)]
    return ops.matmul(ops.concat(windows, 2), weight.reshape(width * channels, outputs)) + bias


def conv_transpose2d(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
) -> Tensor:
    x = input.expand_dims(0) if input.ndim == 3 else input
    operator, shape = _make_transposed(weight.shape, x.shape, stride, padding, output_padding, groups, dilation)
    y = _with_bias(operator(x, weight, shape), bias)
    return y.squeeze(0) if input.ndim == 3 else y


@once
def _make_transposed(
    weight: tuple[int, ...],
    x: tuple[int, ...],
    stride: Numbers,
    padding: Numbers,
    output_padding: Numbers,
    groups: int,
    dilation: Numbers,
) -> tuple[Operator, tuple[int, ...]]:
    name = "mint.nn.functional.conv_transpose2d"
    if len(x) != 4:
        raise ValueError(f"{name}: input must have 3 or 4 axes, got {len(x)}")
    strides, dilations, pads = along(name, stride, 2), along(name, dilation, 2), along(name, padding, 2)
    extra = along(name, output_padding, 2)
    for i in range(2):
        if extra[i] >= max(strides[i], dilations[i]):
            raise ValueError(f"{name}: output_padding must be less than stride or dilation, got {output_padding}")
    sizes = [
        (x[2 + i] - 1) * strides[i] - 2 * pads[i] + dilations[i] * (weight[2 + i] - 1) + extra[i] + 1 for i in range(2)
    ]
    pad = (pads[0], pads[0], pads[1], pads[1])
    settings = {"pad_mode": "pad", "pad": pad, "stride": strides, "dilation": dilations, "group": groups}
    operator = operations.Conv2DTranspose(weight[0], weight[2:], **settings)
    return operator, (x[0], weight[1] * groups, *sizes)


def along(name: str, value: Any, rank: int) -> tuple[int, ...]:
    """Returns a setting's numbers along each axis: one number stands for all."""
    numbers = (value,) * rank if isinstance(value, int) else tuple(value)
    if len(numbers) == 1:
        numbers *= rank
    if len(numbers) != rank:
        raise ValueError(f"{name}: settings must have 1 or {rank} numbers, got {value}")
    return numbers
