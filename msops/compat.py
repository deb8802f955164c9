"""Hides the differences between versions of MindSpore, from 1.10 on."""

from __future__ import annotations

import importlib
import re
from types import FunctionType
from typing import TYPE_CHECKING

import mindspore
from mindspore import nn

if TYPE_CHECKING:
    from types import ModuleType

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


def keep_functions(module: ModuleType) -> None:
    """Lets Cells in level O1 call the functions of msops that a module has.

    MindSpore would copy their source into the source of the Cell, where the names of their module are missing.
    """
    try:
        parser = importlib.import_module("mindspore.rewrite.parsers.assign_parser").AssignParser
    except (ImportError, AttributeError):
        return  # an older version
    kept = getattr(parser, "_function_parse_black_list", None)
    for value in vars(module).values():
        of_msops = isinstance(value, FunctionType) and value.__module__.startswith("msops.")
        if isinstance(kept, list) and of_msops and value not in kept:
            kept.append(value)
