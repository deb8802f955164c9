"""Runs an operator on a device, in another process, since MindSpore may be what is broken."""

from __future__ import annotations

import sys
from typing import NamedTuple

from .finding import Finding, output

_SECONDS = 300
# The program prints how far it came, and the error that stopped it.
_RUN = """
import sys
sys.path[:] = {path!r}
try:
    import mindspore
    import numpy as np
    print("imported", mindspore.__version__, flush=True)
    from msops.compat import set_device
    set_device({device!r})
    import msops
    for name in msops.__all__:
        getattr(msops, name)
    x = np.array([-1, 0, 1], np.float32)
    y = msops.sigmoid(mindspore.Tensor(x)).asnumpy()
    if not np.allclose(y, 1 / (1 + np.exp(-x))):
        raise ValueError(f"sigmoid gave {{y}} of {{x}}")
    print("passed", flush=True)
except BaseException as error:
    print("error", type(error).__name__ + ": " + " ".join(str(error).partition("\\n\\n")[0].split()), flush=True)
"""


class Smoke(NamedTuple):
    """The result. `version` is the version of the MindSpore that was imported, or "" if none was."""

    finding: Finding
    version: str
    error: str


def run(device: str) -> Smoke:
    code = _RUN.format(path=sys.path, device=device)
    printed = output(sys.executable, "-c", code, seconds=_SECONDS).splitlines()
    version = next((line.split()[1] for line in printed if line.startswith("imported ")), "")
    last = printed[-1] if printed else "the process ended early"
    if last == "passed":
        return Smoke(Finding(device, "ok", "msops.sigmoid works"), version, "")
    # MindSpore 1.10 crashes at exit after an import that failed.
    error = next((line.removeprefix("error ") for line in printed if line.startswith("error ")), last)
    doing = "msops" if version else "import mindspore"
    return Smoke(Finding(device, "wrong", f"{doing}: {error}"), version, error)
