"""Has golden-stick quantize layers of mindformers and products of experts, and computes them in NumPy, too. The command
is that of library_serving.py."""

import importlib
from dataclasses import asdict

import numpy as np

TERMS, OUTPUTS, EXPERTS = 64, 32, 3
RNG = np.random.default_rng(0)


def halves(*shape, scale=1.0):
    return (scale * RNG.standard_normal(shape)).astype(np.float16)


def kinds():
    """Returns golden-stick's module, class and settings of each kind, and whether the layer is smoothed before."""
    from mindspore import dtype
    from mindspore_gs.ptq.ptq_config import GPTQQuantConfig, PrecisionRecovery, QuantGranularity

    eight, pairs = dict(weight_quant_dtype=dtype.int8), dict(weight_quant_dtype=dtype.qint4x2)
    pairs.update(weight_quant_granularity=QuantGranularity.PER_GROUP, group_size=16)
    gptq = dict(algo_args=asdict(GPTQQuantConfig()), precision_recovery=PrecisionRecovery.GPTQ)
    both = dict(eight, act_quant_dtype=dtype.int8)
    by_tokens = dict(both, act_quant_granularity=QuantGranularity.PER_TOKEN)
    return {
        "RTN, 8 bits": ("weight_quant", "WeightQuantLinearCell", eight, False),
        "RTN, 4 bits in groups": ("weight_quant", "WeightQuantLinearCell", dict(pairs, weight_symmetric=False), False),
        "GPTQ, 8 bits": ("gptq_quant", "GptqWeightQuantLinearCell", dict(eight, **gptq), False),
        "GPTQ, 4 bits in groups": ("gptq_quant", "GptqWeightQuantLinearCell", dict(pairs, **gptq), False),
        "A8W8": ("all_quant", "AllQuantLinearCell", both, False),
        "A8W8, smoothed": ("all_quant", "AllQuantLinearCell", both, True),
        "A8W8 by tokens": ("dynamic_quant", "DynamicQuantLinearCell", by_tokens, False),
    }


def layers():
    """Yields labels, the results of quantized layers, NumPy's, and those of the layers in float16."""
    for label, kind in kinds().items():
        yield label, *layer(*kind)


def layer(module, name, settings, is_smoothed):
    from mindformers.modules.layers import Linear
    from mindspore import Tensor, dtype
    from mindspore_gs.ptq.context import InnerPTQConfig, PTQApproach
    from mindspore_gs.ptq.ptq import hal
    from mindspore_gs.ptq.ptq_config import PTQMode

    linear = Linear(TERMS, OUTPUTS, compute_dtype=dtype.float16, param_init_type=dtype.float16)
    linear.weight.set_data(Tensor(halves(OUTPUTS, TERMS, scale=0.1)))
    linear.bias.set_data(Tensor(halves(OUTPUTS)))
    if is_smoothed:
        linear.matmul = hal.SmoothMatmul.create("linear", linear.matmul, Tensor(np.exp2(halves(TERMS))))
    x = halves(10, TERMS)
    whole = linear(Tensor(x)).asnumpy()
    config = InnerPTQConfig(approach=PTQApproach.PTQ, mode=PTQMode.QUANTIZE, **settings)
    kind = getattr(importlib.import_module(f"mindspore_gs.ptq.quant_cells.mindformers.linear_{module}_wrappers"), name)
    cell = kind("linear", linear, config, config)
    cell.add_hook()
    linear(Tensor(x))  # a sample, from which scales of rows, and GPTQ's corrections, come
    cell.remove_hook()
    cell.process()
    net = cell.deploy()
    held = {name.split(".")[-1]: parameter.asnumpy() for name, parameter in net.parameters_and_names()}
    return net(Tensor(x)).asnumpy(), layer_by_numpy(x.astype(np.float32), held), whole


def layer_by_numpy(x, held):
    is_packed = held["weight"].shape == (TERMS, OUTPUTS // 2)
    codes = unpacked(held["weight"]) if is_packed else held["weight"].T.astype(np.int64)
    if "input_scale" in held:  # Ascend divides by the scale where the offset is int8
        scale, zero = (held[name].astype(np.float32) for name in ("input_scale", "input_zp"))
        rows = np.clip(np.rint((x / scale if held["input_zp"].dtype == np.int8 else x * scale) + zero), -128, 127)
        return (rows.astype(np.int64) @ codes + held["quant_bias"]) * decoded(held["dequant_scale"]) + held["bias"]
    scale = held["weight_scale"].astype(np.float64)
    if "weight_zp" in held:
        zero = held["weight_zp"].astype(np.float64)
        if scale.ndim == 2:
            scale, zero = (np.repeat(each, TERMS // len(each), 0) for each in (scale, zero))
        return x @ ((codes + zero) * scale) + held["bias"]
    rows, of_rows = rows_by_numpy(x)
    return (rows.astype(np.int64) @ codes) * scale * of_rows + held["bias"]


def unpacked(codes):
    """Returns the two codes of each byte, that of the lower half first."""
    pairs = codes.view(np.int8).astype(np.int64)
    return np.stack((((pairs & 15) ^ 8) - 8, pairs >> 4), -1).reshape(*pairs.shape[:-1], -1)


def decoded(scale):
    return scale.astype(np.uint32).view(np.float32).astype(np.float64)


def rows_by_numpy(x):
    """Returns the codes of rows, and their scales."""
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    return np.rint(x / scale), scale.astype(np.float64)


def experts():
    """Yields labels, and the results of golden-stick's products of experts beside NumPy's."""
    from mindspore import Parameter, Tensor, dtype
    from mindspore.ops.auto_generate import GroupedMatmulV4
    from mindspore_gs.ptq.basic_functions.basic_quant_func import np_int4data_pack_to_int8_3d
    from mindspore_gs.ptq.ptq import hal

    sizes, x = np.array([4, 0, 6]), halves(10, TERMS)
    codes, small = (RNG.integers(-n, n, (EXPERTS, TERMS, OUTPUTS), np.int8) for n in (128, 8))
    scale = np.exp2(halves(EXPERTS, OUTPUTS) - 8).astype(np.float16)
    zero = RNG.integers(-3, 4, (EXPERTS, OUTPUTS)).astype(np.float16)
    param = hal.QuantParam(Parameter(Tensor(scale)), Parameter(Tensor(zero)), 0, dtype.int8)
    groups, counts = np.repeat(np.arange(EXPERTS), sizes), Tensor(sizes)

    def products(x, codes, is_shifted=False, bias=0):
        numbers = codes.astype(np.float64) - is_shifted * zero[:, None]
        sums = np.einsum("nk,nkm->nm", np.float64(x), numbers[groups])
        return (sums + bias) * scale.astype(np.float64)[groups]

    for label, kind, weight, numbers in (
        ("8 bits", hal.WeightQuantMatmul, Tensor(codes), codes),
        ("4 bits", hal.WeightQuantInt4Matmul, Tensor(np_int4data_pack_to_int8_3d(small), dtype=dtype.qint4x2), small),
    ):
        cell = kind("experts", False, param, is_grouped_mm=True)
        yield f"experts, {label}", cell(Tensor(x), weight, counts).asnumpy(), products(x, numbers, True)
    rows, of_rows = rows_by_numpy(x.astype(np.float32))
    found, of_found = hal.DynamicQuantCell("experts", False)(Tensor(x))
    cell = hal.DynamicQuantMatmul("experts", False, param.scale, is_group_mm=True)
    got = cell(found, Tensor(codes), counts, of_found).asnumpy()
    yield "experts, A8W8 by tokens", got, products(rows, codes) * of_rows
    bias = RNG.integers(-999, 999, (EXPERTS, OUTPUTS), np.int32)
    of_input = hal.QuantParam(Parameter(Tensor(np.float64([0.01]))), Parameter(Tensor(np.float64([0]))))
    matmul, added = GroupedMatmulV4(), Parameter(Tensor(bias))
    cell = hal.AllQuantMatmulHighPerformance("experts", matmul, False, of_input, param, quant_bias=added)
    yield "experts, A8W8", cell(found, Tensor(codes), counts).asnumpy(), products(rows, codes, bias=bias[groups]) * 0.01
