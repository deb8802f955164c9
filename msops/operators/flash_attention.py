from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn

from msops.core import settings
from msops.core.compiled import Operators
from msops.core.factory import custom_op
from msops.core.inputs import as_int32
from msops.core.library import of_package
from msops.core.spec import Spec, accumulator

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from msops.core.operator import Operator
    from msops.core.primitive import Primitive

    Window = Sequence[int] | None

_NAME = "flash_attention"
_LIBRARY = of_package(_NAME)
_LAYOUTS = ("BHTD", "BTHD")  # in the order of Layout in aot_kernels/flash_attention.cu, where packed tensors follow
_PACKED = 2
_MOST_FEATURES = 512
_INPUTS = {
    "BHTD": "q(B, Hq, Tq, D), k(B, Hk, Tk, D), v(B, Hk, Tk, Dv)",
    "BTHD": "q(B, Tq, Hq, D), k(B, Tk, Hk, D), v(B, Tk, Hk, Dv)",
}
_OUT = {"BHTD": "out(B, Hq, Tq, Dv)", "BTHD": "out(B, Tq, Hq, Dv)"}


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    kv_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    softcap: float = 0.0,
    layout: str = "BHTD",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Computes attention without the matrix of its weights in memory.

    .. math::
        x_{ij} = \text{scale}\; q_i \cdot k_j, \qquad
        \text{lse}_i = \log \sum_j e^{x_{ij}}, \qquad
        \text{out}_i = \sum_j e^{x_{ij} - \text{lse}_i}\, v_j

    The sums are over the keys j that query i sees. With `softcap` s, :math:`x_{ij}` becomes
    :math:`s \tanh(x_{ij} / s)`. A query that sees no key has out 0, lse -inf and no gradient. Each head of k and v
    serves Hq / Hk neighbouring heads of q (grouped queries).

    The inputs q, k and v have gradients, which are sums in a fixed order: equal calls give equal bits. Memory
    grows with Tq + Tk. Sums are in float32 (float64 for float64).

    The gradient reads out as it was rounded, as FlashAttention's does. In float16 this adds an error to row i of dq, at
    most :math:`2^{-11}\, |\text{scale} \sum_j p_{ij} k_j| \sum_c |\text{dout}_{ic}\, \text{out}_{ic}|`, where p are
    the weights: nothing that shows where k and v have mean 0, but 0.0009 where both have mean 1, and 0.05 where both
    have mean 8 (standard deviation 1, T = 512, D = 64, dq up to 0.6). Without `softcap`, keys less their mean over j
    give the same out, and 0.002 in place of 0.05.

    Args:
        q (Tensor): Shape (B, Hq, Tq, D) or, if `layout` says so, (B, Tq, Hq, D); float16, float32 or float64. D is at
            most 512; multiples of 8 up to 256 are fast.
        k (Tensor): Shape (B, Hk, Tk, D) or (B, Tk, Hk, D), where Hk divides Hq.
        v (Tensor): Shape (B, Hk, Tk, Dv) or (B, Tk, Hk, Dv), with Dv at most 512.
        causal (bool): Whether query i sees the keys j ≤ i + Tk - Tq alone, so that the last query sees all keys.
            Default: ``False`` .
        scale (float): For float16 and float32 a number that float32 holds. Default: ``None`` , 1 / sqrt(D).
        window (tuple[int]): (left, right): query i sees the keys i + Tk - Tq - left ≤ j ≤ i + Tk - Tq + right alone,
            where -1 is no limit. Default: ``None`` , no limits.
        kv_lengths (Tensor): The number of keys of each sample, shape (B,), int32 or int64, cut to [0, Tk]. Keys and
            values from there on are not seen and never read, and `causal` and `window` take this number for Tk.
            Default: ``None`` , all keys.
        mask (Tensor): True where a query does not see a key; bool, a shape that broadcasts to (B, Hq, Tq, Tk). Default:
            ``None`` .
        softcap (float): s, at least 0, where 0 means none; for float16 and float32 a number that float32 holds.
            Default: ``0.0`` .
        layout (str): ``"BHTD"`` or ``"BTHD"`` , the order of the axes of q, k, v and out. Default: ``"BHTD"`` .
        return_lse (bool): Whether lse is returned, too. It has a gradient. Default: ``False`` .

    Returns:
        Tensor, out, of the shape of `q` with Dv features and of its dtype. With `return_lse`, a tuple of out and lse,
        whose shape is (B, Hq, Tq) and whose dtype is float32, or float64 for float64.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or another argument has a wrong type.
        ValueError: If a shape does not fit, or another argument is out of range.

    Source:
        Dao et al., "FlashAttention: fast and memory-efficient exact attention with IO-awareness", 2022; Dao,
        "FlashAttention-2", 2023. Ainslie et al., "GQA", 2023, has the grouped queries; Gemma Team, "Gemma 2", 2024, the
        softcap.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> x = mindspore.Tensor([[[[1.0], [2.0], [6.0]]]], mindspore.float32)
        >>> print(msops.flash_attention(ops.zeros_like(x), x, x).ravel())
        [3. 3. 3.]
        >>> print(msops.flash_attention(ops.zeros_like(x), x, x, causal=True).ravel())
        [1.  1.5 3. ]
    """
    has = kv_lengths is not None, mask is not None
    operator = operators.primitive(causal, scale, window, softcap, layout, return_lse, *has)
    return _call(operator, q, k, v, kv_lengths, mask, return_lse)


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Computes the attention of sequences that lie one after another in packed tensors.

    Sequence s has the queries cu_seqlens_q[s] to cu_seqlens_q[s + 1] - 1, and keys likewise. It is computed as
    :func:`msops.flash_attention` computes a sample of as many queries and keys. The inputs q, k and v have gradients.

    Rows that are in no sequence get 0 and the lse -inf, and have no gradient. On the CPU it is an error if sequences
    overlap, end after the last row, or are longer than said. On a GPU, sequences are cut to the tensors and to these
    lengths.

    Args:
        q (Tensor): Shape (Nq, Hq, D); float16, float32 or float64. D is at most 512; multiples of 8 up to 256 are
            fast.
        k (Tensor): Shape (Nk, Hk, D), where Hk divides Hq.
        v (Tensor): Shape (Nk, Hk, Dv), with Dv at most 512.
        cu_seqlens_q (Tensor): Where the queries of S sequences begin, and where the last ones end; shape (S + 1,),
            int32 or int64.
        cu_seqlens_k (Tensor): Where the keys begin, likewise.
        max_seqlen_q (int): The most queries that a sequence has.
        max_seqlen_k (int): The most keys that a sequence has.
        causal (bool): As in :func:`msops.flash_attention`. Default: ``False`` .
        scale (float): As in :func:`msops.flash_attention`. Default: ``None`` , 1 / sqrt(D).
        window (tuple[int]): As in :func:`msops.flash_attention`. Default: ``None`` .
        softcap (float): As in :func:`msops.flash_attention`. Default: ``0.0`` .
        return_lse (bool): Whether lse is returned, too. It has a gradient. Default: ``False`` .

    Returns:
        Tensor, out, of shape (Nq, Hq, Dv) and of the dtype of `q`. With `return_lse`, a tuple of out and lse, whose
        shape is (Hq, Nq) and whose dtype is float32, or float64 for float64.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or another argument has a wrong type.
        ValueError: If a shape does not fit, or another argument is out of range.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> x = mindspore.Tensor([[[1.0]], [[2.0]], [[6.0]]], mindspore.float32)
        >>> begin = mindspore.Tensor([0, 2, 3], mindspore.int32)
        >>> print(msops.flash_attention_varlen(ops.zeros_like(x), x, x, begin, begin, 2, 2).ravel())
        [1.5 1.5 6. ]
    """
    operator = packed_operators.primitive(max_seqlen_q, max_seqlen_k, causal, scale, window, softcap, return_lse)
    results = operator(q, k, v, as_int32(cu_seqlens_q), as_int32(cu_seqlens_k))
    if return_lse:
        return results[0], results[1]
    return results[0]


class FlashAttention(nn.Cell):
    """Attention without the matrix of its weights in memory. See :func:`msops.flash_attention`.

    Args:
        causal (bool): As in the function. Default: ``False`` .
        scale (float): As in the function. Default: ``None`` , 1 / sqrt(D).
        window (tuple[int]): As in the function. Default: ``None`` .
        softcap (float): As in the function. Default: ``0.0`` .
        layout (str): As in the function. Default: ``"BHTD"`` .
        return_lse (bool): As in the function. Default: ``False`` .

    Inputs:
        - **q**, **k**, **v** (Tensor) - As in the function.
        - **kv_lengths** (Tensor) - As in the function. Default: ``None`` .
        - **mask** (Tensor) - As in the function. Default: ``None`` .

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> attend = msops.FlashAttention(causal=True)
        >>> q, kv = ops.ones((2, 8, 10, 64), mindspore.float16), ops.ones((2, 2, 10, 64), mindspore.float16)
        >>> print(attend(q, kv, kv).shape)
        (2, 8, 10, 64)
    """

    def __init__(
        self,
        causal: bool = False,
        scale: float | None = None,
        window: Window = None,
        softcap: float = 0.0,
        layout: str = "BHTD",
        return_lse: bool = False,
    ) -> None:
        super().__init__()
        self.settings = (causal, scale, window, softcap, layout, return_lse)
        operators(*self.settings)  # checks the settings
        self.causal, self.scale, self.window = causal, scale, window
        self.softcap, self.layout, self.return_lse = softcap, layout, return_lse

    def construct(
        self, q: Tensor, k: Tensor, v: Tensor, kv_lengths: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        operator = operators.primitive(*self.settings, kv_lengths is not None, mask is not None)
        return _call(operator, q, k, v, kv_lengths, mask, self.return_lse)

    construct.__doc__ = flash_attention.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "causal", "scale", "window", "softcap", "layout", "return_lse")


def _call(
    operator: Primitive,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_lengths: Tensor | None,
    mask: Tensor | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    lengths = as_int32(kv_lengths)
    if kv_lengths is None and mask is None:
        results = operator(q, k, v)
    elif mask is None:
        results = operator(q, k, v, lengths)
    elif kv_lengths is None:
        results = operator(q, k, v, mask)
    else:
        results = operator(q, k, v, lengths, mask)
    if return_lse:
        return results[0], results[1]
    return results[0]


@Operators
def operators(
    causal: bool, scale: float | None, window: Window, softcap: float, layout: str, return_lse: bool = False
) -> Operator:
    """Returns the operator that gives out and, in any case, lse."""
    settings.boolean(_NAME, "return_lse", return_lse)
    axes = settings.one_of(_NAME, "layout", layout, _LAYOUTS)
    attributes = _attributes(_NAME, causal, scale, window, softcap)
    inputs = f"{_INPUTS[layout]}, kv_lengths(B, dtype=int32)?, mask(*M, dtype=bool)?"
    lse = "lse(B, Hq, Tq, dtype=accumulator)"
    backward = custom_op(
        _LIBRARY.FlashAttentionBackward,
        f"{inputs}, {_OUT[layout]}, {lse}, d{_OUT[layout]}, d{lse} -> dq, dk, dv; delta(B, Hq, Tq), query_sums",
        infer=_infer_backward,
        axes=axes,
        **attributes,
    )
    return custom_op(
        _LIBRARY.FlashAttentionForward,
        f"{inputs} -> out, lse; partial",
        infer=_infer,
        gradient=backward,
        axes=axes,
        **attributes,
    )


@Operators
def packed_operators(
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    scale: float | None,
    window: Window,
    softcap: float,
    return_lse: bool = False,
) -> Operator:
    """Returns the operator for packed sequences, which gives out and, in any case, lse."""
    name = "flash_attention_varlen"
    settings.boolean(name, "return_lse", return_lse)
    attributes = _attributes(name, causal, scale, window, softcap)
    for key, argument, value in (
        ("most_queries", "max_seqlen_q", max_seqlen_q),
        ("most_keys", "max_seqlen_k", max_seqlen_k),
    ):
        attributes[key] = settings.integer(name, argument, value)
        if not 0 <= value < 2**31:
            raise ValueError(f"{name}: {argument} must be at least 0 and less than 2^31, got {value}")
    inputs = "q(Nq, Hq, D), k(Nk, Hk, D), v(Nk, Hk, Dv)"
    starts = "cu_seqlens_q(S, dtype=int32), cu_seqlens_k(S, dtype=int32)"
    kept = "out(Nq, Hq, Dv), lse(Hq, Nq, dtype=accumulator), dout(Nq, Hq, Dv), dlse(Hq, Nq, dtype=accumulator)"
    backward = custom_op(
        _LIBRARY.FlashAttentionBackward,
        f"{inputs}, {starts}, {kept} -> dq, dk, dv; delta(Hq, Nq), query_sums",
        infer=_infer_backward,
        name=name,
        axes=_PACKED,
        **attributes,
    )
    return custom_op(
        _LIBRARY.FlashAttentionForward,
        f"{inputs}, {starts} -> out, lse; partial",
        infer=_infer_packed,
        gradient=backward,
        name=name,
        axes=_PACKED,
        **attributes,
    )


def _attributes(name: str, causal: bool, scale: float | None, window: Window, softcap: float) -> dict[str, Any]:
    left, right = -1, -1
    if window is not None:
        left, right = settings.numbers(name, "window", window, (2,), -1)
    return dict(
        left=left,
        right=0 if settings.boolean(name, "causal", causal) else right,
        scale=1.0 if scale is None else settings.number(name, "scale", scale),
        by_width=int(scale is None),
        softcap=settings.number(name, "softcap", softcap, 0),
    )


def _infer(
    q: Spec, k: Spec, v: Spec, kv_lengths: Spec | None, mask: Spec | None, axes: int, **settings: float
) -> list[Spec]:
    head, row = (1, 2) if axes == 0 else (2, 1)
    heads, queries, keys = q.shape[head], q.shape[row], k.shape[row]
    _check_heads(q, k, v, head)
    if mask is not None:
        full = (q.shape[0], heads, queries, keys)
        pairs = zip(reversed(mask.shape), reversed(full))
        if len(mask.shape) > 4 or any(size not in (1, whole) for size, whole in pairs):
            raise ValueError(f"mask must broadcast to (B, Hq, Tq, Tk) = {full}, got {mask.shape}")
    lse = Spec((q.shape[0], heads, queries), accumulator(q.dtype))
    return [q._replace(shape=(*q.shape[:-1], v.shape[-1])), lse]


def _infer_packed(q: Spec, k: Spec, v: Spec, starts_q: Spec, starts_k: Spec, **settings: float) -> list[Spec]:
    _check_heads(q, k, v, 1)
    if starts_q.size == 0:
        raise ValueError("cu_seqlens_q must have at least one number, got shape (0,)")
    lse = Spec((q.shape[1], q.shape[0]), accumulator(q.dtype))
    return [q._replace(shape=(*q.shape[:-1], v.shape[-1])), lse]


def _infer_backward(q: Spec, k: Spec, v: Spec, *others: Spec | None, **settings: float) -> list[Spec]:
    return [q, k, v]


def _check_heads(q: Spec, k: Spec, v: Spec, head: int) -> None:
    heads, kv_heads = q.shape[head], k.shape[head]
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"q must have a multiple of the {kv_heads} heads of k and v, got {heads}")
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] > _MOST_FEATURES:
            raise ValueError(f"{name} must have at most {_MOST_FEATURES} features, got {x.shape[-1]}")
