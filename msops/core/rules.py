"""Provides parts for the `infer` of :func:`msops.custom_op`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .spec import Spec, accumulator

if TYPE_CHECKING:
    import mindspore


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


def scratch(dtype: mindspore.Type, *shape: int) -> Spec:
    """Returns the Spec of scratch for sums of elements of `dtype`: float64 if `dtype` is float64, else float32.

    Args:
        dtype (mindspore.dtype): The dtype of the elements.
        *shape (int): The sizes of the scratch.

    Returns:
        Spec.

    Examples:
        >>> import mindspore, msops
        >>> print(msops.scratch(mindspore.float16, 8, 5).dtype)
        Float32
    """
    return Spec(shape, accumulator(dtype))


def row_parts(rows: int, columns: int) -> int:
    """Returns how many rows of scratch `for_rows_with_sums` (rows_sums.h) needs for each of its sums.

    They are as many as fill a large GPU, and take no more than 8 MB of float32.

    Args:
        rows (int): The rows over which columns are added up.
        columns (int): The columns.

    Returns:
        int, at least 1.

    Examples:
        >>> import msops
        >>> print(msops.row_parts(32768, 4096), msops.row_parts(10, 4096))
        528 10
    """
    return max(1, min(rows, 33 * 2**16 // max(1, columns)))


def sums_of_rows(x: Spec, columns: int, sums: int = 1) -> Spec:
    """Returns the Spec of scratch in which `for_rows_with_sums` adds up `sums` numbers for each column of rows of x."""
    return scratch(x.dtype, row_parts(x.size // max(1, columns), columns), sums * columns)
