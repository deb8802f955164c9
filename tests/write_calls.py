"""Writes valid calls of all entries of the package and the examples for fuzz_entries.cc: `write_calls.py FILE`; of some
libraries alone by `write_calls.py FILE LIBRARY ...`.

A call begins with its entry and the numbers of its parameters and attributes. A line for each of these follows, with a
parameter's kind, dtype, rank and lengths, or an attribute's name and value.
"""

import importlib.util
import random
import sys
from pathlib import Path

import mindspore

from card import DTYPES, MOST, OperatorCard, calls_of_specs, cards, chain, names_of
from child import ROOT
from msops import Operator
from msops.core.spec import dtype_name
from msops.testing.entry import attributes_in_mindspore

RANDOM_CALLS = 100  # cases of each operator
LARGEST = (*[2**12] * 39, MOST)  # elements of a tensor; few may have MOST, since such calls are slow


def example_cards():
    """Yields the cards of the operators that the examples make, except for the gradients' operators."""
    for path in sorted((ROOT / "examples").glob("*/*.cu")):
        spec = importlib.util.spec_from_file_location(path.stem, path.with_suffix(".py"))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        operators = [value for value in vars(module).values() if isinstance(value, Operator)]
        gradients = [gradient for operator in operators for gradient in chain(operator)[1:]]
        yield from (OperatorCard(operator) for operator in operators if operator not in gradients)


def calls_of(card, rng):
    """Yields the Calls of a card's cases and of random cases, by Specs."""
    cases = [*card.entry_cases().values(), *(card.random_call(rng) for _ in range(RANDOM_CALLS))]
    for shapes, settings in cases:
        operators = card.operators(shapes, **settings)
        for call in calls_of_specs(operators, shapes, getattr(mindspore, rng.choice(DTYPES))):
            parts = rng.randint(1, 5)
            scratch = [s._replace(shape=card.scratch_of_parts(call.inputs, s.shape, parts)) for s in call.scratch]
            call = call._replace(scratch=scratch)  # noqa: PLW2901 (is what is written)
            if max(spec.size for spec in call.params.values()) <= rng.choice(LARGEST):
                yield call


def lines_of(call):
    attributes, inputs = attributes_in_mindspore(call.operator.attributes), names_of(call.operator).inputs
    yield f"{call.operator.entry.name} {len(call.params)} {len(attributes)}"
    for name, spec in call.params.items():
        kind = "input" if name in inputs else "output"
        yield " ".join(map(str, (kind, dtype_name(spec.dtype), len(spec.shape), *spec.shape)))
    for name, value in attributes.items():
        yield f"{name} {int(value)}"


def main(path, *libraries):
    lines = []
    for card in [*cards(), *example_cards()]:
        used = {operator.entry.library.name for operator in card.operators()}
        if used.intersection(libraries or used):
            rng = random.Random(card.name())  # noqa: S311 (nothing secret)
            lines += [line for call in calls_of(card, rng) for line in lines_of(call)]
    Path(path).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
