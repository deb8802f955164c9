"""Has the operators of the cross-entropy of rows whose labels are probabilities, and the gradient's gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspore import Tensor, nn, ops

from msops.core.compiled import constant, keep_dtypes
from msops.core.factory import Operators, custom_op
from msops.operators.add import backward as add_backward
from msops.shared.cross_entropy import KEPT, LIBRARY, NAME, attributes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from msops.core.operator import Operator


@Operators
def of_probabilities(
    ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float, gives: str
) -> Operator:
    """Returns the operator for labels that are probabilities, which gives the loss, lse, and what the gradient needs.

    The gradient is that of the "logits" or of the "labels" alone, or of "both", in one operator. Or "each" has an
    operator of its own, and graph mode leaves out what nobody asks for.
    """
    attributes = attributes_of(NAME, ignore_index, reduction, label_smoothing, z_loss, softcap)
    attributes.update(checks_labels=False, form=2)
    inputs, lse = "logits(N, V), labels(N, V), weight(V, dtype=accumulator)?", "lse(N, dtype=accumulator)"
    kept = f"{KEPT}, masses(N, dtype=accumulator)"
    loss = f"loss({'N, ' * (reduction == 'none')}dtype=accumulator)"
    second = _SecondGradients(label_smoothing, z_loss, softcap)

    def backward(outputs: str, gives: int, gradient: Callable[..., tuple[Tensor | None, ...]]) -> Operator:
        taken = f"{inputs}, {kept}, d{loss}, d{lse}"
        return custom_op(
            LIBRARY.CrossEntropyBackward, f"{taken} -> {outputs}", gradient=gradient, gives=gives, **attributes
        )

    of_logits = backward("dlogits(N, V)", 1, second.of_logits)
    of_labels = backward("dlabels(N, V)", 2, second.of_labels)

    def gradient_of_each(
        logits: Tensor, labels: Tensor, weight: Tensor | None, outs: tuple[Tensor, ...], douts: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        taken = logits, labels, weight, outs[2], outs[3], outs[4], douts[0], douts[1]
        return of_logits(*taken), of_labels(*taken), None if weight is None else ops.zeros_like(weight)

    gradients: dict[str, Any] = {
        "logits": of_logits,
        "labels": of_labels,
        "both": backward("dlogits(N, V), dlabels(N, V)", 3, second.of_both),
        "each": gradient_of_each,
    }
    return custom_op(
        LIBRARY.CrossEntropyForward,
        f"{inputs} -> {loss}, {lse}, {kept}; losses, partial",
        gradient=gradients[gives],
        **attributes,
    )


class _SecondGradients(nn.Cell):
    """Computes the gradients of CrossEntropyBackward for probabilities, by MindSpore's operators.

    What stats and masses owe to the logits and the probabilities is in the gradients of these.
    """

    def __init__(self, label_smoothing: float, z_loss: float, softcap: float) -> None:
        super().__init__()
        keep_dtypes(self)
        self.label_smoothing, self.z_loss, self.softcap = label_smoothing, z_loss, softcap
        self.sum = ops.ReduceSum(keep_dims=True)

    def of_logits(
        self,
        logits: Tensor,
        labels: Tensor,
        weight: Tensor | None,
        stats: Tensor,
        totals: Tensor,
        masses: Tensor,
        dloss: Tensor,
        dlse: Tensor,
        dlogits: Tensor,
        ddlogits: Tensor,
    ) -> tuple[Tensor | None, ...]:
        douts = ddlogits, ops.zeros_like(ddlogits)
        return self.of_both(logits, labels, weight, stats, totals, masses, dloss, dlse, dlogits, douts)

    def of_labels(
        self,
        logits: Tensor,
        labels: Tensor,
        weight: Tensor | None,
        stats: Tensor,
        totals: Tensor,
        masses: Tensor,
        dloss: Tensor,
        dlse: Tensor,
        dlabels: Tensor,
        ddlabels: Tensor,
    ) -> tuple[Tensor | None, ...]:
        douts = ops.zeros_like(ddlabels), ddlabels
        return self.of_both(logits, labels, weight, stats, totals, masses, dloss, dlse, dlabels, douts)

    def of_both(
        self,
        logits: Tensor,
        labels: Tensor,
        weight: Tensor | None,
        stats: Tensor,
        totals: Tensor,
        masses: Tensor,
        dloss: Tensor,
        dlse: Tensor,
        outs: Any,
        douts: tuple[Tensor, Tensor],
    ) -> tuple[Tensor | None, ...]:
        """Names are those of loss.h: with the softmax p, the gradients are u = g p - c a, times the softcap's
        derivative, and c kept w (lse - x)."""
        dtype = dloss.dtype
        x, along_x, along_q = ops.cast(logits, dtype), ops.cast(douts[0], dtype), ops.cast(douts[1], dtype)
        kept, z = constant(1 - self.label_smoothing, dtype), constant(2 * self.z_loss, dtype)
        a, slope, bend = ops.cast(labels, dtype) * kept, None, None
        if self.label_smoothing > 0:
            a = a + constant(self.label_smoothing / logits.shape[1], dtype)
        of_q = kept
        if weight is not None:
            a, of_q = a * weight, kept * weight
        if self.softcap > 0:
            softcap, two = constant(self.softcap, dtype), constant(2.0, dtype)
            t = ops.tanh(x / softcap)
            x, slope = softcap * t, 1 - t * t
            bend = -two * t / softcap * along_x
            along_x = along_x * slope
        top, share = stats[:, :1], stats[:, 1:]
        p, lse = ops.exp(x - top) * share, top - ops.log(share)
        c, mass = ops.reshape(dloss, (-1, 1)) / totals[0], ops.reshape(masses, (-1, 1))
        g = c * (mass + z * lse) + ops.reshape(dlse, (-1, 1))
        s, along_q = self.sum(p * along_x, 1), along_q * of_q
        dx = p * (g * (along_x - s) + z * c * s) + c * (p * self.sum(along_q, 1) - along_q)
        if slope is not None:
            dx = (dx + bend * (g * p - c * a)) * slope
        dq = c * of_q * (s - along_x)
        dc = (mass + z * lse) * s + self.sum(along_q * (lse - x) - along_x * a, 1)
        of_loss = ops.reshape(dc / totals[0], masses.shape)
        if dloss.ndim == 0:
            of_loss = add_backward(of_loss, constant(0.0, dtype))  # MindSpore would not write the sum over no rows
        of_lse = ops.reshape(s, masses.shape)
        of_stats, of_totals, of_masses = ops.zeros_like(stats), ops.zeros_like(totals), ops.zeros_like(masses)
        of_weight = None if weight is None else ops.zeros_like(weight)
        dlogits, dlabels = ops.cast(dx, logits.dtype), ops.cast(dq, labels.dtype)
        return dlogits, dlabels, of_weight, of_stats, of_totals, of_masses, of_loss, of_lse
