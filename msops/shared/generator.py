"""Draws from MindSpore's generator of random numbers.

In PyNative mode, all seeds that the generator hands out are the same memory, which `mindspore.manual_seed` writes:
where a gradient has yet to use a seed, it would use another one, and where a GPU has taken the tensor, MindSpore has
freed that memory, so that others lose what they have there. So each draw gets a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import mindspore
from mindspore import Tensor

from msops.core.compiled import compiling

if TYPE_CHECKING:
    from collections.abc import Callable

STEP = Tensor(12, mindspore.int64)  # by which MindSpore's own operators move on in the generator
_STEP, _INITIAL_SEED = 0, 5  # commands of the generator


class State:
    """What PyNative mode draws by: msops.graphs replaces it while it records."""

    draw: ClassVar[Callable[[Any, Tensor], tuple[Tensor, Tensor]] | None] = None


def step(self: Any, step: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the seed and the offset of a generator, whose offset grows."""
    return _compiled(self, step) if compiling() else _now(self, step)


def draw(generator: Any, step: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what `step` returns in PyNative mode."""
    seed, offset = _compiled(generator, step)
    return Tensor(seed.asnumpy().copy()), offset


def initial_seed(generator: Any) -> int:
    """Returns the seed that a generator has in PyNative mode."""
    return int(generator._generator(_INITIAL_SEED, (generator._seed, generator._offset))[0].asnumpy())


def _compiled(generator: Any, step: Tensor) -> tuple[Tensor, Tensor]:
    seed, offset, _ = generator._generator(_STEP, (generator._seed, generator._offset, step))
    return seed, offset


def _now(generator: Any, step: Tensor) -> tuple[Tensor, Tensor]:
    return (State.draw or draw)(generator, step)
