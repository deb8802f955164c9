"""Learns a scene from photographs, as a radiance field with a hash encoding, and looks at it from other places."""

import sys
import time
from typing import NamedTuple

import matplotlib.pyplot as plt
import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from tqdm import trange

import msops
from common import options, recorded
from scene import BACKGROUND, photograph

_VIEWS, _HELD_OUT, _TURNS = 40, 6, 6
_CELLS = 32  # of the occupancy grid, along each axis
_EVERY = 16  # steps, after which the grid is refreshed


class _Sizes(NamedTuple):
    """Says how much a picture of so many pixels along each side takes."""

    pixels: int
    rays: int  # of a batch
    samples: int  # that a batch has room for
    levels: int
    log2_size: int
    width: int
    steps: int  # of a ray, from corner to corner of the scene
    required: float  # PSNR


_SIZES = {
    "64": _Sizes(64, 1024, 2**14, 8, 14, 32, 160, 27),
    "256": _Sizes(256, 8192, 2**18, 12, 19, 64, 640, 32),
}


def linear(inputs, outputs):
    """Returns a layer without a bias: the gradient of a bias over 2^18 points takes MindSpore 17 ms of an H200."""
    return nn.Dense(inputs, outputs, has_bias=False)


class Field(nn.Cell):
    """Maps points (N, 3) in the unit cube to densities (N,) and, with encoded directions (N, 9), to colours (N, 3)."""

    def __init__(self, sizes):
        super().__init__()
        width, hidden = sizes.width, 16
        growth = (1.5 * sizes.pixels / 8) ** (1 / (sizes.levels - 1))
        self.encoding = msops.HashEncoding(3, sizes.levels, 2, sizes.log2_size, 8, growth)
        self.density = nn.SequentialCell(linear(2 * sizes.levels, width), nn.ReLU(), linear(width, hidden))
        self.colour = nn.SequentialCell(linear(hidden + 9, width), nn.ReLU(), linear(width, 3), nn.Sigmoid())

    def construct(self, points):
        features = self.density(self.encoding(points))
        return ops.exp(ops.clip_by_value(features[:, 0], -12.0, 9.0)), features

    def colours(self, features, directions):
        return self.colour(ops.concat((features, directions), 1))


class Render(nn.Cell):
    """Returns colours, depths and opacities of rays, and whether there was room for all of their samples."""

    def __init__(self, field, sizes, samples):
        super().__init__()
        step = 2 * 3**0.5 / sizes.steps
        self.field, self.harmonics = field, msops.SphericalHarmonics(3)
        self.meet, self.march = msops.RayAABB(-1, 1), msops.MarchRays(-1, 1, step, samples)
        self.composite, self.samples = msops.CompositeRays(), samples

    def construct(self, origins, directions, jitter, grid, background):
        near, far = self.meet(origins, directions)
        t, dt, ray, offsets = self.march(origins, directions, near, far, grid, jitter)
        ray = ops.maximum(ray, 0)
        points = ops.gather(origins, ray, 0) + t.expand_dims(1) * ops.gather(directions, ray, 0)
        sigmas, features = self.field(points * 0.5 + 0.5)
        rgbs = self.field.colours(features, ops.gather(self.harmonics(directions), ray, 0))
        rgb, depth, opacity, _ = self.composite(sigmas, rgbs, dt, t, offsets)
        has_room = (offsets[1:] <= self.samples).astype(mindspore.float32)
        return rgb + (1 - opacity).expand_dims(1) * background, depth, opacity, has_room


class Loss(nn.Cell):
    """Puts any colours behind the scene, so that the field cannot paint the sky on a fog."""

    def __init__(self, render):
        super().__init__()
        self.render, self.background = render, Tensor(BACKGROUND)

    def construct(self, origins, directions, jitter, grid, colours, sky, background):
        rgb, _, _, has_room = self.render(origins, directions, jitter, grid, background)
        colours = colours + sky * (background - self.background)
        squares = ((rgb - colours) ** 2).mean(1) * has_room
        return squares.sum() / (has_room.sum() + 1)


class Grid:
    """Keeps which cells have something in them: the largest density seen there, which fades."""

    def __init__(self, field, sizes):
        self.field, self.least = field, 0.02 * sizes.steps / (2 * 3**0.5)  # a step through it absorbs a fiftieth
        self.densities = np.full(_CELLS**3, 2 * self.least, np.float32)
        self.corners = np.indices((_CELLS,) * 3).reshape(3, -1).T

    def refresh(self, rng):
        points = np.float32((self.corners + rng.random(self.corners.shape)) / _CELLS)
        self.densities = np.maximum(0.8 * self.densities, self.field(Tensor(points))[0].asnumpy())

    def occupied(self):
        return Tensor((self.densities > self.least).reshape((_CELLS,) * 3))


def train(field, sizes, rays, steps, rng):
    """Returns which cells are occupied in the end."""
    optimizer = nn.Adam(field.trainable_params(), nn.CosineDecayLR(1e-4, 0.01, steps))
    step = recorded(nn.TrainOneStepCell(Loss(Render(field, sizes, sizes.samples)), optimizer))
    grid = Grid(field, sizes)
    occupied, progress = grid.occupied(), trange(steps, unit="step")
    for i in progress:
        if i % _EVERY == _EVERY - 1:
            grid.refresh(rng)
            occupied = grid.occupied()
        chosen = rng.integers(0, len(rays[0]), sizes.rays)
        origins, directions, colours, sky = (array[chosen] for array in rays)
        jitter, background = rng.random(sizes.rays, np.float32), rng.random((sizes.rays, 3), np.float32)
        arrays = origins, directions, jitter, occupied, colours, sky, background
        loss = float(step(*map(Tensor, arrays)).asnumpy())
        if i % _EVERY == 0:
            progress.set_postfix(loss=f"{loss:.5f}", occupied=f"{occupied.asnumpy().mean():.1%}")
    return occupied


class Camera:
    """Renders views by batches of one size, so that MindSpore compiles one graph."""

    def __init__(self, field, sizes, grid):
        self.render, self.sizes, self.grid = Render(field, sizes, 4 * sizes.samples), sizes, grid
        self.jitter = Tensor(np.full(sizes.rays, 0.5, np.float32))
        self.background = Tensor(np.tile(BACKGROUND, (sizes.rays, 1)))

    def __call__(self, origins, directions):
        """Returns colours and depths of the rays."""
        results = []
        for i in range(0, len(origins), self.sizes.rays):
            part = (Tensor(x[i : i + self.sizes.rays]) for x in (origins, directions))
            rgb, depth, opacity, _ = self.render(*part, self.jitter, self.grid, self.background)
            results.append((rgb.asnumpy(), (depth / (opacity + 1e-3)).asnumpy()))
        return [np.concatenate(each) for each in zip(*results)]


def psnr(errors):
    return -10 * np.log10(np.mean(np.square(errors)))


def draw(camera, sizes):
    """Shows the scene on a turntable."""
    figure, axes = plt.subplots(3, _TURNS, figsize=(2 * _TURNS, 6.2), dpi=120, layout="constrained")
    shape = sizes.pixels, sizes.pixels
    for i, column in enumerate(axes.T):
        origins, directions, truth, _ = photograph(2 * np.pi * i / _TURNS, 0.5, sizes.pixels)
        colours, depth = camera(origins, directions)
        for each, picture in zip(column, (truth, colours)):
            each.imshow(np.clip(picture, 0, 1).reshape(*shape, 3))
        column[2].imshow(np.where(depth > 1, depth, np.nan).reshape(shape), "viridis_r", vmin=1.8, vmax=4)
    for each, title in zip(axes[:, 0], ("scene", "field", "its depth")):
        each.set_ylabel(title)
    for each in axes.flat:
        each.set(xticks=(), yticks=())
    return figure


def main():
    args = options(__doc__, "steps", 1500, pixels=tuple(_SIZES))
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    rng, sizes = np.random.default_rng(args.seed), _SIZES[args.pixels]
    heights, angles = rng.uniform(0.15, 1.1, _VIEWS + _HELD_OUT), rng.uniform(0, 2 * np.pi, _VIEWS + _HELD_OUT)
    photographs = [photograph(angle, height, sizes.pixels) for angle, height in zip(angles, heights)]
    seen, held_out = photographs[:_VIEWS], photographs[_VIEWS:]

    begin = time.perf_counter()
    field = Field(sizes)
    rays = [np.concatenate(each) for each in zip(*seen)]
    grid = train(field, sizes, rays, args.steps, rng)
    seconds = time.perf_counter() - begin

    camera = Camera(field, sizes, grid)
    quality = np.mean([psnr(camera(o, d)[0] - colours) for o, d, colours, _ in held_out])
    path = args.output / "nerf.png"
    draw(camera, sizes).savefig(path)
    print(f"PSNR of views that were held out: {quality:.1f} dB after {seconds:.0f} s\npicture: {path}")
    if quality < sizes.required:
        sys.exit(f"The PSNR must be at least {sizes.required} dB.")


if __name__ == "__main__":
    main()
