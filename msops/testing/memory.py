"""The checks of :func:`msops.testing.opcheck` that call an operator's C entry, on arrays amid guard bytes."""

from __future__ import annotations

import contextlib
import math
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore
import numpy as np

from . import cuda
from .checks import assert_equal
from .derived import specs_of
from .entry import DEFAULT_STREAM, Param, has_gpu_code, outputs_of, prepare
from .report import Skipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from ..check import Spec
    from ..custom import Operator
    from .checks import Arrays

GUARD = 4096  # bytes before and after each array
PATTERNS = (0xFF, 0x5A)  # what is in them, and in outputs: NaN in every floating dtype, and a large number


class Array(NamedTuple):
    """An array of NumPy, or a DeviceArray on the GPU, amid guard bytes."""

    name: str
    memory: Any  # bytes: guard, array, guard
    array: Any
    before: npt.NDArray[np.uint8]  # what the memory held at first

    @classmethod
    def place(
        cls,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        pattern: int,
        driver: cuda.Driver | None,
        values: npt.NDArray[Any] | None = None,
    ) -> Array:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        before = np.full(size + 2 * GUARD, pattern, np.uint8)
        if values is not None:
            before[GUARD : GUARD + size] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        if driver:
            on_device = driver.copy(before)
            return cls(name, on_device, on_device.part(GUARD, shape, dtype), before)
        memory = before.copy()
        return cls(name, memory, memory[GUARD : GUARD + size].view(dtype).reshape(shape), before)

    def after(self) -> npt.NDArray[np.uint8]:
        return self.memory if isinstance(self.memory, np.ndarray) else self.memory.numpy()

    def values(self) -> npt.NDArray[Any]:
        return self.array if isinstance(self.array, np.ndarray) else self.array.numpy()


class EntryCall(NamedTuple):
    """A call of an operator's entry. Outputs that are none of the results are scratch."""

    operator: Operator
    arrays: list[Array]
    inputs: int  # how many of the arrays
    results: Sequence[str]  # names
    driver: cuda.Driver | None  # None: the CPU

    def __call__(self, params: Sequence[Param] | None = None, count: int | None = None) -> int:
        """The status, with other Params, or with the wrong count of them."""
        params = [Param.of(a.array) for a in self.arrays] if params is None else params
        stream = DEFAULT_STREAM if self.driver else None
        call = prepare(self.operator.entry, params, self.operator.attributes, stream)
        status = call.func(len(params) if count is None else count, *call.args[1:])
        if self.driver:
            self.driver.synchronize()
        return status


def driver_or_none(operator: Operator) -> cuda.Driver | None:
    """The CUDA driver of MindSpore's device if that is a GPU; the operator must have code for it."""
    if mindspore.get_context("device_target") != "GPU":
        return None
    if not has_gpu_code(operator.entry.library):
        raise Skipped("the library has no GPU code")
    return cuda.driver(mindspore.get_context("device_id"))


def call_entry(
    operator: Operator,
    inputs: Arrays,
    results: Sequence[str],
    driver: cuda.Driver | None,
    pattern: int = PATTERNS[0],
) -> EntryCall:
    """Calls the entry with NumPy's inputs, which must succeed. Returns the EntryCall."""
    names = operator.names()
    arrays = [Array.place(name, x.shape, str(x.dtype), pattern, driver, x) for name, x in zip(names[0], inputs)] + [
        Array.place(name, shape, dtype, pattern, driver)
        for name, (shape, dtype) in zip(names[1], outputs_of(operator, inputs))
    ]
    call = EntryCall(operator, arrays, len(inputs), results, driver)
    status = call()
    assert status == 0, f"{operator.entry.name} returns {status}"
    return call


def check_bounds(call: EntryCall) -> None:
    """Nothing is written before or behind an array."""
    for name, _, _, before, after in ((*a, a.after()) for a in call.arrays):
        wrong = np.flatnonzero(before != after)
        size = len(before) - 2 * GUARD
        for side, distance in (
            ("before the beginning", GUARD - wrong[wrong < GUARD]),
            ("behind the end", wrong[wrong >= GUARD + size] - GUARD - size + 1),
        ):
            assert not len(distance), (
                f"{call.operator.entry.name} writes {side} of {name}, up to {distance.max()} bytes away"
            )


def check_inputs_unchanged(call: EntryCall) -> None:
    """The entry leaves its inputs as they are."""
    for a in call.arrays[: call.inputs]:
        before = a.before[GUARD : len(a.before) - GUARD].view(a.values().dtype).reshape(a.array.shape)
        assert_equal([a.values()], [before], [f"{call.operator.entry.name}: {a.name}"])


def check_written(first: EntryCall, second: EntryCall) -> None:
    """Outputs do not depend on what they, or the memory around the arrays, held before."""
    for a, b in zip(first.arrays, second.arrays):
        if a.name not in first.results:
            continue
        try:
            assert_equal([b.values()], [a.values()], [f"{first.operator.entry.name}: {a.name}"])
        except AssertionError as error:
            raise AssertionError(
                f"{error}: that depends on what was there, or around the arrays, before the call"
            ) from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what C functions print to stderr."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _other_shapes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Those with one length less on an axis, and of another rank. No larger ones, since a wrong call may succeed."""
    for axis, length in enumerate(shape):
        if length > 0:
            yield *shape[:axis], length - 1, *shape[axis + 1 :]
    yield *shape, 1
    if shape and shape[-1] > 0:
        yield shape[:-1]


def check_wrong_calls(call: EntryCall) -> None:
    """A wrong count of parameters, or a shape that does not fit, is refused by a status, and nothing is written."""
    params, before = [Param.of(a.array) for a in call.arrays], [a.after().copy() for a in call.arrays]

    def refused(what: str, *arguments: Any) -> None:
        with quiet():
            status = call(*arguments)
        assert status != 0, f"{call.operator.entry.name} returns 0 for {what}"
        for a, old in zip(call.arrays, before):
            assert (a.after() == old).all(), f"{call.operator.entry.name} writes to {a.name} for {what}"

    refused("one parameter too few", params, len(params) - 1)
    refused("one parameter too many", [*params, params[-1]])
    for i, a in enumerate(call.arrays):
        if i >= call.inputs and a.name not in call.results:
            continue  # scratch may be of any length
        for shape in _other_shapes(a.array.shape):
            if i >= call.inputs or outputs_with(call, i, shape) != outputs_with(call, i, a.array.shape):
                what = f"{a.name} {shape} instead of {a.array.shape}"
                refused(what, [*params[:i], params[i]._replace(shape=shape), *params[i + 1 :]])


def outputs_with(call: EntryCall, i: int, shape: tuple[int, ...]) -> list[Spec] | None:
    """The Specs that are promised for another shape of input i; None if the rule refuses it."""
    specs = specs_of([a.array for a in call.arrays[: call.inputs]])
    specs[i] = specs[i]._replace(shape=shape)
    try:
        return call.operator.infer(*specs)
    except (TypeError, ValueError):
        return None


def check_rule_agrees(call: EntryCall) -> None:
    """What the operator's rule takes, the entry takes."""
    inputs = [a.values() for a in call.arrays[: call.inputs]]
    for i, x in enumerate(inputs):
        for shape in _other_shapes(x.shape):
            if outputs_with(call, i, shape) is not None:
                with quiet():
                    try:
                        call_entry(call.operator, [*inputs[:i], np.resize(x, shape), *inputs[i + 1 :]], (), call.driver)
                    except AssertionError as error:
                        taken = f"{call.arrays[i].name} {shape} instead of {x.shape}"
                        raise AssertionError(f"the operator takes {taken}, but {error}") from None
