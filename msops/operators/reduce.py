"""This operator serves patch_mindspore alone: msops has no public name for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package
from msops.core.spec import FLOATS

if TYPE_CHECKING:
    from mindspore import Tensor

    from msops.core.operator import Operator
    from msops.core.spec import Spec

_NAME = "reduce"
_LIBRARY = of_package(_NAME)
OPERATIONS = "sum", "prod", "max", "min", "mean", "any", "all"  # by their numbers in MindSpore
_MAX_RANK = 3


def reduce(x: Tensor, operation: str, first: bool) -> Tensor:
    """Reduces every other axis of `x`: the first one, if `first`, else the second one.

    The operation is one of `OPERATIONS`. Numbers of float16 are added and multiplied in float32; NaN is the largest and
    the smallest number. `any` and `all` take bool, and `mean` takes floating numbers. There is no gradient.
    """
    return operators.primitive(operation, first)(x)[0]


@Operators
def operators(operation: str, first: bool) -> Operator:
    op = settings.one_of(_NAME, "operation", operation, OPERATIONS)
    dtypes: tuple[Any, ...] = (*FLOATS, mindspore.int32, mindspore.int64, mindspore.bool_)
    if operation in ("any", "all"):
        dtypes = (mindspore.bool_,)
    elif operation == "mean":
        dtypes = FLOATS
    settings.boolean(_NAME, "first", first)
    return custom_op(_LIBRARY.ReduceForward, "x -> y; partial", infer=_infer, dtypes=dtypes, op=op, first=bool(first))


def _infer(x: Spec, op: int, first: int) -> Spec:
    if not 1 <= len(x.shape) <= _MAX_RANK:
        raise ValueError(f"x must have 1 to {_MAX_RANK} axes, got {len(x.shape)}")
    return x._replace(shape=x.shape[int(first) :: 2])
