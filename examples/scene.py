"""Traces rays through a scene: two balls and a box on a checkered floor, in the light of a sun that casts shadows."""

import numpy as np

BACKGROUND = np.array([0.75, 0.85, 0.95], np.float32)
_SUN = np.array([0.5, 0.35, 0.8]) / np.linalg.norm([0.5, 0.35, 0.8])
_BALLS = (((0.3, 0.3, -0.15), 0.35, (0.85, 0.25, 0.2)), ((-0.45, 0.35, -0.28), 0.22, (0.95, 0.75, 0.2)))
_BOXES = (((-0.6, -0.6, -0.5), (-0.05, -0.15, 0.05), (0.2, 0.4, 0.8)), ((-0.9, -0.9, -0.6), (0.9, 0.9, -0.5), None))
_FAR = 1e9


def _ball(origins, directions, center, radius):
    offset = origins - center
    b, c = (offset * directions).sum(1), (offset * offset).sum(1) - radius**2
    root = b * b - c
    t = -b - np.sqrt(np.maximum(root, 0))
    t = np.where((root > 0) & (t > 1e-4), t, _FAR)
    return t, (origins + t[:, None] * directions - center) / radius


def _box(origins, directions, low, high):
    with np.errstate(divide="ignore", invalid="ignore"):
        ends = (np.array([low, high])[:, None] - origins) / directions
    first, last = ends.min(0), ends.max(0)
    t = first.max(1)
    normals = -np.sign(directions) * (np.arange(3) == first.argmax(1)[:, None])
    return np.where((t > 1e-4) & (t < last.min(1)), t, _FAR), normals


def _squares(places):
    """Returns the brightness of the floor's squares."""
    return np.where(np.floor(places[:, :2] / 0.3).astype(int).sum(1, keepdims=True) % 2, 0.85, 0.3)


def _nearest(origins, directions):
    """Returns t, normals and colours of what rays meet first; t is _FAR where they meet nothing."""
    hits = [(*_ball(origins, directions, *ball), colour) for *ball, colour in _BALLS]
    hits += [(*_box(origins, directions, *box), colour) for *box, colour in _BOXES]
    t, normals, colours = np.full(len(origins), _FAR), np.zeros_like(origins), np.zeros_like(origins)
    for t_of, normals_of, paint in hits:
        nearer = t_of < t
        colour = _squares(origins + np.where(nearer, t_of, 0)[:, None] * directions) if paint is None else paint
        t = np.where(nearer, t_of, t)
        normals = np.where(nearer[:, None], normals_of, normals)
        colours = np.where(nearer[:, None], colour, colours)
    return t, normals, colours


def trace(origins, directions):
    """Returns colours (N, 3) and distances (N,) of rays, whose directions have length 1."""
    t, normals, colours = _nearest(origins, directions)
    met = t < _FAR
    places = origins + np.where(met, t, 0)[:, None] * directions + 1e-3 * normals
    in_light = _nearest(places, np.broadcast_to(_SUN, places.shape))[0] == _FAR
    light = 0.35 + 0.65 * in_light * np.maximum(normals @ _SUN, 0)
    return np.where(met[:, None], colours * light[:, None], BACKGROUND), np.where(met, t, 0)


def view(angle, height, size, shift=(0, 0)):
    """Returns origins and directions (size * size, 3) of a camera that looks at the center from a distance of 3.

    A shift moves them by parts of a pixel."""
    eye = 3 * np.array([np.cos(angle) * np.cos(height), np.sin(angle) * np.cos(height), np.sin(height)])
    ahead = -eye / 3
    right = np.cross(ahead, (0, 0, 1)) / np.linalg.norm(np.cross(ahead, (0, 0, 1)))
    pixels = np.indices((size, size)).reshape(2, -1, 1) + 0.5 + np.reshape(shift, (2, 1, 1))
    v, u = 0.4 * (2 * pixels / size - 1)
    directions = ahead + u * right - v * np.cross(right, ahead)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return np.broadcast_to(eye, directions.shape), directions


def photograph(angle, height, size):
    """Returns origins, directions and colours (N, 3) of a view's pixels, and which part (N, 1) of each is sky.

    A pixel is the mean of four rays around its center."""
    colours, sky = 0, 0
    for shift in np.ndindex(2, 2):
        of_shift, t = trace(*view(angle, height, size, np.array(shift) / 2 - 0.25))
        colours, sky = colours + of_shift / 4, sky + (t == 0) / 4
    return [np.float32(x) for x in (*view(angle, height, size), colours, sky[:, None])]
