from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

from msops.core import settings
from msops.core.compiled import Operators, once
from msops.core.factory import custom_op
from msops.core.inputs import cast_as, check_inputs, describe, spec_of
from msops.core.library import of_package
from msops.core.signature import Signature
from msops.core.spec import FLOATS, dtype_name
from msops.operators.add import backward as add_backward

if TYPE_CHECKING:
    from typing import Any

    from msops.core.inputs import Description
    from msops.core.operator import Operator

_NAME = "cross_entropy"
_LIBRARY = of_package(_NAME)
_OF_AXES = Signature("logits(N, V, *D), labels(N, *D, dtype=index), weight(V, dtype=common|float32)? -> loss(N)")
_OF_PROBABILITIES = Signature("logits(N, V, *D), labels(N, V, *D), weight(V, dtype=common|float32)? -> loss(N)")
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

    all rows count, ``"mean"`` divides by their number, and the probabilities have a gradient, too. This takes several
    of MindSpore's operators in float32 or float64, besides the kernel for lse.

    The logits are read once, for the loss, and once more for the gradient with respect to them, the only one. Sums are
    in float32 (float64 for float64). Logits of more axes are transposed first, so that their classes are the last axis:
    that is another reading and writing.

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
    if _are_probabilities(describe(logits), describe(labels), of_weight, of_settings):
        loss, lse = _of_probabilities(logits, labels, weight, reduction, label_smoothing, z_loss, softcap)
        return (loss, lse) if settings.boolean(_NAME, "return_lse", return_lse) else loss
    is_general, order, rows = _form(describe(logits), describe(labels), of_weight, return_lse)
    compute = operators.primitive(
        ignore_index, reduction, label_smoothing, z_loss, softcap, False, is_general, weight is not None
    )
    of_rows = labels
    if order is not None:
        logits, of_rows = ops.reshape(ops.transpose(logits, order), rows), ops.reshape(labels, rows[:1])
    if weight is None:
        results = compute(logits, of_rows)
    elif is_general:
        results = compute(logits, of_rows, as_accumulator(weight, logits))
    else:
        results = compute(logits, of_rows, weight)
    loss = results[0]
    if order is not None and reduction == "none":
        loss = ops.reshape(loss, labels.shape)
    if not return_lse:
        return loss
    return loss, results[1] if order is None else ops.reshape(results[1], labels.shape)


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


def _of_probabilities(
    logits: Tensor,
    probabilities: Tensor,
    weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Returns the loss and lse. The loss is a sum of differences lse - x, in which no digits cancel."""
    of_rows, (rows, classes) = logits.shape[:1] + logits.shape[2:], _rows_of(describe(logits))
    if logits.ndim > 2:
        order = _classes_last(logits.ndim)
        logits, probabilities = ops.transpose(logits, order), ops.transpose(probabilities, order)
        logits, probabilities = ops.reshape(logits, (rows, classes)), ops.reshape(probabilities, (rows, classes))
    compute = operators.primitive(-100, "none", 0.0, 0.0, softcap, False, True, False)
    lse = compute(logits, ops.zeros((rows,), mindspore.int32))[1]
    zero, cap, kept, spread, z, share = _constants(
        label_smoothing, z_loss, softcap, reduction, rows, classes, lse.dtype
    )
    x, q = ops.cast(logits, lse.dtype), ops.cast(probabilities, lse.dtype)
    if softcap > 0:
        x = ops.mul(ops.tanh(ops.div(x, cap)), cap)
    if label_smoothing > 0:
        q = ops.add(ops.mul(q, kept), spread)
    if weight is not None:
        q = ops.mul(q, ops.cast(ops.stop_gradient(weight), lse.dtype))
    losses = ops.reduce_sum(ops.mul(q, ops.sub(ops.reshape(lse, (rows, 1)), x)), 1)
    if z_loss > 0:
        losses = ops.add(losses, ops.mul(z, ops.mul(lse, lse)))
    if reduction == "none":
        return ops.reshape(losses, of_rows), ops.reshape(lse, of_rows)
    # MindSpore would not write the sum over no rows.
    return ops.mul(add_backward(losses, zero), share), ops.reshape(lse, of_rows)


@once
def _constants(
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    rows: int,
    classes: int,
    dtype: mindspore.Type,
) -> tuple[Tensor, ...]:
    """Returns 0, the softcap, the factor and the term of label smoothing, the z-loss, and the share of each row."""
    share = 1 / max(1, rows) if reduction == "mean" else 1.0
    numbers = 0.0, softcap, 1 - label_smoothing, label_smoothing / max(1, classes), z_loss, share
    return tuple(Tensor(np.asarray(number, dtype_name(dtype))) for number in numbers)


@once
def _rows_of(logits: Description) -> tuple[int, int]:
    """Returns the shape of logits as a matrix with the classes as its last axis."""
    shape = logits[0]
    if None in shape:
        raise ValueError(f"{_NAME}: the shape of probabilities must be known at compile time, got {shape}")
    return math.prod((shape[0], *shape[2:])), shape[1]


@once
def _classes_last(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank), 1)


@once
def _form(
    logits: Description, labels: Description, weight: Description | None, return_lse: bool
) -> tuple[bool, tuple[int, ...] | None, tuple[int, ...]]:
    """Returns whether the call takes the general kernels and, for logits of more than two axes, the order of axes that
    has the classes last, and their shape as a matrix."""
    is_general = settings.boolean(_NAME, "return_lse", return_lse)
    if weight is not None and weight[1] != logits[1] and weight[1] == mindspore.float32:
        is_general = True
    shape = logits[0]
    if shape is None or len(shape) < 3:
        return is_general, None, ()
    specs = [spec_of(each) for each in (logits, labels, weight) if each is not None]
    check_inputs(_OF_AXES if weight is not None else _OF_AXES.without(["weight"]), _NAME, specs)
    others = (shape[0], *shape[2:])
    if shape[1] is None:
        raise ValueError(f"{_NAME}: the number of classes must be known at compile time, got shape {shape}")
    rows = -1 if None in others else math.prod(others)
    return is_general, _classes_last(len(shape)), (rows, shape[1])


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
    attributes.update(checks_labels=not is_constant, is_general=is_general)
    inputs = f"logits(N, V), labels(N, dtype=index), weight(V{', dtype=accumulator' * is_general})?"
    lse = "lse(N, dtype=accumulator), " * is_general
    kept = "stats(N, 2, dtype=accumulator), totals(3, dtype=accumulator)"
    loss = f"loss({'N, ' * (reduction == 'none')}dtype=accumulator)"
    backward = custom_op(
        _LIBRARY.CrossEntropyBackward,
        f"{inputs}, {kept}, d{loss}{', dlse(N, dtype=accumulator)' * is_general} -> dlogits(N, V)",
        gradient=None if not is_constant else _unused_general if is_general else _unused,
        **attributes,
    )
    return custom_op(
        _LIBRARY.CrossEntropyForward,
        f"{inputs} -> {loss}, {lse}{kept}; losses, partial",
        gradient=backward,
        **attributes,
    )


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
