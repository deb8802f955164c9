"""Lets MindSpore's optimizers move all Parameters in a few launches, in PyNative mode.

MindSpore has one operator, and often a cast, for each Parameter. Here a launch moves 72 of them, where they are:
names, states and checkpoints stay MindSpore's. The optimizers' `construct`, which graph mode compiles, stays, too. It
also runs where a step is not the one that MindSpore wrote: subclasses with a `construct` or a `get_lr` of their own,
hooks, gradients that are not dense, Parameters of other dtypes than float32 or that are views of another Tensor,
centralized gradients, and `use_lazy`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops import operations

from msops.compat import VERSION
from msops.core import fast_calls
from msops.core.compiled import compiling, is_on_gpu, records_gradients
from msops.operators import optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Tensors = Sequence[Tensor]
    Step = Callable[[Any, Tensors], bool]

_GRADIENTS = mindspore.float16, mindspore.float32
_METHODS = (
    *("get_lr", "get_weight_decay", "decay_weight", "scale_grad", "gradients_centralization"),
    *("flatten_gradients", "_grad_sparse_indices_deduplicate"),
)
_HOOKS = (
    *("_forward_pre_hook", "_forward_hook", "_backward_pre_hook", "_backward_hook", "_shard_fn", "_recompute_cell"),
    *("requires_grad", "_dynamic_shape_inputs", "mixed_precision_type"),
)
_add = operations.AssignAdd()


def calling(owner: Any, step: Step) -> Callable[[Any], Any]:
    """Makes a function of a class's `__call__` that makes one which takes a step of all Parameters at once. `step`
    returns whether it did. The class's own `__call__` takes the others."""
    construct = owner.construct
    methods = {name: getattr(owner, name, None) for name in _METHODS}

    def make(own: Any) -> Any:
        if VERSION < (2, 7) or own is None:
            return None

        @functools.wraps(own)
        def __call__(self: Any, *arguments: Any, **named: Any) -> Any:  # noqa: N807
            kind = type(self)
            is_written_so = kind.construct is construct and all(
                getattr(kind, name, None) is method for name, method in methods.items()
            )
            if is_written_so and len(arguments) == 1 and not named and runs_now(self) and step(self, arguments[0]):
                return (True,) * len(self.parameters)
            return own(self, *arguments, **named)

        return __call__

    return make


def runs_now(cell: nn.Cell) -> bool:
    """Tells whether a call of a Cell does nothing but run its `construct` in PyNative mode, and launches for all
    Parameters are faster."""
    if not pays(cell):
        return False
    traces = getattr(ops.primitive, "jit_context", None)
    if mindspore.context._context().get_mode() != mindspore.PYNATIVE_MODE or (traces and traces()):
        return False
    return not any(getattr(cell, name, None) for name in _HOOKS) and not records_gradients()


def pays(cell: nn.Cell) -> bool:
    """Tells whether calls of some 300 inputs take less time than a call for each Parameter: on a GPU with the extension
    of fast calls, and on the CPU for optimizers for which MindSpore has no kernel there."""
    if is_on_gpu():
        return fast_calls.state.extension is not None
    return not isinstance(cell, (nn.Adam, nn.AdamWeightDecay, nn.Momentum))


def fits(gradients: Any, *arrays: Tensors) -> bool:
    """Tells whether the kernels take gradients, Parameters and states."""
    parameters = arrays[0]
    if not isinstance(gradients, (tuple, list)) or len(gradients) != len(parameters):
        return False
    for gradient, parameter in zip(gradients, parameters):
        is_dense = isinstance(gradient, Tensor) and gradient.dtype in _GRADIENTS
        if not is_dense or gradient.shape != parameter.shape:
            return False
    return all(
        x.dtype == mindspore.float32 and not x.has_init and x.is_contiguous() and has_own_memory(x)
        for array in arrays
        for x in array
    )


def has_own_memory(x: Tensor) -> bool:
    """Tells whether kernels get a Parameter itself. Without fast calls, MindSpore hands over a copy of a view, such as
    what `set_data` took from `reshape`; on the CPU, `asnumpy` is such a copy, too."""
    is_told = VERSION >= (2, 7) and fast_calls.state.extension is None
    return not is_told or x.asnumpy().ctypes.data == x.data_ptr()


@functools.lru_cache(None)
def number(value: float) -> Tensor:
    """Returns a float32, which stays alive: a recorded CUDA graph may read it."""
    return Tensor(np.float32(value))


def as_number(value: Any) -> Tensor:
    """Returns one number as float32 of rank 0."""
    if not isinstance(value, Tensor):
        return Tensor(np.float32(value))
    value = value if value.dtype == mindspore.float32 else ops.cast(value, mindspore.float32)
    return value if value.shape == () else value.reshape(())


class _Betas(NamedTuple):
    """Numbers of an optimizer that stay, and the objects that they were made from."""

    source: tuple[Any, ...]
    numbers: tuple[Tensor, ...]


_betas: weakref.WeakKeyDictionary[nn.Cell, list[_Betas]] = weakref.WeakKeyDictionary()


def _constants(cell: Any) -> tuple[Tensor, ...]:
    """Returns beta1, beta2, 1 - beta1, 1 - beta2 and epsilon of an optimizer. They are kept as long as it lives, since
    a recorded CUDA graph may read them."""
    source = cell.beta1, cell.beta2, cell.eps
    kept = _betas.setdefault(cell, [])
    for each in kept:
        if all(a is b for a, b in zip(each.source, source)):
            return each.numbers
    beta1, beta2, eps = map(as_number, source)
    rests: Any = (1 - beta1, 1 - beta2)
    kept.append(_Betas(source, (beta1, beta2, *rests, eps)))
    return kept[-1].numbers


def _rates(cell: Any) -> list[Tensor]:
    """Returns the learning rate of each Parameter, the same object for equal schedules."""
    if not cell.is_group_lr:
        return [as_number(cell.get_lr())] * len(cell.parameters)
    found: dict[int, Tensor] = {}
    for rate in cell.learning_rate:
        if id(rate) not in found:
            found[id(rate)] = as_number(rate(cell.global_step) if cell.dynamic_lr else rate)
    return [found[id(rate)] for rate in cell.learning_rate]


def _decays(cell: Any) -> list[Tensor]:
    """Returns the decay of each Parameter, 0 for those that do not decay."""
    none = number(0.0)
    if not cell.exec_weight_decay:
        return [none] * len(cell.parameters)
    if not cell.is_group:
        one = as_number(cell.get_weight_decay())
        return [one if flag else none for flag in cell.decay_flags]
    found: dict[Any, Tensor] = {}
    for given, decay, is_dynamic in zip(cell.group_weight_decay, cell.weight_decay, cell.dynamic_decay_flags):
        if given not in found:
            found[given] = as_number(decay(cell.global_step) if is_dynamic else decay)
    return [found[given] if flag else none for given, flag in zip(cell.group_weight_decay, cell.decay_flags)]


def _is_usual(cell: Any) -> bool:
    """Tells whether nothing but the settings below changes a step."""
    centralizes = cell.is_group and any(cell.grad_centralization_flags)
    return not centralizes and all(cell.optim_filter) and cell.target == mindspore.get_context("device_target")


def _scale(cell: Any) -> Tensor:
    return cell.reciprocal_scale if cell.need_scale else number(1.0)


def move_adam_weight_decay(cell: nn.AdamWeightDecay, gradients: Tensors) -> bool:
    """Takes a step of `nn.AdamWeightDecay`, whose moments are not corrected."""
    arrays = cell.parameters, cell.moments1, cell.moments2
    if not _is_usual(cell) or cell.use_parallel or not fits(gradients, *arrays):
        return False
    beta1, beta2, rest1, rest2, eps = _constants(cell)
    one, rates, decays = number(1.0), _rates(cell), _decays(cell)
    _add(cell.global_step, cell.global_step_increase_tensor)
    numbers = [(rate, beta1, beta2, rest1, rest2, eps, decay, one, one, one) for rate, decay in zip(rates, decays)]
    optimizer.move(optimizer.adam.primitive, gradients, numbers, *arrays)
    return True


def move_adam(cell: nn.Adam, gradients: Tensors) -> bool:
    """Takes a step of `nn.Adam`."""
    arrays = [cell.parameters, cell.moment1, cell.moment2, *([cell.vhat] if cell.use_amsgrad else [])]
    if not _is_usual(cell) or cell.use_lazy or cell.use_offload or not fits(gradients, *arrays):
        return False
    beta1, beta2, rest1, rest2, eps = _constants(cell)
    scale, rates, decays = _scale(cell), _rates(cell), _decays(cell)
    _add(cell.global_step, cell.global_step_increase_tensor)
    powers = cell.beta1_power, cell.beta2_power
    for power, beta in zip(powers, (beta1, beta2)):
        ops.assign(power, power * beta)
    numbers = [(rate, beta1, beta2, rest1, rest2, eps, decay, *powers, scale) for rate, decay in zip(rates, decays)]

    def update(tensors: int) -> Any:
        nesterov = cell.use_nesterov and not cell.use_amsgrad  # MindSpore's operator of AMSGrad has none
        return optimizer.adam.primitive(tensors, optimizer.POWERS, False, nesterov, cell.use_amsgrad)

    optimizer.move(update, gradients, numbers, *arrays)
    return True


def move_momentum(cell: nn.Momentum, gradients: Tensors) -> bool:
    """Takes a step of `nn.Momentum`."""
    arrays = cell.parameters, cell.moments
    if not _is_usual(cell) or not fits(gradients, *arrays):
        return False
    one, momentum, scale = number(1.0), as_number(cell.momentum), _scale(cell)
    rates, decays = _rates(cell), _decays(cell)
    _add(cell.global_step, cell.global_step_increase_tensor)
    numbers = [(rate, momentum, one, decay, scale) for rate, decay in zip(rates, decays)]

    def update(tensors: int) -> Any:
        return optimizer.momentum.primitive(tensors, True, cell.use_nesterov)

    optimizer.move(update, gradients, numbers, *arrays)
    return True


_STEPS: dict[str, Step] = {
    "AdamWeightDecay": move_adam_weight_decay,
    "Adam": move_adam,
    "Momentum": move_momentum,
}
METHODS: dict[str, Callable[[Any], Any]] = {
    f"nn.{name}.__call__": calling(getattr(nn, name), step)
    for name, step in _STEPS.items()
    if getattr(nn, name).construct.__module__.startswith("mindspore.")  # which a program may have replaced
}

# Modules of libraries, by the SHA-256 of their source, with optimizers that take the steps of MindSpore's of that name:
# mindone.transformers.mindspore_adapter.adamw of mindone 0.5.0.
LIBRARIES = {"c7aaab4ed4083e6aa9214eaf0a95270140fb8f4846da2873c2ec23119744ffe3"}


def call_of(cls: Any) -> Any:
    """Returns what takes the place of the `__call__` of a library's optimizer, or None for all other classes."""
    if cls.__name__ not in _STEPS or not issubclass(cls, nn.Optimizer) or "__call__" in vars(cls):
        return None
    try:
        source = inspect.getsource(sys.modules[cls.__module__])
    except (KeyError, OSError, TypeError):
        return None
    is_known = hashlib.sha256(source.encode()).hexdigest() in LIBRARIES
    return calling(cls, _STEPS[cls.__name__])(cls.__call__) if is_known else None


_clip_by_global_norm: Any = getattr(ops, "clip_by_global_norm", None)


def clip_by_global_norm(x: Any, clip_norm: float = 1.0, use_norm: None = None) -> Any:
    if compiling() or not _clips(x, clip_norm, use_norm):
        return _clip_by_global_norm(x, clip_norm, use_norm)
    most = number(clip_norm)
    norm = ops.sqrt(ops.addn(optimizer.square_sum(x)))
    return tuple(optimizer.scaled(x, most, ops.select(ops.greater_equal(norm, most), norm, most)))


def _clips(x: Any, clip_norm: Any, use_norm: Any) -> bool:
    """Tells whether the kernels clip these gradients."""
    is_number = isinstance(clip_norm, (int, float)) and not isinstance(clip_norm, bool) and clip_norm > 0
    if use_norm is not None or not is_number or not isinstance(x, (tuple, list)) or not x or records_gradients():
        return False
    return all(isinstance(each, Tensor) and each.dtype in _GRADIENTS and each.dtype == x[0].dtype for each in x)
