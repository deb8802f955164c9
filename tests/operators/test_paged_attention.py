import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from card import Card, chain, results_of, zeros
from gpu import compare_with_cpu
from msops.operators.paged_attention import operators
from msops.testing.checks import Gradient, assert_near, run
from msops.testing.entry import Status, outputs_of
from numpy_paged_attention import ALWAYS, NAMES, Attend, case, decoded, paged, random_tables
from test_emulated_entries import Emulator


class TestPagedAttention(Card):
    function = msops.paged_attention
    formulas = (lambda *inputs, lengths=(), codes=None, new=None, **settings: paged(*inputs, **settings),)
    cases = {
        "small": case((5, 3)),
        "one": case((1,), 1, 1, 1, 1, 1),
        "chunks": case((9, 12, 0, 7), new=(3, 12, 0, 1), width=16),
        "not causal": case((9, 2), new=(3, 1), causal=False),
        "odd": case((7, 11, 2), 3, 3, 13, 3, value_width=5),
        "window, softcap": case((30, 17), new=(9, 4), window=(5, 0), softcap=2.0, scale=0.7),
        "window to the right": case((20, 9), new=(6, 4), window=(3, 2), causal=False),
        "mask": case((9, 12), new=(2, 4), mask=(6, 4, 12), bias=(6, 1, 10)),
        "bias, ALiBi": case((9, 12, 3), bias=(4, 12), slopes=(3, 4)),
        "codes": case((9, 12), width=16, codes=(16, 16)),
        "codes of heads": case((9, 12), new=(2, 5), codes=(1, None)),
        "latent": case((9, 30, 4), 6, 1, 24, value_size=16, columns=9),
        "latent codes": case((9, 30), 6, 1, 24, value_size=16, codes=(24, 1)),
        "no sequences": case(()),
        "no tokens": case((4, 7), new=(0, 0)),
        "no features of values": case((3, 4), value_size=0),
    }
    further = {
        "parts": case((700, 1, 300), width=64, block_size=16, blocks=50),
        "parts of chunks": case((600, 257, 900), 8, 2, 32, 8, 60, new=(5, 1, 18)),
        "many heads": case((70, 33), 40, 1, 40, 16, 20),
        "wide": case((40, 9), 16, 1, 576, 16, value_size=512),
        "latent heads": case((40, 700), 80, 1, 576, 16, 60, new=(1, 3), value_size=512),
        "latent, a tail": case((90,), 20, 1, 296, 16, 8, new=(2,), value_size=264, slopes=(20,)),
        "a long chunk": case((330,), 4, 1, 128, 16, 30, new=(150,)),
        "long chunks": case((200, 90, 30), 4, 2, 64, 24, 20, new=(70, 66, 80), window=(90, -1), softcap=3.0),
        "long chunks, wide": case((170, 20), 2, 2, 256, 64, 9, new=(130, 3), value_width=200, causal=False),
        "128 features": case((300, 77), 8, 2, 128, 64, 8, new=(2, 77), value_width=64),
        "200 features": case((50, 20), 4, 2, 200, 16, window=(30, -1)),
        "long sequences": case((9000,), 2, 1, 8, 64, 160),
        "more parts than the longest": case((16384,), 1, 1, 8, 64, 257, 257),
        "blocks of one row": case((40, 20), 4, 2, 64, 1, 70, slopes=(4,)),
        "terms of parts": case((600, 100), 4, 2, 64, 32, 40, new=(3, 1), bias=(4, 4, 600), mask=(4, 1, 600)),
        "long codes": case((500, 300), 8, 2, 128, 16, 60, new=(2, 9), codes=(128, 128)),
    }
    small = "small"
    hostile = ("small", "chunks", "codes", "mask")
    right_numbers = {"left": (-1,), "right": (-1,)}
    roundings = 16  # logits are sums of up to 576 products
    wrong = (
        (zeros((2, 4, 8), (3, 4, 3, 8), (3, 4, 3, 8)), {}, ValueError,
         "paged_attention: q must have a multiple of the 3 heads of key_cache, got 4"),
        (zeros((2, 4, 8), (3, 4, 2, 7), (3, 4, 2, 8)), {}, ValueError,
         "paged_attention: key_cache must have shape (P, S, Hk, D) = (3, 4, 2, 8), got (3, 4, 2, 7)"),
        (zeros((2, 4, 8), (3, 4, 2, 8), (3, 5, 2, 8)), {}, ValueError, "paged_attention: value_cache must have shape"),
        (zeros((2, 4, 8), (3, 0, 2, 8), (3, 0, 2, 8)), {}, ValueError,
         "paged_attention: key_cache must have at least one row in a block, got shape (3, 0, 2, 8)"),
        (zeros((2, 2, 580), (3, 4, 2, 580), (3, 4, 2, 8)), {}, ValueError,
         "paged_attention: q must have at most 576 features, got 580"),
        (zeros((3, 4, 8), (3, 4, 2, 8), (3, 4, 2, 8)), {}, ValueError,
         "paged_attention: lengths must have one number for each of the 3 tokens of q, got shape (2,)"),
        (zeros((2, 4, 8), (3, 4, 2, 8), (3, 4, 2, 8)), dict(value_size=3), ValueError,
         "paged_attention: value_size must be None where value_cache is given, got 3"),
        (zeros((2, 4, 8), (3, 4, 2, 8), (3, 4, 2, 8)), dict(causal=1), TypeError,
         "paged_attention: causal must be a bool, got int"),
        (zeros((2, 4, 8), (3, 4, 2, 8), (3, 4, 2, 8)), dict(window=(1,)), ValueError, "paged_attention: window must"),
        (zeros((2, 4, 8), (3, 4, 2, 8), (3, 4, 2, 8)), dict(softcap=-1.0), ValueError,
         "softcap must be finite and at least 0"),
        (zeros((2, 4, 8), (3, 4, 2, 8), (3, 4, 2, 8)), dict(scale="1"), TypeError, "scale must be a number, got str"),
        (zeros((2, 4, 8), (3, 4, 2, 8), (3, 4, 2, 8)), dict(value_size=577), ValueError,
         "paged_attention: value_size must be from 0 to 576, got 577"),
        ([*zeros((2, 4, 8)), np.zeros((3, 4, 2, 8), np.int8), np.zeros((3, 4, 2, 8), np.int8)], {}, TypeError,
         "paged_attention: key_cache must be float32 as q is, got int8"),
        ([*zeros((2, 4, 8), (3, 4, 2, 8)), np.zeros((3, 4, 2, 8), np.int8)], {}, TypeError,
         "paged_attention: value_cache must be float32 as q is, got int8"),
    )  # fmt: skip

    def operators(self, shapes=(), optional=("value_cache",), causal=True, scale=None, window=None, softcap=0.0,
                  value_size=None, codes=None, **_):  # fmt: skip
        operator = operators(causal, scale, window, softcap, value_size, has_codes=codes is not None)
        return chain(operator.without(*(name for name in operator.full.optional if name not in optional)))

    def inputs(self, shapes, dtype, seed=1, lengths=(), optional=(), new=None, codes=None, **_):
        """Returns tables whose entries beyond the keys lead nowhere, and caches with NaN where no key is."""
        rng = np.random.default_rng(seed)
        axes = dict(zip((name for name in NAMES if name in (*ALWAYS, *optional)), shapes))
        found = {name: np.asarray(rng.standard_normal(shape), dtype) for name, shape in axes.items()}
        tables, unused = random_tables(rng, lengths, axes["block_tables"][1], *axes["key_cache"][:2])
        for name in ("key_cache", "value_cache"):
            if codes and name in axes:
                found[name] = rng.integers(-128, 128, axes[name]).astype(np.int8)
            elif name in axes:
                found[name][unused] = np.nan
        found.update(block_tables=tables, lengths=np.array(lengths, np.int32))
        if new is not None:
            found["cu_seqlens_q"] = np.cumsum([0, *new]).astype(np.int32)
        if "mask" in axes:
            found["mask"] = rng.random(axes["mask"]) < 0.4
        for name in ("bias", "alibi_slopes"):
            if name in axes and seed % 2:  # beside float16, these may be of float32
                found[name] = found[name].astype(np.float32 if dtype == "float16" else dtype)
        for name in ("key_scale", "value_scale"):
            if name in axes:
                found[name] = np.asarray(0.01 + 0.02 * rng.random(axes[name]), dtype)
        for name in ("key_zero_point", "value_zero_point"):
            if name in axes:
                found[name] = rng.integers(-9, 10, axes[name]).astype(np.int8 if seed % 2 else dtype)
        return [found[name] for name in axes]

    def entry_calls(self, shapes, settings, dtype, seed=1, scale=1, parts=0):
        return super().entry_calls(shapes, settings, dtype, seed, 1, 0)

    def result_dtype(self, dtype):
        return dtype, "float64" if dtype == "float64" else "float32"

    def units(self, **settings):
        return 1

    def random_case(self, random):
        lengths = [random.choice((0, 1, 2, 5, 17, 70)) for _ in range(random.randrange(4))]
        new = [random.randrange(min(length, 9) + 2) for length in lengths] if random.random() < 0.5 else None
        kv_heads, group, width = random.choice((1, 2, 3)), random.choice((1, 2, 5)), random.randrange(1, 40)
        settings = dict(causal=random.random() < 0.5, softcap=random.choice((0.0, 0.0, 3.0)))
        if random.random() < 0.3:
            settings["window"] = (random.randrange(-1, 9), random.randrange(-1, 9))
        if random.random() < 0.3:
            settings["value_size"] = random.randrange(width + 1)
        if random.random() < 0.3:
            settings["codes"] = (random.choice((1, width)), random.choice((1, width, None)))
        return case(lengths, kv_heads * group, kv_heads, width, random.choice((1, 3, 16)), 90, new=new, **settings)

    huge = ((2**17 + 3000, 16, 8, 2, 64),)

    def check_huge(self, gpu, blocks, block_size, kv_heads, group, texts):
        """Compares texts whose blocks lie anywhere in large caches with copies of these blocks."""
        torch, width, columns = gpu.torch, 128, 20
        caches = [torch.zeros(blocks, block_size, kv_heads, width, device="cuda", dtype=torch.float16) for _ in "kv"]
        tables = torch.arange(texts * columns, device="cuda", dtype=torch.int32).flip(0) * (blocks // (texts * columns))
        tables = (tables + blocks - 1 - tables.max()).view(texts, columns)
        small = [gpu.random(texts * columns, block_size, kv_heads, width) for _ in "kv"]
        for cache, rows in zip(caches, small):
            cache[tables.flatten().long()] = rows
        q = gpu.random(texts, kv_heads * group, width)
        lengths = torch.randint(1, columns * block_size, (texts,), device="cuda", dtype=torch.int32)
        own = torch.arange(texts * columns, device="cuda", dtype=torch.int32).view(texts, columns)
        operator = self.operators()[0]
        want = gpu.run(operator, q, *small, own, lengths)[:2]
        for got, each in zip(gpu.run(operator, q, *caches, tables, lengths)[:2], want):
            gpu.assert_equal(got, each)

    def random_call(self, random):
        """Takes any case: all are small."""
        return self.random_case(random)


CARD = TestPagedAttention()
# Tokens see nothing here, so that lse is -inf, which the tests of all entries refuse.
BLIND = {
    "mask of tokens": case((9, 12), mask=(2, 1, 1), slopes=(4,)),
    "fewer keys than tokens": case((3, 0, 5), new=(5, 2, 5)),
    "no blocks": case((0, 0), blocks=0, columns=0),
    "a hidden token": case((700, 9), width=64, blocks=200, window=(-1, 0), bias=(2, 1, 5), causal=False),
}
DTYPES = ("float16", "float32", "float64")


def check(name, dtype, seed=1):
    shapes, settings = {**CARD.entry_cases(), **BLIND}[name]
    inputs = CARD.inputs(shapes, dtype, seed, **settings)
    out, lse = run(Attend(**settings), *inputs)
    exact = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in inputs]
    want = CARD.reference(*exact, **settings)
    assert (out.dtype, lse.dtype) == (dtype, "float64" if dtype == "float64" else "float32")
    near = {"float16": 2e-3, "float32": 3e-6, "float64": 1e-13}[dtype]
    np.testing.assert_allclose(out, want[0], near, near * max(1, np.abs(want[0]).max(initial=0)))
    # With caches of codes, tensor cores take queries times the scales of keys, rounded to float16.
    rtol, atol = (near, near) if dtype == "float64" or "codes" in name else (3e-6, 1e-5)
    np.testing.assert_allclose(lse, want[1], rtol, atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*CARD.cases, *BLIND])
def test_results(name, dtype):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    check(name, dtype)
    check(name, dtype, seed=2)


@pytest.mark.parametrize("mode", ["graph"], indirect=True)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.wide] * (n != "chunks")) for n in CARD.cases])
def test_results_in_graph_mode(mode, name):
    check(name, "float32")


@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_kinds_of_numbers(mode, kind):
    shapes, settings = CARD.cases["chunks"]
    inputs = CARD.inputs(shapes, "float32", **settings)
    want = run(Attend(**settings), *inputs)
    for got, each in zip(run(Attend(**settings), *inputs[:3], *(x.astype(kind) for x in inputs[3:])), want):
        np.testing.assert_array_equal(got, each)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(lengths=[5, 21]), r"paged_attention: lengths\[1\] is 21, expected 0 to 20"),
        (dict(lengths=[-1, 3]), r"paged_attention: lengths\[0\] is -1, expected 0 to 20"),
        (dict(block_tables=[[0, 6, 0, 0, 0], [0, 0, 0, 0, 0]]), r"block_tables\[0, 1\] is 6, expected 0 to 5"),
        (dict(block_tables=[[0, 1, 0, 0, 0], [-1, 0, 0, 0, 0]]), r"block_tables\[1, 0\] is -1, expected 0 to 5"),
        (dict(cu_seqlens_q=[1, 2, 4]), "cu_seqlens_q begins with 1, expected 0"),
        (dict(cu_seqlens_q=[0, 5, 4]), r"cu_seqlens_q\[2\] is 4, less than the 5 before it"),
        (dict(cu_seqlens_q=[0, 2, 3]), "cu_seqlens_q ends with 3, expected the 4 tokens of q"),
    ],
    ids=lambda x: str(x)[:40],
)  # fmt: skip
def test_numbers_outside(mode, changed, words):
    """Numbers that lead out of a tensor are errors on the CPU."""
    if mindspore.get_context("device_target") != "CPU":
        pytest.skip("a GPU cuts them")
    q, k, v = zeros((4, 4, 8), (6, 4, 2, 8), (6, 4, 2, 8))
    given = dict(block_tables=np.zeros((2, 5)), lengths=[5, 3], cu_seqlens_q=[0, 2, 4]) | changed
    with pytest.raises(RuntimeError, match=words):
        run(Attend(("value_cache", "cu_seqlens_q")), q, k, v, *(np.array(x, np.int32) for x in given.values()))


@pytest.mark.parametrize(("inputs", "settings", "error", "words"), CARD.wrong, ids=lambda x: str(x)[:40])
@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_wrong_arguments(mode, inputs, settings, error, words):
    with pytest.raises(error) as caught:
        run(Attend(**settings), *inputs, np.zeros((2, 3), np.int32), np.ones(2, np.int32))
    assert words in str(caught.value)


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_wrong_terms(mode):
    q, k, v = map(Tensor, zeros((2, 4, 8), (3, 4, 2, 8), (3, 4, 2, 8)))
    tables, lengths = Tensor(np.zeros((2, 3), np.int32)), Tensor(np.int32([4, 2]))
    for more, words in (
        (dict(mask=Tensor(np.zeros((3, 1, 4), bool))), "mask must broadcast to (T, Hq, W) = (2, 4, W), got (3, 1, 4)"),
        (dict(bias=Tensor(np.zeros((1, 2, 4, 4), np.float32))), "bias must broadcast to (T, Hq, W)"),
        (dict(alibi_slopes=Tensor(np.zeros(3, np.float32))), "alibi_slopes must have shape (Hq,) = (4,) or (B, Hq)"),
        (
            dict(value_scale=Tensor(np.zeros((2, 8), np.float32))),
            "value_scale must be None where there is no value_cache",
        ),
        (dict(cu_seqlens_q=Tensor(np.int32([0, 2]))), "cu_seqlens_q must have shape (B + 1,) = (3,), got (2,)"),
    ):
        with pytest.raises(ValueError, match="paged_attention: ") as caught:
            msops.paged_attention(q, k, v, tables, lengths, **more).asnumpy()
        assert words in str(caught.value)
    with pytest.raises(ValueError, match="value_size must be at most the 8 features of the keys, got 9"):
        msops.paged_attention(q, k, None, tables, lengths, value_size=9).asnumpy()
    with pytest.raises(ValueError, match="paged_attention: value_size must be given where value_cache is None"):
        msops.paged_attention(q, k, None, tables, lengths)
    with pytest.raises(TypeError, match="paged_attention: lengths must be a Tensor, got None"):
        msops.paged_attention(q, k, v, tables, None)


def test_no_gradient(mode):
    shapes, settings = CARD.cases["small"]
    inputs = CARD.inputs(shapes, np.float32, **settings)
    douts = np.ones_like(inputs[0]), np.zeros(inputs[0].shape[1::-1], np.float32)
    with pytest.raises(ValueError, match="paged_attention: it is for inference and has no gradient"):
        run(Gradient(Attend(**settings), len(inputs)), *inputs, *douts)


def results_on(device, operator, inputs):
    """Returns out and lse of an entry on a device."""
    outputs = [device.array(np.full(shape, -7, kind)) for shape, kind in outputs_of(operator, inputs)]
    assert device.status(operator, [*map(device.array, inputs), *outputs]) == Status.OK
    return [device.numpy(x) for x in outputs[:2]]


def check_numbers_outside(device, dtype, scale=1):
    """Requires that keys of a block that does not exist are not seen, lengths are cut, and tokens outside get 0."""
    long, new = np.int32([9, 12, 7]) * scale, np.int32([3, 12, 2]) * scale
    shapes, settings = case(long, new=new, width=16, block_size=4 * scale, columns=3)
    inputs = CARD.inputs(shapes, dtype, **settings)
    inputs[1:3] = map(np.nan_to_num, inputs[1:3])
    q, keys, values, tables, _, starts = inputs
    wrong = [q, keys, values, tables.copy(), np.int32([9 * scale, 2**31 - 1, -5]), np.int32([0, 3, 15, 15]) * scale]
    wrong[3][:2, 1] = 12, -1  # the second third of the keys of two sequences
    hide = np.zeros((17 * scale, 1, 12 * scale), bool)
    hide[: 15 * scale, :, 4 * scale : 8 * scale] = True
    right = [q, keys, values, tables, np.int32([9, 12, 0]) * scale, starts, hide]
    [want] = results_of(CARD.operators(optional=("value_cache", "cu_seqlens_q", "mask"))[0], *right)[:1]
    out, lse = results_on(device, CARD.operators(optional=("value_cache", "cu_seqlens_q"))[0], wrong)
    want[15 * scale :] = 0
    near = {"float16": 2e-3, "float32": 5e-6, "float64": 1e-13}[dtype]
    np.testing.assert_allclose(out, want, near, near)
    assert np.isneginf(lse[:, 15 * scale :]).all()


def check_sequences_alone(device, dtype, codes):
    """Requires that a sequence's bits do not depend on the others: neither on how many there are, nor on lengths."""
    lengths, new = (1300, 40, 700, 3, 513, 0, 330, 90), (1, 17, 1, 3, 5, 2, 70, 90)
    shapes, settings = case(lengths, 8, 2, 64, 16, 200, new=new, codes=codes)
    operator, inputs = CARD.operators(shapes, **settings)[0], CARD.inputs(shapes, dtype, **settings)
    inputs[0] *= 16  # so that the greatest logits of rows of a tile lie far apart
    out, lse = results_on(device, operator, inputs)
    q, keys, values, tables, _, starts, *scales = inputs
    for b in range(len(lengths)):
        part = slice(starts[b], starts[b + 1])
        own = [q[part], keys, values, np.pad(tables[b : b + 1], ((0, 0), (0, 70))), np.int32(lengths[b : b + 1])]
        alone = results_on(device, operator, [*own, np.int32([0, new[b]]), *scales])
        np.testing.assert_array_equal(alone[0], out[part])
        np.testing.assert_array_equal(alone[1], lse[:, part])


def test_room_for_all_parts():
    """A shorter sequence may have more parts than the longest that the table has room for, so that there is room for as
    many as with fewer columns."""
    operator, (q, cache) = CARD.operators()[0], zeros((1, 1, 8), (1, 64, 1, 8))
    sizes = [
        outputs_of(operator, [q, cache, cache, np.zeros((1, columns), np.int32), np.ones(1, np.int32)])[2][0][0]
        for columns in range(1, 400)
    ]
    assert sizes == sorted(sizes)


KINDS = [("float16", None), ("float16", (64, 1)), ("float32", None)]


@pytest.mark.wide
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BLIND)
def test_emulated_blind_tokens(name, dtype):
    for each in CARD.entry_calls(*BLIND[name], dtype):
        compare_with_cpu(Emulator(), each, dtype, shift=0)


@pytest.mark.wide
@pytest.mark.parametrize("scale", [1, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_emulated_numbers_outside(dtype, scale):
    check_numbers_outside(Emulator(), dtype, scale)


@pytest.mark.wide
@pytest.mark.parametrize(("dtype", "codes"), KINDS)
def test_emulated_sequences_alone(dtype, codes):
    check_sequences_alone(Emulator(), dtype, codes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BLIND)
def test_gpu_blind_tokens(gpu, name, dtype):
    for each in CARD.entry_calls(*BLIND[name], dtype):
        compare_with_cpu(gpu, each, dtype, shift=0)


@pytest.mark.parametrize("scale", [1, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_numbers_outside(gpu, dtype, scale):
    check_numbers_outside(gpu, dtype, scale)


@pytest.mark.parametrize(("dtype", "codes"), KINDS)
def test_gpu_sequences_alone(gpu, dtype, codes):
    check_sequences_alone(gpu, dtype, codes)


def test_cell(mode):
    shapes, settings = CARD.cases["window, softcap"]
    inputs = CARD.inputs(shapes, np.float32, **settings)
    own = {key: settings[key] for key in ("window", "softcap", "scale")}
    [out] = run(msops.PagedAttention(**own), *inputs)
    np.testing.assert_array_equal(out, run(Attend(**settings), *inputs)[0])
    assert "window=(5, 0), softcap=2.0" in str(msops.PagedAttention(**own))
    with pytest.raises(TypeError, match="paged_attention: return_lse must be a bool"):
        msops.PagedAttention(return_lse=1)


def test_random_codes():
    """Codes give what the numbers that they stand for give."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    shapes, settings = CARD.entry_cases()["long codes"]
    inputs = dict(
        zip((n for n in NAMES if n in (*ALWAYS, *settings["optional"])), CARD.inputs(shapes, "float32", **settings))
    )
    numbers = [
        decoded(inputs[f"{name}_cache"], inputs[f"{name}_scale"], inputs[f"{name}_zero_point"], np.float32)
        for name in ("key", "value")
    ]
    want = run(Attend(("value_cache", "cu_seqlens_q")), inputs["q"], *numbers, *list(inputs.values())[3:6])
    for got, each in zip(run(Attend(**settings), *inputs.values()), want):
        assert_near(got, each, 1e-5 * np.abs(each).max(), "codes")
