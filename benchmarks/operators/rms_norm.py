"""Benchmarks RMSNorm. A size is (rows, columns) or, for a weight of each head, (rows, heads, columns)."""

import mindspore
from mindspore import Parameter, nn, ops

import msops
from test_rms_norm import TestRmsNorm

from ..benchmark import Benchmark, Sizes
from ..figures import Target, best_peer, share

ROWS = {  # sizes of operators that normalize rows
    "GPU": [
        Sizes(
            named=((65536, 1024), (32768, 4096), (8192, 8192), (4096, 32768)),
            sweep=((4, 576), (64, 4096), (1024, 128), (131072, 128)),
            ragged={(32768, 4097): (32768, 4096), (65536, 1023): (65536, 1024)},
        )
    ],
    "CPU": [
        Sizes(
            named=((2048, 1024), (512, 4096)),
            sweep=((4, 576), (64, 4096), (4096, 128)),
            ragged={(512, 4097): (512, 4096)},
        )
    ],
}
HEADS = {"GPU": (16384, 32, 128), "CPU": (256, 32, 128)}
SHARES = {  # the least shares of the roof, forward and backward
    "float16": {
        "2^16 x 2^10": (0.95, 0.90),
        "2^15 x 2^12": (0.97, 0.90),
        "2^13 x 2^13": (0.93, 0.85),
        "2^12 x 2^15": (0.97, 0.85),
    },
    "float32": {"2^15 x 2^12": (0.98, 0.95)},
}


def of_rows(shares):
    """Returns the targets of an operator of the sizes ROWS, for {dtype: {size: (least share forward, backward)}}."""
    return {
        "GPU": [
            *(
                Target(f"{case}, {direction}, {dtype}", f"share {least:.2f}", least,
                       share(case, direction=direction, dtype=dtype))
                for dtype, cases in shares.items()
                for case, leasts in cases.items()
                for direction, least in zip(("forward", "backward"), leasts)
            ),
            Target("named sizes", "not slower than the best peer", 1, best_peer(lambda case: True, named=True)),
        ]
    }  # fmt: skip


class ComposedRMSNorm(nn.Cell):
    """Computes RMSNorm by MindSpore's operators, as its language models do on a GPU."""

    def __init__(self, columns, dtype):
        super().__init__()
        self.weight = Parameter(ops.ones(columns, dtype), name="weight")

    def construct(self, x):
        wide = x.astype(mindspore.float32)
        scale = ops.rsqrt((wide * wide).mean(-1, keep_dims=True) + 1e-6)
        return (wide * scale).astype(x.dtype) * self.weight


class RmsNorm(Benchmark):
    card = TestRmsNorm()
    sizes = {device: [*sizes, Sizes(named=(), sweep=(HEADS[device],))] for device, sizes in ROWS.items()}
    headline = (("2^15 x 2^12", "float16"), ("2^12 x 2^15", "float16"))
    targets = of_rows(SHARES)

    def inputs(self, size):
        return [size, size[1:]]

    def torch_formula(self, case):
        from torch.nn.functional import rms_norm

        if len(case.size) == 3:
            return lambda x, weight: rms_norm(x, x.shape[-1:], None, 1e-6) * weight
        return lambda x, weight: rms_norm(x, weight.shape, weight, 1e-6)

    def library_formulas(self, case):
        if len(case.size) == 3:
            return {}

        def of_liger(liger, x, weight):
            return liger.LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False)  # not in place

        return {"Liger": of_liger, "quack": lambda quack, x, weight: quack.rmsnorm(x, weight, eps=1e-6)}

    def cell_inputs(self, size):
        return self.inputs(size)[:1]

    def networks(self, size, dtype, device):
        dtype = getattr(mindspore, dtype)
        return {"msops": msops.RMSNorm(size[-1], dtype=dtype), "MindSpore": ComposedRMSNorm(size[-1], dtype)}
