from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.inputs import present
from msops.core.library import of_package
from msops.core.spec import Spec

if TYPE_CHECKING:
    from typing import Any

    from msops.core.operator import Operator

_NAME = "topk_gating"
_LIBRARY = of_package(_NAME)
_SCORES = "softmax", "sigmoid"


def topk_gating(
    logits: Tensor,
    k: int,
    score: str = "softmax",
    renormalize: bool = False,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int | None = None,
    group_top: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    r"""Chooses k experts for each token, and their weights.

    .. math::
        s = \text{softmax}(\text{logits}) \text{ or } \text{sigmoid}(\text{logits}), \qquad c = s + \text{bias}, \qquad
        \text{weights}_j = \text{scale} \cdot s_{\text{experts}_j} \text{ or }
        \text{scale} \cdot s_{\text{experts}_j} / \textstyle\sum_i s_{\text{experts}_i}

    The experts are those of the k greatest c, in falling order; of equal ones, the lower index comes first. With
    `groups`, neighbouring experts are a group, whose worth is the sum of its `group_top` greatest c. The experts come
    from the `top_groups` worthiest groups alone; of equally worthy ones, the lower index stays. The `bias` decides on
    the choice, and is no part of the weights.

    Scores and sums are in float32, or in float64 beside float64. Without `bias`, and with `group_top` = 1, the logits
    themselves decide, so that scores which rounding or underflow makes equal are no ties. Logits of :math:`-\infty`
    have score 0 and are chosen last, and so are those that are NaN: whatever the logits, experts are k different
    numbers from 0 to E - 1. If all scores to divide by are 0, the weights are 0.

    There is a gradient of first order with respect to the logits, through the weights, for the choice as it stands.
    The gradient of the bias is 0.

    Args:
        logits (Tensor): Shape (..., E), for E experts; float16, float32 or float64.
        k (int): How many experts to choose, from 1 to the experts in `top_groups` groups.
        score (str): ``"softmax"`` over all experts, or ``"sigmoid"`` of each. Default: ``"softmax"`` .
        renormalize (bool): Whether the weights are divided by their sum. Default: ``False`` .
        bias (Tensor): What is added to each expert's score for the choice, shape (E,), with the dtype of `logits` or
            float32. Default: ``None`` .
        groups (int): The number of groups, which divides E. Default: ``1`` .
        top_groups (int): How many groups stay, from 1 to `groups`. Default: ``None`` , all.
        group_top (int): How many scores are added for the worth of a group, from 1 to its size. Default: ``1`` .
        scale (float): A factor of all weights. Default: ``1.0`` .

    Returns:
        Tuple of the weights, shape (..., k), with the dtype of `logits`, and the experts, of this shape, int32.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or a setting has a wrong type.
        ValueError: If an input has another shape, or a setting is out of range.

    Source:
        Shazeer et al., "Outrageously large neural networks: the sparsely-gated mixture-of-experts layer", 2017;
        DeepSeek-AI, "DeepSeek-V3 technical report", 2024, has groups and the bias.

    Examples:
        >>> import mindspore, msops
        >>> logits = mindspore.Tensor([[0.0, 3.0, 1.0, 3.0]])
        >>> weights, experts = msops.topk_gating(logits, 3, renormalize=True)
        >>> print(weights, experts)
        [[0.46831053 0.46831053 0.06337894]] [[1 3 2]]
    """
    operator = operators.primitive(k, score, renormalize, groups, top_groups, group_top, scale, bias is not None)
    found = operator(logits, *present((bias,)))
    return found[0], found[1]


class TopKGating(nn.Cell):
    """Chooses k experts for each token, and their weights. See :func:`msops.topk_gating`.

    Args:
        k (int): As in the function.
        score (str): As in the function. Default: ``"softmax"`` .
        renormalize (bool): As in the function. Default: ``False`` .
        groups (int): As in the function. Default: ``1`` .
        top_groups (int): As in the function. Default: ``None`` .
        group_top (int): As in the function. Default: ``1`` .
        scale (float): As in the function. Default: ``1.0`` .

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a setting is out of range.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> gating = msops.TopKGating(2, "sigmoid", renormalize=True, groups=4, top_groups=2, group_top=2)
        >>> weights, experts = gating(ops.zeros((3, 8)), ops.arange(8).astype(mindspore.float32))
        >>> print(weights[0], experts[0])
        [0.5 0.5] [7 6]
    """

    def __init__(
        self,
        k: int,
        score: str = "softmax",
        renormalize: bool = False,
        groups: int = 1,
        top_groups: int | None = None,
        group_top: int = 1,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        operators(k, score, renormalize, groups, top_groups, group_top, scale)  # checks them
        self.k, self.score, self.renormalize, self.groups = k, score, renormalize, groups
        self.top_groups, self.group_top, self.scale = top_groups, group_top, scale

    def construct(self, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return topk_gating(
            logits,
            self.k,
            self.score,
            self.renormalize,
            bias,
            self.groups,
            self.top_groups,
            self.group_top,
            self.scale,
        )

    construct.__doc__ = topk_gating.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "k", "score", "renormalize", "groups", "top_groups", "group_top", "scale")


@Operators
def operators(
    k: int,
    score: str = "softmax",
    renormalize: bool = False,
    groups: int = 1,
    top_groups: int | None = None,
    group_top: int = 1,
    scale: float = 1.0,
) -> Operator:
    """Returns the operator for these settings, which its gradient has, too."""
    attributes: dict[str, Any] = dict(
        k=settings.positive(_NAME, "k", k),
        score=settings.one_of(_NAME, "score", score, _SCORES),
        renormalize=settings.boolean(_NAME, "renormalize", renormalize),
        groups=settings.positive(_NAME, "groups", groups),
        top_groups=groups if top_groups is None else settings.positive(_NAME, "top_groups", top_groups),
        group_top=settings.positive(_NAME, "group_top", group_top),
        scale=settings.number(_NAME, "scale", scale),
    )
    if attributes["top_groups"] > attributes["groups"]:
        raise ValueError(f"{_NAME}: top_groups must be at most groups = {groups}, got {top_groups}")
    backward = custom_op(
        _LIBRARY.TopkGatingBackward,
        "logits(*B, E), experts(*B, K, dtype=int32), dweights(*B, K) -> dlogits(*B, E)",
        **attributes,
    )
    return custom_op(
        _LIBRARY.TopkGatingForward,
        "logits(*B, E), bias(E, dtype=common|float32)? -> weights, experts(..., dtype=int32); keys(...)",
        infer=_infer,
        gradient=backward,
        **attributes,
    )


def _infer(
    logits: Spec, bias: Spec | None, k: int, groups: int, top_groups: int, group_top: int, **_: object
) -> list[Spec]:
    *tokens, experts = logits.shape
    if k > experts:
        raise ValueError(f"k must be at most E = {experts}, got {k}")
    if experts % groups:
        raise ValueError(f"groups must divide E = {experts}, got {groups}")
    of_group = experts // groups
    if group_top > of_group:
        raise ValueError(f"group_top must be at most E / groups = {of_group}, got {group_top}")
    if k > top_groups * of_group:
        raise ValueError(f"k must be at most the {top_groups * of_group} experts of {top_groups} groups, got {k}")
    shape = (*tokens, k)
    return [Spec(shape, logits.dtype), Spec(shape, mindspore.int32)]
