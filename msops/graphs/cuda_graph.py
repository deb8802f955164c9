"""Replays a function of MindSpore as a CUDA graph."""

from __future__ import annotations

import atexit
import collections
import functools
import types
import weakref
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Parameter, Tensor, nn

from msops.core.compiled import records_gradients
from msops.core.spec import Spec

from . import draws
from .nested import Slot, key_of, others_of, tensors_of, with_tensors
from .reads import refused_reads, user_line
from .recorder import Graph, Notes, Recorder, shared_recorder
from .state import Memory, reachable, watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_alive: weakref.WeakSet[CudaGraph] = weakref.WeakSet()


def cuda_graph(
    function: Callable[..., Any] | None = None, *, warmup: int = 2, copy_outputs: bool = True, limit: int = 8
) -> Any:
    """Makes a function run as a CUDA graph: its work is recorded once, and then launched as a whole.

    MindSpore's host needs 15 to 60 us for each operator. Where a network waits for the host, a replay takes the time of
    its kernels alone. Values, gradients and what optimizers write into Parameters have the bits of usual calls.

    Each call of the result is one call of the function. For each set of shapes, dtypes and other arguments, the first
    `warmup` calls run as usual, the next is recorded and launched, and later ones copy their tensors in and launch the
    graph. On the CPU all calls run as usual, so that one script serves both devices.

    The function runs in Python for the first calls only. So it must do the same work whenever it is called with such
    arguments: what it computes in Python from other things, such as the time or a counter, stays what it was. State
    that changes belongs into Parameters, which the function writes in place (optimizers do, and `ops.assign`).

    Args:
        function (callable): A function or a Cell, in PyNative or graph mode. It takes and returns Tensors, also in
            tuples, lists and dicts. Other arguments are constants: each value has a graph of its own.
        warmup (int): How many calls run as usual first, at least 1. Default: ``2`` .
        copy_outputs (bool): Whether results are new Tensors. If ``False`` , a call returns the graph's own, which the
            next call overwrites. Default: ``True`` .
        limit (int): How many graphs are kept at most, of which the least recently used goes first. Default: ``8`` .

    Returns:
        callable, which has these attributes:

        - `graphs` (int), how many graphs there are;
        - `memory` (int), how many bytes of the GPU's memory they hold;
        - `clear()`, which deletes them.

    Raises:
        TypeError: If an argument of a call is neither a Tensor nor hashable.
        ValueError: If `warmup` or `limit` is less than 1.
        RuntimeError: If a call cannot be recorded: MindSpore is not of version 2.10; the function reads a Parameter
            or a value of the GPU (`asnumpy`, `item`, `if tensor:`), or calls an operator that does (`nonzero`,
            `unique`); it draws from a generator whose state is on the host; it writes into an argument; it returns a
            Tensor in an object that is no tuple, list or dict; the call is inside of another recording, or of a
            function that MindSpore differentiates. MindSpore works on as before.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import nn, ops
        >>> net = nn.Dense(4, 1)
        >>> optimizer = nn.Adam(net.trainable_params())
        >>> value_and_grad = mindspore.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())
        >>> @msops.cuda_graph
        ... def step(x):
        ...     loss, gradients = value_and_grad(x)
        ...     optimizer(gradients)
        ...     return loss
        >>> for _ in range(5):
        ...     loss = step(ops.ones((2, 4)))
        >>> print(loss.shape)
        ()
    """
    for name, value in (("warmup", warmup), ("limit", limit)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"cuda_graph: {name} must be an int, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"cuda_graph: {name} must be at least 1, got {value}")
    if function is None:
        return functools.partial(cuda_graph, warmup=warmup, copy_outputs=copy_outputs, limit=limit)
    if not callable(function):
        raise TypeError(f"cuda_graph: function must be callable, got {type(function).__name__}")
    return CudaGraph(function, warmup, copy_outputs, limit)


class CudaGraph:
    """What :func:`msops.cuda_graph` returns."""

    def __init__(self, function: Callable[..., Any], warmup: int, copy_outputs: bool, limit: int) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function, self._warmup, self._copies, self._limit = function, warmup, copy_outputs, limit
        self._entries: collections.OrderedDict[Any, _Entry] = collections.OrderedDict()
        self._space: int | None = None
        _alive.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_on_gpu():
            return self._function(*args, **kwargs)
        recorder = shared_recorder()
        if recorder.active:
            raise RuntimeError("cuda_graph: a call inside of another recording; decorate the outer function alone")
        if records_gradients():
            raise RuntimeError(
                "cuda_graph: MindSpore differentiates the call; compute the gradient inside of the decorated function"
            )
        tensors: list[Tensor] = []
        key = key_of(args, tensors, "args"), key_of(kwargs, tensors, "kwargs")
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= self._limit:
                self._entries.popitem(last=False)[1].close()
            entry = self._entries[key] = _Entry(self._warmup, self._copies)
        else:
            self._entries.move_to_end(key)
        if self._space is None:
            self._space = recorder.new_memory()
            weakref.finalize(self, _clear, recorder, self._entries, self._space).atexit = False
        return entry.call(recorder, self._space, self._function, args, kwargs, tensors)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    @property
    def __code__(self) -> types.CodeType:  # MindSpore asks what it differentiates for this
        return type(self).__call__.__code__

    @property
    def graphs(self) -> int:
        return sum(entry.graph is not None for entry in self._entries.values())

    @property
    def memory(self) -> int:
        return 0 if self._space is None else shared_recorder().held(self._space)

    def clear(self) -> None:
        """Deletes the graphs, and gives their memory back."""
        if self._space is not None:
            _clear(shared_recorder(), self._entries, self._space)

    def __repr__(self) -> str:
        return f"cuda_graph({self._function!r})"


def _clear(recorder: Recorder, entries: dict[Any, _Entry], space: int) -> None:
    for entry in entries.values():
        entry.close()
    entries.clear()
    recorder.release(space)


@functools.cache
def is_on_gpu() -> bool:
    """Asks MindSpore once only, since asking takes the host as long as a replay does."""
    return bool(mindspore.get_context("device_target") == "GPU")


@atexit.register
def _clear_all() -> None:
    """MindSpore's end waits for graphs that have collectives in them."""
    for each in list(_alive):
        each.clear()


class _Entry:
    """The calls with one set of shapes, dtypes and other arguments.

    It does not keep the function, which may lead to what `cuda_graph` returned: Python would never collect that, since
    the finalizer that clears the graphs holds the entries.
    """

    def __init__(self, warmup: int, copies: bool) -> None:
        self._left, self._copies = warmup, copies
        self.graph: Graph | None = None
        # What follows belongs to the graph. `_memory` holds the tensors that the function reaches.
        self._draws: draws.Draws = {}
        self._notes: Notes | None = None
        self._unused: set[tuple[int, int]] = set()  # Parameters which the usual call before has not used
        self._source: Any = None
        self._memory: Any = None
        self._result: Any = None
        self._hosts: list[Tensor | None] = []

    def call(self, recorder: Recorder, space: int, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        if self.graph is not None and self._memory.changed():
            self.close()
            self._left = 1
        if self.graph is None and self._left == 0 and _on_host(recorder, function, args, kwargs) - self._unused:
            self._left = 1  # a usual call, which brings a Parameter's new data to the device
        if self._left > 0:
            if self._left > 1:
                result = function(*args, **kwargs)
            else:
                with draws.noted() as self._draws, recorder.noted() as self._notes:
                    result = function(*args, **kwargs)
                self._unused = _on_host(recorder, function, args, kwargs)
            self._left -= 1
            return result
        recorded = self.graph is None
        if self.graph is None:
            self.graph = self._record(recorder, space, function, args, kwargs, tensors)
        try:
            found = self.graph([*tensors, *self._source.advance()] if self._source.tensors else tensors)
            if recorded:
                self._check_replay(tensors)
        except RuntimeError:
            self.close()
            raise
        return with_tensors(self._result, self._constants(found)) if self._copies else self._result

    def _check_replay(self, tensors: list[Tensor]) -> None:
        """Requires the first replay to be right, and to leave its copies of the arguments as they were."""
        assert self.graph is not None
        self.graph.check()
        for given, copy in zip(tensors, self.graph.inputs):
            if given.asnumpy().tobytes() != copy.asnumpy().tobytes():
                raise RuntimeError("cuda_graph: the function writes into an argument; let it write into a Parameter")

    def _constants(self, found: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yields the results, with those that lie in the host's memory, which no graph computes."""
        left = iter(found)
        return (next(left) if constant is None else constant for constant in self._hosts)

    def _record(
        self, recorder: Recorder, space: int, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]
    ) -> Graph:
        if reachable(nn.TrainOneStepWithLossScaleCell, function):
            raise RuntimeError(
                "cuda_graph: nn.TrainOneStepWithLossScaleCell asks on the host whether a gradient overflowed; the page "
                "'CUDA graphs' shows loss scaling by two recordings"
            )
        statics = [recorder.copy(x) for x in tensors]
        self._source = draws.Source(self._draws, recorder.copy)
        inputs = [*statics, *self._source.tensors]
        watch()
        args, kwargs = with_tensors((args, kwargs), iter(statics))
        self._memory = Memory(function, args, kwargs)
        before = draws.offset()
        recorder.begin(space, [*inputs, *self._memory.tensors], self._notes)
        try:
            with refused_reads(recorder.is_on_device), self._source.recorded():
                result = function(*args, **kwargs)
                mindspore.runtime.synchronize()
                self._require_known_objects(result, statics)
                outputs = [x if x.is_contiguous() else x.contiguous() for x in tensors_of(result)]
                if not self._copies:  # the next call's arguments may be results, and must not overwrite these at once
                    outputs = [recorder.copy(x) if _is_part(x, statics) else x for x in outputs]
                self._memory.keep(recorder.copy_to)
            if draws.offset() != before:
                raise RuntimeError("the function draws random numbers in a graph of MindSpore")
            self._hosts = [None if recorder.is_on_device(x) or not x.size else x for x in outputs]
            taken = [x for x, constant in zip(outputs, self._hosts) if constant is None]
            number = recorder.end(inputs, taken if self._copies else [])
        except BaseException as error:
            if recorder.active:
                recorder.abandon()
            self._memory.put_back()
            failure = recorder.failure
            if "StreamCapture" in str(error):
                failure = "an operator waits for the device while its work is recorded"
            if failure or isinstance(error, RuntimeError):
                words = failure or str(error).removeprefix("cuda_graph: ")
                raise RuntimeError(f"cuda_graph: {words}{user_line(error)}") from error
            raise
        specs = [Spec(x.shape, x.dtype) for x in taken]
        # The tensors of a result that is not copied keep the graph's memory; otherwise the next recording may use it.
        slots = iter([Slot(i) for i in range(len(outputs))] if self._copies else outputs)
        self._result = with_tensors(result, slots)
        return Graph(recorder, number, inputs, specs if self._copies else [])

    def _require_known_objects(self, result: Any, statics: list[Tensor]) -> None:
        """Requires that an object in the result has no tensors of the recorded call, since each call returns it."""
        lasting = {id(x) for x in self._memory.tensors} - {id(x) for x in statics}
        for each in others_of(result):
            if any(not isinstance(x, Parameter) and id(x) not in lasting for x in reachable(Tensor, each)):
                raise RuntimeError(
                    f"the function returns a Tensor in an object of type {type(each).__name__}; return it in a tuple, "
                    "list or dict"
                )

    def close(self) -> None:
        if self.graph is not None:
            self.graph.close()
        self.graph = self._result = self._memory = None


def _on_host(recorder: Recorder, *roots: Any) -> set[tuple[int, int]]:
    """Returns which Parameters have data that is not on the device, and where."""
    return {(id(x), x._data_ptr()) for x in reachable(Parameter, *roots) if not recorder.is_on_device(x)}


def _is_part(x: Tensor, wholes: Sequence[Tensor]) -> bool:
    """Tells whether a tensor lies in the memory of one of others."""
    return any(whole._data_ptr() <= x._data_ptr() < whole._data_ptr() + whole.nbytes for whole in wholes)
