from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package
from msops.core.spec import Spec

if TYPE_CHECKING:
    from msops.core.operator import Operator

_NAME = "composite_rays"
_library = of_package(_NAME)


def composite_rays(
    sigmas: Tensor, rgbs: Tensor, dts: Tensor, ts: Tensor, offsets: Tensor, threshold: float = 1e-4
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Composites the samples of rays into colours, front to back, as neural radiance fields do.

    .. math::
        w_i &= T_i\, (1 - e^{-\sigma_i \text{dt}_i}), \qquad T_i = \exp\Big(-\sum_{j < i} \sigma_j \text{dt}_j\Big) \\
        \text{rgb} &= \sum_i w_i\, \text{rgbs}_i, \qquad \text{depth} = \sum_i w_i t_i, \qquad
        \text{opacity} = \sum_i w_i

    A ray ends at the first sample whose :math:`T_i` , the light that comes through the samples before it, is below
    `threshold`; from there on weights and gradients are 0. Samples from ``offsets[r]`` to ``offsets[r + 1]`` are those
    of ray r. Offsets beyond the samples count as their number, so that those of :func:`msops.march_rays` are right also
    where samples were left out. A sample of no ray has the weight 0, and a ray without samples gives zeros.

    `sigmas` and `rgbs` have gradients, of first order, from all four results. With g_i, the gradient of w_i through all
    of them,

    .. math::
        \text{dsigmas}_i = \text{dt}_i \Big( T_{i+1}\, g_i - \sum_{j > i} w_j\, g_j \Big), \qquad
        \text{drgbs}_i = w_i\, \text{drgb}

    The gradients of `dts` and `ts` are zeros. Sums are in float32 (float64 for float64) and have a fixed order.

    Args:
        sigmas (Tensor): Densities, shape (S,), at least 0; float16, float32 or float64.
        rgbs (Tensor): Colours, shape (S, 3), the dtype of `sigmas`.
        dts (Tensor): The lengths of the samples along their rays, shape (S,), the dtype of `sigmas`.
        ts (Tensor): The samples' distances, for `depth`, shape (S,), the dtype of `sigmas`.
        offsets (Tensor): Where the samples of each ray begin, and at last where those of the last ray end, shape
            (R + 1,), int32 or int64. They begin at 0 or more and do not decrease: else it is an error on the CPU; on a
            GPU, a ray with an end before its begin has no samples then.
        threshold (float): Which part of the light is too little to go on, from 0 to 1. Default: ``1e-4`` .

    Returns:
        tuple of four Tensors of the dtype of `sigmas`: rgb, shape (R, 3), depth and opacity, shape (R,), and the
        samples' weights, shape (S,).

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, dtypes differ, or `threshold` is not a number.
        ValueError: If an input has another shape, `offsets` is empty, or `threshold` is not in [0, 1].

    Source:
        Max, "Optical models for direct volume rendering", 1995. Mildenhall et al., "NeRF: Representing scenes as neural
        radiance fields for view synthesis", 2020.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import Tensor
        >>> sigmas, dts = Tensor([0.0, 9.0, 9.0], mindspore.float32), Tensor([1.0, 1.0, 2.0], mindspore.float32)
        >>> rgbs = Tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1]], mindspore.float32)
        >>> offsets = Tensor([0, 2, 2, 3], mindspore.int32)  # the second ray has no samples
        >>> rgb, depth, opacity, weights = msops.composite_rays(sigmas, rgbs, dts, Tensor([1.0, 2.0, 3.0]), offsets)
        >>> print(rgb.asnumpy().round(2).tolist(), depth.asnumpy().round(2))
        [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]] [2. 0. 3.]
    """
    return operators.primitive(threshold)(sigmas, rgbs, dts, ts, offsets)


class CompositeRays(nn.Cell):
    """Composites the samples of rays into colours. See :func:`msops.composite_rays`.

    Args:
        threshold (float): As in the function. Default: ``1e-4`` .

    Raises:
        TypeError: If `threshold` is not a number.
        ValueError: If `threshold` is not in [0, 1].
    """

    def __init__(self, threshold: float = 1e-4) -> None:
        super().__init__()
        operators(threshold)  # checks it
        self.threshold = threshold

    def construct(
        self, sigmas: Tensor, rgbs: Tensor, dts: Tensor, ts: Tensor, offsets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return operators.primitive(self.threshold)(sigmas, rgbs, dts, ts, offsets)

    construct.__doc__ = composite_rays.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "threshold")


@Operators
def operators(threshold: float = 1e-4) -> Operator:
    least = settings.number(_NAME, "threshold", threshold, least=0)
    if least > 1:
        raise ValueError(f"{_NAME}: threshold must be at most 1, got {threshold}")
    given = "sigmas(S), rgbs(S, 3), dts(S), ts(S), offsets(P, dtype=index)"
    backward = custom_op(
        _library.CompositeRaysBackward,
        f"{given}, drgb(P - 1, 3), ddepth(P - 1), dopacity(P - 1), dweights(S) -> dsigmas(S), drgbs(S, 3)",
        threshold=least,
    )
    return custom_op(
        _library.CompositeRaysForward,
        f"{given} -> rgb, depth, opacity, weights",
        infer=_infer,
        gradient=backward,
        threshold=least,
    )


def _infer(sigmas: Spec, rgbs: Spec, dts: Spec, ts: Spec, offsets: Spec, threshold: float) -> list[Spec]:
    rays = offsets.shape[0] - 1
    if rays < 0:
        raise ValueError("offsets must have at least one number, got shape (0,)")
    of_ray = Spec((rays,), sigmas.dtype)
    return [Spec((rays, 3), sigmas.dtype), of_ray, of_ray, sigmas]
