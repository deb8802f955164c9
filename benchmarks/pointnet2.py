"""Has the sizes of searches of points, and builds the kernels of a checkout of Pointnet2_PyTorch (Wijmans), a peer.

The variable POINTNET2_PYTORCH names the checkout. Without it, or without torch on a GPU, there is no such peer.
"""

import functools
import os
from pathlib import Path

from .benchmark import Sizes

THEIRS = "Pointnet2_PyTorch"

SEARCHES = {  # sizes (clouds, points, queries) of operators that search points
    "GPU": [
        Sizes(
            named=((32, 1024, 512), (16, 16384, 4096), (1, 131072, 16384)),
            sweep=((1, 256, 64), (1, 4096, 1024), (2, 1_000_000, 16384)),
            ragged={(16, 16383, 4095): (16, 16384, 4096)},
        )
    ],
    "CPU": [Sizes(named=((2, 1024, 512), (1, 16384, 4096)), sweep=((1, 256, 64),))],
}


@functools.cache
def extension():
    """Returns its module of C++ functions, or None."""
    import torch
    from torch.utils import cpp_extension

    checkout = os.environ.get("POINTNET2_PYTORCH")
    if not checkout or not torch.cuda.is_available():
        return None
    folder = Path(checkout) / "pointnet2_ops_lib" / "pointnet2_ops" / "_ext-src"
    sources = [str(path) for kind in ("cpp", "cu") for path in sorted(folder.glob(f"src/*.{kind}"))]
    return cpp_extension.load("pointnet2_ext", sources, extra_include_paths=[str(folder / "include")])


@functools.cache
def with_gradient(forward, backward):
    """Returns an extension's forward(features, idx) as a function whose gradient autograd takes from its backward."""
    import torch

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, features, idx):
            ctx.save_for_backward(idx)
            ctx.points = features.shape[2]
            return forward(features, idx)

        @staticmethod
        def backward(ctx, dout):
            return backward(dout, *ctx.saved_tensors, ctx.points), None

    return Function.apply


class PointNet2:
    """Gives a Benchmark Pointnet2_PyTorch as a peer, for float32: `theirs(case, extension, *inputs)` computes a forward
    case, and a gradient, too, where `their_directions` says so."""

    their_directions = ("forward",)

    def torch_formulas(self, case, dtype):
        formulas, found = super().torch_formulas(case, dtype), extension()
        if found is not None and case.direction in self.their_directions and dtype.itemsize == 4:
            formulas[THEIRS] = functools.partial(self.theirs, case, found)
        return formulas


class PointNet2Gather(PointNet2):
    """Calls the extension's function that has the operator's name, such as group_points, and its gradient."""

    their_directions = ("forward", "backward")

    def theirs(self, case, extension, features, idx):
        forward, backward = (getattr(extension, name) for name in (self.name, f"{self.name}_grad"))
        return with_gradient(forward, backward)(features, idx)
