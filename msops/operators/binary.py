"""This operator serves patch_mindspore alone: msops has no public name for it.

It is one of MindSpore's functions of two tensors, with NumPy's broadcasting. Of each, these dtypes exist:

- `maximum`, `minimum`, `add`, `sub`, `mul`, `pow`, `squared_difference` and `mul_no_nan`: float16, float32, float64,
  int32 and int64; the first two and `mul` also bool.
- `div`, `real_div` and `div_no_nan`: float16, float32 and float64.
- `mul_mixed` and `div_mixed`: float16 beside float32, in either order. The result is float32.
- `greater`, `less`, `equal`, `greater_equal`, `less_equal`, `not_equal`, `logical_and` and `logical_or`, whose results
  are bool: all of these.
- `add_ext` and `sub_ext`, which are x + alpha y and x - alpha y: all but bool. The number alpha is float32 or int64,
  beside whole numbers int64.

Numbers of float16 are computed in float32, and rounded once. `maximum` and `minimum` are y where a number is NaN, as
MindSpore's are on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore

from msops.core.factory import Operators, custom_op
from msops.core.library import of_package
from msops.core.spec import FLOATS, dtype_name
from msops.shared.broadcast import broadcast_of

if TYPE_CHECKING:
    from msops.core.operator import Operator
    from msops.core.spec import Spec

_LIBRARY = of_package("binary")
_NUMBERS = (*FLOATS, mindspore.int32, mindspore.int64)
_ALL = (*_NUMBERS, mindspore.bool_)
# These have the numbers of operations.h, and the dtypes that it names.
ARITHMETIC = {
    "maximum": (8, _ALL),
    "minimum": (9, _ALL),
    "add": (10, _NUMBERS),
    "sub": (11, _NUMBERS),
    "mul": (12, _ALL),
    "div": (13, FLOATS),
    "pow": (14, _NUMBERS),
    "real_div": (15, FLOATS),
    "squared_difference": (21, _NUMBERS),
    "div_no_nan": (27, FLOATS),
    "mul_no_nan": (28, _NUMBERS),
}
COMPARISONS = {
    "greater": 0,
    "less": 1,
    "equal": 2,
    "greater_equal": 3,
    "less_equal": 4,
    "not_equal": 5,
    "logical_and": 6,
    "logical_or": 7,
}
MIXED = {"mul_mixed": 12, "div_mixed": 13}
SCALED_SUMS = {"add_ext": 32, "sub_ext": 33}


def _infer(x: Spec, y: Spec, **attributes: Any) -> Spec:
    return broadcast_of(x=x, y=y)


def _infer_mixed(x: Spec, y: Spec, **attributes: Any) -> Spec:
    if x.dtype == y.dtype:
        raise TypeError(f"y must not be {dtype_name(x.dtype)} as x is")
    return broadcast_of(x=x, y=y)._replace(dtype=mindspore.float32)


def _infer_comparison(x: Spec, y: Spec, **attributes: Any) -> Spec:
    return broadcast_of(x=x, y=y)._replace(dtype=mindspore.bool_)


def _infer_scaled_sum(x: Spec, y: Spec, alpha: Spec, **attributes: Any) -> Spec:
    if x.dtype not in FLOATS and alpha.dtype != mindspore.int64:
        raise TypeError(f"alpha must be int64 beside {dtype_name(x.dtype)}, got {dtype_name(alpha.dtype)}")
    return broadcast_of(x=x, y=y)


@Operators
def operators(function: str) -> Operator:
    if function in SCALED_SUMS:
        op, alpha = SCALED_SUMS[function], "alpha(dtype=float32|int64)"
        entry = _LIBRARY.BinaryExtForward
        return custom_op(entry, f"x, y, {alpha} -> z", infer=_infer_scaled_sum, dtypes=_NUMBERS, op=op)
    if function in COMPARISONS:
        entry, op = _LIBRARY.CompareForward, COMPARISONS[function]
        return custom_op(entry, "x, y -> z", infer=_infer_comparison, dtypes=_ALL, op=op)
    if function in MIXED:
        entry, op, halves = _LIBRARY.BinaryMixedForward, MIXED[function], (mindspore.float16, mindspore.float32)
        return custom_op(entry, "x, y(*R, dtype=float16|float32) -> z", infer=_infer_mixed, dtypes=halves, op=op)
    op, dtypes = ARITHMETIC[function]
    return custom_op(_LIBRARY.BinaryForward, "x, y -> z", infer=_infer, dtypes=dtypes, op=op)
