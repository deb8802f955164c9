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
import re
import zlib
from pathlib import Path

import numpy as np
import pytest

import msops
from card import DTYPES, calls_of_specs, cards, check_formula, names_of
from child import ROOT, run_python
from guarded_call import GuardedCall
from msops.operators.sigmoid import forward
from msops.testing import memory
from msops.testing.checks import assert_equal
from msops.testing.entries import check_call
from msops.testing.entry import Param, Status, has_gpu_code, prepare_operator
from msops.testing.process import Process, Where
from write_calls import example_cards

CARDS = cards()
FEW, MANY, MOST = 2**16, 2**18, 2**21  # elements of a call's tensors


def hostile_calls():
    """Yields the calls that tests change: one of each entry, and others that a card names."""
    for card in CARDS:
        for case in card.hostile or (card.small,):
            shapes, settings = card.entry_cases()[case]
            for i, operator in enumerate(card.operators(shapes, **settings)):
                yield pytest.param((card, shapes, settings, i), id=f"{operator.entry.name}-{case}")


def attributes_of(card, shapes, settings, i):
    return card.operators(shapes, **settings)[i].attributes


@pytest.fixture(params=hostile_calls())
def call(request, dtype):
    card, shapes, settings, i = request.param
    return card.entry_calls(shapes, settings, dtype, parts=2)[i]


@pytest.fixture
def dtype():
    return "float32"


@pytest.fixture
def guarded(call, capfd):
    return GuardedCall(call, capfd)


def sizes_of(card, shapes, settings):
    """Returns, for each of a case's calls, how many elements its tensors have together."""
    calls = calls_of_specs(card.operators(shapes, **settings), shapes)
    return [sum(spec.size for spec in call.params.values()) for call in calls]


def required(dtype, check, where, function, *arguments):
    """Makes a check of opcheck's list. An entry checks shapes before it asks for the dtype, so that wrong calls of one
    dtype are enough."""
    if check == "wrong calls" and dtype != "float32":
        return True
    try:
        return function(*arguments) or True
    except AssertionError as error:
        raise AssertionError(f"{check}: {where}: {error}") from error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name())
def test_valid_calls(card, dtype, capfd):
    """Valid calls write only the formulas' results, and pass opcheck's checks of an entry, wrong calls among them."""
    attempt = functools.partial(required, dtype)
    with Process(Where()) as process:
        for case, (shapes, settings) in card.entry_cases().items():
            if sum(sizes_of(card, shapes, settings)) > FEW:
                continue
            for i, call in enumerate(card.entry_calls(shapes, settings, dtype)):
                results = names_of(call.operator).results
                if card.formulas and case not in card.without_formula:
                    formula = functools.partial(card.formulas[i], **settings)
                    check_formula(call, formula, card.roundings, card.units(**settings))
                made = check_call(attempt, "status", case, call.operator, call.inputs, results, process)
                assert made.said == ""
                assert_equal(made.outputs(), call.results, [f"{call.operator.entry.name}, {case}"] * len(results))
                assert all(np.isfinite(result).all() for result in call.results), case
                # A GuardedCall passes null for arrays without elements.
                assert GuardedCall(call, capfd).call() == (Status.OK, [])


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(guarded):
    for name, param in guarded.params.items():
        for wrong in {"int32", "bfloat16", "", None, *DTYPES} - {param.dtype}:
            if not guarded.fits(dtypes={name: wrong}):
                guarded.refused_with(name, Status.BAD_DTYPE, dtype=wrong)
    for wrong in ("int32", "complex64", "float"):  # bfloat16 is missing, since formulas take it
        guarded.refused(Status.BAD_DTYPE, arrays=[p._replace(dtype=wrong) for p in guarded.params.values()])


def test_ranks(guarded):
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


def test_lengths(guarded):
    for name, param in guarded.params.items():
        for axis, length in enumerate(param.shape):
            for wrong in (-1, -(2**63), 2**62, 2**63 - 1, length + 1, length - 1, length + 2**31, length + 2**32):
                shape = (*param.shape[:axis], wrong, *param.shape[axis + 1 :])
                is_parts = name in guarded.names.scratch and axis == 0 and len(shape) == 2 and 0 < wrong < 2**60
                if not is_parts and (name in guarded.names.scratch or not guarded.fits({name: shape})):
                    guarded.refused_with(name, Status.BAD_SHAPE, shape=shape)
        if name in guarded.names.scratch:
            guarded.refused_with(name, Status.BAD_SHAPE, shape=(0, *param.shape[1:]))


def test_lengths_that_agree(guarded):
    """Lengths that are equal in several tensors change together."""
    shapes = {name: param.shape for name, param in guarded.params.items()}
    for length in {n for shape in shapes.values() for n in shape}:
        for other in {0, 1, length - 1, length + 1}:
            changed = {name: tuple(other if n == length else n for n in shape) for name, shape in shapes.items()}
            if not guarded.fits(changed):
                guarded.refused_with_shapes(changed, Status.BAD_SHAPE)


def test_gradients_of_wrong_inputs(guarded):
    """An input's length changes together with that of its gradient."""
    for name in guarded.names.inputs:
        for axis, length in enumerate(guarded.params[name].shape):
            for other in (length - 1, length + 1):
                shape = (*guarded.params[name].shape[:axis], other, *guarded.params[name].shape[axis + 1 :])
                changed = {each: shape for each in (name, f"d{name}") if each in guarded.params}
                if not guarded.fits(changed):
                    guarded.refused_with_shapes(changed, Status.BAD_SHAPE)


def test_what_the_rule_takes(call, request):
    """A forward entry takes all that its rule takes. A gradient's rule does not know every condition, so that its entry
    may refuse some calls, but it accesses nothing outside the arrays."""
    names = names_of(call.operator)
    with Process(Where()) as process:
        made = memory.EntryCall(call.operator, call.inputs, names.results, process)
        *_, number = request.node.callspec.params["call"]
        if number == 0:
            memory.check_rule_agrees(made)
            return
        for i, x in enumerate(call.inputs):
            for shape in memory.other_shapes(x.shape):
                if memory.outputs_with(made, i, shape) is not None:
                    changed = [*call.inputs[:i], np.resize(x, shape), *call.inputs[i + 1 :]]
                    memory.check_bounds(memory.EntryCall(call.operator, changed, names.results, process))


def test_null_pointers(guarded):
    for name, param in guarded.params.items():
        guarded.refused_with(name, Status.NULL_POINTER, pointer=None)
        if param.shape:
            guarded.refused_with(name, Status.NULL_POINTER, shape=None, rank=len(param.shape))


@pytest.mark.parametrize("call", [each for each in hostile_calls() if attributes_of(*each.values[0])], indirect=True)
def test_attributes(guarded, request):
    attributes = guarded.operator.attributes
    right = request.node.callspec.params["call"][0].right_numbers
    guarded.refused(Status.BAD_ATTRIBUTE, attributes=None)
    for name, value in attributes.items():
        guarded.refused(Status.BAD_ATTRIBUTE, attributes={key: n for key, n in attributes.items() if key != name})
        wrong_values = (np.nan, np.inf) if isinstance(value, float) else (-1, 2**40)
        for wrong in set(wrong_values).difference(right.get(name, ())):
            guarded.refused(Status.BAD_ATTRIBUTE, attributes={**attributes, name: wrong})


def test_stream_without_gpu_code(guarded):
    if has_gpu_code(guarded.operator.entry.library):
        pytest.skip("this library has GPU code, which would run")
    guarded.refused(Status.NO_GPU_CODE, stream=1)


def test_prepared_operator():
    x, y = np.array([0, 1000], np.float32), np.empty(2, np.float32)
    prepare_operator(forward, [x, y])()
    np.testing.assert_array_equal(y, [0.5, 1])


def test_strided_array():
    with pytest.raises(ValueError, match=r"^an entry takes contiguous arrays only$"):
        Param.of(np.zeros((2, 3)).T)


def test_every_operator_has_a_card():
    """Each library and each public function of an operator belongs to a card."""
    libraries = {operator.entry.library.name for card in CARDS for operator in card.operators()}
    assert libraries == {path.stem for path in (ROOT / "aot_kernels").glob("*.cu")}
    public = [getattr(msops, name) for name in msops.__all__]
    functions = {f for f in public if inspect.isfunction(f) and f.__module__.startswith("msops.operators.")}
    assert functions <= {type(card).function for card in CARDS}


def test_every_entry_is_fuzzed():
    every = [*CARDS, *example_cards()]
    sources = [*ROOT.glob("aot_kernels/*.cu"), *ROOT.glob("examples/*/*.cu")]
    written = re.findall(
        r"^MSOPS_(?!SCRATCH)\w+\((\w+)[,)]", "".join(source.read_text() for source in sources), re.MULTILINE
    )
    cases = [(card, case) for card in every for case in (((), {}), *card.entry_cases().values())]
    fuzzed = {
        operator.entry.name for card, (shapes, settings) in cases for operator in card.operators(shapes, **settings)
    }
    assert sorted(fuzzed) == sorted(written)


def print_results():
    """Prints, for each call that is large enough for threads, a checksum of each result."""
    for card in CARDS:
        for case, (shapes, settings) in card.entry_cases().items():
            if MANY < max(sizes_of(card, shapes, settings), default=0) < MOST:
                for call in card.entry_calls(shapes, settings, "float32"):
                    print(call.operator.entry.name, case, [zlib.crc32(array) for array in call.results])


def test_results_do_not_depend_on_the_number_of_threads():
    printed = set()
    for threads in (1, 2, 5):
        code = "import test_entries; test_entries.print_results()"
        done = run_python("-c", code, cwd=Path(__file__).parent, OMP_NUM_THREADS=str(threads))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") > 2 * len(CARDS)
        printed.add(done.stdout)
    assert len(printed) == 1
