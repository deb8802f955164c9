import re

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn

import msops
from card import chain, length, random, zeros
from gpu import BIG
from guarded_call import GuardedCall
from msops.compat import VERSION
from msops.operators.weight_quant_matmul import operators
from msops.testing.checks import Gradient, run, run_gradient
from msops.testing.entry import Status
from operator_test import OperatorTest, check_training, wide_in_graph_mode

LOWER = -1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0
UPPER = 0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1
NF4 = np.float32((*LOWER, *UPPER))


def unpacked(codes, bits, columns):
    """Returns the code of each column."""
    if bits == 8:
        return codes
    halves = np.stack([codes.view(np.uint8) & 15, codes.view(np.uint8) >> 4], -1).reshape(
        len(codes), 2 * codes.shape[1]
    )[:, :columns]
    return ((halves.astype(np.int8) ^ 8) - 8) if codes.dtype == np.int8 else halves


def matrix(weight, scale, zero_point, codebook, terms, bits, group, transpose_weight):
    """Returns W, one row for each output."""
    outputs = scale.shape[0 if transpose_weight else 1]
    codes = unpacked(weight, bits, terms if transpose_weight else outputs)
    codes, scale = (each if transpose_weight else each.T for each in (codes, scale))
    place = np.arange(terms) // (group or max(terms, 1))
    if codebook is not None:
        return codebook[codes] * scale[:, place]
    numbers = codes.astype(scale.dtype)
    if zero_point is not None:
        numbers = numbers - (zero_point if transpose_weight else zero_point.T).astype(scale.dtype)[:, place]
    return numbers * scale[:, place]


def parts(x, weight, scale, others, bits=8, group=None, transpose_weight=True, optional=(), **_):
    """Returns (W, bias or None, the tensors after these)."""
    others = list(others)
    given = {name: others.pop(0) for name in ("zero_point", "codebook", "bias") if name in optional}
    table = given.get("codebook")
    weights = matrix(weight, scale, given.get("zero_point"), table, x.shape[-1], bits, group, transpose_weight)
    return weights.astype(np.result_type(x.dtype, np.float32)), given.get("bias"), others


def weight_quant_matmul(x, weight, scale, *others, **settings):
    weights, bias, _ = parts(x, weight, scale, others, **settings)
    out = x @ weights.T
    return ((out if bias is None else out + bias).astype(x.dtype),)


def weight_quant_matmul_backward(x, weight, scale, *others, **settings):
    weights, bias, (dout,) = parts(x, weight, scale, others, **settings)
    dx = (dout @ weights).astype(x.dtype)
    return (dx,) if bias is None else (dx, dout.sum(tuple(range(dout.ndim - 1))).astype(bias.dtype))


def case(rows, terms, outputs, bits=4, group=None, transpose_weight=True, optional="zero_point", kind=None, zeros=None):
    """Returns a case. The kind is the codes' dtype, and `zeros` is that of zero points, if it is another."""
    optional = tuple(optional.split())
    kind = kind or ("uint8" if {"zero_point", "codebook"} & set(optional) else "int8")
    rows = rows if isinstance(rows, tuple) else (rows,)
    axes = (outputs, terms) if transpose_weight else (terms, outputs)
    groups = 1 if group is None else -(-terms // group)
    scales = (outputs, groups) if transpose_weight else (groups, outputs)
    of_name = {"zero_point": scales, "codebook": (2**bits,), "bias": (outputs,)}
    shapes = [(*rows, terms), (axes[0], axes[1] if bits == 8 else -(-axes[1] // 2)), scales]
    shapes += [of_name[name] for name in of_name if name in optional]
    settings = dict(
        bits=bits, group=group, transpose_weight=transpose_weight, optional=optional, kind=kind, zeros=zeros
    )
    return shapes, settings


@pytest.fixture(autouse=True)
def _calls_that_compile(request):
    if VERSION < (2,) and request.node.name.startswith("test_case[graph"):
        pytest.skip("MindSpore 1.10 does not compile this call")


class TestWeightQuantMatmul(OperatorTest):
    function = msops.weight_quant_matmul
    formulas = weight_quant_matmul, weight_quant_matmul_backward
    cases = {
        "small": case(3, 7, 5, 4, 3, optional="zero_point bias"),
        "small, transposed": case(3, 7, 5, 4, 3, False, "zero_point bias"),
        "8 bits": case(3, 7, 5, 8, 3, optional="zero_point bias", kind="int8"),
        "a vector": case((), 9, 6, 4, 4, optional="bias"),
        "more axes": case((2, 3), 8, 5, 8, None, False, ""),
        "one": case(1, 1, 1),
        "codebook": case(3, 10, 5, 4, 4, optional="codebook bias"),
        "codebook of 256": case(2, 9, 4, 8, 4, False, "codebook"),
        "no rows": case(0, 4, 5, optional="zero_point bias"),
        "no terms": case(2, 0, 5, 4, 3, optional="bias"),
        "no terms, one group": case(2, 0, 5, 8, None, False, "zero_point"),
        "no outputs": case(2, 6, 0, 4, 2, optional="zero_point bias"),
        "floating zero points": case(5, 36, 6, 4, 16, optional="zero_point bias", zeros="float32"),
        "one row": case(1, 256, 40, 4, 128, optional="zero_point bias"),
        "large": case(70, 264, 200, 4, 32, optional="zero_point bias"),
    }
    further = {
        "one row, 8 bits": case(1, 288, 33, 8, 32, optional="zero_point bias", kind="int8"),
        "one row, one group": case(1, 1184, 18, 4, None, optional=""),
        "one row, unsigned": case(1, 160, 18, 8, 96, optional="bias", kind="uint8"),
        "one row, fine": case(1, 1376, 20, 4, 32, optional="zero_point"),
        "one row, groups of 64": case(1, 2304, 20, 4, 64, optional="zero_point", kind="int8"),
        "one row, floating zero points": case(1, 640, 20, 4, 128, optional="zero_point bias", zeros="common"),
        "8 rows, floating zero points": case(8, 640, 20, 8, 32, optional="zero_point", zeros="float32"),
        "7 rows": case(7, 1088, 50, 4, 128, optional="zero_point bias"),
        "13 rows": case(13, 544, 50, 4, 128, optional="bias"),
        "16 rows, fine": case(16, 512, 48, 8, 64, optional="zero_point"),
        "16 rows, 4 bits, fine": case(16, 512, 40, 4, 32, optional="zero_point bias"),
        # 2^20 codes are many for a GPU of four multiprocessors, such as the emulator's
        "one row, 2^20 codes": case(1, 4096, 256, 4, 128, optional="zero_point", kind="int8"),
        "7 rows, 2^20 codes": case(7, 2560, 448, 4, 256, optional="bias"),
        "8 rows, 2^20 codes, one group": case(8, 1536, 704, optional="zero_point bias"),
        "20 rows, 8 bits": case(20, 512, 40, 8, 128, optional="zero_point bias", kind="int8"),
        "NF4": case(1, 448, 40, 4, 64, optional="codebook bias"),
        "NF4, 9 rows": case(9, 448, 40, 4, 64, optional="codebook"),
        "NF4, many rows": case(100, 192, 136, 4, 64, optional="codebook bias"),
        "odd": case(65, 37, 29, 4, 5, optional="zero_point bias"),
        "odd, transposed": case(65, 37, 29, 4, 5, False, "zero_point bias"),
        "odd, 8 bits": case(66, 35, 131, 8, 7, False, "bias"),
        "more than a tile": case(140, 200, 150, 8, 16, optional="zero_point bias"),
        "more than a tile, transposed": case(133, 136, 208, 4, 32, False, "zero_point bias"),
        "high tiles": case(270, 144, 392, 4, 32, optional="zero_point bias"),
        "tall tiles": case(70, 160, 584, 4, 32, optional="zero_point bias"),
        "high tiles, transposed": case(270, 136, 400, 8, 32, False, "bias", "int8"),
        "runs of one group": case(130, 320, 144, 4, None, optional=""),
        "few rows, transposed": case(2, 520, 300, 4, 128, False, "zero_point bias"),
        "one row, transposed": case(1, 520, 300, 8, 128, False, "zero_point"),
        "five rows": case(5, 520, 100, 4, 8, optional="zero_point"),
    }  # fmt: skip
    small = "small"
    hostile = ("small", "small, transposed", "codebook")
    constants = (1, 2, 3)
    roundings = 16
    half_in_float32 = half_gradient_in_float32 = False  # tensor cores take a weight that is rounded to float16
    # 7 rows: many codes for a large GPU
    huge = ((1, 16384, BIG // 8192), (7, 4096, 28672), (100, 16384, BIG // 8192))
    wrong = (
        ([*zeros((3, 6)), np.zeros((5, 4), np.uint8), *zeros((5, 1))], dict(bits=4), ValueError,
         "weight_quant_matmul: weight must have shape (M, (K + 1) // 2) = (5, 3), got (5, 4)"),
        ([*zeros((3, 6)), np.zeros((5, 6), np.uint8), *zeros((4, 1))], {}, ValueError,
         "weight_quant_matmul: scale must have shape (M, 1) = (5, 1), got (4, 1)"),
        ([*zeros((3, 6)), np.zeros((5, 6), np.uint8), *zeros((5, 2))], dict(group=4, zero=(5, 1)), ValueError,
         "weight_quant_matmul: zero_point must have shape (M, (K + 3) // 4) = (5, 2), got (5, 1)"),
        ([*zeros((3, 6), (5, 6), (5, 1))], {}, TypeError,
         "weight_quant_matmul: weight must be uint8 or int8, got float32"),
        ([np.zeros((3, 6), np.float16), np.zeros((5, 6), np.uint8), np.zeros((5, 1))], {}, TypeError,
         "weight_quant_matmul: scale must be float16 or float32, got float64"),
        ([*zeros((3, 6)), np.zeros((5, 6), np.uint8), *zeros((5, 1))], dict(bits=5), ValueError,
         "weight_quant_matmul: bits must be 4 or 8, got 5"),
        ([*zeros((3, 6)), np.zeros((5, 6), np.uint8), *zeros((5, 1))], dict(bits=True), TypeError,
         "weight_quant_matmul: bits must be an int, got bool"),
        ([*zeros((3, 6)), np.zeros((5, 6), np.uint8), *zeros((5, 1))], dict(group=0), ValueError,
         "weight_quant_matmul: group must be at least 1, got 0"),
        ([*zeros((3, 6)), np.zeros((5, 6), np.uint8), *zeros((5, 1))], dict(group="all"), TypeError,
         "weight_quant_matmul: group must be an int, got str"),
        ([*zeros((3, 6)), np.zeros((5, 6), np.uint8), *zeros((5, 1))], dict(transpose_weight=1), TypeError,
         "weight_quant_matmul: transpose_weight must be a bool, got int"),
        ([*zeros((3, 6)), np.zeros((5, 6), np.int8), *zeros((5, 1))], dict(table=256), TypeError,
         "weight_quant_matmul: weight must be uint8, got int8"),
        ([*zeros((3, 6)), np.zeros((5, 6), np.uint8), *zeros((5, 1))], dict(table=16), ValueError,
         "weight_quant_matmul: codebook must have shape (256,), got (16,)"),
        ([*zeros((3, 6)), np.zeros((5, 6), np.uint8), *zeros((5, 1))], dict(table=256, zero=(5, 1)), ValueError,
         "weight_quant_matmul: zero_point and codebook exclude each other, got both"),
    )  # fmt: skip

    def net(self, bits=8, group=None, transpose_weight=True, optional=(), table=None, zero=None, **_):
        return Quantized(bits, group, transpose_weight, optional, table, zero)

    def operators(self, shapes=(), bits=8, group=None, transpose_weight=True, optional=("zero_point", "bias"), **_):
        given = ("zero_point" in optional, "codebook" in optional)
        return chain(operators(bits, group, transpose_weight, *given).without(*["bias"] * ("bias" not in optional)))

    def inputs(self, shapes, dtype, seed=1, bits=8, optional=(), kind="uint8", zeros=None, **_):
        rng = np.random.default_rng(seed)
        [x, scale] = random(seed, dtype, shapes[0], shapes[2])
        scale = np.asarray(0.1 + np.abs(scale), dtype) / np.asarray(2 ** (bits - 1), dtype)
        bounds = (-128, 128) if kind == "int8" else (0, 256)
        arrays = [x, rng.integers(*bounds, shapes[1], kind), scale]
        for name, shape in zip(optional, shapes[3:]):
            if name == "zero_point" and zeros is None:
                arrays.append(rng.integers(*((-3, 4) if kind == "int8" else (0, 2**bits)), shape, kind))
            elif name == "zero_point":
                zeros = dtype if zeros == "common" or dtype == "float64" else zeros
                arrays.append(np.asarray(2**bits * rng.random(shape), zeros))
                if zeros != dtype:
                    arrays[2] = scale.astype(zeros)
            elif name == "codebook":
                arrays.append(NF4 if bits == 4 else np.sort(rng.standard_normal(shape)).astype(np.float32))
            else:
                arrays += random(seed + 1, dtype, shape)
        return arrays

    def reference_gradient(self, x, weight, scale, *others, **settings):
        dx, *dbias = weight_quant_matmul_backward(x, weight, scale, *others, **settings)
        return dx, *map(np.zeros_like, (weight, scale, *others[: len(others) - 1 - len(dbias)])), *dbias

    def random_case(self, random):
        optional = random.choice(("", "bias", "zero_point", "zero_point bias", "codebook bias"))
        zeros = random.choice((None, None, "float32"))
        group = random.choice((None, 1 + length(random), 32))
        rows = tuple(length(random) for _ in range(random.randrange(3)))
        transposes = random.random() < 0.5
        kind = "uint8" if "codebook" in optional else random.choice(("uint8", "int8"))
        return case(
            rows, length(random), length(random), random.choice((4, 8)), group, transposes, optional, kind, zeros
        )

    def check_huge(self, gpu, rows, deep, outputs):
        """Compares the last outputs with a product in float64. Tensor cores take numbers of the weight that are rounded
        to float16, but codes for few rows."""
        forward, _ = self.operators(bits=4, group=128, optional=())
        x = gpu.random(rows, deep)
        codes = gpu.torch.randint(0, 256, (outputs, deep // 2), dtype=gpu.torch.uint8, device="cuda")
        scale = gpu.torch.full((outputs, deep // 128), 0.01, dtype=gpu.torch.float16, device="cuda")
        [out] = gpu.run(forward, x, codes, scale)
        last = codes[-10:]
        numbers = gpu.torch.stack([last & 15, last >> 4], -1).reshape(10, deep).double()
        weight = numbers * scale[0, 0].double()
        gpu.assert_sums(out[:, -10:], x.double() @ (weight if rows <= 64 else weight.half().double()).T)


class Quantized(nn.Cell):
    """Calls the function with its tensors in the order of the operator's inputs."""

    def __init__(self, bits, group, transpose_weight, optional, table, zero):
        super().__init__()
        self.settings = bits, group, transpose_weight
        self.names = tuple(name for name in ("zero_point", "codebook", "bias") if name in optional)
        self.table = None if table is None else Tensor(np.zeros(table, np.float32))
        self.zero = None if zero is None else Tensor(np.zeros(zero, np.uint8))

    def construct(self, x, weight, scale, *others):
        zero_point, codebook, bias = self.zero, self.table, None
        for name, each in zip(self.names, others):
            if name == "zero_point":
                zero_point = each
            elif name == "codebook":
                codebook = each
            else:
                bias = each
        return msops.weight_quant_matmul(x, weight, scale, zero_point, bias, *self.settings, codebook)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("transpose_weight", [True, False])
@pytest.mark.parametrize("rows", [2, 19, 150])
def test_equal_rows_have_equal_bits(dtype, transpose_weight, rows):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    shapes, settings = case(rows, 256, 40, 4, 64, transpose_weight, "zero_point bias")
    card = TestWeightQuantMatmul()
    x, *others = card.inputs(shapes, dtype, **settings)
    out = run(card.net(**settings), np.broadcast_to(x[:1], x.shape).copy(), *others)[0]
    np.testing.assert_array_equal(out, np.broadcast_to(out[:1], out.shape))
    assert (out != 0).any()


@wide_in_graph_mode
def test_the_last_upper_half_is_not_read(mode):
    card = TestWeightQuantMatmul()
    for name in ("small", "small, transposed"):
        shapes, settings = card.cases[name]
        inputs = card.inputs(shapes, "float32", **settings)
        net, other = card.net(**settings), [each.copy() for each in inputs]
        other[1][:, -1] ^= 0xF0
        np.testing.assert_array_equal(run(net, *other)[0], run(net, *inputs)[0])


@wide_in_graph_mode
@pytest.mark.parametrize("transpose_weight", [True, False])
def test_scales_of_one_group_may_be_vectors(mode, transpose_weight):
    x, scale = random(0, np.float32, (3, 6), (5,))
    rng = np.random.default_rng(0)
    weight = rng.integers(0, 256, (5, 6) if transpose_weight else (6, 5), np.uint8)
    zero_point = rng.integers(0, 256, 5, np.uint8)
    column = (slice(None), None) if transpose_weight else None
    net = Quantized(8, None, transpose_weight, ("zero_point",), None, None)
    want = run(net, x, weight, scale[column], zero_point[column])[0]
    np.testing.assert_array_equal(run(net, x, weight, scale, zero_point)[0], want)
    numbers = (weight - zero_point.astype(np.float32)[column]) * scale[column]
    np.testing.assert_allclose(want, x @ (numbers.T if transpose_weight else numbers), rtol=1e-4, atol=1e-3)


def test_bias_of_float32(mode):
    """A bias may be float32 beside float16, and is added before the sum is rounded."""
    x, weight, scale = np.full((1, 1), 1, np.float16), np.full((2, 1), 2, np.uint8), np.full((2, 1), 1024, np.float16)
    net = Quantized(8, None, True, ("bias",), None, None)
    inputs = [x, weight, scale, np.float32([0.5, 1.25])]
    np.testing.assert_array_equal(run(net, *inputs)[0], [[2048, 2050]])
    gradient = run_gradient(net, inputs, [np.full((1, 2), 3, np.float16)])[3]
    assert gradient.dtype == np.float32
    np.testing.assert_array_equal(gradient, [3, 3])


@pytest.mark.parametrize("transpose_weight", [True, False])
def test_long_sums_of_float16(transpose_weight):
    """Sums are in float32."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    x, weight = np.full((2, 40_000), 1, np.float16), np.full((1, 40_000), 1, np.uint8)
    scale, net = np.full((1, 1), 0.25, np.float32), Quantized(8, None, transpose_weight, (), None, None)
    weight = weight if transpose_weight else weight.T.copy()
    np.testing.assert_array_equal(run(net, x, weight, scale)[0], [[10_000], [10_000]])


@wide_in_graph_mode
def test_views_and_open_sizes(mode):
    """Inputs may be views; in graph mode, the number of rows may be open."""
    shapes, settings = case(9, 8, 6, 4, 4, optional="zero_point")
    x, weight, scale, zero_point = TestWeightQuantMatmul().inputs(shapes, "float32", **settings)

    class Views(nn.Cell):
        def construct(self, x, weight, scale, zero_point):
            return msops.weight_quant_matmul(x[1::2], weight[1:], scale[1:], zero_point[1:], None, 4, 4)

    net, others = Views(), (weight, scale, zero_point)
    if mode == "graph":
        net.set_inputs(Tensor(shape=[None, 8], dtype=mindspore.float32), *map(Tensor, others))
    [want] = weight_quant_matmul(x, *others, **settings)
    for rows in (9, 8):
        np.testing.assert_allclose(run(net, x[:rows], *others)[0], want[1:rows:2, 1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("bits", "group", "symmetric"), [(4, 8, False), (8, None, True)])
def test_cell(mode, bits, group, symmetric):
    """A layer of a matrix gives nearly what nn.Dense gives, and trains its bias alone."""
    weight, bias, x = random(0, np.float32, (6, 20), (6,), (3, 20))
    net = msops.WeightQuantMatmul.from_weight(Tensor(weight), Tensor(bias), bits, group, symmetric)
    codes = [None if each is None else each.asnumpy() for each in (net.weight, net.scale, net.zero_point)]
    want = msops.dequantize_weight(
        *(None if each is None else Tensor(each) for each in codes), bits=bits, group=group
    ).asnumpy()
    np.testing.assert_allclose(want, weight, atol=0.3 if bits == 4 else 0.02)
    np.testing.assert_allclose(run(net, x)[0], x @ want.T + bias, rtol=1e-5, atol=1e-5)
    assert [parameter.name for parameter in net.trainable_params()] == ["bias"]
    names = ["weight", "scale", *["zero_point"] * (not symmetric), "bias"]
    assert sorted(parameter.name for parameter in net.get_parameters()) == sorted(names)
    assert f"in_channels=20, out_channels=6, bits={bits}, group={group}, has_zero_point={not symmetric}" in str(net)
    check_training(net, x)


@pytest.mark.parametrize("transpose_weight", [True, False])
def test_new_cell(mode, transpose_weight):
    """A new layer has zeros, for a checkpoint. Its scales of float16 serve x of float32, too."""
    net = msops.WeightQuantMatmul(6, 5, group=4, has_bias=True, transpose_weight=transpose_weight)
    assert net.weight.shape == ((5, 3) if transpose_weight else (6, 3))
    assert net.scale.shape == net.zero_point.shape == ((5, 2) if transpose_weight else (2, 5))
    assert (net.weight.dtype, net.scale.dtype, net.zero_point.dtype) == (
        mindspore.uint8,
        mindspore.float16,
        mindspore.uint8,
    )
    for dtype in (np.float16, np.float32, np.float64):
        out = run(net, np.ones((2, 6), dtype))[0]
        assert (out.dtype, out.shape, np.abs(out).max()) == (dtype, (2, 5), 0)


def test_cell_and_function_agree_on_gradients(mode):
    weight, x, dout = random(0, np.float32, (6, 20), (3, 20), (3, 6))
    net = msops.WeightQuantMatmul.from_weight(Tensor(weight), bits=8, group=None)
    [dx] = run(Gradient(net, 1), x, dout)
    np.testing.assert_allclose(dx, dout @ weight, atol=0.05)


def test_low_rank_adapters_train_over_codes(mode):
    """The gradient goes through the codes to layers before, as where LoRA trains."""
    weight, x = random(0, np.float32, (6, 20), (3, 20))

    class Adapted(nn.Cell):
        def __init__(self):
            super().__init__()
            self.down = nn.Dense(20, 4, has_bias=False)
            self.up = nn.Dense(4, 20, has_bias=False)
            self.base = msops.WeightQuantMatmul.from_weight(Tensor(weight))

        def construct(self, x):
            return self.base(x + self.up(self.down(x)))

    check_training(Adapted(), x)


def test_missing_scale(mode):
    x, codes = Tensor(np.ones((3, 6), np.float32)), Tensor(np.zeros((5, 6), np.uint8))
    with pytest.raises(TypeError, match="weight_quant_matmul: scale must be a Tensor, got None"):
        msops.weight_quant_matmul(x, codes, None)


def test_wrong_settings_of_cell():
    for settings, error, words in (
        (dict(in_channels=0), ValueError, "WeightQuantMatmul: in_channels must be at least 1"),
        (dict(out_channels=2.0), TypeError, "WeightQuantMatmul: out_channels must be an int"),
        (dict(bits=3), ValueError, "WeightQuantMatmul: bits must be 4 or 8, got 3"),
        (dict(group=-1), ValueError, "WeightQuantMatmul: group must be at least 1, got -1"),
        (dict(group=2**31), ValueError, "WeightQuantMatmul: group must be less than"),
        (dict(has_zero_point=1), TypeError, "WeightQuantMatmul: has_zero_point must be a bool"),
        (dict(has_bias=None), TypeError, "WeightQuantMatmul: has_bias must be a bool"),
        (dict(transpose_weight=0), TypeError, "WeightQuantMatmul: transpose_weight must be a bool"),
        (dict(dtype=mindspore.int8), TypeError, "WeightQuantMatmul: dtype must be float16, float32 or float64"),
    ):
        with pytest.raises(error, match=re.escape(words)):
            msops.WeightQuantMatmul(**{**dict(in_channels=3, out_channels=4), **settings})
    for arguments, error, words in (
        (([1.0],), TypeError, "WeightQuantMatmul: weight must be a Tensor, got list"),
        ((Tensor([1.0]),), ValueError, "WeightQuantMatmul: weight must have shape (M, K), got (1,)"),
        ((Tensor([[1]]),), TypeError, "WeightQuantMatmul: weight must be float16, float32 or float64, got int64"),
        ((Tensor([[1.0]]), Tensor([1.0, 2.0])), ValueError, "bias must be a Tensor of shape (M,) = (1,), got (2,)"),
    ):
        with pytest.raises(error, match=re.escape(words)):
            msops.WeightQuantMatmul.from_weight(*arguments)


def test_entry_refuses_zero_points_beside_a_codebook(capfd):
    card = TestWeightQuantMatmul()
    for call in card.entry_calls(*card.cases["codebook of 256"], "float32"):
        guarded = GuardedCall(call, capfd)
        x, weight, scale, *others = guarded.params.values()
        attributes = {**call.operator.attributes, "has_zero_point": 1}
        guarded.refused(Status.BAD_PARAMETER_COUNT, arrays=[x, weight, scale, scale, *others], attributes=attributes)
