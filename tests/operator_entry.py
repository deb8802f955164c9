"""Calls the C entry of an Operator with arrays of NumPy or torch, without MindSpore's runtime."""

import mindspore

from entry import DEFAULT_STREAM, prepare
from msops import Spec

_DTYPES = {"float16": mindspore.float16, "float32": mindspore.float32, "float64": mindspore.float64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def outputs_of(operator, inputs):
    """(shape, dtype's name) of each output, scratch included, for inputs with `.shape` and `.dtype`."""
    specs = operator.infer(*(Spec(tuple(x.shape), _DTYPES[str(x.dtype).split(".")[-1]]) for x in inputs))
    return [(spec.shape, _NAMES[spec.dtype]) for spec in specs]


def prepare_operator(operator, arrays, stream=DEFAULT_STREAM):
    """The prepared call (see entry.prepare) with inputs and outputs; on a GPU's `stream` for torch's arrays there."""
    library, entry = operator.entry
    stream = stream if getattr(arrays[0], "is_cuda", False) else None
    return prepare(library.path.with_suffix(""), entry, arrays, operator.attributes, stream)
