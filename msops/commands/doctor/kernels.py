"""Tells whether `msops.patch_mindspore` replaces MindSpore's kernels here, by a call in another process."""

from __future__ import annotations

import sys

from .finding import Finding, output, tell

_SECONDS = 300  # the first run compiles what replaces
_RUN = """
from msops.compat import set_device
set_device("GPU")
import msops
print("replaced", len(msops.patch_mindspore(mint=False).kernels), flush=True)
"""


def finding(device: Finding) -> Finding:
    """Returns the line on MindSpore's kernels, where operators run on the GPU."""
    if device.state != "ok":
        return Finding("kernels", "none", "not tried")
    tell("replaces MindSpore's kernels")
    printed = output(sys.executable, "-c", _RUN, seconds=_SECONDS).split()
    count = printed[-1] if printed[-2:-1] == ["replaced"] else "0"
    if count == "0":
        return Finding("kernels", "none", "msops.patch_mindspore leaves MindSpore's kernels as they are")
    return Finding(
        "kernels", "ok", f"msops.patch_mindspore replaces {count} of MindSpore's functions that launch kernels"
    )
