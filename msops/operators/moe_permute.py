from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, nn

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package
from msops.core.spec import Spec

if TYPE_CHECKING:
    from msops.core.operator import Operator

_NAME = "moe_permute"
_LIBRARY = of_package(_NAME)


def moe_permute(
    x: Tensor,
    experts: Tensor,
    num_experts: int,
    capacity: int | None = None,
    pad: bool = False,
    return_counts: bool = False,
) -> Any:
    r"""Copies tokens to their experts: a row for each choice, sorted by expert.

    .. math::
        \text{rows}_{\text{positions}_{nj}} = x_n

    Token n has k slots (n, j), one for each of its experts. The rows of expert 0 come first, then those of expert 1,
    and so on; those of one expert are in the order of :math:`n k + j`. All rows of an expert are then neighbours, which
    one matrix multiplies. :func:`msops.moe_unpermute` brings the results back.

    With a `capacity` c, an expert keeps its first c slots alone. Slots that it does not keep, and slots with the expert
    -1, have position -1. The rows of all others follow each other without gaps, and what is left of `rows` is 0. With
    `pad` each expert has c rows, and those without a slot are 0. An expert that a token chose twice gets two copies.

    The sizes of the results do not depend on the numbers in `experts`, so that the host never waits for the GPU.

    The gradient with respect to `x` is the sum over the slots of each token, in the order of j: in float32, or in
    float64 beside float64, and rounded once. Gradients of the rows that are 0 are ignored. There is none of second
    order.

    Args:
        x (Tensor): Tokens, shape (N, C); float16, float32 or float64.
        experts (Tensor): The experts of each token, shape (N, k) or (N,); int32 or int64, from 0 to `num_experts` - 1,
            or -1. On the CPU, another number is an error; on a GPU it counts as -1.
        num_experts (int): E, the number of experts, at least 1.
        capacity (int): The most rows of an expert, at least 1. Default: ``None`` , an expert keeps all.
        pad (bool): Whether each expert has `capacity` rows. Default: ``False`` .
        return_counts (bool): Whether to return how many slots chose each expert. Default: ``False`` .

    Returns:
        Tuple of

        - rows, shape (N k, C), or (E, c, C) with `pad`, with the dtype of `x`;
        - positions, int32, with the shape of `experts`: the row of each slot, or -1. With `pad`, row i of expert e is
          e c + i;
        - group_sizes, shape (E,), int32: how many rows each expert has, which :func:`msops.grouped_matmul` takes;
        - counts, shape (E,), int32, with `return_counts`: how many slots chose each expert.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or a setting has a wrong type.
        ValueError: If an input has another shape, or a setting is out of range.

    Source:
        Shazeer et al., "Outrageously large neural networks: the sparsely-gated mixture-of-experts layer", 2017; Fedus
        et al., "Switch transformers", 2022, has the capacity.

    Examples:
        >>> import mindspore, msops
        >>> x = mindspore.Tensor([[1.0], [2.0], [3.0]])
        >>> experts = mindspore.Tensor([[2, 0], [0, 1], [2, -1]])
        >>> rows, positions, group_sizes = msops.moe_permute(x, experts, 3)
        >>> print(rows.asnumpy().ravel(), group_sizes)
        [1. 2. 2. 1. 3. 0.] [2 1 2]
        >>> print(positions)
        [[ 3  0]
         [ 1  2]
         [ 4 -1]]
    """
    found = operators.primitive(num_experts, capacity, pad, return_counts)(x, experts)
    if return_counts:
        return found[:4]
    return found[:3]


class MoEPermute(nn.Cell):
    """Copies tokens to their experts. See :func:`msops.moe_permute`.

    Args:
        num_experts (int): As in the function.
        capacity (int): As in the function. Default: ``None`` .
        pad (bool): As in the function. Default: ``False`` .
        return_counts (bool): As in the function. Default: ``False`` .

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a setting is out of range.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> permute = msops.MoEPermute(4, capacity=2, pad=True)
        >>> rows, positions, group_sizes = permute(ops.ones((5, 8)), ops.zeros((5, 1), mindspore.int32))
        >>> print(rows.shape, group_sizes)
        (4, 2, 8) [2 0 0 0]
    """

    def __init__(
        self, num_experts: int, capacity: int | None = None, pad: bool = False, return_counts: bool = False
    ) -> None:
        super().__init__()
        operators(num_experts, capacity, pad, return_counts)  # checks them
        self.num_experts, self.capacity, self.pad, self.return_counts = num_experts, capacity, pad, return_counts

    def construct(self, x: Tensor, experts: Tensor) -> Any:
        return moe_permute(x, experts, self.num_experts, self.capacity, self.pad, self.return_counts)

    construct.__doc__ = moe_permute.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "num_experts", "capacity", "pad", "return_counts")


_backward = custom_op(
    _LIBRARY.MoePermuteBackward, "drows(*R, C), positions(N, *K, dtype=int32) -> dx(N, C)", name=_NAME
)


@Operators
def operators(
    num_experts: int, capacity: int | None = None, pad: bool = False, return_counts: bool = False
) -> Operator:
    """Returns the operator that gives, in any case, the counts. Its attribute `capacity` is 0 if there is none."""
    settings.boolean(_NAME, "return_counts", return_counts)
    if settings.boolean(_NAME, "pad", pad) and capacity is None:
        raise ValueError(f"{_NAME}: capacity must be an int where pad is True, got None")
    return custom_op(
        _LIBRARY.MoePermuteForward,
        "x(N, C), experts(N, *K, dtype=index) -> rows, positions(..., dtype=int32), group_sizes(..., dtype=int32), "
        "counts(..., dtype=int32); places(..., dtype=int32), begins(..., dtype=int32)",
        infer=_infer,
        gradient=_backward,
        num_experts=_size("num_experts", num_experts),
        capacity=0 if capacity is None else _size("capacity", capacity),
        pad=pad,
    )


def _size(name: str, value: int) -> int:
    if settings.positive(_NAME, name, value) >= 2**31:
        raise ValueError(f"{_NAME}: {name} must be less than 2^31, got {value}")
    return int(value)


def _infer(x: Spec, experts: Spec, num_experts: int, capacity: int, pad: bool) -> list[Spec]:
    if len(experts.shape) > 2:
        raise ValueError(f"experts must have shape (N, k) or (N,), got {experts.shape}")
    if pad and num_experts * capacity >= 2**31:
        raise ValueError(f"num_experts times capacity must be less than 2^31, got {num_experts * capacity}")
    rows = (num_experts, capacity) if pad else (experts.size,)
    of_experts = Spec((num_experts,), mindspore.int32)
    return [Spec((*rows, x.shape[1]), x.dtype), Spec(experts.shape, mindspore.int32), of_experts, of_experts]
