from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn, ops

from msops.core import settings
from msops.core.compiled import compiling, constant, keep_dtypes, once
from msops.core.factory import Operators, custom_op
from msops.core.inputs import cast_as, check_inputs, describe, spec_of
from msops.core.library import of_package
from msops.core.signature import Signature
from msops.core.spec import FLOATS
from msops.operators.add import backward as add_backward

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from msops.core.inputs import Description
    from msops.core.operator import Operator

_NAME = "cross_entropy"
_LIBRARY = of_package(_NAME)
_OF_AXES = Signature("logits(N, V, *D), labels(N, *D, dtype=index), weight(V, dtype=common|float32)? -> loss(N)")
_OF_PROBABILITIES = Signature("logits(N, V, *D), labels(N, V, *D), weight(V, dtype=common|float32)? -> loss(N)")
_KEPT = "stats(N, 2, dtype=accumulator), totals(3, dtype=accumulator)"  # what the gradient needs
_REDUCTIONS = ("none", "sum", "mean")  # in the order of Reduction in aot_kernels/cross_entropy/loss.h


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Any:
    r"""Computes the cross-entropy of rows of logits and their labels.

    .. math::
        x_{ij} &= s \tanh(\text{logits}_{ij} / s), \text{ or } \text{logits}_{ij} \text{ if } s = 0, \qquad
        \text{lse}_i = \log \sum_j e^{x_{ij}} \\
        \text{loss}_i &= (1 - \varepsilon)\, w_{y_i} (\text{lse}_i - x_{i y_i}) +
        \frac{\varepsilon}{V} \sum_j w_j (\text{lse}_i - x_{ij})

    where y are the `labels`, w the `weight` (1 without it), ε is `label_smoothing` and s is `softcap`. The result is

    - ``"none"`` : :math:`\text{loss}_i + z\, \text{lse}_i^2` of each row,
    - ``"sum"`` : the sum of these,
    - ``"mean"`` : :math:`\sum_i \text{loss}_i / \sum_i w_{y_i} + z\, \text{mean}_i\, \text{lse}_i^2` ,

    with z = `z_loss`, over the rows whose label is not `ignore_index`. The loss and the gradient of other rows are 0,
    and their logits are not read. If there are no rows to average, the loss is 0.

    Labels may also be probabilities :math:`q_{ij}` of the classes, of the shape and dtype of `logits`. Then

    .. math::
        \text{loss}_i = \sum_j \left((1 - \varepsilon)\, q_{ij} + \frac{\varepsilon}{V}\right) w_j
        (\text{lse}_i - x_{ij})

    all rows count, ``"mean"`` divides by their number, and the probabilities have a gradient, too, which is computed
    where it is asked for. In PyNative mode, MindSpore does not always tell that: there ``ops.stop_gradient(labels)``
    saves its time. There are gradients of both orders.

    The logits, and the probabilities, are read once, for the loss, and once more for the gradient. Sums are in float32
    (float64 for float64). Logits of more axes are transposed first, so that their classes are the last axis, and so are
    probabilities: that is another reading and writing.

    Args:
        logits (Tensor): Shape (N, V) or (N, V, d1, ...); float16, float32 or float64.
        labels (Tensor): Shape (N,) or (N, d1, ...), int32 or int64: a class from 0 to V - 1, or `ignore_index`. Another
            label is an error on the CPU; on a GPU, the loss of its row is NaN. Or probabilities, as above.
        weight (Tensor): Weights of the classes, shape (V,), with the dtype of `logits` or float32. Default: ``None`` ,
            all are 1.
        ignore_index (int): The label of rows that do not count; there is none beside probabilities. Default: ``-100`` .
        reduction (str): ``"none"`` , ``"sum"`` or ``"mean"`` . Default: ``"mean"`` .
        label_smoothing (float): ε, from 0 to 1. Default: ``0.0`` .
        z_loss (float): z, at least 0. Default: ``0.0`` .
        softcap (float): s, at least 0, where 0 means none. Default: ``0.0`` .
        return_lse (bool): Whether lse is returned, too, which then also has a gradient. Default: ``False`` .

    Returns:
        Tensor of shape (N,) or (N, d1, ...) for ``"none"`` , else (); float32, or float64 for float64 logits. With
        `return_lse` , a tuple of it and lse, of shape (N,) or (N, d1, ...), which is 0 for rows that do not count.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or a setting has a wrong type.
        ValueError: If an input has another shape, or a setting is out of range.

    Source:
        Szegedy et al., "Rethinking the Inception architecture for computer vision", 2016, has the label smoothing;
        Chowdhery et al., "PaLM: scaling language modeling with pathways", 2022, the z-loss; Gemma Team, "Gemma 2",
        2024, the softcap.

    Examples:
        >>> import mindspore, msops
        >>> logits = mindspore.Tensor([[0.0, 0.0, 0.0], [3.0, 3.0, -100.0]], mindspore.float32)
        >>> print(msops.cross_entropy(logits, mindspore.Tensor([0, 1]), reduction="none"))
        [1.0986123 0.6931472]
        >>> print(msops.cross_entropy(logits, mindspore.Tensor([-100, 1])))
        0.6931472
    """
    of_weight = None if weight is None else describe(weight)
    of_settings = ignore_index, reduction, label_smoothing, z_loss, softcap
    has_probabilities = _are_probabilities(describe(logits), describe(labels), of_weight, of_settings)
    is_general, order, rows = _form(describe(logits), describe(labels), of_weight, return_lse, has_probabilities)
    if has_probabilities:
        compute = of_probabilities.primitive(*of_settings, _gives(labels), weight is not None)
    else:
        compute = operators.primitive(*of_settings, False, is_general, weight is not None)
    of_rows, shape = labels, labels.shape
    if order is not None:
        logits = ops.reshape(ops.transpose(logits, order), rows)
        if has_probabilities:
            of_rows, shape = ops.reshape(ops.transpose(labels, order), rows), shape[:1] + shape[2:]
        else:
            of_rows = ops.reshape(labels, rows[:1])
    if weight is None:
        results = compute(logits, of_rows)
    elif is_general:
        results = compute(logits, of_rows, as_accumulator(weight, logits))
    else:
        results = compute(logits, of_rows, weight)
    loss = results[0]
    if order is not None and reduction == "none":
        loss = ops.reshape(loss, shape)
    if not return_lse:
        return loss
    return loss, results[1] if order is None else ops.reshape(results[1], shape)


class CrossEntropyLoss(nn.Cell):
    """The cross-entropy of rows of logits and their labels. See :func:`msops.cross_entropy`.

    It replaces ``nn.CrossEntropyLoss`` for labels that are classes.

    Args:
        weight (Tensor): As in the function; if it is not float32, it is cast to the dtype of the logits. Default:
            ``None`` .
        ignore_index (int): As in the function. Default: ``-100`` .
        reduction (str): As in the function. Default: ``"mean"`` .
        label_smoothing (float): As in the function. Default: ``0.0`` .
        z_loss (float): As in the function. Default: ``0.0`` .
        softcap (float): As in the function. Default: ``0.0`` .
        return_lse (bool): As in the function. Default: ``False`` .

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> loss = msops.CrossEntropyLoss(label_smoothing=0.1)
        >>> print(loss(ops.zeros((4, 10)), ops.zeros(4, mindspore.int32)))
        2.3025851
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float = 0.0,
        return_lse: bool = False,
    ) -> None:
        name = "CrossEntropyLoss"
        super().__init__()
        if weight is not None and not isinstance(weight, Tensor):
            raise TypeError(f"{name}: weight must be a Tensor, got {type(weight).__name__}")
        attributes_of(_NAME, ignore_index, reduction, label_smoothing, z_loss, softcap)  # checks the settings
        self.weight, self.return_lse = weight, settings.boolean(name, "return_lse", return_lse)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.z_loss, self.softcap = z_loss, softcap

    def construct(self, logits: Tensor, labels: Tensor) -> Any:
        weight = self.weight
        if weight is not None and weight.dtype != mindspore.float32:
            weight = cast_as(weight, logits)
        return cross_entropy(
            logits,
            labels,
            weight,
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
            self.z_loss,
            self.softcap,
            self.return_lse,
        )

    construct.__doc__ = cross_entropy.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "ignore_index", "reduction", "label_smoothing", "z_loss", "softcap", "return_lse")


@once
def _are_probabilities(
    logits: Description,
    labels: Description,
    weight: Description | None,
    of_settings: tuple[int, str, float, float, float],
) -> bool:
    """Tells whether labels are probabilities, and then checks the inputs and the settings."""
    if labels[1] not in FLOATS or labels[0] != logits[0] or len(logits[0] or ()) < 2:
        return False
    attributes_of(_NAME, *of_settings)
    if of_settings[0] != -100:
        raise ValueError(f"{_NAME}: ignore_index must be -100 where labels are probabilities, got {of_settings[0]}")
    specs = [spec_of(each) for each in (logits, labels, weight) if each is not None]
    signature = _OF_PROBABILITIES if weight is not None else _OF_PROBABILITIES.without(["weight"])
    check_inputs(signature, _NAME, specs)
    return True


def _gives(labels: Tensor) -> str:
    """Tells whose gradients the operator for probabilities computes."""
    if compiling():
        return "each"
    return "both" if getattr(labels, "_requires_grad", True) else "logits"


@once
def _form(
    logits: Description, labels: Description, weight: Description | None, return_lse: bool, has_probabilities: bool
) -> tuple[bool, tuple[int, ...] | None, tuple[int, ...]]:
    """Returns whether the operator has the weights in the dtype of sums and, for logits of more than two axes, the
    order of axes that has the classes last, and their shape as a matrix."""
    is_general = settings.boolean(_NAME, "return_lse", return_lse) or has_probabilities
    if weight is not None and weight[1] != logits[1] and weight[1] == mindspore.float32:
        is_general = True
    shape = logits[0]
    if shape is None or len(shape) < 3:
        return is_general, None, ()
    if not has_probabilities:
        specs = [spec_of(each) for each in (logits, labels, weight) if each is not None]
        check_inputs(_OF_AXES if weight is not None else _OF_AXES.without(["weight"]), _NAME, specs)
    others = (shape[0], *shape[2:])
    if shape[1] is None:
        raise ValueError(f"{_NAME}: the number of classes must be known at compile time, got shape {shape}")
    rows = -1 if None in others else math.prod(others)
    return is_general, (0, *range(2, len(shape)), 1), (rows, shape[1])


def as_accumulator(weight: Any, logits: Tensor) -> Any:
    """Casts weights of the dtype of the logits or float32 to the dtype of sums. A later check reports others."""
    if not isinstance(weight, Tensor):
        return weight
    if logits.dtype == mindspore.float64:
        return cast_as(weight, logits) if weight.dtype == mindspore.float32 else weight
    if weight.dtype == mindspore.float16 and logits.dtype == mindspore.float16:
        return ops.cast(weight, mindspore.float32)
    return weight


@Operators
def operators(
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    is_constant: bool = False,
    is_general: bool = False,
) -> Operator:
    """Returns the operator that gives the loss, lse if it `is_general`, and what the gradient needs.

    If it `is_general`, weights have the dtype of sums.

    If `is_constant`, no gradient reaches the logits: nothing uses the gradient of the gradient. A label out of range
    then gives NaN on the CPU, too, as on a GPU.
    """
    attributes = attributes_of(_NAME, ignore_index, reduction, label_smoothing, z_loss, softcap)
    attributes.update(checks_labels=not is_constant, form=int(is_general))
    inputs = f"logits(N, V), labels(N, dtype=index), weight(V{', dtype=accumulator' * is_general})?"
    lse = "lse(N, dtype=accumulator), " * is_general
    loss = f"loss({'N, ' * (reduction == 'none')}dtype=accumulator)"
    backward = custom_op(
        _LIBRARY.CrossEntropyBackward,
        f"{inputs}, {_KEPT}, d{loss}{', dlse(N, dtype=accumulator)' * is_general} -> dlogits(N, V)",
        gives=1,
        gradient=None if not is_constant else _unused_general if is_general else _unused,
        **attributes,
    )
    return custom_op(
        _LIBRARY.CrossEntropyForward,
        f"{inputs} -> {loss}, {lse}{_KEPT}; losses, partial",
        gradient=backward,
        **attributes,
    )


@Operators
def of_probabilities(
    ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float, gives: str
) -> Operator:
    """Returns the operator for labels that are probabilities, which gives the loss, lse, and what the gradient needs.

    The gradient is that of the "logits" or of the "labels" alone, or of "both", in one operator. Or "each" has an
    operator of its own, and graph mode leaves out what nobody asks for.
    """
    attributes = attributes_of(_NAME, ignore_index, reduction, label_smoothing, z_loss, softcap)
    attributes.update(checks_labels=False, form=2)
    inputs, lse = "logits(N, V), labels(N, V), weight(V, dtype=accumulator)?", "lse(N, dtype=accumulator)"
    kept = f"{_KEPT}, masses(N, dtype=accumulator)"
    loss = f"loss({'N, ' * (reduction == 'none')}dtype=accumulator)"
    second = _SecondGradients(label_smoothing, z_loss, softcap)

    def backward(outputs: str, gives: int, gradient: Callable[..., tuple[Tensor | None, ...]]) -> Operator:
        taken = f"{inputs}, {kept}, d{loss}, d{lse}"
        return custom_op(
            _LIBRARY.CrossEntropyBackward, f"{taken} -> {outputs}", gradient=gradient, gives=gives, **attributes
        )

    of_logits = backward("dlogits(N, V)", 1, second.of_logits)
    of_labels = backward("dlabels(N, V)", 2, second.of_labels)

    def gradient_of_each(
        logits: Tensor, labels: Tensor, weight: Tensor | None, outs: tuple[Tensor, ...], douts: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        taken = logits, labels, weight, outs[2], outs[3], outs[4], douts[0], douts[1]
        return of_logits(*taken), of_labels(*taken), None if weight is None else ops.zeros_like(weight)

    gradients: dict[str, Any] = {
        "logits": of_logits,
        "labels": of_labels,
        "both": backward("dlogits(N, V), dlabels(N, V)", 3, second.of_both),
        "each": gradient_of_each,
    }
    return custom_op(
        _LIBRARY.CrossEntropyForward,
        f"{inputs} -> {loss}, {lse}, {kept}; losses, partial",
        gradient=gradients[gives],
        **attributes,
    )


class _SecondGradients(nn.Cell):
    """Computes the gradients of CrossEntropyBackward for probabilities, by MindSpore's operators.

    What stats and masses owe to the logits and the probabilities is in the gradients of these.
    """

    def __init__(self, label_smoothing: float, z_loss: float, softcap: float) -> None:
        super().__init__()
        keep_dtypes(self)
        self.label_smoothing, self.z_loss, self.softcap = label_smoothing, z_loss, softcap
        self.sum = ops.ReduceSum(keep_dims=True)

    def of_logits(
        self,
        logits: Tensor,
        labels: Tensor,
        weight: Tensor | None,
        stats: Tensor,
        totals: Tensor,
        masses: Tensor,
        dloss: Tensor,
        dlse: Tensor,
        dlogits: Tensor,
        ddlogits: Tensor,
    ) -> tuple[Tensor | None, ...]:
        douts = ddlogits, ops.zeros_like(ddlogits)
        return self.of_both(logits, labels, weight, stats, totals, masses, dloss, dlse, dlogits, douts)

    def of_labels(
        self,
        logits: Tensor,
        labels: Tensor,
        weight: Tensor | None,
        stats: Tensor,
        totals: Tensor,
        masses: Tensor,
        dloss: Tensor,
        dlse: Tensor,
        dlabels: Tensor,
        ddlabels: Tensor,
    ) -> tuple[Tensor | None, ...]:
        douts = ops.zeros_like(ddlabels), ddlabels
        return self.of_both(logits, labels, weight, stats, totals, masses, dloss, dlse, dlabels, douts)

    def of_both(
        self,
        logits: Tensor,
        labels: Tensor,
        weight: Tensor | None,
        stats: Tensor,
        totals: Tensor,
        masses: Tensor,
        dloss: Tensor,
        dlse: Tensor,
        outs: Any,
        douts: tuple[Tensor, Tensor],
    ) -> tuple[Tensor | None, ...]:
        """Names are those of loss.h: with the softmax p, the gradients are u = g p - c a, times the softcap's
        derivative, and c kept w (lse - x)."""
        dtype = dloss.dtype
        x, along_x, along_q = ops.cast(logits, dtype), ops.cast(douts[0], dtype), ops.cast(douts[1], dtype)
        kept, z = constant(1 - self.label_smoothing, dtype), constant(2 * self.z_loss, dtype)
        a, slope, bend = ops.cast(labels, dtype) * kept, None, None
        if self.label_smoothing > 0:
            a = a + constant(self.label_smoothing / logits.shape[1], dtype)
        of_q = kept
        if weight is not None:
            a, of_q = a * weight, kept * weight
        if self.softcap > 0:
            softcap, two = constant(self.softcap, dtype), constant(2.0, dtype)
            t = ops.tanh(x / softcap)
            x, slope = softcap * t, 1 - t * t
            bend = -two * t / softcap * along_x
            along_x = along_x * slope
        top, share = stats[:, :1], stats[:, 1:]
        p, lse = ops.exp(x - top) * share, top - ops.log(share)
        c, mass = ops.reshape(dloss, (-1, 1)) / totals[0], ops.reshape(masses, (-1, 1))
        g = c * (mass + z * lse) + ops.reshape(dlse, (-1, 1))
        s, along_q = self.sum(p * along_x, 1), along_q * of_q
        dx = p * (g * (along_x - s) + z * c * s) + c * (p * self.sum(along_q, 1) - along_q)
        if slope is not None:
            dx = (dx + bend * (g * p - c * a)) * slope
        dq = c * of_q * (s - along_x)
        dc = (mass + z * lse) * s + self.sum(along_q * (lse - x) - along_x * a, 1)
        of_loss = ops.reshape(dc / totals[0], masses.shape)
        if dloss.ndim == 0:
            of_loss = add_backward(of_loss, constant(0.0, dtype))  # MindSpore would not write the sum over no rows
        of_lse = ops.reshape(s, masses.shape)
        of_stats, of_totals, of_masses = ops.zeros_like(stats), ops.zeros_like(totals), ops.zeros_like(masses)
        of_weight = None if weight is None else ops.zeros_like(weight)
        dlogits, dlabels = ops.cast(dx, logits.dtype), ops.cast(dq, labels.dtype)
        return dlogits, dlabels, of_weight, of_stats, of_totals, of_masses, of_loss, of_lse


def attributes_of(
    name: str, ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float
) -> dict[str, Any]:
    """Checks the settings. Errors begin with `name`, since `linear_cross_entropy` has them, too."""
    smoothing = settings.number(name, "label_smoothing", label_smoothing, 0)
    if smoothing > 1:
        raise ValueError(f"{name}: label_smoothing must be at most 1, got {label_smoothing}")
    return dict(
        ignore_index=settings.integer(name, "ignore_index", ignore_index),
        reduction=settings.one_of(name, "reduction", reduction, _REDUCTIONS),
        label_smoothing=smoothing,
        z_loss=settings.number(name, "z_loss", z_loss, 0),
        softcap=settings.number(name, "softcap", softcap, 0),
    )


def _unused(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    totals: Tensor,
    dloss: Tensor,
    dlogits: Tensor,
    ddlogits: Tensor,
) -> tuple[Tensor | None, ...]:
    """Returns tensors of the inputs' shapes. Graph mode makes this gradient also where nothing uses it."""
    return logits, labels, weight, stats, totals, dloss


def _unused_general(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    totals: Tensor,
    dloss: Tensor,
    dlse: Tensor,
    dlogits: Tensor,
    ddlogits: Tensor,
) -> tuple[Tensor | None, ...]:
    return logits, labels, weight, stats, totals, dloss, dlse
