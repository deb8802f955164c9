"""Gives attention that a longer function of a library holds to flash_attention.

The function is compiled again from its own source, with a call before the statements of the attention, which stay for
all calls that the operator does not take.
"""

from __future__ import annotations

import ast
import inspect
import math
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, nn, ops

from msops.core.compiled import once
from msops.core.inputs import describe
from msops.operators.flash_attention import draw_seed

from .attention_steps import LEAST, OUT, PRODUCTS, Inner, Step, Steps
from .callers import is_dropped, use_of_name
from .formula import Found, Meanings, NoFormulaError
from .gates import is_as_its_class, of_mint
from .rewritten import compiled, tree_of
from .statements import PREFIX, SQRT, Calls, both, texts
from .written_attention import as_bias, attends, attention_by_heads, is_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from msops.core.inputs import Description

    Function = Callable[..., Any]

SOFTMAX = "softmax"
_ATTEND, _STAY, _STEPS, _TELL = (PREFIX + each for each in ("attend", "stay", "steps", "tell"))
_UNFIT = "a call's dtypes or shapes do not fit flash_attention, or it would be slower"
_DROPOUTS = {getattr(nn, "Dropout", None), of_mint("Dropout")}


def is_long(value: Any) -> bool:
    """Tells whether a class's attribute is a method that may compute attention among other things."""
    names = set(value.__code__.co_names) if inspect.isfunction(value) else set()
    return SOFTMAX in names and bool(PRODUCTS & names)


def holding(own: Function) -> Found:
    """Returns what stands for a method that computes attention among other things."""
    try:
        return _holding(own)
    except NoFormulaError:
        raise
    except Exception:  # noqa: BLE001 (whatever is wrong with other people's source, it is no formula)
        raise NoFormulaError("its source cannot be read") from None


def _holding(own: Function) -> Found:
    tree, meanings, cell = tree_of(own), Meanings(), own.__code__.co_varnames[0]
    lines, first, steps = _find(own, tree, meanings)
    after = _after(tree.body, lines) or []
    place, guards = _uses(tree, steps, [*lines[first + steps.count :], *after])
    if not set(steps.values) <= set(own.__code__.co_varnames) - set(own.__code__.co_cellvars):
        raise NoFormulaError("other functions may read its scores or weights")
    own_lines, now = lines[first : first + steps.count], _replaced(steps, place, [*guards, *steps.guards], cell)
    if steps.told is not None:
        now = [ast.If(_untold(steps, *steps.told), own_lines, now)]
    lines[first : first + steps.count] = now
    reasons = set[str]()

    def stay() -> None:
        reasons.add("a call asks for more than the result of the attention")

    def tells(inputs: tuple[Any, Any], steps: tuple[tuple[str, Any, tuple[Any, ...]], ...]) -> bool:
        is_told = _tells(inputs, steps)
        reasons.update(() if is_told else (_UNFIT,))
        return is_told

    functions = {_ATTEND: _attending(meanings, reasons), _STAY: stay, SQRT: _root, _TELL: tells}
    return Found(compiled(own, tree, functions), "msops.flash_attention", None, reasons)


def _find(own: Function, tree: ast.FunctionDef, meanings: Meanings) -> tuple[list[ast.stmt], int, Steps]:
    """Returns a list of statements that has attention, where it begins, and its steps."""
    local = {*own.__code__.co_varnames, *own.__code__.co_cellvars}
    why, most = NoFormulaError("its formula is none that msops knows"), 1
    for lines in _blocks(tree.body):
        for i, line in enumerate(lines):
            if isinstance(line, ast.Assign) and any(f"{each}(" in ast.unparse(line) for each in PRODUCTS):
                steps = Steps(Calls(meanings, own.__globals__, local, own.__code__.co_varnames[0]))
                try:
                    steps.read(lines[i:])
                except NoFormulaError as error:
                    why, most = (error, steps.count) if steps.count > most else (why, most)
                else:
                    return lines, i, steps
    raise why


def _blocks(lines: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Yields the lists of statements that run once, one after the other."""
    yield lines
    for line in lines:
        if isinstance(line, ast.If):
            yield from _blocks(line.body)
            yield from _blocks(line.orelse)


def _after(lines: list[ast.stmt], block: list[ast.stmt]) -> list[ast.stmt] | None:
    """Returns what runs after a block in these statements, or None if it is not in them."""
    if lines is block:
        return []
    for i, line in enumerate(lines):
        for inside in (line.body, line.orelse) if isinstance(line, ast.If) else ():
            after = _after(inside, block)
            if after is not None:
                return [*after, *lines[i + 1 :]]
    return None


def _uses(tree: ast.FunctionDef, steps: Steps, after: list[ast.stmt]) -> tuple[int | None, list[ast.expr]]:
    """Returns at which place the function returns weights, if it does, and what must be false if they are dropped."""
    places, guards = set(), set[str]()
    rest: Any = ast.FunctionDef(tree.name, tree.args, [*after, ast.Pass()], [])
    for name in steps.values:
        use = use_of_name(rest, name)
        if use is None:
            raise NoFormulaError("it uses the weights beside their product with the values")
        places |= {use.place} - {None}
        guards |= use.guards
    if len(places) > 1:
        raise NoFormulaError("it returns the weights twice")
    return next(iter(places), None), [ast.Name(each, ast.Load()) for each in sorted(guards)]


def _replaced(steps: Steps, place: int | None, guards: list[ast.expr], cell: str) -> list[ast.stmt]:
    """Returns statements that try flash_attention first, and otherwise are the library's."""
    tried = [_assign(_STEPS, _tuple([]))]
    for each in steps.steps:
        if isinstance(each, Inner):
            tried.append(ast.If(both(each.conditions), [each.line], []))
            continue
        tried.append(_assign(_STEPS, ast.BinOp(_load(_STEPS), ast.Add(), _sum_of([each]))))
    inputs = _tuple((steps.query, steps.key, steps.value))
    lists = [inputs, _load(_STEPS), _tuple(steps.dropout), _tuple(steps.dtypes)]
    attend = _call(_ATTEND, [_load(cell), ast.Constant(place), ast.Constant(steps.axes), *lists])
    tried.append(_assign(OUT, attend))
    if guards:
        unlike = list(dict(zip(texts(guards), guards)).values())
        any_guard = ast.BoolOp(ast.Or(), unlike) if len(unlike) > 1 else unlike[0]
        tried = [ast.If(any_guard, [_assign(OUT, _call(_STAY, []))], tried)]
    is_left = ast.Compare(_load(OUT), [ast.Is()], [ast.Constant(None)])
    fused: list[Any] = [_assign(name, ast.Constant(None)) for name in steps.values]
    for each in steps.steps:
        if isinstance(each, Inner):
            known = [_assign(name, _load(PREFIX + name)) for name in sorted(each.names)]
            fused.append(ast.If(both(each.conditions), known, []))
    fused.append(steps.last)
    return [*steps.moved, *tried, ast.If(is_left, steps.left, fused)]


def _untold(steps: Steps, before: list[Step], guards: list[ast.expr]) -> ast.expr:
    """Returns whether queries and keys do not tell the dtype and the shape of scores after these steps."""
    told = _call(_TELL, [_tuple((steps.query, steps.key)), _sum_of(before)])
    stays = [ast.BoolOp(ast.And(), [each, ast.UnaryOp(ast.Not(), _call(_STAY, []))]) for each in guards]
    return ast.BoolOp(ast.Or(), [*stays, ast.Constant(value=False), ast.UnaryOp(ast.Not(), told)])


def _sum_of(steps: list[Step]) -> ast.expr:
    """Returns an expression of a tuple of what each step does, if its conditions hold."""
    total: ast.expr = _tuple([])
    for each in steps:
        step: ast.expr = _tuple([_tuple([ast.Constant(each.what), each.value, _tuple(each.sizes)])])
        if each.conditions:
            step = ast.IfExp(both(each.conditions), step, _tuple([]))
        total = ast.BinOp(total, ast.Add(), step)
    return total


def _load(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def _tuple(nodes: Any) -> ast.expr:
    return ast.Tuple(list(nodes), ast.Load())


def _call(name: str, arguments: list[ast.expr]) -> ast.expr:
    return ast.Call(_load(name), arguments, [])


def _assign(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _tells(inputs: tuple[Any, Any], steps: tuple[tuple[str, Any, tuple[Any, ...]], ...]) -> bool:
    """Tells whether the scores have the dtype and the shape that queries and keys tell."""
    if not all(isinstance(each, Tensor) for each in inputs) or inputs[0].dtype != inputs[1].dtype:
        return False
    query, key = inputs
    sizes = (*query.shape[:-1], key.shape[-2])
    shapes = [
        (*key.shape[:-2], 1, 1),
        *(each.shape for _, each, view in steps if isinstance(each, Tensor) and not view),
    ]
    if any(
        len(shape) > len(sizes) or any(n not in (1, m) for n, m in zip(shape[::-1], sizes[::-1])) for shape in shapes
    ):
        return False
    dtypes = [query.dtype if what in ("*", "/", "+") else mindspore.bool_ for what, *_ in steps]
    return all(is_number(each) or getattr(each, "dtype", None) == dtype for (_, each, _), dtype in zip(steps, dtypes))


def _root(x: Any) -> Any:
    """Returns the root of a number, or None for what is none."""
    return math.sqrt(x) if is_number(x) and x >= 0 else None


def _attending(meanings: Meanings, reasons: set[str]) -> Function:
    """Returns the function that computes attention, or returns None where the library's own code does."""

    def attend(
        cell: nn.Cell,
        place: int | None,
        axes: int,
        inputs: tuple[Any, ...],
        steps: tuple[tuple[str, Any, tuple[Any, ...]], ...],
        dropout: tuple[Any, ...],
        dtypes: tuple[Any, ...],
    ) -> Tensor | None:
        if not meanings.stand() or not all(isinstance(each, Tensor) for each in inputs):
            return None
        factors = [(what, each) for what, each, _ in steps if what in ("*", "/")]
        scale, dropout_p = _scale(factors, inputs[0]), _probability(cell, dropout)
        if scale is None or dropout_p is None:
            reasons.add("a call's scale or dropout is no number that flash_attention takes")
            return None
        added = [each for each in steps if each[0] not in ("*", "/")]
        are_tensors = all(isinstance(each, Tensor) for _, each, _ in added)
        masks = tuple((what, describe(each), tuple(sizes)) for what, each, sizes in added) if are_tensors else None
        shapes = masks is not None and _shapes(tuple(map(describe, inputs)), axes, masks, dtypes)
        if not shapes:
            reasons.add(_UNFIT)
            return None
        if place is not None and not is_dropped(place, 2):
            reasons.add("a caller may use the weights")
            return None
        q, k, v = (x if len(x.shape) == 4 else x.reshape(shape) for x, shape in zip(inputs, shapes))
        for what, factor in factors:
            if isinstance(factor, Tensor):
                q = q * factor.reshape(()) if what == "*" else q / factor.reshape(())
        bias = _bias(q.dtype, [(what, each) for what, each, _ in added]) if added else None
        seed = draw_seed() if dropout_p > 0 else None
        out = attention_by_heads((q, k, v), scale, 0.0, bias, dropout_p, seed)
        return out if len(inputs[0].shape) == 4 else out.reshape(*inputs[0].shape[:2], v.shape[3])

    return attend


def _scale(factors: list[tuple[str, Any]], query: Tensor) -> float | None:
    """Returns the number that the scores are multiplied by, beside tensors of one number."""
    scale = 1.0
    for what, factor in factors:
        is_one = isinstance(factor, Tensor) and math.prod(factor.shape) == 1 and factor.ndim <= query.ndim
        if is_one and factor.dtype == query.dtype:
            continue
        if not is_number(factor) or not factor:
            return None
        scale = scale * factor if what == "*" else scale / factor
    return float(scale) if is_number(scale) else None


def _probability(cell: nn.Cell, dropout: tuple[Any, ...]) -> float | None:
    """Returns the probability of dropout, which a Cell or two numbers tell."""
    if not dropout:
        return 0.0
    if len(dropout) == 1:
        (of,) = dropout
        if type(of) not in _DROPOUTS or not is_as_its_class(of, cell):
            return None
        own = getattr(of, "p", None)
        p, training = 1 - of.keep_prob if own is None else own, of.training
    else:
        p, training = dropout
    if not is_number(p) or not 0 <= p < 1 or training not in (True, False):
        return None
    return float(p) if training else 0.0


@once
def _shapes(
    inputs: tuple[Description, ...],
    axes: int,
    masks: tuple[tuple[str, Description, tuple[Any, ...]], ...],
    dtypes: tuple[Any, ...],
) -> tuple[tuple[int, ...], ...] | None:
    """Returns the shapes of queries, keys and values with four axes, or None if flash_attention does not take them."""
    shapes, dtype = [each[0] for each in inputs], inputs[0][1]
    if any(shape is None or None in shape or len(shape) not in (3, 4) for shape in shapes):
        return None
    if axes not in (0, len(shapes[0])) or {len(shape) for shape in shapes} != {len(shapes[0])}:
        return None
    if len(shapes[0]) == 3:
        views = {sizes for _, _, sizes in masks} or {(shapes[0][0], 1, shapes[0][1], shapes[1][1])}
        if len(views) > 1 or any(len(sizes) != 4 or not all(map(_is_size, sizes)) for sizes in views):
            return None
        ((batch, heads, rows, keys),) = views
        if rows not in (-1, shapes[0][1]) or keys not in (-1, shapes[1][1]) or batch == heads == -1:
            return None
        batch = shapes[0][0] // heads if batch == -1 else batch
        heads = shapes[0][0] // batch if heads == -1 else heads
        if any(shape[0] != batch * heads for shape in shapes):
            return None
        shapes = [(batch, heads, *shape[1:]) for shape in shapes]
    elif any(sizes for _, _, sizes in masks):
        return None
    q, k, v = ((shape, each[1]) for shape, each in zip(shapes, inputs))
    repeats = q[0][1] if k[0][1] == 1 else 1
    if any(each != dtype for each in dtypes) or not attends(q, k, v, None, repeats, False):
        return None
    sizes = (*q[0][:3], k[0][2])
    for what, (shape, of), _ in masks:
        if shape is None or None in shape or len(shape) > 4 or of != (dtype if what == "+" else mindspore.bool_):
            return None
        if not all(n in (1, size) for n, size in zip(shape, sizes[4 - len(shape) :])):
            return None
    return tuple(shapes)


def _is_size(size: Any) -> bool:
    return type(size) is int and (size > 0 or size == -1)


def _bias(dtype: Any, masks: list[tuple[str, Tensor]]) -> Tensor:
    """Returns what is added to the scores, of four axes."""
    total: Any = None
    for what, given in masks:
        mask = given if given.ndim == 4 else given.reshape((1,) * (4 - given.ndim) + tuple(given.shape))
        if what == "+":
            total = mask if total is None else total + mask
        else:
            is_hidden = ops.logical_not(mask) if what == "keep" else mask
            base = ops.zeros(is_hidden.shape, dtype) if total is None else total
            total = ops.masked_fill(base, is_hidden, Tensor(LEAST[dtype], dtype))
    bias = as_bias(total, total.shape[3])
    return bias if any(what == "+" for what, _ in masks) else ops.stop_gradient(bias)
