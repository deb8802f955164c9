from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import mindspore
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common.initializer import Uniform

from msops import compat
from msops.core import settings
from msops.core.compiled import once
from msops.core.inputs import (
    cast_as,
    check_inputs,
    check_pair,
    describe,
    describe_pair,
    fits,
    has_zero,
    is_pynative,
    spec_of,
    unless_zero,
)
from msops.core.signature import Signature
from msops.core.spec import Spec, dtype_name
from msops.operators.lltm_cell import LLTMCell
from msops.shared.lltm import operators, refuse_second

if TYPE_CHECKING:
    from typing import Any

    from msops.core.inputs import Description, Sizes

    State = tuple[Tensor, Tensor]


def lltm(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor,
    seq_length: Tensor | None = None,
    reverse: bool = False,
    allow_tf32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Runs the LLTM over sequences: all steps of :func:`msops.lltm_cell` in one call.

    .. math::
        (i_t, o_t, g_t) &= x_t\, \text{weight\_ih}^T + h_{t-1}\, \text{weight\_hh}^T + \text{bias} \\
        c_t &= c_{t-1} + \sigma(i_t) \odot \operatorname{ELU}(g_t) \\
        h_t &= \tanh(c_t) \odot \sigma(o_t)

    One matmul of MindSpore computes the inputs' products, and one kernel all steps. Every floating input has a
    gradient; one matmul computes the gradient of each weight. In float16, h is rounded at each step; c and the sums
    stay in float32. The gradients have no gradients of their own.

    Args:
        x (Tensor): Shape (T, B, I); float16, float32 or float64. All inputs except `seq_length` have the same dtype.
        h (Tensor): Hidden state before the first step, shape (B, H).
        c (Tensor): Cell state before the first step, shape (B, H).
        weight_ih (Tensor): Shape (3H, I). The first H rows are for i, the next for o, the last for g.
        weight_hh (Tensor): Shape (3H, H), with rows in the same order.
        bias (Tensor): Shape (3H,), in the same order.
        seq_length (Tensor): The number of steps of each sample, shape (B,), int32 or int64. A number below 0 counts as
            0, one above T as T. Default: ``None`` , T steps for all.
        reverse (bool): Whether to go from each sample's last step to its first. Default: ``False`` .
        allow_tf32 (bool): Whether GPUs from sm_80 on may round h and `weight_hh` of float32 to TF32 (10 bits of
            mantissa) for their tensor cores. MindSpore's matmul has its own setting. Default: ``False`` .

    Returns:
        Tuple (output, h_n, c_n). `output` has h of each step, shape (T, B, H), and is 0 beyond a sample's length. `h_n`
        and `c_n` are the states after each sample's steps, shape (B, H).

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
        *(describe(x), describe(h), describe(c), describe(weight_ih), describe(weight_hh), describe(bias)),
        None if seq_length is None else describe(seq_length),
    )
    steps, batch, inputs = x.shape
    if seq_length is None:
        seq_length = _full_length(steps, batch)
        if seq_length is None:
            seq_length = ops.full((batch,), steps, dtype=mindspore.int32)
    elif seq_length.dtype == mindspore.int64:
        seq_length = ops.cast(ops.minimum(ops.maximum(seq_length, 0), steps), mindspore.int32)
    if is_pynative():
        x, weight_ih = refuse_second(x), refuse_second(weight_ih)
    shape = (steps, batch, bias.shape[0])
    if has_zero(steps, batch, weight_ih.shape[1], bias.shape[0]):
        product = ops.zeros(shape, x.dtype)
    else:
        rows = unless_zero(ops.reshape(x, (steps * batch, inputs)), bias.shape[0])
        product = _times_transposed(rows, unless_zero(weight_ih, steps * batch))
        product = ops.reshape(unless_zero(product, weight_ih.shape[1]), shape)
    recurrence = operators.primitive(reverse, allow_tf32)
    output, h_n, c_n, _, _, _ = recurrence(cast_as(product, h), weight_hh, bias, h, c, seq_length)
    return output, h_n, c_n


@once
def _check_sequence(*inputs: Description | None) -> None:
    specs = [spec_of(each) for each in inputs if each is not None]
    x, lengths = specs[0], specs[-1]
    if inputs[-1] is None:
        specs.append(x if isinstance(x, str) else Spec(x.shape[1:2], mindspore.int32))
    elif isinstance(lengths, str) or lengths.dtype not in (mindspore.int32, mindspore.int64):
        got = dtype_name(getattr(lengths, "dtype", lengths))
        raise TypeError(f"lltm: seq_length must be an int32 or int64 Tensor, got {got}")
    else:
        specs[-1] = lengths._replace(dtype=mindspore.int32)
    check_inputs(_SEQUENCE, "lltm", specs)


@once
def _check_layers(x: Description, input_size: int) -> None:
    spec = spec_of(x)
    if isinstance(spec, str):
        raise TypeError(f"LLTM: x must be a Tensor, got {spec}")
    if not fits(spec.shape, (None, None, input_size)):
        raise ValueError(f"LLTM: x must have three axes, the last of {input_size}, got {spec.shape}")


@once
def _check_state(h: Description, c: Description, shape: Sizes) -> None:
    for name, got in (("h_0", spec_of(h)), ("c_0", spec_of(c))):
        if isinstance(got, str):
            raise TypeError(f"LLTM: {name} must be a Tensor, got {got}")
        if not fits(got.shape, shape):
            raise ValueError(f"LLTM: {name} must have shape {shape}, got {got.shape}")


@once
def _full_length(steps: int | None, batch: int | None) -> Tensor | None:
    return None if steps is None or batch is None else Tensor(np.full(batch, steps, np.int32))


_times_transposed = ops.MatMul(transpose_b=True)
_SEQUENCE = Signature(
    "x(T, B, I), h(B, H), c(B, H), weight_ih(3 * H, I), weight_hh(3 * H, H), bias(3 * H), "
    "seq_length(B, dtype=int32) -> output(T, B, H)"
)


def _layers(
    self: LLTM, x: Tensor, state: State | None, seq_length: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    _check_layers(describe(x), self.input_size)
    if self.batch_first:
        x = ops.transpose(x, (1, 0, 2))
    batch = x.shape[1]
    if state is not None:
        check_pair("LLTM", "(h_0, c_0)", describe_pair(state))
        shape = (self.num_layers * self.directions, batch, self.hidden_size)
        h_0, c_0 = state
        _check_state(describe(h_0), describe(c_0), shape)
    h_n = ()  # type: tuple[Tensor, ...]  # MindSpore before 2.7 needs the type in a comment
    c_n = ()  # type: tuple[Tensor, ...]
    for layer in range(self.num_layers):
        outputs = ()  # type: tuple[Tensor, ...]
        for direction in range(self.directions):
            i = layer * self.directions + direction
            if state is None:
                h = c = ops.zeros((batch, self.hidden_size), x.dtype)
            else:
                h, c = cast_as(state[0][i], x), cast_as(state[1][i], x)
            weights = cast_as(self.weight_ih[i], x), cast_as(self.weight_hh[i], x)
            bias = cast_as(self.bias[i], x) if self.has_bias else ops.zeros((3 * self.hidden_size,), x.dtype)
            output, h, c = lltm(x, h, c, *weights, bias, seq_length, direction == 1, self.allow_tf32)
            outputs += (output,)
            h_n += (h,)
            c_n += (c,)
        x = outputs[0] if self.directions == 1 else ops.concat(outputs, 2)
        if self.drop is not None and layer < self.num_layers - 1:
            x = self.drop(x)
    if self.batch_first:
        x = ops.transpose(x, (1, 0, 2))
    return x, (ops.stack(h_n), ops.stack(c_n))


class LLTM(nn.Cell):
    r"""Layers of :func:`msops.lltm` with their parameters.

    They are called as MindSpore's nn.LSTM is: `output, (h_n, c_n) = net(x, (h_0, c_0), seq_length)`.

    There are L layers of D directions; D is 2 if `bidirectional`, else 1. Each layer after the first takes the output
    of the layer before, shape (T, B, D * H): first the forward direction's, then the reverse direction's, which begins
    at each sample's last step.

    State and parameters are cast to the dtype of `x`, as in :class:`msops.LLTMCell`.

    Args:
        input_size (int): I, the number of features of `x`.
        hidden_size (int): H, the number of features of each direction's output.
        num_layers (int): L, the number of layers. Default: ``1`` .
        has_bias (bool): Whether there are biases. Default: ``True`` .
        batch_first (bool): Whether `x` and `output` are (B, T, ...) instead of (T, B, ...). Default: ``False`` .
        dropout (float): The probability, in [0, 1), with which training drops an output of any layer except the last.
            Default: ``0.0`` .
        bidirectional (bool): Whether there is a reverse direction, too. Default: ``False`` .
        allow_tf32 (bool): As in :func:`msops.lltm`. Default: ``False`` .
        dtype (mindspore.dtype): The parameters' dtype: float16, float32 or float64. Default: ``mindspore.float32`` .

    Inputs:
        - **x** (Tensor) - Shape (T, B, I).
        - **state** (tuple) - (h_0, c_0), Tensors of shape (L * D, B, H), layer by layer. Default: ``None`` , zeros.
        - **seq_length** (Tensor) - As in :func:`msops.lltm`. Default: ``None`` .

    Outputs:
        Tuple (output, (h_n, c_n)) of Tensors of shapes (T, B, D * H), (L * D, B, H), (L * D, B, H).

    Attributes:
        weight_ih_l0, weight_hh_l0, bias_l0 (Parameter): The parameters of layer 0, as :func:`msops.lltm` takes them.
            Their initial values are uniform in :math:`\pm 1 / \sqrt{H}`. Other layers end in ``_l1`` and so on; the
            reverse direction adds ``_reverse`` .

    Raises:
        TypeError: If an argument has a wrong type, or the dtype is not one of float16, float32 and float64.
        ValueError: If a size is less than 1, or `dropout` is not in [0, 1). A call raises it if a shape does not fit.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import Tensor, ops
        >>> net = msops.LLTM(8, 2, num_layers=2, bidirectional=True)
        >>> output, (h_n, c_n) = net(ops.ones((5, 3, 8)), seq_length=Tensor([5, 0, 2]))
        >>> print(output.shape, h_n.shape, output[2:, 2].asnumpy().any())
        (5, 3, 4) (4, 3, 2) False
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        has_bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        allow_tf32: bool = False,
        dtype: mindspore.Type = mindspore.float32,
    ) -> None:
        name = "LLTM"
        super().__init__()
        self.input_size = input_size = settings.positive(name, "input_size", input_size)
        self.hidden_size = hidden_size = settings.positive(name, "hidden_size", hidden_size)
        self.num_layers = num_layers = settings.positive(name, "num_layers", num_layers)
        self.has_bias = settings.boolean(name, "has_bias", has_bias)
        self.batch_first = settings.boolean(name, "batch_first", batch_first)
        self.bidirectional = settings.boolean(name, "bidirectional", bidirectional)
        self.allow_tf32 = settings.boolean(name, "allow_tf32", allow_tf32)
        if not isinstance(dropout, (int, float)) or isinstance(dropout, bool):
            raise TypeError(f"{name}: dropout must be a float, got {type(dropout).__name__}")
        if not 0 <= dropout < 1:
            raise ValueError(f"{name}: dropout must be at least 0 and less than 1, got {dropout}")
        self.dropout = dropout
        self.drop = compat.dropout(float(dropout)) if dropout > 0 and num_layers > 1 else None
        self.directions = 2 if bidirectional else 1
        init = Uniform(1 / math.sqrt(hidden_size))
        weight_ih: list[Parameter] = []
        weight_hh: list[Parameter] = []
        bias: list[Parameter] = []
        for i in range(num_layers * self.directions):
            layer, of_reverse = divmod(i, self.directions)
            suffix = f"_l{layer}{'_reverse' if of_reverse else ''}"
            columns = input_size if layer == 0 else self.directions * hidden_size
            for kind, shape, parameters in (
                ("weight_ih", (3 * hidden_size, columns), weight_ih),
                ("weight_hh", (3 * hidden_size, hidden_size), weight_hh),
                ("bias", (3 * hidden_size,), bias),
            ):
                if kind != "bias" or has_bias:
                    parameters.append(settings.parameter(name, kind + suffix, init, shape, dtype))
        self.weight_ih, self.weight_hh, self.bias = map(ParameterTuple, (weight_ih, weight_hh, bias))

    @classmethod  # level O1 evaluates what follows ->, in a module where this class has another name
    def from_cells(cls, cells: Iterable[LLTMCell], bidirectional: bool = False, **settings: Any) -> "LLTM":  # noqa: UP037
        """Makes layers that compute the same steps as these cells, with copies of their parameters.

        Args:
            cells (list[LLTMCell]): One cell for each layer; if `bidirectional`, two, the forward direction's first.
            bidirectional (bool): Whether there is a reverse direction, too. Default: ``False`` .
            **settings: `batch_first`, `dropout` and `allow_tf32`, as the class takes them.

        Returns:
            LLTM

        Raises:
            TypeError: If a cell is not an LLTMCell.
            ValueError: If the cells' number, sizes or dtypes do not fit.

        Examples:
            >>> import msops
            >>> net = msops.LLTM.from_cells([msops.LLTMCell(8, 2), msops.LLTMCell(2, 2)])
            >>> print(net.num_layers, net.weight_ih_l0.shape)
            2 (6, 8)
        """
        if not isinstance(cells, Iterable) or isinstance(cells, nn.Cell):
            raise TypeError(f"LLTM: cells must be a list of LLTMCells, got {type(cells).__name__}")
        cells = list(cells)
        for cell in cells:
            if not isinstance(cell, LLTMCell):
                raise TypeError(f"LLTM: cells must be LLTMCells, got {type(cell).__name__}")
        directions = 2 if bidirectional else 1
        if not cells or len(cells) % directions:
            raise ValueError(f"LLTM: cells must be {directions} for each layer, got {len(cells)}")
        hidden, dtype = cells[0].hidden_size, cells[0].weight.dtype
        settings = dict(settings, bidirectional=bidirectional, dtype=dtype)
        net = cls(cells[0].input_size, hidden, len(cells) // directions, **settings)
        for i, (cell, weight_ih) in enumerate(zip(cells, net.weight_ih)):
            shape = (3 * hidden, hidden + weight_ih.shape[1])
            if cell.weight.shape != shape or cell.weight.dtype != dtype:
                raise ValueError(
                    f"LLTM: cells[{i}].weight must be {dtype_name(dtype)} of shape {shape}, "
                    f"got {dtype_name(cell.weight.dtype)} of {cell.weight.shape}"
                )
            weight = cell.weight.asnumpy()
            weight_ih.set_data(Tensor(weight[:, hidden:].copy()))
            net.weight_hh[i].set_data(Tensor(weight[:, :hidden].copy()))
            net.bias[i].set_data(Tensor(cell.bias.asnumpy()))
        return net

    def to_cells(self) -> list[LLTMCell]:
        """Makes cells that compute the same steps as these layers, with copies of their parameters.

        This is the reverse of :meth:`from_cells`.

        Returns:
            list[LLTMCell]

        Examples:
            >>> import msops
            >>> print(msops.LLTM(8, 2, bidirectional=True).to_cells()[1].weight.shape)
            (6, 10)
        """
        cells = []
        for i, (weight_ih, weight_hh) in enumerate(zip(self.weight_ih, self.weight_hh)):
            cell = LLTMCell(weight_ih.shape[1], self.hidden_size, weight_ih.dtype)
            weight = np.concatenate([weight_hh.asnumpy(), weight_ih.asnumpy()], 1)
            cell.weight.set_data(Tensor(weight))
            cell.bias.set_data(Tensor(self.bias[i].asnumpy() if self.has_bias else np.zeros_like(weight[:, 0])))
            cells.append(cell)
        return cells

    _forward = _layers  # as in LLTMCell, for level O1 of amp

    def construct(
        self, x: Tensor, state: State | None = None, seq_length: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self._forward(x, state, seq_length)

    construct.__doc__ = lltm.__doc__  # for help()

    def extend_repr(self) -> str:
        return (
            f"input_size={self.input_size}, hidden_size={self.hidden_size}, num_layers={self.num_layers}, "
            f"has_bias={self.has_bias}, batch_first={self.batch_first}, dropout={self.dropout}, "
            f"bidirectional={self.bidirectional}, allow_tf32={self.allow_tf32}"
        )
