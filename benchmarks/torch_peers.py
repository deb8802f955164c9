"""The operators in torch: eager, compiled and channels-last. Where torch has no such operator, its formula."""

import contextlib

import torch
import torch._functorch.config
from torch.nn import functional

torch.backends.cudnn.allow_tf32 = False  # as for MindSpore's convolution: like is compared with like
torch._functorch.config.donated_buffer = False  # compiled backward passes are called more than once


def trilinear(feats, points):
    u, v, w = ((points + 1) / 2).unbind(1)
    weights = torch.stack([a * b * c for a in (1 - u, u) for b in (1 - v, v) for c in (1 - w, w)], 1)
    return (feats * weights.unsqueeze(2)).sum(1)


def lltm(product, bias, c):
    i, o, g = (product + bias).chunk(3, 1)
    new_c = c + torch.sigmoid(i) * functional.elu(g)
    return torch.tanh(new_c) * torch.sigmoid(o), new_c


def sum_to(dout, x):
    return dout.sum_to_size(x.shape)


def depthwise(stride):
    def convolution(x, weight, bias):
        return functional.conv2d(x, weight, bias, stride, weight.shape[-1] // 2, groups=x.shape[1])

    return convolution


# A backward entry's inputs -> the formula's inputs, and the gradients of its results.
ARGUMENTS = {
    "sigmoid": lambda y, dy: ([y], [dy]),
    "trilinear": lambda feats, points, dout: ([feats, points], [dout]),
    "depthwise": lambda x, weight, dout: ([x, weight, weight[:, 0, 0, 0]], [dout]),
    "lltm": lambda product, bias, c, dnew_h, dnew_c: ([product, bias, c], [dnew_h, dnew_c]),
}


def formula_of(case):
    if case.op == "add":
        return torch.add if case.direction == "forward" else sum_to
    if case.op == "depthwise":
        return depthwise(case.stride)
    return {"sigmoid": torch.sigmoid, "trilinear": trilinear, "lltm": lltm}[case.op]


def prepare(case, sets, formula):
    """For each set of the entry's inputs, a function without arguments that computes the formula or its gradient."""
    return [_prepare(case, inputs, formula) for inputs in sets]


def _prepare(case, inputs, formula):
    if case.direction == "forward" or case.op == "add":
        return lambda: formula(*inputs)
    leaves, douts = ARGUMENTS[case.op](*inputs)
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in leaves]
    outs = formula(*leaves)
    return lambda: torch.autograd.grad(outs, leaves, douts, retain_graph=True)


def peers(case, sets):
    """(name, a function that returns the calls over these sets of inputs) of each."""
    formula = formula_of(case)
    yield "torch", lambda: prepare(case, sets, formula)
    if case.op == "depthwise":
        yield "torch channels-last", lambda: prepare(case, [_channels_last(inputs) for inputs in sets], formula)
    if case.named:
        yield "torch.compile", lambda: prepare(case, sets, _compiled(formula))


def _channels_last(inputs):
    return [x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs]


def _compiled(formula):
    torch._dynamo.reset()
    return torch.compile(formula, dynamic=False)


@contextlib.contextmanager
def tf32(allowed):
    """Whether the products of float32 within may round to TF32."""
    settings = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [setting.allow_tf32 for setting in settings]
    try:
        for setting in settings:
            setting.allow_tf32 = allowed
        yield
    finally:
        for setting, value in zip(settings, before):
            setting.allow_tf32 = value


def lstm(inputs, douts):
    """A layer of torch's LSTM, cuDNN's on the GPU. It has four gates, the LLTM three."""
    x, h, c, *_ = inputs
    module = torch.nn.LSTM(x.shape[2], h.shape[1], device=x.device, dtype=x.dtype)

    def network(x):
        output, (last_h, last_c) = module(x, (h[None], c[None]))
        return output, last_h[0], last_c[0]

    name = "cuDNN LSTM x 3/4" if x.is_cuda else "torch LSTM x 3/4"
    yield name, 3 / 4, _both_directions(network, x, list(module.parameters()), douts)


def stepped_lltm(inputs, douts):
    """The LLTM's formula, step by step. The inputs' products are one, as for msops."""
    x, h, c, *parameters = inputs
    weight_ih, weight_hh, bias = parameters = [p.detach().requires_grad_() for p in parameters]

    def network(x):
        state, outputs = (h, c), []
        for product in functional.linear(x, weight_ih):
            state = lltm(torch.addmm(product, state[0], weight_hh.T), bias, state[1])
            outputs.append(state[0])
        return torch.stack(outputs), *state

    yield "stepped cell, CUDA graph", 1, _both_directions(network, x, parameters, douts)


def _both_directions(network, x, parameters, douts):
    x = x.detach().requires_grad_()

    def forward():
        with torch.no_grad():
            return network(x)

    def both():
        return torch.autograd.grad(network(x), [x, *parameters], douts)

    return {"forward": forward, "forward+backward": both}
