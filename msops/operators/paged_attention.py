from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from mindspore import Tensor, nn

from msops.core import settings
from msops.core.compiled import once
from msops.core.factory import Operators, custom_op
from msops.core.inputs import as_int32, present
from msops.core.library import of_package
from msops.core.spec import Spec, accumulator
from msops.shared.attention import attributes_of

if TYPE_CHECKING:
    from typing import Any

    from msops.core.operator import Operator
    from msops.shared.attention import Window

_NAME = "paged_attention"
_LIBRARY = of_package(_NAME)
_MOST_FEATURES = 576
_FLOATS = "dtype=float32|common"


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    block_tables: Tensor,
    lengths: Tensor,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: Window = None,
    mask: Tensor | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    key_zero_point: Tensor | None = None,
    value_zero_point: Tensor | None = None,
    value_size: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Computes the attention of new tokens of several sequences to keys and values in blocks.

    .. math::
        \text{key}_{bj} = \text{key_cache}[\text{block_tables}_{b, \lfloor j / S \rfloor},\; j \bmod S], \qquad
        0 \le j < \text{lengths}_b

    Attention is that of :func:`msops.flash_attention`, of each sequence's tokens to its keys, among which are those of
    the new tokens, which :func:`msops.write_cache` wrote before. Token i of the n new ones of sequence b stands at the
    place of key lengths[b] - n + i. A token that sees no key has out 0 and lse -inf.

    Sequences may share blocks, and a block may stand twice in a table. Entries of the table that no key needs, and rows
    of the caches that are no keys, are never read, whatever they hold. A sequence's results depend on it alone, bit for
    bit: not on the others in the call, nor on which blocks it has, nor on P and M. There is no gradient: train with
    :func:`msops.flash_attention_varlen`.

    Caches of int8 hold codes: key = (code - key_zero_point) key_scale, and values alike.

    Args:
        q (Tensor): The new tokens of all sequences, one sequence after another, shape (T, Hq, D); float16, float32 or
            float64. D is at most 576.
        key_cache (Tensor): P blocks of S rows, shape (P, S, Hk, D), where Hk divides Hq; of the dtype of `q`, or int8.
        value_cache (Tensor): Shape (P, S, Hk, Dv), with Dv at most 576, of the dtype of `key_cache`. ``None`` : values
            are the first `value_size` features of the keys, as in multi-head latent attention.
        block_tables (Tensor): The blocks of each sequence, shape (B, M); int32 or int64. On the CPU, an entry that is
            needed must be from 0 to P - 1. On a GPU, keys of another are not seen.
        lengths (Tensor): The number of keys of each sequence, shape (B,); int32 or int64. On the CPU it must be from 0
            to M S. On a GPU it is cut to that.
        cu_seqlens_q (Tensor): Where the tokens of each sequence begin, and where the last ones end, shape (B + 1,);
            int32 or int64, from 0 to T, not falling. On a GPU, tokens outside get 0. Default: ``None`` , one token
            each, so that B = T.
        causal (bool): Whether a token sees the keys up to its place alone. Default: ``True`` .
        scale (float): As in :func:`msops.flash_attention`. Default: ``None`` , 1 / sqrt(D).
        window (tuple[int]): As in :func:`msops.flash_attention`. Default: ``None`` , no limits.
        mask (Tensor): True where a token does not see a key; bool, a shape that broadcasts to (T, Hq, W). Keys from W
            on are not seen, except where W is 1, which holds for all keys. Default: ``None`` .
        softcap (float): As in :func:`msops.flash_attention`. Default: ``0.0`` .
        bias (Tensor): What is added to the logits after `scale` and `softcap`; of the dtype of `q` or float32, a shape
            like that of `mask`. Default: ``None`` .
        alibi_slopes (Tensor): As in :func:`msops.flash_attention`, shape (Hq,) or (B, Hq). Default: ``None`` .
        key_scale (Tensor): The scale of codes, shape (Hk, D) or (Hk, 1); float32 or of the dtype of `q`. Caches are of
            int8 where it is given. Default: ``None`` .
        value_scale (Tensor): Likewise, shape (Hk, Dv) or (Hk, 1). Default: ``None`` .
        key_zero_point (Tensor): The code of 0, of such a shape; int8, float32 or of the dtype of `q`. Default:
            ``None`` , 0.
        value_zero_point (Tensor): Likewise. Default: ``None`` , 0.
        value_size (int): Dv where `value_cache` is None, from 0 to D; it must be given there. Default: ``None`` .
        return_lse (bool): Whether lse is returned, too. Default: ``False`` .

    Returns:
        Tensor, out, of shape (T, Hq, Dv) and of the dtype of `q`. With `return_lse`, a tuple of out and lse, whose
        shape is (Hq, T) and whose dtype is float32, or float64 for float64.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or another argument has a wrong type.
        ValueError: If a shape does not fit, scales do not fit the caches, or another argument is out of range.

    Source:
        Kwon et al., "Efficient memory management for large language model serving with PagedAttention", 2023.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> cache = ops.arange(6).astype(mindspore.float32).reshape(3, 2, 1, 1)  # blocks (0, 1), (2, 3), (4, 5)
        >>> tables = mindspore.Tensor([[2, 0], [1, -1]], mindspore.int32)
        >>> lengths = mindspore.Tensor([3, 1], mindspore.int32)  # keys 4, 5, 0 and key 2
        >>> print(msops.paged_attention(ops.zeros((2, 1, 1)), cache, cache, tables, lengths).ravel())
        [3. 2.]
    """
    settings_ = (causal, scale, window, softcap, value_size, return_lse)
    return _call(
        settings_,
        (q, key_cache, value_cache, as_int32(block_tables), as_int32(lengths), as_int32(cu_seqlens_q)),
        (mask, bias, alibi_slopes, key_scale, value_scale, key_zero_point, value_zero_point),
    )


class PagedAttention(nn.Cell):
    """Attention of new tokens to keys and values in blocks. See :func:`msops.paged_attention`.

    It is called with the tensors in this order: (q, key_cache, value_cache, block_tables, lengths, cu_seqlens_q, mask,
    bias, alibi_slopes, key_scale, value_scale, key_zero_point, value_zero_point), of which those after lengths are
    None by default.

    Args:
        causal (bool): As in the function. Default: ``True`` .
        scale (float): As in the function. Default: ``None`` , 1 / sqrt(D).
        window (tuple[int]): As in the function. Default: ``None`` .
        softcap (float): As in the function. Default: ``0.0`` .
        value_size (int): As in the function. Default: ``None`` .
        return_lse (bool): As in the function. Default: ``False`` .

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> attend = msops.PagedAttention()
        >>> cache = ops.ones((5, 16, 2, 64), mindspore.float16)
        >>> tables, lengths = mindspore.Tensor([[3, 0]]), mindspore.Tensor([20])
        >>> print(attend(ops.ones((1, 8, 64), mindspore.float16), cache, cache, tables, lengths).shape)
        (1, 8, 64)
    """

    def __init__(
        self,
        causal: bool = True,
        scale: float | None = None,
        window: Window = None,
        softcap: float = 0.0,
        value_size: int | None = None,
        return_lse: bool = False,
    ) -> None:
        super().__init__()
        self.settings = (causal, scale, window, softcap, value_size, return_lse)
        operators(*self.settings)  # checks the settings
        self.causal, self.scale, self.window = causal, scale, window
        self.softcap, self.value_size, self.return_lse = softcap, value_size, return_lse

    def construct(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor | None,
        block_tables: Tensor,
        lengths: Tensor,
        cu_seqlens_q: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
        key_zero_point: Tensor | None = None,
        value_zero_point: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        return _call(
            self.settings,
            (q, key_cache, value_cache, as_int32(block_tables), as_int32(lengths), as_int32(cu_seqlens_q)),
            (mask, bias, alibi_slopes, key_scale, value_scale, key_zero_point, value_zero_point),
        )

    construct.__doc__ = paged_attention.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "causal", "scale", "window", "softcap", "value_size", "return_lse")


def _call(
    settings_: tuple[Any, ...], inputs: tuple[Tensor | None, ...], optional: tuple[Tensor | None, ...]
) -> Tensor | tuple[Tensor, Tensor]:
    q, keys, values, tables, lengths, starts = inputs
    mask, bias, slopes, key_scale, value_scale, key_zero, value_zero = optional
    causal, scale, window, softcap, value_size, return_lse = settings_
    of_inputs = (values is not None, starts is not None, mask is not None, bias is not None, slopes is not None)
    of_codes = (key_scale is not None, value_scale is not None, key_zero is not None, value_zero is not None)
    has_codes = key_scale is not None
    value_size = _size_of_values(values is not None, value_size)
    attend = operators.primitive(
        causal, scale, window, softcap, value_size, return_lse, has_codes, *of_inputs, *of_codes
    )
    terms = (starts, mask, bias, slopes, key_scale, value_scale, key_zero, value_zero)
    results = attend(q, keys, *present((values,)), tables, lengths, *present(terms))
    if return_lse:
        return results[0], results[1]
    return results[0]


@once
def _size_of_values(has_values: bool, value_size: int | None) -> int | None:
    """Requires how many of a key's features its value has, where there are no other values, and returns it."""
    if not has_values and value_size is None:
        raise ValueError(f"{_NAME}: value_size must be given where value_cache is None, got None")
    return value_size


def _no_gradient(*_: object) -> NoReturn:
    raise ValueError("paged_attention: it is for inference and has no gradient; train with flash_attention_varlen")


@Operators
def operators(
    causal: bool,
    scale: float | None,
    window: Window,
    softcap: float,
    value_size: int | None,
    return_lse: bool = False,
    has_codes: bool = False,
) -> Operator:
    """Returns the operator that gives out and, in any case, lse, for caches of codes or of numbers. Its attribute
    value_size is 0 if there is none."""
    settings.boolean(_NAME, "return_lse", return_lse)
    size = 0 if value_size is None else settings.integer(_NAME, "value_size", value_size)
    if not 0 <= size <= _MOST_FEATURES:
        raise ValueError(f"{_NAME}: value_size must be from 0 to {_MOST_FEATURES}, got {value_size}")
    kind = ", dtype=int8" if has_codes else ""
    return custom_op(
        _LIBRARY.PagedAttentionForward,
        f"q(T, Hq, D), key_cache(P, S, Hk, D{kind}), value_cache(P, S, Hk, Dv{kind})?, "
        "block_tables(B, M, dtype=int32), lengths(B, dtype=int32), cu_seqlens_q(N, dtype=int32)?, "
        f"mask(*A, dtype=bool)?, bias(*E, {_FLOATS})?, alibi_slopes(*F, {_FLOATS})?, key_scale(Hk, Ks, {_FLOATS})?, "
        f"value_scale(Hk, Vs, {_FLOATS})?, key_zero_point(Hk, Kz, dtype=int8|float32|common)?, "
        "value_zero_point(Hk, Vz, dtype=int8|float32|common)? -> out, lse; partial, plan(..., dtype=int64)",
        infer=_infer,
        gradient=_no_gradient,
        value_size=size,
        **attributes_of(_NAME, causal, scale, window, softcap),
    )


def _infer(
    q: Spec,
    key_cache: Spec,
    value_cache: Spec | None,
    block_tables: Spec,
    lengths: Spec,
    cu_seqlens_q: Spec | None,
    mask: Spec | None,
    bias: Spec | None,
    alibi_slopes: Spec | None,
    key_scale: Spec | None,
    value_scale: Spec | None,
    key_zero_point: Spec | None,
    value_zero_point: Spec | None,
    value_size: int,
    **_: float,
) -> list[Spec]:
    (tokens, heads, width), (batch,) = q.shape, lengths.shape
    block_size, kv_heads = key_cache.shape[1:3]
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"q must have a multiple of the {kv_heads} heads of key_cache, got {heads}")
    if block_size == 0:
        raise ValueError(f"key_cache must have at least one row in a block, got shape {key_cache.shape}")
    if value_cache is not None and value_size:
        raise ValueError(f"value_size must be None where value_cache is given, got {value_size}")
    value_width = value_size if value_cache is None else value_cache.shape[3]
    if value_cache is None and value_size > width:
        raise ValueError(f"value_size must be at most the {width} features of the keys, got {value_size}")
    for name, features in (("q", width), ("value_cache", value_width)):
        if features > _MOST_FEATURES:
            raise ValueError(f"{name} must have at most {_MOST_FEATURES} features, got {features}")
    if cu_seqlens_q is None and batch != tokens:
        raise ValueError(
            f"lengths must have one number for each of the {tokens} tokens of q, got shape {lengths.shape}"
        )
    if cu_seqlens_q is not None and cu_seqlens_q.shape != (batch + 1,):
        raise ValueError(f"cu_seqlens_q must have shape (B + 1,) = ({batch + 1},), got {cu_seqlens_q.shape}")
    for name, x in (("mask", mask), ("bias", bias)):
        if x is None:
            continue
        pairs = zip(reversed(x.shape[:-1]), (heads, tokens))
        if len(x.shape) > 3 or any(axis not in (1, whole) for axis, whole in pairs):
            raise ValueError(f"{name} must broadcast to (T, Hq, W) = ({tokens}, {heads}, W), got {x.shape}")
    if alibi_slopes is not None and alibi_slopes.shape not in ((heads,), (batch, heads)):
        shapes = f"(Hq,) = ({heads},) or (B, Hq) = ({batch}, {heads})"
        raise ValueError(f"alibi_slopes must have shape {shapes}, got {alibi_slopes.shape}")
    codes = None if str(key_cache.dtype) != "Int8" else key_cache
    _check_codes(codes, "key", width, key_scale, key_zero_point)
    _check_codes(value_cache and codes, "value", value_width, value_scale, value_zero_point)
    return [q._replace(shape=(tokens, heads, value_width)), Spec((heads, tokens), accumulator(q.dtype))]


def _check_codes(codes: Spec | None, name: str, width: int, scale: Spec | None, zero_point: Spec | None) -> None:
    """Requires a scale, and allows a zero point, where there are codes."""
    if codes is not None and scale is None:
        raise ValueError(f"{name}_scale must be given for a cache of int8, got None")
    for what, x in (("scale", scale), ("zero_point", zero_point)):
        if x is None:
            continue
        if codes is None:
            raise ValueError(f"{name}_{what} must be None where there is no {name}_cache of int8, got shape {x.shape}")
        if x.shape[1] not in (1, width):
            heads = x.shape[0]
            raise ValueError(f"{name}_{what} must have shape ({heads}, {width}) or ({heads}, 1), got {x.shape}")
