"""What differs between versions of MindSpore, from 1.10 on."""

import re

import mindspore
from mindspore import nn

VERSION = tuple(map(int, re.findall(r"\d+", mindspore.__version__)[:2]))

jit = mindspore.ms_function if VERSION < (2, 0) else mindspore.jit


def set_device(target):
    """Chooses the CPU or the GPU."""
    if VERSION < (2, 5):
        mindspore.set_context(device_target=target)
    else:
        mindspore.set_device(target)


def dropout(p):
    """A Cell that in training drops numbers with this probability."""
    return nn.Dropout(keep_prob=1 - p) if VERSION < (2, 0) else nn.Dropout(p=p)
