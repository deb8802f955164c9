import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from card import random, zeros
from msops.operators.add_rms_norm import backward_operators, operators
from msops.testing.checks import assert_equal
from operator_test import Gradient, Net, OperatorTest, check_second_order, run, run_gradient
from test_rms_norm import absent, case as norm_case, net_of, random_norm, rms_norm, rms_norm_backward, units


def add_rms_norm(x, residual, *given, wide_residual=False, **settings):
    return (*rms_norm(x + residual, *given, **settings), x + residual)


def add_rms_norm_backward(s, *rest, wide_residual=False, **settings):
    *rest, ds = rest
    dx, *of_parameters = rms_norm_backward(s, *rest, **settings)
    return dx + ds, *of_parameters


def case(*arguments, **settings):
    return with_residual(*norm_case(*arguments, **settings))


def with_residual(shapes, settings):
    return [shapes[0], *shapes], settings


class TestAddRmsNorm(OperatorTest):
    function = msops.add_rms_norm
    formulas = (add_rms_norm, add_rms_norm_backward)
    second_order = True
    cases = {
        "small": case((3, 4, 7), eps=0.1, offset=0.5),
        "no weight": case((3, 7), "", eps=0.1),
        "bias": case((3, 4, 7), "wb", eps=0.1, offset=0.5),
        "bias alone": case((3, 7), "b", eps=0.1),
        "heads": case((2, 3, 7), axes=2, eps=0.1, offset=0.5),
        "heads with a bias": case((5, 2, 3, 8), "wb", 2, eps=0.1),
        "no rows": case((0, 5)),
        "no columns": case((3, 0)),
        "one": case((1, 1), eps=0.1),
        "gemma": case((70, 13), eps=1e-3, offset=1.0, casting="gemma"),
        "large": case((4001, 129)),
    }
    further = {
        f"{shape}{', float32 residual' * wide}": case(shape, wide_residual=wide)
        for shape in (
            *((9, 64), (5, 520), (3, 4104), (2, 20_000), (2, 20_003)),
            *((19, 513), (20, 1023), (21, 4097)),  # between packs
            *((9, 8200), (5, 32_760), (2, 32_767), (5, 32_768)),  # in clusters
        )
        for wide in (False, True)
    } | {
        f"{shape}, heads with a bias": case(shape, "wb", 2, wide_residual=True) for shape in ((9, 3, 64), (2, 2, 4099))
    }
    small = "small"
    roundings = 64  # gradients are differences of numbers that are larger than they are
    half_in_float32 = half_gradient_in_float32 = False  # the formula rounds on the way
    wrong = (
        (zeros((2, 3), (2, 3), dtype=np.int8), {}, TypeError, "add_rms_norm: x must be float16, float32 or float64"),
        (zeros((2, 3), (2, 3), (3, 3)), {}, ValueError, "add_rms_norm: weight must have the last axis of x, whose"),
        (zeros((2, 3), (2, 3)), dict(eps=-1.0), ValueError, "add_rms_norm: eps must be finite and at least 0"),
    )

    def inputs(self, shapes, dtype, seed=1, wide_residual=False, given="w", **settings):
        """A bias beside float16 is large, so that it does not cancel products, which have the rounding of the sum."""
        x, residual, *arrays = super().inputs(shapes, dtype, seed)
        if "b" in given and dtype == "float16":
            arrays[-1] += np.float16(32)
        return [x, residual.astype(np.float32) if wide_residual and dtype == "float16" else residual, *arrays]

    def operators(self, shapes=(), eps=1e-6, offset=0.0, casting="llama", wide_residual=False, given="w"):
        names = absent(given)
        backward = backward_operators(eps, offset).without(*names, *(f"d{name}" for name in names))
        return [operators(eps, offset, casting).without(*names), backward]

    def net(self, wide_residual=False, **settings):
        return net_of(msops.add_rms_norm, **settings)

    def units(self, **settings):
        """The sum is rounded, too."""
        return units(**settings) + 1.25

    def reference_gradient(self, x, residual, *rest, **settings):
        dx, *of_parameters = add_rms_norm_backward(x + residual, *rest, **settings)
        return dx, dx, *of_parameters

    def random_case(self, random):
        return with_residual(*random_norm(random))


@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
def test_equals_add_and_rms_norm(mode, casting):
    """The sum is rounded to float16 before it is normalized."""
    x, residual, weight = random(0, np.float16, (30, 65), (30, 65), (65,))
    y, s = run(Net(msops.add_rms_norm, casting=casting, offset=1.0), x, residual, weight)
    assert_equal([s], [x + residual])
    assert_equal([y], run(Net(msops.rms_norm, casting=casting, offset=1.0), s, weight))


def test_second_order_without_weight(mode):
    gradient = Gradient(Net(msops.add_rms_norm, eps=0.1), 2)
    check_second_order(gradient, random(1, np.float64, *[(3, 5)] * 4), mode)


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("float32", "float16"), ("float64", "float32")], ids=str)
def test_residual_of_another_dtype(mode, dtypes):
    """The sum is rounded once, to the dtype of x. The gradients have their inputs' dtypes."""
    x, residual, weight = (
        a.astype(d) for a, d in zip(random(1, "float64", (9, 70), (9, 70), 70), (*dtypes, dtypes[0]))
    )
    net = Net(msops.add_rms_norm, eps=0.1)
    y, s = run(net, x, residual, weight)
    assert_equal([s], [(x.astype(np.float64) + residual).astype(dtypes[0])])
    assert_equal([y], run(Net(msops.rms_norm, eps=0.1), s, weight))
    dx, dresidual, dweight = run_gradient(net, [x, residual, weight], [y, s])
    of_sum = run_gradient(net, [s, np.zeros_like(s), weight], [y, s])
    assert_equal([dx, dresidual, dweight], [of_sum[0], of_sum[0].astype(dtypes[1]), of_sum[2]])
    cell = msops.AddRMSNorm(70, eps=0.1, dtype=getattr(mindspore, dtypes[0]))
    cell.weight.set_data(Tensor(weight))
    assert_equal(run(cell, x, residual), [y, s])


def test_wrong_dtypes_of_residuals(mode):
    (x,) = random(1, np.float32, (2, 3))
    with pytest.raises(TypeError, match="add_rms_norm: residual must be float32, got float64"):
        run(Net(msops.add_rms_norm), x, x.astype(np.float64))
