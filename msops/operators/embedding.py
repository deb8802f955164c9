from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn, ops

from msops.core import settings
from msops.core.compiled import once
from msops.core.factory import Operators, custom_op
from msops.core.inputs import describe, spec_of
from msops.core.library import of_package
from msops.core.spec import Spec

if TYPE_CHECKING:
    from msops.core.inputs import Description
    from msops.core.operator import Operator
    from msops.core.settings import Init

_NAME = "embedding"
_NO_PADDING = -1  # where no row is padding
_library = of_package(_NAME)


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    r"""Takes rows of a table, such as the vectors of tokens.

    .. math::
        \text{out}_{\ldots, c} = \text{weight}_{\text{ids}_{\ldots},\, c}

    The gradient with respect to `weight` adds up, for each row, what the places that took it have, in a fixed order: in
    float32, or in float64 beside float64, and rounded once. It has gradients of any order, and takes no longer where
    many places took one row.

    Args:
        ids (Tensor): The rows to take, any shape; int32 or int64, from 0 to N - 1. On the CPU, another index is an
            error; on a GPU it gives 0, and no gradient.
        weight (Tensor): Shape (N, C): N rows; float16, float32 or float64.
        padding_idx (int): A row that gets no gradient, from -N to N - 1. Default: ``None`` .

    Returns:
        Tensor of shape (..., C), where `ids` has the shape (...), with the dtype of `weight`.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or `padding_idx` is not an int.
        ValueError: If `weight` has another shape, or `padding_idx` is out of range.

    Source:
        Bengio et al., "A neural probabilistic language model", 2003.

    Examples:
        >>> import mindspore, msops
        >>> weight = mindspore.Tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> print(msops.embedding(mindspore.Tensor([2, 0, 2]), weight))
        [[5. 6.]
         [1. 2.]
         [5. 6.]]
    """
    return operators.primitive(_padding(describe(weight), padding_idx))(ids, weight)


class Embedding(nn.Cell):
    r"""A table, of which rows are taken, as the Parameter `weight`. See :func:`msops.embedding`.

    Args:
        num_embeddings (int): N, the number of rows.
        embedding_dim (int): C, the number of columns.
        padding_idx (int): As in the function. Default: ``None`` .
        weight_init (Tensor, str, Initializer, number): The initial weight. Default: ``"normal"`` , numbers with a
            standard deviation of 0.01, as in ``nn.Embedding`` .
        dtype (mindspore.dtype): The dtype of the weight, and of the results. Default: ``mindspore.float32`` .

    Attributes:
        weight (Parameter): Shape (N, C).

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a size is less than 1, or `padding_idx` is out of range.

    Examples:
        >>> import mindspore, msops
        >>> net = msops.Embedding(100, 8)
        >>> print(net(mindspore.Tensor([[1, 2, 3], [3, 2, 1]])).shape)
        (2, 3, 8)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        weight_init: Init = "normal",
        dtype: mindspore.Type = mindspore.float32,
    ) -> None:
        name = "Embedding"
        super().__init__()
        self.num_embeddings = settings.positive(name, "num_embeddings", num_embeddings)
        self.embedding_dim = settings.positive(name, "embedding_dim", embedding_dim)
        self.padding_idx = padding_idx
        shape = (self.num_embeddings, self.embedding_dim)
        self.weight = settings.parameter(name, "weight", weight_init, shape, dtype)
        self.forward_op = operators(_padding_of(name, self.num_embeddings, padding_idx)).primitive

    def construct(self, ids: Tensor) -> Tensor:
        return self.forward_op(ids, self.weight)

    construct.__doc__ = embedding.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "num_embeddings", "embedding_dim", "padding_idx")


def _padding_of(operator: str, rows: int, padding_idx: int | None) -> int:
    """Returns the row that is padding, from 0 on, or _NO_PADDING."""
    if padding_idx is None:
        return _NO_PADDING
    if not -rows <= settings.integer(operator, "padding_idx", padding_idx) < rows:
        raise ValueError(f"{operator}: padding_idx must be from -{rows} to {rows} - 1, got {padding_idx}")
    return padding_idx % rows


@once
def _padding(weight: Description, padding_idx: int | None) -> int:
    spec = spec_of(weight)
    rows = spec.shape[0] if isinstance(spec, Spec) and spec.shape else 0
    return _NO_PADDING if rows == 0 else _padding_of(_NAME, rows, padding_idx)  # the operator says what is wrong


@Operators
def operators(padding: int = _NO_PADDING) -> Operator:
    """Returns the operator whose gradient leaves out the row `padding`."""

    def gradient_of_backward(
        ids: Tensor, dout: Tensor, weight: Tensor, dweight: Tensor, ddweight: Tensor
    ) -> tuple[Tensor, ...]:
        """Calls the operator itself, without the padding: it is linear, and its gradient is its transpose."""
        return ops.zeros_like(ids), without_padding(ids, ddweight), ops.zeros_like(weight)

    backward = custom_op(
        _library.EmbeddingBackward,
        "ids(*B, dtype=index), dout(*B, C), weight(N, C) -> dweight(N, C); places(..., dtype=int32), parts(...)",
        gradient=gradient_of_backward,
        padding=padding,
    )
    taken = "ids(*B, dtype=index), weight(N, C) -> out(*B, C)"
    without_padding = custom_op(_library.EmbeddingForward, taken, gradient=backward, padding=padding)
    return custom_op(_library.EmbeddingForward, taken, gradient=backward, padding=_NO_PADDING)
