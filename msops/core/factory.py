"""Makes operators, one for equal arguments."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any

from . import open_sizes
from .compiled import compiling
from .library import Entry
from .operator import Operator, OptionalOperator
from .primitive import as_attribute
from .signature import Signature
from .spec import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import mindspore

    from .operator import Gradient, Infer


def custom_op(
    entry: Entry,
    signature: str,
    *,
    infer: Infer | None = None,
    gradient: Gradient | None = None,
    name: str | None = None,
    dtypes: Sequence[mindspore.Type] = FLOATS,
    **attributes: float,
) -> Operator:
    """A C function as an operator, for tensors of both devices and in both modes.

    Equal arguments give the same operator. Whatever its rules depend on tells it from all others, in the caches that
    MindSpore keeps by a primitive's attributes, too.

    Args:
        entry (Entry): The C function, of a :class:`msops.Library`.
        signature (str): What it takes and gives, as in :class:`msops.Signature`. Sizes may name attributes. The C
            function's parameters are the inputs, then the outputs, then scratch.
        infer (callable): `infer(*inputs, **attributes)` takes the :class:`msops.Spec` of each input and the attributes,
            raises TypeError or ValueError if they do not fit, with words that follow the operator's name, and returns
            the Spec of each output, then of each scratch tensor that has no sizes in the signature; or the only one.
            An absent input is None; an output that is left out has a Spec all the same. The signature's outputs then
            have no sizes. Default: what the signature says.
        gradient (Operator, callable): An operator whose signature names what it needs: inputs and outputs of this one,
            and `dy`, the gradient of an output `y`. Its outputs are the gradients, `dx` of an input `x`; an input
            without one gets zeros. Else a function of a module, or a method of a Cell without Parameters, of all
            inputs, the output and its gradient (a tuple each of several), which returns a tuple of gradients. What is
            absent is None, in all of these. An operator as gradient of one with an optional input `bias` has an
            optional output `dbias`. Default: none, which is an error where one is needed, unless all outputs are of
            whole numbers.
        name (str): For messages. Default: the library's.
        dtypes (tuple[mindspore.dtype]): As in :class:`msops.Signature`.
        **attributes (int, float, bool): What the C function reads by `call.attribute(name, low, high)`, which takes no
            float, or by `call.number(name)`; the numbers of an `MSOPS_FORMULA_WITH`.

    Returns:
        Operator. Called with tensors, it returns a tensor or, if there are several outputs, a tuple. An optional input
        may be None or, at the end, left out. Except where MindSpore compiles the call, inputs may be handed over by
        their names.

    Raises:
        TypeError: If an argument has a wrong type; of a call, if an input is not a Tensor of one of the dtypes.
        RuntimeError: If MindSpore compiles the call of `custom_op` itself; see :func:`msops.once`.
        ValueError: If the signature is none, or does not match the gradient's; of a call, if a shape does not fit.

    Examples:
        >>> import mindspore, msops
        >>> library = msops.load("cube", '''
        ... #include "common/formula.h"
        ... MSOPS_FORMULA(CubeForward, (x), (y), y = x * x * x)
        ... MSOPS_FORMULA(CubeBackward, (x, dy), (dx), dx = dy * 3 * x * x)
        ... ''')
        >>> cube = msops.custom_op(
        ...     library.CubeForward, "x -> y", gradient=msops.custom_op(library.CubeBackward, "x, dy -> dx")
        ... )
        >>> x = mindspore.Tensor([1.0, 2.0])
        >>> print(cube(x), mindspore.grad(lambda x: cube(x))(x))
        [1. 8.] [ 3. 12.]
    """
    # MindSpore compiles this function if it meets it.
    if compiling():
        raise RuntimeError(
            "custom_op: an operator must be made before its call is compiled, or in a function decorated with "
            "msops.once"
        )
    return make_operator(entry, signature, infer, gradient, name, dtypes, attributes)


def make_operator(
    entry: Entry,
    signature: str,
    infer: Infer | None,
    gradient: Gradient | None,
    name: str | None,
    dtypes: Sequence[mindspore.Type],
    attributes: dict[str, float],
    absent: frozenset[str] = frozenset(),
) -> Operator:
    """The operator of these arguments, without the optional tensors that are absent."""
    if not isinstance(entry, Entry):
        raise TypeError(f"custom_op: entry must be a function of a Library, got {type(entry).__name__}")
    name = entry.library.name if name is None else name
    if not isinstance(signature, str):
        raise TypeError(f"{name}: signature must be a str, got {type(signature).__name__}")
    if not isinstance(dtypes, (list, tuple)):
        raise TypeError(f"{name}: dtypes must be a tuple, got {dtypes}")
    for what, rule in (("infer", infer), ("gradient", gradient)):
        if rule is not None and not callable(rule):
            raise TypeError(f"{name}: {what} must be callable, got {type(rule).__name__}")
    for what, value in attributes.items():
        if not isinstance(value, (int, float)):
            raise TypeError(f"{name}: attribute {what} must be an int, a float or a bool, got {type(value).__name__}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{name}: attribute {what} must fit into 64 bits, got {value}")
    key = (
        *(str(entry.library.path), entry.library.variable, entry.name, signature, name, *map(str, dtypes), absent),
        *(_number(rule) for rule in (infer, gradient)),
        *(item for what, value in sorted(attributes.items()) for item in (what, *as_attribute(what, value))),
    )
    with _lock:
        if key not in _number_of_key:
            _number_of_key[key] = next(_numbers)
            for rule in _functions(infer, gradient):  # when one is gone, no key can be equal to this one
                weakref.finalize(rule, _number_of_key.pop, key, None).atexit = False
        number = _number_of_key[key]
        operator = open_sizes.operators.get(number)
        if operator is None:
            make = functools.partial(make_operator, entry, signature, infer, gradient, name, dtypes, attributes)
            parsed = Signature(signature, dtypes, **attributes)
            optional = any(tensor.optional for tensor in parsed.without(absent).inputs)
            kind = OptionalOperator if optional else Operator
            operator = kind(number, entry, parsed, infer, gradient, name, attributes, absent, make)
            open_sizes.operators[number] = operator
        return operator


_lock = threading.RLock()  # of what follows; an operator may make that of its gradient
_numbers = itertools.count()
# Of an operator; it stays when the operator goes, since what MindSpore keeps for it stays, too.
_number_of_key: dict[tuple[Any, ...], int] = {}
_number_of_rule: weakref.WeakKeyDictionary[Callable[..., Any], int] = weakref.WeakKeyDictionary()


def _number(rule: Operator | Callable[..., Any] | None) -> int:
    """A number that no other function or operator ever had or gets."""
    if rule is None:
        return -1
    if isinstance(rule, Operator):
        return rule.number
    return _number_of_rule.setdefault(rule, next(_numbers))


def _functions(*rules: Operator | Callable[..., Any] | None) -> Iterator[Callable[..., Any]]:
    """The functions among rules, and among those of operators."""
    for rule in rules:
        if isinstance(rule, Operator):
            yield from _functions(rule.rule, rule.gradient)
        elif rule is not None:
            yield rule
