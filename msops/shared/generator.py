"""Draws from MindSpore's generator of random numbers.

In PyNative mode, all seeds that the generator hands out are the same memory, which `mindspore.manual_seed` writes:
where a gradient has yet to use a seed, it would use another one, and where a GPU has taken the tensor, MindSpore has
freed that memory, so that others lose what they have there. So each draw gets a copy.
"""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Tensor

from msops.core.compiled import compiling

STEP = Tensor(12, mindspore.int64)  # by which MindSpore's own operators move on in the generator
_STEP, _INITIAL_SEED = 0, 5  # commands of the generator


def step(self: Any, step: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the seed and the offset of a generator, whose offset grows."""
    seed, offset, _ = self._generator(_STEP, (self._seed, self._offset, step))
    return seed if compiling() else _copy(seed), offset


def initial_seed(generator: Any) -> int:
    """Returns the seed that a generator has in PyNative mode."""
    return int(generator._generator(_INITIAL_SEED, (generator._seed, generator._offset))[0].asnumpy())


def _copy(number: Tensor) -> Tensor:
    return Tensor(number.asnumpy().copy())
