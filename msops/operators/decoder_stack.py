from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal

from msops.core import settings
from msops.core.inputs import present
from msops.quantization import check_bits, check_group
from msops.shared.decoder_stack import MOST_FEATURES, WITHOUT_CODES, operators, settings_of_codes

_NAME = "decoder_stack"


def decoder_stack(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm1: Tensor,
    qkv: Tensor,
    out: Tensor,
    norm2: Tensor,
    gate_up: Tensor,
    down: Tensor,
    norm: Tensor | None = None,
    qkv_bias: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    keys: Tensor | None = None,
    values: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    heads: int,
    kv_heads: int,
    eps: float = 1e-5,
    interleaved: bool = False,
    block_tables: Tensor | None = None,
    scales: tuple[Tensor, ...] | None = None,
    zero_points: tuple[Tensor, ...] | None = None,
    bits: int = 8,
    group: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Computes all L layers of a decoder such as Llama, Mistral, Qwen2 or Qwen3 in one operator, for inference.

    .. math::
        \begin{aligned}
        h &= x, \text{ and in each layer} \\
        (q, k, v) &= \text{rms\_norm}(h, \text{norm1})\, \text{qkv}^T + \text{qkv\_bias} \\
        o &= \text{attention}(\text{rotated}(q), \text{rotated}(k), v), \qquad h = h + o\, \text{out}^T \\
        a &= \text{rms\_norm}(h, \text{norm2}), \qquad
        h = h + (\text{silu}(a\, \text{gate}^T) \odot a\, \text{up}^T)\, \text{down}^T
        \end{aligned}

    The result y is :math:`\text{rms\_norm}(h, \text{norm})`, or h. If `q_norm` or `k_norm` are given, each head of q or
    k is normed with them before it is rotated. Each new token sees the rows of its text's cache that count, the new
    tokens before it, and itself. What single operators would store is rounded to the dtype of `x`; sums are in float32,
    or float64 beside float64. There is no gradient.

    On a GPU of sm_80 or later, one kernel computes all layers for up to 16 tokens in float16 or float32, if C, F and D
    are whole packs of 16 bytes and D is at most 128. With codes, up to 16 tokens of float16 take the kernels of
    :func:`msops.weight_quant_matmul`, if C, heads D, F and `group` are multiples of 32, and more tokens take a layer's
    codes widened. Otherwise cuBLAS multiplies, if MindSpore or PyTorch loaded it.

    Args:
        x (Tensor): Shape (B, T, C); float16, float32 or float64. The dtype of all that names no other.
        cos (Tensor): Cosines of the angles of each new token, shape (T, D/2) or (B, T, D/2); or float32.
        sin (Tensor): Sines, of the shape and dtype of `cos`.
        norm1 (Tensor): Shape (L, C); or float32, as all norms.
        qkv (Tensor): Shape (L, (heads + 2 kv_heads) D, C): the rows of q, then k, then v.
        out (Tensor): Shape (L, C, heads D).
        norm2 (Tensor): Shape (L, C).
        gate_up (Tensor): Shape (L, 2F, C): the rows of gate, then up.
        down (Tensor): Shape (L, C, F).
        norm (Tensor): Shape (C,). Default: ``None`` , no last norm.
        qkv_bias (Tensor): Shape (L, (heads + 2 kv_heads) D). Default: ``None`` .
        q_norm (Tensor): Shape (L, D). Default: ``None`` .
        k_norm (Tensor): Shape (L, D). Default: ``None`` .
        keys (Tensor): Rotated keys of earlier tokens, shape (L, B, S, kv_heads, D), or (L B S, kv_heads, D), into which
            ``ScatterUpdate`` can write rows. With `block_tables`, (L, P, S, kv_heads, D), P blocks of S rows for each
            layer, or (L P, S, kv_heads, D), into which :func:`msops.write_cache` can. Default: ``None`` , none.
        values (Tensor): Values of earlier tokens, of the shape of `keys`. Default: ``None`` .
        lengths (Tensor): How many rows of each text's cache count, shape (B,), int32 or int64. The others are never
            read. Numbers outside of [0, S], or [0, M S] with `block_tables`, are an error on the CPU, and clamped on a
            GPU. Default: ``None`` .
        heads (int): Query heads, a multiple of `kv_heads`.
        kv_heads (int): Heads of keys and values.
        eps (float): At least 0, for all norms. Default: ``1e-5`` .
        interleaved (bool): Whether neighbouring features are rotated together, instead of the halves of a head.
            Default: ``False`` .
        block_tables (Tensor): Where the rows of each text's cache are, shape (B, M), int32 or int64, as in
            :func:`msops.paged_attention`: row j of text b is row j mod S of block block_tables[b, j // S] of each
            layer. Texts may share blocks. Entries that `lengths` do not need are never looked at. A needed one outside
            of [0, P) is an error on the CPU; on a GPU its rows are not seen. Default: ``None`` , no blocks.
        scales (tuple): With it, `qkv`, `out`, `gate_up` and `down` are codes in uint8, or all in int8, as
            :func:`msops.weight_quant_matmul` takes them: of shapes (L, rows, columns), or (L, rows, ceil(columns / 2))
            for 4 bits. It has the scales of these four, each of shape (L, rows, G), where G is ceil(columns / group),
            all in float32 or all in the dtype of `x`. The result is that with the matrices which
            :func:`msops.dequantize_weight` gives, except for rounding. Default: ``None`` , no codes.
        zero_points (tuple): The codes that stand for 0: the shapes of `scales`, and all in the dtype of the codes or
            of `scales`. Default: ``None`` , all 0.
        bits (int): The size of a code: 4 or 8. Default: ``8`` .
        group (int): How many neighbours in a row share a scale; the last group may have fewer. Default: ``None`` , all.

    Returns:
        Tuple (y, k, v): y of the shape of `x`; the new rows of keys, rotated, and of values, both of shape
        (L, B, T, kv_heads, D), which the caller writes into its cache.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or another argument has a wrong type.
        ValueError: If an input has another shape, a setting is out of range, one of `keys`, `values` and `lengths` is
            missing, or there are `block_tables` without them, or `zero_points` without `scales`.

    Source:
        Touvron et al., "LLaMA: Open and efficient foundation language models", 2023.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> a = msops.DecoderStack(layers=2, width=64, heads=4, kv_heads=2, hidden=96)
        >>> x, table = ops.ones((1, 3, 64), mindspore.float16), ops.ones((3, 8), mindspore.float16)
        >>> weights = a.norm1, a.qkv, a.out, a.norm2, a.gate_up, a.down
        >>> y, k, v = msops.decoder_stack(x, table, 0 * table, *weights, heads=4, kv_heads=2)
        >>> print(y.shape, k.shape)
        (1, 3, 64) (2, 1, 3, 2, 16)
    """
    inputs, settings_ = (x, cos, sin, norm1, qkv, out, norm2, gate_up, down), (heads, kv_heads, eps, interleaved)
    optional = norm, qkv_bias, q_norm, k_norm, keys, values, lengths, block_tables
    of_codes = settings_of_codes(bits, group, _count(scales), _count(zero_points))
    codes = ()  # type: tuple[Tensor, ...]  # MindSpore before 2.7 needs the type in a comment
    if scales is not None:
        codes = scales
    if zero_points is not None:
        codes = codes + zero_points
    return _call(settings_ + of_codes, inputs, optional, codes)


class DecoderStack(nn.Cell):
    """Holds the weights of a decoder's layers. See :func:`msops.decoder_stack`.

    It is called (x, cos, sin), with a cache (x, cos, sin, keys, values, lengths), and with one in blocks (x, cos, sin,
    keys, values, lengths, block_tables). Parameters that were not asked for do not exist. Matrices begin as random
    numbers that keep the size of what they multiply.

    Args:
        layers (int): L.
        width (int): C.
        heads (int): Query heads.
        kv_heads (int): Heads of keys and values, a divisor of `heads`.
        hidden (int): F.
        head_size (int): D, an even number. Default: ``None`` , `width` / `heads`.
        eps (float): As in the function. Default: ``1e-5`` .
        qkv_bias (bool): Whether there is `qkv_bias`. Default: ``False`` .
        qk_norm (bool): Whether there are `q_norm` and `k_norm`. Default: ``False`` .
        final_norm (bool): Whether there is `norm`. Default: ``True`` .
        interleaved (bool): As in the function. Default: ``False`` .
        dtype (mindspore.dtype): The dtype of the Parameters. Default: ``mindspore.float16`` .
        bits (int): The size of codes, 4 or 8. Then the four matrices begin as zeros, to be set to what
            :func:`msops.quantize_weight` gives. Default: ``None`` , no codes.
        group (int): How many neighbours in a row share a scale, or None for all. Default: ``128`` .

    Attributes:
        norm1, qkv, out, norm2, gate_up, down, norm, qkv_bias, q_norm, k_norm (Parameter): As in the function. With
            `bits`, the matrices are in uint8.
        qkv_scale, out_scale, gate_up_scale, down_scale (Parameter): Scales, with `bits`.
        qkv_zero_point, out_zero_point, gate_up_zero_point, down_zero_point (Parameter): Zero points in uint8, with
            `bits`.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range, `kv_heads` does not divide `heads`, or there is no `head_size` and
            `heads` does not divide `width`.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> stack = msops.DecoderStack(2, 64, heads=4, kv_heads=2, hidden=96, qk_norm=True)
        >>> table = ops.ones((3, 8), mindspore.float16)
        >>> y, k, v = stack(ops.ones((1, 3, 64), mindspore.float16), table, 0 * table)
        >>> print(y.shape, k.shape, stack.qkv.shape, stack.q_norm.shape)
        (1, 3, 64) (2, 1, 3, 2, 16) (2, 128, 64) (2, 16)
    """

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        head_size: int | None = None,
        eps: float = 1e-5,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        final_norm: bool = True,
        interleaved: bool = False,
        dtype: mindspore.Type = mindspore.float16,
        bits: int | None = None,
        group: int | None = 128,
    ) -> None:
        name = "DecoderStack"
        super().__init__()
        self.layers, self.width = settings.positive(name, "layers", layers), settings.positive(name, "width", width)
        self.heads, self.kv_heads = heads, kv_heads
        operators(heads, kv_heads, eps, interleaved)  # checks them
        self.hidden = settings.positive(name, "hidden", hidden)
        if head_size is None and width % heads:
            raise ValueError(f"{name}: heads must divide width = {width} where head_size is not given, got {heads}")
        self.head_size = width // heads if head_size is None else settings.positive(name, "head_size", head_size)
        if self.head_size % 2 or self.head_size > MOST_FEATURES:
            raise ValueError(
                f"{name}: head_size must be even and at most {MOST_FEATURES}, got {self.head_size} features"
            )
        self.eps, self.interleaved, self.dtype = eps, interleaved, dtype
        self.bits, self.group = None if bits is None else check_bits(name, bits), check_group(name, group)
        has_bias = settings.boolean(name, "qkv_bias", qkv_bias)
        has_norms = settings.boolean(name, "qk_norm", qk_norm)
        has_norm = settings.boolean(name, "final_norm", final_norm)
        rows, of_heads = (heads + 2 * kv_heads) * self.head_size, heads * self.head_size

        def ones(label: str, *shape: int) -> Parameter:
            return settings.parameter(name, label, "ones", shape, dtype)

        def codes(label: str, *shape: int) -> Parameter:
            return Parameter(ops.zeros(shape, mindspore.uint8), name=label, requires_grad=False)

        def matrix(label: str, *shape: int) -> Parameter:
            if bits is None:
                return settings.parameter(name, label, Normal(shape[-1] ** -0.5), shape, dtype)
            leading, columns = shape[:-1], shape[-1]
            groups = 1 if group is None else -(-columns // group)
            scale = settings.parameter(name, f"{label}_scale", "zeros", (*leading, groups), dtype)
            scale.requires_grad = False
            setattr(self, f"{label}_scale", scale)
            setattr(self, f"{label}_zero_point", codes(f"{label}_zero_point", *leading, groups))
            return codes(label, *leading, columns if bits == 8 else -(-columns // 2))

        self.norm1, self.norm2 = ones("norm1", layers, width), ones("norm2", layers, width)
        self.qkv, self.out = matrix("qkv", layers, rows, width), matrix("out", layers, width, of_heads)
        self.gate_up, self.down = matrix("gate_up", layers, 2 * hidden, width), matrix("down", layers, width, hidden)
        self.norm = ones("norm", width) if has_norm else None
        self.qkv_bias = settings.parameter(name, "qkv_bias", "zeros", (layers, rows), dtype) if has_bias else None
        self.q_norm = ones("q_norm", layers, self.head_size) if has_norms else None
        self.k_norm = ones("k_norm", layers, self.head_size) if has_norms else None

    def construct(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor | None = None,
        values: Tensor | None = None,
        lengths: Tensor | None = None,
        block_tables: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = (x, cos, sin, self.norm1, self.qkv, self.out, self.norm2, self.gate_up, self.down)
        optional = (self.norm, self.qkv_bias, self.q_norm, self.k_norm, keys, values, lengths, block_tables)
        settings_ = (self.heads, self.kv_heads, self.eps, self.interleaved)
        if self.bits is None:
            return _call(settings_ + WITHOUT_CODES, inputs, optional, ())
        scales = (self.qkv_scale, self.out_scale, self.gate_up_scale, self.down_scale)
        zeros = (self.qkv_zero_point, self.out_zero_point, self.gate_up_zero_point, self.down_zero_point)
        of_codes = (self.bits, self.group, True)
        return _call(settings_ + of_codes, inputs, optional, scales + zeros)

    construct.__doc__ = decoder_stack.__doc__  # for help()

    def extend_repr(self) -> str:
        shown = settings.shown(
            self, "layers", "width", "heads", "kv_heads", "hidden", "head_size", "eps", "interleaved"
        )
        return shown if self.bits is None else f"{shown}, {settings.shown(self, 'bits', 'group')}"


def _count(tensors: tuple[Tensor, ...] | None) -> int | None:
    """Returns how many tensors there are, or -1 for what is no tuple."""
    if tensors is None:
        return None
    return len(tensors) if isinstance(tensors, tuple) else -1


def _call(
    settings_: tuple[Any, ...],
    inputs: tuple[Tensor, ...],
    optional: tuple[Tensor | None, ...],
    codes: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    norm, qkv_bias, q_norm, k_norm, keys, values, lengths, tables = optional
    of_norms = (norm is not None, qkv_bias is not None, q_norm is not None, k_norm is not None)
    of_cache = (keys is not None, values is not None, lengths is not None, tables is not None)
    found = operators.primitive(*settings_, *of_norms, *of_cache)(*inputs, *present(optional), *codes)
    return found[0], found[1], found[2]
