"""Trains PointNet++ to name the shape of a cloud of points, and the curvature of the surface at each point."""

import sys

import matplotlib.pyplot as plt
import numpy as np
from mindspore import Tensor, nn, ops
from tqdm import trange

import msops
from common import options, recorded, training_step
from shapes import PARTS, SHAPES, clouds

_POINTS, _BATCH = 256, 32
_REQUIRED = 0.95, 0.85


class Layers(nn.SequentialCell):
    """Maps the channels of each point by itself: (B, C, ...) to (B, widths[-1], ...)."""

    def __init__(self, *widths):
        layers = []
        for taken, given in zip(widths, widths[1:]):
            layers += [nn.Conv2d(taken, given, 1), nn.BatchNorm2d(given, momentum=0.9), nn.ReLU()]
        super().__init__(layers)


def lengths(xyz):
    """Returns the squared length of vectors (B, 3, ...) as one channel."""
    return (xyz * xyz).sum(1, keepdims=True)


class Abstraction(nn.Cell):
    """Describes balls around some of the points by what is in them. Beside the relative coordinates, layers get lengths
    and products with the center, which no rotation changes."""

    def __init__(self, npoint, radius, nsample, *widths):
        super().__init__()
        self.sample = msops.FurthestPointSample(npoint)
        self.take = msops.GatherPoints()
        self.group = msops.QueryAndGroup(radius, nsample)
        self.layers = Layers(*widths)

    def construct(self, xyz, features):
        centers = self.take(xyz.transpose(0, 2, 1), self.sample(xyz))
        groups = self.group(xyz, centers.transpose(0, 2, 1), features)
        relative, center = groups[:, :3], ops.zeros_like(groups[:, :3]) + centers.expand_dims(3)
        products = (relative * center).sum(1, keepdims=True)
        groups = ops.concat((groups, lengths(relative), products, lengths(center)), 1)
        return centers.transpose(0, 2, 1), self.layers(groups).max(3)


class Propagation(nn.Cell):
    """Brings features of few points back to many, by interpolation between the three nearest."""

    def __init__(self, *widths):
        super().__init__()
        self.nearest, self.interpolate = msops.ThreeNN(), msops.ThreeInterpolate()
        self.layers = Layers(*widths)

    def construct(self, xyz, known_xyz, features, known_features):
        distance, idx = self.nearest(xyz, known_xyz)
        weight = 1 / (distance + 1e-6)
        spread = self.interpolate(known_features, idx, weight / weight.sum(2, keepdims=True))
        both = ops.concat((features, spread), 1)
        return self.layers(both.expand_dims(3)).squeeze(3)


class PointNet(nn.Cell):
    """Maps points (B, N, 3) to scores of shapes (B, S) and of parts (B * N, P)."""

    def __init__(self):
        super().__init__()
        self.first = Abstraction(64, 0.35, 16, 6, 32, 32, 64)
        self.second = Abstraction(16, 0.7, 16, 6 + 64, 64, 128)
        self.all = msops.GroupAll()
        self.last = Layers(4 + 128, 256)
        self.shape = nn.SequentialCell(nn.Dense(256 + 2 * 64, 128), nn.ReLU(), nn.Dense(128, len(SHAPES)))
        self.to_first = Propagation(64 + 128, 64)
        self.to_points = Propagation(4 + 64, 64)
        self.part = nn.Conv1d(64, len(PARTS), 1, has_bias=True)

    def construct(self, xyz):
        first_xyz, first = self.first(xyz, None)
        second_xyz, second = self.second(first_xyz, first)
        second_lengths = lengths(second_xyz.transpose(0, 2, 1))
        whole = self.last(self.all(second_xyz, None, ops.concat((second_lengths, second), 1))).max(3).max(2)
        whole = ops.concat((whole, first.max(2), first.mean(2)), 1)
        first = self.to_first(first_xyz, second_xyz, first, second)
        columns = xyz.transpose(0, 2, 1)
        points = self.to_points(xyz, first_xyz, ops.concat((columns, lengths(columns)), 1), first)
        return self.shape(whole), self.part(points).transpose(0, 2, 1).reshape(-1, len(PARTS))


class Loss(nn.Cell):
    """Adds the losses of both tasks. The first label of a cloud is its shape, the others are the points' parts."""

    def __init__(self):
        super().__init__()
        self.of_shapes, self.of_parts = msops.CrossEntropyLoss(), msops.CrossEntropyLoss()

    def construct(self, scores, labels):
        return self.of_shapes(scores[0], labels[:, 0]) + self.of_parts(scores[1], labels[:, 1:].reshape(-1))


def train(net, steps, rng):
    step = training_step(net, Loss(), 4e-3, steps)
    step = recorded(step.set_train())
    progress = trange(steps, unit="step")
    losses = []
    for _ in progress:
        points, labels = clouds(rng, _BATCH, _POINTS)
        losses.append(float(step(Tensor(points), Tensor(labels)).asnumpy()))
        progress.set_postfix(loss=f"{np.mean(losses[-50:]):.3f}")
    net.set_train(False)


def answers(net, points):
    """Returns which shape each cloud has, and which part each point belongs to, as the labels do."""
    of_shapes, of_parts = (scores.asnumpy() for scores in net(Tensor(points)))
    return np.concatenate((of_shapes.argmax(1)[:, None], of_parts.argmax(1).reshape(len(points), -1)), 1)


def draw(points, labels, found):
    """Draws one cloud of each shape, coloured by the parts that the network found."""
    figure = plt.figure(figsize=(16, 8), dpi=100, layout="constrained")
    colours = np.array(("tab:blue", "tab:green", "tab:orange", "tab:red"))
    for k in range(len(SHAPES)):
        i = np.flatnonzero(labels[:, 0] == k)[0]
        axes = figure.add_subplot(3, 4, k + 1, projection="3d")
        axes.scatter(*points[i].T, c=colours[found[i, 1:]], s=14)
        name, answer = (SHAPES[j].__name__.replace("_", " ") for j in (k, found[i, 0]))
        right = np.mean(found[i, 1:] == labels[i, 1:])
        axes.set_title(f"{answer}, parts {right:.0%}", color="k" if name == answer else "r")
        axes.set_axis_off()
        axes.set_aspect("equal")
    handles = [plt.Line2D([], [], marker="o", ls="", color=c, label=part) for c, part in zip(colours, PARTS)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(PARTS))
    return figure


def main():
    args = options(__doc__, "steps", 480)
    rng = np.random.default_rng(args.seed)
    net = PointNet()
    train(net, args.steps, rng)

    points, labels = clouds(rng, 480, _POINTS)
    found = np.concatenate([answers(net, part) for part in np.split(points, len(points) // _BATCH)])
    right = found == labels
    accuracies = right[:, 0].mean(), right[:, 1:].mean()
    path = args.output / "points.png"
    draw(points, labels, found).savefig(path)
    print(f"test accuracy: shapes {accuracies[0]:.2%}, parts {accuracies[1]:.2%}\npicture: {path}")
    if any(got < required for got, required in zip(accuracies, _REQUIRED)):
        sys.exit(f"The accuracy must be at least {_REQUIRED[0]:.0%} of the shapes and {_REQUIRED[1]:.0%} of the parts.")


if __name__ == "__main__":
    main()
