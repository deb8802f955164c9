"""Compiles methods of libraries again in which some statements are calls of msops: gated residuals, norms with a scale
and a shift for each sample, and norms of sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import adaptive_norms, gated_residuals, norms_of_sums
from .formula import Found, NoFormulaError
from .rewritten import compiled, tree_of_method

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = Callable[..., Any]

# Each may read a method or not, and has a Reader, the name of its operator, and the functions that the calls are of.
# The first one looks at the places of names, which the calls that the others make do not have.
_PARTS = gated_residuals, adaptive_norms, norms_of_sums


def may_rewrite(cls: type, value: Any) -> bool:
    """Tells whether a method of a class may have such statements."""
    return any(part.may_read(cls, value) for part in _PARTS)


def rewriting(own: Function, owner: type) -> Found:
    """Returns what stands for such a method."""
    tree = tree_of_method(own)
    operators: list[str] = []
    functions: dict[str, Any] = {}
    reasons = set[str]()
    for part in _PARTS:
        if part.may_read(owner, own):
            reader = part.Reader(own.__code__.co_varnames[0])
            reader.read(tree)
            if reader.count:
                operators.append(part.OPERATOR)
                functions.update(part.functions(reasons))
    if not operators:
        raise NoFormulaError("")  # it has nothing that could be recognized
    return Found(compiled(own, tree, functions), " and ".join(operators), None, reasons)
