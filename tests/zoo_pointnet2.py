"""Defines PointNet2 in PyTorch as MindSpore's model zoo (official/cv/PointNet2) defines it, for tests/libraries.py.

A ball has its last points by index, and repeats the last of them. Farthest point sampling begins at random points,
which the zoo draws from NumPy at each call in PyNative mode.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional


def rows(points, places):
    """Returns the points (B, ..., C) at the places (B, ...) of points (B, N, C)."""
    return points[torch.arange(len(points)).view(-1, *[1] * (places.ndim - 1)), places]


def farthest(xyz, count):
    """Returns the places (B, count) of points that are far from each other."""
    place = torch.from_numpy(np.random.randint(xyz.shape[1], size=(len(xyz),)))  # noqa: NPY002 (the zoo draws so)
    distance, places = torch.full(xyz.shape[:2], 1e9), []
    for _ in range(count):
        places.append(place)
        distance = torch.minimum(distance, ((xyz - rows(xyz, place[:, None])) ** 2).sum(-1))
        place = distance.argmax(-1)
    return torch.stack(places, 1)


def balls(radius, count, xyz, centers):
    """Returns the places (B, S, count) of each center's neighbours, the last ones first."""
    squares = -2 * centers @ xyz.transpose(1, 2) + (centers**2).sum(-1)[:, :, None] + (xyz**2).sum(-1)[:, None]
    places = torch.arange(xyz.shape[1]).expand_as(squares).where(squares <= radius**2, -1).topk(count).values
    return torch.where(places == -1, places[..., :1], places)


class SetAbstraction(nn.Module):
    def __init__(self, count, radius, neighbours, widths):
        super().__init__()
        self.count, self.radius, self.neighbours = count, radius, neighbours
        for i in (1, 2, 3):
            self.add_module(f"conv{i}", nn.Conv2d(widths[i - 1], widths[i], 1, bias=False))
            self.add_module(f"bn{i}", nn.BatchNorm2d(widths[i]))

    def forward(self, xyz, features):  # (B, N, 3), (B, N, C)
        if self.count is None:
            x, centers = torch.cat((xyz, features), -1)[:, None], None
        else:
            centers = rows(xyz, farthest(xyz, self.count))
            places = balls(self.radius, self.neighbours, xyz, centers)
            x = torch.cat((rows(xyz, places) - centers[:, :, None], rows(features, places)), -1)
        x = x.permute(0, 3, 2, 1)  # channels, neighbours, centers
        for conv, norm in ((self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)):
            x = norm(conv(x)).relu()
        return centers, x.amax(2).transpose(1, 2)


class PointNet2(nn.Module):
    """Classifies points with normals (B, N, 6), without dropout."""

    def __init__(self, classes):
        super().__init__()
        self.sa1 = SetAbstraction(512, 0.2, 32, (6, 64, 64, 128))
        self.sa2 = SetAbstraction(128, 0.4, 64, (131, 128, 128, 256))
        self.sa3 = SetAbstraction(None, None, None, (259, 256, 512, 1024))
        self.fc1, self.bn1 = nn.Linear(1024, 512), nn.BatchNorm1d(512)
        self.fc2, self.bn2 = nn.Linear(512, 256), nn.BatchNorm1d(256)
        self.fc3 = nn.Linear(256, classes)

    def forward(self, points, labels):
        xyz, features = points[..., :3], points[..., 3:]
        for part in (self.sa1, self.sa2, self.sa3):
            xyz, features = part(xyz, features)
        x = self.bn1(self.fc1(features.flatten(1))).relu()
        scores = self.fc3(self.bn2(self.fc2(x)).relu())
        return (functional.nll_loss(scores.log_softmax(-1), labels),)

    def save_pretrained(self, folder):
        folder.mkdir(parents=True)
        np.savez(folder / "weights.npz", **{name: p.detach().numpy() for name, p in self.named_parameters()})
