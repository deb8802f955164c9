"""Provides `broadcast`, an `infer` of :func:`msops.custom_op`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .spec import Spec


def broadcast(*inputs: Spec) -> Spec:
    """Returns the Spec of the shape to which all inputs broadcast, by NumPy's rules, and of their dtype.

    It can be the `infer` of :func:`msops.custom_op` for an operator with one output.

    Args:
        *inputs (Spec): Shapes that broadcast; the dtypes are equal.

    Returns:
        Spec.

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
