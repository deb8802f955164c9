"""Makes operators, and returns the same operator for equal arguments."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any

from mindspore.common import dtype as mstype

from .abi import as_attribute
from .cached import cached
from .compiled import compiling, once
from .definition import Definition
from .library import Entry
from .operator import Operator, OptionalOperator, PlainOperator, ScratchOperator
from .signature import Signature
from .spec import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import mindspore

    from .definition import Gradient, Infer
    from .primitive import Primitive


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
    """Makes an operator from a C function, for tensors on the CPU and the GPU, in graph and PyNative mode.

    Equal arguments give the same operator. Operators that differ, if only in a function, also differ in the caches that
    MindSpore keys by a primitive's attributes.

    Args:
        entry (Entry): The C function, from a :class:`msops.Library`. Its parameters are the inputs, then the outputs,
            then scratch.
        signature (str): The inputs, outputs and scratch, as in :class:`msops.Signature`. Sizes may name attributes.
        infer (callable): `infer(*inputs, **attributes)` takes the :class:`msops.Spec` of each input, None for an absent
            one, and the attributes. It returns the Spec of each output, also of one that is left out; a single Spec
            needs no list. If the inputs do not fit, it raises TypeError or ValueError with a message that continues the
            operator's name. With `infer`, the outputs have no sizes in the signature. Default: the signature's sizes
            and dtypes.
        gradient (Operator, callable): Either an Operator or a function. An Operator's signature names the tensors that
            it needs: inputs and outputs of this operator, and `dy` for the gradient of an output `y`. Its outputs are
            the gradients, `dx` for an input `x`; an input without such an output gets zeros. For an optional input
            `bias` it has an optional output `dbias`. A function is one that a module defines, or a method of a Cell
            without Parameters. It takes all inputs, the output and the output's gradient (tuples, if there are several
            outputs), with None for absent tensors, and returns a tuple with a gradient for each input. Default: none;
            where a gradient is needed, that is an error, unless all outputs are of whole numbers.
        name (str): The operator's name in messages. Default: the library's name.
        dtypes (tuple[mindspore.dtype]): The common dtypes, as in :class:`msops.Signature`. Default: float16, float32
            and float64.
        **attributes (int, float, bool): The attributes. The C function reads them by `call.attribute(name, low, high)`,
            which takes no float, or by `call.number(name)`. An `MSOPS_FORMULA_WITH` can take its numbers from them.

    Returns:
        Operator. A call with tensors returns a tensor or, if there are several outputs, a tuple. An optional input may
        be None or, at the end, left out. Inputs may be passed by name, except where MindSpore compiles the call.

    Raises:
        TypeError: If an argument has a wrong type. A call raises it if an input is not a Tensor of one of the dtypes.
        RuntimeError: If MindSpore compiles the call of `custom_op` itself; see :func:`msops.once`.
        ValueError: If the signature is not valid, or does not match the gradient's. A call raises it if a shape does
            not fit.

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
    # MindSpore compiles this function if a compiled function calls it.
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
    """Returns the operator for these arguments, without the optional tensors that are absent."""
    if not isinstance(entry, Entry):
        raise TypeError(f"custom_op: entry must be a function of a Library, got {type(entry).__name__}")
    name = entry.library.name if name is None else name
    if not isinstance(name, str):
        raise TypeError(f"custom_op: name must be a str, got {type(name).__name__}")
    if not isinstance(signature, str):
        raise TypeError(f"{name}: signature must be a str, got {type(signature).__name__}")
    if not isinstance(dtypes, (list, tuple)) or not all(isinstance(each, mstype.typing.Number) for each in dtypes):
        raise TypeError(f"{name}: dtypes must be a tuple of MindSpore's dtypes, got {dtypes}")
    if not dtypes:
        raise ValueError(f"{name}: dtypes must have at least one dtype, got {dtypes}")
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
            for rule in _functions(infer, gradient):  # once one of them is gone, no other key can equal this one
                weakref.finalize(rule, _number_of_key.pop, key, None).atexit = False
        number = _number_of_key[key]
        operator = Definition.alive.get(number)
        if not isinstance(operator, Operator):
            make = functools.partial(make_operator, entry, signature, infer, gradient, name, dtypes, attributes)
            parsed = Signature(signature, dtypes, **attributes)
            optional = any(tensor.optional for tensor in parsed.without(absent).inputs)
            kind = OptionalOperator if optional else ScratchOperator if parsed.scratch else PlainOperator
            if isinstance(gradient, Operator):
                of_absent = absent.union(f"d{each}" for each in absent)
                gradient = gradient.without(*of_absent.intersection(gradient.full.optional))
            operator = kind(make, number, entry, parsed, infer, gradient, name, attributes, absent)
            Definition.alive[number] = operator
        return operator


_lock = threading.RLock()  # it guards what follows; it is reentrant, since an operator may make its gradient's operator
_numbers = itertools.count()
# An operator's number outlives the operator, since MindSpore keeps what it compiled for that number.
_number_of_key: dict[tuple[Any, ...], int] = {}
_number_of_rule: weakref.WeakKeyDictionary[Callable[..., Any], int] = weakref.WeakKeyDictionary()


def _number(rule: Definition | Callable[..., Any] | None) -> int:
    """Returns a number that no other function or operator ever had or will get."""
    if rule is None:
        return -1
    if isinstance(rule, Definition):
        return rule.number
    return _number_of_rule.setdefault(rule, next(_numbers))


def _functions(*rules: Definition | Callable[..., Any] | None) -> Iterator[Callable[..., Any]]:
    """Yields the functions among `rules`, and the functions that operators among them use in turn."""
    for rule in rules:
        if isinstance(rule, Definition):
            yield from _functions(rule.rule, rule.gradient)
        elif rule is not None:
            yield rule


class Operators:
    """The operators that a function of settings makes, which is decorated with this class: one for equal settings.

    As with :func:`msops.once`, the function runs once for equal arguments, also in code that MindSpore compiles.

    Args:
        make (callable): Checks the settings, and returns an :class:`msops.Operator`.

    Attributes:
        primitive (callable): `primitive(*settings, *given)` returns what MindSpore runs for these settings, where
            `given` tells of each optional input, in the signature's order, whether it is given. Unlike the operator, it
            takes no None, and also returns scratch, after the outputs. Functions and Cells call it: in mixed precision
            MindSpore casts Parameters for primitives, but not for an operator with optional inputs.

    Examples:
        >>> import mindspore, msops
        >>> library = msops.load("power", '''
        ... #include "common/formula.h"
        ... MSOPS_FORMULA_WITH(Power, (x), (y), (exponent), y = pow(x, exponent))
        ... ''')
        >>> @msops.Operators
        ... def powers(exponent):
        ...     return msops.custom_op(library.Power, "x -> y", exponent=exponent)
        >>> powers.primitive(3.0) is powers(3.0)
        True
        >>> print(powers.primitive(3.0)(mindspore.Tensor([1.0, 2.0])))
        [1. 8.]
    """

    __ms_class__ = True  # MindSpore then knows the attributes of this object in what it compiles

    def __init__(self, make: Callable[..., Operator]) -> None:
        self.make, self.signature = cached(make), inspect.signature(make)
        self.primitive = once(self._primitive)

    def __call__(self, *settings: Any, **named: Any) -> Operator:
        """Returns the operator for these settings."""
        bound = self.signature.bind(*settings, **named)
        bound.apply_defaults()
        return self.make(*bound.args, **bound.kwargs)

    def _primitive(self, *arguments: Any) -> Primitive:
        settings = len(self.signature.parameters)
        operator = self.make(*arguments[:settings])
        inputs = zip(operator.signature.optional, arguments[settings:])
        return operator.without(*(name for name, is_given in inputs if not is_given)).primitive
