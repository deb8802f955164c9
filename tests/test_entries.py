"""Tests the C entries by themselves: what valid calls write, and that wrong calls are refused and change no memory.

All calls come from the cards. A changed call is wrong if the operator's rule refuses its inputs, or if the rule
promises other results than the call provides.

Wrong calls are made in three places. opcheck's checks, which these tests share, take what users may write; here, they
require the exact status, one line on stderr, null pointers and wrong attributes; fuzz_entries.cc draws calls at random.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re

import numpy as np
import pytest

import msops
from card import DTYPES, calls_of_specs, cards, check_formula, names_of
from child import ROOT
from guarded_call import GuardedCall
from msops.operators.sigmoid import forward
from msops.testing import memory
from msops.testing.checks import assert_equal
from msops.testing.entries import check_call
from msops.testing.entry import Param, Status, has_gpu_code
from msops.testing.process import Process, Where
from write_calls import example_cards

CARDS = cards()
OF_ADDRESSES = {"concat"}  # libraries that take addresses: a wrong one ends the process. Files of their own test them.
FEW, MANY, MOST = 2**16, 2**18, 2**21  # elements of a call's tensors


HOSTILE = [
    pytest.param(card, *card.entry_cases()[case], id=f"{card.name()}-{case}")
    for card in CARDS
    if card.operators()
    for case in card.hostile or (card.small,)
]


@pytest.fixture(scope="module")
def process():
    """Returns a process that calls entries, and may crash."""
    with Process(Where()) as process:
        yield process


def sizes_of(card, shapes, settings):
    """Returns, for each of a case's calls, how many elements its tensors have together."""
    calls = calls_of_specs(card.operators(shapes, **settings), shapes)
    return [sum(spec.size for spec in call.params.values()) for call in calls]


class Attempt:
    """Makes checks of opcheck's list. Wrong calls are made once for each set of parameters of an entry, in one dtype:
    an entry checks ranks and shapes before anything else, whatever they are."""

    def __init__(self):
        self.made = set()

    def __call__(self, check, where, function, *arguments):
        if check == "wrong calls":
            [call] = arguments
            parameters = call.name, *(array.name for array in call.arrays)
            if parameters in self.made:
                return True
            self.made.add(parameters)
        try:
            return function(*arguments) or True
        except AssertionError as error:
            raise AssertionError(f"{check}: {where}: {error}") from error


@pytest.mark.parametrize(
    "dtypes", [pytest.param(DTYPES, marks=pytest.mark.wide, id="all dtypes"), pytest.param((), id="in turn")]
)
@pytest.mark.parametrize("card", [card for card in CARDS if card.operators()], ids=lambda card: card.name())
def test_valid_calls(card, dtypes, process, capfd):
    """Valid calls give the formulas' results, and pass opcheck's checks of an entry, wrong calls among them:
    neighbouring cases in different dtypes, and the smallest in all."""
    attempt = Attempt()
    for (case, (shapes, settings)), checked in zip(card.entry_cases().items(), itertools.cycle(DTYPES)):
        if sum(sizes_of(card, shapes, settings)) > FEW:
            continue
        for dtype in dtypes or (DTYPES if case == card.small else (checked,)):
            for i, call in enumerate(card.entry_calls(shapes, settings, dtype)):
                results, what = names_of(call.operator).results, f"{call.operator.entry.name}, {case}, {dtype}"
                if card.formulas and case not in card.without_formula:
                    formula = functools.partial(card.formulas[i], **settings)
                    check_formula(call, formula, card.roundings, card.units(**settings))
                if dtype == checked or case == card.small:
                    made = check_call(attempt, "status", what, call.operator, call.inputs, results, process)
                    assert made.said == ""
                    assert_equal(made.outputs(), call.results, [what] * len(results))
                assert all(np.isfinite(result).all() for result in call.results), what
                if not all(array.size for array in call.params.values()):  # a GuardedCall passes null for these
                    assert GuardedCall(call, capfd).call() == (Status.OK, [])


@pytest.mark.parametrize(("card", "shapes", "settings"), HOSTILE)
def test_wrong_calls(card, shapes, settings, capfd):
    for dtype in DTYPES:
        for call in card.entry_calls(shapes, settings, dtype, parts=2):
            guarded = GuardedCall(call, capfd)
            refuses_dtypes(guarded)
            if dtype == "float32":
                refuses_ranks(guarded)
                refuses_lengths(guarded)
                refuses_lengths_that_agree(guarded)
                refuses_gradients_of_wrong_inputs(guarded)
                refuses_null_pointers(guarded)
                refuses_attributes(guarded, card.right_numbers)
                if not has_gpu_code(call.operator.entry.library):  # which would run
                    guarded.refused(Status.NO_GPU_CODE, stream=1)


def refuses_dtypes(guarded):
    for name, param in guarded.params.items():
        for wrong in {"int32", "bfloat16", "", None, *DTYPES} - {param.dtype}:
            if not guarded.fits(dtypes={name: wrong}):
                guarded.refused_with(name, Status.BAD_DTYPE, dtype=wrong)
    for wrong in ("int32", "complex64", "float"):  # bfloat16 is missing, since formulas take it
        if not guarded.fits(dtypes=dict.fromkeys(guarded.params, wrong)):
            guarded.refused(Status.BAD_DTYPE, arrays=[p._replace(dtype=wrong) for p in guarded.params.values()])


def refuses_ranks(guarded):
    """A wrong rank is BAD_RANK, or BAD_SHAPE where the signature leaves the rank open. For results of `infer` it may be
    either of the two."""
    inputs = {tensor.name: tensor.sizes for tensor in guarded.operator.signature.inputs}
    for name, param in guarded.params.items():
        sizes = inputs.get(name)
        is_open = sizes is None or any(isinstance(n, ast.Starred) for n in sizes)
        ranked = name in guarded.names.scratch or not is_open
        statuses = [Status.BAD_RANK] * bool(ranked or name not in inputs) + [Status.BAD_SHAPE] * (not ranked)
        for shape in ((*param.shape, 1), (1, *param.shape), param.shape[:-1], param.shape[1:]):
            if shape != param.shape and (name not in guarded.names.inputs or not guarded.fits({name: shape})):
                guarded.refused_with(name, *statuses, shape=shape)
        guarded.refused_with(name, Status.BAD_RANK, rank=-1)


def refuses_lengths(guarded):
    for name, param in guarded.params.items():
        for axis, length in enumerate(param.shape):
            for wrong in (-1, -(2**63), 2**62, 2**63 - 1, length + 1, length - 1, length + 2**31, length + 2**32):
                shape = (*param.shape[:axis], wrong, *param.shape[axis + 1 :])
                is_parts = name in guarded.names.scratch and axis == 0 and len(shape) == 2 and 0 < wrong < 2**60
                if not is_parts and (name in guarded.names.scratch or not guarded.fits({name: shape})):
                    guarded.refused_with(name, Status.BAD_SHAPE, shape=shape)
        if name in guarded.names.scratch:
            guarded.refused_with(name, Status.BAD_SHAPE, shape=(0, *param.shape[1:]))


def refuses_lengths_that_agree(guarded):
    """Lengths that are equal in several tensors change together."""
    shapes = {name: param.shape for name, param in guarded.params.items()}
    for length in {n for shape in shapes.values() for n in shape}:
        for other in {0, 1, length - 1, length + 1}:
            changed = {name: tuple(other if n == length else n for n in shape) for name, shape in shapes.items()}
            if not guarded.fits(changed):
                guarded.refused_with_shapes(changed, Status.BAD_SHAPE)


def refuses_gradients_of_wrong_inputs(guarded):
    """An input's length changes together with that of its gradient."""
    for name in guarded.names.inputs:
        for axis, length in enumerate(guarded.params[name].shape):
            for other in (length - 1, length + 1):
                shape = (*guarded.params[name].shape[:axis], other, *guarded.params[name].shape[axis + 1 :])
                changed = {each: shape for each in (name, f"d{name}") if each in guarded.params}
                if not guarded.fits(changed):
                    guarded.refused_with_shapes(changed, Status.BAD_SHAPE)


def refuses_null_pointers(guarded):
    for name, param in guarded.params.items():
        guarded.refused_with(name, Status.NULL_POINTER, pointer=None)
        if param.shape:
            guarded.refused_with(name, Status.NULL_POINTER, shape=None, rank=len(param.shape))


def refuses_attributes(guarded, right_numbers):
    attributes = guarded.operator.attributes
    if attributes:
        guarded.refused(Status.BAD_ATTRIBUTE, attributes=None)
    for name, value in attributes.items():
        guarded.refused(Status.BAD_ATTRIBUTE, attributes={key: n for key, n in attributes.items() if key != name})
        wrong_values = (np.nan, np.inf) if isinstance(value, float) else (-1, 2**40)
        for wrong in set(wrong_values).difference(right_numbers.get(name, ())):
            guarded.refused(Status.BAD_ATTRIBUTE, attributes={**attributes, name: wrong})


@pytest.mark.parametrize(("card", "shapes", "settings"), HOSTILE)
def test_what_the_rule_takes(card, shapes, settings, process):
    """A forward entry takes all that its rule takes. A gradient's rule does not know every condition, so that its entry
    may refuse some calls, but it accesses nothing outside the arrays."""
    for number, call in enumerate(card.entry_calls(shapes, settings, "float32", parts=2)):
        results = names_of(call.operator).results
        made = memory.EntryCall(call.operator, call.inputs, results, process)
        if number == 0:
            memory.check_rule_agrees(made)
            continue
        for i, x in enumerate(call.inputs):
            for shape in memory.other_shapes(x.shape):
                if memory.outputs_with(made, i, shape) is not None:
                    changed = [*call.inputs[:i], np.resize(x, shape), *call.inputs[i + 1 :]]
                    memory.check_bounds(memory.EntryCall(call.operator, changed, results, process))


def test_strided_array():
    with pytest.raises(ValueError, match=r"^an entry takes contiguous arrays only$"):
        Param.of(np.zeros((2, 3)).T)


def test_every_operator_has_a_card():
    """Each library and each public function of an operator belongs to a card."""
    libraries = {operator.entry.library.name for card in CARDS for operator in card.operators()}
    assert libraries | OF_ADDRESSES == {path.stem for path in (ROOT / "aot_kernels").glob("*.cu")}
    public = [getattr(msops, name) for name in msops.__all__]
    functions = {f for f in public if inspect.isfunction(f) and f.__module__.startswith("msops.operators.")}
    assert functions <= {type(card).function for card in CARDS}


def test_every_entry_is_fuzzed():
    every = [*CARDS, *example_cards()]
    sources = [*ROOT.glob("aot_kernels/*.cu"), *ROOT.glob("examples/*/*.cu")]
    sources = [source for source in sources if source.stem not in OF_ADDRESSES]
    written = re.findall(
        r"^MSOPS_(?!SCRATCH)\w+\((\w+)[,)]", "".join(source.read_text() for source in sources), re.MULTILINE
    )
    cases = [(card, case) for card in every for case in (((), {}), *card.entry_cases().values())]
    fuzzed = {
        operator.entry.name for card, (shapes, settings) in cases for operator in card.operators(shapes, **settings)
    }
    written.remove("BinaryMixedForward")  # the fuzzer takes one dtype for all that have no other
    assert sorted(fuzzed) == sorted(written)


@pytest.fixture
def use_threads():
    """Returns a function that sets how many threads entries take."""
    openmp = forward.entry.library.handle
    before = openmp.omp_get_max_threads()
    yield openmp.omp_set_num_threads
    openmp.omp_set_num_threads(before)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name())
def test_results_do_not_depend_on_the_number_of_threads(card, use_threads):
    """These calls are large enough for threads."""
    for case, (shapes, settings) in card.entry_cases().items():
        if MANY < max(sizes_of(card, shapes, settings), default=0) < MOST:
            results = []
            for threads in (1, 5):
                use_threads(threads)
                results.append([call.results for call in card.entry_calls(shapes, settings, "float32")])
            for got, want in zip(*results):
                assert_equal(got, want, [case] * len(want))
