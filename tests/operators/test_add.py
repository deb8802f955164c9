import numpy as np
import pytest
from mindspore import Tensor

import msops
from card import lengths, zeros
from gpu import BIG
from guarded_call import GuardedCall
from msops.operators.add import backward, forward
from msops.testing.entry import Status
from operator_test import OperatorTest, run, run_gradient, wide_in_graph_mode


def sum_to(dout, x):
    """Sums dout over the axes along which x was broadcast."""
    lead = dout.ndim - x.ndim
    axes = (*range(lead), *(lead + i for i, n in enumerate(x.shape) if n != dout.shape[lead + i]))
    return (dout.sum(axes, dtype=dout.dtype).reshape(x.shape),)


LONG = (  # these sums have several parts, run over rows that packs tile or do not tile, or add whole packs
    *(((1,), (70_001,)), ((5, 1), (5, 30_011)), ((5,), (40_003, 5)), ((1, 6, 1), (90, 6, 91))),
    *(((13,), (100_003, 13)), ((1001,), (10_000, 1001))),
    *(((1,), (70_016,)), ((6, 1), (6, 30_016)), ((65_536,), (7, 65_536)), ((1, 4, 1, 16_384), (3, 4, 5, 16_384))),
)


class TestAdd(OperatorTest):
    function = msops.add
    cell = msops.Add
    formulas = (lambda x, y: (x + y,), sum_to)
    cases = {
        "same": ([(7, 13), (7, 13)], {}),
        "scalars": ([(), ()], {}),
        "scalar left": ([(), (5, 3)], {}),
        "scalar right": ([(5, 3), ()], {}),
        "one element": ([(1,), (1,)], {}),
        "empty": ([(0, 3), (0, 3)], {}),
        "empty and row": ([(0, 3), (3,)], {}),
        "empty and one": ([(4, 0), (1, 1)], {}),
        "row": ([(11, 8), (8,)], {}),
        "column": ([(8, 12), (8, 1)], {}),
        "outer": ([(7, 1), (1, 5)], {}),
        "outer, other way": ([(9,), (4, 1)], {}),
        "small rows": ([(500, 3), (500, 1)], {}),
        "channels": ([(4, 6, 5, 7), (6, 1, 1)], {}),
        "alternating": ([(3, 1, 4, 1, 5), (1, 2, 1, 6, 1)], {}),
        "inner and outer": ([(5, 1, 16), (6, 1)], {}),
        "sixteen axes": ([(1, 2) * 8, (2, 1) * 8], {}),
        "long rows": ([(2, 40_001), (2, 1)], {}),
        "long columns": ([(50_021, 3), (3,)], {}),
        "long sum": ([(700_001,), (1,)], {}),
        "large": ([(1009, 1031), (1009, 1031)], {}),
    }
    further = {
        **{f"{name}, swapped": (shapes[::-1], settings) for name, (shapes, settings) in cases.items()},
        **{f"{n}": ([(n,)] * 2, {}) for n in (0, 1, 2, 31, 257, 1000, 4099)},
        "empty column": ([(0, 1), (3,)], {}),
        "broken rows": ([(997, 509), (509,)], {}),
        "broken columns": ([(997, 509), (997, 1)], {}),
        **{
            f"{x} to {out}": ([x, out], {})
            for x, out in (
                ((7, 1), (7, 5)),
                ((1, 96), (33, 96)),
                ((), (700,)),
                ((3, 1, 4), (3, 2, 4)),
                ((1, 2) * 3, (3, 2) * 3),
                ((1, 2, 1, 3), (3, 2, 5, 3)),
                ((1, 301), (70, 301)),
                ((70, 1), (70, 301)),
                *LONG,
            )
        },
    }
    small = "alternating"
    second_order = True
    wrong = (
        (zeros(3, 3, dtype=np.int64), {}, TypeError, "x must be float16, float32 or float64, got int64"),
        ([*zeros(3), 1.0], {}, TypeError, "add: y must be a Tensor, got float"),
        (zeros((2, 3), 4), {}, ValueError, "add: x and y must have shapes that broadcast, got (2, 3) and (4,)"),
        (zeros(2, 0), {}, ValueError, "add: x and y must have shapes that broadcast, got (2,) and (0,)"),
        (zeros((1,) * 17, 1), {}, ValueError, "add: x and y must have at most 16 axes, got 17"),
    )

    huge = ((BIG // 3,),)

    def check_huge(self, gpu, rows):
        x, y = gpu.random(rows, 3), gpu.random(3)
        (out,) = gpu.run(forward, x, y)
        gpu.assert_equal(out, x + y)
        dy = gpu.run(backward, x, y)[0]
        gpu.assert_sums(dy, x.sum(0, dtype=gpu.torch.float64))
        dx = gpu.run(backward, x, x[:, :1].contiguous())[0]
        gpu.assert_close(dx, x.sum(1, keepdim=True))

    def operators(self, shapes=(), **settings):
        return [forward, backward]

    def reference_gradient(self, x, y, dout):
        return *sum_to(dout, x), *sum_to(dout, y)

    def scratch_of_parts(self, inputs, shape, parts):
        return parts, inputs[1].size if parts > 1 else 1

    def random_case(self, random):
        """Chooses axes that both inputs share, or along which one of them is broadcast."""
        axes = [random.choice(((n, n), (n, 1), (1, n))) for n in lengths(random)]
        shapes = [tuple(pair[k] for pair in axes) for k in (0, 1)]
        short = random.randrange(2)
        while shapes[short][:1] == (1,) and random.random() < 0.5:
            shapes[short] = shapes[short][1:]
        return shapes, {}


@pytest.mark.parametrize("values", [(np.inf, -np.inf), (np.nan, 1), (3e38, 3e38), (1e-45, 2e-45)], ids=str)
def test_special_values(mode, values):
    x, y = (np.full(1000, v, np.float32) for v in values)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(run(msops.Add(), x, y)[0], x + y)


def test_every_float16(mode):
    """Sums of all 65536 float16 numbers are rounded as NumPy rounds them."""
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    y = np.roll(x, 12345)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(run(msops.Add(), x, y)[0], x + y)


def test_infinity_in_a_sum(mode):
    """A sum with an infinity is infinite, not NaN."""
    inputs = zeros(4, 1)
    dout = np.array([1, np.inf, 2, 3], np.float32)
    np.testing.assert_array_equal(run_gradient(msops.Add(), inputs, [dout])[1], [np.inf])


@wide_in_graph_mode
def test_result_that_no_memory_holds(mode):
    """MindSpore allocates all memory of C functions, and does not call them if it cannot. Later calls work."""
    net, n = msops.Add(), 2**24
    x, y = (Tensor(np.ones(shape, np.float32)) for shape in ((n, 1), (1, n)))
    with pytest.raises(RuntimeError):
        net(x, y).asnumpy()
    np.testing.assert_array_equal(net(x[:2], y[:, :3]), np.full((2, 3), 2, np.float32))


def test_too_many_axes_are_refused(capfd):
    for call in TestAdd().entry_calls([(1,) * 16] * 2, {}, "float32"):
        guarded = GuardedCall(call, capfd)
        longer = {name: (1,) * 17 for name in guarded.params if name != "partial"}
        guarded.refused_with_shapes(longer, Status.BAD_RANK)


def test_shapes_that_only_the_gradient_entry_knows(capfd):
    """The gradient's entry checks what its rule does not know: which shapes broadcast, and which scratch belongs to how
    many parts."""
    _, backward = TestAdd().entry_calls([(3, 1, 4), (3, 5, 4)], {}, "float32")
    guarded = GuardedCall(backward, capfd)
    for shape in ((4, 5, 4), (3, 5, 3), (3, 4), (4,)):
        guarded.refused_with("dout", Status.BAD_SHAPE, shape=shape)
    for shape in ((2, 1), (0, 1)):
        guarded.refused_with("partial", Status.BAD_SHAPE, shape=shape)
