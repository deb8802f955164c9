"""Leaves out the causal mask that a library makes in each layer, where `causal` of flash_attention says the same."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, float16, float32, ops

from msops.core.compiled import once
from msops.core.inputs import describe
from msops.operators.flash_attention import draw_seed, flash_attention

from .formula import Formula, Found, NoFormulaError, written

if TYPE_CHECKING:
    from collections.abc import Callable

    from msops.core.inputs import Description

    Function = Callable[..., Any]

FLASH = "_flash_attention_forward"
INTERFACE = "flash_attention_forward"  # the function that calls it, which modules with Cells have
_FALSE = (  # conditions of errors and of what is another formula
    "x_max_length_q is not None or x_max_length_k is not None",
    "x_cu_seq_lens_q is not None or x_cu_seq_lens_k is not None",
    "x_sliding_window is not None",
    "x_use_top_left_mask",
    "x_softcap is not None",
    "x_deterministic",
    "x_input_layout == 'TND'",
    "x_softmax_scale is None",
    "x_target_dtype in (float16, bfloat16)",
)
_TRUE = "x_input_layout == 'BSND'", "x_is_causal and x0.shape[1] > 1"
_MASKS = {  # whether a mask is given, and is of bool; what hides keys then
    (False, False): "triu(ones((x0.shape[1], x1.shape[1]), dtype=bool_), diagonal=1)",
    (True, True): "logical_not(x3) | triu(ones_like(logical_not(x3), dtype=bool_), diagonal=1)",
    (True, False): "x3.bool() | triu(ones_like(x3.bool(), dtype=bool_), diagonal=1)",
}
_SCORE = (
    "flash_attention_score(x0{cast}, x1{cast}, x2{cast}, head_num=x0.shape[2], attn_mask={mask}, "
    "keep_prob=1.0 - x_dropout, scalar_value=x_softmax_scale, input_layout=x_input_layout).to(x0.dtype)"
)


def causing(own: Function) -> Found:
    """Returns what stands for a function that hides later keys by a mask that it makes itself."""
    parameters = [each for each in inspect.signature(own).parameters.values() if each.kind != each.VAR_KEYWORD]
    names = ("x0", "x1", "x2", "x3", *(f"x_{each.name}" for each in parameters[4:]))
    options = {each.name: each.default for each in parameters[4:]}
    if [each.name for each in parameters[:4]] != ["query_states", "key_states", "value_states", "attention_mask"]:
        raise NoFormulaError("its arguments are others than the formula's")
    formulas = []
    for (is_given, is_bool), mask in _MASKS.items():
        for casts in (False, True):
            decisions = {**dict.fromkeys(_FALSE, False), **dict.fromkeys(_TRUE, True)}
            decisions.update({"x3 is not None": is_given, "x3.dtype == bool_": is_bool, "x3 is None": not is_given})
            # The mask is None no more where it was turned.
            decisions.update({f"{turned} is None": False for turned in ("logical_not(x3)", "x3.bool()")})
            decisions["x0.dtype not in (float16, bfloat16)"] = casts
            formula = Formula(own, None, decisions, names)
            if formula.text != written("lambda: " + _SCORE.format(cast=".to(float16)" if casts else "", mask=mask)):
                raise formula.why
            formulas.append(formula)

    @ops.constexpr(check=False, reuse_result=False)
    def is_causal(inputs: tuple[Any, ...], mask: Any, given: tuple[Any, ...]) -> bool:
        causal, dropout, scale, layout, *others = given
        is_plain = causal is True and layout in (None, "BSND") and all(each in (None, False) for each in others)
        is_number = all(type(each) in (int, float) for each in (scale, dropout)) and 0 <= dropout < 1
        return is_plain and is_number and formulas[0].stands() and _hides(inputs, mask)

    def attend(
        query_states: Tensor, key_states: Tensor, value_states: Tensor, attention_mask: Any, *more: Any, **named: Any
    ) -> Any:
        given = (
            named.get("is_causal"),
            named.get("dropout", 0.0),
            named.get("softmax_scale"),
            named.get("input_layout", layout),
            named.get("sliding_window"),
            named.get("softcap"),
            named.get("deterministic"),
            named.get("use_top_left_mask"),
            named.get("cu_seq_lens_q"),
            named.get("cu_seq_lens_k"),
            named.get("max_length_q"),
            named.get("max_length_k"),
            named.get("target_dtype"),
        )
        inputs = describe(query_states), describe(key_states), describe(value_states)
        mask = None if attention_mask is None else describe(attention_mask)
        if more or not is_causal(inputs, mask, given):
            return own(query_states, key_states, value_states, attention_mask, *more, **named)
        hidden = None
        if attention_mask is not None:
            is_bool = attention_mask.dtype == mindspore.bool_
            hidden = ops.logical_not(attention_mask) if is_bool else attention_mask.bool()
        q, k, v = query_states.to(float16), key_states.to(float16), value_states.to(float16)
        dropout_p, seed = (named["dropout"], draw_seed()) if named.get("dropout", 0.0) > 0 else (0.0, None)
        out: Any = flash_attention(
            q, k, v, True, named["softmax_scale"], None, None, hidden, 0.0, "BTHD", False, None, None, dropout_p, seed
        )
        return out.to(query_states.dtype)

    layout = options.get("input_layout")
    attend.__name__ = own.__name__
    return Found(attend, "msops.flash_attention", None, set())


@once
def _hides(inputs: tuple[Description, Description, Description], mask: Description | None) -> bool:
    """Tells whether `causal` hides what a triangle of ones above the diagonal does: keys are as many as queries."""
    (q, k, v), shapes = inputs, [each[0] for each in inputs]
    if any(shape is None or len(shape) != 4 or None in shape or 0 in shape for shape in shapes):
        return False
    if q[1] not in (float16, float32) or {k[1], v[1]} != {q[1]}:
        return False
    (batch, rows, heads, size), (*of_keys, of_size), last = shapes
    if of_keys[:2] != [batch, rows] or of_size != size or last[:3] != shapes[1][:3] or heads % of_keys[2]:
        return False
    if rows < 2 or max(size, last[3]) > 256:
        return False
    if mask is None:
        return True
    shape = mask[0]
    return (
        shape is not None
        and len(shape) == 4
        and shape[2:] == (rows, rows)
        and shape[0] in (1, batch)
        and (shape[1] in (1, heads))
    )
