"""Compares C entries in an emulator of a GPU with the same entries on the CPU, for the cases of the cards.

The first word of each test's parameters is the library, all tests of which run in one turn (see is_due in conftest.py).
"""

import ctypes
import functools
import itertools

import numpy as np
import pytest

import emulator
from card import DTYPES, cards, names_of, random
from gpu import (
    DECAYS,
    FAR,
    HIDING,
    calls_that_grow,
    calls_with_decay,
    calls_with_far_bias,
    calls_with_hidden_queries,
    calls_with_ties,
    calls_with_unused,
    calls_with_wrong_columns,
    compare_with_cpu,
)
from msops.core.abi import DEFAULT_STREAM, Param, ask_shapes, prepare_call
from msops.core.factory import custom_op
from msops.core.library import Library
from msops.operators.binary import operators as functions_of_two
from msops.operators.grouped_matmul import operators as grouped_products
from msops.operators.rotary_embedding import operators as rotations
from msops.testing import memory
from msops.testing.entry import Status, attributes_in_mindspore
from msops.testing.process import Process, Where
from test_optimizer import UPDATES, in_place

pytestmark = pytest.mark.wide

SHIFTS = {"float16": 0, "float32": 1, "float64": 0}  # elements, off the alignment of packs


@functools.cache
def library_of(stem):
    return ctypes.CDLL(str(emulator.library(emulator.SOURCES / f"{stem}.cu")))


class Emulator:
    """Has NumPy's arrays, and calls entries of emulated libraries."""

    array = numpy = staticmethod(np.asarray)

    def full(self, size, value, dtype):
        """Returns memory that begins at a multiple of 256 bytes, as that of a GPU does, so that it fits all packs."""
        whole = np.full(size + 256 // np.dtype(dtype).itemsize, value, dtype)
        begin = -whole.ctypes.data % 256 // whole.itemsize
        return whole[begin : begin + size]

    def function(self, operator, kind=""):
        return getattr(library_of(operator.entry.library.path.stem), operator.entry.name + kind)

    def shapes_of_scratch(self, call):
        """Asks the emulated library, since one for the CPU alone may need less."""
        operator, asked = call.operator, {}
        if operator.asked:
            params, attributes = map(Param.of, call.inputs), attributes_in_mindspore(operator.attributes)
            asked = dict(zip(operator.asked, ask_shapes(self.function(operator, "Scratch"), [*params], attributes)))
        return [asked.get(name, x.shape) for name, x in zip(names_of(operator).scratch, call.scratch)]

    def status(self, operator, arrays):
        function = self.function(operator)
        attributes = attributes_in_mindspore(operator.attributes)
        status = prepare_call(function, [Param.of(x) for x in arrays], attributes, DEFAULT_STREAM)()
        if status == Status.LAUNCH_FAILED:  # no launch fails in the emulator
            pytest.skip("the entry needs cuBLAS")
        return status


CASES = [
    (f"{card.name()} {name}", card, *case)
    for card in cards()
    if card.operators()
    for name, case in card.entry_cases().items()
]


def choices():
    """Yields (card, shapes, settings, dtype, architecture, order). Each case takes one dtype, and one order of threads,
    since the emulator is slow; neighbouring cases take different ones. wkv7 has kernels for tensor cores in float16;
    gguf_matmul and others have some for those of sm_80 and of sm_90a; attention has kernels for those of sm_80 in
    float16 and float32, in place of which sm_75 has plain ones, and in float16 for those of sm_90a, which are chosen
    where TMA can read the rows; the latter take no bias but one of keys, no ALiBi and no dropout. topk_gating has
    kernels for all dtypes but float64, paged_attention for tensor cores in float16, int8_matmul for those of sm_90a and
    of sm_80."""
    for (name, *case), dtype, order in zip(CASES, itertools.cycle(DTYPES), itertools.cycle("01")):
        is_attention, is_whole = name.startswith("flash_attention"), name.startswith("int8_matmul")
        others = not is_whole and {"bias", "alibi_slopes", "seed"}.intersection(case[2].get("optional", ()))
        tensor_cores = "flash_attention", "decoder_stack", "grouped_matmul", "paged_attention"
        tensor_cores += "weight_quant_matmul", "gguf_matmul"
        has_kernels = is_whole or name.startswith(tensor_cores)
        kinds = [dtype, *["float16"] * (has_kernels or name.startswith("wkv7"))]
        if name.startswith(("flash_attention", "topk_gating")) and dtype == "float64":
            kinds.append("float32")
        older = {"float16": "80", "float32": "75" if is_attention and dtype == "float32" else None}
        if name.startswith("paged_attention"):
            older["float16"] = "75"
        for kind in dict.fromkeys(kinds):
            for architecture in dict.fromkeys(((has_kernels and not others and older.get(kind)) or "90", "90")):
                yield pytest.param(*case, kind, architecture, order, id=f"{name}-{kind}-{architecture}")


@pytest.mark.parametrize(("card", "shapes", "settings", "dtype", "architecture", "order"), list(choices()))
def test_emulated_equals_cpu(card, shapes, settings, dtype, architecture, order, monkeypatch):
    monkeypatch.setenv("MSOPS_EMULATOR_ARCHITECTURE", architecture)
    monkeypatch.setenv("MSOPS_EMULATOR_ORDER", order)
    for call in card.entry_calls(shapes, settings, dtype):
        compare_with_cpu(Emulator(), call, dtype, SHIFTS[dtype])


@pytest.mark.parametrize(
    ("card", "which"),
    [pytest.param(card, which, id=f"{card.name()} {which}") for card in cards() for which in card.others],
)
def test_other_dtypes(card, which):
    for call in card.other_calls(which):
        for shift in (0, 1):
            compare_with_cpu(Emulator(), call, call.results[0].dtype.name, shift)


def emulated(operator):
    """Returns the operator of the emulated library's entry."""
    path = emulator.library(emulator.SOURCES / f"{operator.entry.library.path.stem}.cu")
    same = dict(infer=operator.rule, name=operator.label, dtypes=operator.signature.dtypes)
    entry = getattr(Library(path), operator.entry.name)
    return custom_op(entry, operator.full.text, **same, **operator.settings).without(*operator.absent)


@pytest.mark.parametrize("card", [card for card in cards() if card.operators()], ids=lambda card: card.name())
def test_nothing_outside_is_read(card):
    """Arrays end, and then begin, beside memory that cannot be accessed."""
    with Process(Where()) as process:
        for dtype, fill in itertools.product(("float16", "float32"), memory.FILLS):
            for call in card.entry_calls(*card.cases[card.small], dtype):
                results = names_of(call.operator).results
                made = memory.EntryCall(emulated(call.operator), call.inputs, results, process, fill)
                if made.status != Status.LAUNCH_FAILED:  # it needs cuBLAS
                    memory.check_status(made)


@pytest.mark.parametrize(("x", "y"), [((130, 64), (64,)), ((9, 7), ()), ((33,), (33,))], ids="binary {}".format)
def test_result_in_place_of_an_operand(x, y):
    x, y = random(0, "float16", x, y)
    want = x + y
    assert Emulator().status(functions_of_two("add"), [x, y, x]) == 0
    np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize(
    "name",
    ["causal, groups", "window, softcap, groups", "lengths, causal, scale", "1000"],
    ids="flash_attention {}".format,
)
def test_blocks_add_in_order(name, monkeypatch):
    """Blocks of attention that run at once wait for each other where they add to the same sums."""
    monkeypatch.setenv("MSOPS_EMULATOR_BLOCKS", "4")
    [(card, shapes, settings)] = [case for full, *case in CASES if full == f"flash_attention {name}"]
    for call in card.entry_calls(shapes, settings, "float16"):
        compare_with_cpu(Emulator(), call, "float16", shift=0)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("name", "value"), HIDING.items(), ids=map("flash_attention {}".format, HIDING))
def test_queries_that_see_nothing(name, value, dtype, monkeypatch):
    """On tensor cores, queries that a mask or a bias hides all keys from give 0 and have no gradient."""
    for call in calls_with_hidden_queries(monkeypatch, name, value, dtype):
        compare_with_cpu(Emulator(), call, dtype, shift=0)


@pytest.mark.parametrize("architecture", ["75", "80", "90"])
@pytest.mark.parametrize(("name", "dtype"), FAR, ids=map("flash_attention {0[0]}, {0[1]}".format, FAR))
def test_bias_far_from_0(name, dtype, architecture, monkeypatch):
    """Gradients of queries whose lse has no digits of their sum are right, on tensor cores and without."""
    monkeypatch.setenv("MSOPS_EMULATOR_ARCHITECTURE", architecture)
    for call in calls_with_far_bias(monkeypatch, name, dtype):
        compare_with_cpu(Emulator(), call, dtype, shift=0)


@pytest.mark.parametrize(("dtype", "shift"), [("float16", 0), ("float16", 2), ("float32", 0), ("float32", 1)])
@pytest.mark.parametrize("architecture", ["80", "90"])
@pytest.mark.parametrize("name", [name for name, card, *_ in CASES if name.startswith("softmax") and "joined" in name])
def test_joined_rows(name, architecture, dtype, shift, monkeypatch):
    """Sets of columns are in one block or in a cluster, also with the narrower packs of addresses that are off those of
    16 bytes. A NaN or an infinity is lost in no column, and changes no other."""
    monkeypatch.setenv("MSOPS_EMULATOR_ARCHITECTURE", architecture)
    for call in calls_with_wrong_columns(monkeypatch, name.removeprefix("softmax "), dtype)[:2]:
        compare_with_cpu(Emulator(), call, dtype, shift)


@pytest.mark.parametrize("dtype", ["float32", "float64"], ids="selective_scan {}".format)
def test_growth_over_parts(dtype):
    """A part of the steps of selective_scan may grow what is 0 by an infinite factor."""
    for call in calls_that_grow(dtype):
        compare_with_cpu(Emulator(), call, dtype, shift=0)


@pytest.mark.parametrize(
    ("dtype", "architecture"), [("float16", "90"), ("float16", "80"), ("float32", "90"), ("float64", "90")]
)
@pytest.mark.parametrize("name", ["unused", "unused, transposed"], ids="grouped_matmul {}".format)
def test_rows_and_weights_that_are_not_used(name, dtype, architecture, monkeypatch):
    """Rows of no group, and weights of groups without rows, may be NaN."""
    monkeypatch.setenv("MSOPS_EMULATOR_ARCHITECTURE", architecture)
    for call in calls_with_unused(name, dtype):
        assert all(np.isfinite(result).all() for result in call.results)
        compare_with_cpu(Emulator(), call, dtype, shift=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name",
    ["2 of 5", "6 of 64", "4 of 100", "8 of 300", "9 of 40", "bias", "groups", "worths"],
    ids="topk_gating {}".format,
)
def test_tied_experts(name, dtype):
    """The lower index comes first among equal experts and among equal groups; NaN counts as -infinity."""
    for call in calls_with_ties(name, dtype):
        for shift in (0, 1):
            compare_with_cpu(Emulator(), call, dtype, shift)


@pytest.mark.parametrize(
    ("sizes", "counted"),
    [((2, -1, 3), (2, 0, 3)), ((-1, 9, 2), (0, 6, 0)), ((2**62,) * 3, (6, 0, 0)), ((1, 2, 2**63 - 1), (1, 2, 3))],
    ids="grouped_matmul {}".format,
)
def test_sizes_of_groups_out_of_range(sizes, counted):
    """A negative size counts as 0 on a GPU, and groups end at the last row."""
    operator, results = grouped_products(False).without("bias"), []
    x, weight = random(0, "float64", (6, 4), (3, 4, 5))
    for each in (sizes, counted):
        out, bounds = np.full((6, 5), np.nan), np.empty(15, np.int64)
        assert Emulator().status(operator, [x, weight, np.array(each), out, bounds]) == 0
        assert bounds[:5].tolist() == [0, *np.cumsum(counted), 6]
        results.append(out)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("groups", [1100], ids="grouped_matmul {}".format)
def test_sizes_of_many_groups(groups):
    """One block adds up the sizes of more groups than it has threads, and finds how many tiles they take."""
    sizes = np.random.default_rng(0).choice((0, 1, 128, 129, 300), groups)
    begins = np.append(0, np.cumsum(sizes))
    x, weight, out = np.empty((begins[-1] + 200, 4)), np.empty((groups, 4, 0)), np.empty((begins[-1] + 200, 0))
    operator, bounds = grouped_products(False).without("bias"), np.empty(3 * groups + 6, np.int64)
    assert Emulator().status(operator, [x, weight, sizes, out, bounds]) == 0
    tiles, large = np.cumsum([0, *-(-sizes // 128), 2]), np.cumsum([0, *-(-sizes // 256), 1])
    np.testing.assert_array_equal(bounds, [*begins, len(x), *tiles, *large])


class FewParts(Emulator):
    """Has scratch for two parts, fewer than a GPU of many multiprocessors takes."""

    def shapes_of_scratch(self, call):
        return [(min(2, parts), size) for parts, size in super().shapes_of_scratch(call)]


@pytest.mark.parametrize("name", [name for name, *_ in CASES if name.startswith("reduce") and "split" in name])
def test_parts_in_all_of_their_scratch(name):
    [(card, shapes, settings)] = [case for full, *case in CASES if full == name]
    for call in card.entry_calls(shapes, settings, "float32"):
        compare_with_cpu(FewParts(), call, "float32", shift=0)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("architecture", ["80", "90"])
@pytest.mark.parametrize("name", UPDATES, ids="optimizer {}".format)
def test_steps_in_place(name, architecture, shift, monkeypatch):
    """An optimizer's step in place moves parameters and states as the CPU does."""
    monkeypatch.setenv("MSOPS_EMULATOR_ARCHITECTURE", architecture)
    for dtype in ("float16", "float32"):
        moved, want, done = in_place(name, dtype, Emulator().status, shift)
        assert any(x.size for x in moved) == bool(done)
        for got, expected in zip(moved, want):
            np.testing.assert_allclose(got, expected, 1e-6, 1e-6)


@pytest.mark.parametrize("shift", [1, 2, 4])
@pytest.mark.parametrize("name", ["long rows, Q4_1", "long rows, Q6_K", "a tile, Q4_K"], ids="gguf_matmul {}".format)
def test_blocks_at_any_address(name, shift):
    """Kernels read codes by bytes, by pairs or by words, where the address of the weight allows no more."""
    [(card, shapes, settings)] = [case for full, *case in CASES if full == f"gguf_matmul {name}"]
    for call in card.entry_calls(shapes, settings, "float16"):
        compare_with_cpu(Emulator(), call, "float16", shift)


@pytest.mark.parametrize("raw", DECAYS, ids="wkv7 {}".format)
def test_decays_in_chunks(raw, monkeypatch):
    """Chunks of steps on tensor cores take decays of any size."""
    for call in calls_with_decay(monkeypatch, raw):
        compare_with_cpu(Emulator(), call, "float16", shift=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [8, 10], ids="rotary_embedding {}".format)
def test_rotation_by_wrong_tables_is_nan(width, interleaved):
    """A GPU gives NaN where the copies of an angle differ, and where a position is no row of the tables."""
    x, table = np.ones((3, 1, width), np.float32), np.ones((4, width), np.float32)
    sin, out = table.copy(), np.empty_like(x)
    sin[2, -1] = 0
    ids = np.array([1, 2, 4])
    assert Emulator().status(rotations(interleaved, "THD", True), [x, table, sin, ids, out]) == 0
    pair = [width - 2, width - 1] if interleaved else [width // 2 - 1, width - 1]
    np.testing.assert_array_equal(np.argwhere(np.isnan(out[:2, 0])), [[1, pair[0]], [1, pair[1]]])
    assert np.isnan(out[2]).all()
