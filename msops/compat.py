"""What differs between versions, of MindSpore from 1.10 on and of Python from 3.9 on."""

import pkgutil
import re
import sys
import sysconfig

import mindspore

VERSION = tuple(map(int, re.findall(r"\d+", mindspore.__version__)[:2]))

jit = mindspore.ms_function if VERSION < (2, 0) else mindspore.jit


def set_device(target):
    """Chooses the CPU or the GPU."""
    if VERSION < (2, 5):
        mindspore.set_context(device_target=target)
    else:
        mindspore.set_device(target)


def standard_modules():
    """The names of Python's own."""
    if sys.version_info >= (3, 10):
        return sys.stdlib_module_names
    folder = sysconfig.get_path("stdlib")
    return {module.name for module in pkgutil.iter_modules([folder, f"{folder}/lib-dynload"])}.union(
        sys.builtin_module_names
    )
