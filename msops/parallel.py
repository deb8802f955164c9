"""Averages gradients over the processes of data parallelism."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from mindspore import Tensor, ops
from mindspore.communication import GlobalComm, get_group_size

if TYPE_CHECKING:
    from collections.abc import Sequence

_LARGE = 2**24  # bytes from which a gradient is sent as it is: a copy into a bucket would cost more than it saves


def average_gradients(gradients: Sequence[Tensor], scale: float = 1.0, bucket_bytes: int = 2**26) -> tuple[Tensor, ...]:
    r"""Averages gradients over all processes, several in one message.

    .. math::
        g_i \mapsto \frac{\text{scale}}{P} \sum_{p=1}^{P} g_i^{(p)}

    where P is the number of processes that `msrun` has started. Small gradients of one dtype are joined to buckets,
    since a message of a few bytes takes as long as one of a megabyte. All buckets are on their way at once, and take as
    much memory as the gradients. Sums are added in the gradients' dtype. All processes must call it with gradients of
    equal shapes and dtypes, in one order.

    It is for PyNative mode, also inside of :func:`msops.cuda_graph`: in graph mode the sums of MindSpore 2.10 on
    several GPUs are wrong. In a program of one process it multiplies by `scale` alone.

    Args:
        gradients (tuple[Tensor]): The gradients, as `mindspore.value_and_grad` returns them.
        scale (float): A factor, such as the reciprocal of a loss scale. Default: ``1.0`` .
        bucket_bytes (int): How many bytes a bucket has at most. Default: 64 MiB.

    Returns:
        tuple[Tensor], of the gradients' shapes and dtypes.

    Raises:
        TypeError: If `gradients` is not a tuple or list of Tensors, or `bucket_bytes` is not an int.
        ValueError: If `bucket_bytes` is less than 1.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import Tensor
        >>> gradients = (Tensor([1.0, 2.0]), Tensor([[3.0]]))
        >>> print([g.shape for g in msops.average_gradients(gradients, scale=0.5)])
        [(2,), (1, 1)]
    """
    if not isinstance(gradients, (tuple, list)) or not all(isinstance(g, Tensor) for g in gradients):
        raise TypeError("average_gradients: gradients must be a tuple or list of Tensors")
    if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool):
        raise TypeError(f"average_gradients: bucket_bytes must be an int, got {type(bucket_bytes).__name__}")
    if bucket_bytes < 1:
        raise ValueError(f"average_gradients: bucket_bytes must be at least 1, got {bucket_bytes}")
    processes = get_group_size() if GlobalComm.INITED else 1
    found: list[Any] = list(gradients)
    if processes > 1:
        buckets = [(bucket, [gradients[i] for i in bucket]) for bucket in _buckets(gradients, bucket_bytes)]
        # All buckets are on their way before the first one is waited for, so that one is joined while another is sent.
        sums = [_all_reduce()(_join(own)) for _, own in buckets]
        for (bucket, own), whole in zip(buckets, sums):
            for i, part in zip(bucket, _divide(whole, own)):
                found[i] = part
    factor = scale / processes
    return tuple(found if factor == 1 else [g * factor for g in found])


def _buckets(gradients: Sequence[Tensor], limit: int) -> list[list[int]]:
    """Returns the places of the gradients that travel together."""
    done: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    for i, gradient in enumerate(gradients):
        size = gradient.nbytes
        if size == 0:
            continue
        if size >= min(_LARGE, limit):
            done.append([i])
            continue
        bucket, used = filling.get(gradient.dtype, ([], 0))
        if bucket and used + size > limit:
            done.append(bucket)
            bucket, used = [], 0
        filling[gradient.dtype] = [*bucket, i], used + size
    return done + [bucket for bucket, _ in filling.values()]


def _join(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else ops.concat([x.reshape(-1) for x in tensors])


def _divide(whole: Tensor, like: list[Tensor]) -> list[Tensor]:
    if len(like) == 1:
        return [whole]
    return [part.reshape(x.shape) for part, x in zip(ops.split(whole, [x.size for x in like]), like)]


@functools.cache
def _all_reduce() -> Any:
    return ops.AllReduce()
