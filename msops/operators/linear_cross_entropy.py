from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn, ops

from msops.core import settings
from msops.core.compiled import compiling, is_on_gpu, once, records_gradients
from msops.core.inputs import cast_as, check_inputs, describe, has_zero, spec_of
from msops.core.signature import Signature
from msops.core.spec import Spec
from msops.operators.add import forward as add
from msops.operators.cross_entropy import cross_entropy
from msops.shared.cross_entropy import check_weights
from msops.shared.losses_by_chunks import make_losses

if TYPE_CHECKING:
    from msops.core.inputs import Description
    from msops.core.settings import Init

_NAME = "linear_cross_entropy"
_SIGNATURE = Signature(
    "x(N, C), weight(V, C), labels(N, dtype=index), bias(V)?, class_weight(V, dtype=common|float32)? -> loss(N)"
)


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
    class_weight: Tensor | None = None,
) -> Tensor:
    r"""Computes the cross-entropy of a linear layer's outputs, which are never in memory all at once.

    .. math::
        \text{loss} = \operatorname{cross\_entropy}(x\, \text{weight}^T + \text{bias},\ \text{labels},\
        \text{class\_weight})

    with the settings of :func:`msops.cross_entropy`. The rows of x are taken in chunks: each chunk's logits come from
    one product of matrices, and give the chunk's losses and gradients, before the next chunk's logits are computed.

    On a GPU, one operator computes the loss and the gradients, with products by cuBLAS, which do not round float32 to
    TF32. With a bias, with `class_weight` , for ``"none"`` , and on the CPU, MindSpore's operators compute the chunks;
    then all rows are one chunk where their number is open at compile time.

    The inputs x, `weight` and `bias` have gradients of first order. They are computed together with the loss: in
    PyNative mode if they are wanted, in graph mode always. With ``"none"`` , the loss takes one matmul, and the
    gradients compute the logits again.

    In float16, the gradients of the logits are rounded before they are scaled by the gradient of the loss, so that a
    mean over many rows loses no digits, and the weight's gradients of the chunks are added up in float16.

    Args:
        x (Tensor): Shape (N, C); float16, float32 or float64. So are `weight` and `bias`.
        weight (Tensor): Shape (V, C).
        labels (Tensor): Shape (N,), int32 or int64, as in :func:`msops.cross_entropy`.
        bias (Tensor): Shape (V,). Default: ``None`` , no bias.
        ignore_index (int): The label of rows that do not count. Default: ``-100`` .
        reduction (str): ``"none"`` , ``"sum"`` or ``"mean"`` . Default: ``"mean"`` .
        label_smoothing (float): From 0 to 1. Default: ``0.0`` .
        z_loss (float): At least 0. Default: ``0.0`` .
        softcap (float): At least 0, where 0 means none. Default: ``0.0`` .
        chunk (int): The number of rows of a chunk, at least 1. Default: ``None`` , all rows if
            there are at most 2^20 logits, else an eighth of them, but at least 512, or about 1024 in the one operator
            for GPUs.
        class_weight (Tensor): Weights of the classes, shape (V,), with the dtype of x or float32, and without a
            gradient. Default: ``None`` , all are 1.

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
    others = None if bias is None else describe(bias), None if class_weight is None else describe(class_weight)
    _check(chunk, describe(x), describe(weight), describe(labels), *others)
    is_one = bias is None and class_weight is None and reduction != "none" and is_on_gpu()
    of_settings = ignore_index, reduction, label_smoothing, z_loss, softcap
    losses = make_losses(of_settings, chunk, class_weight is not None, is_one)
    if has_zero(x.shape[0], x.shape[1], weight.shape[0]):
        logits = ops.zeros((x.shape[0], weight.shape[0]), x.dtype)
        if bias is not None:
            logits = add(logits, bias)
        return cross_entropy(logits, labels, class_weight, *of_settings)
    # In PyNative mode `stop_gradient` also casts to float16 in a Cell with `to_float`, as other operators do. Without
    # it MindSpore would keep what is computed from labels. Under vmap, which compiles, no operator takes what it makes
    # of labels that are not mapped.
    of_labels = labels if compiling() else ops.stop_gradient(labels)
    of_bias = None if bias is None else ops.stop_gradient(bias)
    of_classes = None
    if class_weight is not None:
        dtype = mindspore.float64 if x.dtype == mindspore.float64 else mindspore.float32
        of_classes = ops.cast(ops.stop_gradient(class_weight), dtype)
    constants = ops.stop_gradient(x), ops.stop_gradient(weight), of_labels, of_bias, of_classes
    return losses((x, weight, labels, bias, of_classes), constants, compiling() or records_gradients())


class LinearCrossEntropyLoss(nn.Cell):
    r"""A linear layer and the cross-entropy of its outputs. See :func:`msops.linear_cross_entropy`.

    Args:
        hidden_size (int): C, the length of the last axis of x.
        vocab_size (int): V, the number of classes.
        has_bias (bool): Whether there is a bias. Default: ``False`` .
        ignore_index, reduction, label_smoothing, z_loss, softcap, chunk: As in the function, with its defaults.
        weight_init (Tensor, str, Initializer, number): The initial weight. Default: ``None`` , ``HeUniform(sqrt(5))``
            as in ``nn.Dense`` .
        bias_init (Tensor, str, Initializer, number): The initial bias. Default: ``None`` , uniform in
            :math:`\pm 1 / \sqrt{C}` as in ``nn.Dense`` .
        dtype (mindspore.dtype): The parameters' dtype; they are cast to that of x. Default: ``mindspore.float32`` .
        class_weight (Tensor): As in the function; if it is not float32, it is cast to the dtype of x. Default:
            ``None`` .

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
        class_weight: Tensor | None = None,
    ) -> None:
        name = "LinearCrossEntropyLoss"
        super().__init__()
        check_weights(name, "class_weight", class_weight)
        self.class_weight = class_weight
        self.hidden_size = settings.positive(name, "hidden_size", hidden_size)
        self.vocab_size = settings.positive(name, "vocab_size", vocab_size)
        self.has_bias = settings.boolean(name, "has_bias", has_bias)
        of_settings = ignore_index, reduction, label_smoothing, z_loss, softcap
        make_losses(of_settings, chunk, class_weight is not None, False)  # checks the settings
        self.settings = *of_settings, chunk
        shape = (self.vocab_size, self.hidden_size)
        self.weight, self.bias = settings.weight_and_bias(name, shape, has_bias, weight_init, bias_init, dtype)

    def construct(self, x: Tensor, labels: Tensor) -> Tensor:
        bias, class_weight = None, self.class_weight
        if self.bias is not None:
            bias = cast_as(self.bias, x)
        if class_weight is not None and class_weight.dtype != mindspore.float32:
            class_weight = cast_as(class_weight, x)
        return linear_cross_entropy(x, cast_as(self.weight, x), labels, bias, *self.settings, class_weight)

    construct.__doc__ = linear_cross_entropy.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "hidden_size", "vocab_size", "has_bias")


@once
def _check(chunk: int | None, *inputs: Description | None) -> None:
    specs = [spec_of(each) for each in inputs if each is not None]
    absent = [name for name, each in zip(_SIGNATURE.optional, inputs[3:]) if each is None]
    check_inputs(_SIGNATURE.without(absent), _NAME, specs)
    x = specs[0]
    if chunk is not None and isinstance(x, Spec) and None in x.shape[:1]:
        raise ValueError(f"{_NAME}: chunk must be None where the number of rows is not known at compile time")
