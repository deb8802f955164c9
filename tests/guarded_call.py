"""Makes calls of C entries that are wrong in one way from valid calls."""

import mindspore
import numpy as np

from card import names_of, unwritten
from msops import Spec
from msops.testing import entry
from msops.testing.entry import Param

GUARD_BYTES = b"\xa5" * 256  # stand before and after each array


class GuardedCall:
    """Makes a Call as it is, or with changes. All arrays lie between guard bytes; an array without elements is null."""

    def __init__(self, call, capfd):
        self.operator, self.capfd, self.names = call.operator, capfd, names_of(call.operator)
        self.memory, self.params = {}, {}
        for name, array in call.params.items():
            held = array if name in self.names.inputs else unwritten(array.shape, array.dtype)
            memory = self.memory[name] = np.frombuffer(bytearray(GUARD_BYTES + held.tobytes() + GUARD_BYTES), np.uint8)
            pointer = memory.ctypes.data + len(GUARD_BYTES) if array.size else None
            self.params[name] = Param(pointer, array.shape, array.dtype.name)

    def bytes(self):
        """Returns the contents of the arrays and of their guard bytes."""
        return {name: memory.tobytes() for name, memory in self.memory.items()}

    def call(self, **changed):
        """Calls the entry, with some arguments of `entry.call` changed. Returns the status and the lines on stderr."""
        arguments = dict(arrays=list(self.params.values()), attributes=self.operator.attributes)
        status = entry.call(self.operator.entry, **{**arguments, **changed})
        return status, self.capfd.readouterr().err.splitlines()

    def refused(self, *expected, **changed):
        """Calls the entry with some arguments changed, which must fail with one of these statuses, say why, and write
        nothing."""
        before, what = self.bytes(), (self.operator.entry.name, changed)
        status, errors = self.call(**changed)
        assert status in expected, what
        assert len(errors) == 1, what
        assert errors[0].startswith(f"msops: {self.operator.entry.name}: "), what
        assert self.bytes() == before, what

    def refused_with(self, name, *expected, **fields):
        """Requires that the entry refuses a change to one parameter's fields."""
        params = {**self.params, name: self.params[name]._replace(**fields)}
        self.refused(*expected, arrays=list(params.values()))

    def refused_with_shapes(self, shapes, *expected):
        """Requires that the entry refuses other shapes."""
        params = {name: param._replace(shape=shapes.get(name, param.shape)) for name, param in self.params.items()}
        self.refused(*expected, arrays=list(params.values()))

    def fits(self, shapes=(), dtypes=()):
        """Tells whether the operator's rule still takes the inputs and promises the results when some of the parameters
        have other shapes or dtypes."""
        params = {
            name: (dict(shapes).get(name, param.shape), dict(dtypes).get(name, param.dtype))
            for name, param in self.params.items()
        }
        if any(n >= 2**60 for shape, _ in params.values() for n in shape):
            return False  # no memory can hold such an array
        specs = {name: Spec(shape, getattr(mindspore, dtype or "", None)) for name, (shape, dtype) in params.items()}
        try:
            outputs = self.operator.infer(*(specs[name] for name in self.names.inputs))
        except (TypeError, ValueError):
            return False
        return list(outputs[: len(self.names.results)]) == [specs[name] for name in self.names.results]
