from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import mindspore
from mindspore import Tensor, nn, ops

from msops.core import settings
from msops.core.compiled import compiling, constant, is_on_gpu, keep_dtypes, once, raise_errors, records_gradients
from msops.core.factory import Operators, custom_op
from msops.core.inputs import cast_as, check_inputs, describe, has_zero, spec_of, unless_zero
from msops.core.library import of_package
from msops.core.signature import Signature
from msops.core.spec import Spec
from msops.operators.add import backward as add_backward, forward as add
from msops.operators.cross_entropy import as_accumulator, attributes_of, cross_entropy, operators

if TYPE_CHECKING:
    from msops.core.definition import Gradient
    from msops.core.inputs import Description
    from msops.core.operator import Operator
    from msops.core.settings import Init

    Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # x, weight, labels, bias, class_weight

_NAME = "linear_cross_entropy"
_SIGNATURE = Signature(
    "x(N, C), weight(V, C), labels(N, dtype=index), bias(V)?, class_weight(V, dtype=common|float32)? -> loss(N)"
)
# Without `chunk`, MindSpore's operators take this many chunks; with more, adding up the gradients of the weight takes
# longer. For a few logits, chunks would cost more time than their memory is worth. A product of fewer rows than _ROWS
# takes longer for each of its rows.
_CHUNKS, _FEW, _ROWS = 8, 2**20, 512
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
    losses = make_losses(
        ignore_index, reduction, label_smoothing, z_loss, softcap, chunk, class_weight is not None, is_one
    )
    if has_zero(x.shape[0], x.shape[1], weight.shape[0]):
        logits = ops.zeros((x.shape[0], weight.shape[0]), x.dtype)
        if bias is not None:
            logits = add(logits, bias)
        return cross_entropy(logits, labels, class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap)
    # In PyNative mode `stop_gradient` also casts to float16 in a Cell with `to_float`, as other operators do. Without
    # it MindSpore would keep what is computed from labels. Under vmap, which compiles, no operator takes what it makes
    # of labels that are not mapped.
    of_labels = labels if compiling() else ops.stop_gradient(labels)
    of_bias = None if bias is None else ops.stop_gradient(bias)
    of_classes = None if class_weight is None else ops.stop_gradient(as_accumulator(class_weight, x))
    constants = ops.stop_gradient(x), ops.stop_gradient(weight), of_labels, of_bias, of_classes
    return losses((x, weight, labels, bias, of_classes), constants, compiling() or records_gradients())


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
        if class_weight is not None and not isinstance(class_weight, Tensor):
            raise TypeError(f"{name}: class_weight must be a Tensor, got {type(class_weight).__name__}")
        self.class_weight = class_weight
        self.hidden_size = settings.positive(name, "hidden_size", hidden_size)
        self.vocab_size = settings.positive(name, "vocab_size", vocab_size)
        self.has_bias = settings.boolean(name, "has_bias", has_bias)
        self.settings = ignore_index, reduction, label_smoothing, z_loss, softcap, chunk
        make_losses(*self.settings, class_weight is not None, False)  # checks the settings
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


class _Losses(nn.Cell):
    """Computes the losses of rows by chunks.

    MindSpore differentiates nothing of a chunk, which is computed from constants, so that it also keeps nothing. The
    last operator takes the inputs themselves, and its gradient is a method of this Cell.
    """

    def __init__(
        self, forward: Operator, backward: Operator, ignore_index: int, reduction: str, z_loss: float, chunk: int | None
    ) -> None:
        """Takes the operators of a row's loss and of its gradient. The first leaves out the z-loss if that is given
        here, too: a weighted mean has it by itself."""
        super().__init__()
        keep_dtypes(self)
        self.forward_op = forward.primitive
        self.backward_op = cast("Operator", backward.gradient).primitive
        self.result_op = make_result(ignore_index, self.gradient)
        self.ignore_index, self.is_mean, self.chunk = ignore_index, reduction == "mean", chunk
        self.z_loss = float(z_loss)

    def logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the logits of rows. Their dtype is float16 where amp's level "auto" casts the matmul's inputs."""
        logits = _times_transposed(x, weight)
        if bias is not None:
            logits = add(logits, cast_as(bias, logits))
        return logits

    def losses_of_logits(
        self, logits: Tensor, labels: Tensor, class_weight: Tensor | None, ratio: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a chunk's losses, stats and totals. `ratio` is what `counts` returns."""
        if class_weight is None:
            losses, stats, totals, _, _ = self.forward_op(logits, labels)
            return losses, stats, totals
        losses, lse, stats, totals, _, _ = self.forward_op(logits, labels, class_weight)
        if ratio is not None:
            losses = add(losses, ops.mul(ops.mul(lse, lse), ops.mul(ratio, constant(self.z_loss, losses.dtype))))
        return losses, stats, totals

    def counts(self, labels: Tensor, class_weight: Tensor | None, of: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns what a mean divides the sum of losses by, in the dtype of sums. The z-losses of a weighted mean are
        multiplied by the second result first, since they are divided by the number of rows."""
        dtype = mindspore.float64 if of.dtype == mindspore.float64 else mindspore.float32
        zero, one = constant(0.0, dtype), constant(1.0, dtype)
        counts = ops.cast(ops.not_equal(labels, self.ignore_index), dtype)
        rows = ops.maximum(add_backward(counts, zero), one)
        if class_weight is None:
            return rows, None
        classes = ops.minimum(ops.maximum(labels, 0), _last_class(class_weight.shape[0]))
        total = add_backward(ops.mul(ops.gather(class_weight, classes, 0), counts), zero)
        ratio = None
        if self.z_loss > 0:
            ratio = ops.div(total, rows)
        return ops.select(add_backward(counts, zero) == 0, one, total), ratio

    def losses(self, constants: Inputs, ratio: Tensor | None) -> Tensor:
        x, weight, labels, bias, class_weight = constants
        losses = ()  # type: tuple[Tensor, ...]
        for start, stop in _chunks(x.shape[0], weight.shape[0], self.chunk):
            rows = _slice(x, start, stop)
            if start > 0:
                rows = ops.depend(rows, losses[-1])
            logits = self.logits(rows, weight, bias)
            losses += (self.losses_of_logits(logits, _slice(labels, start, stop), class_weight, ratio)[0],)
        return _join(losses)

    # What these two methods hold is freed before the next chunk, also in PyNative mode.
    def gradient_of_logits(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None,
        class_weight: Tensor | None,
        ratio: Tensor | None,
        dlosses: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns a chunk's losses, and the gradient of its logits."""
        logits = self.logits(x, weight, bias)
        losses, stats, totals = self.losses_of_logits(logits, labels, class_weight, ratio)
        if dlosses is None:
            dlosses = ops.ones_like(losses)
        if class_weight is None:
            return losses, self.backward_op(logits, labels, stats, totals, dlosses)
        if ratio is not None:  # the second of the totals divides the gradients of z-losses
            one = constant(1.0, totals.dtype, (1,))
            totals = ops.div(totals, ops.concat((one, ops.reshape(ratio, (1,)), one)))
        no_dlse = ops.zeros_like(losses)
        return losses, self.backward_op(logits, labels, class_weight, stats, totals, dlosses, no_dlse)

    def gradients_of_chunk(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None,
        class_weight: Tensor | None,
        ratio: Tensor | None,
        dlosses: Tensor | None,
    ) -> tuple[Any, ...]:
        """Returns a chunk's losses and its gradients of x, the weight and the bias, of which the last two are
        shrunk if they are float16."""
        losses, dlogits = self.gradient_of_logits(x, weight, labels, bias, class_weight, ratio, dlosses)
        dx, dbias = _times(dlogits, weight), None
        ones = ops.reshape(ops.cast(ops.ones_like(losses), dlogits.dtype), (-1, 1))
        if dlogits.dtype == mindspore.float16:  # on a GPU, MindSpore cannot multiply float16 by a number of Python
            x = ops.mul(x, constant(_SHRINK, x.dtype, (1,)))
            ones = ops.mul(ones, constant(_SHRINK, dlogits.dtype, (1,)))
        if bias is not None:
            dbias = unless_zero(transposed_times(dlogits, ones), x.shape[0])
            dbias = ops.reshape(dbias, bias.shape)
        return losses, dx, unless_zero(transposed_times(dlogits, x), x.shape[0]), dbias

    def losses_and_gradients(self, constants: Inputs, ratio: Tensor | None, dlosses: Tensor | None) -> tuple[Any, ...]:
        """Returns the losses and the gradients of x, the weight and the bias, as `gradients_of_chunk` does. The losses
        have the gradients `dlosses`, or 1."""
        x, weight, labels, bias, class_weight = constants
        losses = ()  # type: tuple[Tensor, ...]
        dx = ()  # type: tuple[Tensor, ...]
        dweight = dbias = None
        for start, stop in _chunks(x.shape[0], weight.shape[0], self.chunk):
            rows, of_losses = _slice(x, start, stop), None
            if start > 0:  # a chunk begins when the one before it has ended, so that its logits are gone
                rows = ops.depend(rows, (losses[-1], dx[-1], dweight))
            if dlosses is not None:
                of_losses = _slice(dlosses, start, stop)
            loss, of_rows, of_weight, of_bias = self.gradients_of_chunk(
                rows, weight, _slice(labels, start, stop), bias, class_weight, ratio, of_losses
            )
            losses += (loss,)
            dx += (of_rows,)
            dweight = of_weight if start == 0 else add(dweight, of_weight)
            if bias is not None:
                dbias = of_bias if start == 0 else add(dbias, of_bias)
        return _join(losses), _join(dx), dweight, dbias


class _Total(_Losses):
    """Computes the sum or the mean of the losses and, for a gradient of 1, the inputs' gradients.

    The gradients are computed in graph mode even if nobody takes them: a chunk waits for the gradients of the one
    before it, since MindSpore would compute the logits of all chunks first.
    """

    def construct(self, inputs: Inputs, constants: Inputs, wants_gradients: bool) -> Tensor:
        count, ratio = None, None
        if self.is_mean:
            count, ratio = self.counts(constants[2], constants[4], constants[0])
        if not wants_gradients:
            loss, _ = self.total(self.losses(constants, ratio), count)
            return _checked(self.result_op(*inputs, _computed(loss)))
        losses, dx, dweight, dbias = self.losses_and_gradients(constants, ratio, None)
        loss, factor = self.total(losses, count)
        gradients = _computed(dx), _computed(dweight), _computed(dbias), _computed(factor)
        return _checked(self.result_op(*inputs, _computed(loss), *gradients))

    def total(self, losses: Tensor, count: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the sum or the mean of the losses, and its gradient with respect to each of them."""
        zero, one = constant(0.0, losses.dtype), constant(1.0, losses.dtype)
        total = add_backward(losses, zero)
        if count is None:
            return total, one
        return ops.div(total, count), ops.div(one, count)

    def gradient(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None,
        class_weight: Tensor | None,
        loss: Tensor,
        dx: Tensor,
        dweight: Tensor,
        dbias: Tensor | None,
        factor: Tensor,
        result: Tensor,
        dresult: Tensor,
    ) -> tuple[Tensor | None, ...]:
        factor = ops.mul(factor, ops.depend(dresult, result))  # the result tells wrong labels
        gradients = _scaled(x, weight, bias, dx, dweight, dbias, factor)
        # The other gradients are not used, because these inputs were computed from constants.
        unused = class_weight, loss, dx, dweight, dbias, factor
        return gradients[0], gradients[1], ops.zeros_like(labels), gradients[2], *unused


class _TotalInOne(_Total):
    """Computes the loss and its gradients in one operator, which goes over the chunks by itself."""

    def __init__(self, operator: Operator, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gradients_op, self.loss_op = operator.primitive, operator.without("dx", "dweight").primitive

    def construct(self, inputs: Inputs, constants: Inputs, wants_gradients: bool) -> Tensor:
        x, weight, labels, _, _ = constants
        if x.dtype == mindspore.float32:
            one = constant(1.0, x.dtype, (1, 1))
            product = _times(one, one)  # it is float16 where amp's level "auto" casts a matmul's inputs
            x, weight = cast_as(x, product), cast_as(weight, product)
        if not wants_gradients:
            return _checked(self.result_op(*inputs, _computed(self.loss_op(x, weight, labels)[0])))
        results = self.gradients_op(x, weight, labels)
        loss, factor, dx, dweight = results[0], results[1], results[2], results[3]
        gradients = _computed(dx), _computed(dweight), None, _computed(factor)
        return _checked(self.result_op(*inputs, _computed(loss), *gradients))


class _Each(_Losses):
    """Computes the loss of each row. Their gradients come too late to be computed together with the losses."""

    def construct(self, inputs: Inputs, constants: Inputs, wants_gradients: bool) -> Tensor:
        return _checked(self.result_op(*inputs, _computed(self.losses(constants, None))))

    def gradient(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None,
        class_weight: Tensor | None,
        losses: Tensor,
        dx: None,
        dweight: None,
        dbias: None,
        factor: None,
        result: Tensor,
        dlosses: Tensor,
    ) -> tuple[Tensor | None, ...]:
        dlosses = ops.depend(dlosses, result)  # the result tells wrong labels
        # The gradients of logits then have the digits of numbers near 1 in float16, too.
        one, most = constant(1.0, dlosses.dtype), ops.ReduceMax()(ops.abs(dlosses))
        most = ops.select(most == 0, one, most)
        constants = x, weight, labels, bias, class_weight
        _, of_x, of_weight, of_bias = self.losses_and_gradients(constants, None, dlosses / most)
        gradients = _scaled(x, weight, bias, of_x, of_weight, of_bias, most)
        unused = class_weight, losses, None, None, None, None
        return gradients[0], gradients[1], ops.zeros_like(labels), gradients[2], *unused


def _checked(result: Tensor) -> Tensor:
    """Returns the result if no label is out of range, on the CPU, before MindSpore gets to what follows."""
    if not compiling():
        raise_errors()
    return result


def _computed(x: Tensor | None) -> Tensor | None:
    """Returns what was computed from constants and labels, of which graph mode then differentiates nothing."""
    return ops.stop_gradient(x) if compiling() and x is not None else x


def _scaled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor | None,
    factor: Tensor,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of x, the weight and the bias in their dtypes, times a factor, and no longer shrunk."""
    of_sums, result = factor, None
    if dweight.dtype == mindspore.float16:
        of_sums = ops.mul(factor, 1 / _SHRINK)
    if bias is not None and dbias is not None:
        result = scale(cast_as(dbias, bias), of_sums)
    return scale(cast_as(dx, x), factor), scale(cast_as(dweight, weight), of_sums), result


def _slice(x: Tensor, start: int, stop: int | None) -> Tensor:
    """Returns rows of x; x itself where `stop` is None, since all rows may be a number that is not known."""
    if stop is None:
        return x
    return ops.slice(x, (start, 0)[: x.ndim], (stop - start, *x.shape[1:]))


@once
def make_losses(
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    chunk: int | None,
    is_weighted: bool,
    is_one: bool,
) -> _Losses:
    chunk = None if chunk is None else settings.positive(_NAME, "chunk", chunk)
    attributes_of(_NAME, ignore_index, reduction, label_smoothing, z_loss, softcap)  # checks the settings
    apart = z_loss if is_weighted and reduction == "mean" else 0.0
    forward, backward = (
        operators(ignore_index, "none", label_smoothing, z, softcap, is_constant=True, is_general=is_weighted)
        for z in (z_loss - apart, z_loss)
    )
    if not is_weighted:
        forward = backward = backward.without("weight")
    arguments = forward, backward, int(ignore_index), reduction, apart, chunk
    if reduction == "none":
        return _Each(*arguments)
    if is_one:
        return _TotalInOne(
            operators_of_all(ignore_index, reduction, label_smoothing, z_loss, softcap, chunk), *arguments
        )
    return _Total(*arguments)


@Operators
def operators_of_all(
    ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float, chunk: int | None
) -> Operator:
    """Returns the operator that computes the loss, and the gradients of x and the weight. The loss is the sum of the
    rows' losses times the factor, which these gradients lack."""
    return custom_op(
        of_package(_NAME).LinearCrossEntropyForward,
        "x(N, C), weight(V, C), labels(N, dtype=index) -> loss(dtype=accumulator), factor(dtype=accumulator), "
        "dx(N, C)?, dweight(V, C)?; logits(..., dtype=common), losses, stats, totals, partial",
        name=_NAME,
        form=0,
        checks_labels=False,
        chunk=chunk or 0,
        shrink=_SHRINK,
        **attributes_of(_NAME, ignore_index, reduction, label_smoothing, z_loss, softcap),
    )


def make_result(ignore_index: int, gradient: Gradient) -> Operator:
    """Returns the operator that returns the loss, which has a gradient with respect to the first inputs.

    On the CPU it checks the labels. If an operator before it failed, the process might end: MindSpore gives the outputs
    of an operator that failed no memory, and runs the matmuls that are in its queue nevertheless.
    """
    return custom_op(
        of_package(_NAME).LinearCrossEntropyResult,
        "x(N, C), weight(V, C), labels(N, dtype=index), bias(V)?, class_weight(V, dtype=accumulator)?, "
        "loss(*S, dtype=accumulator), dx(N, C, dtype=float16|common)?, dweight(V, C, dtype=float16|common)?, "
        "dbias(V, dtype=float16|common)?, factor(dtype=accumulator)? -> result(*S, dtype=accumulator)",
        gradient=gradient,
        name=_NAME,
        ignore_index=ignore_index,
    )


@once
def _last_class(classes: int | None) -> int:
    return 2**31 - 1 if classes is None else classes - 1


@once
def _check(chunk: int | None, *inputs: Description | None) -> None:
    specs = [spec_of(each) for each in inputs if each is not None]
    absent = [name for name, each in zip(_SIGNATURE.optional, inputs[3:]) if each is None]
    check_inputs(_SIGNATURE.without(absent), _NAME, specs)
    x = specs[0]
    if chunk is not None and isinstance(x, Spec) and None in x.shape[:1]:
        raise ValueError(f"{_NAME}: chunk must be None where the number of rows is not known at compile time")


@once
def _chunks(rows: int | None, classes: int | None, chunk: int | None) -> tuple[tuple[int, int | None], ...]:
    """Returns where chunks begin and end, which is None for all rows."""
    length = chunk
    if length is None and rows is not None and classes is not None and rows * classes > _FEW:
        length = max(-(-rows // _CHUNKS), _ROWS)
    if length is None or rows is None or rows <= length:
        return ((0, None),)
    return tuple((start, min(rows, start + length)) for start in range(0, rows, length))


def _join(parts: tuple[Tensor, ...]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return ops.concat(parts)


_times, _times_transposed, transposed_times = ops.MatMul(), ops.MatMul(transpose_b=True), ops.MatMul(transpose_a=True)
scale = custom_op(of_package(_NAME).LinearCrossEntropyScale, "x(*S), factor(dtype=accumulator) -> y(*S)", name=_NAME)
