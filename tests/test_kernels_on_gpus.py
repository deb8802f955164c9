"""Tests on a GPU that MindSpore's operators give the same with msops' kernels as with MindSpore's own.

`--expressions 5000` runs so many random expressions, and `-s` shows how many calls of each function ran by msops'
kernels.
"""

import itertools

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

import msops
from msops.compat import VERSION
from msops.patch.gpu import kernels

pytestmark = pytest.mark.skipif(VERSION != (2, 10), reason="the kernels of MindSpore 2.10 are replaced")

FLOATS = "float16", "float32", "float64"
NUMBERS = *FLOATS, "int32", "int64"
SHAPES = (
    *(((n,), (n,)) for n in (1, 7, 1023, 65537)),
    *(((33, 257), (257,)), ((33, 257), (33, 1)), ((1, 64), (65, 1)), ((128, 4096), (4096,)), ((3, 1, 5), (2, 1))),
    *(((2, 3, 4, 5, 6), (1, 3, 1, 5, 1)), ((129, 130), ()), ((), (64,)), ((4, 1, 1, 8), (1, 3, 2, 1))),
)
counted = {}  # kernel -> how many calls ours did, and left


@pytest.fixture(autouse=True)
def _on_gpu(device_target):
    if device_target != "GPU":
        pytest.skip("MindSpore's kernels for GPUs are replaced")
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)


@pytest.fixture(scope="module", autouse=True)
def _summary(request):
    """Prints, with -s, how many calls ran by msops' kernels."""
    yield
    total = {}
    for kernel, (done, left) in counted.items():
        before = total.get(kernel.name, (0, 0))
        total[kernel.name] = before[0] + done, before[1] + left
    for name, (done, left) in sorted(total.items()):
        print(f"{name}: {done} calls by msops, {left} left to MindSpore")


def numpy_of(results):
    return [each.asnumpy() for each in (results if isinstance(results, (tuple, list)) else [results])]


class Patched:
    """Has msops' kernels in place, and tells which ran."""

    def __enter__(self):
        self.patch = msops.patch_mindspore(mint=False)
        assert self.patch.kernels, "msops' kernels cannot replace MindSpore's on this machine"
        return self

    def __exit__(self, *error):
        self.calls = {kernel: each for kernel, each in kernels.state.functions.calls().items() if any(each)}
        self.patch.undo()
        for kernel, (done, left) in self.calls.items():
            before = counted.get(kernel, (0, 0))
            counted[kernel] = before[0] + done, before[1] + left

    def ran(self, name):
        return sum(done for kernel, (done, _) in self.calls.items() if kernel.name == name)


def both(f, *inputs):
    """Returns what f returns with MindSpore's kernels and with msops', and which of these ran."""
    want = numpy_of(f(*inputs))
    with Patched() as patched:
        got = numpy_of(f(*inputs))
    return want, got, patched


def check(want, got, ulps=0, scale=None):
    """Requires equal values, or those that differ by so many units in the last place of the scale."""
    assert len(want) == len(got)
    for expected, found in zip(want, got):
        assert expected.dtype == found.dtype
        assert expected.shape == found.shape
        if ulps == 0 or expected.dtype.kind not in "fc":
            np.testing.assert_array_equal(found, expected)
            continue
        step = ulps * np.finfo(expected.dtype).eps
        atol = step * (np.abs(expected[np.isfinite(expected)]).max(initial=0.0) if scale is None else scale)
        np.testing.assert_allclose(found, expected, rtol=step, atol=min(atol, 1e300) if scale is not None else 0)


def values(rng, shape, dtype, special=True):
    if dtype == "bool":
        return Tensor(rng.random(shape) < 0.5)
    if dtype.startswith(("int", "uint")):
        return Tensor(rng.integers(0 if dtype.startswith("u") else -9, 10, shape).astype(dtype))
    x = np.asarray(rng.standard_normal(shape) * 3)
    if special and x.size > 8:
        flat = x.reshape(-1)
        flat[:8] = 0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.0
    return Tensor(x.astype(dtype))


def all_of(f, inputs):
    return [f(*each) for each in inputs]


EXACT = {
    **{name: getattr(ops, name) for name in ("add", "sub", "mul", "maximum", "minimum")},
    **{name: getattr(ops, name) for name in ("greater", "less", "equal", "ge", "le", "ne")},
    "squared_difference": ops.SquaredDifference(),
}
ROUNDED = {"div": ops.div, "pow": ops.pow, "div_no_nan": ops.DivNoNan(), "mul_no_nan": ops.MulNoNan()}


@pytest.mark.parametrize("dtype", NUMBERS)
def test_binary(dtype):
    rng = np.random.default_rng(0)
    used = {**EXACT, **(ROUNDED if dtype in FLOATS else {})}
    inputs = [(values(rng, a, dtype), values(rng, b, dtype)) for a, b in SHAPES]
    inputs += [(y, x) for x, y in inputs]

    for name, f in used.items():
        ulps = {"pow": 8}.get(name, 2 if name in ROUNDED else 0)
        want, got, patched = both(all_of, f, inputs)
        check(want, got, ulps)
        assert patched.ran("BinaryOpWithBroadcastCudaFunc") >= len(inputs), (name, patched.calls)


@pytest.mark.parametrize("dtype", [*NUMBERS, "bool"])
def test_logical(dtype):
    rng = np.random.default_rng(1)
    inputs = [(values(rng, a, dtype, False), values(rng, b, dtype, False)) for a, b in SHAPES]
    functions = ops.equal, ops.ne, *((ops.logical_and, ops.logical_or) if dtype == "bool" else ())
    want, got, patched = both(lambda: [f(x, y) for f in functions for x, y in inputs])
    check(want, got)
    assert patched.ran("BinaryOpWithBroadcastCudaFunc") >= len(want)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_numbers(dtype):
    """Python's numbers beside tensors, which MindSpore makes tensors of one element."""
    rng = np.random.default_rng(2)
    x = values(rng, (33, 65), dtype, False)

    def f():
        done = [2 * x, x + 3, 5 - x, x * 0.5, x**2, x > 1, x <= 1.5]
        return [*done, 2.0 / x, x / 3] if dtype in FLOATS else done

    want, got, _ = both(f)
    check(want, got, 2)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_binary_ext(dtype):
    rng = np.random.default_rng(3)
    inputs = [(values(rng, a, dtype), values(rng, b, dtype)) for a, b in SHAPES if a and b]
    alphas = (2, 0.3) if dtype in FLOATS else (2, -3)
    call = lambda: [f(x, y, alpha=a) for f in (mint.add, mint.sub) for x, y in inputs for a in alphas]  # noqa: E731
    want, got, patched = both(call)
    largest = max(np.abs(x.asnumpy()[np.isfinite(x.asnumpy())]).max(initial=1) for pair in inputs for x in pair)
    check(want, got, 2, 3.0 * largest)  # MindSpore rounds the product of float16
    assert patched.ran("BinaryExtOpWithBroadcastCudaFunc") >= len(want), patched.calls


@pytest.mark.parametrize("dtype", [*NUMBERS, "bool", "int8", "uint8"])
def test_select(dtype):
    rng = np.random.default_rng(4)
    shapes = ((65, 33), (65, 33), (65, 33)), ((65, 1), (1, 33), (65, 33)), ((33,), (65, 33), (1, 1)), ((7,), (7,), (7,))
    inputs = [(values(rng, c, "bool"), values(rng, a, dtype), values(rng, b, dtype)) for c, a, b in shapes]

    def f():
        chosen = [ops.where(c, x, y) for c, x, y in inputs]
        number = inputs[0][1].reshape(-1)[0]
        filled = [
            ops.masked_fill(x, c, number) for c, x, _ in inputs if dtype in NUMBERS and len(c.shape) == len(x.shape)
        ]
        return chosen + filled

    want, got, patched = both(f)
    check(want, got)
    assert sum(patched.ran(each) for each in ("CalSelect", "CalSelectBroadcast")) >= len(shapes), patched.calls


@pytest.mark.parametrize("dtype", [*NUMBERS, "bool", "int8", "uint8", "complex64"])
def test_copies(dtype):
    rng = np.random.default_rng(5)
    x, m = values(rng, (6, 33, 4, 65), dtype.replace("complex64", "float32")), values(rng, (130, 257), "float32")
    x, m = ops.cast(x, getattr(mindspore, dtype.rstrip("_"))) if dtype == "complex64" else x, m.astype(x.dtype)

    def f():
        orders = [ops.transpose(x, order) for order in itertools.permutations(range(4))]
        views = [x[:, ::2], x[1:3, ..., 5:], x[..., -1], x[::-1] if dtype in NUMBERS else x[2:], m.T, m[7:70, 3:200]]
        slices = [ops.slice(x, (1, 2, 0, 3), (3, 20, 4, 50)), ops.strided_slice(m, (100, 3), (2, 250), (-3, 2))]
        grown = [ops.tile(m, (2, 3)), ops.broadcast_to(m[:1], (50, 257)), ops.broadcast_to(m[:, :1], (130, 64))]
        return [each + 0 if dtype in NUMBERS else each for each in (*orders, *views, *slices, *grown)]

    want, got, patched = both(f)
    check(want, got)
    assert patched.ran("CalAsStrided") + patched.ran("CalTranspose") >= 20, patched.calls


@pytest.mark.parametrize("dtype", NUMBERS)
def test_joins_and_bands(dtype):
    rng = np.random.default_rng(6)
    x, y = values(rng, (6, 33, 64), dtype), values(rng, (6, 9, 64), dtype)

    def f():
        joined = [ops.cat((x, y), 1), ops.cat((x, x, y), 1), ops.stack((x, x)), ops.stack((y, y, y), -1)]
        split = [*ops.split(x, 11, 1), *ops.split(x, (30, 3), 1), *ops.chunk(x, 4, -1), *ops.unstack(y, 1)[:3]]
        split += [*ops.Split(1, 3)(x), *ops.Split(2, 4)(y)]
        bands = [f(x, d) for f in (ops.triu, ops.tril) for d in (-40, -1, 0, 3, 70)]
        return [*joined, *split, *bands]

    want, got, _ = both(f)
    check(want, got)


@pytest.mark.parametrize("dtype", FLOATS)
def test_reductions(dtype):
    """Sums are as good as MindSpore's: it adds float16 in float16."""
    rng = np.random.default_rng(7)
    for shape in ((7,), (1000,), (300, 1000), (1000, 300), (8, 33, 65), (3, 4, 5, 6, 7), (20000, 3)):
        x = values(rng, shape, dtype, False)
        exact = x.asnumpy().astype(np.float64)
        axes = [a for n in range(1, len(shape) + 1) for a in itertools.combinations(range(len(shape)), n)]
        for axis in axes:
            want, got, _ = both(lambda x, axis: [ops.amax(x, axis), ops.amin(x, axis)], x, axis)
            check(want, got)
            want, got, _ = both(lambda x, axis: [x.sum(axis), x.mean(axis)], x, axis)
            count = np.prod([shape[a] for a in axis])
            for result, correct, scale in zip(got, (exact.sum(axis), exact.mean(axis)), (1, count)):
                bound = np.abs(exact).sum(axis) / scale * np.finfo(dtype).eps * 4
                assert (np.abs(result - correct) <= bound + 1e-300).all(), (shape, axis, dtype)


def test_reductions_of_integers():
    rng = np.random.default_rng(8)
    x, b = values(rng, (65, 33, 7), "int32"), values(rng, (65, 33, 7), "bool")
    axes = 0, 1, 2, (0, 1), (1, 2), (0, 2), (0, 1, 2)
    f = lambda: [g for a in axes for g in (ops.any(b, a), ops.all(b, a), ops.amax(x, a), ops.amin(x, a))]  # noqa: E731
    want, got, _ = both(f)
    check(want, got)


class Network(nn.Cell):
    """Everything at once, whose gradients C++ builds."""

    def construct(self, x, y, bias):
        z = (x * y + bias) * ops.sigmoid(x - y) - bias * 0.5
        z = ops.cat((z[:, ::2], z[:, 1::2]), 1).reshape(4, -1, z.shape[-1]).transpose(0, 2, 1)
        z = ops.where(z > 0.1, z, 0.5 * z) + ops.tril(z) / (1 + ops.maximum(z, -z))
        first, second = ops.split(z, z.shape[1] // 2, 1)
        return (ops.stack((first, second)) ** 2).mean((0, 1)) * 1.25 + ops.tile(first[0, :1, :1], (2, 1)).sum()


class Loss(nn.Cell):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def construct(self, x, y, bias):
        return self.net(x, y, bias).sum()


@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_gradients(mode, dtype):
    rng = np.random.default_rng(9)
    inputs = [values(rng, shape, dtype, False) for shape in ((64, 32), (1, 32), (32,))]
    mindspore.set_context(mode=mindspore.GRAPH_MODE if mode == "graph" else mindspore.PYNATIVE_MODE)
    net = Network()
    run = mindspore.value_and_grad(Loss(net), (0, 1, 2))

    def f(*x):
        value, gradients = run(*x)
        return [net(*x), value, *gradients]

    want, got, patched = both(f, *inputs)
    check(want, got, 64, scale=np.abs(np.concatenate([each.ravel() for each in want])).max())
    assert len({kernel.name for kernel, (done, _) in patched.calls.items() if done}) >= 6, patched.calls


def test_reshaped_tensors_are_not_copied():
    rng = np.random.default_rng(11)
    x = values(rng, (64, 32), "float32", False)
    want, got, _ = both(lambda: [x.reshape(-1) + 1, ops.matmul(x.reshape(32, 64), x), x[:32].reshape(-1) * 2])
    check(want, got)
    x = x + 1
    assert x.reshape(-1).astype(x.dtype)._data_ptr() == x._data_ptr()
    assert x[:32].reshape(-1).astype(x.dtype)._data_ptr() != x._data_ptr()


def test_recorded():
    """A CUDA graph of the kernels replays the bits of usual calls."""
    rng = np.random.default_rng(10)
    net = Network()
    with Patched():
        g = msops.cuda_graph(net)
        for _ in range(4):
            x = [values(rng, shape, "float32", False) for shape in ((64, 32), (1, 32), (32,))]
            assert g(*x).asnumpy().tobytes() == net(*x).asnumpy().tobytes()


# Random expressions. Each step takes tensors that were there before, so that views are among them.


def random_shape(rng):
    return tuple(int(n) for n in rng.choice((0, 1, 1, 2, 3, 5, 8, 17, 64), rng.integers(0, 5)))


def step(rng, x, y):
    """Returns a random function of two tensors, and how many units in the last place it may differ by."""
    rank, size = len(x.shape), int(np.prod(x.shape))
    order = tuple(int(i) for i in rng.permutation(rank))
    axis = int(rng.integers(rank)) if rank else 0
    pick = tuple(slice(None, None, int(rng.integers(1, 4))) if n > 1 else slice(None) for n in x.shape)
    begin = tuple(slice(int(rng.integers(0, n // 2 + 1)), None) for n in x.shape)
    diagonal, number = int(rng.integers(-3, 4)), float(np.round(rng.standard_normal(), 2))
    choices = [
        *[
            (g, 0)
            for g in (ops.add, ops.sub, ops.mul, ops.maximum, ops.minimum, ops.greater, ops.le, ops.equal, ops.ne)
        ],
        *[(g, 2) for g in (ops.div, lambda a, b: a * number, lambda a, b: number - a, lambda a, b: a / number)],
        (lambda a, b: a**2, 2),
        (lambda a, b: ops.where(a > 0, a, b), 0),
        (lambda a, b: a.reshape(-1), 0),
        (lambda a, b: a.expand_dims(axis), 0),
    ]
    if rank and size:
        choices += [
            *[(lambda a, b: ops.transpose(a, order), 0)] * 3,
            *[(lambda a, b: a[pick], 0), (lambda a, b: a[begin], 0)] * 2,
            (lambda a, b: ops.cat((a, a, a), axis), 0),
            (lambda a, b: ops.stack((a, a), axis), 0),
            (lambda a, b: ops.tile(a, (2,) + (1,) * (rank - 1)), 0),
            (lambda a, b: ops.broadcast_to(a.expand_dims(axis), (*a.shape[:axis], 3, *a.shape[axis:])), 0),
            (lambda a, b: ops.amax(a, axis), 0),
            (lambda a, b: a.sum(axis, keepdims=True), 64),
            (lambda a, b: a.mean(), 64),
        ]
    if rank > 1 and size:
        choices += [(lambda a, b: ops.triu(a, diagonal), 0), (lambda a, b: ops.tril(a, diagonal), 0)]
    return choices[int(rng.integers(len(choices)))]


def grow(rng, steps):
    """Makes tensors by random steps. Returns these steps, each with its inputs and what MindSpore gave."""
    dtypes = [*NUMBERS, "float16", "float32", "float32", "bool"]
    shape = random_shape(rng)
    smaller = tuple(n if rng.random() < 0.6 else 1 for n in shape)[int(rng.integers(0, 2)) :]
    tensors = [values(rng, each, str(rng.choice(dtypes)), False) for each in (shape, smaller, shape)]
    done = []
    for _ in range(steps):
        x, y = (tensors[int(i)] for i in rng.integers(0, len(tensors), 2))
        f, ulps = step(rng, x, y)
        try:
            result = f(x, y)
            found = result.asnumpy()
        except Exception:  # noqa: BLE001, S112 (MindSpore refuses shapes and dtypes in many ways)
            continue
        if found.size < 100_000:
            done.append((f, x, y, ulps, found))
            tensors.append(result)
    return done


def test_random_expressions(request):
    count, failed = request.config.getoption("--expressions"), []
    done, compared, seeds = 0, 0, iter(range(10**9))
    while done < count:
        rows = [
            (seed, grow(np.random.default_rng(seed), 6)) for seed in itertools.islice(seeds, min(250, count - done))
        ]
        with Patched(), np.errstate(all="ignore"):
            for seed, steps in rows:
                for i, (f, x, y, ulps, want) in enumerate(steps):
                    got = f(x, y).asnumpy()
                    try:
                        largest = np.abs(x.asnumpy().astype(np.float64)).sum() if ulps > 2 else None
                        check([want], [got], ulps, largest)
                    except AssertionError as error:
                        failed.append(f"seed {seed}, step {i}: {x.dtype}{x.shape}, {y.dtype}{y.shape}: {error}")
                compared += len(steps)
        done += len(rows)
    print(f"{done} random expressions: {compared} results compared, {len(failed)} differ")
    assert not failed, "\n".join(failed[:5])
