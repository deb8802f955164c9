"""Calls the operators' formulas in torch: eager, compiled and channels-last."""

import contextlib
import functools

import torch
import torch._functorch.config

from . import libraries

torch.backends.cudnn.allow_tf32 = False  # MindSpore's convolution is measured without TF32, too
torch._functorch.config.donated_buffer = False  # compiled backward passes are called more than once


def peers(case, sets, known=None):
    """Yields (name, a function that returns the calls over these sets of inputs) of each peer.

    A gradient's call needs all inputs of the formula. What the entry does not take comes from `known` by name, or is
    random.
    """
    known = known or {}
    formulas = case.benchmark.torch_formulas(case, sets[0][0].dtype)
    of_libraries = libraries.peers(case.benchmark.library_formulas(case), sets[0][0].device)
    for name, formula in {**formulas, **of_libraries}.items():
        yield name, functools.partial(_prepare, case, sets, formula, known)
    for name, prepare in case.benchmark.prepared_peers(case, sets[0][0]).items():
        yield name, functools.partial(_each, prepare, sets)
    formula = formulas.get("torch")
    if case.benchmark.channels_last:
        yield "torch channels-last", lambda: _prepare(case, [_channels_last(each) for each in sets], formula, known)
    if case.named and case.benchmark.compiled and formula is not None:
        yield "torch.compile", lambda: _prepare(case, sets, _compiled(formula), known)


def _each(prepare, sets):
    return [prepare(*inputs) for inputs in sets]


def _prepare(case, sets, formula, known):
    """Returns, for each set of the entry's inputs, a function without arguments that computes the formula or its
    gradient."""
    if not case.formula_inputs:
        return [functools.partial(formula, *inputs) for inputs in sets]
    names = case.operator.names()[0]
    return [_gradient(case, {**known, **dict(zip(names, inputs))}, formula) for inputs in sets]


def _gradient(case, given, formula):
    like = next(iter(given.values()))
    leaves = [
        given[name] if name in given else torch.randn(shape, device=like.device, dtype=like.dtype)
        for name, shape in case.formula_inputs.items()
    ]
    leaves = [x.detach().clone(memory_format=torch.preserve_format) for x in leaves]
    leaves = [x.requires_grad_(x.is_floating_point()) for x in leaves]
    outs, douts = formula(*leaves), [given[f"d{name}"] for name in case.formula_results]
    gradients = case.operator.names()[1]
    wanted = [leaf for name, leaf in zip(case.formula_inputs, leaves) if f"d{name}" in gradients]
    return lambda: torch.autograd.grad(outs, wanted, douts, retain_graph=True)


def _channels_last(inputs):
    return [x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs]


def _compiled(formula):
    torch._dynamo.reset()
    return torch.compile(formula, dynamic=False)


@contextlib.contextmanager
def tf32(allowed):
    """Sets whether float32 products in the block may round to TF32."""
    settings = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [setting.allow_tf32 for setting in settings]
    try:
        for setting in settings:
            setting.allow_tf32 = allowed
        yield
    finally:
        for setting, value in zip(settings, before):
            setting.allow_tf32 = value
