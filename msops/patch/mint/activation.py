"""Computes activations, functions of each element."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, mint, ops
from mindspore.ops import operations

from msops.core.compiled import compiling
from msops.core.inputs import lacks_rank
from msops.core.spec import FLOATS
from msops.operators.gelu import gelu as of_elements
from msops.operators.silu import silu as linear_sigmoid
from msops.operators.softmax import softmax as of_rows
from msops.patch.replacement import Replacement

from .elementwise import exp, expm1, log1p, number
from .in_place import copy_into

if TYPE_CHECKING:
    from collections.abc import Callable

_relu, _sigmoid = operations.ReLU(), operations.Sigmoid()


def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:  # noqa: A002
    return gelu_of(input, approximate)


def gelu_of(input: Tensor, approximate: str = "none") -> Tensor:  # noqa: A002
    if compiling() and lacks_rank(input.shape):
        return _own_gelu(input, approximate)
    return of_elements(input, approximate)


_own_gelu: Any = getattr(ops, "gelu", None)
_own_prelu = ops.prelu
_own_softmax, _own_silu = ops.function.nn_func.softmax_ext, mint.nn.functional.silu


def softmax(input: Tensor, dim: int | None = None, dtype: mindspore.Type | None = None) -> Tensor:  # noqa: A002
    x = input if dtype is None else ops.cast(input, dtype)
    if compiling() and lacks_rank(x.shape):
        return _own_softmax(x, dim)
    if x.ndim == 0 or x.dtype not in FLOATS:
        return _own_softmax(x, dim)
    if dim is None:
        dim = 0 if x.ndim in (1, 3) else 1
    return of_rows(x, dim)


def silu(input: Tensor, inplace: bool = False) -> Tensor:  # noqa: A002
    if inplace or input.dtype not in FLOATS or (compiling() and lacks_rank(input.shape)):
        return _own_silu(input, inplace)
    return linear_sigmoid(input)


def prelu(input: Tensor, weight: Tensor) -> Tensor:  # noqa: A002
    """Calls MindSpore's, whose kernel for GPUs wants one dtype."""
    return _own_prelu(input, ops.cast(weight, input.dtype).reshape(-1))


class NpuGelu(Replacement):
    """Calls gelu."""

    def __call__(self, input: Tensor, approximate: str = "none") -> Tensor:  # noqa: A002
        return of_elements(input, approximate)


def elu(input: Tensor, alpha: float = 1.0) -> Tensor:  # noqa: A002
    positive = input > 0
    below = expm1(ops.where(positive, ops.zeros_like(input), input))
    return ops.where(positive, input, below if alpha == 1 else ops.mul(below, number(alpha, input.dtype)))


def selu(input: Tensor) -> Any:  # noqa: A002
    scale, alpha = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
    return ops.mul(elu(input, alpha), number(scale, input.dtype))


def mish(input: Tensor) -> Tensor:  # noqa: A002
    """Computes x tanh(log(1 + e^x)) without powers that overflow, as those of MindSpore's kernel do."""
    e = exp(-ops.abs(input))
    above, below = (e * e + e) * 2 + 1, (e + 2) * e
    positive = input > 0
    return input * ops.where(positive, e * 2 + 1, below) / ops.where(positive, above, below + 2)


def hardtanh(input: Tensor, min_val: float = -1, max_val: float = 1) -> Tensor:  # noqa: A002
    """Returns numbers cut to a range, and NaN as it is. The gradient is 0 at both ends."""
    x = ops.where(input <= min_val, ops.full_like(input, min_val), input)
    return ops.where(input >= max_val, ops.full_like(input, max_val), x)


def threshold(input: Tensor, threshold: float, value: float) -> Tensor:  # noqa: A002
    return ops.where(input <= threshold, ops.full_like(input, value), input)


def softshrink(input: Tensor, lambd: float = 0.5) -> Tensor:  # noqa: A002
    """Returns NaN as it is, which MindSpore's kernel takes for 0."""
    moved = ops.where(input > lambd, input - lambd, input + lambd)
    return ops.where(ops.abs(input) <= lambd, ops.zeros_like(input), moved)


def log_sigmoid(input: Tensor) -> tuple[Tensor, None]:  # noqa: A002
    """Returns a pair as the primitive does, whose second part MindSpore keeps for its own gradient."""
    return -softplus(-input), None


def leaky_relu(input: Tensor, negative_slope: float = 0.01) -> Tensor:  # noqa: A002
    return ops.where(input > 0, input, input * negative_slope)


def softplus(input: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:  # noqa: A002
    factor = number(beta, input.dtype)
    x = input if beta == 1 else ops.mul(input, factor)
    is_large = x > threshold
    y = log1p(exp(ops.where(is_large, ops.zeros_like(x), x)))
    return ops.where(is_large, input, y if beta == 1 else ops.div(y, factor))


def glu(input: Tensor, dim: int = -1) -> Tensor:  # noqa: A002
    return glu_of(input, dim)


def glu_of(x: Tensor, axis: int) -> Tensor:
    value, gate = ops.split(x, x.shape[axis] // 2, axis)
    return value * _sigmoid(gate)


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Lets a function write its result into its input. The gradient needs a copy of what was there."""

    def call(input: Tensor, *settings: float) -> Tensor:  # noqa: A002
        return copy_into(input, function(ops.deepcopy(input), *settings))

    return call


def _silu(x: Tensor) -> Tensor:
    return x * _sigmoid(x)


relu_in_place, sigmoid_in_place, silu_in_place = _in_place(_relu), _in_place(_sigmoid), _in_place(_silu)
elu_in_place, hardtanh_in_place, threshold_in_place = _in_place(elu), _in_place(hardtanh), _in_place(threshold)
