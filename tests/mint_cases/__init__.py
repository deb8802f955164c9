"""Holds small programs that call `mindspore.mint`, each with what NumPy says to them."""

import importlib
from pathlib import Path
from typing import NamedTuple


class Case(NamedTuple):
    """Describes a program. Its floating inputs are given in float64, and cast to each of the dtypes."""

    program: object
    inputs: tuple
    reference: object  # a function of the inputs in float64
    dtypes: tuple
    differentiable: bool


FOUND = []


def case(*inputs, reference, dtypes=("float32",), differentiable=True):
    """Decorates a program, a function or a class of Cells. It is called with Tensors in place of the inputs that are
    arrays."""

    def decorate(program):
        FOUND.append(Case(program, inputs, reference, dtypes, differentiable))
        return program

    return decorate


def cases():
    """Returns the cases of all modules of this folder."""
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        importlib.import_module(f"{__name__}.{path.stem}")
    return FOUND
