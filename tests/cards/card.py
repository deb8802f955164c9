"""A card is the specification of an operator: its functions, formulas, shapes and values. Each file of tests/operators
has one. The tests of entries, of the emulator and of GPUs go over all cards, and so do the fuzzer, the documentation's
tests and the benchmarks, which take formulas and shapes from them. `clouds.py` has the formulas that the cards of point
clouds share, and `formulas.py` computes Cells by MindSpore's own operators.

This module does not need pytest.
"""

import ast
import importlib
import itertools
import math
import sys
from pathlib import Path
from typing import NamedTuple

import mindspore
import numpy as np

from msops import Operator, Spec
from msops.testing.checks import assert_near, largest, unit
from msops.testing.entry import outputs_of, prepare_operator

DTYPES = ("float16", "float32", "float64")
FOLDER = Path(__file__).resolve().parents[1] / "operators"
MOST = 2**19  # elements of a random tensor


def random(seed, dtype, *shapes):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def zeros(*shapes, dtype=np.float32):
    return [np.zeros(shape, dtype) for shape in shapes]


class Names(NamedTuple):
    """Names an operator's tensors, in the order of its entry's parameters."""

    inputs: list
    results: list
    scratch: list


def names_of(operator):
    return Names(*operator.names(), [tensor.name for tensor in operator.signature.scratch])


def chain(operator):
    """Returns the operator, its gradient's operator, the operator of that one's gradient, and so on."""
    operators = []
    while isinstance(operator, Operator):
        operators.append(operator)
        operator = operator.gradient
    return operators


def unwritten(shape, dtype):
    """Returns an array whose bytes are all 0xFF, so that its elements are NaN or -1."""
    return np.full(math.prod(shape) * np.dtype(dtype).itemsize, 0xFF, np.uint8).view(dtype).reshape(shape)


class Call(NamedTuple):
    """Describes a call of an operator's entry, by arrays or by Specs."""

    operator: Operator
    inputs: list
    results: list
    scratch: list

    @property
    def params(self):
        """Returns {name: parameter}, in the entry's order."""
        names = [name for names in names_of(self.operator) for name in names]
        return dict(zip(names, [*self.inputs, *self.results, *self.scratch]))


def follow(operators, inputs, compute):
    """Yields the Calls of a forward operator and its gradients. A gradient takes by name the inputs and results of
    earlier calls, and the gradients of those results.

    compute(operator, inputs) returns the outputs and the gradients of the outputs.
    """
    known = dict(zip(names_of(operators[0]).inputs, inputs)) if operators else {}
    for operator in operators:
        names = names_of(operator)
        taken = [known[name] for name in names.inputs]
        outputs, douts = compute(operator, taken)
        results = outputs[: len(names.results)]
        yield Call(operator, taken, results, outputs[len(results) :])
        known.update(zip(names.results, results))
        known.update(zip((f"d{name}" for name in names.results), douts))


def input_dtypes(operator, dtype):
    """Returns the dtypes of an operator's inputs, given the common one, if the operator takes it. An index is int32."""
    dtype = dtype if dtype in operator.signature.dtypes else operator.signature.dtypes[0]
    dtypes = {}
    for tensor in operator.signature.inputs:
        dtypes[tensor.name] = operator.signature.allowed(tensor, dtype, dtypes)[0]
    return list(dtypes.values())


def calls_of_specs(operators, shapes, dtype=mindspore.float32):
    """Returns the Calls for inputs of these shapes, by Specs alone."""

    def infer(operator, specs):
        outputs = operator.infer(*specs)
        return outputs, outputs

    dtypes = input_dtypes(operators[0], dtype) if operators else ()
    inputs = [Spec(tuple(shape), own) for shape, own in zip(shapes, dtypes)]
    return list(follow(operators, inputs, infer))


def length(random):
    """Chooses a number of elements along an axis, mostly a small one."""
    return random.randrange(random.choice((4, 8, 8, 8, 8, 8, 8, 70)))


def lengths(random):
    """Chooses a shape of up to five axes."""
    return tuple(length(random) for _ in range(random.randrange(6)))


def check_formula(call, formula, roundings, units):
    """Requires that the results of a Call by arrays equal those of a NumPy function.

    An error may be `roundings` of the largest number on the way, plus `units` in the last place of the result. The
    function of the inputs' magnitudes tells the largest number. Results that are not floating must be equal.
    """
    floats = [x.dtype.kind == "f" for x in call.inputs]
    wide = max([x.dtype for x in call.inputs if x.dtype.kind == "f"] + [np.dtype(np.float32)])
    exact_dtype = np.longdouble if wide == np.float64 else np.float64  # the first is many times as slow
    exact = [x.astype(exact_dtype) if floating else x for x, floating in zip(call.inputs, floats)]
    magnitudes = formula(*(np.abs(x) if floating else x for x, floating in zip(exact, floats)))
    for name, got, want, magnitude in zip(names_of(call.operator).results, call.results, formula(*exact), magnitudes):
        assert got.shape == want.shape
        if got.dtype.kind != "f":
            np.testing.assert_array_equal(got, want, f"{call.operator.entry.name}: {name}")
            continue
        size = max(map(largest, (want, magnitude, *itertools.compress(exact, floats))))
        allowed = roundings * np.finfo(wide).eps * size + units * unit(want, got.dtype)
        assert_near(got, want, allowed, f"{call.operator.entry.name}: {name}")


class Card:
    """Describes an operator. Most cards need `operator`, `formulas` and `cases`; the rest follows from signatures.

    A formula is a function of an entry's inputs and of the settings. It computes with plain NumPy in the dtype of its
    arguments, and returns a tuple.
    """

    function = None  # the function under test
    operator = None  # the forward operator, if it does not depend on settings
    formulas = ()  # one for the forward operator, one for its gradient, ...
    cases = {}  # name -> (shapes of the inputs, settings)
    further = {}  # cases for the entries alone: the sizes that kernels tell apart
    small = None  # the case for tests that need just one, of some tens of elements
    roundings = 8  # how many roundings of the largest number an entry's error may be
    without_formula = ()  # the cases for which NumPy would take too much memory
    hostile = ()  # the cases from which wrong calls are made, instead of `small`
    right_numbers = {}  # attribute -> which of -1 and 2^40, that other attributes refuse, it takes
    others = ()  # arguments of each call of `other_calls`, which returns Calls in other dtypes, or of special numbers
    huge = ()  # arguments of each call of `check_huge`, which calls entries with more than 2^31 elements

    @classmethod
    def name(cls):
        return cls.__module__.removeprefix("test_")

    def operators(self, shapes=(), **settings):
        """Returns the forward operator and its gradients' operators, for inputs of these shapes."""
        return chain(self.operator)

    def units(self, **settings):
        """Returns how many units in the last place of a result its rounding may be off: half a unit, and a quarter for
        unlucky ties. An operator that is defined to round on the way, to the dtype of its inputs, has more."""
        return 0.75

    def entry_cases(self):
        return {**self.cases, **self.further}

    def inputs(self, shapes, dtype, seed=1, **settings):
        """Returns random inputs."""
        return random(seed, dtype, *shapes)

    def result_dtype(self, dtype):
        """Returns the dtype of the function's results for inputs of a dtype, or a tuple of the dtypes of each."""
        return dtype

    def reference(self, *inputs, **settings):
        return self.formulas[0](*inputs, **settings)

    def reference_gradient(self, *arguments, **settings):
        """Returns the gradients of all inputs: zeros for those whose gradient the operator does not give. The arguments
        are the inputs, then the gradients of the results."""
        forward, *backward = self.operators([x.shape for x in arguments], **settings)[:2]
        names = names_of(forward)
        inputs, douts = arguments[: len(names.inputs)], arguments[len(names.inputs) :]
        known = dict(zip(names.inputs, inputs))
        known.update(zip(names.results, self.reference(*inputs, **settings)))
        known.update(zip((f"d{name}" for name in names.results), douts))
        gradients = {}
        if backward:
            takes, gives, _ = names_of(*backward)
            gradients = dict(zip(gives, self.formulas[1](*(known[name] for name in takes), **settings)))
        return tuple(gradients.get(f"d{name}", np.zeros_like(x)) for name, x in zip(names.inputs, inputs))

    def scratch_of_parts(self, inputs, shape, parts):
        """Returns the shape of scratch for sums in `parts` parts, if the entry takes another number of parts than the
        operator chooses."""
        return (parts, *shape[1:]) if len(shape) == 2 else shape

    def entry_calls(self, shapes, settings, dtype, seed=1, scale=1, parts=0):
        """Returns the Calls of all entries by arrays, as the entries compute them on the CPU."""

        def compute(operator, inputs):
            outputs = outputs_of(operator, inputs)
            if parts:
                n = len(names_of(operator).results)
                outputs[n:] = [(self.scratch_of_parts(inputs, shape, parts), kind) for shape, kind in outputs[n:]]
            arrays = [unwritten(*output) for output in outputs]
            status = prepare_operator(operator, [*inputs, *arrays])()
            assert status == 0, f"{operator.entry.name} returns {status}"
            douts = random(seed + 1, np.float64, *(shape for shape, _ in outputs))
            kinds = [kind if np.dtype(kind).kind == "f" else dtype for _, kind in outputs]
            return arrays, scaled([np.asarray(dout, kind) for dout, kind in zip(douts, kinds)])

        def scaled(arrays):
            return [np.asarray(scale * x, x.dtype) if x.dtype.kind == "f" else x for x in arrays]

        inputs = scaled(self.inputs(shapes, dtype, seed, **settings))
        return list(follow(self.operators(shapes, **settings), inputs, compute))

    def random_case(self, random):
        """Chooses (shapes, settings) of a valid call."""
        operator = self.operators()[0]
        tensors, values = operator.signature.inputs, dict(operator.signature.values)
        for tensor in tensors:
            for size in tensor.sizes or ():
                if isinstance(size, ast.Starred):
                    values.setdefault(size.value.id, lengths(random))
                elif isinstance(size, ast.Name):
                    values.setdefault(size.id, length(random))
        any_shape = lengths(random)
        return [any_shape if t.sizes is None else t.shape(operator.label, values) for t in tensors], {}

    def random_call(self, random):
        """Chooses a case whose tensors have at most MOST elements each."""
        while True:
            shapes, settings = self.random_case(random)
            calls = calls_of_specs(self.operators(shapes, **settings), shapes)
            if max(spec.size for call in calls for spec in call.params.values()) <= MOST:
                return shapes, settings


class OperatorCard(Card):
    """Serves as a card where there is only an operator."""

    def __init__(self, operator):
        self.operator = operator


def results_of(operator, *inputs):
    """Returns the results of an operator's entry."""
    outputs = [np.empty(shape, dtype) for shape, dtype in outputs_of(operator, inputs)]
    assert prepare_operator(operator, [*inputs, *outputs])() == 0
    return outputs[: len(names_of(operator).results)]


def cards():
    """Returns the cards of all files in `operators`."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    for path in sorted(FOLDER.glob("test_*.py")):
        importlib.import_module(path.stem)
    classes = [Card]
    for each in classes:  # the list grows meanwhile
        classes += each.__subclasses__()
    return sorted((each() for each in classes if each.cases), key=lambda card: card.name())
