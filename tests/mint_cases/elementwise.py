"""Programs that compute functions of each element."""

import numpy as np
import scipy.special
from mindspore import mint, ops

from . import case

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((2, 3, 4))
SMALL = RNG.uniform(-0.9, 0.9, (3, 4))
LARGE = RNG.uniform(1.1, 3, (3, 4))
WHOLE, OTHER = RNG.integers(1, 30, (2, 3, 4))
BOTH = ("float16", "float32")


@case(SMALL, reference=lambda x: (np.arccos(x), np.arcsin(x), np.arctan(x), np.arctanh(x), np.arcsinh(x)), dtypes=BOTH)
def inverse_functions(x):
    return mint.acos(x), mint.arcsin(x), mint.atan(x), mint.arctanh(x), mint.asinh(x)


@case(LARGE, reference=lambda x: (np.arccosh(x), np.log2(x), np.log10(x), np.log1p(x), 1 / np.sqrt(x)), dtypes=BOTH)
def functions_of_large_numbers(x):
    return mint.acosh(x), mint.log2(x), mint.log10(x), mint.log1p(x), mint.rsqrt(x)


@case(SMALL, reference=lambda x: (scipy.special.erf(x), scipy.special.erfc(x), scipy.special.erfinv(x)))
def error_functions(x):
    return mint.erf(x), mint.erfc(x), mint.erfinv(x)


@case(SMALL, reference=lambda x: (np.exp2(x), np.expm1(x), np.sinc(x), np.sinh(x), np.cosh(x), np.tan(x)))
def exponentials(x):
    return mint.exp2(x), mint.expm1(x), mint.sinc(x), mint.sinh(x), mint.cosh(x), mint.tan(x)


@case(
    WHOLE,
    reference=lambda x: tuple(f(np.float64(x)) for f in (np.cos, np.sin, np.exp2, np.log, np.sqrt, np.tanh, np.arctan)),
)
def functions_of_whole_numbers(x):
    return mint.cos(x), mint.sin(x), mint.exp2(x), mint.log(x), mint.sqrt(x), mint.tanh(x), mint.atan(x)


@case(X, Y, reference=lambda x, y: (np.arctan2(x, y), np.logaddexp(x, y), np.logaddexp2(x, y)))
def functions_of_two(x, y):
    return mint.atan2(x, y), mint.logaddexp(x, y), mint.logaddexp2(x, y)


@case(X, Y, LARGE, reference=lambda x, y, z: (x + y / z, x + 0.5 * (y / z), x + 0.3 * (y - x)))
def combinations(x, y, z):
    return mint.addcdiv(x, y, z), mint.addcdiv(x, y, z, value=0.5), mint.lerp(x, y, 0.3)


@case(X, reference=lambda x: (x - np.trunc(x), np.round(x), np.round(x, 2)), differentiable=False)
def roundings(x):
    return mint.frac(x), mint.round(x), mint.round(x, decimals=2)


@case(WHOLE, OTHER, reference=lambda x, y: (x & y, x | y, x ^ y, ~x, x & 6, x | 6, x ^ 6))
def bits(x, y):
    single = mint.bitwise_and(x, 6), mint.bitwise_or(x, 6), mint.bitwise_xor(x, 6)
    return mint.bitwise_and(x, y), mint.bitwise_or(x, y), mint.bitwise_xor(x, y), mint.bitwise_not(x), *single


@case(X > 0, Y > 0, reference=lambda x, y: (x ^ y, ~x))
def truths(x, y):
    return mint.logical_xor(x, y), mint.bitwise_not(x)


@case(LARGE * 2.7, LARGE[::-1].copy(), reference=lambda x, y: (np.fmod(x, y), np.remainder(x, y)), differentiable=False)
def remainders(x, y):
    return mint.fmod(x, y), mint.remainder(x, y)


@case(WHOLE - 15, OTHER, reference=lambda x, y: (np.fmod(x, y), np.fmod(x, 7)))
def remainders_of_whole_numbers(x, y):
    return mint.fmod(x, y), mint.fmod(x, 7)


@case(X * 1000, reference=lambda x: (np.fmod(x, np.float32(0.1)), np.fmod(x, np.inf)), differentiable=False)
def exact_remainders(x):
    return mint.fmod(x, 0.1), mint.fmod(x, float("inf"))


SIGNED, SPECIAL = np.arange(-3, 5), np.array([1, np.inf, -np.inf, np.nan, -2.5])


@case(
    SIGNED,
    SPECIAL,
    reference=lambda n, x: (np.isfinite(n), np.isfinite(x), np.isneginf(n), np.isneginf(x), n // 2),
    differentiable=False,
)
def classes(n, x):
    return mint.isfinite(n), mint.isfinite(x), mint.isneginf(n), mint.isneginf(x), mint.floor_divide(n, 2)


@case(X, reference=lambda x: (x, 2 * x), differentiable=False)
def parts_of_complex_numbers(x):
    pairs = ops.Complex()(x, x * 2)
    return mint.real(pairs), mint.imag(pairs)


@case(X, reference=lambda x: (np.diff(x), np.diff(x, 2, 0)))
def differences(x):
    return mint.diff(x), mint.diff(x, 2, 0)
