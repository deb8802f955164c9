"""Loads the library that records MindSpore's work on a GPU, and calls it. See recorder.cc."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, ops

from msops.compat import VERSION
from msops.core import fast_calls
from msops.core.build import build_by_gxx
from msops.core.factory import custom_op
from msops.core.spec import Spec, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from msops.core.library import Library

DRIVER, PLUGIN = "libcuda.so.1", "libmindspore_gpu.so"
_DTYPES = tuple(
    getattr(mindspore, name)
    for name in (
        *("bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    )
    if hasattr(mindspore, name)
)


def build() -> Library:
    """Compiles the library, which needs g++ alone, once for each version of its sources."""
    missing = "cuda_graph needs g++, which is not on the PATH"
    return build_by_gxx(Path(__file__).with_name("recorder.cc"), "cuda_graph", missing)


class Notes:
    """What operators read back in a call, which the library keeps under this number until the object is gone."""

    number = 0


class Recorder:
    """Records what MindSpore does between `begin` and `end`, with memory of its own.

    Args:
        library (Library): What `build` returns.
        driver (str): The file of CUDA's driver.
        plugin (str): A part of the path of MindSpore's plugin for GPUs.
    """

    def __init__(self, library: Library, driver: str = DRIVER, plugin: str = PLUGIN) -> None:
        handle = library.handle
        names = "open", "new_memory", "release", "held", "begin", "end", "abandon", "destroy", "copy", "end_notes"
        for name in names:
            getattr(handle, f"graphs_{name}").restype = ctypes.c_int64
        for name in ("error", "failure"):
            getattr(handle, f"graphs_{name}").restype = ctypes.c_char_p
        self.library, self._handle = library, handle
        self._check(handle.graphs_open(driver.encode(), plugin.encode()))
        self.copy = custom_op(library.CopyTensor, "x(*S) -> y(*S)", name="cuda_graph", dtypes=_DTYPES)

    def _check(self, result: int) -> int:
        if result < 0:
            raise RuntimeError(f"cuda_graph: {self._handle.graphs_error().decode()}")
        return result

    @property
    def failure(self) -> str:
        """What made the last recording fail, or an empty str."""
        return str(self._handle.graphs_failure().decode())

    @property
    def active(self) -> bool:
        return bool(self._handle.graphs_recording())

    def is_on_device(self, x: Tensor) -> bool:
        return bool(self._handle.graphs_is_on_device(ctypes.c_void_p(x._data_ptr())))

    def new_memory(self) -> int:
        """Returns the number of memory for graphs that never run at once."""
        return self._check(self._handle.graphs_new_memory())

    def held(self, memory: int) -> int:
        return self._check(self._handle.graphs_held(ctypes.c_int64(memory)))

    @contextlib.contextmanager
    def noted(self) -> Iterator[Notes]:
        """Notes what operators read back from the device, for a recording of the same work."""
        notes = Notes()
        self._handle.graphs_begin_notes()
        try:
            yield notes
            mindspore.runtime.synchronize()
        finally:
            notes.number = self._check(self._handle.graphs_end_notes())
            weakref.finalize(notes, self._handle.graphs_forget_notes, ctypes.c_int64(notes.number))

    def differs(self, graph: int, all_replays: bool = False) -> bool:
        """Tells whether a replay has computed another value than an operator had read."""
        return bool(self._handle.graphs_differs(ctypes.c_int64(graph), all_replays))

    def begin(self, memory: int, variables: Sequence[Tensor], notes: Notes | None = None) -> None:
        """Begins to record work, which may read no value of the variables on the host but those in the notes."""
        mindspore.runtime.synchronize()
        numbers = (ctypes.c_int64(memory), ctypes.c_int64(notes.number if notes else 0))
        self._check(self._handle.graphs_begin(*numbers, *_places(variables)))

    def copy_to(self, address: int, x: Tensor) -> None:
        """Records a copy of a tensor's data to an address, after all that was recorded."""
        mindspore.runtime.synchronize()
        self._check(self._handle.graphs_copy(*map(ctypes.c_uint64, (address, x._data_ptr(), x.nbytes))))

    def end(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
        """Ends the recording, and returns the graph's number."""
        mindspore.runtime.synchronize()  # MindSpore's threads hand over the rest of the work
        return self._check(self._handle.graphs_end(*_places(inputs), *_places(outputs)))

    def abandon(self) -> None:
        try:
            mindspore.runtime.synchronize()
        except RuntimeError:
            pass  # of the work that failed
        finally:
            self._check(self._handle.graphs_abandon())

    def destroy(self, graph: int) -> None:
        mindspore.runtime.synchronize()
        self._check(self._handle.graphs_destroy(ctypes.c_int64(graph)))

    def release(self, memory: int) -> None:
        self._check(self._handle.graphs_release(ctypes.c_int64(memory)))


def _places(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Returns the number of tensors, their addresses and their sizes in bytes, as C arrays."""
    addresses = (ctypes.c_uint64 * len(tensors))(*(x._data_ptr() if x.size else 0 for x in tensors))
    sizes = (ctypes.c_size_t * len(tensors))(*(x.nbytes for x in tensors))
    return ctypes.c_int64(len(tensors)), addresses, sizes


class Graph:
    """A recorded graph. A call copies the inputs in, launches it, and returns copies of its outputs.

    Args:
        recorder (Recorder): What recorded it.
        number (int): What `Recorder.end` returned.
        inputs (list[Tensor]): The tensors that the recorded work reads.
        outputs (list[Spec]): What the calls return.
    """

    def __init__(self, recorder: Recorder, number: int, inputs: Sequence[Tensor], outputs: Sequence[Spec]) -> None:
        self.inputs = list(inputs)  # their memory must last as long as the graph
        given = [_declared(f"x{i}", x.shape, x.dtype) for i, x in enumerate(inputs)]
        taken = [_declared(f"y{i}", y.shape, y.dtype) for i, y in enumerate(outputs)]
        # An operator has inputs and outputs, also where the function has none.
        signature = f"{', '.join([*given, 'unused(dtype=bool)'])} -> {', '.join(['done(dtype=bool)', *taken])}"
        self._unused = recorder.copy(Tensor(False))
        self._recorder, self._number = recorder, number
        self._launch = custom_op(recorder.library.ReplayGraph, signature, name="cuda_graph", graph=number)
        self._close = weakref.finalize(self, recorder.destroy, number)

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._recorder.differs(self._number):
            self._refuse()
        outputs = fast_calls.call_if_prepared(self._launch.primitive, (*inputs, self._unused))
        return outputs[1:] if isinstance(outputs, tuple) else ()

    def check(self) -> None:
        """Waits for the replays, and requires that they computed what operators had read."""
        mindspore.runtime.synchronize()
        if self._recorder.differs(self._number, all_replays=True):
            self._refuse()

    def _refuse(self) -> None:
        self.close()
        raise RuntimeError(
            "cuda_graph: an operator read a value of the GPU while it was recorded, and a replay computed another value"
        )

    def close(self) -> None:
        self._close()


def _declared(name: str, shape: Sequence[int], dtype: Any) -> str:
    return f"{name}({', '.join([*map(str, shape), f'dtype={dtype_name(dtype)}'])})"


@functools.cache
def shared_recorder() -> Recorder:
    """Returns the process's recorder, once a small network was recorded and replayed with the right bits.

    Raises:
        RuntimeError: If MindSpore's version or the machine cannot record.
    """
    if VERSION != (2, 10):
        raise RuntimeError(f"cuda_graph needs MindSpore 2.10 on a GPU, got {mindspore.__version__}")
    try:
        recorder = Recorder(build())
    except (OSError, RuntimeError, ImportError) as error:
        raise RuntimeError(f"cuda_graph cannot record on this machine: {error}") from error
    with contextlib.suppress(OSError, RuntimeError):  # without MindSpore's or Python's headers a launch takes longer
        fast_calls.prepare()
    _check_bits(recorder)
    return recorder


def _check_bits(recorder: Recorder) -> None:
    """Records a small network with a constant, a reduction, a product and memory that is used twice."""

    def network(x: Tensor) -> Tensor:
        for _ in range(3):
            x = ops.matmul(x, x.T) * 0.25 + x.sum() / 3.5
            x = x / (1 + ops.abs(x).max())
        return x

    xs = [Tensor([[i + 3 * j - k for j in range(32)] for k in range(32)], mindspore.float32) for i in range(3)]
    expected = [network(recorder.copy(x)).asnumpy() for x in xs]
    static, memory = recorder.copy(xs[0]), recorder.new_memory()
    recorder.begin(memory, [static])
    try:
        y = network(static)
        graph = Graph(recorder, recorder.end([static], [y]), [static], [Spec(y.shape, y.dtype)])
    except BaseException:
        if recorder.active:
            recorder.abandon()
        raise
    del y
    for x, want in zip([*xs, *xs], [*expected, *expected]):
        (found,) = graph([x])
        if found.asnumpy().tobytes() != want.tobytes():
            raise RuntimeError("cuda_graph cannot record on this machine: a replay of a small network had other bits")
    graph.close()
    recorder.release(memory)
