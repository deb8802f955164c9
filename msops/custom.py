"""From an entry of one of our libraries to a MindSpore operator."""

import ctypes
import functools
from pathlib import Path

import mindspore
from mindspore import ops
from mindspore.common import dtype as mstype

from . import check

_LIBRARIES = Path(__file__).resolve().parent / "lib"
_loaded = []  # MindSpore loads a library at its first call, and unloads it after its last; held here, it stays


def load(name):
    """Loads the library of `aot_kernels/<name>.cu` and returns its path."""
    path = str(_LIBRARIES / f"{name}.so")
    try:
        _loaded.append(ctypes.CDLL(path))
    except OSError as error:
        raise ImportError(
            f"msops cannot load its kernels: {error}. Build them with 'make all' in msops' source folder."
        ) from None
    return path


class Operator(ops.Custom):
    """The C function `entry` of a library as a primitive for both modes and devices.

    Args:
        library (str): A path from :func:`load`.
        entry (str): The C function.
        infer (callable): `infer(*specs, **attributes)` takes the :class:`check.Spec` of each input, raises TypeError or
            ValueError if they do not fit, and returns the Spec of the output, or a list of several. MindSpore keeps its
            results by the primitive's attributes: it must not depend on anything else.
        bprop (callable): The gradient, a method of a Cell without Parameters, which would live as long as the operator.
            MindSpore keeps it by the attributes, too. Default: none.
        attributes: Integers that the entry reads as `msops_<name>`, and that `infer` gets.
    """

    def __init__(self, library, entry, infer, bprop=None, **attributes):
        # MindSpore wants rules for shape and dtype, but asks __infer__ below for both.
        super().__init__(f"{library}:{entry}", (), mindspore.float32, func_type="aot", bprop=bprop)
        self.infer = functools.partial(infer, **attributes)
        for name, value in attributes.items():
            self.add_prim_attr(f"msops_{name}", value)

    def __deepcopy__(self, memo):
        return self  # nothing in it changes

    def __infer__(self, *inputs):
        outputs = self.infer(*map(check.from_inference, inputs))
        if isinstance(outputs, check.Spec):
            shape, dtype = outputs.shape, mstype.TensorType(outputs.dtype)
        else:
            shape, dtype = zip(*((out.shape, mstype.TensorType(out.dtype)) for out in outputs))
        return {"shape": shape, "dtype": dtype, "value": None}


def shared(make):
    """Decorates a function of constants that makes an operator, for calls in either mode; it makes equal ones once."""
    return ops.constexpr(functools.cache(make))


def scratch(dtype, *shape):
    """An extra output for sums over elements of `dtype`."""
    return check.Spec(shape, mindspore.float64 if dtype == mindspore.float64 else mindspore.float32)
