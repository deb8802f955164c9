import math

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common.initializer import Uniform

from .. import check
from ..custom import custom_op, once
from ..library import of_package
from ..rules import scratch
from ..signature import Signature
from .add import _add_backward as _sum_to


def lltm_cell(x, h, c, weight, bias):
    r"""One step of the LLTM ("long long-term memory"), a recurrent cell without a forget gate.

    .. math::
        (i, o, g) &= [h, x]\, \text{weight}^T + \text{bias} \\
        c' &= c + \sigma(i) \odot \operatorname{ELU}(g) \\
        h' &= \tanh(c') \odot \sigma(o)

    :math:`[h, x]` are the columns of `h` followed by those of `x`; ELU has :math:`\alpha = 1`. The product is
    MindSpore's matmul; all the rest is one kernel. Every input has a gradient; the backward kernel computes the
    activations again instead of keeping them.

    Args:
        x (Tensor): The step's input, shape (B, I); float16, float32 or float64. All inputs have one dtype.
        h (Tensor): Hidden state, shape (B, H).
        c (Tensor): Cell state, shape (B, H).
        weight (Tensor): Shape (3H, H + I), the rows of i, then those of o, then those of g.
        bias (Tensor): Shape (3H,).

    Returns:
        Tuple (h', c') of Tensors of shape (B, H).

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or the dtypes differ.
        ValueError: If an input has another shape.

    Source:
        The cell of PyTorch's tutorial "Custom C++ and CUDA extensions".

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> x, h, c = ops.ones((4, 8)), ops.zeros((4, 2)), ops.ones((4, 2))
        >>> new_h, new_c = msops.lltm_cell(x, h, c, weight=ops.zeros((6, 10)), bias=ops.zeros(6))
        >>> print(new_c[0], new_h[0])
        [1. 1.] [0.3807971 0.3807971]
    """
    return _step(x, h, c, weight, bias)


def lltm(x, h, c, weight_ih, weight_hh, bias, seq_length=None, reverse=False, allow_tf32=False):
    r"""The LLTM over sequences: all steps of :func:`msops.lltm_cell` in one call.

    .. math::
        (i_t, o_t, g_t) &= x_t\, \text{weight\_ih}^T + h_{t-1}\, \text{weight\_hh}^T + \text{bias} \\
        c_t &= c_{t-1} + \sigma(i_t) \odot \operatorname{ELU}(g_t) \\
        h_t &= \tanh(c_t) \odot \sigma(o_t)

    The inputs' products are one matmul of MindSpore's, the steps are one kernel. Every floating input has a gradient;
    those of the weights are one matmul each. In float16, h is rounded at each step; c and the sums stay in float32.

    Args:
        x (Tensor): Shape (T, B, I); float16, float32 or float64. All inputs but `seq_length` have one dtype.
        h (Tensor): Hidden state before the first step, shape (B, H).
        c (Tensor): Cell state before the first step, shape (B, H).
        weight_ih (Tensor): Shape (3H, I), the rows of i, then those of o, then those of g.
        weight_hh (Tensor): Shape (3H, H), likewise.
        bias (Tensor): Shape (3H,).
        seq_length (Tensor): How many steps each sample has, shape (B,), int32 or int64; below 0 is 0, above T is T.
            Default: ``None`` , all T.
        reverse (bool): Whether to go from each sample's last step to its first. Default: ``False`` .
        allow_tf32 (bool): Whether GPUs from sm_80 on may round h and `weight_hh` of float32 to TF32 (10 bits of
            mantissa) for their tensor cores. MindSpore's matmul has a setting of its own. Default: ``False`` .

    Returns:
        Tuple (output, h_n, c_n): h of each step, shape (T, B, H), 0 beyond a sample's length, and the state behind each
        sample's last step, shape (B, H).

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, the dtypes differ, or a setting is not a bool.
        ValueError: If an input has another shape.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> x, h, c = ops.ones((5, 4, 8)), ops.zeros((4, 2)), ops.ones((4, 2))
        >>> output, h_n, c_n = msops.lltm(x, h, c, ops.zeros((6, 8)), ops.zeros((6, 2)), ops.zeros(6))
        >>> print(output.shape, c_n[0], h_n[0])
        (5, 4, 2) [1. 1.] [0.3807971 0.3807971]
    """
    _check_sequence(
        *(_describe(x), _describe(h), _describe(c), _describe(weight_ih), _describe(weight_hh), _describe(bias)),
        None if seq_length is None else _describe(seq_length),
    )
    steps, batch, inputs = x.shape
    if seq_length is None:
        seq_length = _full_length(steps, batch)
    elif seq_length.dtype == mindspore.int64:
        seq_length = ops.cast(ops.minimum(seq_length, steps), mindspore.int32)
    shape = (steps, batch, bias.shape[0])
    if steps * batch * inputs == 0:  # sums of nothing, which MindSpore's MatMul does not write
        product = ops.zeros(shape, x.dtype)
    else:
        product = ops.reshape(_times_transposed(ops.reshape(x, (steps * batch, inputs)), weight_ih), shape)
    recurrence = _recurrence(reverse, allow_tf32)
    output, h_n, c_n, _, _, _ = recurrence(product, weight_hh, bias, h, c, seq_length)
    return output, h_n, c_n


class LLTMCell(nn.Cell):
    r"""An LLTM cell with its parameters: `cell(x, (h, c))` is `(new_h, new_c)`. See :func:`msops.lltm_cell`.

    Args:
        input_size (int): I, the number of columns of `x`.
        hidden_size (int): H, the number of columns of `h` and `c`.
        dtype (mindspore.dtype): Of the parameters. Default: ``mindspore.float32`` .

    Attributes:
        weight (Parameter): Shape (3H, H + I), uniform in :math:`\pm 1 / \sqrt{H}`.
        bias (Parameter): Shape (3H,), likewise.

    Raises:
        TypeError: If a size is not an int, or the dtype is none of float16, float32, float64.
        ValueError: If a size is less than 1.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> cell = msops.LLTMCell(8, 2)
        >>> new_h, new_c = cell(ops.ones((4, 8)), (ops.zeros((4, 2)), ops.zeros((4, 2))))
        >>> print(new_h.shape, new_c.shape)
        (4, 2) (4, 2)
    """

    def __init__(self, input_size, hidden_size, dtype=mindspore.float32):
        super().__init__()
        self.input_size = check.positive("LLTMCell", "input_size", input_size)
        self.hidden_size = check.positive("LLTMCell", "hidden_size", hidden_size)
        init = Uniform(1 / math.sqrt(hidden_size))
        shape = (3 * hidden_size, hidden_size + input_size)
        self.weight = check.parameter("LLTMCell", "weight", init, shape, dtype)
        self.bias = check.parameter("LLTMCell", "bias", init, shape[:1], dtype)

    def construct(self, x, state):
        if not isinstance(state, (tuple, list)):
            raise TypeError("LLTMCell: state must be a tuple (h, c)")
        h, c = state
        return _step(x, h, c, self.weight, self.bias)

    def extend_repr(self):
        return f"input_size={self.input_size}, hidden_size={self.hidden_size}"


def _step(x, h, c, weight, bias):
    _check(_describe(x), _describe(h), _describe(c), _describe(weight), _describe(bias))
    product = ops.matmul(ops.concat((h, x), 1), weight.T)
    return _pointwise(product, bias, c)


def _describe(x):
    if isinstance(x, Tensor):
        return x.shape, x.dtype
    return None, type(x)


@once
def _check(*inputs):
    specs = [check.Spec(shape, getattr(kind, "__name__", kind)) for shape, kind in inputs]
    _STEP.check("lltm_cell", *specs)


def _infer_backward(product, bias, c, dnew_h, dnew_c):
    batch, hidden = c.shape
    # Groups of the batch, each summed by blocks of a GPU's threads, of which these are enough to fill it.
    groups = max(1, min(batch // 64, 2**16 // max(1, hidden), 4096))
    return [product, bias, c, scratch(c.dtype, groups, 3 * hidden)]


@once
def _check_sequence(*inputs):
    *specs, lengths = (
        kind if kind is None else check.Spec(kind[0], getattr(kind[1], "__name__", kind[1])) for kind in inputs
    )
    if lengths is None:
        lengths = specs[0]._replace(shape=specs[0].shape and specs[0].shape[1:2], dtype=mindspore.int32)
    elif lengths.shape is None or lengths.dtype not in (mindspore.int32, mindspore.int64):
        raise TypeError(f"lltm: seq_length must be an int32 or int64 Tensor, got {check.dtype_name(lengths.dtype)}")
    _SEQUENCE.check("lltm", *specs, lengths._replace(dtype=mindspore.int32))


@once
def _full_length(steps, batch):
    return Tensor(np.full(batch, steps, np.int32))


class _SequenceGradient(nn.Cell):
    """Of the recurrence: what its backward kernel leaves out are a matmul and a sum."""

    def __init__(self, backward):
        super().__init__()
        self.backward = backward

    def gradient(self, product, weight, bias, h, c, lengths, out, dout):
        output, _, _, gates, cells, _ = out
        doutput, dlast_h, dlast_c, _, _, _ = dout
        dproduct, hidden_before, dh, dc, _ = self.backward(
            weight, gates, cells, output, h, lengths, doutput, dlast_h, dlast_c
        )
        rows = product.shape[0] * product.shape[1]
        dgates = ops.reshape(dproduct, (rows, weight.shape[0]))
        if rows == 0:
            dweight = ops.zeros_like(weight)
        else:
            dweight = _transposed_times(dgates, ops.reshape(hidden_before, (rows, weight.shape[1])))
        dbias, _ = _sum_to(dgates, bias)
        return dproduct, dweight, dbias, dh, dc, ops.zeros_like(lengths)


@once
def _recurrence(reverse, allow_tf32):
    for name, value in (("reverse", reverse), ("allow_tf32", allow_tf32)):
        if not isinstance(value, bool):
            raise TypeError(f"lltm: {name} must be a bool, got {type(value).__name__}")
    settings = dict(reverse=reverse, allow_tf32=allow_tf32)
    library = of_package("lltm_sequence")
    backward = custom_op(
        library.LLTMSequenceBackward,
        "weight(3 * H, H), gates(T, B, 3 * H), cells(T, B, H), output(T, B, H), h(B, H), lengths(B, dtype=int32), "
        "doutput(T, B, H), dlast_h(B, H), dlast_c(B, H) -> "
        f"dgates(T, B, 3 * H), hidden_before(T, B, H), dh(B, H), dc(B, H), {_SCRATCH}",
        **settings,
    )
    return custom_op(
        library.LLTMSequenceForward,
        "product(T, B, 3 * H), weight(3 * H, H), bias(3 * H), h(B, H), c(B, H), lengths(B, dtype=int32) -> "
        f"output(T, B, H), last_h(B, H), last_c(B, H), gates(T, B, 3 * H), cells(T, B, H), {_SCRATCH}",
        gradient=_SequenceGradient(backward).gradient,
        **settings,
    )


_times_transposed, _transposed_times = ops.MatMul(transpose_b=True), ops.MatMul(transpose_a=True)
_SCRATCH = "scratch(8 * ((B + 7) // 8 * 8) * ((H + 31) // 32 * 32) + 1024, dtype=accumulator)"
_SEQUENCE = Signature(
    "x(T, B, I), h(B, H), c(B, H), weight_ih(3 * H, I), weight_hh(3 * H, H), bias(3 * H), "
    "seq_length(B, dtype=int32) -> output(T, B, H)"
)
_STEP = Signature("x(B, I), h(B, H), c(B, H), weight(3 * H, H + I), bias(3 * H) -> new_h(B, H), new_c(B, H)")
_library = of_package("lltm")
_pointwise_backward = custom_op(
    _library.LLTMBackward,
    "product(B, 3 * H), bias(3 * H), c(B, H), dnew_h(B, H), dnew_c(B, H) -> dproduct, dbias, dc, partial",
    infer=_infer_backward,
)
_pointwise = custom_op(
    _library.LLTMForward,
    "product(B, 3 * H), bias(3 * H), c(B, H) -> new_h(B, H), new_c(B, H)",
    gradient=_pointwise_backward,
)
