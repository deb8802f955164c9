"""Computes functions of each element. Whole numbers become float32 where the result is not whole."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, nn, ops
from mindspore.ops import operations

from msops.core.compiled import constant, is_on_gpu, once
from msops.core.spec import FLOATS
from msops.operators.addcmul import addcmul as _addcmul

if TYPE_CHECKING:
    from collections.abc import Callable

WHOLE = (
    *(mindspore.bool_, mindspore.uint8, mindspore.int8, mindspore.int16, mindspore.int32, mindspore.int64),
    *(mindspore.uint16, mindspore.uint32, mindspore.uint64),
)

# MindSpore looks up a dict in Python, which `mindspore.vmap` refuses: what runs under it asks FLOATS.
GREATEST = {
    mindspore.float16: 65504.0,
    mindspore.float32: 3.4028234663852886e38,
    mindspore.float64: 1.7976931348623157e308,
}


def floating(x: Tensor) -> Tensor:
    return ops.cast(x, mindspore.float32) if x.dtype in WHOLE else x


def _of_floating(operator: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    def function(input: Any) -> Tensor:  # noqa: A002
        return operator(floating(input))

    return function


acos, acosh = _of_floating(operations.ACos()), _of_floating(operations.Acosh())
asin, asinh = _of_floating(operations.Asin()), _of_floating(operations.Asinh())
atan, atanh = _of_floating(operations.Atan()), _of_floating(operations.Atanh())
cos, cosh = _of_floating(operations.Cos()), _of_floating(operations.Cosh())
sin, sinh = _of_floating(operations.Sin()), _of_floating(operations.Sinh())
tan = _of_floating(operations.Tan())
erf, erfc, erfinv = _of_floating(operations.Erf()), _of_floating(operations.Erfc()), _of_floating(operations.Erfinv())
exp, log = _of_floating(operations.Exp()), _of_floating(operations.Log())
rsqrt, sigmoid, sqrt = (
    _of_floating(operations.Rsqrt()),
    _of_floating(operations.Sigmoid()),
    _of_floating(operations.Sqrt()),
)


_expm1, _log1p, _tanh = operations.Expm1(), operations.Log1p(), operations.Tanh()


def expm1(input: Any) -> Tensor:  # noqa: A002
    """Near 0, MindSpore's kernel for the CPU loses all digits, but those of exp and sinh do not."""
    x = floating(input)
    if is_on_gpu() or x.dtype not in FLOATS:
        return _expm1(x)
    is_small = ops.abs(x) < 1
    half = ops.where(is_small, x, ops.zeros_like(x)) * 0.5
    return ops.where(is_small, exp(half) * sinh(half) * 2, exp(x) - 1)


def log1p(input: Any) -> Tensor:  # noqa: A002
    """Near 0, MindSpore's kernel for the CPU loses all digits, but that of atanh does not."""
    x = floating(input)
    if is_on_gpu() or x.dtype not in FLOATS:
        return _log1p(x)
    is_small = ops.abs(x) < 0.5
    small = ops.where(is_small, x, ops.zeros_like(x))
    return ops.where(is_small, atanh(small / (small + 2)) * 2, log(ops.where(is_small, ops.ones_like(x), x + 1)))


def tanh(input: Any) -> Tensor:  # noqa: A002
    """Beyond 5, MindSpore's kernel of float32 for the CPU is 1."""
    x = floating(input)
    if is_on_gpu() or x.dtype != mindspore.float32:
        return _tanh(x)
    is_small = ops.abs(x) < 10
    small = ops.where(is_small, x, ops.zeros_like(x))
    one = ops.where(x > 0, ops.ones_like(x), ops.where(x < 0, -ops.ones_like(x), x))  # or NaN
    return ops.where(is_small, sinh(small) / cosh(small), ops.stop_gradient(one))


def nan_to_num(
    input: Tensor,  # noqa: A002
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Tensor:
    """Replaces NaN, by default by 0, and infinities, by default by the dtype's greatest numbers. MindSpore's kernel
    does not start on GPUs in PyNative mode."""
    if input.dtype in WHOLE:
        return input
    in_place_of_nan = _number(0.0 if nan is None else nan, input.dtype)  # it comes first, as it checks the dtype
    x = ops.where(input != input, in_place_of_nan, input)  # noqa: PLR0124 (NaN)
    x = ops.where(input == math.inf, _number(posinf, input.dtype), x)
    return ops.where(input == -math.inf, _number(neginf, input.dtype, -1), x)


@ops.constexpr
def _number(value: float | None, dtype: mindspore.Type, sign: int = 1) -> Tensor:
    """Returns a number or, for None, the greatest one with this sign. Graph mode itself would make it float32."""
    if dtype not in GREATEST:
        raise TypeError(f"mint.nan_to_num: the input must be whole, float16, float32 or float64, got {dtype}")
    return Tensor(sign * GREATEST[dtype] if value is None else value, dtype)


def xlogy(input: Any, other: Any) -> Tensor:  # noqa: A002
    """Returns x log(y), and 0 where x is 0, unless y is NaN. MindSpore's gradient has no kernel for GPUs."""
    x = floating(input) if isinstance(input, Tensor) else ops.full_like(floating(other), input)
    y = floating(other) if isinstance(other, Tensor) else ops.full_like(floating(input), other)
    is_zero = ops.logical_and(x == 0, ops.logical_or(y <= 0, y == math.inf))
    return ops.mul(x, ops.log(ops.where(is_zero, ops.ones_like(y), y)))


def atan2(input: Tensor, other: Tensor) -> Tensor:  # noqa: A002
    return ops.atan2(floating(input), floating(other))


def log2(input: Any) -> Any:  # noqa: A002
    x = floating(input)
    return ops.mul(log(x), number(1 / math.log(2), x.dtype))


def log10(input: Any) -> Any:  # noqa: A002
    x = floating(input)
    return ops.mul(log(x), number(1 / math.log(10), x.dtype))


def exp2(input: Tensor) -> Tensor:  # noqa: A002
    x = floating(input)
    return exp(ops.mul(x, number(math.log(2), x.dtype)))


@once
def number(value: float, dtype: mindspore.Type) -> Any:
    """Returns a number beside a Tensor of a dtype. MindSpore rounds a number of Python to float32 first."""
    return constant(value, dtype) if dtype in GREATEST else value


def logaddexp(input: Tensor, other: Tensor) -> Tensor:  # noqa: A002
    return ops.maximum(input, other) + log1p(exp(-ops.abs(_difference(input, other))))


def logaddexp2(input: Tensor, other: Tensor) -> Tensor:  # noqa: A002
    return ops.maximum(input, other) + log2(exp2(-ops.abs(_difference(input, other))) + 1)


def _difference(x: Tensor, y: Tensor) -> Tensor:
    return ops.where(x == y, ops.zeros_like(x), x - y)  # infinity - infinity is NaN


def addcdiv(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:  # noqa: A002
    return input + (tensor1 / tensor2) * value


def addcmul(input: Tensor, tensor1: Tensor, tensor2: Tensor, value: float = 1) -> Tensor:  # noqa: A002
    if input.dtype in FLOATS and tensor1.dtype == tensor2.dtype == input.dtype and isinstance(value, (int, float)):
        return _addcmul(input, tensor1, tensor2, value)
    return input + (tensor1 * tensor2) * value


def frac(input: Tensor) -> Tensor:  # noqa: A002
    return input - ops.trunc(input)


def round(input: Tensor, decimals: int = 0) -> Tensor:  # noqa: A001, A002
    if decimals == 0 or input.dtype in WHOLE:
        return _round(input)
    scale = 10.0**decimals
    return _round(input * scale) / scale


_round = operations.Round()


def bitwise_and(input: Tensor, other: Any) -> Tensor:  # noqa: A002
    return ops.bitwise_and(*_of_one_dtype(input, other))


def bitwise_or(input: Tensor, other: Any) -> Tensor:  # noqa: A002
    return ops.bitwise_or(*_of_one_dtype(input, other))


def bitwise_xor(input: Tensor, other: Any) -> Tensor:  # noqa: A002
    return ops.bitwise_xor(*_of_one_dtype(input, other))


def _of_one_dtype(x: Tensor, y: Any) -> tuple[Tensor, Tensor]:
    return x, y if isinstance(y, Tensor) else ops.full((), y, dtype=x.dtype)


def bitwise_not(input: Tensor) -> Tensor:  # noqa: A002
    return ops.logical_not(input) if input.dtype == mindspore.bool_ else -input - 1


def logical_xor(input: Tensor, other: Tensor) -> Tensor:  # noqa: A002
    return ops.not_equal(ops.cast(input, mindspore.bool_), ops.cast(other, mindspore.bool_))


def floor_divide(input: Tensor, other: Any) -> Tensor:  # noqa: A002
    return ops.floor_div(input, other)


def isfinite(input: Tensor) -> Tensor:  # noqa: A002
    return ops.full(input.shape, True, dtype=mindspore.bool_) if input.dtype in WHOLE else _isfinite(input)


def isinf(input: Tensor) -> Tensor:  # noqa: A002
    return ops.full(input.shape, False, dtype=mindspore.bool_) if input.dtype in WHOLE else _isinf(input)


_isfinite, _isinf = operations.IsFinite(), operations.IsInf()


def isneginf(input: Tensor) -> Tensor:  # noqa: A002
    if input.dtype in WHOLE:
        return ops.full(input.shape, False, dtype=mindspore.bool_)
    return ops.equal(input, -math.inf)


def equal(input: Tensor, other: Tensor) -> Tensor:  # noqa: A002
    """Tells by one number whether two tensors have equal shapes and elements."""
    return (input == other).all() if input.shape == other.shape else ops.full((), False, dtype=mindspore.bool_)


def real(input: Tensor) -> Tensor:  # noqa: A002
    return _real(input) if input.dtype in COMPLEX else input


def imag(input: Tensor) -> Tensor:  # noqa: A002
    if input.dtype not in COMPLEX:
        raise TypeError(f"mint.imag: the input must be complex, got {input.dtype}")
    return _imag(input)


_real, _imag = operations.Real(), operations.Imag()
COMPLEX = mindspore.complex64, mindspore.complex128


def fmod(input: Tensor, other: Any) -> Tensor:  # noqa: A002
    """Mod has a wrong gradient, and TruncateMod lacks int64; on a GPU it also loses large quotients and infinity."""
    is_tensor = isinstance(other, Tensor)
    is_float = other.dtype in FLOATS if is_tensor else type(other) is float
    if input.dtype not in FLOATS and not is_float:
        return _mod(input, other)
    if not is_on_gpu():
        return _truncate_mod(input, other)
    if not is_tensor:
        other = ops.full((), other, dtype=input.dtype if input.dtype in FLOATS else mindspore.float32)
    if input.shape != other.shape or input.dtype != other.dtype:
        like = ops.stop_gradient(_mod(input, other))
        input = ops.broadcast_to(ops.cast(input, like.dtype), like.shape)  # noqa: A001
        other = ops.broadcast_to(ops.cast(other, like.dtype), like.shape)
    return _exact_mod(input, other)


class ExactMod(nn.Cell):
    """Mod with its gradient."""

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        return _mod(x, y)

    def bprop(self, x: Tensor, y: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        return dout, ops.neg(dout * ops.trunc(x / y))


_exact_mod = ExactMod()
_mod, _truncate_mod = operations.Mod(), operations.TruncateMod()
