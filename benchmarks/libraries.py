"""Calls libraries of kernels for GPUs, Liger (in Triton) and quack (in CuTe DSL), which are peers where they are
installed."""

import functools
import importlib
import importlib.util

MODULES = {"Liger": "liger_kernel.ops", "quack": "quack"}
DEVICE = "cuda"  # torch's name of where their kernels run


def peers(formulas, device):
    """Returns {name: function of the inputs} of the libraries that are installed, from {name: function of the
    library's module and the inputs}. The first call imports the library, so that a broken one costs its own rows alone.
    """
    return {
        name: functools.partial(_call, MODULES[name], formula)
        for name, formula in formulas.items()
        if device.type == DEVICE and importlib.util.find_spec(MODULES[name].partition(".")[0])
    }


def _call(module, formula, *inputs):
    return formula(importlib.import_module(module), *inputs)


def gated(case, name):
    """Returns the formulas of a gated activation, which is Liger's function of this name. Its gradient is left out,
    since it would write over gate and up."""
    if case.direction == "backward":
        return {}
    return {"Liger": lambda liger, gate, up: getattr(liger, name).apply(gate, up)}
