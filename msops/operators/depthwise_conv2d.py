from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package

if TYPE_CHECKING:
    from typing import Any

    from msops.core.operator import Operator
    from msops.core.settings import Numbers
    from msops.core.spec import Spec

_NAME = "depthwise_conv2d"
_LIBRARY = of_package(_NAME)
_PAD_MODES = ("valid", "same", "pad")  # in the order of PadMode in aot_kernels/depthwise_conv2d.cu


def depthwise_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    pad_mode: str = "valid",
    padding: Numbers = 0,
    dilation: Numbers = 1,
) -> Tensor:
    r"""Convolves each channel of an image with its own kernels.

    .. math::
        \text{out}_{n, cm + j, y, x} = \text{bias}_{cm + j} + \sum_{a, b} \text{weight}_{cm + j, 0, a, b}\,
        \text{x}_{n,\, c,\, y s_h - p_{top} + a d_h,\, x s_w - p_{left} + b d_w}, \qquad 0 \le j < m

    Outside the image, `x` counts as 0. As usual in deep learning, this is a cross-correlation. It equals
    `mindspore.ops.conv2d` with ``groups=C`` . The inputs x, weight and bias have gradients.

    Args:
        x (Tensor): Shape (N, C, H, W); float16, float32 or float64. All inputs have the same dtype.
        weight (Tensor): Shape (C·m, 1, kh, kw), where m, a whole number of at least 1, is the number of kernels of each
            channel.
        bias (Tensor): Shape (C·m,). Default: ``None`` , no bias.
        stride (int, tuple[int]): At least 1; one number, or (vertical, horizontal). Default: ``1`` .
        pad_mode (str): ``"valid"`` : there is no padding. ``"same"`` : the output has ceil(H / stride) rows; half of
            the padding is on either side, and an odd row or column is below or to the right. ``"pad"`` : `padding` says
            how much. Default: ``"valid"`` .
        padding (int, tuple[int]): At least 0, and 0 unless `pad_mode` is ``"pad"`` ; one number, (vertical, horizontal)
            or (top, bottom, left, right). Default: ``0`` .
        dilation (int, tuple[int]): The distance between taps, at least 1; one number, or (vertical, horizontal).
            Default: ``1`` .

    Returns:
        Tensor of shape (N, C·m, H', W') with H' = floor((H + top + bottom - dilation (kh - 1) - 1) / stride) + 1, or
        ceil(H / stride) if `pad_mode` is ``"same"`` ; the same formula gives W' from W, left, right and kw.

    Note:
        An infinity or a NaN in an input may turn further results, beside those that depend on it, into NaN: fast
        kernels multiply elements beside a window by zero.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, the dtypes differ, or another argument has a
            wrong type.
        ValueError: If an input has another shape, the kernel is larger than the padded image, or another argument is
            out of range.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> image, box = ops.ones((1, 2, 4, 4)), ops.ones((2, 1, 3, 3))
        >>> print(msops.depthwise_conv2d(image, box, pad_mode="same")[0, 0])
        [[4. 6. 6. 4.]
         [6. 9. 9. 6.]
         [6. 9. 9. 6.]
         [4. 6. 6. 4.]]
    """
    convolution = operators.primitive(stride, pad_mode, padding, dilation, bias is not None)
    if bias is None:
        return convolution(x, weight)
    return convolution(x, weight, bias)


class DepthwiseConv2d(nn.Cell):
    r"""A depthwise convolution with its parameters. See :func:`msops.depthwise_conv2d`.

    It replaces ``nn.Conv2d(C, C * m, kernel_size, group=C)`` , and loads its checkpoints.

    Args:
        in_channels (int): C, the number of channels of the input.
        kernel_size (int, tuple[int]): At least 1; one number, or (vertical, horizontal).
        stride (int, tuple[int]): As in the function. Default: ``1`` .
        pad_mode (str): As in the function. Default: ``"same"`` .
        padding (int, tuple[int]): As in the function. Default: ``0`` .
        dilation (int, tuple[int]): As in the function. Default: ``1`` .
        has_bias (bool): Whether there is a bias. Default: ``False`` .
        weight_init (Tensor, str, Initializer, number): The initial weight. Default: ``None`` , ``HeUniform(sqrt(5))``
            as in ``nn.Conv2d`` .
        bias_init (Tensor, str, Initializer, number): The initial bias. Default: ``None`` , uniform in
            :math:`\pm 1 / \sqrt{k_h k_w}` as in ``nn.Conv2d`` .
        dtype (mindspore.dtype): The parameters' dtype: float16, float32 or float64. Default: ``mindspore.float32`` .
        channel_multiplier (int): m, the number of kernels for each channel. Default: ``1`` .

    Attributes:
        weight (Parameter): Shape (C·m, 1, kh, kw).
        bias (Parameter): Shape (C·m,), or None.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> net = msops.DepthwiseConv2d(16, 3, stride=2, channel_multiplier=2)
        >>> print(net(ops.ones((8, 16, 32, 32))).shape)
        (8, 32, 16, 16)
    """

    def __init__(
        self,
        in_channels: int,
        kernel_size: Numbers,
        stride: Numbers = 1,
        pad_mode: str = "same",
        padding: Numbers = 0,
        dilation: Numbers = 1,
        has_bias: bool = False,
        weight_init: settings.Init | None = None,
        bias_init: settings.Init | None = None,
        dtype: mindspore.Type = mindspore.float32,
        channel_multiplier: int = 1,
    ) -> None:
        name = "DepthwiseConv2d"
        super().__init__()
        self.has_bias = has_bias = settings.boolean(name, "has_bias", has_bias)
        self.forward_op = operators.primitive(stride, pad_mode, padding, dilation, has_bias)
        self.in_channels = self.group = settings.positive(name, "in_channels", in_channels)
        self.out_channels = self.in_channels * settings.positive(name, "channel_multiplier", channel_multiplier)
        self.kernel_size = settings.numbers(name, "kernel_size", kernel_size, (2,), 1)
        self.stride, self.pad_mode, self.padding, self.dilation = stride, pad_mode, padding, dilation
        shape = (self.out_channels, 1, *self.kernel_size)
        self.weight, self.bias = settings.weight_and_bias(name, shape, has_bias, weight_init, bias_init, dtype)

    def construct(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return self.forward_op(x, self.weight)
        return self.forward_op(x, self.weight, self.bias)

    construct.__doc__ = depthwise_conv2d.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(
            self, "in_channels", "out_channels", "kernel_size", "stride", "pad_mode", "padding", "dilation", "has_bias"
        )


@Operators
def operators(stride: Numbers, pad_mode: str, padding: Numbers, dilation: Numbers) -> Operator:
    stride_h, stride_w = settings.numbers(_NAME, "stride", stride, (2,), 1)
    dilation_h, dilation_w = settings.numbers(_NAME, "dilation", dilation, (2,), 1)
    padding = settings.numbers(_NAME, "padding", padding, (2, 4), 0)
    if len(padding) == 2:
        padding = (padding[0], padding[0], padding[1], padding[1])
    mode = settings.one_of(_NAME, "pad_mode", pad_mode, _PAD_MODES)
    if pad_mode != "pad" and any(padding):
        raise ValueError(f"{_NAME}: padding must be 0 unless pad_mode is 'pad', got {padding} with {pad_mode!r}")
    return _operators_with(
        stride_h=stride_h, stride_w=stride_w, dilation_h=dilation_h, dilation_w=dilation_w, pad_mode=mode,
        pad_top=padding[0], pad_bottom=padding[1], pad_left=padding[2], pad_right=padding[3],
    )  # fmt: skip


@Operators
def _operators_with(**attributes: Any) -> Operator:
    """Returns one operator for settings of one meaning, such as strides of 1 and (1, 1)."""

    def gradient_of_backward(
        x: Tensor, weight: Tensor, dout: Tensor, out: tuple[Tensor, ...], douts: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Calls both operators again, since the convolution is linear in x and the bias, and in weight and the bias."""
        ddx, ddweight, ddbias = douts
        ddx_gradient, ddweight_gradient = linear(ddx, ddweight, dout)
        return ddx_gradient, ddweight_gradient, forward(x, ddweight, ddbias) + forward(ddx, weight)

    backward = custom_op(
        _LIBRARY.DepthwiseConv2dBackward,
        "x(N, C, H, W), weight(K, 1, kh, kw), dout(N, K, H_out, W_out) -> "
        "dx(N, C, H, W), dweight(K, 1, kh, kw), dbias(K)?; partial",
        gradient=gradient_of_backward,
        **attributes,
    )
    linear = backward.without("dbias")
    forward = custom_op(
        _LIBRARY.DepthwiseConv2dForward,
        "x(N, C, H, W), weight(K, 1, kh, kw), bias(K)? -> out",
        infer=_infer,
        gradient=backward,
        **attributes,
    )
    return forward


def _infer(x: Spec, weight: Spec, bias: Spec | None = None, **attributes: int) -> Spec:
    (n, channels, *image), (kernels, _, *kernel) = x.shape, weight.shape
    if (kernels == 0) != (channels == 0) or (channels and kernels % channels):
        raise ValueError(f"weight must have a multiple of the {channels} channels of x as first size, got {kernels}")
    padding = (attributes["pad_top"] + attributes["pad_bottom"], attributes["pad_left"] + attributes["pad_right"])
    out = []
    for length, taps, pad, direction in zip(image, kernel, padding, "hw"):
        stride, reach = attributes[f"stride_{direction}"], attributes[f"dilation_{direction}"] * (taps - 1) + 1
        if taps == 0:
            raise ValueError(f"weight must have a kernel of at least 1 x 1, got shape {weight.shape}")
        if _PAD_MODES[attributes["pad_mode"]] == "same":
            out.append(-(-length // stride))
        elif length + pad < reach:
            raise ValueError(
                f"x must be at least as large as the kernel, got {length} padded by {pad} for a kernel "
                f"that reaches over {reach}"
            )
        else:
            out.append((length + pad - reach) // stride + 1)
    return x._replace(shape=(n, kernels, *out))
