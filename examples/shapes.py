"""Samples points from surfaces with formulas: a sphere, a torus, a Moebius strip and others, for points.py."""

import numpy as np

PARTS = "flat", "bent", "bulging", "saddle"  # kinds of curvature: zero, zero in one direction, positive, negative
FLAT, BENT, BULGING, SADDLE = range(4)


def _directions(rng, n):
    """Returns points of the unit sphere."""
    points = rng.standard_normal((n, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def _disc(rng, n, z):
    angle, radius = rng.uniform(0, 2 * np.pi, n), np.sqrt(rng.random(n))
    return np.stack((radius * np.cos(angle), radius * np.sin(angle), np.full(n, z)), 1)


def _of_revolution(rng, z, radius):
    angle = rng.uniform(0, 2 * np.pi, len(z))
    return np.stack((radius * np.cos(angle), radius * np.sin(angle), z), 1)


def _join(*parts):
    """Joins parts of a surface, each (points, kind)."""
    return np.concatenate([points for points, _ in parts]), np.repeat(
        [kind for _, kind in parts], [*map(len, next(zip(*parts)))]
    )


def _tube(rng, n, curve, thickness):
    """Samples the surface at a distance of `thickness` from a curve. The side that looks to the axis is a saddle."""
    t, angle = rng.random(n), rng.uniform(0, 2 * np.pi, n)
    step = 1e-4
    center, along = curve(t), (curve(t + step) - curve(t - step)) / (2 * step)
    inward = -center * (1, 1, 0)
    along /= np.linalg.norm(along, axis=1, keepdims=True)
    inward -= (inward * along).sum(1, keepdims=True) * along
    inward /= np.linalg.norm(inward, axis=1, keepdims=True)
    normal = np.cos(angle)[:, None] * inward + np.sin(angle)[:, None] * np.cross(along, inward)
    return center + thickness * normal, np.where(np.cos(angle) > 0, SADDLE, BULGING)


def sphere(rng, n):
    return _directions(rng, n), np.full(n, BULGING)


def torus(rng, n):
    return _tube(rng, n, lambda t: _circle(t, 1), 0.4)


def spring(rng, n):
    return _tube(rng, n, lambda t: _circle(2.5 * t, 1) + np.stack((0 * t, 0 * t, 3 * t), 1), 0.2)


def _circle(t, radius):
    return radius * np.stack((np.cos(2 * np.pi * t), np.sin(2 * np.pi * t), 0 * t), 1)


def cube(rng, n):
    points = rng.uniform(-1, 1, (n, 3))
    points[np.arange(n), rng.integers(0, 3, n)] = rng.choice((-1, 1), n)
    return points, np.full(n, FLAT)


def tetrahedron(rng, n):
    corners = np.array(((1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1)))
    weights = rng.dirichlet((1, 1, 1), n)
    face = rng.integers(0, 4, n)
    places = (face[:, None] + np.arange(1, 4)) % 4  # all corners except one
    return (weights[:, :, None] * corners[places]).sum(1), np.full(n, FLAT)


def cone(rng, n):
    base = int(0.3 * n)
    radius = np.sqrt(rng.random(n - base))
    side = _of_revolution(rng, 2 * (1 - radius), radius)
    return _join((_disc(rng, base, 0), FLAT), (side, BENT))


def cylinder(rng, n):
    cap = n // 5
    side = _of_revolution(rng, rng.uniform(-1.2, 1.2, n - 2 * cap), 1)
    return _join((_disc(rng, cap, -1.2), FLAT), (_disc(rng, cap, 1.2), FLAT), (side, BENT))


def capsule(rng, n):
    ends = n // 2
    points = _directions(rng, ends)
    points[:, 2] += np.sign(points[:, 2]) * 1.3
    return _join((points, BULGING), (_of_revolution(rng, rng.uniform(-1.3, 1.3, n - ends), 1), BENT))


def hemisphere(rng, n):
    base = n // 3
    dome = _directions(rng, n - base)
    dome[:, 2] = np.abs(dome[:, 2])
    return _join((_disc(rng, base, 0), FLAT), (dome, BULGING))


def moebius_strip(rng, n):
    angle, width = rng.uniform(0, 2 * np.pi, n), rng.uniform(-0.5, 0.5, n)
    radius = 1 + width * np.cos(angle / 2)
    points = np.stack((radius * np.cos(angle), radius * np.sin(angle), width * np.sin(angle / 2)), 1)
    return points, np.full(n, SADDLE)


def saddle(rng, n):
    x, y = rng.uniform(-1, 1, (2, n))
    return np.stack((x, y, 0.8 * (x**2 - y**2)), 1), np.full(n, SADDLE)


def hyperboloid(rng, n):
    z = rng.uniform(-1.5, 1.5, n)
    return _of_revolution(rng, z, 0.5 * np.sqrt(1 + 2 * z**2)), np.full(n, SADDLE)


SHAPES = (
    *(sphere, torus, spring, cube, tetrahedron, cone, cylinder),
    *(capsule, hemisphere, moebius_strip, saddle, hyperboloid),
)  # fmt: skip


def cloud(rng, shape, n, noise=0.01, hidden=0.25):
    """Returns n points of a shape that is turned at random, with the kind of each. Up to a share of `hidden` is cut off
    on one side, as in a view of a scanner. Points lie in the unit ball around their mean, moved by `noise`."""
    seen = 1 - hidden * rng.random()
    points, kinds = shape(rng, int(n / seen) + 1)
    rotation = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    points = points @ rotation
    kept = rng.permutation(np.argsort(points @ _directions(rng, 1)[0])[:n])
    points = points[kept] - points[kept].mean(0)
    points /= np.linalg.norm(points, axis=1).max()
    return np.float32(points + noise * rng.standard_normal(points.shape)), np.int32(kinds[kept])


def clouds(rng, count, n):
    """Returns points (count, n, 3), and labels (count, 1 + n): the number of the shape, then the kind of each point."""
    points, labels = np.empty((count, n, 3), np.float32), np.empty((count, 1 + n), np.int32)
    for i in range(count):
        labels[i, 0] = rng.integers(len(SHAPES))
        points[i], labels[i, 1:] = cloud(rng, SHAPES[labels[i, 0]], n)
    return points, labels
