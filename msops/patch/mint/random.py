"""Draws random numbers by the seed and the offset of MindSpore's generator; see msops/operators/random.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, ops

from msops.core.spec import FLOATS
from msops.operators import random
from msops.shared.generator import initial_seed

from .in_place import copy_into, store

if TYPE_CHECKING:
    from collections.abc import Callable

_SMALLEST = mindspore.float16  # the tensor that gives a shape has this dtype where any will do
_TINY = 1e-30  # keeps 0 / 0 away
# The last whole number up to which a dtype holds all.
_LAST = {
    mindspore.float16: 2**11,
    mindspore.float32: 2**24,
    mindspore.float64: 2**53,
    mindspore.bool_: 1,
    mindspore.uint8: 2**8 - 1,
    mindspore.int8: 2**7 - 1,
    mindspore.int16: 2**15 - 1,
    mindspore.int32: 2**31 - 1,
    mindspore.int64: 2**63 - 2,
}


def _source(seed: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both as tensors of rank 0; in graph mode, MindSpore's generator gives them rank 1."""
    return (seed, offset) if seed.ndim == offset.ndim == 0 else (seed.reshape(()), offset.reshape(()))


def _uniform(shape: Any, dtype: mindspore.Type, seed: Tensor, offset: Tensor) -> Tensor:
    own = dtype if dtype in FLOATS else mindspore.float32
    return ops.cast(random.uniform(ops.zeros(shape, own), *_source(seed, offset)), dtype)


def _normal(shape: Any, dtype: mindspore.Type, seed: Tensor, offset: Tensor) -> Tensor:
    own = dtype if dtype in FLOATS else mindspore.float32
    return ops.cast(random.normal(ops.zeros(shape, own), *_source(seed, offset)), dtype)


def _exponential(shape: Any, dtype: mindspore.Type, seed: Tensor, offset: Tensor) -> Tensor:
    return -ops.log(1 - _uniform(shape, dtype, seed, offset))


def _integers(shape: Any, low: Any, high: Any, seed: Tensor, offset: Tensor) -> Tensor:
    ends = [ops.cast(end, mindspore.int64) for end in (low, high)]
    return random.integers(ops.zeros(shape, _SMALLEST), *_source(seed, offset), *ends)


def _of_shape(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def drawn(shape: tuple[int, ...], seed: Tensor, offset: Tensor, dtype: Any = None, device: Any = None) -> Tensor:
        return draw(shape, mindspore.float32 if dtype is None else dtype, seed, offset)

    return drawn


def _like(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def drawn(x: Tensor, seed: Tensor, offset: Tensor, dtype: Any = None, device: Any = None) -> Tensor:
        return draw(x.shape, x.dtype if dtype is None else dtype, seed, offset)

    return drawn


rand, randn = _of_shape(_uniform), _of_shape(_normal)
rand_like, randn_like = _like(_uniform), _like(_normal)


def randint(
    low: int, high: int, shape: tuple[int, ...], seed: Tensor, offset: Tensor, dtype: Any = None, device: Any = None
) -> Tensor:
    if low >= high:
        raise ValueError(f"mint.randint: low must be less than high, got {low} and {high}")
    found = _integers(shape, low, high, seed, offset)
    return found if dtype is None else ops.cast(found, dtype)


def randint_like(
    x: Tensor, low: int, high: int, seed: Tensor, offset: Tensor, dtype: Any = None, device: Any = None
) -> Tensor:
    return randint(low, high, x.shape, seed, offset, x.dtype if dtype is None else dtype)


def randperm(n: int, seed: Tensor, offset: Tensor, dtype: mindspore.Type = mindspore.int64) -> Tensor:
    return ops.cast(random.permutation(ops.zeros((n,), _SMALLEST), *_source(seed, offset)), dtype)


def normal_of_tensor(mean: Tensor, std: Any, seed: Tensor, offset: Tensor) -> Tensor:
    shape = (mean + std).shape
    return mean + std * _normal(shape, mean.dtype, seed, offset)


def normal_of_deviation(mean: float, std: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    return ops.add(std * _normal(std.shape, std.dtype, seed, offset), mean)


def normal_of_size(mean: float, std: float, size: tuple[int, ...], seed: Tensor, offset: Tensor) -> Tensor:
    return ops.add(_normal(size, mindspore.float32, seed, offset) * std, mean)


def bernoulli(input: Tensor, seed: Tensor, offset: Tensor) -> Tensor:  # noqa: A002
    hits = _uniform(input.shape, input.dtype, seed, offset) < input
    return ops.stop_gradient(ops.cast(hits, input.dtype))


def multinomial(
    input: Tensor,  # noqa: A002
    num_samples: int,
    replacement: bool,
    seed: Tensor,
    offset: Tensor,
) -> Tensor:
    weights = ops.cast(input, mindspore.float32)
    if replacement:
        sums = ops.cumsum(weights, -1)
        points = _uniform((*input.shape[:-1], num_samples), mindspore.float32, seed, offset) * sums[..., -1:]
        found = ops.sum(ops.cast(sums.expand_dims(-2) <= points.expand_dims(-1), mindspore.int32), -1)
        return ops.cast(ops.minimum(found, input.shape[-1] - 1), mindspore.int64)
    if num_samples > input.shape[-1]:
        raise ValueError(
            f"mint.multinomial: without replacement, num_samples must be at most {input.shape[-1]}, got {num_samples}"
        )
    # The order of the arrivals of independent exponential times with these rates.
    times = _exponential(input.shape, mindspore.float32, seed, offset)
    return ops.cast(ops.topk(weights / (times + _TINY), num_samples)[1], mindspore.int64)


def _dropped(x: Tensor, p: float, seed: Tensor, offset: Tensor) -> Tensor:
    """Whole numbers give float32. So do, in graph mode, floats that come from a Morph whose infer_dtype calls them
    whole numbers, as that of mindformers' embedding does."""
    floats = x if x.dtype in FLOATS else ops.cast(x, mindspore.float32)
    return random.dropout(floats, p, *_source(seed, offset))


def dropout(x: Tensor, p: float, training: bool, inplace: bool, seed: Tensor, offset: Tensor) -> Tensor:
    if not training:
        return x
    y = _dropped(ops.deepcopy(x) if inplace else x, p, seed, offset)
    return copy_into(x, y) if inplace else y


def dropout_and_mask(input: Tensor, p: float, seed: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
    y = _dropped(input, p, seed, offset)
    kept = _dropped(ops.ones_like(input), p, seed, offset) != 0
    return y, ops.cast(kept, mindspore.uint8)


def dropout_of_channels(x: Tensor, p: float, training: bool, inplace: bool, seed: Tensor, offset: Tensor) -> Tensor:
    if not training:
        return x
    channels = (*x.shape[:2], *[1] * (x.ndim - 2))
    kept = _dropped(ops.ones(channels, x.dtype), p, seed, offset)
    return copy_into(x, ops.deepcopy(x) * kept) if inplace else x * kept


def uniform_between(tensor: Tensor, a: float, b: float, seed: Tensor, offset: Tensor) -> Tensor:
    return ops.add(_uniform(tensor.shape, tensor.dtype, seed, offset) * (b - a), a)


def fill_uniform(input: Tensor, from_: Any, to: Any, seed: Tensor, offset: Tensor) -> Tensor:  # noqa: A002
    return store(input, ops.cast(uniform_between(input, from_, to, seed, offset), input.dtype))


def fill_normal(input: Tensor, mean: Any, std: Any, seed: Tensor, offset: Tensor) -> Tensor:  # noqa: A002
    return store(input, ops.cast(mean + std * _normal(input.shape, input.dtype, seed, offset), input.dtype))


def fill_integers(input: Tensor, from_: Any = 0, to: Any = None, seed: Any = 0, offset: Any = 0) -> Tensor:  # noqa: A002
    if to is None:
        to = _LAST[input.dtype] + 1
    return store(input, ops.cast(_integers(input.shape, from_, to, seed, offset), input.dtype))


def fill_exponential(input: Tensor, lambd: float, seed: Tensor, offset: Tensor) -> Tensor:  # noqa: A002
    times = _exponential(input.shape, input.dtype, seed, offset) / lambd
    return store(input, ops.cast(times, input.dtype))


def fill_bernoulli(input: Tensor, p: Any, seed: Tensor, offset: Tensor) -> Tensor:  # noqa: A002
    hits = _uniform(input.shape, mindspore.float32, seed, offset) < p
    return store(input, ops.cast(hits, input.dtype))


def sharing_seed(manual_seed: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """Makes the method that sets a generator's seed. MindSpore's own writes the seed where PyNative mode reads it, and
    leaves a random one where graph mode does."""

    def method(self: Any, seed: int) -> Any:
        manual_seed(self, seed)
        share_seed(self)
        return self

    return method


def share_seed(generator: Any) -> None:
    """Lets graph mode draw by the seed that a generator has in PyNative mode."""
    generator._seed.set_data(Tensor(initial_seed(generator), mindspore.int64))
