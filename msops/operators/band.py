"""This operator serves patch_mindspore alone: msops has no public name for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package

if TYPE_CHECKING:
    from mindspore import Tensor

    from msops.core.operator import Operator

_NAME = "band"
_LIBRARY = of_package(_NAME)
_DTYPES = (
    *(mindspore.float16, mindspore.float32, mindspore.float64, mindspore.bool_),
    *(mindspore.int8, mindspore.int16, mindspore.int32, mindspore.int64),
    *(mindspore.uint8, mindspore.uint16, mindspore.uint32, mindspore.uint64),
)


def band(x: Tensor, upper: bool, diagonal: int = 0) -> Tensor:
    """Copies the upper or the lower triangle of each matrix, from a diagonal on, and sets other elements to zero.

    This is what `triu` and `tril` of MindSpore and NumPy compute.
    """
    return operators.primitive(upper, diagonal)(x)


@Operators
def operators(upper: bool, diagonal: int = 0) -> Operator:
    settings.boolean(_NAME, "upper", upper)
    if not -(2**31) <= settings.integer(_NAME, "diagonal", diagonal) < 2**31:
        raise ValueError(f"{_NAME}: diagonal must fit into 32 bits, got {diagonal}")
    operator = None
    for signature in ("dy(*S, M, N) -> dx(*S, M, N)", "x(*S, M, N) -> y(*S, M, N)"):
        operator = custom_op(
            _LIBRARY.BandForward, signature, gradient=operator, dtypes=_DTYPES, upper=bool(upper), diagonal=diagonal
        )
    assert operator
    return operator
