from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, cast

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common.initializer import HeUniform, Uniform

from msops.core import arguments
from msops.core.compiled import compiling, records_gradients
from msops.core.factory import custom_op
from msops.core.inputs import cast_as, check_inputs, describe, has_zero, open_once, spec_of
from msops.core.library import of_package
from msops.core.signature import Signature
from msops.core.spec import Spec, accumulator, dtype_name
from msops.operators.add import backward as add_backward, forward as add
from msops.operators.cross_entropy import cross_entropy, make_forward

if TYPE_CHECKING:
    from msops.core.arguments import Init
    from msops.core.inputs import Description
    from msops.core.operator import Operator

_NAME = "linear_cross_entropy"
_SIGNATURE = Signature("x(N, C), weight(V, C), labels(N, dtype=index), bias(V)? -> loss(N)")
_CHUNKS = 8  # by default; with more, adding up the gradients of the weight takes longer
_FEW = 2**20  # logits, for which chunks would cost more time than their memory is worth
# A chunk's gradient of the weight is a sum over its rows. In float16 it is made smaller by this factor, so that it only
# overflows where the sum is beyond 2^20.
_SHRINK = 1 / 16


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    r"""Computes the cross-entropy of a linear layer's outputs, which are never in memory all at once.

    .. math:: \text{loss} = \operatorname{cross\_entropy}(x\, \text{weight}^T + \text{bias},\ \text{labels})

    with the settings of :func:`msops.cross_entropy`. The rows of x are taken in chunks: each chunk's logits come from
    one matmul of MindSpore, and give the chunk's losses and gradients, before the next chunk's logits are computed.

    The inputs x, `weight` and `bias` have gradients of first order. They are computed together with the loss: in
    PyNative mode if they are wanted, in graph mode always. With ``"none"`` , the loss takes one matmul, and the
    gradients compute the logits again.

    In float16, the gradients of the logits are rounded before they are scaled by the gradient of the loss, so that a
    mean over many rows loses no digits, and the weight's gradients of the chunks are added up in float16.

    Args:
        x (Tensor): Shape (N, C); float16, float32 or float64. All inputs except `labels` have the same dtype.
        weight (Tensor): Shape (V, C).
        labels (Tensor): Shape (N,), int32 or int64, as in :func:`msops.cross_entropy`.
        bias (Tensor): Shape (V,). Default: ``None`` , no bias.
        ignore_index (int): The label of rows that do not count. Default: ``-100`` .
        reduction (str): ``"none"`` , ``"sum"`` or ``"mean"`` . Default: ``"mean"`` .
        label_smoothing (float): From 0 to 1. Default: ``0.0`` .
        z_loss (float): At least 0. Default: ``0.0`` .
        softcap (float): At least 0, where 0 means none. Default: ``0.0`` .
        chunk (int): The number of rows of a chunk, at least 1. Default: ``None`` , an eighth of the rows or, if
            there are at most 2^20 logits, all rows.

    Returns:
        Tensor of shape (N,) for ``"none"`` , else (); float32, or float64 for float64 inputs.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, the dtypes differ, or a setting has a wrong type.
        ValueError: If an input has another shape, or a setting is out of range.

    Source:
        Hsu et al., "Liger Kernel: efficient Triton kernels for LLM training", 2024, computes gradients by chunks
        together with the loss.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> x, weight, labels = ops.ones((4, 8)), ops.zeros((10, 8)), ops.zeros(4, mindspore.int32)
        >>> print(msops.linear_cross_entropy(x, weight, labels))
        2.3025851
    """
    _check(describe(x), describe(weight), describe(labels), None if bias is None else describe(bias))
    # The name is written out, since for level O1 MindSpore copies this function without _NAME.
    losses = _make_losses("linear_cross_entropy", ignore_index, reduction, label_smoothing, z_loss, softcap, chunk)
    if has_zero(x.shape[0], x.shape[1], weight.shape[0]):
        logits = ops.zeros((x.shape[0], weight.shape[0]), x.dtype)
        if bias is not None:
            logits = add(logits, bias)
        return cross_entropy(logits, labels, None, ignore_index, reduction, label_smoothing, z_loss, softcap)
    if bias is None:
        bias = _constant(0.0, (), x.dtype)  # stands for no bias
    if not compiling() and not records_gradients():
        return losses.without_gradients(x, weight, labels, bias)
    out = losses(x, weight, labels, bias)
    if reduction == "none":
        return out
    return out[0]


class LinearCrossEntropyLoss(nn.Cell):
    r"""A linear layer and the cross-entropy of its outputs. See :func:`msops.linear_cross_entropy`.

    Args:
        hidden_size (int): C, the length of the last axis of x.
        vocab_size (int): V, the number of classes.
        has_bias (bool): Whether there is a bias. Default: ``False`` .
        ignore_index (int): As in the function. Default: ``-100`` .
        reduction (str): As in the function. Default: ``"mean"`` .
        label_smoothing (float): As in the function. Default: ``0.0`` .
        z_loss (float): As in the function. Default: ``0.0`` .
        softcap (float): As in the function. Default: ``0.0`` .
        chunk (int): As in the function. Default: ``None`` .
        weight_init (Tensor, str, Initializer, number): The initial weight. Default: ``None`` , ``HeUniform(sqrt(5))``
            as in ``nn.Dense`` .
        bias_init (Tensor, str, Initializer, number): The initial bias. Default: ``None`` , uniform in
            :math:`\pm 1 / \sqrt{C}` as in ``nn.Dense`` .
        dtype (mindspore.dtype): The parameters' dtype; they are cast to that of x. Default: ``mindspore.float32`` .

    Attributes:
        weight (Parameter): Shape (V, C).
        bias (Parameter): Shape (V,), or None.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> net = msops.LinearCrossEntropyLoss(8, 100, weight_init="zeros")
        >>> print(net(ops.ones((4, 8)), ops.zeros(4, mindspore.int32)))
        4.6051702
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        has_bias: bool = False,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float = 0.0,
        chunk: int | None = None,
        weight_init: Init | None = None,
        bias_init: Init | None = None,
        dtype: mindspore.Type = mindspore.float32,
    ) -> None:
        name = "LinearCrossEntropyLoss"
        super().__init__()
        self.hidden_size = arguments.positive(name, "hidden_size", hidden_size)
        self.vocab_size = arguments.positive(name, "vocab_size", vocab_size)
        self.has_bias = arguments.boolean(name, "has_bias", has_bias)
        self.settings = ignore_index, reduction, label_smoothing, z_loss, softcap, chunk
        _make_losses(name, *self.settings)  # checks the settings
        weight_init = HeUniform(math.sqrt(5)) if weight_init is None else weight_init
        shape = (self.vocab_size, self.hidden_size)
        self.weight = arguments.parameter(name, "weight", weight_init, shape, dtype)
        self.bias = None
        if self.has_bias:
            bias_init = Uniform(1 / math.sqrt(self.hidden_size)) if bias_init is None else bias_init
            self.bias = arguments.parameter(name, "bias", bias_init, shape[:1], dtype)

    def construct(self, x: Tensor, labels: Tensor) -> Tensor:
        bias = None
        if self.bias is not None:
            bias = cast_as(self.bias, x)
        return linear_cross_entropy(x, cast_as(self.weight, x), labels, bias, *self.settings)

    construct.__doc__ = linear_cross_entropy.__doc__  # for help()

    def extend_repr(self) -> str:
        return arguments.shown(self, "hidden_size", "vocab_size", "has_bias")


class _Losses(nn.Cell):
    """Computes the losses of rows by chunks, with or without gradients.

    A bias without axes stands for no bias.
    """

    def __init__(self, operator: Operator, ignore_index: int, reduction: str, chunk: int | None) -> None:
        super().__init__()
        self.forward_op = operator.primitive
        self.backward_op = cast("Operator", operator.gradient).primitive
        self.ignore_index, self.is_mean, self.chunk = ignore_index, reduction == "mean", chunk

    def logits(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        logits = _times_transposed(x, weight)
        if bias.shape != ():
            logits = add(logits, bias)
        return logits

    def losses(self, x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor) -> Tensor:
        losses = ()  # type: tuple[Tensor, ...]
        for start, stop in _chunks(x.shape[0], weight.shape[0], self.chunk):
            rows = x[start:stop]
            if start > 0:
                rows = ops.depend(rows, losses[-1])
            losses += (self.forward_op(self.logits(rows, weight, bias), labels[start:stop])[0],)
        return _join(losses)

    # What these two methods hold is freed before the next chunk, also in PyNative mode.
    def gradient_of_logits(
        self, x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor, dlosses: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns a chunk's losses, and the gradient of its logits."""
        logits = self.logits(x, weight, bias)
        losses, stats, totals, _, _ = self.forward_op(logits, labels)
        return losses, self.backward_op(logits, labels, stats, totals, dlosses)

    def gradients_of_chunk(
        self, x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor, dlosses: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns a chunk's losses and its gradients of x, the weight and the bias, of which the last two are
        shrunk."""
        losses, dlogits = self.gradient_of_logits(x, weight, labels, bias, dlosses)
        dx, dbias = _times(dlogits, weight), bias
        factor = _SHRINK if x.dtype == mindspore.float16 else 1.0
        ones = _constant(factor, (x.shape[0], 1), x.dtype)
        if x.dtype == mindspore.float16:  # on a GPU, MindSpore cannot multiply float16 by a number of Python
            x = ops.mul(x, _constant(factor, (1,), x.dtype))
        if bias.shape != ():
            dbias = ops.reshape(transposed_times(dlogits, ones), bias.shape)
        return losses, dx, transposed_times(dlogits, x), dbias

    def losses_and_gradients(
        self, x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor, dlosses: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns the losses and the gradients of x, the weight and the bias, of which the last two are shrunk."""
        losses = ()  # type: tuple[Tensor, ...]
        dx = ()  # type: tuple[Tensor, ...]
        dweight = dbias = bias
        for start, stop in _chunks(x.shape[0], weight.shape[0], self.chunk):
            rows = x[start:stop]
            if start > 0:  # a chunk begins when the one before it has ended, so that its logits are gone
                rows = ops.depend(rows, (losses[-1], dx[-1], dweight, dbias))
            loss, of_rows, of_weight, of_bias = self.gradients_of_chunk(
                rows, weight, labels[start:stop], bias, dlosses[start:stop]
            )
            losses += (loss,)
            dx += (of_rows,)
            dweight = of_weight if start == 0 else add(dweight, of_weight)
            if bias.shape != ():
                dbias = of_bias if start == 0 else add(dbias, of_bias)
        return _join(losses), _join(dx), dweight, dbias

    def scaled(self, dx: Tensor, dweight: Tensor, labels: Tensor, dbias: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
        of_sums = factor
        if dx.dtype == mindspore.float16:
            of_sums = ops.mul(factor, 1 / _SHRINK)
        return scale(dx, factor), scale(dweight, of_sums), _zeros_like(labels), scale(dbias, of_sums)


class _Total(_Losses):
    """Computes the sum or the mean of the losses and, for a gradient of 1, the inputs' gradients.

    The gradients are computed in graph mode even if nobody takes them: a chunk waits for the gradients of the one
    before it, since MindSpore would compute the logits of all chunks first.
    """

    def construct(self, x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        ones = _constant(1.0, (x.shape[0],), _accumulator(x.dtype))
        losses, dx, dweight, dbias = self.losses_and_gradients(x, weight, labels, bias, ones)
        loss, factor = self.total(losses, labels)
        return loss, dx, dweight, dbias, factor

    def without_gradients(self, x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor) -> Tensor:
        return self.total(self.losses(x, weight, labels, bias), labels)[0]

    def total(self, losses: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum or the mean of the losses, and its gradient with respect to each of them."""
        zero, one = _constant(0.0, (), losses.dtype), _constant(1.0, (), losses.dtype)
        total, count = add_backward(losses, zero), one
        if self.is_mean:
            count = ops.maximum(add_backward(ops.cast(labels != self.ignore_index, losses.dtype), zero), one)
        return ops.div(total, count), ops.div(one, count)

    def bprop(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor,
        out: tuple[Tensor, ...],
        dout: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        return self.scaled(out[1], out[2], labels, out[3], dout[0] * out[4])


class _Each(_Losses):
    """Computes the loss of each row. Their gradients come too late to be computed together with the losses."""

    def construct(self, x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor) -> Tensor:
        return self.losses(x, weight, labels, bias)

    def without_gradients(self, x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor) -> Tensor:
        return self.losses(x, weight, labels, bias)

    def bprop(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor,
        out: Tensor,
        dlosses: Tensor,
    ) -> tuple[Tensor, ...]:
        factor = _constant(1.0, (), dlosses.dtype)
        if x.dtype == mindspore.float16:  # gradients of logits with the digits of numbers near 1
            most = ops.ReduceMax()(ops.abs(dlosses))
            factor = ops.select(most == 0, factor, most)
        _, dx, dweight, dbias = self.losses_and_gradients(x, weight, labels, bias, dlosses / factor)
        return self.scaled(dx, dweight, labels, dbias, factor)


@ops.constexpr
def _make_losses(
    name: str,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    chunk: int | None,
) -> _Losses:
    if chunk is not None:
        chunk = arguments.positive(name, "chunk", chunk)
    make_forward(name, ignore_index, reduction, label_smoothing, z_loss, softcap)  # checks the settings
    return _cached_losses(int(ignore_index), reduction, label_smoothing, z_loss, softcap, chunk)


@functools.lru_cache(256)
def _cached_losses(
    ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float, chunk: int | None
) -> _Losses:
    operator = make_forward(_NAME, ignore_index, "none", label_smoothing, z_loss, softcap).without("weight")
    kind = _Each if reduction == "none" else _Total
    return kind(operator, ignore_index, reduction, chunk)


@open_once
def _check(*inputs: Description | None) -> None:
    specs = [spec_of(each) for each in inputs if each is not None]
    check_inputs(_SIGNATURE if len(specs) == 4 else _SIGNATURE.without(["bias"]), _NAME, specs)
    x = specs[0]
    if isinstance(x, Spec) and x.shape[0] is None:
        raise ValueError(f"{_NAME}: x must have a number of rows known at compile time, since it is cut into chunks")


@ops.constexpr
def _chunks(rows: int, classes: int, chunk: int | None) -> tuple[tuple[int, int], ...]:
    """Returns where chunks begin and end."""
    length = chunk
    if length is None:
        length = rows if rows * classes <= _FEW else -(-rows // _CHUNKS)
    return tuple((start, min(rows, start + length)) for start in range(0, rows, length))


@ops.constexpr
def _constant(value: float, shape: tuple[int, ...], dtype: mindspore.Type) -> Tensor:
    return Tensor(np.full(shape, value, dtype_name(dtype)))


@ops.constexpr
def _accumulator(dtype: mindspore.Type) -> mindspore.Type:
    return accumulator(dtype)


def _join(parts: tuple[Tensor, ...]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return ops.concat(parts)


_zeros_like = ops.ZerosLike()  # MindSpore cannot compile ops.zeros_like in the gradient of a Cell
_times, _times_transposed, transposed_times = ops.MatMul(), ops.MatMul(transpose_b=True), ops.MatMul(transpose_a=True)
scale = custom_op(of_package(_NAME).LinearCrossEntropyScale, "x(*S), factor(dtype=accumulator) -> y(*S)", name=_NAME)
