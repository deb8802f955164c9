"""Converts parameters of checkpoints."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import mindspore
import numpy as np
from mindspore import Parameter, Tensor

if TYPE_CHECKING:
    from typing import Any

_MOST = float(np.finfo(np.float16).max)
_LOSS = 2.0**-16  # of the largest number: less than bfloat16 rounds a number of that size by, 2^-9


def convert_bfloat16(parameters: dict[str, Any]) -> dict[str, Any]:
    """Converts the parameters of a checkpoint that are bfloat16, for which MindSpore has no kernels on GPUs.

    Each becomes float16 where its numbers fit, and float32 where not: where one is beyond 65504, or differs from
    float16's nearest number by more than :math:`2^{-16}` of the largest magnitude of that parameter, as in those of
    second moments. Numbers from :math:`2^{-17}` to 65504 stay exact. The values are read on the host, so that this
    works on a GPU, too.

    A network of float32 needs none of it: `mindspore.load_param_into_net` converts bfloat16 to the network's dtypes.
    In a network of float16 it makes infinity of numbers beyond 65504, without a word.

    Args:
        parameters (dict): Names and Parameters, as `mindspore.load_checkpoint` returns them.

    Returns:
        dict, with the same names. Parameters of other dtypes are the same objects.

    Raises:
        TypeError: If `parameters` is not a dict.

    Warns:
        UserWarning: If parameters become float32. It names them.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import Parameter, Tensor
        >>> weight = Parameter(Tensor([1.5, -2.0], mindspore.bfloat16), name="weight")
        >>> print(msops.convert_bfloat16({"weight": weight})["weight"].dtype)
        Float16
    """
    if not isinstance(parameters, dict):
        raise TypeError(f"convert_bfloat16: parameters must be a dict, got {type(parameters).__name__}")
    narrow = getattr(mindspore, "bfloat16", None)  # MindSpore before 2.2 has none
    found = {name: _converted(each) if each.dtype == narrow else each for name, each in parameters.items()}
    wide = [name for name, each in found.items() if each is not parameters[name] and each.dtype == mindspore.float32]
    if wide:
        warnings.warn(
            f"convert_bfloat16: these do not fit into float16, and are float32: {', '.join(wide)}", stacklevel=2
        )
    return found


def _converted(parameter: Parameter) -> Parameter:
    values = parameter.asnumpy().astype(np.float32)
    dtype = np.float16 if _fits(values) else np.float32
    return Parameter(Tensor(values.astype(dtype)), name=parameter.name, requires_grad=parameter.requires_grad)


def _fits(values: np.ndarray[Any, Any]) -> bool:
    """Tells whether float16 holds numbers, besides those that are infinite or none."""
    finite = values[np.isfinite(values)]
    largest = np.abs(finite).max(initial=0.0)
    return bool(largest <= _MOST and np.abs(finite - finite.astype(np.float16)).max(initial=0.0) <= _LOSS * largest)
