"""Every C entry on the GPU against the same entry on the CPU, without MindSpore's GPU backend, in memory of torch.

This is also what to run under compute-sanitizer. Skipped without torch, a GPU or GPU code in the libraries.
"""

import re

import numpy as np
import pytest

from msops.library import of_package
from msops.operators.add import backward as add_backward
from msops.operators.add import forward as _add
from msops.operators.depthwise_conv2d import make_forward as _convolution
from msops.operators.lltm import forward as _pointwise
from msops.operators.lltm_sequence import make_forward as _recurrence
from msops.operators.sigmoid import backward_backward as _sigmoid_backward_backward
from msops.operators.sigmoid import forward as _sigmoid
from msops.operators.trilinear_interpolation import forward as _trilinear_interpolation
from msops.testing.entry import has_gpu_code, outputs_of, prepare_operator

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_gpu_code("add"), reason="needs a GPU, and libraries that nvcc built"
)
GUARD = 16  # elements around each array; also what shifts it off the alignment of packs


def convolution(*image, channels, kernel, has_bias=True, backward=False, multiplier=1, **settings):
    settings = dict(stride=1, pad_mode="same", padding=0, dilation=1) | settings
    operator = _convolution("", **settings, has_bias=has_bias)
    shapes = [image, (channels * multiplier, 1, *kernel), (channels * multiplier,)][: 3 if has_bias else 2]
    if not backward:
        return operator, shapes
    (out, _), *_ = outputs_of(operator, [np.empty(shape, np.float32) for shape in shapes])
    return operator.gradient, [*shapes[:2], out]


def recurrence(steps, batch, hidden, backward=False, reverse=False, allow_tf32=False):
    operator = _recurrence(reverse, allow_tf32)
    state, weight = (batch, hidden), (3 * hidden, hidden)
    gates, hiddens = (steps, batch, 3 * hidden), (steps, batch, hidden)
    if not backward:
        return operator, [gates, weight, weight[:1], state, state, (batch,)]
    return operator.gradient.__self__.backward, [weight, gates, *[hiddens] * 2, state, (batch,), hiddens, *[state] * 2]


def inputs_of(operator, shapes, dtype):
    """Random numbers. Recurrences get lengths from below 0 to above all steps, and weights as large as in training, so
    that rounding errors do not grow from step to step."""
    rng = np.random.default_rng(0)
    inputs = [np.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    names = operator.names()[0]
    if "lengths" in names:
        lengths, weight = names.index("lengths"), names.index("weight")
        steps = shapes[1 - weight][0]  # of the product or the gates
        inputs[lengths] = rng.integers(-1, steps + 2, shapes[lengths]).astype(np.int32)
        inputs[weight] /= np.asarray(max(1, shapes[weight][1]) ** 0.5, dtype)
    return inputs


def calls():
    """name -> (operator, shapes of its inputs)"""
    for n in (0, 1, 2, 31, 257, 1000, 4099):
        yield f"sigmoid {n}", _sigmoid, [(n,)]
        yield f"sigmoid backward {n}", _sigmoid.gradient, [(n,), (n,)]
        yield f"sigmoid second order {n}", _sigmoid_backward_backward, [(n,)] * 3
        yield f"add {n}", _add, [(n,), (n,)]
    for x, out in (
        ((7, 1), (7, 5)),
        ((1, 96), (33, 96)),
        ((), (700,)),
        ((3, 1, 4), (3, 2, 4)),
        ((1, 2) * 3, (3, 2) * 3),
        ((1, 2, 1, 3), (3, 2, 5, 3)),
        ((1, 301), (70, 301)),
        ((70, 1), (70, 301)),
    ):
        yield f"add {x} to {out}", _add, [x, out]
        yield f"add, {out} summed to {x}", add_backward, [out, x]
    parts = (((1,), (70_001,)), ((5, 1), (5, 30_011)), ((5,), (40_003, 5)), ((1, 6, 1), (90, 6, 91)))
    rows = (((13,), (100_003, 13)), ((1001,), (10_000, 1001)))  # in numbers that packs tile, or not
    packs = (((1,), (70_016,)), ((6, 1), (6, 30_016)), ((65_536,), (7, 65_536)), ((1, 4, 1, 16_384), (3, 4, 5, 16_384)))
    for x, out in parts + rows + packs:
        yield f"add, {out} summed to {x}, long", add_backward, [out, x]
    for n, f in (
        (0, 3),
        (5, 0),
        (1, 1),
        (35, 1),
        (33, 2),
        (17, 3),
        (9, 4),
        (17, 7),
        (9, 8),
        (11, 15),
        (9, 16),
        (11, 31),
        (5, 72),
        (3, 301),
        (2000, 3),
        (1200, 17),
        (600, 65),
        (2, 3001),
    ):
        yield f"trilinear {n} x {f}", _trilinear_interpolation, [(n, 8, f), (n, 3)]
        yield f"trilinear backward {n} x {f}", _trilinear_interpolation.gradient, [(n, 8, f), (n, 3), (n, f)]
    for b, h in ((0, 4), (1, 1), (3, 5), (16, 8), (70, 33), (257, 2), (300, 1024), (4099, 67), (16_400, 257)):
        yield f"lltm {b} x {h}", _pointwise, [(b, 3 * h), (3 * h,), (b, h)]
        yield f"lltm backward {b} x {h}", _pointwise.gradient, [(b, 3 * h), (3 * h,), *[(b, h)] * 3]
    for t, b, h in (
        (0, 3, 5),
        (4, 0, 5),
        (4, 3, 0),
        (1, 2, 3),
        (9, 1, 128),
        (6, 3, 67),
        (5, 16, 128),
        (4, 300, 96),
        (6, 1, 129),
        (4, 100, 192),
        (5, 16, 256),
        (4, 20, 330),
        (3, 9, 500),
        (3, 64, 1024),
        (3, 64, 1025),
        (4, 130, 333),
        (3, 4, 1500),
        (1, 200, 1032),
        (3, 200, 1032),
        (2, 420, 520),
        (2, 700, 520),
    ):
        for reverse in (False, True):
            for backward in (False, True):
                name = f"lltm sequence{' backward' * backward} {t} x {b} x {h}{' reverse' * reverse}"
                yield name, *recurrence(t, b, h, backward, reverse)
    for backward in (False, True):
        way = "backward " if backward else ""
        for k in (3, 5, 7):
            for stride in (1, 2):
                for padding in (
                    (k // 2,) * 4,
                    (0, 0, 0, 0),
                    (k + 1, 0, 2, 2 * k),
                    (k - 1, 0, 0, k - 1),
                    (0, 0, k // 2, 0),
                    (k // 2 - 1, k // 2) * 2,
                ):
                    settings = dict(stride=stride, pad_mode="pad", padding=padding)
                    image = (2, 3, 19, 37) if padding[0] <= k else (3, 2, 8, 9)
                    yield (
                        f"depthwise {way}k{k} {settings}",
                        *convolution(*image, channels=image[1], kernel=(k, k), backward=backward, **settings),
                    )
            # Widths of which 4, 2 or 1 elements are moved at once, and enough strips for several tiles of a block.
            # Odd ones, too: below, at and above a strip, and of one element.
            aligned = ((9, 2, 40, 56), (3, 2, 29, 36), (7, 3, 15, 14), (3, 3, 14, 18))
            for image in (*aligned, (40, 2, 7, 7), (9, 2, 40, 57), (3, 2, 29, 35), (3, 2, 5, 9), (2, 3, 11, 1)):
                name = f"depthwise {way}k{k} {image}"
                yield name, *convolution(*image, channels=image[1], kernel=(k, k), backward=backward)
        for image in ((5, 24, 14, 14), (3, 5, 14, 14), (1, 40, 7, 7), (9, 33, 7, 7)):  # whole and broken groups
            name = f"depthwise {way}k3 {image}"
            yield name, *convolution(*image, channels=image[1], kernel=(3, 3), backward=backward)
        for image, kernel in (
            ((2, 3, 20, 21), (9, 9)),
            ((2, 2, 70, 66), (31, 31)),
            ((3, 2, 5, 90), (1, 8)),
            ((1, 2, 64, 64), (3, 5)),
            ((1, 1, 9, 9), (80, 70)),
        ):
            yield (
                f"depthwise {way}{image} {kernel}",
                *convolution(*image, channels=image[1], kernel=kernel, backward=backward),
            )
        for kernel, settings in (
            ((1, 1), {}),
            ((2, 5), dict(stride=(2, 3), has_bias=False)),
            ((3, 3), dict(dilation=2)),
            ((3, 3), dict(multiplier=2)),
            ((9, 9), dict(stride=2)),
        ):
            name = f"depthwise {way}{kernel} {settings}"
            yield name, *convolution(2, 3, 20, 21, channels=3, kernel=kernel, backward=backward, **settings)
        settings = dict(stride=(2**30, 1), pad_mode="pad", padding=(0, 2**31 - 1, 0, 0))
        name = f"depthwise {way}padded past 32 bits"
        yield name, *convolution(1, 1, 10, 1, channels=1, kernel=(3, 1), backward=backward, **settings)
        settings = dict(pad_mode="pad", padding=2)
        name = f"depthwise {way}nothing but padding"
        yield name, *convolution(1, 1, 0, 4, channels=1, kernel=(3, 3), backward=backward, **settings)
        settings = dict(pad_mode="pad", padding=1)
        name = f"depthwise {way}many positions"
        yield name, *convolution(3, 1, 150, 151, channels=1, kernel=(3, 3), backward=backward, **settings)


CALLS = {name: (operator, shapes) for name, operator, shapes in calls()}


class Guarded:
    """A torch array between guard elements."""

    def __init__(self, shape, dtype, shift, values=None):
        size = int(np.prod(shape, dtype=np.int64))
        self.memory = torch.full((size + 2 * GUARD,), -7.0, dtype=getattr(torch, dtype), device="cuda")
        self.array = self.memory[GUARD + shift : GUARD + shift + size].view(shape)
        if values is None:
            self.array.fill_(float("nan"))
        else:
            self.array.copy_(torch.from_numpy(values))
        self.before, self.after = self.memory[: GUARD + shift], self.memory[GUARD + shift + size :]

    def untouched(self):
        return bool((self.before == -7).all() and (self.after == -7).all())


@pytest.mark.parametrize("shift", [0, 1, 2], ids=["aligned", "unaligned", "aligned to pairs"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", CALLS)
def test_gpu_equals_cpu(name, dtype, shift):
    operator, shapes = CALLS[name]
    inputs = inputs_of(operator, shapes, dtype)
    outputs = outputs_of(operator, inputs)
    on_cpu = [np.full(shape, np.nan, kind) for shape, kind in outputs]
    assert prepare_operator(operator, [*inputs, *on_cpu])() == 0
    guarded = [Guarded(x.shape, str(x.dtype), shift, x) for x in inputs] + [
        Guarded(*output, shift) for output in outputs
    ]
    assert prepare_operator(operator, [g.array for g in guarded])() == 0
    torch.cuda.synchronize()
    for x, g in zip(inputs, guarded):
        np.testing.assert_array_equal(g.array.cpu().numpy(), x, "an input was changed")
    assert all(g.untouched() for g in guarded)
    has_scratch = bool(operator.signature.scratch)
    for want, g in zip(on_cpu[: -1 if has_scratch else None], guarded[len(inputs) :]):
        got = g.array.cpu().numpy()
        # A sum of many terms may happen to be small, but its error is that of sums of their usual size.
        terms = max(x.size for x in inputs) / max(1, want.size)
        scale = max(np.abs(want).max(initial=0), terms**0.5)
        tolerance = {"float16": 2e-3, "float32": 5e-6, "float64": 1e-13}[dtype]
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * scale, err_msg=name)


needs_tf32 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="TF32 came with sm_80"
)
WAYS = {"across the grid": (64, 1024), "in small tiles": (64, 1544), "in tiles": (300, 1544), "by cuBLAS": (4, 1500)}


@needs_tf32
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backward", [False, True])
def test_tf32(way, backward):
    """Where it is allowed, recurrent products have factors of 11 bits."""
    size = 3, *WAYS[way]
    results = []
    for allow_tf32 in (False, True):
        operator, shapes = recurrence(*size, backward, False, allow_tf32)
        inputs = [torch.from_numpy(x).cuda() for x in inputs_of(operator, shapes, "float32")]
        results.append(run(operator, *inputs)[0].cpu().numpy())
    exact, rounded = results
    error = np.abs(rounded - exact).max() / np.abs(exact).max()
    assert 1e-6 < error < 2e-3


def to_tf32(x):
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


needs_tiles = pytest.mark.skipif(
    re.search(rb"msops: nvcc 11", of_package("lltm_sequence").path.read_bytes()) is not None,
    reason="tiles came with nvcc 12; cuBLAS, which is there instead, does not round to nearest",
)


@needs_tf32
@needs_tiles
@pytest.mark.parametrize("way", ["across the grid", "in small tiles", "in tiles"])
def test_factors_are_rounded_to_nearest(way):
    batch, hidden = WAYS[way]
    sample = torch.arange(batch, device="cuda")
    unit = sample * 5 % hidden
    forward, shapes = recurrence(1, batch, hidden, allow_tf32=True)
    backward, _ = recurrence(1, batch, hidden, backward=True, allow_tf32=True)
    product, _, bias, zeros, c = (torch.zeros(shape, device="cuda") for shape in shapes[:5])
    lengths = torch.ones(batch, dtype=torch.int32, device="cuda")
    weight, h = torch.randn(shapes[1], device="cuda"), torch.randn(batch, hidden, device="cuda")
    ones = zeros.clone()
    ones[sample, unit] = 1
    gates = run(forward, product, weight, bias, ones, c, lengths)[3][0]
    assert torch.equal(gates, to_tf32(weight)[:, unit].T)
    diagonal = torch.eye(hidden, device="cuda").repeat(3, 1)
    output, _, _, gates, cells, _ = run(forward, product, diagonal, bias, h, c, lengths)
    assert torch.equal(gates[0], to_tf32(h).repeat(1, 3))
    diagonal[hidden:] = 0
    dgates, _, dh, _, _ = run(backward, diagonal, gates, cells, output, h, lengths, output, h, c)
    assert torch.equal(dh, to_tf32(dgates[0, :, :hidden]))
    weight[hidden:] = 0
    dgates, _, dh, _, _ = run(backward, weight, gates, cells, output, h, lengths, zeros[None], ones, c)
    assert torch.equal(dh, to_tf32(dgates[0, sample, unit])[:, None] * to_tf32(weight)[unit])


# Sizes of more than 2^31 elements: in 16 bits each, 4 GiB and more an array.

BIG = 2**31 + 4099


def random(*shape):
    return torch.randint(-8, 9, shape, dtype=torch.int8, device="cuda").to(torch.float16) / 4


def run(operator, *inputs):
    outputs = [
        torch.full(shape, float("nan"), dtype=getattr(torch, d), device="cuda")
        for shape, d in outputs_of(operator, inputs)
    ]
    assert prepare_operator(operator, [*inputs, *outputs])() == 0
    torch.cuda.synchronize()
    return outputs


def assert_close(got, want):
    assert torch.allclose(got.float(), want.float(), rtol=2e-3, atol=2e-3)


def assert_sums(got, want):
    """Sums, rounded to float16, against float64. Those that leave the range of float16 are infinite."""
    scale = want.abs().max().item()
    assert torch.allclose(got.double(), want.to(torch.float16).double(), rtol=2e-3, atol=1e-6 * scale)


@pytest.fixture
def _free_memory():
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    yield
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("_free_memory")
class TestHuge:
    def test_sigmoid(self):
        x = random(BIG)
        (y,) = run(_sigmoid, x)
        assert_close(y, torch.sigmoid(x))
        (dx,) = run(_sigmoid.gradient, y, x)
        assert_close(dx, x * y * (1 - y))

    def test_add(self):
        x = random(BIG // 3, 3)
        y = random(3)
        (out,) = run(_add, x, y)
        assert torch.equal(out, x + y)
        dy = run(add_backward, x, y)[0]
        assert_sums(dy, x.sum(0, dtype=torch.float64))
        dx = run(add_backward, x, x[:, :1].contiguous())[0]
        assert_close(dx, x.sum(1, keepdim=True))

    def test_trilinear_interpolation(self):
        n, f = 2**24 + 3, 16
        feats, points = random(n, 8, f), random(n, 3) / 2
        (out,) = run(_trilinear_interpolation, feats, points)
        dfeats, dpoints = run(_trilinear_interpolation.gradient, feats, points, out)
        for part in (slice(0, 1000), slice(n - 1000, n)):  # the last part is past 2^31
            small = run(_trilinear_interpolation, feats[part].contiguous(), points[part].contiguous())[0]
            assert torch.equal(out[part], small)
            inputs = (feats[part].contiguous(), points[part].contiguous(), small)
            for big, want in zip((dfeats, dpoints), run(_trilinear_interpolation.gradient, *inputs)):
                assert torch.equal(big[part], want)
        assert not dfeats.isnan().any()
        assert not out.isnan().any()

    def test_lltm(self):
        b, h = 2**22 + 5, 256
        product, bias, c = random(b, 3 * h), random(3 * h), random(b, h)
        new_h, new_c = run(_pointwise, product, bias, c)
        dproduct, dbias, dc, _ = run(_pointwise.gradient, product, bias, c, c, new_h)
        for part in (slice(0, 1000), slice(b - 1000, b)):
            small = [a[part].contiguous() for a in (product, c, new_h)]
            for big, want in zip((new_h, new_c), run(_pointwise, small[0], bias, small[1])):
                assert torch.equal(big[part], want)
            gradients = run(_pointwise.gradient, small[0], bias, small[1], small[1], small[2])
            for big, want in zip((dproduct, dc), (gradients[0], gradients[2])):
                assert torch.equal(big[part], want)
        assert_sums(dbias, sum(chunk.sum(0, dtype=torch.float64) for chunk in dproduct.split(2**20)))

    @pytest.mark.parametrize("kernel", [3, 4])
    def test_depthwise_conv2d(self, kernel):
        n, c = 2**15 + 1, 64
        x, weight, bias = random(n, c, 32, 32), random(c, 1, kernel, kernel), random(c)
        operator = _convolution("", 1, "same", 0, 1, True)
        (out,) = run(operator, x, weight, bias)
        dout = random(*out.shape)
        dx, dweight, dbias, _ = run(operator.gradient, x, weight, dout)
        for part in (slice(0, 3), slice(n - 3, n)):
            small = x[part].contiguous(), weight, bias
            assert_close(out[part], run(operator, *small)[0])
            assert_close(dx[part], run(operator.gradient, *small[:2], dout[part].contiguous())[0])
        assert_sums(dbias, sum(chunk.sum((0, 2, 3), dtype=torch.float64) for chunk in dout.split(1024)))
        before = (kernel - 1) // 2  # the tap that meets each output at its own position
        products = (d * i for d, i in zip(dout.split(1024), x.split(1024)))
        assert_sums(dweight[:, 0, before, before], sum(p.sum((0, 2, 3), dtype=torch.float64) for p in products))

    @pytest.mark.parametrize(("batch", "hidden"), [(4096, 64), (64, 256), (256, 1024), (64, 2200)])
    def test_lltm_sequence(self, batch, hidden):
        """In blocks, clusters, the grid, with cuBLAS. Some samples, the last past 2^31, equal those by themselves."""
        steps = BIG // (batch * 3 * hidden) + 1
        operator, shapes = recurrence(steps, batch, hidden)
        lengths = torch.full((batch,), steps, dtype=torch.int32, device="cuda")
        product, weight, bias, h, c = (random(*shape) for shape in shapes[:5])
        weight /= 8 * hidden**0.5
        output, last_h, last_c, gates, cells, _ = run(operator, product, weight, bias, h, c, lengths)
        backward, _ = recurrence(steps, batch, hidden, backward=True)
        of_forward = gates, cells, output, h
        dgates, _, dh, dc, _ = run(backward, weight, *of_forward, lengths, output, last_h, c)
        for part in (slice(0, 3), slice(batch - 3, batch)):
            of_sequences = [a[:, part].contiguous() for a in (product, gates, cells, output)]
            state = [a[part].contiguous() for a in (h, c, last_h, lengths)]
            small = run(operator, of_sequences[0], weight, bias, *state[:2], state[3])
            for big, want in zip((output, gates, cells), (small[0], small[3], small[4])):
                assert_close(big[:, part], want)
            small = run(backward, weight, *of_sequences[1:], state[0], state[3], of_sequences[3], state[2], state[1])
            for big, want in zip((dgates[:, part], dh[part], dc[part]), (small[0], small[2], small[3])):
                scale = want.abs().max()
                assert_close(big / scale, want / scale)
        assert not last_c.isnan().any()
        assert not dgates.isnan().any()
