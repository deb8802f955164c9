"""Computes products of matrices, and what belongs to them."""

from __future__ import annotations

import math
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

from msops.core.compiled import compiling, is_on_gpu, once, records_gradients, wants_gradient
from msops.core.inputs import has_zero
from msops.operators.add import add
from msops.operators.linear import linear
from msops.patch.replacement import Choice

from .creation import eye
from .elementwise import COMPLEX
from .in_place import copy_into

_BatchMatMul, _BiasAdd = ops.BatchMatMul, ops.BiasAdd
_own_cdist = ops.cdist
_generated: Any = getattr(ops, "auto_generate", None)
_own_matmul: Any = getattr(_generated, "matmul_ext", None)
_Dense: Any = getattr(ops, "Dense", None)
_bmm = ops.BatchMatMul()
MANY_ROWS = 1024
_MANY = 2**20  # outputs


class BatchMatMul(Choice):
    """Multiplies matrices, whose axes before the last two broadcast, as they do on Ascend."""

    def __init__(self, transpose_a: bool = False, transpose_b: bool = False) -> None:
        self.transpose_a, self.transpose_b = transpose_a, transpose_b
        self.own = _BatchMatMul(transpose_a, transpose_b)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = with_terms(x, -2 if self.transpose_a else -1), with_terms(y, -1 if self.transpose_b else -2)
        if x.shape[:-2] == y.shape[:-2]:
            return self.own(x, y)
        return ops.matmul(x.swapaxes(-1, -2) if self.transpose_a else x, y.swapaxes(-1, -2) if self.transpose_b else y)


class BiasAdd(Choice):
    """Adds a bias to each row or channel. MindSpore's gradient of a bias of many rows takes a GPU long: it adds up 13
    columns in one block."""

    def __init__(self, data_format: str = "NCHW") -> None:
        self.own = _BiasAdd(data_format)

    def __call__(self, input_x: Tensor, bias: Tensor) -> Tensor:
        if is_on_gpu() and input_x.ndim == 2 and input_x.shape[0] >= MANY_ROWS and input_x.dtype == bias.dtype:
            return add(input_x, bias)
        return self.own(input_x, bias)


class Dense(Choice):
    """Multiplies, and adds a bias, by one kernel of cuBLASLt where MindSpore has two and there is much to add."""

    def __init__(self) -> None:
        self.own = _Dense()

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        if bias is not None and is_on_gpu() and _adds_bias_at_once(input, weight, bias):
            return linear(input, weight, bias)
        return self.own(input, weight, bias)


def with_terms(x: Tensor, axis: int) -> Tensor:
    """Returns a factor with one term, 0, along an axis that has none: MindSpore's kernels would leave the sum open."""
    if has_zero(x.shape[axis]):
        axis = axis % x.ndim
        return ops.zeros((*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.dtype)
    return x


def matmul(input: Tensor, other: Tensor) -> Tensor:  # noqa: A002
    return _own_matmul(with_terms(input, -1), with_terms(other, -1 if other.ndim == 1 else -2))


def mm(input: Tensor, mat2: Tensor) -> Tensor:  # noqa: A002
    return ops.matmul(with_terms(input, -1), with_terms(mat2, -2))


def bmm(input: Tensor, mat2: Tensor) -> Tensor:  # noqa: A002
    return _bmm(with_terms(input, -1), with_terms(mat2, -2))


_layer: Any = Dense() if _Dense else None


def dense(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    return _layer(with_terms(input, -1), with_terms(weight, -1), bias)


def layer_of_cell(self: Any, x: Tensor) -> Tensor:
    """Replaces the construct of nn.Dense: one kernel adds its bias where Dense says."""
    shape = x.shape
    may_run = self.has_bias and is_on_gpu() and (compiling() or _is_as_made(self))
    if may_run and _adds_bias_at_once(x, self.weight, self.bias):
        y = linear(x, self.weight, self.bias)
    else:
        y = self.matmul(x if len(shape) == 2 else self.reshape(x, (-1, shape[-1])), self.weight)
        if self.has_bias:
            y = self.bias_add(y, self.bias)
        if len(shape) != 2:
            y = self.reshape(y, (*shape[:-1], y.shape[-1]))
    if self.activation_flag:
        y = self.activation(y)
    return y


def _is_as_made(cell: Any) -> bool:
    """Tells whether a nn.Dense has MindSpore's operators, and not those that a library put in their places."""
    return type(cell.matmul) is ops.MatMul and type(cell.bias_add) in (_BiasAdd, BiasAdd)


def _adds_bias_at_once(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Tells whether cuBLASLt shall add the bias of a layer. Where no gradient of the weight is asked for, as beside
    LoRA's adapters, MindSpore's operators compute less."""
    if not _has_many_halves(x.shape, x.dtype, weight.shape, weight.dtype, bias.shape, bias.dtype):
        return False
    return wants_gradient(weight) or not records_gradients()


@once
def _has_many_halves(x: Any, x_dtype: Any, weight: Any, weight_dtype: Any, bias: Any, bias_dtype: Any) -> bool:
    """Tells whether there are so many outputs of float16 that a pass over them takes a while."""
    if any(shape is None or None in shape for shape in (x, weight, bias)) or len(x) < 2 or len(weight) != 2:
        return False
    fits = x[-1] == weight[1] > 0 and bias == weight[:1]
    is_half = x_dtype == weight_dtype == bias_dtype == mindspore.float16
    return fits and is_half and math.prod(x[:-1]) * weight[0] >= _MANY


def mv(input: Tensor, vec: Tensor) -> Tensor:  # noqa: A002
    return mm(input, vec.expand_dims(1)).squeeze(1)


def dot(input: Tensor, other: Tensor) -> Tensor:  # noqa: A002
    return (input * other).sum()


def vdot(input: Tensor, other: Tensor) -> Tensor:  # noqa: A002
    """Multiplies by the conjugate of the first."""
    return dot(ops.conj(input) if input.dtype in COMPLEX else input, other)


def outer(input: Tensor, vec2: Tensor) -> Tensor:  # noqa: A002
    return ops.mul(input.expand_dims(1), vec2.expand_dims(0))


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:  # noqa: A002
    return _plus(input, beta, mm(mat1, mat2), alpha)


def _plus(x: Tensor, beta: float, product: Tensor, alpha: float) -> Tensor:
    """Returns x beta + product alpha, where x is not read if beta is 0."""
    scaled = product if alpha == 1 else ops.mul(product, alpha)
    if beta == 0:
        return scaled
    return ops.add(x if beta == 1 else ops.mul(x, beta), scaled)


def addr_in_place(input: Tensor, vec1: Tensor, vec2: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:  # noqa: A002
    """Writes input beta + vec1 vec2ᵀ alpha into the input, which is not read if beta is 0."""
    product = outer(vec1, vec2) * alpha
    result = product if beta == 0 else ops.deepcopy(input) * beta + product
    return copy_into(input, ops.cast(result, input.dtype))


def addmv(input: Tensor, mat: Tensor, vec: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:  # noqa: A002
    return _plus(input, beta, mv(mat, vec), alpha)


def addbmm(input: Tensor, batch1: Tensor, batch2: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:  # noqa: A002
    return _plus(input, beta, bmm(batch1, batch2).sum(0), alpha)


def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:  # noqa: A002
    return _plus(input, beta, bmm(batch1, batch2), alpha)


def cross(input: Tensor, other: Tensor, dim: int | None = None) -> Tensor:  # noqa: A002
    shape = ops.broadcast_to(input, other.shape).shape if input.ndim <= other.ndim else input.shape
    if dim is None or dim == -65530:  # MindSpore's word for the first axis of three elements
        dim = shape.index(3)
    a, b = ops.unbind(ops.broadcast_to(input, shape), dim), ops.unbind(ops.broadcast_to(other, shape), dim)
    return ops.stack((a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]), dim)


def trace(input: Tensor) -> Tensor:  # noqa: A002
    n = min(input.shape)
    return (input[:n, :n] * eye(n, n, input.dtype)).sum()


def inverse(input: Tensor) -> Tensor:  # noqa: A002
    return ops.inverse(input)


def qr(A: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:  # noqa: N803
    if mode not in ("reduced", "complete", "r"):
        raise ValueError(f"mint.linalg.qr: mode must be 'reduced', 'complete' or 'r', got {mode!r}")
    m, n = A.shape[-2:]
    if m < n:
        q, r = _reduced_qr(A[..., :m])
        r = ops.concat((r, ops.matmul(ops.swapaxes(q, -1, -2), A[..., m:])), -1)
    elif m == n or mode != "complete":
        q, r = _reduced_qr(A)
    else:  # MindSpore's kernel for GPUs leaves the other columns of q open. More columns of A determine them.
        more = ops.broadcast_to(eye(m, m - n, A.dtype), (*A.shape[:-1], m - n))
        q, r = _reduced_qr(ops.concat((A, more), -1))
        r = r[..., :n]
    return (ops.zeros((0,), A.dtype), r) if mode == "r" else (q, r)


class ReducedQr(nn.Cell):
    """Factors matrices that have no more columns than rows. MindSpore has no gradient of that."""

    def construct(self, a: Tensor) -> tuple[Tensor, Tensor]:
        return ops.qr(a, "reduced")

    def bprop(self, a: Tensor, out: tuple[Tensor, Tensor], dout: tuple[Tensor, Tensor]) -> tuple[Tensor]:
        """Computes da = (dq + q s) r⁻ᵀ, where s is the lower triangle of m = r drᵀ - dqᵀ q, mirrored."""
        (q, r), (dq, dr) = out, dout
        m = ops.matmul(r, ops.swapaxes(dr, -1, -2)) - ops.matmul(ops.swapaxes(dq, -1, -2), q)
        n = r.shape[-1]
        below = m * ops.cast(_below(n), r.dtype)
        mirrored = below + ops.swapaxes(below, -1, -2) + m * eye(n, n, r.dtype)
        right = dq + ops.matmul(q, mirrored)
        return (ops.swapaxes(_solve_upper(r, ops.swapaxes(right, -1, -2)), -1, -2),)


_reduced_qr = ReducedQr()
_solve_upper = ops.operations.MatrixTriangularSolve(lower=False)


@once
def _below(n: int) -> Tensor:
    """Returns a matrix that is 1 below its diagonal."""
    return Tensor(np.tril(np.ones((n, n), np.float32), -1))


def triangular_solve(
    b: Tensor,
    A: Tensor,  # noqa: N803
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[Tensor, Tensor]:
    solve = ops.operations.MatrixTriangularSolve(lower=not upper, adjoint=transpose)
    if unitriangular:
        n = A.shape[-1]
        ones = eye(n, n, A.dtype)
        A = ops.add(A * (1 - ones), ones)  # noqa: N806
    return solve(A, b), A


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0) -> Tensor:
    """Returns the distances of all rows of x1 and x2. Graph mode has no gradient of MindSpore's own on a GPU."""
    return composed_cdist(x1, x2, p) if compiling() and is_on_gpu() else _own_cdist(x1, x2, p)


def composed_cdist(x1: Tensor, x2: Tensor, p: float) -> Tensor:
    """Computes distances of their differences, all of which it holds. Equal rows have no gradient, and below p = 1,
    where their slopes are infinite, neither have equal coordinates."""
    if not p >= 0:
        raise ValueError(f"mint.cdist: p must be at least 0, got {p}")
    apart = ops.abs(ops.expand_dims(x1, -2) - ops.expand_dims(x2, -3))
    if p == 0:
        return ops.cast(apart != 0, x1.dtype).sum(-1)
    if p == float("inf"):
        return ops.amax(apart, -1)
    if p == 1:
        return apart.sum(-1)
    if p == 2:
        powers = apart * apart
    elif p > 1:
        powers = ops.pow(apart, p)
    else:
        is_equal = apart == 0
        powers = ops.where(is_equal, apart, ops.pow(ops.where(is_equal, ops.ones_like(apart), apart), p))
    total = powers.sum(-1)
    is_zero = total == 0
    root = ops.pow(ops.where(is_zero, ops.ones_like(total), total), 1 / p)
    return ops.where(is_zero, ops.zeros_like(total), root)
