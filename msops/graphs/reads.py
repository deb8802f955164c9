"""Refuses to read values of the GPU while they are recorded, and tells where a program did."""

from __future__ import annotations

import contextlib
import functools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Parameter, Tensor

from msops.core.library import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_READS = (
    *("asnumpy", "numpy", "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__str__", "__repr__"),
    *("__array__", "__getstate__", "flush_from_cache"),
)
_FOLDERS = str(Path(str(mindspore.__file__)).parent), str(PACKAGE)


@contextlib.contextmanager
def refused_reads(is_on_device: Callable[[Tensor], bool]) -> Iterator[None]:
    """Lets this thread read no values of tensors on the GPU, and none of Parameters, which may change."""
    thread, owned = threading.get_ident(), {}

    def refusing(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(read)
        def refuse(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            what = "a Parameter" if isinstance(self, Parameter) else "a value of the GPU"
            if threading.get_ident() == thread and (isinstance(self, Parameter) or is_on_device(self)):
                raise RuntimeError(f"{name} reads {what} while the work that computes it is recorded")
            return read(self, *args, **kwargs)

        return refuse

    for name in _READS:
        if hasattr(Tensor, name):
            owned[name] = Tensor.__dict__.get(name)
            setattr(Tensor, name, refusing(name, getattr(Tensor, name)))
    try:
        yield
    finally:
        for name, read in owned.items():
            if read is None:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, read)


def user_line(error: BaseException) -> str:
    """Returns words for the last line outside of MindSpore and msops that led to an error."""
    found, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((*_FOLDERS, "<")):
            found = f" ({file}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found
