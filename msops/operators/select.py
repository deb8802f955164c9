"""This operator serves patch_mindspore alone: msops has no public name for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore

from msops.core.factory import custom_op
from msops.core.library import of_package
from msops.core.spec import FLOATS
from msops.shared.broadcast import broadcast_of

if TYPE_CHECKING:
    from mindspore import Tensor

    from msops.core.spec import Spec

_INTEGERS = tuple(getattr(mindspore, f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64))


def select(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Returns x where the condition is true and y elsewhere, with NumPy's broadcasting of all three.

    x and y have one dtype of numbers or bool. With y of one element, this is `masked_fill`.
    """
    return forward(condition, x, y)


def _infer(condition: Spec, x: Spec, y: Spec) -> Spec:
    return broadcast_of(condition=condition, x=x, y=y)._replace(dtype=x.dtype)


forward = custom_op(
    of_package("select").SelectForward,
    "condition(*C, dtype=bool), x, y -> z",
    infer=_infer,
    dtypes=(*FLOATS, *_INTEGERS, mindspore.bool_),
)
