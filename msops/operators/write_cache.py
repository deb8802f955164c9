from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
import numpy as np
from mindspore import Parameter, Tensor

from msops.compat import VERSION
from msops.core.compiled import compiling
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package
from msops.core.spec import FLOATS

if TYPE_CHECKING:
    from msops.core.operator import Operator

_NAME = "write_cache"
_LIBRARY = of_package(_NAME)


def write_cache(cache: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    r"""Writes rows of new tokens into a cache of blocks, in place.

    .. math::
        \text{cache}_{\lfloor s_t / S \rfloor,\; s_t \bmod S} = \text{rows}_t

    A row with a negative slot is not written. Of rows with equal slots the last one is written, on both devices. The
    cache stays where it is in memory, and its other rows are not touched. :func:`msops.paged_attention` reads such
    caches.

    In graph mode, what reads the Parameter after this call reads what was written, also if the result is not used. If a
    graph writes the same Parameter again, MindSpore copies it for what reads it in between. In PyNative mode, `cache`
    may be a Tensor that is no Parameter, but no view of another Tensor, such as a part or what `reshape` returns, of
    which MindSpore hands over a copy. The first call with a Tensor or a Parameter tries whether it is one. Nothing has
    a gradient.

    Args:
        cache (Parameter): P blocks of S rows, shape (P, S, ...); float16, float32, float64 or int8.
        rows (Tensor): New rows, shape (T, ...), of the dtype of `cache`.
        slots (Tensor): Where they go, shape (T,); int32 or int64, less than P S. A larger one is an error on the CPU;
            on a GPU such a row is not written.

    Returns:
        Tensor, the cache after it.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, the dtypes differ, or `cache` is no Parameter in
            graph mode.
        ValueError: If an input has another shape, or `cache` is a view of another Tensor in PyNative mode.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> cache = mindspore.Parameter(ops.zeros((2, 3, 1)), requires_grad=False)
        >>> rows = mindspore.Tensor([[1.0], [2.0], [3.0]])
        >>> print(msops.write_cache(cache, rows, mindspore.Tensor([4, -1, 0])).squeeze(2))
        [[3. 0. 0.]
         [0. 1. 0.]]
    """
    if compiling():
        if not isinstance(cache, Parameter):
            raise TypeError("write_cache: cache must be a Parameter in graph mode")
    else:
        _require_own_memory(cache)
    # In graph mode the result must be the Parameter itself, for MindSpore to order all that reads and writes it.
    operators.primitive()(cache, rows, slots)
    return cache


def _require_own_memory(cache: Tensor) -> None:
    """Requires a Tensor that MindSpore hands over as it is. It copies views, and a Tensor does not tell whether it is
    one; so this tries, with the first row of the cache, and puts that back."""
    if not isinstance(cache, Tensor) or len(cache.shape) < 2 or cache.size == 0:
        return
    if isinstance(cache, Parameter) and not hasattr(cache, "is_contiguous"):  # this MindSpore has no views
        return
    if getattr(cache, "_msops_own_memory", None) == _place_of(cache):
        return
    write, first = operators.primitive(), Tensor([0], mindspore.int32)
    own, found = cache[0, :1].asnumpy(), []
    for number in (0, 1):
        write(cache, Tensor(np.full(own.shape, number, own.dtype)), first)
        found.append(cache[0, :1].asnumpy().flat[0])
    write(cache, Tensor(own), first)
    if found != [0, 1]:
        raise _error_of_view(cache)
    cache._msops_own_memory = _place_of(cache)


def _place_of(cache: Tensor) -> int:
    return cache.data_ptr() if VERSION >= (2, 7) else 0


def _error_of_view(cache: Tensor) -> ValueError:
    return ValueError(f"{_NAME}: cache must be no view or part of another Tensor, got one of shape {cache.shape}")


@Operators
def operators() -> Operator:
    """Returns the operator that writes the cache, and gives which rows it wrote."""
    return custom_op(
        _LIBRARY.WriteCacheForward,
        "cache(P, S, *C), rows(T, *C), slots(T, dtype=index) -> written(T, dtype=int32); table(..., dtype=int64)",
        dtypes=(*FLOATS, mindspore.int8),
        writes=1,
    )
