"""Gives each replay random numbers of its own, equal to those of a usual call.

The operators of msops draw from a seed and an offset, by which MindSpore's generator moves on at each draw. Recorded
draws take both from tensors that a replay writes: it asks the generator once, and moves it on by all draws together.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, ops

from msops.shared import generator as generators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Draws = dict[int, tuple[Any, Tensor, Tensor]]


@contextlib.contextmanager
def noted() -> Iterator[Draws]:
    """Notes the generators that are drawn from, each with the last seed and offset that it gave."""
    found: Draws = {}

    def draw(generator: Any, step: Tensor) -> tuple[Tensor, Tensor]:
        seed, offset = generators.draw(generator, step)
        found[id(generator)] = generator, seed, offset
        return seed, offset

    with _in_place_of_draw(draw):
        yield found


@contextlib.contextmanager
def _in_place_of_draw(draw: Callable[[Any, Tensor], tuple[Tensor, Tensor]]) -> Iterator[None]:
    before, generators.State.draw = generators.State.draw, draw
    try:
        yield
    finally:
        generators.State.draw = before


def offset() -> int:
    """Returns the offset of MindSpore's default generator."""
    return int(mindspore.default_generator._offset.asnumpy())  # type: ignore[attr-defined]


class Source:
    """The seeds and offsets of recorded draws.

    Args:
        draws (dict): What `noted` found in a usual call.
        copy (callable): Returns a copy of a tensor in memory of the GPU.
    """

    def __init__(self, draws: Draws, copy: Callable[[Tensor], Tensor]) -> None:
        self._generators = [generator for generator, _, _ in draws.values()]
        self._given = {key: (copy(seed), copy(offset)) for key, (_, seed, offset) in draws.items()}
        self._steps = dict.fromkeys(draws, 0)
        self.tensors = [tensor for pair in self._given.values() for tensor in pair]

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Lets recorded work draw from the tensors."""
        with _in_place_of_draw(self._draw):
            yield

    def _draw(self, generator: Any, step: Tensor) -> tuple[Tensor, Tensor]:
        key = id(generator)
        if key not in self._given:
            raise RuntimeError("the function draws from a generator that it did not draw from before")
        seed, offset = self._given[key]
        done = self._steps[key]
        self._steps[key] += int(step.asnumpy())
        return seed, ops.add(offset, Tensor(done, mindspore.int64)) if done else offset

    def advance(self) -> list[Tensor]:
        """Moves the generators on, and returns what the tensors must hold in this replay."""
        pairs = (
            generators.draw(generator, Tensor(self._steps[id(generator)], mindspore.int64))
            for generator in self._generators
        )
        return [tensor for pair in pairs for tensor in pair]
