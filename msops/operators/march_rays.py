from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn, ops

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.inputs import present
from msops.core.library import of_package
from msops.shared.rays import box

if TYPE_CHECKING:
    from msops.core.operator import Operator
    from msops.shared.rays import Corner

_NAME = "march_rays"
_library = of_package(_NAME)


def march_rays(
    origins: Tensor,
    directions: Tensor,
    near: Tensor,
    far: Tensor,
    occupancy: Tensor,
    low: Corner,
    high: Corner,
    step: float,
    capacity: int,
    jitter: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Samples rays where a grid is occupied, in steps of one length.

    .. math::
        t_k = \text{near} + (k + \text{jitter})\, \text{step} < \text{far}, \qquad
        \text{cell}_a = \Big\lfloor G\, \frac{o_a + t_k d_a - \text{low}_a}{\text{high}_a - \text{low}_a} \Big\rfloor

    A step of k = 0, 1, ... gives a sample if ``occupancy[cell]`` is True; a cell outside of the grid counts as the
    nearest one in it. The samples of ray 0 come first, then those of ray 1, and so on: ``offsets[r]`` to
    ``offsets[r + 1]`` are those of ray r, as :func:`msops.composite_rays` takes them. The offsets are true even where
    the samples are more than `capacity`: samples from there on are left out, so that ``offsets[-1]`` tells how much
    room all would take (at most 2^31 - 1). Room that is left has t = dt = 0 and ray = -1.

    A ray with a `near` or `far` that is not finite has no samples, and the steps of a ray end after 2^24. Places are
    computed in float32 (float64 for float64), by the same roundings on the CPU and on a GPU; beside float16, `t` is
    rounded after that. There are no gradients: those of the inputs are zeros.

    Args:
        origins (Tensor): o, shape (R, 3); float16, float32 or float64.
        directions (Tensor): d, with the shape and dtype of `origins`.
        near (Tensor): Where each ray begins, shape (R,), the dtype of `origins`, as from :func:`msops.ray_aabb`.
        far (Tensor): Where each ray ends, likewise. A ray that ends where it begins, or before, has no samples.
        occupancy (Tensor): Which cells of the box are occupied, shape (G, G, G) for x, y and z, bool.
        low (float, tuple): The least coordinates of the box, one for each axis or one for all.
        high (float, tuple): The greatest coordinates, each more than that of `low`.
        step (float): The length of a step, in units of t, more than 0.
        capacity (int): For how many samples there is room.
        jitter (Tensor): How far into its step each ray samples, shape (R,), the dtype of `origins`, from 0 to 1; less
            counts as 0, and more as 1. Default: ``None`` , 0.5.

    Returns:
        tuple of four Tensors: t, shape (capacity,), of the dtype of `origins`; dt, the lengths of the samples' steps,
        likewise; ray, the index of each sample's ray, shape (capacity,), int32; offsets, shape (R + 1,), int32.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, the dtypes differ, or a setting has a wrong type.
        ValueError: If an input has another shape, a corner is not finite, `high` is not more than `low`, `step` is not
            more than 0, or `capacity` is negative or more than 2^31 - 1.

    Source:
        Mueller et al., "Instant neural graphics primitives with a multiresolution hash encoding", 2022.

    Examples:
        >>> import mindspore, msops
        >>> import numpy as np
        >>> origins = mindspore.Tensor([[0.0, 0.5, 0.5], [1.0, 0.5, 0.5]], mindspore.float32)
        >>> directions = mindspore.Tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]], mindspore.float32)
        >>> near, far = msops.ray_aabb(origins, directions, 0, 1)
        >>> grid = np.zeros((2, 2, 2), bool)
        >>> grid[1] = True  # x from 0.5 on
        >>> t, dt, ray, offsets = msops.march_rays(
        ...     origins, directions, near, far, mindspore.Tensor(grid), 0, 1, step=0.25, capacity=5
        ... )
        >>> print(t, ray, offsets)
        [0.625 0.875 0.125 0.375 0.   ] [ 0  0  1  1 -1] [0 2 4]
    """
    march = operators.primitive(low, high, step, capacity, jitter is not None)
    found = march(origins, directions, near, far, occupancy, *present((jitter,)))
    return found[0], found[1], found[2], found[3]


class MarchRays(nn.Cell):
    """Samples rays where a grid is occupied. See :func:`msops.march_rays`.

    Args:
        low (float, tuple): As in the function.
        high (float, tuple): As in the function.
        step (float): As in the function.
        capacity (int): As in the function.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument has a wrong value.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> march = msops.MarchRays(0, 1, step=0.1, capacity=100)
        >>> rays, grid = ops.ones((3, 3), mindspore.float32), ops.ones((8, 8, 8), mindspore.bool_)
        >>> t, dt, ray, offsets = march(rays, -rays, ops.zeros(3), ops.ones(3), grid)
        >>> print(offsets)
        [ 0 10 20 30]
    """

    def __init__(self, low: Corner, high: Corner, step: float, capacity: int) -> None:
        super().__init__()
        operators(low, high, step, capacity)  # checks them
        self.low, self.high, self.step, self.capacity = low, high, step, capacity

    def construct(
        self,
        origins: Tensor,
        directions: Tensor,
        near: Tensor,
        far: Tensor,
        occupancy: Tensor,
        jitter: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        march = operators.primitive(self.low, self.high, self.step, self.capacity, jitter is not None)
        found = march(origins, directions, near, far, occupancy, *present((jitter,)))
        return found[0], found[1], found[2], found[3]

    construct.__doc__ = march_rays.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "low", "high", "step", "capacity")


def _no_gradient(
    origins: Tensor,
    directions: Tensor,
    near: Tensor,
    far: Tensor,
    occupancy: Tensor,
    jitter: Tensor | None,
    out: tuple[Tensor, ...],
    dout: tuple[Tensor, ...],
) -> tuple[Tensor | None, ...]:
    djitter = None if jitter is None else ops.zeros_like(jitter)
    dorigins, ddirections = ops.zeros_like(origins), ops.zeros_like(directions)
    return dorigins, ddirections, ops.zeros_like(near), ops.zeros_like(far), ops.zeros_like(occupancy), djitter


@Operators
def operators(low: Corner, high: Corner, step: float, capacity: int) -> Operator:
    length = settings.number(_NAME, "step", step)
    if not length > 0:
        raise ValueError(f"{_NAME}: step must be more than 0, got {step}")
    if not 0 <= settings.integer(_NAME, "capacity", capacity) < 2**31:
        raise ValueError(f"{_NAME}: capacity must be at least 0 and less than 2^31, got {capacity}")
    return custom_op(
        _library.MarchRaysForward,
        "origins(R, 3), directions(R, 3), near(R), far(R), occupancy(G, G, G, dtype=bool), jitter(R)? -> "
        "t(capacity), dt(capacity), ray(capacity, dtype=int32), offsets(R + 1, dtype=int32); "
        "counts(..., dtype=int32), partial(..., dtype=int64)",
        gradient=_no_gradient,
        step=length,
        capacity=int(capacity),
        **box(_NAME, low, high),
    )
