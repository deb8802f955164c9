"""Makes the checks of :func:`msops.testing.opcheck` on calls of an operator's C entry.

On the CPU an array ends where accessible memory ends, or begins where it begins: an access out of bounds crashes the
process that makes the call. On the GPU an array lies between bytes that must not change.
"""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore
import numpy as np

from ..core.abi import DEFAULT_STREAM
from . import advice, cuda
from .checks import assert_equal, at
from .derived import specs_of
from .entry import Status, attributes_in_mindspore, has_gpu_code, outputs_of
from .process import Crash, Memory, Place, Where
from .report import RACE, Finding, Skipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from ..core.operator import Operator
    from ..core.spec import Spec
    from .checks import Arrays
    from .process import Process

GUARD = 4096  # bytes before and after each array on the GPU


class Fill(NamedTuple):
    """Tells what outputs, and memory around arrays, hold before a call, and where the arrays lie."""

    pattern: int  # a byte
    at_end: bool  # arrays end, rather than begin, beside memory that cannot be accessed


FILLS = (Fill(0xFF, at_end=True), Fill(0x5A, at_end=False))  # 0xFF is NaN in every floating dtype, 0x5A a large number


class Array(NamedTuple):
    """An array in a part of a Memory."""

    name: str
    place: Place
    part: npt.NDArray[np.uint8]
    before: npt.NDArray[np.uint8]  # what the part held at first

    @property
    def end(self) -> int:
        return self.place.begin + math.prod(self.place.shape) * np.dtype(self.place.dtype).itemsize

    def values(self, part: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[Any]:
        part = self.part if part is None else part
        return part[self.place.begin : self.end].view(self.place.dtype).reshape(self.place.shape)

    def kept(self) -> npt.NDArray[np.bool_]:
        """Tells which elements have all bytes that they had before the call."""
        size = np.dtype(self.place.dtype).itemsize
        same = (self.part == self.before)[self.place.begin : self.end]
        return same.reshape(*self.place.shape, size).all(-1)

    def element(self, offset: int) -> str:
        """Describes the element at an offset of the part, out of bounds."""
        number = (offset - self.place.begin) // np.dtype(self.place.dtype).itemsize
        side = "before its beginning" if number < 0 else "after its end"
        return f"element {number} of {self.name}, {side}: it has shape {self.place.shape}"


class EntryCall:
    """A call of an operator's entry with NumPy arrays; `results` are the names of the outputs that are compared.

    Raises:
        Finding: If the entry crashes.
    """

    def __init__(
        self, operator: Operator, inputs: Arrays, results: Sequence[str], process: Process, fill: Fill = FILLS[0]
    ) -> None:
        self.operator, self.results, self.process = operator, results, process
        self.name, self.inputs = operator.entry.name, len(inputs)
        specs = [(x.shape, x.dtype.name) for x in inputs] + outputs_of(operator, inputs)
        lengths = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in specs]
        guard = 0 if process.where.device is None else GUARD
        page = mmap.PAGESIZE
        self.memory = Memory([max(-(-(length + 2 * guard) // page), 1) * page for length in lengths])
        self.arrays = []
        signature = operator.signature
        names = [tensor.name for tensor in (*signature.inputs, *signature.outputs, *signature.scratch)]
        for i, (name, spec, part, length) in enumerate(zip(names, specs, self.memory.parts, lengths)):
            part[:] = fill.pattern
            begin = len(part) - length if fill.at_end and not guard else guard
            if i < len(inputs):
                part[begin : begin + length] = np.ascontiguousarray(inputs[i]).reshape(-1).view(np.uint8)
            self.arrays.append(Array(name, Place(i, begin, *spec), part, part.copy()))
        self.places = [array.place for array in self.arrays]
        self.status = self.again()
        self.said = process.said()

    def again(self, places: Sequence[Place] | None = None, count: int | None = None, **how: Any) -> int:
        """Makes another call with the arrays as they are now, and returns its status."""
        answer = self.answer(self.request(places, count), **how)
        self.seconds = float(answer["seconds"])
        return int(answer["status"])

    def request(self, places: Sequence[Place] | None = None, count: int | None = None) -> dict[str, Any]:
        places = self.places if places is None else places
        attributes = attributes_in_mindspore(self.operator.attributes)
        count = len(places) if count is None else count
        return self.process.request(self.operator.entry, self.memory, places, attributes, count)

    def answer(self, *requests: dict[str, Any], **how: Any) -> dict[str, Any]:
        """Makes calls, and returns what the process answers; see Process.call."""
        try:
            return self.process.call(*requests, **how)
        except Crash as crash:
            check, words = "no crash", crash.words
            if crash.how:
                check, words = "bounds", f"{crash.how} {self.arrays[crash.part].element(crash.offset)}"
            else:
                words += f" ({said})" if (said := self.process.said()) else ""
            raise Finding(check, f"{self.name} {words}") from None

    def of(self, *inputs: npt.NDArray[Any], **how: Any) -> list[npt.NDArray[Any]]:
        """Calls the entry with other inputs of these shapes and dtypes, and returns copies of the results."""
        for array, x in zip(self.arrays, inputs):
            array.values()[...] = x
        self.status = self.again(**how)
        self.said = self.process.said()
        check_status(self)
        return self.outputs()

    def outputs(self) -> list[npt.NDArray[Any]]:
        """Returns copies of the results."""
        return [array.values().copy() for array in self.arrays if array.name in self.results]


def mindspores_device() -> Where:
    """Tells where MindSpore computes."""
    if mindspore.get_context("device_target") != "GPU":
        return Where()
    return Where(mindspore.get_context("device_id"), cuda.LIBRARY, DEFAULT_STREAM)


def require_code(operator: Operator, where: Where) -> None:
    """Skips an operator without code for the GPU if it would be called there."""
    if where.device is not None and not has_gpu_code(operator.entry.library):
        raise Skipped("the library has no GPU code")


def check_status(call: EntryCall) -> bool:
    """Requires that the entry returns 0."""
    if call.status != 0:
        said = f"{call.name} returns {call.status}{call.said and f' ({call.said})'}"
        raise AssertionError(said + (advice.of_dtype(call.operator, said) if call.status == Status.BAD_DTYPE else ""))
    return True


def check_bounds(call: EntryCall) -> None:
    """Requires that nothing is written before or after an array."""
    for array in call.arrays:
        wrong = np.flatnonzero(array.before != array.part)
        outside = wrong[(wrong < array.place.begin) | (wrong >= array.end)]
        if len(outside):
            raise AssertionError(f"{call.name} writes {array.element(int(outside[0]))}")


def check_inputs_unchanged(call: EntryCall) -> None:
    """Requires that the entry leaves its inputs as they are."""
    for array in call.arrays[: call.inputs]:
        assert_equal([array.values()], [array.values(array.before)], [f"{call.name}: {array.name}"])


def check_written(first: EntryCall, second: EntryCall) -> None:
    """Requires that outputs do not depend on what they, or the memory around the arrays, held before: `second` is the
    same call, but began with other values there."""
    for a, b in zip(first.arrays, second.arrays):
        if a.name not in first.results:
            continue
        try:
            assert_equal([b.values()], [a.values()], [f"{first.name}: {a.name}"])
        except AssertionError as error:
            inputs = [array.values(array.before) for array in first.arrays[: first.inputs]]
            check_repeats(EntryCall(first.operator, inputs, first.results, first.process), first.outputs())
            kept = a.kept() & b.kept()
            if kept.any():
                index = np.unravel_index(int(kept.argmax()), kept.shape)
                raise AssertionError(
                    f"{first.name}: {at(a.name, index)} is not written; {kept.sum()} of {kept.size} are not"
                ) from None
            raise AssertionError(
                f"{error}: that depends on what was there, or around the arrays, before the call"
            ) from None


def check_repeats(call: EntryCall, expected: Arrays, how: str = "") -> None:
    """Requires that results are bit for bit those of an equal call."""
    try:
        assert_equal(call.outputs(), expected, call.results)
    except AssertionError as error:
        words = f"a race, or state that a call leaves: two equal calls of {call.name} {how}differ: {error}"
        raise Finding(RACE, words) from None


def other_shapes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields shapes shorter by 1 on an axis, or of another rank, but none that would make a call read out of bounds."""
    for axis, length in enumerate(shape):
        if length > 0:
            yield *shape[:axis], length - 1, *shape[axis + 1 :]
    yield *shape, 1
    if shape and shape[-1] > 0:
        yield shape[:-1]


def check_wrong_calls(call: EntryCall) -> None:
    """Requires that a wrong count of parameters, or shape, gives a status other than 0, and that nothing is written."""
    places, before = call.places, [array.part.copy() for array in call.arrays]

    def refused(what: str, places: Sequence[Place], count: int | None = None, lacks: str = "") -> None:
        try:
            status = call.again(places, count)
        except Finding as crash:
            raise AssertionError(f"{crash}; it was called with {what}") from None
        assert status != 0, f"{call.name} accepts {what}{lacks}"
        for array, old in zip(call.arrays, before):
            assert (array.part == old).all(), f"{call.name} writes to {array.name} for {what}"

    refused("one parameter too few", places, len(places) - 1)
    refused("one parameter too many", [*places, places[-1]])
    for i, array in enumerate(call.arrays):
        if i >= call.inputs and array.name not in call.results:
            continue  # scratch may have any length
        right = array.place.shape
        promised = outputs_with(call, i, right) if i < call.inputs else None
        for shape in other_shapes(right):
            if i >= call.inputs or outputs_with(call, i, shape) != promised:
                beside, lacks = advice.of_shape(call.operator, i, right, shape)
                fits = next((a.place.shape for a in call.arrays if a.name == beside), None)
                what = f"{array.name} {shape} {f'beside {beside} {fits}' if beside else f'instead of {right}'}"
                changed = [*places[:i], places[i]._replace(shape=shape), *places[i + 1 :]]
                refused(what, changed, lacks=f": {lacks} is missing")


def outputs_with(call: EntryCall, i: int, shape: tuple[int, ...]) -> list[Spec] | None:
    """Returns the Specs promised for another shape of input i, or None if the rule refuses it."""
    specs = specs_of([array.values() for array in call.arrays[: call.inputs]])
    specs[i] = specs[i]._replace(shape=shape)
    try:
        return call.operator.infer(*specs)
    except (TypeError, ValueError):
        return None


def check_rule_agrees(call: EntryCall) -> None:
    """Requires that the entry takes every shape that the operator's rule takes, unless it refuses a value, such as an
    index that is out of range for this shape."""
    inputs = [array.values() for array in call.arrays[: call.inputs]]
    for i, x in enumerate(inputs):
        for shape in other_shapes(x.shape):
            if outputs_with(call, i, shape) is not None:
                taken = f"the operator takes {call.arrays[i].name} {shape} instead of {x.shape}"
                try:
                    changed = [*inputs[:i], np.resize(x, shape), *inputs[i + 1 :]]
                    again = EntryCall(call.operator, changed, (), call.process)
                    assert again.status == Status.BAD_VALUE or check_status(again)
                except Finding as error:
                    raise Finding(error.check, f"{taken}, but {error}") from None
                except AssertionError as error:
                    raise AssertionError(f"{taken}, but {error}{advice.of_one_shape(call.operator)}") from None


def check_attributes(call: EntryCall, others: Sequence[tuple[str, Operator]], fresh: Process) -> None:
    """Requires the results of a fresh process, whatever attributes earlier calls had."""
    inputs = [array.values(array.before) for array in call.arrays[: call.inputs]]
    taken = 0
    for words, other in others:
        with fresh:
            try:
                want = EntryCall(other, inputs, call.results, fresh)
            except (TypeError, ValueError, RuntimeError):  # the rule refuses this value, or fails, as for a stride of 0
                continue
            except Finding as crash:
                raise Finding(crash.check, f"{crash}; it was called with {words}") from None
        if want.status != 0:
            continue
        taken += 1
        again = EntryCall(call.operator, inputs, call.results, call.process)
        got = EntryCall(other, inputs, call.results, call.process)
        for result, expected, what in ((got, want, f"with {words}"), (again, call, "as at first")):
            try:
                assert_equal(result.outputs(), expected.outputs(), [f"{call.name}: {name}" for name in call.results])
            except AssertionError as error:
                raise AssertionError(
                    f"{error}: an earlier call with other attributes changes the call {what}"
                ) from None
    if not taken:
        raise Skipped("the operator takes no other value of an attribute")
