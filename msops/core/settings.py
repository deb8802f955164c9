"""Checks and shows settings and initial values. Every message reads "who: what must be this, got that"."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common.initializer import HeUniform, Initializer, Uniform, initializer

from .spec import FLOATS, Rounded, dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    Init = Tensor | str | Initializer | float
    Numbers = int | Sequence[int]


def whole(value: object) -> bool:
    """Tells whether a value is an int of Python or NumPy, and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def shown(cell: nn.Cell, *names: str) -> str:
    """Returns settings of a Cell as its repr shows them."""
    return ", ".join(f"{name}={getattr(cell, name)}" for name in names)


def integer(operator: str, name: str, value: int) -> int:
    """Requires a whole number, and returns it."""
    if not whole(value):
        raise TypeError(f"{operator}: {name} must be an int, got {type(value).__name__}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{operator}: {name} must fit into 64 bits, got {value}")
    return int(value)


def positive(operator: str, name: str, value: int) -> int:
    """Requires a whole number of at least 1, and returns it."""
    if integer(operator, name, value) < 1:
        raise ValueError(f"{operator}: {name} must be at least 1, got {value}")
    return int(value)


def boolean(operator: str, name: str, value: bool) -> bool:
    """Requires a bool of Python or NumPy, and returns it."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{operator}: {name} must be a bool, got {type(value).__name__}")
    return bool(value)


def number(operator: str, name: str, value: float, least: float = -math.inf) -> Rounded:
    """Requires a finite number of at least `least`, of Python or NumPy, and returns it as an attribute for kernels."""
    if not (whole(value) or isinstance(value, (float, np.floating))):
        raise TypeError(f"{operator}: {name} must be a number, got {type(value).__name__}")
    try:
        found = Rounded(value)
    except OverflowError:  # an int has no limits
        found = Rounded(math.inf if value > 0 else -math.inf)
    if not (math.isfinite(found) and found >= least):
        wanted = "finite" if least == -math.inf else f"finite and at least {least:g}"
        raise ValueError(f"{operator}: {name} must be {wanted}, got {value if math.isfinite(found) else float(found)}")
    return found


def one_of(operator: str, name: str, value: str, choices: Sequence[str]) -> int:
    """Requires a str that is one of `choices`, and returns its position there."""
    if not isinstance(value, str):
        raise TypeError(f"{operator}: {name} must be a str, got {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"{operator}: {name} must be one of {', '.join(choices)}, got {value!r}")
    return choices.index(value)


def numbers(operator: str, name: str, value: Numbers, lengths: tuple[int, ...], least: int) -> tuple[int, ...]:
    """Requires whole numbers in [least, 2^31), as many as one of `lengths` says, and returns them as a tuple.

    A single number is repeated to the first length.
    """
    found: Sequence[Any] = value if isinstance(value, (tuple, list)) else (value,) * lengths[0]
    if not all(map(whole, found)):
        raise TypeError(f"{operator}: {name} must be an int or a tuple of ints, got {value!r} ({type(value).__name__})")
    if len(found) not in lengths:
        raise ValueError(f"{operator}: {name} must have {' or '.join(map(str, lengths))} numbers, got {value!r}")
    if any(not least <= n < 2**31 for n in found):
        raise ValueError(f"{operator}: {name} must be at least {least} and less than 2^31, got {value!r}")
    return tuple(int(n) for n in found)


def parameter(operator: str, name: str, init: Init, shape: tuple[int, ...], dtype: mindspore.Type) -> Parameter:
    """Makes a Parameter. Requires `dtype` to be floating and, if `init` is a Tensor, to be the dtype of `init`."""
    if dtype not in FLOATS:
        raise TypeError(f"{operator}: dtype must be float16, float32 or float64, got {dtype}")
    if isinstance(init, Tensor) and init.dtype != dtype:
        raise TypeError(
            f"{operator}: {name}_init must be {dtype_name(dtype)} as dtype is, got {dtype_name(init.dtype)}"
        )
    try:
        value = initializer(init, shape, dtype)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        got = f"a Tensor of shape {init.shape}" if isinstance(init, Tensor) else repr(init)
        raise kind(
            f"{operator}: {name}_init must be a number, the name of an initializer, an Initializer or a Tensor of "
            f"shape {shape}, got {got}"
        ) from error
    return Parameter(value, name=name)


def weight_and_bias(
    operator: str,
    shape: tuple[int, ...],
    has_bias: bool,
    weight_init: Init | None,
    bias_init: Init | None,
    dtype: mindspore.Type,
) -> tuple[Parameter, Parameter | None]:
    """Makes the Parameters of a layer, which by default begin as those of nn.Dense and nn.Conv2d do. The first axis of
    the weight's shape has the outputs."""
    weight_init = HeUniform(math.sqrt(5)) if weight_init is None else weight_init
    weight = parameter(operator, "weight", weight_init, shape, dtype)
    if not has_bias:
        return weight, None
    bias_init = Uniform(1 / math.sqrt(math.prod(shape[1:]))) if bias_init is None else bias_init
    return weight, parameter(operator, "bias", bias_init, shape[:1], dtype)
