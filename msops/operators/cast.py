"""This operator serves patch_mindspore alone: msops has no public name for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore

from msops.core.factory import Operators, custom_op
from msops.core.library import of_package
from msops.core.spec import FLOATS, dtype_name

if TYPE_CHECKING:
    from msops.core.operator import Operator
    from msops.core.spec import Spec

_LIBRARY = of_package("cast")
DTYPES = (*FLOATS, mindspore.int32, mindspore.int64, mindspore.bool_)
_NAMES = tuple(dtype_name(each) for each in DTYPES)
_APART = {"float16", "float64"}  # from one to the other it would round twice


def has(dtype: str, to: str) -> bool:
    """Tells whether numbers of one dtype are cast to another one."""
    return dtype in _NAMES and to in _NAMES and dtype != to and {dtype, to} != _APART


@Operators
def operators(to: str) -> Operator:
    """Returns the operator that casts to this dtype."""
    if to not in _NAMES:
        raise ValueError(f"cast: to must be one of {', '.join(_NAMES)}, got {to}")
    place = sorted(_NAMES).index(to)  # as in operations.h
    kind = DTYPES[_NAMES.index(to)]

    def infer(x: Spec, **attributes: Any) -> Spec:
        if not has(dtype_name(x.dtype), to):
            raise TypeError(f"{dtype_name(x.dtype)} is not cast to {to}")
        return x._replace(dtype=kind)

    return custom_op(_LIBRARY.CastForward, "x -> y", infer=infer, dtypes=DTYPES, name="cast", to=place)
