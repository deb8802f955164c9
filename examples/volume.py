"""Fits a grid of learned values, interpolated in between, to a field in space: a gyroid."""

import sys

import matplotlib.pyplot as plt
import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer
from tqdm import trange

import msops
from common import options, training_step

_PIXELS = 200  # along each side of the pictured slice
_REQUIRED = 0.02


class Grid(nn.Cell):
    """Maps points in the unit cube (N, 3) to values (N, 1), interpolated between values at the nodes of a grid."""

    def __init__(self, nodes):
        super().__init__()
        self.nodes = nodes
        self.values = Parameter(initializer(Normal(1.0), (nodes**3, 1)), name="values")
        corners = [(i * nodes + j) * nodes + k for i in (0, 1) for j in (0, 1) for k in (0, 1)]
        self.corners = Tensor(corners, mindspore.int32)  # relative to a grid cell's first node, in msops' order
        self.interpolate = msops.TrilinearInterpolation()

    def construct(self, points):
        points = points * (self.nodes - 1)
        cells = ops.clamp(ops.floor(points), 0, self.nodes - 2)
        i, j, k = ops.split(cells.astype(mindspore.int32), 1, axis=1)
        values = ops.gather(self.values, (i * self.nodes + j) * self.nodes + k + self.corners, 0)
        return self.interpolate(values, 2 * (points - cells) - 1)


def gyroid(points):
    x, y, z = np.split(3 * np.pi * points, 3, axis=1)
    return np.sin(x) * np.cos(y) + np.sin(y) * np.cos(z) + np.sin(z) * np.cos(x)


def read(grid, points):
    return grid(Tensor(points)).asnumpy()


def relative_error(grid, points):
    """Returns the root of the mean squared error, divided by the error of a grid whose values are all 0."""
    target = gyroid(points)
    return np.sqrt(np.mean((read(grid, points) - target) ** 2) / np.mean(target**2))


def train(grid, steps, rng):
    """Returns the relative error of each step."""
    step = training_step(grid, nn.MSELoss(), 0.05, steps)
    errors = []
    for _ in trange(steps, unit="step"):
        points = rng.random((8192, 3), np.float32)
        target = gyroid(points)
        loss = step(Tensor(points), Tensor(target)).asnumpy()
        errors.append(np.sqrt(loss / np.mean(target**2)))
    return errors


def draw(slices, errors):
    figure = plt.figure(figsize=(17, 4), dpi=120, layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(3.5, 1), wspace=0.03)
    axes = left.subplots(1, 3)
    for picture, (title, values) in zip(axes, slices.items()):
        image = picture.imshow(
            values.reshape(_PIXELS, _PIXELS), "RdBu_r", vmin=-1.5, vmax=1.5, origin="lower", extent=(0, 1, 0, 1)
        )
        picture.set(title=title, xlabel="x", ylabel="y")
    left.colorbar(image, ax=axes, label="value at z = 0.5")
    curve = right.subplots()
    curve.semilogy(range(1, len(errors) + 1), errors)
    curve.set(title="Training", xlabel="step", ylabel="relative error")
    curve.grid(alpha=0.3)
    return figure


def main():
    args = options(__doc__, "steps", 400)
    rng = np.random.default_rng(args.seed)
    test_points = rng.random((50000, 3), np.float32)
    y, x = np.mgrid[0 : 1 : _PIXELS * 1j, 0 : 1 : _PIXELS * 1j].reshape(2, -1)
    slice_points = np.float32(np.stack((x, y, np.full_like(x, 0.5)), 1))

    grid = Grid(nodes=24)
    error_before, slice_before = relative_error(grid, test_points), read(grid, slice_points)
    errors = train(grid, args.steps, rng)
    error_after, slice_after = relative_error(grid, test_points), read(grid, slice_points)

    path = args.output / "volume.png"
    slices = {
        "Target": gyroid(slice_points),
        f"Before training: error {error_before:.1%}": slice_before,
        f"After training: error {error_after:.1%}": slice_after,
    }
    draw(slices, errors).savefig(path)
    print(f"relative error: {error_before:.2%} before training, {error_after:.2%} after\npicture: {path}")
    if error_after > _REQUIRED:
        sys.exit(f"The relative error must be at most {_REQUIRED:.0%}.")


if __name__ == "__main__":
    main()
