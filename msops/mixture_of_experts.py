from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn, ops
from mindspore.common.initializer import Uniform

from msops.core import settings
from msops.core.compiled import once
from msops.core.inputs import cast_as, describe, fits, spec_of
from msops.core.spec import FLOATS, dtype_name
from msops.operators.grouped_matmul import grouped_matmul
from msops.operators.moe_permute import moe_permute
from msops.operators.moe_unpermute import moe_unpermute
from msops.operators.swiglu import swiglu
from msops.operators.topk_gating import TopKGating

if TYPE_CHECKING:
    from msops.core.inputs import Description

_NAME = "MixtureOfExperts"


class MixtureOfExperts(nn.Cell):
    r"""A sparse feed-forward layer: a gate chooses k of E gated networks for each token.

    .. math::
        \text{logits}_n &= \text{gate}\, x_n, \qquad
        w_n, e_n = \operatorname{topk\_gating}(\text{logits}_n) \\
        y_n &= \sum_{j=1}^{k} w_{n j}\, \text{down}_{e_{n j}} \bigl(\operatorname{silu}(g) \odot u\bigr), \qquad
        (g, u) = \text{gate\_up}_{e_{n j}}\, x_n

    It composes :func:`msops.topk_gating`, :func:`msops.moe_permute`, :func:`msops.grouped_matmul`,
    :func:`msops.swiglu` and :func:`msops.moe_unpermute`. Nothing waits for the host.

    Args:
        hidden_size (int): C, the number of features of a token.
        intermediate_size (int): F, the number of hidden features of an expert.
        num_experts (int): E.
        k (int): How many experts a token has, from 1 to E.
        score (str): ``"softmax"`` or ``"sigmoid"``, as in the function. Default: ``"softmax"`` .
        renormalize (bool): Whether the weights of a token add up to `scale`. Default: ``True`` .
        correction_bias (bool): Whether there is a bias that only the choice uses. Default: ``False`` .
        groups (int), top_groups (int), group_top (int), scale (float): As in :func:`msops.topk_gating`. Default: ``1``
            , ``None`` , ``1`` and ``1.0`` .
        capacity_factor (float): An expert takes at most ceil(capacity_factor N k / E) of the slots of N tokens, at
            least one, and the first ones; a slot beyond adds nothing. The number of tokens must be known then.
            Default: ``None`` , which drops nothing.
        return_routing (bool): Whether to return the logits and the experts, too, such as for a loss that balances
            the experts. Default: ``False`` .
        dtype (mindspore.dtype): The dtype of `gate_up` and `down`, which are cast to that of x. Default:
            ``mindspore.float32`` .

    Inputs:
        - **x** (Tensor) - The tokens, shape (..., C); float16, float32 or float64.

    Outputs:
        Tensor y of the shape and dtype of x, with `return_routing` a tuple of y, the logits (N, E), in the dtype of
        `gate`, and the experts (N, k), int32, where N is the number of tokens.

    Attributes:
        gate (Parameter): Shape (E, C); float64 if `dtype` is, else float32.
        gate_up (Parameter): Shape (E, 2F, C): the rows of g, then those of u.
        down (Parameter): Shape (E, C, F).
        correction_bias (Parameter): Shape (E,), float32, with `correction_bias` alone. It has no gradient.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range, or x has another shape.

    Source:
        Shazeer et al., "Outrageously large neural networks: the sparsely-gated mixture-of-experts layer", 2017; Jiang
        et al., "Mixtral of experts", 2024; DeepSeek-AI, "DeepSeek-V3 technical report", 2024, for the bias and groups.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> layer = msops.MixtureOfExperts(16, 32, num_experts=8, k=2, return_routing=True)
        >>> y, logits, experts = layer(ops.ones((2, 5, 16)))
        >>> print(y.shape, logits.shape, experts.shape)
        (2, 5, 16) (10, 8) (10, 2)
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        k: int,
        score: str = "softmax",
        renormalize: bool = True,
        correction_bias: bool = False,
        groups: int = 1,
        top_groups: int | None = None,
        group_top: int = 1,
        scale: float = 1.0,
        capacity_factor: float | None = None,
        return_routing: bool = False,
        dtype: mindspore.Type = mindspore.float32,
    ) -> None:
        super().__init__()
        self.hidden_size = settings.positive(_NAME, "hidden_size", hidden_size)
        self.intermediate_size = settings.positive(_NAME, "intermediate_size", intermediate_size)
        self.num_experts = settings.positive(_NAME, "num_experts", num_experts)
        self.k = settings.positive(_NAME, "k", k)
        if self.k > self.num_experts:
            raise ValueError(f"{_NAME}: k must be at most num_experts, {num_experts}, got {k}")
        self.capacity_factor = None
        if capacity_factor is not None:
            self.capacity_factor = float(settings.number(_NAME, "capacity_factor", capacity_factor, 0))
        self.return_routing = settings.boolean(_NAME, "return_routing", return_routing)
        e, c, f = self.num_experts, self.hidden_size, self.intermediate_size
        self.of_gate = mindspore.float64 if dtype == mindspore.float64 else mindspore.float32
        self.gate = settings.parameter(_NAME, "gate", Uniform(1 / math.sqrt(c)), (e, c), self.of_gate)
        self.gate_up = settings.parameter(_NAME, "gate_up", Uniform(1 / math.sqrt(c)), (e, 2 * f, c), dtype)
        self.down = settings.parameter(_NAME, "down", Uniform(1 / math.sqrt(f)), (e, c, f), dtype)
        self.correction_bias = None
        if settings.boolean(_NAME, "correction_bias", correction_bias):
            self.correction_bias = settings.parameter(_NAME, "correction_bias", "zeros", (e,), mindspore.float32)
            self.correction_bias.requires_grad = False
        self.gating = TopKGating(k, score, renormalize, groups, top_groups, group_top, scale)

    def construct(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        tokens = _tokens(describe(x), self.hidden_size)
        capacity = _capacity(self.capacity_factor, tokens, self.k, self.num_experts)
        rows = ops.reshape(x, (tokens, self.hidden_size))
        # Unlike MatMul, this stays in float32 with mixed precision, and gives a row the same bits in any batch.
        gate = ops.expand_dims(ops.cast(self.gate, self.of_gate), 0)
        all_rows = _one_group(tokens)
        if all_rows is None:
            all_rows = ops.full((1,), rows.shape[0], dtype=mindspore.int32)
        logits = grouped_matmul(ops.cast(rows, self.of_gate), gate, all_rows, None, True)
        weights, experts = self.gating(logits, self.correction_bias)
        sorted_rows, positions, sizes = moe_permute(rows, experts, self.num_experts, capacity)
        hidden = swiglu(grouped_matmul(sorted_rows, cast_as(self.gate_up, x), sizes, None, True))
        results = grouped_matmul(hidden, cast_as(self.down, x), sizes, None, True)
        y = ops.reshape(moe_unpermute(results, positions, ops.cast(weights, x.dtype)), x.shape)
        return (y, logits, experts) if self.return_routing else y

    def extend_repr(self) -> str:
        return settings.shown(self, "hidden_size", "intermediate_size", "num_experts", "k")


@once
def _tokens(x: Description, hidden_size: int) -> int:
    """Returns the number of tokens, or -1 where it is open."""
    spec = spec_of(x)
    if isinstance(spec, str):
        raise TypeError(f"{_NAME}: x must be a Tensor, got {spec}")
    if spec.dtype not in FLOATS:
        raise TypeError(f"{_NAME}: x must be float16, float32 or float64, got {dtype_name(spec.dtype)}")
    if not spec.shape or not fits(spec.shape[-1:], (hidden_size,)):
        raise ValueError(f"{_NAME}: x must have shape (..., {hidden_size}), got {spec.shape}")
    outer = spec.shape[:-1]
    return 0 if 0 in outer else -1 if None in outer else math.prod(outer)


@once
def _one_group(tokens: int) -> Tensor | None:
    return None if tokens < 0 else Tensor([tokens], mindspore.int32)


@once
def _capacity(factor: float | None, tokens: int, k: int, num_experts: int) -> int | None:
    if factor is None:
        return None
    if tokens < 0:
        raise ValueError(f"{_NAME}: with capacity_factor, the number of tokens must be known")
    return max(1, math.ceil(factor * tokens * k / num_experts))
