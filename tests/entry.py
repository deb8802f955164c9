"""Calls the C entries of the libraries as MindSpore does, but without MindSpore.

    status = call("sigmoid", "SigmoidForward", [x, y])

Arrays are NumPy's or, together with a stream, torch's on the GPU. What is called often is prepared once:

    run = prepare("add", "AddForward", [x, y, out], stream=torch.cuda.current_stream().cuda_stream or DEFAULT_STREAM)
    for _ in range(100):
        run()
"""

import ctypes
import enum
import functools
from pathlib import Path
from typing import NamedTuple

LIBRARIES = Path(__file__).resolve().parents[1] / "msops" / "lib"
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
    shape: tuple | None
    dtype: str | None
    rank: int | None = None  # None: the shape's

    @classmethod
    def of(cls, array):
        """The Param of an array of NumPy or torch; a Param is left as it is."""
        if isinstance(array, cls):
            return array
        of_torch = hasattr(array, "data_ptr")
        if not (array.is_contiguous() if of_torch else array.flags.c_contiguous):
            raise ValueError("an entry takes contiguous arrays only")
        pointer = array.data_ptr() if of_torch else array.ctypes.data
        return cls(pointer, tuple(array.shape), str(array.dtype).split(".")[-1])


def call(library, entry, arrays, attributes=(), stream=None):
    """Calls an entry once and returns its Status. Takes what `prepare` takes."""
    return Status(prepare(library, entry, arrays, attributes, stream)())


def prepare(library, entry, arrays, attributes=(), stream=None):
    """Returns a function without arguments that calls an entry and returns its status as an int.

    Args:
        library (str): Its name in msops/lib, or the absolute path of another build without ".so".
        entry (str): The C function.
        arrays (list): The parameters: inputs, then outputs. Arrays, or Params of memory that the caller keeps alive.
        attributes (dict): Integers by their names, without "msops_". None: a null pointer instead of the object.
        stream (int): The handle of a CUDA stream. None: the CPU.
    """
    params = [Param.of(array) for array in arrays]
    shapes = [(ctypes.c_int64 * len(p.shape))(*p.shape) if p.shape else None for p in params]  # rank 0: null, too
    ranks = [len(p.shape) if p.rank is None else p.rank for p in params]
    dtypes = [p.dtype if p.dtype is None else p.dtype.encode() for p in params]
    n = len(params)
    run = functools.partial(
        getattr(load(library), entry),
        ctypes.c_int(n),
        (ctypes.c_void_p * n)(*(p.pointer for p in params)),
        (ctypes.c_int * n)(*ranks),
        (ctypes.POINTER(ctypes.c_int64) * n)(*shapes),
        (ctypes.c_char_p * n)(*dtypes),
        ctypes.c_void_p(stream),
        None if attributes is None else ctypes.byref(_aot_extra(dict(attributes))),
    )
    run.arrays = arrays  # live as long as `run`
    return run


@functools.cache
def load(library):
    """The library as ctypes sees it."""
    return ctypes.CDLL(str(LIBRARIES / f"{library}.so"))


def has_gpu_code(library):
    """Whether nvcc built the library."""
    return b"nv_fatbin" in (LIBRARIES / f"{library}.so").read_bytes()


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


def _aot_extra(attributes):
    """An AotExtra with these attributes, which it takes along for as long as it lives."""
    values = {f"msops_{name}".encode(): value for name, value in attributes.items()}
    methods = _Methods(
        has_attr=_HasAttr(lambda self, name: name[0] in values),
        get_attr_int=_GetAttrInt(lambda self, name: values[name[0]]),
    )
    return _AotExtra(ctypes.pointer(methods))
