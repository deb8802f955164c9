"""Builds the kernels of checkouts of torch-ngp (Tang) and ngp_pl (kwea123), peers of the operators of neural fields.

The variables TORCH_NGP and NGP_PL name the checkouts. Without one, or without torch on a GPU, there is no such peer.
"""

import functools
import os
import re
from pathlib import Path

import numpy as np

from . import report

CHECKOUTS = {"torch-ngp": "TORCH_NGP", "ngp_pl": "NGP_PL"}  # peer -> variable
BUILD = report.ROOT / "build" / "peers"


@functools.cache
def extension(folder):
    """Returns the module of C++ functions of a folder of sources, which are built from changed copies."""
    from torch.utils import cpp_extension

    name = "_".join(Path(folder).parts[-2:])
    copies = BUILD / name
    for path in Path(folder).rglob("*.*"):
        if path.suffix in (".cpp", ".cu", ".h"):
            copy, text = copies / path.relative_to(folder), changed(path.read_text())
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not copy.exists() or copy.read_text() != text:  # what did not change is not built again
                copy.write_text(text)
    sources = [str(path) for kind in ("cpp", "cu") for path in sorted(copies.glob(f"*.{kind}"))]
    return cpp_extension.load(
        name,
        sources,
        extra_include_paths=[str(copies / "include")],
        extra_cuda_cflags=["-U__CUDA_NO_HALF_CONVERSIONS__", "-include", "c10/cuda/CUDAStream.h"],
        build_directory=str(copies),
    )


def changed(text):
    """Launches kernels on torch's stream, since a CUDA graph would leave out those on the default stream, and asks a
    tensor for its dtype as torch wants it today."""
    text = re.sub(r"<<<(.+?)>>>", r"<<<\1, 0, c10::cuda::getCurrentCUDAStream()>>>", text)
    return text.replace(".type()", ".scalar_type()")


class NeuralField:
    """Gives a Benchmark these peers. Where it has a method such as `torch_ngp_forward(case, extension, *inputs)`, that
    takes the inputs of the case's entry, and returns a call and a function that makes our results, or None for those
    that they lack, of what the call returns.

    A call also clears the results that their own functions in Python clear before. Inputs are brought into their
    layout outside of the time, and so are results made room for, if not in C++.
    """

    folders = {}  # peer -> the folder of its sources in the checkout
    their_dtypes = ("float32",)

    def prepared_peers(self, case, like):
        return {peer: functools.partial(_first, prepare) for peer, prepare in self.their_peers(case, like).items()}

    def their_peers(self, case, like):
        """Returns {peer: a function of the entry's inputs that returns the two functions}."""
        peers = {}
        for peer, variable in CHECKOUTS.items():
            checkout = os.environ.get(variable)
            prepare = getattr(self, f"{variable.lower()}_{case.direction}", None)
            if checkout and prepare and like.is_cuda and str(like.dtype).split(".")[-1] in self.their_dtypes:
                folder = Path(checkout).resolve() / self.folders[peer]
                peers[peer] = functools.partial(_with_extension, prepare, case, str(folder))
        return peers


def _first(prepare, *inputs):
    return prepare(*inputs)[0]


def _with_extension(prepare, case, folder, *inputs):
    return prepare(case, extension(folder), *inputs)


def rays_of(offsets, dtype):
    """Returns the rows (ray, first sample, number of samples) of rays."""
    import torch

    return torch.stack([torch.arange(len(offsets) - 1).to(offsets), offsets[:-1], offsets.diff()], 1).to(dtype)


def bits_of(occupancy):
    """Packs a grid of 2^n cells along each axis into bits in Morton's order, in which x has the lowest bit."""
    import torch

    n = len(occupancy).bit_length() - 1
    axes = [axis * n + bit for bit in range(n) for axis in (2, 1, 0)]
    bits = occupancy.cpu().numpy().reshape((2,) * (3 * n)).transpose(axes)
    return torch.from_numpy(np.packbits(bits, bitorder="little")).to(occupancy.device)
