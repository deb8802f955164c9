from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn

from msops.core import settings
from msops.core.compiled import Operators
from msops.core.factory import custom_op
from msops.core.inputs import cast_as
from msops.core.library import of_package

if TYPE_CHECKING:
    from typing import Any

    from msops.core.operator import Operator

_NAME = "cross_entropy"
_LIBRARY = of_package(_NAME)
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
) -> Tensor:
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

    The logits are read once, for the loss, and once more for the gradient with respect to them, the only one. Sums are
    in float32 (float64 for float64).

    Args:
        logits (Tensor): Shape (N, V); float16, float32 or float64.
        labels (Tensor): Shape (N,), int32 or int64: a class from 0 to V - 1, or `ignore_index`. Another label is an
            error on the CPU; on a GPU, the loss of its row is NaN.
        weight (Tensor): Weights of the classes, shape (V,), with the dtype of `logits`. Default: ``None`` , all are 1.
        ignore_index (int): The label of rows that do not count. Default: ``-100`` .
        reduction (str): ``"none"`` , ``"sum"`` or ``"mean"`` . Default: ``"mean"`` .
        label_smoothing (float): ε, from 0 to 1. Default: ``0.0`` .
        z_loss (float): z, at least 0. Default: ``0.0`` .
        softcap (float): s, at least 0, where 0 means none. Default: ``0.0`` .

    Returns:
        Tensor of shape (N,) for ``"none"`` , else (); float32, or float64 for float64 logits.

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
    loss = operators.primitive(ignore_index, reduction, label_smoothing, z_loss, softcap, False, weight is not None)
    if weight is None:
        return loss(logits, labels)[0]
    return loss(logits, labels, weight)[0]


class CrossEntropyLoss(nn.Cell):
    """The cross-entropy of rows of logits and their labels. See :func:`msops.cross_entropy`.

    It replaces ``nn.CrossEntropyLoss`` for logits of shape (N, V) and labels of shape (N,).

    Args:
        weight (Tensor): As in the function; it is cast to the dtype of the logits. Default: ``None`` .
        ignore_index (int): As in the function. Default: ``-100`` .
        reduction (str): As in the function. Default: ``"mean"`` .
        label_smoothing (float): As in the function. Default: ``0.0`` .
        z_loss (float): As in the function. Default: ``0.0`` .
        softcap (float): As in the function. Default: ``0.0`` .

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
    ) -> None:
        name = "CrossEntropyLoss"
        super().__init__()
        if weight is not None and not isinstance(weight, Tensor):
            raise TypeError(f"{name}: weight must be a Tensor, got {type(weight).__name__}")
        self.forward_op = operators.primitive(
            ignore_index, reduction, label_smoothing, z_loss, softcap, False, weight is not None
        )
        self.weight = weight
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.z_loss, self.softcap = z_loss, softcap

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.weight is None:
            return self.forward_op(logits, labels)[0]
        return self.forward_op(logits, labels, cast_as(self.weight, logits))[0]

    construct.__doc__ = cross_entropy.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "ignore_index", "reduction", "label_smoothing", "z_loss", "softcap")


@Operators
def operators(
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    is_constant: bool = False,
) -> Operator:
    """Returns the operator that gives the loss and what the gradient needs.

    If `is_constant`, no gradient reaches the logits: nothing uses the gradient of the gradient. A label out of range
    then gives NaN on the CPU, too, as on a GPU.
    """
    attributes = attributes_of(_NAME, ignore_index, reduction, label_smoothing, z_loss, softcap)
    attributes["checks_labels"] = not is_constant
    inputs = "logits(N, V), labels(N, dtype=index), weight(V)?"
    kept = "stats(N, 2, dtype=accumulator), totals(3, dtype=accumulator)"
    loss = f"loss({'N, ' * (reduction == 'none')}dtype=accumulator)"
    backward = custom_op(
        _LIBRARY.CrossEntropyBackward,
        f"{inputs}, {kept}, d{loss} -> dlogits(N, V)",
        gradient=_unused if is_constant else None,
        **attributes,
    )
    return custom_op(
        _LIBRARY.CrossEntropyForward,
        f"{inputs} -> {loss}, {kept}; losses, partial",
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
