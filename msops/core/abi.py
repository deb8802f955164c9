"""Calls C functions as MindSpore does, with ctypes. The standard library is enough, so that msops/testing/worker.py
starts fast."""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT_STREAM = 1  # cudaStreamLegacy: CUDA's default stream; its other handle, null, would mean the CPU


class Param(NamedTuple):
    """Tells an entry about an array, truly or not. None in one of the first three fields is a null pointer."""

    pointer: int | None
    shape: tuple[int, ...] | None
    dtype: str | None
    rank: int | None = None  # None means the rank of the shape

    @classmethod
    def of(cls, array: Any) -> Param:
        """Returns the Param of an array of NumPy or torch; a Param is returned as it is."""
        if isinstance(array, cls):
            return array
        has_pointer = hasattr(array, "data_ptr")
        if not (array.is_contiguous() if has_pointer else array.flags.c_contiguous):
            raise ValueError("an entry takes contiguous arrays only")
        pointer = array.data_ptr() if has_pointer else array.ctypes.data
        return cls(pointer, tuple(array.shape), str(array.dtype).split(".")[-1])


def prepare_call(
    function: Any, params: Sequence[Param], attributes: Mapping[str, int] | None, stream: int | None
) -> functools.partial[int]:
    """Prepares a call of a C function, which returns its status. `attributes` are named as MindSpore names them; None
    passes a null pointer instead of the object that has them."""
    n = len(params)
    return functools.partial(
        function,
        ctypes.c_int(n),
        (ctypes.c_void_p * n)(*(p.pointer for p in params)),
        *_description(params),
        ctypes.c_void_p(stream),
        None if attributes is None else ctypes.byref(_aot_extra(attributes)),
    )


def ask_shapes(function: Any, params: Sequence[Param], attributes: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Returns the shapes that the function of an MSOPS_SCRATCH (aot_kernels/common/scratch.h) computes from inputs.

    Raises:
        ValueError: If the function refuses the inputs.
    """
    room = 256
    sizes, message = (ctypes.c_int64 * room)(), ctypes.create_string_buffer(256)
    extra = ctypes.byref(_aot_extra(attributes))
    count = function(ctypes.c_int(len(params)), *_description(params), extra, sizes, ctypes.c_int(room), message)
    if count < 0:
        raise ValueError(message.value.decode())
    numbers = iter(sizes)
    return [tuple(itertools.islice(numbers, next(numbers))) for _ in range(count)]


def as_attribute(key: str, value: float) -> tuple[str, int]:
    """Returns name and value of the MindSpore attribute that carries one of ours.

    MindSpore's own float attributes lose digits, so a float is passed as its 64 bits.
    """
    if isinstance(value, int):
        return f"msops_{key}", int(value)
    return f"msops_float_{key}", struct.unpack("q", struct.pack("d", value))[0]


def _description(params: Sequence[Param]) -> tuple[Any, Any, Any]:
    """Returns the ranks, shapes and dtypes of tensors as a C function takes them."""
    shapes: list[Any]
    shapes = [(ctypes.c_int64 * len(p.shape))(*p.shape) if p.shape else None for p in params]  # rank 0 has a null shape
    ranks = [len(p.shape or ()) if p.rank is None else p.rank for p in params]
    dtypes = [p.dtype if p.dtype is None else p.dtype.encode() for p in params]
    n = len(params)
    return (
        (ctypes.c_int * n)(*ranks),
        (ctypes.POINTER(ctypes.c_int64) * n)(*shapes),
        (ctypes.c_char_p * n)(*dtypes),
    )


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
    """An object of AotExtra; it begins with the pointer to its table."""

    _fields_ = (("methods", ctypes.POINTER(_Methods)),)


def _aot_extra(attributes: Mapping[str, int]) -> _AotExtra:
    """Makes an AotExtra with these attributes, which it keeps as long as it lives."""
    values = {key.encode(): value for key, value in attributes.items()}
    methods = _Methods(
        has_attr=_HasAttr(lambda self, name: name[0] in values),
        get_attr_int=_GetAttrInt(lambda self, name: values[name[0]]),
    )
    return _AotExtra(ctypes.pointer(methods))
