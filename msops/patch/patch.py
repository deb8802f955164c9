"""Lets operators of MindSpore, for which it has kernels on Ascend alone, run on GPU and CPU."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore
from mindspore import nn, ops

from . import models
from .gpu import kernels as gpu_kernels
from .mint.random import share_seed
from .replacement import Maker, called, put_method, refused
from .table import FUNCTIONS, METHODS, MINT, PRIMITIVES, REFUSED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType, TracebackType


class Replaced(NamedTuple):
    """A name of a module of MindSpore, the object that it stood for, and what it stands for now."""

    module: ModuleType
    name: str
    original: Any
    replacement: Any


_replaced: list[Replaced] = []  # while there are patches
_methods: list[tuple[type, str, Any]] = []  # a class, a name, and the class's own method of that name, or None
_patches: set[Patch] = set()  # that are not undone
_cache: Any = getattr(ops, "_primitive_cache", None)  # the module that makes each primitive once for PyNative mode
_refusals = {name: refused(name, instead) for name, instead in REFUSED.items()}


def patch_mindspore(mint: bool = True, kernels: bool = True) -> Patch:
    """Makes operators of MindSpore that have kernels on Ascend alone run on GPU and CPU.

    Afterwards `mindspore.ops.rms_norm`, `add_rms_norm`, `swiglu`, `rotary_position_embedding` and
    `flash_attention_score` run by msops' kernels: they take MindSpore's arguments, return what MindSpore documents, and
    have gradients, in both modes. What msops lacks of them, such as `drop_mask`, is an error. The same holds wherever
    else in MindSpore these names stand, such as in `mindspore.ops.auto_generate`, and for the primitives `RmsNorm`,
    `AddRmsNorm`, `Swiglu`, `RotaryPositionEmbedding`, `ApplyRotaryPosEmb`, `FlashAttentionScore` and `NpuGelu`.
    So do the operators of experts, such as `GroupedMatmul`, `MoeInitRoutingV2` and `moe_token_permute`, and those of
    caches in blocks and of inference, such as `PagedAttention`, `ReshapeAndCache`, `ops.incre_flash_attention`,
    `prompt_flash_attention` and `fused_infer_attention_score`. `NPUAllocFloatStatus`, `NPUClearFloatStatus` and
    `NPUGetFloatStatus` tell of no overflow, also as V2. Calls of other primitives of transformers for Ascend alone,
    such as `GroupTopk`, raise an error that says what to use instead. Names that a version of MindSpore does not have
    are left out. On Ascend nothing changes: choose the device first.

    On a GPU, `BiasAdd` of 1024 rows and more, as in `nn.Dense`, is `msops.add`: MindSpore's gradient takes 20 ms of an
    H200 for 2^18 rows. Layers of many outputs of float16 add their bias by cuBLASLt, before they round.

    The names of `mindspore.mint` run, too: those without kernels for GPU and CPU are composed of MindSpore's older
    operators or, where msops has a kernel, run by that. So does the primitive `AdamW`.

    RMSNorm, the rotation of queries and keys, attention, and gates of feed-forward layers, which model libraries such
    as mindone write out in each model, are recognized by their formulas, and run by msops' kernels. The tables of a
    rotation get no gradient then.

    On a GPU with MindSpore 2.10, MindSpore's own operators launch msops' kernels where these are faster, whoever calls
    them: arithmetic and comparisons of tensors, with broadcasting, `select` and `masked_fill`, reductions, transposes
    and other copies, `concat`, `split` and `stack`, `triu` and `tril`. This happens below MindSpore's functions,
    in both modes and in gradients, so that nothing else of them changes. In PyNative mode reshaped tensors are no
    longer copied for each kernel that reads them, as after :func:`msops.use_fast_calls`. This needs g++, once.
    In PyNative mode, `nn.AdamWeightDecay`, `nn.Adam`, `nn.Momentum`, `mint.optim` and `ops.clip_by_global_norm` take a
    few launches for all Parameters, instead of some for each.

    Patches may overlap: MindSpore's operators are back when all are undone, in whatever order.

    Args:
        mint (bool): Whether to replace what `mindspore.mint` calls, and the formulas of model libraries. Default:
            ``True`` .
        kernels (bool): Whether MindSpore's own operators launch msops' kernels, on a GPU. Default: ``True`` .

    Returns:
        Patch, with a method `undo()`; it is also a context manager, which undoes the patch at the end of its block. Its
        attribute `recognized` lists the functions of libraries that msops' operators compute, and `explain(model)` what
        of a model computes by itself, and why. Its attribute `kernels` lists the functions of MindSpore that launch
        msops' kernels, each with `name`, `operation` and `dtypes`. The list is empty where that is not possible: on the
        CPU, with other versions of MindSpore, without g++, and if msops' libraries were built without nvcc.

    Raises:
        NotImplementedError: If a function of this version of MindSpore takes other arguments than those that msops
            knows. Nothing is replaced then.

    Note:
        All modules that Python has loaded get the replacements, also those of other packages that hold a name by
        `from mindspore.ops import RmsNorm`. What the patch cannot see stays MindSpore's: objects that networks,
        classes and closures hold, and what MindSpore compiled before. So patch before networks are built. What a
        program imports or compiles during the patch stays msops'.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> x = mindspore.Tensor([[1.0, 2.0, 3.0]], mindspore.float32)
        >>> with msops.patch_mindspore():
        ...     y, rstd = ops.rms_norm(x, ops.ones(3))
        >>> print(y, rstd)
        [[0.46291 0.92582 1.38873]] [[0.46291]]
    """
    return Patch(mint, kernels)


class Patch:
    """Keeps MindSpore's names replaced until `undo`. See :func:`msops.patch_mindspore`."""

    def __init__(self, mint: bool, kernels: bool) -> None:
        self._wants_kernels = kernels
        if mindspore.get_context("device_target") == "Ascend":
            return
        _patches.add(self)
        try:
            _replace(mint)
            if kernels:
                gpu_kernels.put()
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Ends this patch; a second call does nothing."""
        if self in _patches:
            _patches.remove(self)
            if not any(patch._wants_kernels for patch in _patches):
                gpu_kernels.take_away()
            if not _patches:
                _restore()

    @property
    def recognized(self) -> list[models.Recognized]:
        """The functions and methods of libraries whose formulas msops' operators compute, each with the operator."""
        return models.recognized()

    @property
    def kernels(self) -> list[gpu_kernels.Kernel]:
        """The functions of MindSpore that launch msops' kernels now, because of this patch or of another one."""
        return gpu_kernels.replaced()

    def explain(self, model: nn.Cell) -> list[models.Left]:
        """Returns which functions and methods of a model's classes, and of their modules, compute by themselves, and
        why, also those that are recognized, but did so in some calls until now."""
        return models.left(model)

    def __enter__(self) -> Patch:  # noqa: PYI034 (Python 3.9 has no Self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def _replace(mint: bool) -> None:
    """Replaces what is not replaced yet."""
    if _cache:
        _cache.Primitive = Maker
    functions = {id(original): replacement for original, replacement in _functions(mint)}
    for module, name, value in list(_globals()):
        primitive = _primitive_of(value)
        replacement = functions.get(id(value)) or _refusal_of(value, primitive)
        if replacement is None and mint:
            replacement = PRIMITIVES.get(primitive) or _class_of(value)
        if replacement is not None and not _is_home(module, value, replacement):
            _put(module, name, value, replacement)
    replacements = {id(each.original): each.replacement for each in _replaced}
    for module, name, value in list(_globals(of_mindspore=False)):
        if id(value) in replacements:
            _put(module, name, value, replacements[id(value)])
    if mint and not _methods:
        _replace_methods()
        models.watch()


def _is_home(module: ModuleType, own: Any, replacement: Any) -> bool:
    """Tells whether a module defines the class that another one extends: there it is the C of `super(C, self)`."""
    extends = inspect.isclass(own) and inspect.isclass(replacement) and issubclass(replacement, own)
    return extends and module.__name__ == own.__module__


def _put(module: ModuleType, name: str, original: Any, replacement: Any) -> None:
    _replaced.append(Replaced(module, name, original, replacement))
    setattr(module, name, replacement)


def _refusal_of(value: Any, primitive: str) -> Any:
    """Returns what stands for a primitive that msops refuses, or for its class; None for all else."""
    if isinstance(value, type):
        return _refusals.get(value.__name__) if issubclass(value, ops.Primitive) else None
    refusal = _refusals.get(primitive)
    return refusal and refusal()


def _class_of(value: Any) -> Any:
    """Returns what stands for the class of a primitive of mint, but for those of mindspore.ops, which have kernels."""
    if not isinstance(value, type) or not issubclass(value, ops.Primitive):
        return None
    function = None if hasattr(ops, value.__name__) else PRIMITIVES.get(value.__name__)
    return function and called(value, function)


def _replace_methods() -> None:
    for path, make in METHODS.items():
        *folders, name = path.split(".")
        owner: Any = mindspore
        for folder in folders:
            owner = getattr(owner, folder, None)
        replacement = None if owner is None else make(getattr(owner, name, None))
        if replacement is not None:
            _methods.append((owner, name, vars(owner).get(name)))
            put_method(owner, name, replacement)
    if hasattr(mindspore, "default_generator"):
        share_seed(mindspore.default_generator)


def _restore() -> None:
    """Restores what is still replaced, also in modules that were imported since then."""
    by_identity = {id(each.replacement): each for each in reversed(_replaced)}
    by_name = {(each.name, id(each.replacement)): each for each in _replaced}
    by_place = {(each.module.__name__, each.name): each for each in _replaced}
    for module, name, value in list(_globals()):
        if id(value) in by_identity:
            found = by_place.get((module.__name__, name)) or by_name.get((name, id(value))) or by_identity[id(value)]
            setattr(module, name, found.original)
    for module, name, value in list(_globals(of_mindspore=False)):
        place = by_place.get((module.__name__, name))
        if place and place.replacement is value:
            setattr(module, name, place.original)
    _replaced.clear()
    if _cache:
        _cache.Primitive = ops.Primitive
    for owner, name, method in _methods:
        if method is None:
            delattr(owner, name)
        else:
            setattr(owner, name, method)
    _methods.clear()
    models.restore()


def _functions(mint: bool) -> list[tuple[Any, Callable[..., Any]]]:
    """Returns MindSpore's own objects of the table that are not replaced yet, and what replaces them."""
    found = []
    for name, replacement in {**FUNCTIONS, **(MINT if mint else {})}.items():
        *folders, last = name.split(".")
        place: Any = mindspore if folders[:1] == ["mint"] else ops
        for folder in folders:
            place = getattr(place, folder, None)
        original = getattr(place, last, None)
        if original is None or original is replacement:
            continue
        if inspect.isfunction(original) and not _accepts(replacement, original):
            if name in MINT:  # other versions of MindSpore keep their own
                continue
            raise NotImplementedError(
                f"patch_mindspore: mindspore.ops.{name} takes ({', '.join(_parameters(original))}) in MindSpore "
                f"{mindspore.__version__}, msops replaces the one that takes ({', '.join(_parameters(replacement))})"
            )
        if inspect.isfunction(replacement) and not replacement.__doc__:  # help() shows what MindSpore says of it
            replacement.__doc__ = original.__doc__
        found.append((original, replacement))
    return found


def _accepts(replacement: Callable[..., Any], original: Callable[..., Any]) -> bool:
    """Tells whether two functions have the same parameters, as far as MindSpore's own function names them."""
    return _parameters(original) in (["args", "kwargs"], _parameters(replacement))


def _primitive_of(value: Any) -> str:
    """Returns the name of the primitive that an object of MindSpore calls with its arguments, or ""."""
    if isinstance(value, ops.Primitive):
        return value.name
    name = type(value).__name__
    return name[len("_Pyboost") : -len("Prim")] if name.startswith("_Pyboost") and name.endswith("Prim") else ""


def _globals(of_mindspore: bool = True) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yields the globals of MindSpore's modules, or of all modules but these and msops' own."""
    for path, module in list(sys.modules.items()):
        package = path.partition(".")[0]
        if (package == "mindspore") if of_mindspore else (package not in ("mindspore", "msops")):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                yield module, name, value


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)
