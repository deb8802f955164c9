"""Has the methods of Tensors that MindSpore has for Ascend alone. graph.py brings them into graph mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Parameter, Tensor, ops

from msops.core.compiled import records_gradients
from msops.shared.generator import STEP, step

from . import creation, elementwise, places, random, reduction, shape
from .in_place import assign, copy_into, fills_memory, is_part, require_gradient, write_part

if TYPE_CHECKING:
    from collections.abc import Callable

    Method = Callable[..., Any]


def plain(function: Method, is_new: Callable[..., bool] | None = None) -> Callable[[Any], Method]:
    """Makes a method that is this function of the tensor. MindSpore's own method takes arguments that are not new."""

    def make(own: Any) -> Method:
        def method(self: Tensor, *arguments: Any, **named: Any) -> Any:
            if is_new is None or is_new(*arguments, **named):
                return function(self, *arguments, **named)
            return own(self, *arguments, **named)

        return method

    return make


def in_place(name: str, function: Method) -> Callable[[Any], Method]:
    """Makes a method that writes this function's result into the tensor, and returns it.

    Where a gradient is taken, the function gets a copy of what was there, and MindSpore's copy writes the result: it
    has a gradient, and MindSpore raises an error if what was there is needed elsewhere. For a part of another tensor
    it does not write into that tensor, and a Parameter keeps its own gradient: these are refused."""

    def make(_: Any) -> Method:
        def method(self: Tensor, *arguments: Any, **named: Any) -> Tensor:
            records, is_parameter = records_gradients(), isinstance(self, Parameter)
            if records and self.is_floating_point():
                require_gradient(self, f"mint.Tensor.{name}", "method without _")
            writes_by_copy = records and not is_part(self) and not is_parameter
            before = ops.deepcopy(self) if writes_by_copy else self
            result = ops.cast(function(before, *arguments, **named), self.dtype)
            if result.shape != self.shape:
                raise ValueError(f"mint.Tensor.{name}: the result's shape {result.shape} must be {self.shape}")
            if writes_by_copy:
                return copy_into(self, result)
            if is_part(self):
                return write_part(self, result)
            return assign(self, result)

        return method

    return make


def begins_with_dim(*arguments: Any, **named: Any) -> bool:
    """Tells `index_add(dim, index, source)` from the older `index_add(indices, y, axis)`."""
    return isinstance(arguments[0], int) if arguments else "dim" in named


def _has_new_names(*arguments: Any, **named: Any) -> bool:
    return not NEW_NAMES.isdisjoint(named)


def unflatten(self: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    dim = dim % self.ndim
    return self.reshape((*self.shape[:dim], *sizes, *self.shape[dim + 1 :]))


def new_full(self: Tensor, size: Any, fill_value: float, *, dtype: mindspore.Type | None = None) -> Tensor:
    return creation.full((size,) if isinstance(size, int) else tuple(size), fill_value, dtype or self.dtype)


def repeat(self: Tensor, *sizes: Any, repeats: Any = None) -> Tensor:
    given = repeats if not sizes else sizes[0] if len(sizes) == 1 else sizes
    return ops.tile(self, (given,) if isinstance(given, int) else tuple(given))


def expand(self: Tensor, *size: Any) -> Tensor:
    return ops.broadcast_to(self, tuple(size[0]) if isinstance(size[0], (tuple, list)) else size)


def transpose(self: Tensor, *axes: Any, dim0: int | None = None, dim1: int | None = None) -> Tensor:
    """Swaps two axes, or takes an order of all."""
    if dim1 is not None:
        return ops.swapaxes(self, axes[0] if axes else dim0, dim1)
    if len(axes) == 2:
        return ops.swapaxes(self, axes[0], axes[1])
    if len(axes) == 1:
        return ops.transpose(self, axes if isinstance(axes[0], int) else tuple(axes[0]))
    return ops.transpose(self, axes if axes else tuple(range(self.ndim - 1, -1, -1)))


def diag(self: Tensor, diagonal: int | None = None) -> Tensor:
    return ops.diag(self) if diagonal is None else creation.diag(self, diagonal)


def argmax(
    self: Tensor, dim: int | None = None, keepdim: bool = False, *, axis: int | None = None, keepdims: bool = False
) -> Tensor:
    return reduction.argmax(self, axis if dim is None else dim, keepdim or keepdims)


def masked_fill(self: Tensor, mask: Tensor, value: Any) -> Tensor:
    return self.masked_fill(mask, value)


def fill(self: Tensor, value: Any) -> Tensor:
    return ops.ones_like(self) * value if isinstance(value, Tensor) else ops.full_like(self, value)


def add(self: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    return ops.add(self, other if alpha == 1 else other * alpha)


def sub(self: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    return ops.sub(self, other if alpha == 1 else other * alpha)


def div(self: Tensor, other: Any, *, rounding_mode: str | None = None) -> Tensor:
    return ops.div(self, other, rounding_mode=rounding_mode)


def clamp(self: Tensor, min: Any = None, max: Any = None) -> Tensor:  # noqa: A002
    return ops.clamp(self, min, max)


def copy(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    return ops.broadcast_to(src, self.shape)


def index_fill(self: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    return ops.index_fill(self, dim, ops.cast(index, mindspore.int32), value)


def index_copy(self: Tensor, dim: int, index: Tensor, tensor: Tensor) -> Tensor:
    dim = dim % self.ndim
    places = index.reshape((*[1] * dim, -1, *[1] * (self.ndim - dim - 1)))
    return ops.tensor_scatter_elements(self, ops.broadcast_to(places, tensor.shape), tensor, dim)


def index_add(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    return shape.index_add(self, dim, index, source, alpha=alpha)


def scatter(self: Tensor, dim: int, index: Tensor, src: Any, reduce: str = "none") -> Tensor:
    return shape.scatter(self, dim, index, src, reduce)


def unique(
    self: Tensor,
    sorted: bool = True,  # noqa: A002
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    return mindspore.mint.unique(self, sorted, return_inverse, return_counts, dim)


def bernoulli(self: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
    from mindspore.common import generator as generators  # noqa: PLC0415 (old versions of MindSpore lack it)

    seed, offset = step(generator or generators.default_generator, STEP)
    return random.bernoulli(fill(self, p), seed, offset)


# The older form of these methods, which has kernels, calls these arguments axis, keepdims, ddof, or does not have them.
NEW_NAMES = frozenset(("dim", "keepdim", "correction", "decimals"))
PLAIN: dict[str, Method] = {
    "addcdiv": elementwise.addcdiv,
    "bitwise_not": elementwise.bitwise_not,
    "clone": shape.clone,
    "diag": diag,
    "floor_divide": elementwise.floor_divide,
    "kthvalue": reduction.kthvalue,
    "new_full": new_full,
    "repeat": repeat,
    "unflatten": unflatten,
    "unique": unique,
}
OF_DIM: dict[str, Method] = {"index_add": index_add, "scatter_add": shape.scatter_add}
OF_NEW_NAMES: dict[str, Method] = {
    "count_nonzero": reduction.count_nonzero,
    "nansum": reduction.nansum,
    "narrow": shape.narrow,
    "round": elementwise.round,
    "std": reduction.std,
    "var": reduction.var,
}
# Graph mode calls these functions, the second ones if an argument has a new name, those OF_DIM if `dim` is the first.
ALWAYS: dict[str, Method] = {
    **PLAIN,
    "argmax": argmax,
    "bitwise_and": elementwise.bitwise_and,
    "bitwise_or": elementwise.bitwise_or,
    "bitwise_xor": elementwise.bitwise_xor,
    "expand": expand,
    "repeat_interleave": shape.repeat_interleave,
    "transpose": transpose,
}
NAMED: dict[str, Method] = {
    **OF_NEW_NAMES,
    "argmin": reduction.argmin,
    "argsort": reduction.argsort,
    "chunk": shape.chunk,
    "cumsum": reduction.cumsum,
    "index_select": shape.index_select,
    "median": reduction.median_along,
    "sort": reduction.sort,
    "split": shape.split_evenly,
}
IN_PLACE: dict[str, Method] = {
    "add_": add,
    "bernoulli_": bernoulli,
    "clamp_": clamp,
    "div_": div,
    "erfinv_": elementwise.erfinv,
    "exp_": elementwise.exp,
    "fill_": fill,
    "fill_diagonal_": places.fill_diagonal,
    "floor_": lambda self: ops.floor(self),
    "floor_divide_": elementwise.floor_divide,
    "index_add_": index_add,
    "index_copy_": index_copy,
    "index_fill_": index_fill,
    "index_put_": places.index_put,
    "log_": elementwise.log,
    "masked_fill_": masked_fill,
    "masked_scatter_": places.masked_scatter,
    "mul_": lambda self, other: self * other,
    "put_": places.put,
    "scatter_": scatter,
    "scatter_add_": shape.scatter_add,
    "sub_": sub,
    "tanh_": elementwise.tanh,
    "zero_": lambda self: ops.zeros_like(self),
}
IN_GRAPH = frozenset(("add_", "div_", "floor_divide_", "mul_"))
WITHOUT_GRAPH = frozenset((*IN_PLACE, "random_")) - IN_GRAPH


def copy_(own: Any) -> Method:
    """Makes copy_. MindSpore's own lacks a kernel for GPUs in PyNative mode, and on the CPU writes nothing into a part
    of a tensor."""
    replaced = in_place("copy_", copy)(own)

    def method(self: Tensor, *arguments: Any, **named: Any) -> Tensor:
        is_own = mindspore.get_context("device_target") != "GPU" and fills_memory(self)
        return (own if is_own else replaced)(self, *arguments, **named)

    return method


def to(own: Any) -> Method | None:
    """Makes to, by which nn.Cell.to gives Parameters another dtype. On a GPU, MindSpore's own takes the dtype alone,
    without its name: else it copies, for which it has no kernel there."""

    def method(self: Tensor, *arguments: Any, **named: Any) -> Tensor:
        dtype = named.get("dtype", arguments[0] if len(arguments) == 1 else None)
        is_cast = isinstance(dtype, mindspore.Type) and not named.get("device") and not named.get("copy")
        if is_cast and mindspore.get_context("device_target") == "GPU":
            return ops.cast(self, dtype)
        return own(self, *arguments, **named)

    return own and method


def apply(own: Any) -> Method | None:
    """Makes _apply, by which nn.Cell.to gives Parameters new data. MindSpore's own keeps the shape and the dtype that
    an operator inferred of a Parameter's old data, and the next operators infer theirs from these."""

    def method(self: Any, fn: Method, recurse: bool = True) -> Any:
        def function(tensor: Tensor) -> Any:
            data = fn(tensor)
            if _takes_dtype_of(tensor, data):
                # Another dtype lets MindSpore infer anew. One element is converted, rather than all.
                tensor.data = Tensor([0], tensor.dtype)
                tensor.set_dtype(data.dtype)
            return data

        return own(self, function, recurse)

    return own and method


def _takes_dtype_of(tensor: Tensor, data: Any) -> bool:
    """Tells whether _apply writes other data of another dtype into a tensor, which it does in Parameters alone."""
    is_plain = isinstance(data, Tensor) and not hasattr(data, "__tensor_flatten__")
    if not (isinstance(tensor, Parameter) and is_plain and data is not tensor):
        return False
    return tensor.dtype != data.dtype and not (tensor.is_meta or data.is_meta)


METHODS: dict[str, Callable[[Any], Any]] = {
    "Tensor.copy_": copy_,
    "Tensor.to": to,
    "nn.Cell._apply": apply,
    **{f"Tensor.{name}": plain(function) for name, function in PLAIN.items()},
    **{f"Tensor.{name}": plain(function, begins_with_dim) for name, function in OF_DIM.items()},
    **{f"Tensor.{name}": plain(function, _has_new_names) for name, function in OF_NEW_NAMES.items()},
    **{f"Tensor.{name}": in_place(name, function) for name, function in IN_PLACE.items()},
}
