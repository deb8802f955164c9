"""Calls libraries of kernels for GPUs, Liger and fla (in Triton), quack (in CuTe DSL), vLLM, TransformerEngine and
FlashInfer (in CUDA), which are peers where they are installed. Gradients go through autograd, as PyTorch's do.

Some of their functions are left out, since no fair time can be given. Liger writes the gradients of `swiglu` and
`geglu` over the inputs, so that a second call would compute something else. Its `cross_entropy` computes the gradient
in the forward pass, over the logits, and waits for the host, so that neither direction has a time of its own. Its
rotary embedding takes queries and keys together, and copies them unless their layout is (B, T, H, D). quack's
`layer_norm` takes weights of float32 alone, and autograd does not know its gradient.

By default Liger writes the gradient of `rms_norm` over dy. Here it gets memory of its own, which Liger clears first;
its time includes that. quack's `softmax` takes rows of a multiple of 16 bytes, its other functions in float16 take even
numbers of elements; a run prints `not measured` for the others.
"""

import functools
import importlib
import importlib.util

MODULES = {
    "Liger": "liger_kernel.ops",
    "quack": "quack",
    "fla": "fla.ops.generalized_delta_rule",
    "vLLM": "vllm._custom_ops",
    "TransformerEngine": "transformer_engine.pytorch",
    "FlashInfer": "flashinfer",
}
DEVICE = "cuda"  # torch's name of where their kernels run


def peers(formulas, device):
    """Returns {name: function of the inputs} of the libraries that are installed, from {name: function of the
    library's module and the inputs}. The first call imports the library, so that a broken one costs its own rows alone.
    """
    return {
        name: functools.partial(_call, MODULES[name], formula)
        for name, formula in formulas.items()
        if is_there(name, device)
    }


def is_there(name, device):
    """Returns whether a library is installed, and the tensors are where its kernels run."""
    return device.type == DEVICE and importlib.util.find_spec(MODULES[name].partition(".")[0]) is not None


def _call(module, formula, *inputs):
    return formula(importlib.import_module(module), *inputs)


def gated(case, name):
    """Returns the formulas of a gated activation, which is Liger's function of this name. Its gradient is left out,
    since it would write over gate and up."""
    if case.direction == "backward":
        return {}
    return {"Liger": lambda liger, gate, up: getattr(liger, name).apply(gate, up)}
