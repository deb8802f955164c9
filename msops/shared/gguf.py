"""The kinds of blocks in GGUF files."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msops.core import settings
from msops.core.spec import FLOATS

if TYPE_CHECKING:
    import mindspore

    from msops.core.spec import Spec


class Kind(NamedTuple):
    """How many bytes a block has, and how many numbers."""

    size: int
    numbers: int


# In the order of `Formats` in aot_kernels/shared/gguf/formats.h.
KINDS = {
    "Q4_0": Kind(18, 32),
    "Q4_1": Kind(20, 32),
    "Q8_0": Kind(34, 32),
    "Q4_K": Kind(144, 256),
    "Q5_K": Kind(176, 256),
    "Q6_K": Kind(210, 256),
}
_NAMES = tuple(KINDS)


def kind_of(operator: str, kind: str) -> int:
    """Requires the name of a kind, and returns its attribute."""
    return settings.one_of(operator, "kind", kind, _NAMES)


def dtype_of(operator: str, dtype: mindspore.Type) -> int:
    """Requires a floating dtype, and returns its place in FLOATS as an attribute."""
    if dtype not in FLOATS:
        raise TypeError(f"{operator}: dtype must be float16, float32 or float64, got {dtype}")
    return FLOATS.index(dtype)


def columns_of(blocks: Spec, kind: int) -> int:
    """Returns how many numbers a row has, which must be whole blocks."""
    name = _NAMES[kind]
    size, of = blocks.shape[-1], KINDS[name]
    if size % of.size:
        raise ValueError(f"blocks must have rows of a multiple of {of.size} bytes for {name}, got {size}")
    return size // of.size * of.numbers


def bytes_of(operator: str, name: str, numbers: int, kind: str) -> int:
    """Requires a row of so many numbers to be whole blocks, and returns its bytes."""
    of = KINDS[kind]
    if settings.positive(operator, name, numbers) % of.numbers:
        raise ValueError(f"{operator}: {name} must be a multiple of {of.numbers} for {kind}, got {numbers}")
    return numbers // of.numbers * of.size
