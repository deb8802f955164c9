"""Defines what MindSpore runs for an operator: a primitive that returns the outputs and scratch of its C function."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, ClassVar

import mindspore
from mindspore import nn, ops
from mindspore.common import dtype as mstype
from mindspore.ops import signature as sig

from ..compat import VERSION
from . import open_sizes
from .abi import as_attribute
from .compiled import forget_recording
from .gradients import make_bprop
from .inputs import describe, spec_of
from .spec import Spec, from_inference

if TYPE_CHECKING:
    from collections.abc import Callable

    from .definition import Definition

_LABEL = 64  # characters, which Call of aot_kernels/common/call.h has room for
_KEPT = 1000  # results of inference that a primitive keeps at most
# In PyNative mode, calls of ops.Custom from several threads take each other's inputs now and then.
_one_at_a_time = threading.RLock()


def _keep_dtypes(on: bool) -> None:
    """Begins or ends to let PyNative mode run operators in the dtypes that they get, also where MindSpore would cast
    floating ones. After an error, MindSpore forgets by itself what has begun."""
    push = getattr(mindspore.common.api._pynative_executor, "set_mixed_precision_type", None)
    kinds = getattr(nn.cell, "MixedPrecisionType", None)
    if push and kinds:  # not in MindSpore 1.10
        push(kinds.NOTSET, on)


class Primitive(ops.Custom):
    """A call of an operator's C function. Unlike the operator, it also returns scratch, after the outputs."""

    fast_call: ClassVar[Callable[[Primitive, tuple[Any, ...]], Any] | None] = None  # `use_fast_calls` sets it

    def __init__(self, operator: Definition) -> None:
        if operator is not self:  # see PlainOperator
            self.operator = operator
        # Results of inference are kept, since PyNative mode asks for them at each call: inference takes some 50 us.
        self._inferred: dict[tuple[Spec | str, ...], tuple[Any, Any, bool, list[mindspore.Type]]] = {}
        # Where an input has the dtype of sums, mixed precision may not cast it.
        self.keeps_dtypes = any(tensor.dtype == "accumulator" for tensor in operator.signature.inputs)
        self.plans: dict[tuple[Spec, ...], Any] = {}  # see fast_calls
        entry, tensors = operator.entry, (*operator.signature.outputs, *operator.signature.scratch)
        # MindSpore requires rules for shape and dtype here, but then asks __infer__ below for both.
        variable = entry.library.variable if VERSION >= (2, 7) else None
        function = f"{variable or entry.library.path}:{entry.name}"
        super().__init__(function, (), mindspore.float32, func_type="aot", bprop=make_bprop(operator))
        if variable:
            self.add_prim_attr("path_from_env", True)
        # This needs MindSpore 2.7: in PyNative mode, 2.0 also asks the C function once a place has seen several shapes.
        self.is_entry = open_sizes.offer_rule(entry)  # of MSOPS_ENTRY
        self._has_open_sizes = self.is_entry and VERSION >= (2, 7) and variable is None
        if self._has_open_sizes:
            self.add_prim_attr("reg_op_name", operator.label)
            self.add_prim_attr("multi_output", len(tensors) > 1)
            self.add_prim_attr("output_names", [tensor.name for tensor in tensors])
        self.add_prim_attr("msops_operator", operator.number)
        # The C function's errors begin with the label. It travels as ints, as all attributes do, of 8 characters each.
        label = operator.label.encode()[:_LABEL]
        for i in range(0, len(label), 8):
            part = label[i : i + 8].ljust(8, b"\0")
            self.add_prim_attr(f"label_of_msops_{i // 8}", int.from_bytes(part, "little", signed=True))
        for key, value in operator.attributes.items():
            self.add_prim_attr(*as_attribute(key, value))
        if writes := operator.attributes.get("writes", 0):
            self._keep_writes(int(writes), operator.names()[0])

    def _keep_writes(self, writes: int, inputs: list[str]) -> None:
        """Tells MindSpore that the C function writes the first inputs in place, so many of them: graph mode then keeps
        the order of what reads and writes a Parameter, leaves no call out, and hands over no copy of it."""
        self.add_prim_attr("side_effect_mem", True)
        kinds = [sig.sig_rw.RW_WRITE] * writes + [sig.sig_rw.RW_READ] * (len(inputs) - writes)
        self.set_signatures(self._fill_signature([sig.make_sig(*each) for each in zip(inputs, kinds)]))
        self.keeps_dtypes = True

    def __call__(self, *inputs: Any) -> Any:
        fast_call = Primitive.fast_call
        outputs = NotImplemented if fast_call is None else fast_call(self, inputs)
        if outputs is not NotImplemented:
            return outputs
        with _one_at_a_time:
            try:
                return self._run(inputs)
            except RuntimeError:  # such as of an int beyond 64 bits, before MindSpore asks for inference
                if any(isinstance(x, int) for x in inputs):
                    self.operator.infer(*(spec_of(describe(x)) for x in inputs))
                raise

    def _run(self, inputs: tuple[Any, ...]) -> Any:
        if self.keeps_dtypes:
            _keep_dtypes(True)
        outputs = super().__call__(*inputs)
        if self.keeps_dtypes:
            _keep_dtypes(False)
        return outputs

    def __infer__(self, *inputs: dict[str, Any]) -> dict[str, Any]:
        operator = self.operator
        forget_recording()
        operator.entry.library.restore()  # MindSpore may make a kernel next, which needs the file
        specs = tuple(map(from_inference, inputs))
        kept = self._inferred.get(specs)
        if kept is None:
            if any(isinstance(spec, str) and spec.startswith("Keyword[") for spec in specs):
                raise TypeError(operator.without_names)
            tensors = [spec for spec in specs if isinstance(spec, Spec)]
            is_open = self._has_open_sizes and len(tensors) == len(specs) and open_sizes.is_open(tensors)
            outputs = open_sizes.infer(operator.label, operator.infer, tensors) if is_open else operator.infer(*specs)
            shapes, dtypes = zip(*((out.shape, mstype.typing.TensorType(out.dtype)) for out in outputs))
            shape, dtype = (shapes[0], dtypes[0]) if len(outputs) == 1 else (shapes, dtypes)
            kept = shape, dtype, is_open, [spec.dtype for spec in tensors]
            if len(self._inferred) >= _KEPT:
                self._inferred.clear()
            self._inferred[specs] = kept
        shape, dtype, is_open, operator.input_dtypes = kept
        if is_open:
            # MindSpore hands what is added here to its copy of the primitive for this place in the graph. There the
            # attribute makes it ask the C function when the graph runs; this object must not keep it.
            self.add_prim_attr("cpp_infer_shape", True)
            self.del_prim_attr("cpp_infer_shape")
        return {"shape": shape, "dtype": dtype, "value": None}

    def _clone(self) -> Primitive:
        """Makes the copy that MindSpore uses for one place in a graph."""
        return Primitive(self.operator)

    # pytest and debuggers ask for these where __init__ failed, so that MindSpore's part of the object does not exist.
    def __repr__(self) -> str:
        return f"Primitive({self.operator!r})"

    def __getattr__(self, name: str) -> Any:
        if "attrs" not in self.__dict__:
            raise AttributeError(f"{self!r} has no attribute {name!r}, since it could not be made")
        return super().__getattr__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self  # Cells with equal settings share it anyway
