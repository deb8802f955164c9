"""Computes the losses of a linear layer's outputs by chunks of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import mindspore
from mindspore import Tensor, nn, ops

from msops.core import settings
from msops.core.compiled import compiling, constant, keep_dtypes, once, raise_errors
from msops.core.inputs import cast_as, unless_zero
from msops.operators.add import backward as add_backward, forward as add
from msops.shared.cross_entropy import attributes_of, operators
from msops.shared.linear_cross_entropy import NAME, SHRINK, make_result, operators_of_all, scale

if TYPE_CHECKING:
    from msops.core.operator import Operator
    from msops.shared.cross_entropy import LossSettings

    Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # x, weight, labels, bias, class_weight

# Without `chunk`, MindSpore's operators take this many chunks; with more, adding up the gradients of the weight takes
# longer. For a few logits, chunks would cost more time than their memory is worth. A product of fewer rows than _ROWS
# takes longer for each of its rows.
_CHUNKS, _FEW, _ROWS = 8, 2**20, 512
_times, _times_transposed, transposed_times = ops.MatMul(), ops.MatMul(transpose_b=True), ops.MatMul(transpose_a=True)


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
            x = ops.mul(x, constant(SHRINK, x.dtype, (1,)))
            ones = ops.mul(ones, constant(SHRINK, dlogits.dtype, (1,)))
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
        of_sums = ops.mul(factor, 1 / SHRINK)
    if bias is not None and dbias is not None:
        result = scale(cast_as(dbias, bias), of_sums)
    return scale(cast_as(dx, x), factor), scale(cast_as(dweight, weight), of_sums), result


def _slice(x: Tensor, start: int, stop: int | None) -> Tensor:
    """Returns rows of x; x itself where `stop` is None, since all rows may be a number that is not known."""
    if stop is None:
        return x
    return ops.slice(x, (start, 0)[: x.ndim], (stop - start, *x.shape[1:]))


@once
def _last_class(classes: int | None) -> int:
    return 2**31 - 1 if classes is None else classes - 1


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


@once
def make_losses(of_settings: LossSettings, chunk: int | None, is_weighted: bool, is_one: bool) -> _Losses:
    """Returns the Cell for these settings, for weighted classes or not, as MindSpore's operators or one operator."""
    ignore_index, reduction, label_smoothing, z_loss, softcap = of_settings
    chunk = None if chunk is None else settings.positive(NAME, "chunk", chunk)
    attributes_of(NAME, *of_settings)  # checks the settings
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
        return _TotalInOne(operators_of_all(*of_settings, chunk), *arguments)
    return _Total(*arguments)
