"""Parts for the `infer` of :func:`msops.custom_op`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .spec import Spec, accumulator

if TYPE_CHECKING:
    import mindspore


def broadcast(*inputs: Spec) -> Spec:
    """An `infer` of one output: the shape that all inputs broadcast to, as NumPy does, and their dtype.

    Raises:
        ValueError: If the shapes do not broadcast.

    Examples:
        >>> import mindspore, msops
        >>> column, row = (msops.Spec(shape, mindspore.float32) for shape in ((3, 1), (4,)))
        >>> print(msops.broadcast(column, row).shape)
        (3, 4)
    """
    shape: tuple[int, ...] = ()
    for x in inputs:
        rank = max(len(shape), len(x.shape))
        pairs = list(zip((1,) * (rank - len(shape)) + shape, (1,) * (rank - len(x.shape)) + x.shape))
        if any(a != b and 1 not in (a, b) for a, b in pairs):
            raise ValueError(f"shapes must broadcast, got {' and '.join(str(x.shape) for x in inputs)}")
        shape = tuple(b if a == 1 else a for a, b in pairs)
    return inputs[0]._replace(shape=shape)


def scratch(dtype: mindspore.Type, *shape: int) -> Spec:
    """The Spec of an extra output for sums of elements of `dtype`: float64 beside float64, float32 else.

    Examples:
        >>> import mindspore, msops
        >>> print(msops.scratch(mindspore.float16, 8, 5).dtype)
        Float32
    """
    return Spec(shape, accumulator(dtype))
