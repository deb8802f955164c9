import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import msops
from card import Card, chain, length, zeros
from gpu import Guarded
from guarded_call import GuardedCall
from msops.operators.write_cache import operators
from msops.testing.checks import Gradient
from msops.testing.entry import Status, outputs_of, prepare_operator
from operator_test import wide_in_graph_mode
from test_emulated_entries import Emulator


def which_are_written(cache, rows, slots, **_):
    """Tells which rows are written: the last one of each slot."""
    last = {slot: t for t, slot in enumerate(slots.tolist()) if 0 <= slot < cache.shape[0] * cache.shape[1]}
    return (np.array([last.get(slot) == t for t, slot in enumerate(slots.tolist())], np.int32),)


def after(cache, rows, slots):
    """Returns the cache after a row at a time was written."""
    after = cache.copy()
    flat = after.reshape(cache.shape[0] * cache.shape[1], *cache.shape[2:])
    for row, slot in zip(rows, slots.tolist()):
        if 0 <= slot < len(flat):
            flat[slot] = row
    return after


def case(blocks, block_size, tokens, *columns, kind="int32"):
    return [(blocks, block_size, *columns), (tokens, *columns), (tokens,)], dict(kind=kind)


class TestWriteCache(Card):
    function = msops.write_cache
    formulas = (which_are_written,)
    cases = {
        "small": case(3, 4, 5, 2, 3),
        "one": case(1, 1, 1, 1),
        "no further axes": case(5, 3, 9),
        "no tokens": case(3, 4, 0, 8),
        "no rows": case(0, 4, 0, 8, kind="int64"),
        "no columns": case(3, 4, 5, 0),
        "heads": case(7, 16, 40, 2, 64, kind="int64"),
    }
    further = {
        "odd rows": case(9, 5, 33, 3, 7),
        "long rows": case(3, 4, 9, 8, 160),
        "rows of a pack": case(20, 16, 200, 8),
        "halves of packs": case(20, 16, 100, 12, kind="int64"),
        "many slots": case(40, 64, 2500, 4),
        "many slots of few rows": case(1, 3, 3000, 2, kind="int64"),
        "slots far from each other": case(5000, 16, 2300, 1),
    }
    small = "small"
    hostile = ("small", "no further axes")
    wrong = (
        ([*zeros((2, 3, 4), (2, 5)), np.zeros(2, np.int32)], ValueError,
         "write_cache: rows must have shape (T, *C) = (2, 4), got (2, 5)"),
        ([*zeros((2, 3, 4), (2, 4)), np.zeros(3, np.int32)], ValueError,
         "write_cache: slots must have shape (T,) = (2,), got (3,)"),
        ([*zeros((2,), ()), np.zeros(3, np.int32)], ValueError, "write_cache: cache must have shape (P, S, *C)"),
        ([np.zeros((2, 3, 4), np.float32), np.zeros((2, 4), np.float16), np.zeros(2, np.int32)], TypeError,
         "write_cache: rows must be float32 as cache is, got float16"),
        ([np.zeros((2, 3), np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32)], TypeError,
         "write_cache: cache must be float16, float32, float64 or int8, got int32"),
        (zeros((2, 3, 4), (2, 4), (2,)), TypeError, "write_cache: slots must be int32 or int64, got float32"),
    )  # fmt: skip
    huge = ((2**19 + 3, 16, 300, 260),)

    def operators(self, shapes=(), **_):
        return chain(operators())

    def inputs(self, shapes, dtype, seed=1, kind="int32"):
        """Returns slots of which some are negative, and some equal."""
        rng = np.random.default_rng(seed)
        cache, rows = (np.asarray(8 * rng.standard_normal(shape), dtype) for shape in shapes[:2])
        places = shapes[0][0] * shapes[0][1]
        slots = rng.integers(0, max(1, places), shapes[2])
        slots[rng.random(shapes[2]) < 0.2] = -1 - rng.integers(2**31 - 1)
        return [cache, rows, slots.astype(kind)]

    def random_case(self, random):
        blocks = 1 + length(random)
        columns = [length(random) for _ in range(random.randrange(3))]
        return case(blocks, 1 + length(random), length(random), *columns, kind=random.choice(("int32", "int64")))

    def check_huge(self, gpu, blocks, block_size, tokens, columns):
        torch = gpu.torch
        cache = torch.zeros(blocks, block_size, columns, device="cuda", dtype=torch.float16)
        rows = gpu.random(tokens, columns) + 3  # none is 0
        slots = torch.arange(tokens, device="cuda") * (blocks * block_size // tokens)
        slots[-1] = blocks * block_size - 1
        [written] = gpu.run(self.operators()[0], cache, rows, slots)[:1]
        assert bool(written.all())
        gpu.assert_equal(cache.reshape(-1, columns)[slots], rows)
        assert int(cache.any(-1).sum()) == tokens


CARD = TestWriteCache()
DTYPES = ("float16", "float32", "float64", "int8")


class Write(nn.Cell):
    """Writes rows, then the negative of them, and returns the negative of the cache between these calls, by the result,
    and after them, by the Parameter."""

    def __init__(self, cache):
        super().__init__()
        self.cache = Parameter(Tensor(cache), requires_grad=False, name="cache")

    def construct(self, rows, slots):
        after = msops.write_cache(self.cache, rows, slots)
        between = ops.neg(after)
        msops.write_cache(self.cache, ops.neg(rows), slots)
        return between, ops.neg(self.cache)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CARD.cases)
def test_results(mode, name, dtype):
    """The graph reads what it wrote, each call once, and the Parameter has it afterwards."""
    shapes, settings = CARD.cases[name]
    cache, rows, slots = CARD.inputs(shapes, dtype, **settings)
    net = Write(cache)
    # Where a graph writes a Parameter twice, MindSpore's copies of it round float64 to float32 on the CPU.
    units = 1e-7 * (mode == "graph" and dtype == "float64")
    for seed in (1, 2):
        _, rows, slots = CARD.inputs(shapes, dtype, seed, **settings)
        between, last = (x.asnumpy() for x in net(Tensor(rows), Tensor(slots)))
        np.testing.assert_allclose(-between, after(cache, rows, slots), units)
        cache = after(cache, -rows, slots)
        np.testing.assert_allclose(-last, cache, units)
        np.testing.assert_array_equal(net.cache.asnumpy(), cache)
    assert between.dtype == dtype


class Layers(nn.Cell):
    """Writes the caches of Cells in it, one of which writes a Parameter that it is handed."""

    def __init__(self, cache):
        super().__init__()
        self.one, self.cache = Write(cache), Parameter(Tensor(cache), requires_grad=False, name="own")

    def write(self, cache, rows, slots):
        return msops.write_cache(cache, rows, slots)

    def construct(self, rows, slots):
        first, _ = self.one(rows, slots)
        return first, ops.neg(self.write(self.cache, 2 * rows, slots))


@wide_in_graph_mode
def test_parameters_of_other_cells(mode):
    cache, rows, slots = CARD.inputs(*[CARD.cases["heads"][0]], np.float32)
    net = Layers(cache)
    first, second = (x.asnumpy() for x in net(Tensor(rows), Tensor(slots)))
    np.testing.assert_array_equal(-first, after(cache, rows, slots))
    np.testing.assert_array_equal(-second, after(cache, 2 * rows, slots))
    np.testing.assert_array_equal(net.cache.asnumpy(), -second)
    np.testing.assert_array_equal(net.one.cache.asnumpy(), after(cache, -rows, slots))


@wide_in_graph_mode
def test_mixed_precision(mode):
    """Where MindSpore casts rows and Parameters, the cache is written in place, or there is an error: no copy of it is
    written."""
    cache, rows, slots = CARD.inputs(*[CARD.cases["small"][0]], np.float16)
    for kind, of_rows in (("float16", "float16"), ("float32", "float32"), ("float16", "float32")):
        net = Write(cache.astype(kind)).to_float(mindspore.float16)
        try:
            net(Tensor(rows.astype(of_rows)), Tensor(slots))[0].asnumpy()
        except TypeError as error:
            assert (kind, of_rows) != ("float16", "float16")
            assert "write_cache: rows must be float" in str(error)  # noqa: PT017
        else:
            np.testing.assert_array_equal(net.cache.asnumpy(), after(cache, -rows, slots).astype(kind))


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_tensors(mode):
    """In PyNative mode a Tensor is written as a Parameter is, and views, which MindSpore copies, are refused."""
    cache, rows, slots = CARD.inputs(*[CARD.cases["small"][0]], np.float32)
    tensor = Tensor(cache)
    for _ in range(2):
        result = msops.write_cache(tensor, Tensor(rows), Tensor(slots))
        np.testing.assert_array_equal(tensor.asnumpy(), after(cache, rows, slots))
    np.testing.assert_array_equal(result.asnumpy(), tensor.asnumpy())
    whole = Tensor(np.stack((cache, cache)))
    views = [
        ops.concat((tensor, tensor), -1).split(3, -1)[1], whole[1], whole[0], whole.reshape(-1, *cache.shape[1:])
    ]  # fmt: skip
    views += [mindspore.Parameter(Tensor(cache)) for _ in range(2)]
    views[-2].set_data(Tensor(cache.reshape(-1)).reshape(cache.shape))
    views[-1].set_data(ops.swapaxes(Tensor(np.ascontiguousarray(cache.swapaxes(0, 1))), 0, 1))
    for view in views:
        kept = view.asnumpy().copy()
        try:
            msops.write_cache(view, Tensor(rows), Tensor(slots))
        except ValueError as error:
            assert "write_cache: cache must be no view or part of another Tensor, got one" in str(error)  # noqa: PT017
            np.testing.assert_array_equal(view.asnumpy(), kept)
        else:
            np.testing.assert_array_equal(view.asnumpy(), after(kept, rows, slots))


@pytest.mark.parametrize("mode", ["graph"], indirect=True)
def test_tensors_in_graph_mode(mode):
    class Function(nn.Cell):
        def construct(self, cache, rows, slots):
            return ops.neg(msops.write_cache(cache, rows, slots))

    cache, rows, slots = CARD.inputs(*[CARD.cases["small"][0]], np.float32)
    with pytest.raises(TypeError, match="write_cache: cache must be a Parameter in graph mode"):
        Function()(Tensor(cache), Tensor(rows), Tensor(slots))
    handed = Parameter(Tensor(cache), requires_grad=False, name="handed")
    result = Function()(handed, Tensor(rows), Tensor(slots)).asnumpy()
    np.testing.assert_array_equal(-result, after(cache, rows, slots))
    np.testing.assert_array_equal(handed.asnumpy(), -result)


@pytest.mark.parametrize(("inputs", "error", "words"), CARD.wrong, ids=lambda x: str(x)[:40])
def test_wrong_arguments(mode, inputs, error, words):
    class Wrong(nn.Cell):
        def __init__(self):
            super().__init__()
            self.cache = Parameter(Tensor(inputs[0]), requires_grad=False, name="cache")

        def construct(self, rows, slots):
            return msops.write_cache(self.cache, rows, slots)

    with pytest.raises(error) as caught:
        Wrong()(*map(Tensor, inputs[1:])).asnumpy()
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_slots_outside(mode, kind):
    """A slot after the last row is an error on the CPU, which says where it is; nothing is written then."""
    if mindspore.get_context("device_target") != "CPU":
        pytest.skip("a GPU writes nothing there")
    cache, rows, _ = CARD.inputs(*[CARD.cases["small"][0]], np.float32)
    net = Write(cache)
    with pytest.raises(RuntimeError, match=r"write_cache: slots\[3\] is 12, but cache has 12 rows"):
        [x.asnumpy() for x in net(Tensor(rows), Tensor(np.array([0, 1, 2, 12, 3], kind)))]
    np.testing.assert_array_equal(net.cache.asnumpy(), cache)


def test_no_gradient(mode):
    """Rows have the gradient 0."""
    cache, rows, slots = CARD.inputs(*[CARD.cases["small"][0]], np.float32)

    class Sum(nn.Cell):
        def __init__(self):
            super().__init__()
            self.cache = Parameter(Tensor(cache), requires_grad=False, name="cache")

        def construct(self, rows, slots):
            return rows.sum() + msops.write_cache(self.cache, rows, slots).sum()

    found = Gradient(Sum(), 2)(Tensor(rows), Tensor(slots), Tensor(np.float32(1)))[0].asnumpy()
    np.testing.assert_array_equal(found, np.ones_like(rows))


def prepared(name, dtype):
    """Returns the operator, inputs, and arrays for its outputs, of a case."""
    shapes, settings = CARD.entry_cases()[name]
    inputs = CARD.inputs(shapes, dtype, **settings)
    return operators(), inputs, [np.zeros(shape, kind) for shape, kind in outputs_of(operators(), inputs)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CARD.entry_cases())
def test_entry(name, dtype):
    operator, inputs, outputs = prepared(name, dtype)
    want = after(*inputs)
    assert prepare_operator(operator, [*inputs, *outputs])() == Status.OK
    np.testing.assert_array_equal(inputs[0], want)
    np.testing.assert_array_equal(outputs[0], which_are_written(*inputs)[0])


def test_entry_refuses(capfd):
    [call] = CARD.entry_calls(*CARD.cases["small"], np.float32)
    guarded = GuardedCall(call, capfd)
    guarded.refused_with("slots", Status.BAD_SHAPE, shape=(4,))
    guarded.refused_with("rows", Status.BAD_SHAPE, shape=(5, 3, 2))
    guarded.refused_with("table", Status.BAD_SHAPE, shape=(8,))
    guarded.refused_with("cache", Status.BAD_SHAPE, shape=(12,))


def check_cache(device, name, dtype):
    """Requires kernels to write what a loop writes, also to rows that are not aligned, and to skip slots outside."""
    for shift in (0, 1, 4):
        operator, (cache, rows, slots), outputs = prepared(name, dtype)
        if len(slots) > 2:
            slots[1] = cache.shape[0] * cache.shape[1]
            slots[2] = 2**31 - 1 if slots.dtype == np.int32 else 2**32  # its lower half is row 0
        held = Guarded(device, cache.shape, cache.dtype.name, shift, cache)
        arrays = [device.array(x) for x in (rows, slots, *outputs)]
        assert device.status(operator, [held.array, *arrays]) == Status.OK
        np.testing.assert_array_equal(device.numpy(held.array), after(cache, rows, slots))
        np.testing.assert_array_equal(device.numpy(arrays[2]), which_are_written(cache, rows, slots)[0])
        assert held.untouched()


@pytest.mark.wide
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CARD.entry_cases())
def test_emulated_cache(name, dtype):
    check_cache(Emulator(), name, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CARD.entry_cases())
def test_gpu_cache(gpu, name, dtype):
    check_cache(gpu, name, dtype)
