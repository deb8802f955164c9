"""This operator serves patch_mindspore alone: msops has no public name for it.

It takes the steps of optimizers for many parameters in one launch, and multiplies many gradients by one number.

The updates write into the parameters and states that they are given, as MindSpore's own do. PyNative mode runs
operators in order, so that whatever is called later reads what they wrote. In graph mode, MindSpore knows nothing of
such writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from msops.core.factory import Operators, custom_op
from msops.core.fast_calls import call_if_prepared
from msops.core.library import of_package

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mindspore import Tensor

    from msops.core.operator import Operator
    from msops.core.primitive import Primitive

    Numbers = Sequence[Sequence[Tensor]]
    Update = Callable[[int], Primitive]

Item = TypeVar("Item")
_library = of_package("optimizer")
MOST = 72  # tensors of a launch, as in optimizer/table.h
PLAIN, POWERS, GIVEN = range(3)  # how Adam corrects its moments, as in optimizer/rules.h
_ADAM = "rate", "beta1", "beta2", "rest1", "rest2", "eps", "decay", "first", "second", "scale"
_MOMENTUM = "rate", "momentum", "share", "decay", "scale"


def move(update: Update, gradients: Sequence[Tensor], numbers: Numbers, *arrays: Sequence[Tensor]) -> None:
    """Moves parameters and their states, which `arrays` holds, in place.

    Args:
        update (callable): Makes the operator of a number of tensors.
        gradients (tuple[Tensor]): The gradients.
        numbers (list): The numbers of each parameter: Tensors of float32 and rank 0. Parameters whose numbers are the
            same objects move in one launch.
        *arrays (tuple[Tensor]): The parameters, then each state of them.
    """
    groups: dict[Any, list[int]] = {}
    for i, (gradient, own) in enumerate(zip(gradients, numbers)):
        groups.setdefault((gradient.dtype, *map(id, own)), []).append(i)
    for places in groups.values():
        for part in _parts(places):
            inputs = [gradients[i] for i in part], numbers[part[0]], *([array[i] for i in part] for array in arrays)
            call_if_prepared(update(len(part)), tuple([x for each in inputs for x in each]))


def square_sum(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns numbers that add up to the sum of the squares of all elements: one for each MOST tensors."""
    return [call_if_prepared(squares.primitive(len(part)), tuple(part))[0] for part in _parts(tensors)]


def scaled(tensors: Sequence[Tensor], up: Tensor, down: Tensor) -> list[Tensor]:
    """Returns x · up / down for each tensor x, rounded once to its dtype."""
    found: list[Tensor] = []
    for part in _parts(tensors):
        outputs = call_if_prepared(scale.primitive(len(part)), (*part, up, down))
        found += outputs if isinstance(outputs, tuple) else [outputs]
    return found


def _parts(tensors: Sequence[Item]) -> Iterator[Sequence[Item]]:
    return (tensors[i : i + MOST] for i in range(0, len(tensors), MOST))


@Operators
def adam(
    tensors: int,
    correction: int = PLAIN,
    decoupled: bool = True,
    nesterov: bool = False,
    amsgrad: bool = False,
    maximize: bool = False,
    in_place: bool = True,
) -> Operator:
    r"""Moves parameters by Adam.

    .. math::
        g &= (\pm g_0 + \text{decay}_c\, p) \text{scale} \\
        m &\leftarrow \beta_1 m + \text{rest}_1 g \\
        v &\leftarrow \beta_2 v + \text{rest}_2 g^2 \\
        p &\leftarrow p - \text{rate} \left(\frac{m / \text{first}}{\sqrt{v / \text{second}} + \text{eps}} +
            \text{decay}_d\, p\right)

    The decay is that of the last line if `decoupled`, else that of the first line. With `PLAIN`, `first` and `second`
    count as 1; with `POWERS`, they are powers of the betas, and the step is that of :class:`mindspore.nn.Adam`. With
    `nesterov`, beta1 m + rest1 g stands for m in the last line; with `amsgrad`, the largest v of all steps for v.
    """
    arrays = ("p", "m", "v", "w") if amsgrad else ("p", "m", "v")
    settings = {"decoupled": decoupled, "nesterov": nesterov, "amsgrad": amsgrad, "maximize": maximize}
    entry = _library.OptimizerAdam
    return _update(entry, tensors, _ADAM, arrays, in_place, correction=correction, **settings)


@Operators
def momentum(
    tensors: int, buffered: bool = True, nesterov: bool = False, maximize: bool = False, in_place: bool = True
) -> Operator:
    r"""Moves parameters by the sum of their gradients, which decays.

    .. math::
        g &= (\pm g_0 + \text{decay}\, p) \text{scale} \\
        a &\leftarrow \text{momentum}\, a + \text{share}\, g \\
        p &\leftarrow p - \text{rate}\, a

    With `nesterov`, g + momentum a stands for a in the last line. If it is not `buffered`, g does, and a stays.
    """
    entry = _library.OptimizerMomentum
    settings = {"buffered": buffered, "nesterov": nesterov, "maximize": maximize}
    return _update(entry, tensors, _MOMENTUM, ("p", "m"), in_place, **settings)


def _update(
    entry: Any, tensors: int, numbers: tuple[str, ...], arrays: tuple[str, ...], in_place: bool, **settings: float
) -> Operator:
    """Makes the operator of an update. It takes all gradients, numbers, all parameters, and all of each state. Without
    `in_place` it leaves the parameters and states as they are, and returns those after the step."""
    takes = [f"g{i}(*S{i})" for i in range(tensors)]
    takes += [f"{name}(dtype=float32)" for name in numbers]
    takes += [f"{name}{i}(*S{i}, dtype=accumulator)" for name in arrays for i in range(tensors)]
    gives = [f"new_{name}{i}(*S{i}, dtype=accumulator)" for name in arrays for i in range(tensors)]
    outputs = "done(dtype=float32)" if in_place else ", ".join(gives)
    attributes: dict[str, Any] = {name: int(value) for name, value in settings.items()}
    signature = f"{', '.join(takes)} -> {outputs}"
    return custom_op(entry, signature, tensors=tensors, in_place=int(in_place), **attributes)


@Operators
def squares(tensors: int) -> Operator:
    """Adds up the squares of the elements of many tensors."""
    takes = ", ".join(f"x{i}(*S{i})" for i in range(tensors))
    return custom_op(
        _library.OptimizerSquares, f"{takes} -> sum(dtype=accumulator); sums(..., dtype=accumulator)", tensors=tensors
    )


@Operators
def scale(tensors: int) -> Operator:
    """Multiplies many tensors by up / down."""
    takes = ", ".join(f"x{i}(*S{i})" for i in range(tensors))
    gives = ", ".join(f"y{i}(*S{i})" for i in range(tensors))
    signature = f"{takes}, up(dtype=float32), down(dtype=float32) -> {gives}"
    return custom_op(_library.OptimizerScale, signature, tensors=tensors)
