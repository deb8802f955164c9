"""Gives attention that model libraries write out, softmax(q kᵀ scale + mask) v with dropout, to flash_attention."""

from __future__ import annotations

import inspect
from math import inf, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore
from mindspore import Tensor, float16, float32, ops

from msops.core.compiled import compiling, is_on_gpu, once
from msops.core.inputs import describe
from msops.operators.flash_attention import draw_seed, flash_attention

from .callers import is_dropped
from .formula import Formula, Found, NoFormulaError, written

if TYPE_CHECKING:
    from collections.abc import Callable

    from msops.core.inputs import Description

    Function = Callable[..., Any]

BLOCKS = "math_attention_op"
ATTENTION = (
    "eager_attention_forward",
    "eager_attention_construct",
    "simple_eager_attention_forward",
    "vision_eager_attention_forward",
)
_FIRST = ("x0", "x1", "x2", "x3", "x4")  # the Cell, the query, the key, the value and the mask
_OPTIONS = ("scaling", "dropout", "softcap", "head_mask")  # arguments after these, in each library's own order
_SCALES = {  # what is done to the scores s, and the name of what gives the number
    "{s} * x_scaling": "scaling",
    "{s} * x1.shape[-1] ** (-0.5)": "size",
    "{s} * x1.size(-1) ** (-0.5)": "size",
    "{s} * x0.head_dim ** (-0.5)": "head_dim",
    "{s} / sqrt(tensor(x0.head_dim))": "head_dim",
    "{s} * x0.scaling": "own",
}
_REPEATED = (
    "{x}[:, :, None, :, :].expand({x}.shape[0], {x}.shape[1], x0.num_key_value_groups, {x}.shape[2], {x}.shape[3])"
    ".reshape({x}.shape[0], {x}.shape[1] * x0.num_key_value_groups, {x}.shape[2], {x}.shape[3])"
)
_SOFTMAX = "softmax({s}, dim=-1)", "softmax({s}, dim=-1, dtype=float32).to(x1.dtype)"
SHORT = 16  # rows of queries or keys, below which a GPU keeps the library's own code, as it does for a single token
_MOST = {float16: 256, float32: 128}  # features that a GPU's tensor cores take


class _Plan(NamedTuple):
    """What a formula computes beside softmax(q kᵀ scale) v."""

    scale: str
    has_softcap: bool
    drops: bool
    repeats: bool
    turns: bool  # the result is (B, T, H, D)
    cuts: bool  # the mask may have more keys


class _Attention:
    """The formulas of a function, which depend on which of its arguments are None."""

    def __init__(self, own: Function) -> None:
        self.own = own
        parameters = [each for each in inspect.signature(own).parameters.values() if each.kind != each.VAR_KEYWORD]
        self.names = tuple(each.name for each in parameters)
        self.defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        self.found: dict[tuple[bool, ...], tuple[Formula, _Plan | None]] = {}

    def plan(self, has_mask: bool, scaling: bool, softcap: bool, head_mask: bool, repeats: bool) -> _Plan | None:
        """Returns what is computed where these are given, if it is attention and all names mean what they did."""
        key = (has_mask, scaling, softcap, head_mask, repeats)
        if key not in self.found:
            given = {"x4": has_mask, "x_scaling": scaling, "x_softcap": softcap, "x_head_mask": head_mask}
            decisions = {"x0.num_key_value_groups == 1": not repeats}
            decisions["x4 is not None and x4.ndim == 4"] = has_mask  # flash_attention gets a mask of four axes alone
            for name, is_given in given.items():
                decisions.update({f"{name} is None": not is_given, f"{name} is not None": is_given})
            names = (*_FIRST, *(f"x_{each}" for each in self.names[5:]))
            formula = Formula(self.own, None, decisions, names)
            self.found[key] = formula, _plan(formula.text)
        formula, plan = self.found[key]
        return plan if plan and formula.stands() else None

    def why(self) -> NoFormulaError:
        """Tells why the first choice of arguments gives no formula."""
        return next(iter(self.found.values()))[0].why


def _plan(text: str) -> _Plan | None:
    """Returns the plan whose formula this is: what a few words let it look like, if it is that to the last letter."""
    mask = " + x4[:, :, :, :{k}.shape[-2]]" if "x4[" in text else " + x4" if "x4" in text else ""
    softmax = _SOFTMAX[".to(x1.dtype)" in text]
    parts = "tanh(" in text, "dropout(" in text, ".expand(" in text, ".swapaxes(1, 2)" in text, "[" in mask
    for scaled, scale in _SCALES.items():
        if scaled[len("{s}") :] in text:
            plan = _Plan(scale, *parts)
            if text == _formula(plan, scaled, mask, softmax):
                return plan
    return None


def _formula(plan: _Plan, scaled: str, mask: str, softmax: str) -> str:
    k, v = (_REPEATED.format(x=x) if plan.repeats else x for x in ("x2", "x3"))
    scores = scaled.format(s=f"matmul(x1, {k}.swapaxes(2, 3))")
    if plan.has_softcap:
        scores = f"tanh(({scores}) / x_softcap) * x_softcap"
    weights = softmax.format(s=scores + mask.format(k=k))
    if plan.drops:
        weights = f"dropout({weights}, p=x_dropout, training=x0.training)"
    out = f"matmul({weights}, {v})" + (".swapaxes(1, 2)" if plan.turns else "")
    return written(f"lambda: ({out}, {weights})")


def attending(own: Function) -> Found:
    """Returns what stands for a function that computes attention and its weights."""
    attention, reasons = _Attention(own), set[str]()
    names = attention.names
    defaults = attention.defaults
    if names[:5] != ("module", "query", "key", "value", "attention_mask") or not set(names[5:]) <= set(_OPTIONS):
        raise NoFormulaError(f"its arguments are {', '.join(names)}")
    if {defaults.get(each) for each in _OPTIONS if each != "dropout"} != {None}:
        raise NoFormulaError("an argument has another default than None")
    if not any(attention.plan(given, True, False, False, False) for given in (True, False)):
        raise attention.why()

    @ops.constexpr(check=False, reuse_result=False)
    def settings(
        inputs: tuple[Any, ...], mask: Any, options: tuple[Any, ...], of_cell: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        scaling, dropout, softcap, head_mask = (
            defaults.get(name) if each is None else each for name, each in zip(_OPTIONS, options)
        )
        groups, head_dim, own_scaling, training = of_cell
        repeats = type(groups) is int and groups > 1
        plan = attention.plan(
            mask is not None, scaling is not None, softcap is not None, head_mask is not None, repeats
        )
        q, k, v = inputs
        if plan is None:
            reasons.add("a call's arguments make it another formula")
            return None
        if not attends(q, k, v, mask, groups if plan.repeats else 1, plan.cuts):
            reasons.add("a call's dtypes or shapes do not fit flash_attention, or it would be slower")
            return None
        numbers = {"scaling": scaling, "size": inputs[0][0][-1], "head_dim": head_dim, "own": own_scaling}
        number = numbers[plan.scale]
        scale: Any = 1 / sqrt(number) if plan.scale in ("size", "head_dim") and is_number(number) else number
        dropout_p = (dropout or 0.0) if plan.drops and training else 0.0
        softcap = softcap if plan.has_softcap else 0.0
        settings_: tuple[Any, ...] = scale, softcap, dropout_p
        if not all(map(is_number, settings_)) or not 0 <= dropout_p < 1:
            reasons.add("a call's scale, softcap or dropout is no number that flash_attention takes")
            return None
        return (*map(float, settings_), plan.turns)

    @ops.constexpr(check=False, reuse_result=False)
    def note_use(_: int) -> None:
        reasons.add("a caller may use the weights")

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *more: Any, **named: Any
    ) -> tuple[Tensor, Any]:
        how = None
        if not more:
            how = settings(
                (describe(query), describe(key), describe(value)),
                None if attention_mask is None else describe(attention_mask),
                (
                    described(named.get("scaling")),
                    described(named.get("dropout")),
                    described(named.get("softcap")),
                    described(named.get("head_mask")),
                ),
                (
                    getattr(module, "num_key_value_groups", 1),
                    getattr(module, "head_dim", None),
                    getattr(module, "scaling", None),
                    module.training,
                ),
            )
        if how is None:
            return own(module, query, key, value, attention_mask, *more, **named)
        scale, softcap, dropout_p, turns = how
        if compiling():
            if dropout_p > 0:
                return own(module, query, key, value, attention_mask, *more, **named)
            # A graph leaves out weights that nobody uses.
            weights = own(module, query, key, value, attention_mask, *more, **named)[1]
        else:
            if not is_dropped(1):
                note_use(0)
                return own(module, query, key, value, attention_mask, *more, **named)
            weights = None
        bias = None if attention_mask is None else as_bias(attention_mask, key.shape[2])
        seed = draw_seed() if dropout_p > 0 else None
        out = attention_by_heads((query, key, value), scale, softcap, bias, dropout_p, seed)
        return (out.swapaxes(1, 2).contiguous() if turns else out), weights

    attend.__name__ = own.__name__
    return Found(attend, "msops.flash_attention", None, reasons)


def attention_by_heads(
    inputs: tuple[Tensor, Tensor, Tensor], scale: float, softcap: float, bias: Any, dropout_p: float, seed: Any
) -> Tensor:
    """Returns the attention of queries, keys and values (B, H, T, D).

    Where these are views whose numbers lie as (B, T, H, D), which is how libraries divide what a matrix gives, no
    number is moved, and the result is such a view, too.
    """
    layout = "BHTD"
    if not compiling() and not inputs[0].is_contiguous():
        q, k, v = (x.swapaxes(1, 2) for x in inputs)
        if q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
            inputs, layout = (q, k, v), "BTHD"
    out: Any = flash_attention(
        *inputs, False, scale, None, None, None, softcap, layout, False, bias, None, dropout_p, seed
    )
    return out if layout == "BHTD" else out.swapaxes(1, 2)


def as_bias(mask: Tensor, keys: int) -> Tensor:
    """Returns a mask that is added to scores, of this many keys.

    In float16 a row that the mask hides, by the least number of float16, has equal weights in a library, since that
    number takes all digits of the scores. The kernel adds in float32, where float32's least number does so.
    """
    if mask.shape[3] != keys:
        mask = mask[:, :, :, :keys]
    if mask.dtype == float16:
        return ops.masked_fill(ops.cast(mask, float32), mask == -65504, -3.4028234663852886e38)
    return mask


def described(option: Any) -> Any:
    return describe(option) if isinstance(option, Tensor) else option


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and -inf < value < inf


@once
def attends(q: Description, k: Description, v: Description, mask: Description | None, repeats: int, cuts: bool) -> bool:
    """Tells whether flash_attention takes these, and is not slower."""
    shapes = [each[0] for each in (q, k, v)]
    if any(shape is None or len(shape) != 4 or None in shape or 0 in shape for shape in shapes):
        return False
    if q[1] not in (float16, float32) or {k[1], v[1]} != {q[1]}:
        return False
    (batch, heads, rows, size), (*_, keys, _), last = shapes
    if shapes[1] != (batch, heads // repeats, keys, size) or last[:3] != shapes[1][:3] or heads % repeats:
        return False
    most = _MOST[q[1]] if is_on_gpu() else 512
    is_slow = is_on_gpu() and (min(rows, keys) < SHORT or size % 8 or last[3] % 8)
    if is_slow or max(size, last[3]) > most:
        return False
    return mask is None or _is_added(mask, q[1], (batch, heads, rows, keys), cuts)


def _is_added(mask: Description, dtype: mindspore.Type, sizes: tuple[int, ...], cuts: bool) -> bool:
    """Tells whether a mask, where it is cut also one of more keys, is added to the scores."""
    shape = mask[0]
    if shape is None or len(shape) != 4 or None in shape or mask[1] != dtype:
        return False
    shape = (*shape[:3], min(shape[3], sizes[3])) if cuts else shape
    return all(n in (1, size) for n, size in zip(shape, sizes))


def blocks(own: Function, owner: type) -> Found:
    """Returns what stands for the method of a diffusion model that computes attention of four axes as blocks of
    matrices. Its formula may have casts to float32, or leave them out."""
    if tuple(inspect.signature(own).parameters) != ("self", "query", "key", "value", "attn_mask"):
        raise NoFormulaError("its arguments are others than the formula's")
    formulas = []
    for casts_inputs in (False, True):
        for casts_scores in (False, True):
            decisions = {"x4 is not None and x4.dtype == bool_": False, "x1.ndim > 3": True, "x4 is None": True}
            decisions.update({"x0.upcast_attention": casts_inputs, "x0.upcast_softmax": casts_scores})
            formula = Formula(own, owner, decisions)
            q, k, v = (f"{x}.reshape(-1, {x}.shape[-2], {x}.shape[-1])" for x in ("x1", "x2", "x3"))
            cast = ".to(float32)" if casts_inputs else ""
            scores = f"bmm({q}{cast} * x0.scale_sqrt, {k}{cast}.swapaxes(-1, -2) * x0.scale_sqrt)"
            weights = f"softmax({scores}{'.to(float32)' if casts_scores else ''}, dim=-1).to({q}.dtype)"
            if formula.text != written(f"lambda: bmm({weights}, {v}).reshape(*x1.shape)"):
                raise formula.why
            formulas.append(formula)
    flag = formulas[0].flag

    def math_attention_op(self: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None) -> Any:
        if (
            getattr(self, flag)
            and attn_mask is None
            and _attends_as(describe(query), describe(key), describe(value), self.scale_sqrt)
        ):
            return flash_attention(query, key, value, False, self.scale_sqrt**2)
        return own(self, query, key, value, attn_mask)

    return Found(math_attention_op, "msops.flash_attention", formulas[0], set())


@once
def _attends_as(q: Description, k: Description, v: Description, scale: Any) -> bool:
    return is_number(scale) and attends(q, k, v, None, 1, False) and q[0][3] == v[0][3]
