"""Steps of the optimizers of `mindspore.mint.optim`, and of the primitive AdamW.

They need updates in place that MindSpore has on Ascend alone: on the CPU, `Tensor.add_` changes nothing and says
nothing. Each class takes its constructor and its state from MindSpore's, and has a step of its own, which assigns. In
PyNative mode, kernels move all Parameters of a group in a few launches instead (see `optimizers`).
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Parameter, Tensor, mint, ops
from mindspore.ops import operations

from msops.operators import optimizer as kernels
from msops.patch.optimizers import as_number, fits, has_own_memory, number, runs_now
from msops.patch.replacement import Replacement

if TYPE_CHECKING:
    from collections.abc import Sequence

    Group = dict[str, Any]
    Tensors = tuple[Tensor, ...]

_FusedAdamW: Any = getattr(mint.optim, "FusedAdamW", mint.optim.AdamW)  # MindSpore 2.7 does not have it
_adam, _momentum, _expm1 = operations.AdamWeightDecay(), operations.ApplyMomentum(), operations.Expm1()


class Adam(mint.optim.Adam):
    """Adam, with the decay of weights in the gradient."""

    def __call__(self, gradients: Tensors) -> bool:
        return _move_adam(self, Adam, gradients, False) or super().__call__(gradients)

    def construct(self, gradients: Tensors) -> bool:
        steps = ops.add(self.state_step, 1.0)
        ops.assign(self.state_step, steps)
        for i, group in enumerate(self.param_groups):
            start, end = self.group_start_id[i], self.group_start_id[i + 1]
            settings = _settings(group, steps.reshape(()), 0.0)
            for j in range(start, end):
                parameter, gradient = self.parameters[j], gradients[j]
                gradient = -gradient if group["maximize"] else gradient
                if group["weight_decay"] != 0:
                    gradient = gradient + parameter * group["weight_decay"]
                most = group["max_exp_avg_sq"][j - start] if group["amsgrad"] else None
                _step(parameter, self.exp_avg[j], self.exp_avg_sq[j], most, gradient, settings, group)
        return True


class AdamW(mint.optim.AdamW):
    """Adam, with the decay of weights apart from the gradient."""

    def __call__(self, gradients: Tensors) -> bool:
        return _move_adam(self, AdamW, gradients, True) or super().__call__(gradients)

    def construct(self, gradients: Tensors) -> bool:
        return _steps_with_decay(self, gradients)


class FusedAdamW(_FusedAdamW):
    """As AdamW, since no memory is shared here."""

    def __call__(self, gradients: Tensors) -> bool:
        return _move_adam(self, FusedAdamW, gradients, True) or super().__call__(gradients)

    def contiguous_params(self, start_id: int, end_id: int, param_group: Group) -> None:
        """Leaves the parameters where they are."""

    def construct(self, gradients: Tensors) -> bool:
        return _steps_with_decay(self, gradients)


def _move_adam(optimizer: Any, cls: type, gradients: Tensors, decoupled: bool) -> bool:
    """Takes a step of all Parameters by kernels, and returns whether it did."""
    groups, begins = optimizer.param_groups, optimizer.group_start_id
    most = [each for group in groups if group["amsgrad"] for each in group["max_exp_avg_sq"]]
    arrays = optimizer.parameters, optimizer.exp_avg, optimizer.exp_avg_sq
    is_written_so = type(optimizer).construct is cls.construct  # type: ignore[attr-defined]
    if not is_written_so or not runs_now(optimizer) or not _fit(gradients, *arrays) or not _fit(most, most):
        return False
    ops.assign(optimizer.state_step, ops.add(optimizer.state_step, 1.0))
    steps = (ops.add(optimizer.state_step, 1.0) if decoupled else optimizer.state_step).reshape(
        ()
    )  # AdamW's is less by 1
    corrections: dict[float, Tensor] = {}
    for begin, end, group in zip(begins, begins[1:], groups):
        betas = group["betas"]
        for beta in betas:
            if beta not in corrections:
                corrections[beta] = _correction(beta, steps)
        numbers = [as_number(group["lr"]), *map(number, (*betas, 1 - betas[0], 1 - betas[1]))]
        numbers += map(number, (group["eps"], group["weight_decay"]))
        numbers += corrections[betas[0]], corrections[betas[1]], number(1.0)
        settings = kernels.GIVEN, decoupled, False, bool(group["amsgrad"]), bool(group["maximize"])
        states = [array[begin:end] for array in arrays]
        states += [group["max_exp_avg_sq"]] if group["amsgrad"] else []
        update = functools.partial(_adam_of, settings)
        kernels.move(update, gradients[begin:end], [numbers] * (end - begin), *states)
    return True


def _fit(gradients: Sequence[Tensor], *arrays: Sequence[Tensor]) -> bool:
    """Tells whether the kernels take these, and refuses views, which the operators of `construct` leave unchanged."""
    if fits(gradients, *arrays):
        return True
    for x in itertools.chain(*arrays):
        if not x.has_init and not has_own_memory(x):
            raise ValueError(
                f"mint.optim: {x.name} must have memory of its own, but is a view of another Tensor, of which "
                "MindSpore moves a copy: call set_data with a copy(), or msops.use_fast_calls()"
            )
    return False


def _adam_of(settings: tuple[Any, ...], tensors: int) -> Any:
    return kernels.adam.primitive(tensors, *settings)


def _move_sgd(optimizer: SGD, gradients: Tensors) -> bool:
    """Takes a step of all Parameters by kernels, and returns whether it did."""
    arrays = optimizer.parameters, optimizer.momentum_buf
    begins = optimizer.group_start_id
    is_written_so = type(optimizer).construct is SGD.construct
    if not is_written_so or not runs_now(optimizer) or not _fit(gradients, *arrays):
        return False
    for begin, end, group in zip(begins, begins[1:], optimizer.param_groups):
        share = number(1.0)
        if group["momentum"] != 0 and group["dampening"] != 0:  # the first gradient counts in full
            is_later = ops.cast(optimizer.step_t > 0, mindspore.float32).reshape(())
            share = 1 - is_later * group["dampening"]
        numbers = [as_number(group["lr"]), number(group["momentum"]), share, number(group["weight_decay"]), number(1.0)]
        settings = bool(group["momentum"]), bool(group["nesterov"]), bool(group["maximize"])
        states = [array[begin:end] for array in arrays]
        update = functools.partial(_momentum_of, settings)
        kernels.move(update, gradients[begin:end], [numbers] * (end - begin), *states)
    ops.assign(optimizer.step_t, optimizer.step_t + 1)
    return True


def _momentum_of(settings: tuple[bool, ...], tensors: int) -> Any:
    return kernels.momentum.primitive(tensors, *settings)


class AdamWOfTensors(Replacement):
    """Is the primitive AdamW: moves a parameter and its moments, and returns them. `step` counts from 0."""

    def __call__(
        self,
        var: Parameter,
        m: Parameter,
        v: Parameter,
        max_v: Parameter,
        gradient: Tensor,
        step: Tensor,
        lr: float,
        beta1: float,
        beta2: float,
        decay: float,
        eps: float,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = {"lr": lr, "betas": (beta1, beta2), "eps": eps}
        settings = _settings(group, ops.add(ops.cast(step, mindspore.float32), 1.0).reshape(()), decay)
        _step(var, m, v, max_v if amsgrad else None, -gradient if maximize else gradient, settings, group)
        return var, m, v


def _steps_with_decay(optimizer: AdamW | FusedAdamW, gradients: Tensors) -> bool:
    count = ops.add(optimizer.state_step, 1.0)  # this counts from 0
    ops.assign(optimizer.state_step, count)
    for i, group in enumerate(optimizer.param_groups):
        start, end = optimizer.group_start_id[i], optimizer.group_start_id[i + 1]
        settings = _settings(group, ops.add(count, 1.0).reshape(()), group["weight_decay"])
        for j in range(start, end):
            gradient = -gradients[j] if group["maximize"] else gradients[j]
            most = group["max_exp_avg_sq"][j - start] if group["amsgrad"] else None
            _step(
                *(optimizer.parameters[j], optimizer.exp_avg[j], optimizer.exp_avg_sq[j], most),
                *(gradient, settings, group),
            )
    return True


def _settings(group: Group, steps: Tensor, decay: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a rate, an epsilon and a decay so that Adam without corrections of its moments does this step:

    rate · (m / (√v + epsilon) + decay · p) = lr · (m / (1 - β₁ᵗ) / (√(v / (1 - β₂ᵗ)) + eps) + weight_decay · p).
    """
    first, second = _correction(group["betas"][0], steps), _correction(group["betas"][1], steps)
    root = ops.sqrt(second)
    return group["lr"] * root / first, root * group["eps"], first / root * decay


def _correction(beta: float, steps: Tensor) -> Tensor:
    """Returns 1 - beta ** steps, also where this is small."""
    return ops.ones_like(steps) if beta == 0 else -_expm1(steps * math.log(beta))


def _step(
    parameter: Parameter,
    first: Parameter,
    second: Parameter,
    most: Parameter | None,
    gradient: Tensor,
    settings: tuple[Tensor, Tensor, Tensor],
    group: Group,
) -> None:
    rate, eps, decay = settings
    beta1, beta2 = group["betas"]
    if most is None and parameter.dtype == first.dtype == second.dtype == mindspore.float32:
        _adam(parameter, first, second, rate, beta1, beta2, eps, decay, ops.cast(gradient, mindspore.float32))
        return
    dtype = first.dtype
    gradient = ops.cast(gradient, dtype)
    rate, eps, decay = ops.cast(rate, dtype), ops.cast(eps, dtype), ops.cast(decay, dtype)
    m, v = first * beta1 + gradient * (1 - beta1), second * beta2 + ops.square(gradient) * (1 - beta2)
    ops.assign(first, m)
    ops.assign(second, v)
    if most is not None:
        v = ops.maximum(most, v)
        ops.assign(most, v)
    moved = ops.cast(parameter, dtype)  # a GPU has no product of a float16 Parameter and a float32 scalar
    moved = moved - rate * (m / (ops.sqrt(v) + eps) + decay * moved)
    ops.assign(parameter, ops.cast(moved, parameter.dtype))


class SGD(mint.optim.SGD):
    """Gradient descent, with momentum."""

    def __call__(self, gradients: Tensors) -> bool:
        return _move_sgd(self, gradients) or super().__call__(gradients)

    def construct(self, gradients: Tensors) -> bool:
        for i, group in enumerate(self.param_groups):
            start, end = self.group_start_id[i], self.group_start_id[i + 1]
            for j in range(start, end):
                parameter, gradient = self.parameters[j], gradients[j]
                gradient = -gradient if group["maximize"] else gradient
                if group["weight_decay"] != 0:
                    gradient = gradient + parameter * group["weight_decay"]
                _descend(parameter, self.momentum_buf[j], gradient, self.step_t, group)
        ops.assign(self.step_t, self.step_t + 1)
        return True


def _descend(parameter: Parameter, buffer: Parameter, gradient: Tensor, steps: Parameter, group: Group) -> None:
    momentum, dampening = group["momentum"], group["dampening"]
    if momentum != 0 and dampening == 0 and not group["nesterov"] and parameter.dtype == mindspore.float32:
        _momentum(parameter, buffer, group["lr"], gradient, momentum)
        return
    if momentum != 0:
        share = 1 - dampening * ops.cast(steps > 0, parameter.dtype)  # the first gradient counts in full
        total = buffer * momentum + gradient * share
        ops.assign(buffer, total)
        gradient = gradient + total * momentum if group["nesterov"] else total
    ops.assign(parameter, parameter - ops.cast(group["lr"], parameter.dtype) * gradient)
