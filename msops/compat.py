"""Hides the differences between versions of MindSpore, from 1.10 on."""

from __future__ import annotations

import re

import mindspore
from mindspore import nn

VERSION = tuple(map(int, re.findall(r"\d+", mindspore.__version__)[:2]))

jit = mindspore.ms_function if VERSION < (2, 0) else mindspore.jit  # type: ignore[attr-defined]  # 1.10 has it


def set_device(target: str) -> None:
    """Chooses the device: "CPU" or "GPU"."""
    if VERSION < (2, 5):
        mindspore.set_context(device_target=target)
    else:
        mindspore.set_device(target)


def dropout(p: float) -> nn.Cell:
    """Returns a Cell that, in training, drops each number with probability `p`."""
    make = nn.Dropout  # type: ignore[attr-defined]  # MindSpore computes the list that has it
    return make(keep_prob=1 - p) if VERSION < (2, 0) else make(p=p)
