"""Learns a signed distance field from points of a surface and its normals, with slopes of length 1 everywhere."""

import sys

import matplotlib.pyplot as plt
import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from tqdm import trange

import msops
from common import options

_POINTS = 4096  # of a step, on the surface and as many in space
_PIXELS = 160  # along each side of a picture
_REQUIRED = 0.01
_LENGTH, _RADIUS = 0.25, 0.09  # of the arms of a jack, from the center on


class Field(nn.Cell):
    """Maps points (N, 3) in the unit cube to distances (N, 1). It begins as about a ball."""

    def __init__(self):
        super().__init__()
        self.encoding = msops.HashEncoding(3, 8, 2, 14, 4, 1.5, "smoothstep")
        self.layers = nn.SequentialCell(nn.Dense(19, 32), msops.SiLU(), nn.Dense(32, 1))

    def construct(self, points):
        centred = points - 0.5
        ball = ops.sqrt((centred * centred).sum(1, keepdims=True) + 1e-6) - 0.2
        return ball + self.layers(ops.concat((centred, self.encoding(points)), 1))


class Loss(nn.Cell):
    """Adds up what is wrong: values and slopes on the surface, and lengths of slopes in space.

    Its gradient is of second order, since slopes are gradients themselves.
    """

    def __init__(self, field):
        super().__init__()
        self.field, self.slope = field, ops.GradOperation()

    def construct(self, surface, normals, space):
        slopes = self.slope(self.field)(ops.concat((surface, space), 0))
        lengths = ops.sqrt((slopes * slopes).sum(1) + 1e-12)
        of_value = ops.abs(self.field(surface)).mean()
        of_slope = ((slopes[:_POINTS] - normals) ** 2).sum(1).mean()
        return 10 * of_value + of_slope + 0.1 * ((lengths - 1) ** 2).mean()


def distance(points):
    """Returns the signed distance to a jack of three crossing rods with round ends, exact outside of it."""
    centred = points - 0.5
    rods = [np.linalg.norm(centred - np.clip(centred, -_LENGTH, _LENGTH) * axis, axis=1) for axis in np.eye(3)]
    return np.min(rods, 0) - _RADIUS


def normals_of(function, points):
    """Returns the directions in which a function of points grows."""
    slopes = np.stack([function(points + shift) - function(points - shift) for shift in 1e-3 * np.eye(3)], 1)
    return slopes / (np.linalg.norm(slopes, axis=1, keepdims=True) + 1e-12)


def of_surface(n, rng):
    """Returns points of the surface, nearest to random ones outside of it, and their normals."""
    points = rng.random((4 * n, 3))
    points = points[distance(points) > 0.01][:n]
    normals = normals_of(distance, points)
    return np.float32(points - distance(points)[:, None] * normals), np.float32(normals)


def train(field, steps, rng):
    """Returns the loss of each step."""
    optimizer = nn.Adam(field.trainable_params(), nn.CosineDecayLR(0.0, 0.01, steps))
    step = nn.TrainOneStepCell(Loss(field), optimizer)
    losses = []
    for _ in trange(steps, unit="step"):
        space = rng.random((_POINTS, 3), np.float32)
        losses.append(float(step(*map(Tensor, (*of_surface(_POINTS, rng), space))).asnumpy()))
    return losses


def picture(function):
    """Looks at the zero level from a corner: each ray goes on by the distance until it meets the surface."""
    right, up = np.array([-1, 1, 0]) / 2**0.5, np.array([-1, -1, 1.6])
    up /= np.linalg.norm(up)
    ahead = np.cross(up, right)
    v, u = np.mgrid[0.45 : -0.45 : _PIXELS * 1j, -0.45 : 0.45 : _PIXELS * 1j].reshape(2, -1, 1)
    points = 0.5 + u * right + v * up - 0.7 * ahead
    for _ in range(60):
        points += 0.8 * function(np.clip(points, 0, 1))[:, None] * ahead + 0.8 * _outside(points) * ahead
    light = np.clip(normals_of(function, points) @ (0.5 * up - 0.6 * ahead + 0.6 * right), 0, 1)
    is_met = (np.abs(function(points)) < 5e-3) & (_outside(points)[:, 0] == 0)
    return np.where(is_met, 0.15 + 0.85 * light, 1).reshape(_PIXELS, _PIXELS)


def _outside(points):
    """Returns how far points are outside of the cube."""
    return np.linalg.norm(points - np.clip(points, 0, 1), axis=1, keepdims=True)


def draw(function, losses):
    figure = plt.figure(figsize=(17, 4), dpi=120, layout="constrained")
    truth, learned, plane, curve = figure.subplots(1, 4)
    for axes, title, each in ((truth, "Target", distance), (learned, "Zero level of the field", function)):
        axes.imshow(picture(each), "gray", vmin=0, vmax=1)
        axes.set(title=title, xticks=(), yticks=())
    z, x = np.mgrid[0 : 1 : _PIXELS * 1j, 0 : 1 : _PIXELS * 1j]
    values = function(np.stack((x, np.full_like(x, 0.5), z), -1).reshape(-1, 3)).reshape(x.shape)
    levels = np.arange(-0.15, 0.5, 0.05)
    plane.contourf(x, z, values, levels, cmap="RdBu_r")
    plane.contour(x, z, values, [0], colors="black")
    plane.set(title="The field at y = 0.5", xlabel="x", ylabel="z", aspect="equal")
    curve.semilogy(range(1, len(losses) + 1), losses)
    curve.set(title="Training", xlabel="step", ylabel="loss")
    curve.grid(alpha=0.3)
    return figure


def main():
    args = options(__doc__, "steps", 400)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    rng = np.random.default_rng(args.seed)
    field = Field()

    def function(points):
        """Computes distances by parts of one size, so that MindSpore compiles one graph."""
        parts = -(-len(points) // _POINTS)
        padded = np.resize(np.float32(points), (parts, _POINTS, 3))
        return np.concatenate([field(Tensor(part)).asnumpy()[:, 0] for part in padded])[: len(points)]

    losses = train(field, args.steps, rng)
    points = rng.random((50_000, 3))
    points = points[distance(points) > 0]
    error = np.abs(function(points) - distance(points)).mean()

    path = args.output / "surface.png"
    draw(function, losses).savefig(path)
    print(f"mean error of distances: {error:.4f}\npicture: {path}")
    if error > _REQUIRED:
        sys.exit(f"The mean error must be at most {_REQUIRED}.")


if __name__ == "__main__":
    main()
