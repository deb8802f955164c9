"""Calls C entries as MindSpore does, but without MindSpore's runtime.

Arrays are NumPy's or, together with a stream, torch's on the GPU. Prepare once what you call often:

    run = prepare_operator(operator, [x, y, out])
    for _ in range(100):
        run()
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

from ..core.abi import DEFAULT_STREAM, Param, as_attribute, prepare_call
from ..core.library import Entry, Library, of_package
from ..core.spec import Spec, dtype_called, dtype_name

if TYPE_CHECKING:
    import functools
    from collections.abc import Iterable, Mapping, Sequence

    Attributes = Mapping[str, float] | Iterable[tuple[str, float]]

    from ..core.operator import Operator


class Status(enum.IntEnum):
    """The status that an entry returns: Status in aot_kernels/common/call.h."""

    OK = 0
    BAD_PARAMETER_COUNT = 1
    BAD_DTYPE = 2
    BAD_RANK = 3
    BAD_SHAPE = 4
    BAD_ATTRIBUTE = 5
    NULL_POINTER = 6
    NO_GPU_CODE = 7
    LAUNCH_FAILED = 8
    BAD_VALUE = 9


def call(entry: Entry, arrays: Sequence[Any], attributes: Attributes | None = (), stream: int | None = None) -> Status:
    """Calls an entry once. Takes what :func:`prepare` takes, and returns a Status."""
    return Status(prepare(entry, arrays, attributes, stream)())


def prepare(
    entry: Entry, arrays: Sequence[Any], attributes: Attributes | None = (), stream: int | None = None
) -> functools.partial[int]:
    """Returns a function without arguments that calls an entry and returns its status, an int.

    Args:
        entry (Entry): The C function.
        arrays (list): The parameters: inputs, then outputs. Contiguous arrays, or Params of memory that the caller
            keeps alive.
        attributes (dict): As :func:`msops.custom_op` takes them. None passes a null pointer instead of the object.
        stream (int): The handle of a CUDA stream. None means the CPU.

    Raises:
        ValueError: If an array is not contiguous.

    Examples:
        >>> import msops, numpy
        >>> from msops.testing.entry import call
        >>> library = msops.load("twice", '''
        ... #include "common/formula.h"
        ... MSOPS_FORMULA(Twice, (x), (y), y = 2 * x)
        ... ''')
        >>> x, y = numpy.ones(3), numpy.empty(3)
        >>> print(call(library.Twice, [x, y]).name, y)
        OK [2. 2. 2.]
    """
    params = [Param.of(array) for array in arrays]
    values = None if attributes is None else attributes_in_mindspore(attributes)
    run = prepare_call(getattr(entry.library.handle, entry.name), params, values, stream)
    vars(run).update(arrays=arrays)  # keeps the arrays alive as long as `run`
    return run


def attributes_in_mindspore(attributes: Attributes) -> dict[str, int]:
    """Returns the names and values of attributes as MindSpore hands them to an entry."""
    return dict(as_attribute(name, value) for name, value in dict(attributes).items())


def prepare_operator(
    operator: Operator, arrays: Sequence[Any], stream: int | None = DEFAULT_STREAM
) -> functools.partial[int]:
    """Prepares a call (see :func:`prepare`) of an Operator's entry with inputs and outputs; arrays on a GPU use
    `stream`."""
    stream = stream if getattr(arrays[0], "is_cuda", False) else None
    return prepare(operator.entry, arrays, operator.attributes, stream)


def outputs_of(operator: Operator, inputs: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
    """Returns (shape, dtype's name) of each output, scratch included, for inputs with `.shape` and `.dtype`."""
    dtypes = (str(x.dtype).split(".")[-1] for x in inputs)
    specs = operator.infer(*(Spec(tuple(x.shape), dtype_called(dtype)) for x, dtype in zip(inputs, dtypes)))
    return [(spec.shape, dtype_name(spec.dtype)) for spec in specs]


def has_gpu_code(library: Library | str) -> bool:
    """Tells whether nvcc built a library, which is a Library or the name of one of the package's."""
    library = library if isinstance(library, Library) else of_package(library)
    return b"nv_fatbin" in library.path.read_bytes()
