"""Calls C functions in PyNative mode as MindSpore calls operators of its own, in a part of ops.Custom's time.

MindSpore takes that way for extensions in C++ (`ops.CustomOpBuilder`). Here one extension, `fast_calls.cc`, serves all
operators. Nothing in it is for one device, although MindSpore offers such extensions for the CPU and Ascend only.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import sysconfig
import time
from pathlib import Path
from typing import Any, ClassVar

import mindspore
from mindspore import Parameter, Tensor, nn, ops

from ..compat import VERSION
from .build import Build, compiler_version, default_cache_folder, digest
from .primitive import Primitive
from .spec import Spec, dtype_name

_KEPT = 1000  # plans that a primitive keeps at most


class _State:
    extension: Any = None  # the module that `fast_calls.cc` is compiled to, once `prepare` has run
    tensors: frozenset[type] = frozenset()  # the types of what it takes: Tensor, and Parameters made from a Tensor
    precisions: ClassVar[list[Any]] = []  # the mixed precision of the Cells that run; the last one counts

    @classmethod
    def casts(cls) -> bool:
        """Tells whether MindSpore would cast the inputs of an operator."""
        return bool(cls.precisions) and cls.precisions[-1] != nn.cell.MixedPrecisionType.NOTSET


state = _State()


def use_fast_calls() -> None:
    """Makes calls of operators in PyNative mode take less time from now on, in this process.

    MindSpore calls a custom operator (`ops.Custom`) in another way than its own operators, which takes 35 to 58 us on
    the host of an H200. After this function a call takes 10 to 19 us, less than one of MindSpore's operators.
    Results and gradients do not change, except for last digits where an input is part of another Tensor: it is no
    longer copied, and where it is not aligned, sums may have another order.

    MindSpore's own operators change, too: in PyNative mode they copy an input that is a view of a Tensor, as the result
    of `reshape` is. Where the view has all elements in their order, they read it in place now. So a gradient that needs
    such an input raises MindSpore's error if the Tensor was written in place meanwhile, as for inputs that are no
    views, and `astype` to the same dtype returns the same memory.

    The function compiles an extension in C++ against MindSpore's headers. That takes some 20 s once; the extension is
    then kept where :func:`msops.load` keeps libraries. It needs g++, and Python's headers, such as those of the package
    `python3-dev`. A second call of the function does nothing.

    Calls still go through `ops.Custom` where MindSpore casts the inputs, in Cells with mixed precision
    (`Cell.to_float`, `amp`), where an input is neither a Tensor nor a Parameter, and where the C function of
    :func:`msops.custom_op` is not defined by `MSOPS_ENTRY`. Graph mode and `mindspore.jit` do
    not change.

    Raises:
        CompileError: If the extension does not compile.
        RuntimeError: If this is not MindSpore 2.10, for whose headers the extension is written, or there is no g++.
        OSError: If the folder of :func:`msops.load` cannot be written.

    Examples:
        >>> import mindspore, msops
        >>> mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
        >>> msops.use_fast_calls()  # doctest: +SKIP
        >>> print(msops.sigmoid(mindspore.Tensor([0.0], mindspore.float32)))
        [0.5]
    """
    prepare()
    Primitive.fast_call = call


def prepare() -> None:
    """Loads the extension, so that `call` can be called. Raises what `use_fast_calls` raises."""
    if state.extension is not None:
        return
    if VERSION != (2, 10):
        raise RuntimeError(f"use_fast_calls needs MindSpore 2.10, got {mindspore.__version__}")
    if not compiler_version("g++"):
        raise RuntimeError("use_fast_calls needs g++, which is not on the PATH")
    module = _load()
    executor: Any = mindspore.common.api._pynative_executor
    set_precision, clear = executor.set_mixed_precision_type, executor.clear_res

    def set_mixed_precision_type(kind: Any, is_push: bool = True) -> None:
        if is_push:
            state.precisions.append(kind)
        elif state.precisions:
            state.precisions.pop()
        set_precision(kind, is_push)

    def clear_res() -> None:  # after an exception
        state.precisions.clear()
        clear()

    executor.set_mixed_precision_type, executor.clear_res = set_mixed_precision_type, clear_res
    state.tensors = frozenset((Tensor, type(Parameter(Tensor(0.0)))))
    state.extension = module
    module.take_views()


def _load() -> Any:
    builder = ops.CustomOpBuilder("fast_calls", str(Path(__file__).with_suffix(".cc")))
    includes = [*builder.get_include_paths(), sysconfig.get_path("include")]
    flags = [each for each in builder.get_cflags() if each not in ("-pie", "-O2")]
    command = ["g++", *flags, "-O1", *(f"-isystem{folder}" for folder in includes)]
    libraries = [each for each in builder.get_ldflags() if each != "-shared"]
    source = Path(builder.source[0])
    texts = {str(source): source.read_bytes()}
    key = digest(command, libraries, compiler_version("g++"), mindspore.__version__, texts)
    build = Build(default_cache_folder(), f"fast_calls-{key}", command, texts, False, time.time(), libraries)
    path = str(build.find() or build.make())
    loader = importlib.machinery.ExtensionFileLoader("fast_calls", path)
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("fast_calls", loader, origin=path))
    loader.exec_module(module)
    return module


def call(primitive: Primitive, inputs: tuple[Any, ...]) -> Any:
    """Returns what the primitive returns, or NotImplemented where only ops.Custom does all that MindSpore asks for.

    That is where MindSpore compiles the call or casts the inputs.
    """
    # Other C functions may ask for what MindSpore offers beside the attributes, and for inputs that are aligned.
    if not primitive.is_entry or ops.primitive.jit_context() or state.casts():
        return NotImplemented
    if not state.tensors.issuperset(map(type, inputs)):
        return NotImplemented
    specs = tuple([Spec(x.shape, x.dtype) for x in inputs])
    plan = primitive.plans.get(specs)
    if plan is None:
        if len(primitive.plans) >= _KEPT:
            primitive.plans.clear()
        plan = primitive.plans[specs] = _plan(primitive, specs)
    if mindspore.common.api._pynative_executor.requires_grad():
        return plan.record(primitive.bprop, *inputs)
    return plan(*inputs)


def call_if_prepared(primitive: Primitive, inputs: tuple[Any, ...]) -> Any:
    """Calls a primitive in the fast way, also where a program has not asked for it, or else through ops.Custom."""
    outputs = NotImplemented if state.extension is None else call(primitive, inputs)
    return primitive(*inputs) if outputs is NotImplemented else outputs


def _plan(primitive: Primitive, specs: tuple[Spec, ...]) -> Any:
    state.extension.take_views()  # also for a device that MindSpore has loaded since
    operator = primitive.operator
    entry = operator.entry
    tensors = [*specs, *operator.infer(*specs)]
    return state.extension.Plan(
        f"{entry.library.path}:{entry.name}",
        ctypes.cast(getattr(entry.library.handle, entry.name), ctypes.c_void_p).value,
        {key: value for key, value in primitive.attrs.items() if isinstance(value, int)},
        [list(each.shape) for each in tensors],
        [dtype_name(each.dtype) for each in tensors],
        len(specs),
    )
