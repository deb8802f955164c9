"""Keeps MindSpore from computing gradients of masks that are made of whole numbers.

In PyNative mode MindSpore marks every input of a differentiated function, an attention_mask of int32, too, and all that
is computed from it. So attention would compute a gradient of its mask, which nobody wants.
"""

from __future__ import annotations

import functools
import inspect
from types import FunctionType
from typing import Any

from mindspore import Tensor, ops

from msops.core.compiled import wants_gradient

from .formula import Found, NoFormulaError
from .mint.elementwise import WHOLE

MASKS_OF_CLASSES = "get_extended_attention_mask", "invert_attention_mask", "_update_causal_mask"
MASKS = (
    "_expand_mask",
    "_prepare_4d_attention_mask",
    "_prepare_4d_attention_mask_for_sdpa",
    "_prepare_4d_causal_attention_mask",
    "_prepare_4d_causal_attention_mask_for_sdpa",
    "_prepare_4d_causal_attention_mask_with_cache_position",
)


@functools.cache  # modules share a library's function
def unmarking(own: FunctionType) -> Found:
    """Returns what stands for a function that makes masks: it takes whole numbers as what has no gradient. Graph mode
    compiles the library's function, `__wrapped__`, since a graph leaves out gradients that nobody asks for."""
    if inspect.unwrap(own) is not own or own.__code__.co_freevars:
        raise NoFormulaError("it is wrapped, or reads variables of other functions")
    unmarked = _unmarked  # `make` gets the globals of the library's function, so that it reads none itself

    def make(*inputs: Any, **named: Any) -> Any:
        return own(*(unmarked(each) for each in inputs), **{name: unmarked(each) for name, each in named.items()})

    now: Any = FunctionType(make.__code__, own.__globals__, own.__name__, None, make.__closure__)
    now.__module__, now.__wrapped__ = __name__, own
    return Found(now, "mindspore.ops.stop_gradient", None, set())


def _unmarked(x: Any) -> Any:
    is_marked = isinstance(x, Tensor) and x.dtype in WHOLE and wants_gradient(x)
    return ops.stop_gradient(x) if is_marked else x
