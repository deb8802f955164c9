from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn, ops

from msops.core import settings
from msops.core.compiled import once, wants_gradient
from msops.core.inputs import as_int32, present
from msops.shared import generator
from msops.shared.attention import operators, packed_operators, probability

if TYPE_CHECKING:
    from typing import Any

    from msops.shared.attention import Window

    Seed = int | Tensor | None

try:
    from mindspore.common.generator import default_generator as _generator
except ImportError:  # MindSpore before 2.3 has none
    _generator = None

_NAME = "flash_attention"
# Where MindSpore computes a Cell again, the seed stays. `recompute` itself refuses PyNative mode in MindSpore 2.0.
_add_once = ops.Add().add_prim_attr("recompute", False)
_ODD = Tensor(-7046029254386353131, mindspore.int64)  # it spreads the bits of the generator's seed


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
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Seed = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Computes attention without the matrix of its weights in memory.

    .. math::
        x_{ij} = \text{scale}\; q_i \cdot k_j, \qquad
        \text{lse}_i = \log \sum_j e^{x_{ij}}, \qquad
        \text{out}_i = \sum_j e^{x_{ij} - \text{lse}_i}\, v_j

    The sums are over the keys j that query i sees. With `softcap` s, :math:`x_{ij}` becomes
    :math:`s \tanh(x_{ij} / s)`. Then `bias` and :math:`-\text{slope}\, |i + T_k - T_q - j|` are added, where given. A
    query that sees no key has out 0, lse -inf and no gradient. Each head of k and v serves Hq / Hk neighbouring heads
    of q (grouped queries).

    With `dropout_p`, each weight :math:`e^{x_{ij} - \text{lse}_i}` becomes 0 with this probability, and otherwise is
    divided by 1 - `dropout_p`; lse stays. Which weights become 0 depends on `seed`, the sample, the head, the query and
    the key alone: it is equal on both devices, in both modes, and in the gradient, which draws it again.

    The inputs q, k, v and `bias` have gradients, which are sums in a fixed order: equal calls give equal bits. Memory
    grows with Tq + Tk. Sums are in float32 (float64 for float64). The gradient of `bias` is summed over the axes along
    which it is broadcast; it is computed where it is asked for. In PyNative mode, MindSpore does not tell that:
    there ``ops.stop_gradient(bias)`` , or a Parameter that needs no gradient, saves its time.

    The gradient reads out as it was rounded, as FlashAttention's does. In float16 this adds an error to row i of dq, at
    most :math:`2^{-11}\, |\text{scale} \sum_j p_{ij} k_j| \sum_c |\text{dout}_{ic}\, \text{out}_{ic}|`, where p are
    the weights: nothing that shows where k and v have mean 0, but 0.0009 where both have mean 1, and 0.05 where both
    have mean 8 (standard deviation 1, T = 512, D = 64, dq up to 0.6). Without `softcap`, keys less their mean over j
    give the same out, and 0.002 in place of 0.05.

    Args:
        q (Tensor): Shape (B, Hq, Tq, D) or, if `layout` says so, (B, Tq, Hq, D); float16, float32 or float64. D is at
            most 512; multiples of 8 up to 256 are fast. In float16, a GPU first copies rows of another D up to 256 to
            such rows where there are 256 queries and keys or more (128 for the gradient).
        k (Tensor): Shape (B, Hk, Tk, D) or (B, Tk, Hk, D), where Hk divides Hq.
        v (Tensor): Shape (B, Hk, Tk, Dv) or (B, Tk, Hk, Dv), with Dv at most 512.
        causal (bool): Whether query i sees the keys j ≤ i + Tk - Tq alone, so that the last query sees all keys.
            Default: ``False`` .
        scale (float): For float16 and float32 a number that float32 holds. Default: ``None`` , 1 / sqrt(D).
        window (tuple[int]): (left, right): query i sees the keys i + Tk - Tq - left ≤ j ≤ i + Tk - Tq + right alone,
            where -1 is no limit. Default: ``None`` , no limits.
        kv_lengths (Tensor): The number of keys of each sample, shape (B,), int32 or int64, cut to [0, Tk]. Keys and
            values from there on are not seen, whatever they are, and `causal` and `window` take this number for Tk.
            Default: ``None`` , all keys.
        mask (Tensor): True where a query does not see a key; bool, a shape that broadcasts to (B, Hq, Tq, Tk). Default:
            ``None`` .
        softcap (float): s, at least 0, where 0 means none; for float16 and float32 a number that float32 holds.
            Default: ``0.0`` .
        layout (str): ``"BHTD"`` or ``"BTHD"`` , the order of the axes of q, k, v and out. Default: ``"BHTD"`` .
        return_lse (bool): Whether lse is returned, too. It has a gradient. Default: ``False`` .
        bias (Tensor): What is added to the logits after `scale` and `softcap`; of the dtype of `q` or float32, a shape
            that broadcasts to (B, Hq, Tq, Tk). Where it is -inf, a query does not see a key. Default: ``None`` .
        alibi_slopes (Tensor): The slopes of ALiBi, shape (Hq,) or (B, Hq), float32 or of the dtype of `q`, without
            gradient. Default: ``None`` .
        dropout_p (float): The probability that a weight becomes 0, at least 0 and less than 1. Default: ``0.0`` .
        seed (int, Tensor): The seed of dropout, which `dropout_p` above 0 needs: an int, or a Tensor of int64 and rank
            0. In graph mode, each other int compiles the graph again. Default: ``None`` .

    Returns:
        Tensor, out, of the shape of `q` with Dv features and of its dtype. With `return_lse`, a tuple of out and lse,
        whose shape is (B, Hq, Tq) and whose dtype is float32, or float64 for float64.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or another argument has a wrong type.
        ValueError: If a shape does not fit, or another argument is out of range.

    Source:
        Dao et al., "FlashAttention: fast and memory-efficient exact attention with IO-awareness", 2022; Dao,
        "FlashAttention-2", 2023. Ainslie et al., "GQA", 2023, has the grouped queries; Gemma Team, "Gemma 2", 2024, the
        softcap; Press et al., "Train short, test long: attention with linear biases", 2022, ALiBi; Salmon et al.,
        "Parallel random numbers: as easy as 1, 2, 3", 2011, the generator of dropout.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> x = mindspore.Tensor([[[[1.0], [2.0], [6.0]]]], mindspore.float32)
        >>> print(msops.flash_attention(ops.zeros_like(x), x, x).ravel())
        [3. 3. 3.]
        >>> print(msops.flash_attention(ops.zeros_like(x), x, x, causal=True).ravel())
        [1.  1.5 3. ]
    """
    settings_ = (causal, scale, window, softcap, layout, return_lse)
    return _call(settings_, q, k, v, kv_lengths, mask, bias, alibi_slopes, dropout_p, seed)


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
            fast, and others are copied as :func:`msops.flash_attention` does.
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
        dropout_p (float): As in the function, but in training alone. Each call draws another seed from MindSpore's
            default generator, which ``mindspore.manual_seed`` sets; this needs MindSpore 2.3. Default: ``0.0`` .

    Inputs:
        - **q**, **k**, **v** (Tensor) - As in the function.
        - **kv_lengths** (Tensor) - As in the function. Default: ``None`` .
        - **mask** (Tensor) - As in the function. Default: ``None`` .
        - **bias** (Tensor) - As in the function. Default: ``None`` .
        - **alibi_slopes** (Tensor) - As in the function. Default: ``None`` .

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
        dropout_p: float = 0.0,
    ) -> None:
        super().__init__()
        self.settings = (causal, scale, window, softcap, layout, return_lse)
        operators(*self.settings, dropout_p)  # checks the settings
        self.causal, self.scale, self.window = causal, scale, window
        self.softcap, self.layout, self.return_lse, self.dropout_p = softcap, layout, return_lse, dropout_p
        if dropout_p > 0 and _generator is None:
            raise ValueError("FlashAttention: dropout_p must be 0.0 before MindSpore 2.3; flash_attention takes a seed")

    def construct(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_lengths: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        dropout_p, seed = 0.0, None
        if self.training and self.dropout_p > 0:
            dropout_p, seed = self.dropout_p, draw_seed()
        return _call(self.settings, q, k, v, kv_lengths, mask, bias, alibi_slopes, dropout_p, seed)

    construct.__doc__ = flash_attention.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "causal", "scale", "window", "softcap", "layout", "return_lse", "dropout_p")


def _call(
    settings_: tuple[Any, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_lengths: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    seed: Seed,
) -> Tensor | tuple[Tensor, Tensor]:
    seed = _seed(dropout_p, seed)
    has = (kv_lengths is not None, mask is not None, bias is not None, alibi_slopes is not None, seed is not None)
    operator = operators.primitive(*settings_, dropout_p, bias is not None and wants_gradient(bias), *has)
    results = operator(q, k, v, *present((as_int32(kv_lengths), mask, bias, alibi_slopes, seed)))
    if settings_[-1]:  # return_lse
        return results[0], results[1]
    return results[0]


def _seed(dropout_p: float, seed: Seed) -> Tensor | None:
    """Returns the seed as a Tensor, or None where nothing is dropped."""
    if isinstance(seed, Tensor):
        return seed if _drops(dropout_p) else None
    return _constant_seed(dropout_p, seed)


@once
def _drops(dropout_p: float) -> bool:
    return probability(dropout_p) > 0


@once
def _constant_seed(dropout_p: float, seed: int | None) -> Tensor | None:
    if probability(dropout_p) == 0:
        return None
    if seed is None:
        raise ValueError(f"{_NAME}: seed must be given if dropout_p is above 0")
    if not -(2**63) <= settings.integer(_NAME, "seed", seed) < 2**63:
        raise ValueError(f"{_NAME}: seed must fit into 64 bits, got {seed}")
    return Tensor(seed, mindspore.int64)


def draw_seed() -> Tensor:
    """Draws a seed from MindSpore's generator, whose seed stays, and whose offset grows."""
    seed, offset = generator.step(_generator, generator.STEP)
    return ops.reshape(_add_once(ops.mul(seed, _ODD), offset), ())
