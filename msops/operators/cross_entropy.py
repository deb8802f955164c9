from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn, ops

from msops.core import settings
from msops.core.compiled import compiling, once, wants_gradient
from msops.core.inputs import cast_as, check_inputs, describe, spec_of
from msops.core.signature import Signature
from msops.core.spec import FLOATS
from msops.shared.cross_entropy import as_accumulator, attributes_of, check_weights, operators
from msops.shared.cross_entropy_of_probabilities import of_probabilities

if TYPE_CHECKING:
    from typing import Any

    from msops.core.inputs import Description
    from msops.shared.cross_entropy import LossSettings

_NAME = "cross_entropy"
_OF_AXES = Signature("logits(N, V, *D), labels(N, *D, dtype=index), weight(V, dtype=common|float32)? -> loss(N)")
_OF_PROBABILITIES = Signature("logits(N, V, *D), labels(N, V, *D), weight(V, dtype=common|float32)? -> loss(N)")


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
    of_rows, shape = labels, ()
    if order is not None:
        shape = labels.shape
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
        check_weights(name, "weight", weight)
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
    of_settings: LossSettings,
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
    return "both" if wants_gradient(labels) else "logits"


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
