"""Tells whether `msops.cuda_graph` records here, by a recording in another process."""

from __future__ import annotations

import sys

from .finding import Finding, output, tell

_SECONDS = 300  # the first run compiles what records
_RUN = """
from msops.compat import set_device
set_device("GPU")
try:
    from msops.graphs.recorder import shared_recorder
    shared_recorder()
    print("recorded", flush=True)
except Exception as error:
    print("error", " ".join(str(error).partition("\\n\\n")[0].split()), flush=True)
"""


def finding(device: Finding) -> Finding:
    """Returns the line on CUDA graphs, where operators run on the GPU."""
    if device.state != "ok":
        return Finding("graphs", "none", "not tried")
    tell("records a CUDA graph")
    printed = output(sys.executable, "-c", _RUN, seconds=_SECONDS).splitlines()
    last = printed[-1] if printed else "the process ended early"
    if last == "recorded":
        return Finding("graphs", "ok", "msops.cuda_graph works")
    return Finding("graphs", "none", last.removeprefix("error "))
