"""Gives msops' kernels to the formulas that model libraries write out in each of their models, such as RMSNorm.

A library such as mindone has a class of RMSNorm and a function `apply_rotary_pos_emb` in each module of a language
model. They are recognized by what they compute: a function's local variables are replaced by what they stand for, so
that one expression is left, and this must be one of the formulas below. All other functions stay as they are.
"""

from __future__ import annotations

import inspect
import sys
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspore import Tensor, float64, nn, ops

from msops.core.compiled import once
from msops.core.inputs import describe
from msops.core.spec import FLOATS, Rounded
from msops.operators.rms_norm import rms_norm
from msops.operators.rotary_position_embedding import rotary_position_embedding as turn

from .causal_masks import FLASH, INTERFACE, causing
from .expert_loops import may_route, routing
from .formula import Formula, Found, NoFormulaError, written
from .gates import activating, forget, gating
from .longer_attention import SOFTMAX, holding, is_long
from .losses import LOSS, giving, losing
from .masks import MASKS, MASKS_OF_CLASSES, unmarking
from .methods import may_rewrite, rewriting
from .normed_activations import may_norm, norming
from .optimizers import call_of
from .replacement import put_method
from .written_attention import ATTENTION, BLOCKS, attending, blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from msops.core.inputs import Description

    Function = Callable[..., Any]

_HOOK = "__init_subclass__"  # Python calls it for each new class of Cells
_ROTATION = "apply_rotary_pos_emb"
_CONSTRUCT = "construct"
_CALL = "__call__"
_CLASSES = "Norm", "MLP", "GLU", "Activation"  # ends of names of classes whose `construct` may be a formula
_OPERATORS = {_ROTATION: "mindspore.ops.rotary_position_embedding", _CONSTRUCT: "msops.rms_norm"}
_SOFTMAX = {SOFTMAX, "Softmax"}


class _Replaced(NamedTuple):
    """A name of a class or a module, what stood there, or None for what a class inherits, and what stands there now."""

    owner: Any
    name: str
    own: Any
    now: Any


class Recognized(NamedTuple):
    """A function or method of a library, and the operator that computes it."""

    name: str
    operator: str


class Left(NamedTuple):
    """A function or method of a library that computes by itself, or in some calls, and why."""

    name: str
    reason: str


_replaced: list[_Replaced] = []
_found: dict[int, tuple[str, Found]] = {}  # names of functions, and what stands for them, by their identities
_unknown: dict[int, tuple[Function, str]] = {}  # functions that are no formula of msops', and why, likewise
_losses: dict[Function, Function] = {}  # loss functions of libraries -> what models call


def watch() -> None:
    """Replaces the formulas of all Cells' classes and of their modules, also of those that are defined later."""
    setattr(nn.Cell, _HOOK, classmethod(_init_subclass))
    classes = [nn.Cell]
    for cls in classes:
        classes += cls.__subclasses__()
        _replace(cls)


def restore() -> None:
    """Ends what `watch` began. What a program has put in place of a replacement stays."""
    if _HOOK in vars(nn.Cell):
        delattr(nn.Cell, _HOOK)
    for owner, name, own, now in _replaced:
        if vars(owner).get(name) is now:
            delattr(owner, name) if own is None else setattr(owner, name, own)
    _replaced.clear()
    _found.clear()
    forget()
    _unknown.clear()
    _losses.clear()


def recognized() -> list[Recognized]:
    """Returns what was recognized so far."""
    return sorted(Recognized(name, found.operator) for name, found in _found.values())


def left(model: nn.Cell) -> list[Left]:
    """Returns what was not recognized of a model's classes and of their modules, or stays in some calls."""
    classes = {base for _, cell in model.cells_and_names() for base in type(cell).__mro__ if _is_own(base)}
    formulas = [found.formula for _, found in _found.values() if found.formula]
    inlined = {id(method) for formula in formulas for method in formula.methods.values()}
    reasons = set()
    for value in [
        *(vars(owner).get(name) for cls in classes for owner, name in _places(cls)),
        getattr(model, LOSS, None),
    ]:
        if id(value) in _unknown:
            own, why = _unknown[id(value)]
            reasons.update({Left(_name(own), why)} if why else set())
        if id(value) in _found:
            of, found = _found[id(value)]
            reasons.update(Left(of, each) for each in found.reasons)
    for cls in classes:
        for value in vars(cls).values():
            is_seen = id(value) in inlined or id(value) in _found or id(value) in _unknown
            if inspect.isfunction(value) and _SOFTMAX & set(value.__code__.co_names) and not is_seen:
                reasons.add(Left(_name(value), "it computes a softmax, in a method that msops does not look at"))
    return sorted(reasons)


def _init_subclass(cls: Any, /, **named: Any) -> None:
    super(nn.Cell, cls).__init_subclass__(**named)
    _replace(cls)


def _replace(cls: Any) -> None:
    for owner, name in _places(cls):
        _replace_name(owner, name)
    loss = vars(cls).get(LOSS)
    if isinstance(loss, property) and inspect.isfunction(loss.fget) and _is_other(loss.fget):
        _put(cls, LOSS, loss, giving(loss, _loss_of))
    call = call_of(cls)
    if call is not None:
        _put(cls, _CALL, None, call)
        _found[id(call)] = _name(cls), Found(call, "msops' steps of all Parameters at once", None, set())


def _places(cls: Any) -> list[tuple[Any, str]]:
    """Returns where a class or its module may have a formula. A module defines what its Cells call before it defines
    the last of them."""
    of_class = [_CONSTRUCT, BLOCKS] if cls.__name__.endswith(_CLASSES) else [BLOCKS]
    own = vars(cls).items()
    longer = [
        name
        for name, value in own
        if is_long(value) or may_route(value) or may_norm(cls, value) or may_rewrite(cls, value)
    ]
    module = sys.modules.get(cls.__module__)
    of_module = [_ROTATION, *ATTENTION, *MASKS] if module else []
    interface = vars(module).get(INTERFACE) if module else None
    of_interface = [FLASH] if inspect.isfunction(interface) and interface.__module__ in sys.modules else []
    return [
        *((base, name) for base in cls.__mro__ for name in MASKS_OF_CLASSES if name in vars(base)),
        *((cls, name) for name in dict.fromkeys((*of_class, *longer))),
        *((module, name) for name in of_module),
        *((sys.modules[interface.__module__], name) for name in of_interface),
    ]


def _replace_name(owner: Any, name: str) -> None:
    own = vars(owner).get(name)
    if not inspect.isfunction(own) or not _is_other(own) or id(own) in _unknown:
        return  # a module's function is met once for each of its classes
    try:
        found = _recognize(own, owner, name)
    except NoFormulaError as error:
        if error.is_final:
            _unknown[id(own)] = own, str(error)
        return
    except Exception as error:  # noqa: BLE001 (other people's classes must be defined, whatever msops makes of them)
        _unknown[id(own)] = own, _fault(error)
        return
    if found.formula and isinstance(owner, type):
        _put(owner, found.formula.flag, None, property(found.stands or found.formula.stands))
    _put(owner, name, own, found.now)
    _found[id(found.now)] = _name(own), found


def _recognize(own: Function, owner: Any, name: str) -> Found:
    if name in (*MASKS, *MASKS_OF_CLASSES):
        return unmarking(own)
    if name in ATTENTION:
        return attending(own)
    if name == FLASH:
        return causing(own)
    if name == BLOCKS:
        return blocks(own, owner)
    if may_route(own):
        return routing(own)
    if is_long(own):
        return holding(own)
    if name != _ROTATION and (name != _CONSTRUCT or not owner.__name__.endswith(_CLASSES)):
        return norming(own) if may_norm(owner, own) else rewriting(own, owner)
    if name == _CONSTRUCT and not owner.__name__.endswith("Norm"):
        return activating(own, owner) if owner.__name__.endswith("Activation") else gating(own, owner)
    formula = Formula(own, owner)
    make = _FORMULAS.get(formula.text)
    if not formula.text and name == _CONSTRUCT:
        branches = [Formula(own, owner, {_IS_HALF: is_half}) for is_half in (True, False)]
        make = _FORMULAS.get(" | ".join(each.text for each in branches))
        formula = branches[0] if make else formula
    now = make and make(own, formula)
    if now is None:
        raise NoFormulaError("its arguments are others than the formula's") if make else formula.why
    return Found(now, _OPERATORS[name], formula, set())


def _fault(error: Exception) -> str:
    return f"msops cannot read it: {type(error).__name__}: {error}"


def _loss_of(own: Any) -> Any:
    """Returns what stands for a model's loss function, or this itself."""
    if not inspect.isfunction(own) or not _is_other(own):
        return own
    if own not in _losses:
        _losses[own] = own
        try:
            found = losing(own)
        except NoFormulaError as error:
            _unknown[id(own)] = own, str(error)
        except Exception as error:  # noqa: BLE001 (likewise)
            _unknown[id(own)] = own, _fault(error)
        else:
            _losses[own] = found.now
            _found[id(found.now)] = _name(own), found
    return _losses[own]


def _is_other(value: Any) -> bool:
    """Tells whether a class or function is neither MindSpore's nor msops'."""
    return (value.__module__ or "").partition(".")[0] not in ("mindspore", "msops", "builtins")


def _is_own(base: type) -> bool:
    return issubclass(base, nn.Cell) and _is_other(base)


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _put(owner: Any, name: str, own: Any, now: Any) -> None:
    _replaced.append(_Replaced(owner, name, own, now))
    put_method(owner, name, now)


@once
def _normalizes(x: Description, weight: Description, eps: Any) -> bool:
    """Tells whether rms_norm takes these, and returns the dtype that the formula does."""
    is_row = bool(x[0]) and weight[0] == x[0][-1:] and None not in weight[0]
    takes_eps = type(eps) in (int, float) and 0 <= eps < inf and (x[1] == float64 or Rounded(eps).is_float32())
    return is_row and x[1] == weight[1] and x[1] in FLOATS and takes_eps


@once
def _turns(q: Description, k: Description, cos: Description, sin: Description, axis: int) -> bool:
    """Tells whether the tables (B, T, D), which get this axis, fit queries and keys, and all have one dtype."""
    if cos[0] != sin[0] or len(cos[0] or ()) != 3 or axis not in (1, 2) or {q[1], k[1], cos[1], sin[1]} - {q[1]}:
        return False
    table = (*cos[0][:axis], 1, *cos[0][axis:])
    for shape in (q[0], k[0]):
        if len(shape) != 4 or None in (*shape, *table) or not all(n in (1, m) for n, m in zip(table, shape)):
            return False
    return q[1] in FLOATS and table[3] == q[0][3] == k[0][3] and table[3] % 2 == 0


def _normalizing(eps: str, offset: float, casting: str) -> Callable[[Function, Formula], Function | None]:
    """Makes the `construct` of RMSNorms whose attribute `eps` is added to the mean."""

    def make(own: Function, found: Formula) -> Function | None:
        parameters = [(each.kind, each.default) for each in inspect.signature(own).parameters.values()]
        if parameters != [(inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty)] * 2:
            return None
        name, flag = list(inspect.signature(own).parameters)[1], found.flag  # calls may use the name
        if name == "hidden_states":

            def construct(self: Any, hidden_states: Tensor) -> Any:
                if getattr(self, flag) and _normalizes(
                    describe(hidden_states), describe(self.weight), getattr(self, eps)
                ):
                    return rms_norm(hidden_states, self.weight, getattr(self, eps), offset, casting)
                return own(self, hidden_states)

        else:

            def construct(self: Any, x: Tensor) -> Any:  # type: ignore[misc]
                if getattr(self, flag) and _normalizes(describe(x), describe(self.weight), getattr(self, eps)):
                    return rms_norm(x, self.weight, getattr(self, eps), offset, casting)
                return own(self, x)

        return construct if name in ("x", "hidden_states") else None

    return make


def _turning(own: Function, found: Formula) -> Function | None:
    @ops.constexpr(check=False, reuse_result=False)
    def stands(_: int) -> bool:
        return found.stands()

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        if stands(0) and _turns(describe(q), describe(k), describe(cos), describe(sin), unsqueeze_dim):
            cos, sin = cos.expand_dims(unsqueeze_dim), sin.expand_dims(unsqueeze_dim)
            return turn(q, cos, sin, False), turn(k, cos, sin, False)
        return own(q, k, cos, sin, position_ids, unsqueeze_dim)

    def parameters(function: Function) -> list[tuple[Any, ...]]:
        return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]

    return apply_rotary_pos_emb if parameters(own) == parameters(apply_rotary_pos_emb) else None


_EPS = "eps", "variance_epsilon"
_ROOT = "rsqrt(x.to(float32).pow(2).mean(-1, keepdim=True) + self.{})"
_NORMS = {  # what `construct` returns, where y is x in float32 times the root: offset and casting of rms_norm
    "self.weight * ({y}).to(x.dtype)": (0.0, "llama"),
    "(self.weight * ({y})).to(x.dtype)": (0.0, "gemma"),
    "({y} * self.weight.to(float32)).to(x.dtype)": (0.0, "gemma"),
    "({y} * self.weight).to(x.dtype)": (0.0, "gemma"),
    "({y} * (1.0 + self.weight.to(float32))).to(x.dtype)": (1.0, "gemma"),
}
_IS_HALF = "x0.weight.dtype in [float16, bfloat16]"  # T5 casts y to such a dtype, which rms_norm takes if x has it, too
_OF_T5 = "self.weight * (x * {y}).to(self.weight.dtype)", "self.weight * (x * {y})"
_TURNED = "{0} * cos.unsqueeze(axis) + cat((-{0}[..., {0}.shape[-1] // 2:], {0}[..., :{0}.shape[-1] // 2]), dim=-1)"
_BOTH = ", ".join(f"{_TURNED.format(x)} * sin.unsqueeze(axis)" for x in ("q", "k"))
_FORMULAS: dict[str, Callable[[Function, Formula], Function | None]] = {
    written(f"lambda q, k, cos, sin, places, axis: ({_BOTH})"): _turning,
    **{
        written("lambda self, x: " + text.format(y=f"x.to(float32) * {_ROOT.format(eps)}")): _normalizing(eps, *how)
        for text, how in _NORMS.items()
        for eps in _EPS
    },
    **{
        " | ".join(written("lambda self, x: " + text.format(y=_ROOT.format(eps))) for text in _OF_T5): _normalizing(
            eps, 0.0, "llama"
        )
        for eps in _EPS
    },
}
