"""Tests that MindSpore's names of transformer operators work by msops' kernels while they are patched."""

import itertools

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import msops
from msops import compat
from msops.testing.checks import Gradient, Net, run
from msops.testing.differences import check_finite_differences
from test_ms_deform_attn import ms_deform_attn

generated = getattr(ops, "auto_generate", None)
early_norm, early_swiglu = getattr(ops, "rms_norm", None), getattr(ops, "swiglu", None)
pytestmark = pytest.mark.skipif(not hasattr(ops, "rms_norm"), reason="this MindSpore has none of the names")
RNG = np.random.default_rng(0)
TOLERANCE = {"float16": 2e-3, "float32": 2e-6, "float64": 1e-14}


@pytest.fixture(scope="module", autouse=True)
def _patched():
    with msops.patch_mindspore():
        yield


def numbers(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def call(function, *arrays, **settings):
    """Calls a function as a network, and returns NumPy arrays, in the function's tuples."""
    return numpy_of(Net(function, **settings)(*map(Tensor, arrays)))


def numpy_of(result):
    return tuple(map(numpy_of, result)) if isinstance(result, tuple) else result.asnumpy()


def rms_norm(x, gamma, epsilon=1e-6):
    axes = tuple(range(-gamma.ndim, 0))
    rstd = 1 / np.sqrt(np.mean(np.float64(x) ** 2, axes, keepdims=True) + epsilon)
    return x * rstd * gamma, rstd


def add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    return (*rms_norm(x1 + x2, gamma, epsilon), x1 + x2)


def swiglu(x, dim=-1):
    gate, up = np.split(np.float64(x), 2, dim)
    return gate / (1 + np.exp(-gate)) * up


def rotary(x, cos, sin, mode=0):
    x, half = np.float64(x), x.shape[-1] // 2
    turned = np.concatenate((-x[..., half:], x[..., :half]), -1)
    if mode == 1:
        turned = np.stack((-x[..., 1::2], x[..., ::2]), -1).reshape(x.shape)
    return x * cos + turned * sin


def close(got, wanted, dtype="float32"):
    got, wanted = (each if isinstance(each, tuple) else (each,) for each in (got, wanted))
    assert len(got) == len(wanted)
    for result, expected in zip(got, wanted):
        np.testing.assert_allclose(result, expected, TOLERANCE[dtype], TOLERANCE[dtype])


X, Y, GAMMA = numbers(2, 3, 4, 8), numbers(2, 3, 4, 8), numbers(8)
COS, SIN = numbers(1, 1, 4, 8), numbers(1, 1, 4, 8)


# These are the ways to call each operator: as a function, as a primitive, and as an operator of the generated code.
def rms_norms(x, gamma):
    return (
        ops.rms_norm(x, gamma),
        ops.rms_norm(x, gamma=gamma, epsilon=0.125),
        ops.function.nn_func.rms_norm(x, gamma, 0.125),
        ops.RmsNorm(0.125)(x, gamma),
        ops.operations.RmsNorm(epsilon=0.125)(x, gamma),
        ops.auto_generate.rms_norm_impl(x, gamma, 0.125),
    )


def add_rms_norms(x, y, gamma):
    return (
        ops.add_rms_norm(x, y, gamma),
        ops.add_rms_norm(x1=x, x2=y, gamma=gamma, epsilon=0.125),
        ops.auto_generate.AddRmsNorm()(x, y, gamma, 0.125),
        ops.auto_generate.add_rms_norm_op(x, y, gamma, 0.125),
    )


def swiglus(x):
    return (
        ops.swiglu(x),
        ops.swiglu(x, 0),
        ops.swiglu(input=x, dim=-2),
        ops.auto_generate.Swiglu()(x, 2),
        ops.auto_generate.swiglu_op(x, 2),
    )


def rotations(x, cos, sin):
    return (
        ops.rotary_position_embedding(x, cos, sin),
        ops.rotary_position_embedding(x, cos=cos, sin=sin, mode=1),
        ops.auto_generate.RotaryPositionEmbedding()(x, cos, sin, 1),
        ops.auto_generate.rotary_position_embedding_op(x, cos, sin, mode=1),
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm(mode, dtype):
    x, gamma = X.astype(dtype), GAMMA.astype(dtype)
    first, *others = call(rms_norms, x, gamma)
    close(first, rms_norm(x, gamma), dtype)
    assert [each.dtype for each in first] == [dtype, "float64" if dtype == "float64" else "float32"]
    for other in others:
        close(other, rms_norm(x, gamma, 0.125), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_add_rms_norm(mode, dtype):
    x, y, gamma = X.astype(dtype), Y.astype(dtype), GAMMA.astype(dtype)
    first, *others = call(add_rms_norms, x, y, gamma)
    close(first, add_rms_norm(x, y, gamma), dtype)
    for other in others:
        close(other, add_rms_norm(x, y, gamma, 0.125), dtype)


@pytest.mark.parametrize("shape", [(4, 8), (3, 4, 8), (2, 3, 4, 8)])
def test_gamma_of_several_axes(mode, shape):
    gamma = numbers(*shape)
    close(call(ops.rms_norm, X, gamma), rms_norm(X, gamma))
    close(call(ops.add_rms_norm, X, Y, gamma), add_rms_norm(X, Y, gamma))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_swiglu(mode, dtype):
    x = X.astype(dtype)
    for got, dim in zip(call(swiglus, x), (-1, 0, -2, 2, 2)):
        close(got, swiglu(x, dim), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotary_position_embedding(mode, dtype):
    """The halves of the tables differ, and each has its effect."""
    x, cos, sin = X.astype(dtype), COS.astype(dtype), SIN.astype(dtype)
    for got, rotated in zip(call(rotations, x, cos, sin), (0, 1, 1, 1)):
        close(got, rotary(x, cos, sin, rotated), dtype)


@pytest.mark.parametrize("axes", list(itertools.product((False, True), repeat=3)))
def test_tables_of_each_layout(axes):
    """The tables have or lack each of the first three axes, as for BNSD, BSND and SBND."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    shape = (*(size if has else 1 for has, size in zip(axes, X.shape)), 8)
    cos, sin = numbers(*shape), numbers(*shape)
    for rotated in (0, 1):
        close(call(ops.rotary_position_embedding, X, cos, sin, mode=rotated), rotary(X, cos, sin, rotated))


# MindSpore documents no gradient of the statistics and of the tables.
def normalized(x, gamma):
    return ops.rms_norm(x, gamma, 0.125)[0]


def normalized_sum(x, y, gamma):
    z, _, total = ops.add_rms_norm(x, y, gamma)
    return z, total


def gated(x):
    return ops.swiglu(x, 1)


def rotated(x):
    cos, sin = ops.cos(ops.ones_like(x)), ops.arange(8).reshape(1, 1, 1, 8).astype(x.dtype)
    return ops.rotary_position_embedding(x, cos, ops.broadcast_to(sin, x.shape), 1)


@pytest.mark.parametrize(
    ("function", "arrays"),
    [
        (normalized, (X, GAMMA)),
        (normalized, (X, numbers(4, 8))),
        (normalized_sum, (X, Y, GAMMA)),
        (gated, (numbers(2, 6, 5),)),
        (rotated, (X,)),
    ],
)
def test_gradients(mode, function, arrays):
    arrays = [array.astype(np.float64) for array in arrays]
    net = Net(function)
    douts = [numbers(*out.shape, dtype=np.float64) for out in run(net, *arrays)]
    gradients = run(Gradient(net, len(arrays)), *arrays, *douts)
    check_finite_differences(gradients, net, arrays, douts, most=20)


def test_statistics_have_no_gradient(mode):
    zeros, _ = run(Gradient(Net(ops.rms_norm), 2), X, GAMMA, np.zeros_like(X), numbers(2, 3, 4, 1))
    assert not zeros.any()


@compat.jit
def compiled(x, gamma):
    return ops.rms_norm(ops.swiglu(x), gamma)[0]


def test_jit():
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    x, gamma = Tensor(X), Tensor(GAMMA[:4])
    close(compiled(x, gamma).asnumpy(), rms_norm(swiglu(X), GAMMA[:4])[0])
    gradient = ops.grad(compiled, 1)(x, gamma)
    close(gradient.asnumpy(), rms_norm(swiglu(X), np.ones(4))[0].sum((0, 1, 2)), "float16")


@pytest.mark.skipif(compat.VERSION < (2, 7), reason="MindSpore before 2.7 runs no rule of msops for open sizes")
def test_open_sizes():
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    x, table = (None, 3, None, 8), (1, 1, None, 8)
    for function, reference, arrays, shapes in (
        (ops.rms_norm, rms_norm, (X, GAMMA), (x, (8,))),
        (ops.add_rms_norm, add_rms_norm, (X, Y, GAMMA), (x, x, (8,))),
        (ops.swiglu, swiglu, (X,), (x,)),
        (ops.rotary_position_embedding, rotary, (X, COS, SIN), (x, table, table)),
    ):
        net = Net(function)
        net.set_inputs(*(Tensor(shape=shape, dtype=mindspore.float32) for shape in shapes))
        close(numpy_of(net(*map(Tensor, arrays))), reference(*arrays))


def products(x, y, transposed):
    return (
        ops.BatchMatMul()(x, y),
        ops.operations.BatchMatMul(transpose_b=True)(x, transposed),
        ops.BatchMatMul(True)(x.swapaxes(-1, -2), y),
    )


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (5, 4), (3, 5, 4), (2, 1, 5, 4)])
def test_axes_of_batches_of_matrices_broadcast(mode, shape):
    x, y = numbers(2, 3, 6, 5), numbers(*shape)
    wanted = np.matmul(np.float64(x), y)
    close(call(products, x, y, np.ascontiguousarray(y.swapaxes(-1, -2))), (wanted,) * 3)


def test_attributes_of_products_reach_mindspore():
    product, strategy = ops.BatchMatMul(), ((1, 2, 1), (1, 1, 1))
    assert product.shard(strategy).add_prim_attr("primitive_target", "CPU").recompute() is product
    attributes = product.own.attrs
    assert (attributes["in_strategy"], attributes["primitive_target"], attributes["recompute"]) == (
        strategy,
        "CPU",
        True,
    )


def test_primitives_are_not_sharded(monkeypatch):
    norm = ops.RmsNorm()
    assert norm.shard(((1, 1), (1,))) is norm
    assert norm.add_prim_attr("primitive_target", "Ascend") is norm
    monkeypatch.setattr(mindspore, "get_auto_parallel_context", {"parallel_mode": "semi_auto_parallel"}.get)
    with pytest.raises(NotImplementedError, match=r"^RmsNorm: msops' operators cannot be sharded$"):
        norm.shard(((1, 1), (1,)))


def apply_rotary(query, key, cos, sin, length):
    return ops.ApplyRotaryPosEmb(2)(query, key, cos, sin, length)


@pytest.mark.parametrize("shape", [(2, 3, 16), (6, 16)])
def test_apply_rotary_pos_emb(mode, shape):
    """Heads lie one after another in the features, and each token has a row of the tables."""
    query, key, half = numbers(*shape), numbers(*shape[:-1], 8), numbers(6, 4)
    table = np.concatenate((half, half), 1)
    cos, sin = np.cos(table), np.sin(table)
    got = call(apply_rotary, query, key, cos, sin, np.array([3, 3], np.int32))
    for x, result in zip((query, key), got):
        heads = x.reshape(6, -1, 8)
        close(result, rotary(heads, cos[:, None], sin[:, None]).reshape(x.shape))


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(("shape", "places"), [((2, 3, 16), (0, 1, 2, 0, 1, 2)), ((7, 16), (0, 1, 0, 1, 2, 3, 0))])
def test_apply_rotary_pos_emb_by_places(mode, shape, places, is_open):
    """Tables of more rows have one for each place, at which servers call it for new texts one after another."""
    x, half = numbers(*shape), numbers(9, 4)
    table = np.concatenate((half, half), 1)
    cos, sin = np.cos(table), np.sin(table)
    net = Net(apply_rotary)
    if is_open:
        opened = Tensor(shape=(None, *shape[1:]), dtype=mindspore.float32)
        net.set_inputs(opened, opened, *map(Tensor, (cos, sin)), Tensor(shape=(None,), dtype=mindspore.int32))
    got = call(net, x, x[..., :8].copy(), cos, sin, np.array([2, 4], np.int32))
    for each, result in zip((x, x[..., :8]), got):
        heads = each.reshape(len(places), -1, 8)
        wanted = rotary(heads, cos[list(places), None], sin[list(places), None])
        close(result, wanted.reshape(each.shape))


@pytest.mark.parametrize(
    ("settings", "tables", "error", "words"),
    [
        ((1,), 6, NotImplementedError, "cos_format must be 0 or 2 here"),
        ((), 2, ValueError, "cos must have a row for each place of a text, of 3, got (2, 8)"),
    ],
)
def test_apply_rotary_pos_emb_refuses(settings, tables, error, words):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    query, table = Tensor(numbers(2, 3, 16)), Tensor(numbers(tables, 8))
    with pytest.raises(error) as caught:
        ops.ApplyRotaryPosEmb(*settings)(query, query, table, table, Tensor([3, 3]))
    assert str(caught.value).startswith("ApplyRotaryPosEmb: ")
    assert words in str(caught.value)


def deformable_attentions(value, shape, offset, locations, weight):
    return (
        ops.multi_scale_deformable_attn_function(value, shape, offset, locations, weight),
        ops.auto_generate.MultiScaleDeformableAttn()(value, shape, offset, locations, weight),
        ops.auto_generate.multi_scale_deformable_attn_op(value, shape, offset, locations, weight),
    )


@pytest.mark.skipif(not hasattr(ops, "multi_scale_deformable_attn_function"), reason="this MindSpore does not have it")
@pytest.mark.parametrize("dtype", ["float16", "float32"])  # of the value; the samples are float16 and float32
def test_deformable_attention(mode, dtype):
    shape = np.array([[2, 3], [1, 2]], np.int32)
    value, locations = numbers(1, 8, 2, 8, dtype=dtype), numbers(1, 4, 2, 2, 3, 2)
    inputs = [
        value,
        shape,
        np.array([0, 6], np.int32),
        locations.astype(np.float16),
        numbers(1, 4, 2, 2, 3, dtype=dtype),
    ]
    wanted = ms_deform_attn(*(x.astype(np.float64) if x.dtype.kind == "f" else x for x in inputs))
    close(call(deformable_attentions, *inputs), wanted * 3, dtype)


def test_flag_of_overflows(mode):
    """The model zoo's cells of loss scaling order these calls by Depend, and add up the flag."""
    allocate, clear = ops.NPUAllocFloatStatus(), ops.NPUClearFloatStatus()
    with pytest.warns(UserWarning, match="tells of none: an overflow shows as inf"):
        get = ops.operations.NPUGetFloatStatus()

    def function(x):
        flag = ops.depend(allocate(), x)
        y = ops.depend(x, clear(flag)) * 2
        flag = ops.depend(ops.depend(flag, y), get(flag))
        return y, flag.sum() >= 1

    y, overflow = call(function, np.full(3, 65504, np.float16))
    assert np.isinf(y).all()
    assert not overflow


def test_second_flag_of_overflows(mode):
    """Takes the flag's other tensor, (8,) of int32."""
    names = ops.operations.math_ops if hasattr(ops.operations.math_ops, "NPUGetFloatStatusV2") else ops.auto_generate
    with pytest.warns(UserWarning, match="NPUGetFloatStatusV2: .* tells of none"):
        clear, get = names.NPUClearFloatStatusV2(), names.NPUGetFloatStatusV2()

    def function(flag):
        flag = ops.depend(flag, clear(flag))
        return get(flag)

    flag = call(function, np.ones(8, np.int32))
    assert flag.dtype == np.int32
    assert not flag.any()


def gelus(x):
    return ops.auto_generate.NpuGelu()(x), ops.auto_generate.npu_gelu_op(x, "tanh")


@pytest.mark.skipif(not hasattr(generated, "NpuGelu"), reason="this MindSpore does not have it")
def test_gelu_of_ascend(mode):
    close(call(gelus, X), (call(ops.gelu, X), call(ops.gelu, X, approximate="tanh")))


class Adam(nn.Cell):
    """Calls the primitive for a parameter."""

    def __init__(self, x, dtype, amsgrad):
        super().__init__()
        moments = [np.zeros(x.shape, np.float32)] * 3
        self.adamw, self.amsgrad = ops.auto_generate.AdamW(), amsgrad
        self.x = Parameter(Tensor(x.astype(dtype)), name="x")
        self.m, self.v, self.most = (Parameter(Tensor(each), name=f"m{i}") for i, each in enumerate(moments))

    def construct(self, gradient, step):
        moments = self.m, self.v, self.most
        return self.adamw(self.x, *moments, gradient, step, 0.1, 0.9, 0.99, 0.1, 1e-3, self.amsgrad, True)


@pytest.mark.skipif(not hasattr(generated, "AdamW"), reason="this MindSpore does not have it")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw(mode, dtype, amsgrad):
    x, m, v, most = numbers(3, 4).astype(dtype).astype(np.float64), 0, 0, 0
    net = Adam(x, dtype, amsgrad)
    for t, gradient in enumerate(numbers(3, 3, 4).astype(dtype)):
        moved, _, second = numpy_of(net(Tensor(gradient), Tensor(np.float32([t]))))
        m, v = 0.9 * m - 0.1 * np.float64(gradient), 0.99 * v + 0.01 * np.float64(gradient) ** 2
        most = np.maximum(most, v) if amsgrad else v
        x = (1 - 0.1 * 0.1) * x - 0.1 * m / (1 - 0.9 ** (t + 1)) / (np.sqrt(most / (1 - 0.99 ** (t + 1))) + 1e-3)
        np.testing.assert_allclose(net.x.asnumpy(), x, 1e-5 if dtype == "float32" else 1e-2, 1e-3)
        np.testing.assert_array_equal(moved, net.x.asnumpy())
        np.testing.assert_allclose(second, v, 1e-5)


def test_sync_batch_norm_of_one_process(mode):
    """MindSpore's own normalizes by its batch where no processes communicate."""
    x, net, own = Tensor(X), nn.SyncBatchNorm(3), nn.BatchNorm2d(3)
    np.testing.assert_array_equal(net.set_train()(x).asnumpy(), own.set_train()(x).asnumpy())
    np.testing.assert_array_equal(net.moving_variance.asnumpy(), own.moving_variance.asnumpy())


def routed(x):
    return ops.auto_generate.GroupTopk()(x, x, 2, 1)


def in_groups(x):
    return ops.auto_generate.Gmm()([x], [x])


def chosen(x):
    return ops.auto_generate.SparseFlashAttention()(x, x, x, x, 1.0)


def combined(x):
    return ops.ring_attention_update(x, x, x, x, x, x)


def reduced(x):
    return ops.auto_generate.MatmulAllReduceAddRmsNorm()(x, x, x, x, x, 1e-6, "group")


@pytest.mark.skipif(not hasattr(generated, "Gmm"), reason="this MindSpore does not have it")
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (in_groups, "Gmm: .*msops.grouped_matmul multiplies groups"),
        (chosen, "SparseFlashAttention: .*no choice of blocks of keys"),
        (combined, "RingAttentionUpdate: .*combine blocks of keys by the lse"),
        (reduced, "MatmulAllReduceAddRmsNorm: .*apart"),
    ],
)
def test_more_that_is_refused(mode, function, words):
    with pytest.raises(NotImplementedError, match=words):
        call(function, numbers(4, 8))


@pytest.mark.skipif(not hasattr(generated, "GroupTopk"), reason="this MindSpore does not have it")
def test_what_is_refused(mode):
    with pytest.raises(NotImplementedError, match=r"GroupTopk: it has kernels on Ascend alone, .*; msops.topk_gating"):
        call(routed, numbers(4, 8))


INT, HALF = X.astype(np.int32), X.astype(np.float16)
MISTAKES = [
    ("rms_norm", (INT, GAMMA), TypeError, "x must be float16, float32 or float64, got int32"),
    ("rms_norm", (HALF, GAMMA), TypeError, "gamma must be float16"),
    ("rms_norm", (X, None), TypeError, "gamma must be a Tensor, got NoneType"),
    ("rms_norm", (X, numbers(4)), ValueError, "gamma must have the last axes of x, (2, 3, 4, 8), got (4,)"),
    ("rms_norm", (X[0, 0, 0], numbers(1, 8)), ValueError, "gamma must have the last axes of x, (8,), got (1, 8)"),
    ("rms_norm", (X, np.float32(1)), ValueError, "gamma must have the last axes of x, (2, 3, 4, 8), got ()"),
    ("rms_norm", (X, GAMMA, 0.0), ValueError, "epsilon must be in (0, 1], got 0.0"),
    ("rms_norm", (X, GAMMA, 2), ValueError, "epsilon must be in (0, 1], got 2"),
    ("rms_norm", (X, GAMMA, "1"), TypeError, "epsilon must be a number, got str"),
    ("add_rms_norm", (X, X[:1], GAMMA), ValueError, "x2 must have shape"),
    ("add_rms_norm", (X, HALF, GAMMA), TypeError, "x2 must be float32"),
    ("swiglu", (INT,), TypeError, "input must be float16, float32 or float64, got int32"),
    ("swiglu", (X, 1), ValueError, "the axis dim must have an even length, got 1 of shape (2, 3, 4, 8)"),
    ("swiglu", (X, 4), ValueError, "dim must be an axis of the input, of shape (2, 3, 4, 8), got 4"),
    ("swiglu", (X, 1.0), TypeError, "dim must be an int, got float"),
    ("rotary_position_embedding", (X[0], COS, SIN), ValueError, "x must have shape"),
    ("rotary_position_embedding", (X, COS[..., :4], SIN), ValueError, "cos must have shape"),
    ("rotary_position_embedding", (X, COS[:, :, :3], SIN[:, :, :3]), ValueError, "cos must have the sizes of x"),
    ("rotary_position_embedding", (X, COS, SIN[:, :, :1]), ValueError, "sin must have shape"),
    ("rotary_position_embedding", (X[..., :7], COS[..., :7], SIN[..., :7]), ValueError, "an even number of features"),
    ("rotary_position_embedding", (X, COS, SIN, 2), ValueError, "mode must be 0 (halves) or 1 (neighbours), got 2"),
    ("rotary_position_embedding", (X, COS, SIN, True), TypeError, "mode must be an int, got bool"),
]


@pytest.mark.parametrize(("name", "arguments", "error", "words"), MISTAKES)
def test_mistakes(name, arguments, error, words):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    arguments = [Tensor(a) if isinstance(a, (np.ndarray, np.floating)) else a for a in arguments]
    with pytest.raises(error) as caught:
        getattr(ops, name)(*arguments)
    assert str(caught.value).startswith(f"{name}: ")
    assert words in str(caught.value)


def test_mistakes_in_graph_mode():
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    with pytest.raises(ValueError, match="rms_norm: gamma must have the last axes of x"):
        Net(ops.rms_norm)(Tensor(X), Tensor(GAMMA[:4]))


def test_functions_imported_before_the_patch(mode):
    """MindSpore's function calls an operator that the patch replaces."""
    close(call(early_norm, X, GAMMA), rms_norm(X, GAMMA))
    close(call(early_swiglu, X), swiglu(X))
