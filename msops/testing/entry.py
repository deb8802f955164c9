"""Calls C entries as MindSpore does, but without MindSpore's runtime.

Arrays are NumPy's or, together with a stream, those on the GPU: torch's, or the DeviceArrays of ``cuda.py`` . What is
called often is prepared once:

    run = prepare_operator(operator, [x, y, out])
    for _ in range(100):
        run()
"""

from __future__ import annotations

import ctypes
import enum
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore

from ..check import Spec, dtype_name
from ..custom import _as_attribute
from ..library import Entry, Library, of_package

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Attributes = Mapping[str, float] | Iterable[tuple[str, float]]

    from ..custom import Operator

DEFAULT_STREAM = 1  # cudaStreamLegacy: CUDA's default stream by a handle that is not null, which would mean the CPU


class Status(enum.IntEnum):
    """What an entry returns: Status in aot_kernels/common/call.h."""

    OK = 0
    BAD_PARAMETER_COUNT = 1
    BAD_DTYPE = 2
    BAD_RANK = 3
    BAD_SHAPE = 4
    BAD_ATTRIBUTE = 5
    NULL_POINTER = 6
    NO_GPU_CODE = 7
    LAUNCH_FAILED = 8


class Param(NamedTuple):
    """What an entry is told of an array, true or not. None in one of the first three fields is a null pointer."""

    pointer: int | None
    shape: tuple[int, ...] | None
    dtype: str | None
    rank: int | None = None  # None: the shape's

    @classmethod
    def of(cls, array: Any) -> Param:
        """The Param of an array of NumPy or torch, or of a DeviceArray; a Param is left as it is."""
        if isinstance(array, cls):
            return array
        has_pointer = hasattr(array, "data_ptr")
        if not (array.is_contiguous() if has_pointer else array.flags.c_contiguous):
            raise ValueError("an entry takes contiguous arrays only")
        pointer = array.data_ptr() if has_pointer else array.ctypes.data
        return cls(pointer, tuple(array.shape), _dtype_name(array))


def call(entry: Entry, arrays: Sequence[Any], attributes: Attributes | None = (), stream: int | None = None) -> Status:
    """Calls an entry once. Takes what :func:`prepare` takes, and returns a Status."""
    return Status(prepare(entry, arrays, attributes, stream)())


def prepare(
    entry: Entry, arrays: Sequence[Any], attributes: Attributes | None = (), stream: int | None = None
) -> functools.partial[int]:
    """A function without arguments that calls an entry and returns its status, an int.

    Args:
        entry (Entry): The C function.
        arrays (list): The parameters: inputs, then outputs. Contiguous arrays, or Params of memory that the caller
            keeps alive.
        attributes (dict): As :func:`msops.custom_op` takes them. None: a null pointer instead of the object.
        stream (int): The handle of a CUDA stream. None: the CPU.

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
    shapes: list[Any]
    shapes = [(ctypes.c_int64 * len(p.shape))(*p.shape) if p.shape else None for p in params]  # rank 0: null, too
    ranks = [len(p.shape or ()) if p.rank is None else p.rank for p in params]
    dtypes = [p.dtype if p.dtype is None else p.dtype.encode() for p in params]
    n = len(params)
    run = functools.partial(
        getattr(entry.library.handle, entry.name),
        ctypes.c_int(n),
        (ctypes.c_void_p * n)(*(p.pointer for p in params)),
        (ctypes.c_int * n)(*ranks),
        (ctypes.POINTER(ctypes.c_int64) * n)(*shapes),
        (ctypes.c_char_p * n)(*dtypes),
        ctypes.c_void_p(stream),
        None if attributes is None else ctypes.byref(_aot_extra(dict(attributes))),
    )
    vars(run).update(arrays=arrays)  # live as long as `run`
    return run


def prepare_operator(
    operator: Operator, arrays: Sequence[Any], stream: int | None = DEFAULT_STREAM
) -> functools.partial[int]:
    """The prepared call (see :func:`prepare`) of an Operator's entry with inputs and outputs; on a GPU's `stream` for
    arrays there."""
    stream = stream if getattr(arrays[0], "is_cuda", False) else None
    return prepare(operator.entry, arrays, operator.attributes, stream)


def outputs_of(operator: Operator, inputs: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
    """(shape, dtype's name) of each output of an Operator, scratch included, for inputs with `.shape` and `.dtype`."""
    specs = operator.infer(*(Spec(tuple(x.shape), getattr(mindspore, _dtype_name(x))) for x in inputs))
    return [(spec.shape, dtype_name(spec.dtype)) for spec in specs]


def has_gpu_code(library: Library | str) -> bool:
    """Whether nvcc built a library: a Library, or the name of one of the package's."""
    library = library if isinstance(library, Library) else of_package(library)
    return b"nv_fatbin" in library.path.read_bytes()


def _dtype_name(array: Any) -> str:
    return str(array.dtype).split(".")[-1]


# A method's arguments are the object and the address of a std::string, which begins with the pointer to its characters.
_HasAttr = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.POINTER(ctypes.c_char_p))
_GetAttrInt = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(ctypes.c_char_p))


class _Methods(ctypes.Structure):
    """The table of virtual functions of MindSpore's class AotExtra, as far as entries use it."""

    _fields_ = (
        ("destructors", ctypes.c_void_p * 2),
        ("has_attr", _HasAttr),
        ("get_attr_bool", ctypes.c_void_p),
        ("get_attr_int", _GetAttrInt),
    )


class _AotExtra(ctypes.Structure):
    """An object of that class: begins with the pointer to its table."""

    _fields_ = (("methods", ctypes.POINTER(_Methods)),)


def _aot_extra(attributes: Mapping[str, float]) -> _AotExtra:
    """An AotExtra with these attributes, which it takes along for as long as it lives."""
    pairs = (_as_attribute(name, value) for name, value in attributes.items())
    values = {key.encode(): value for key, value in pairs}
    methods = _Methods(
        has_attr=_HasAttr(lambda self, name: name[0] in values),
        get_attr_int=_GetAttrInt(lambda self, name: values[name[0]]),
    )
    return _AotExtra(ctypes.pointer(methods))
