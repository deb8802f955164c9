"""Benchmarks AdamW's step in place, as `patch_mindspore` takes it, and the norm of gradients with their clipping.

A size is a number of layers of SmolLM2-135M, each of 9 tensors, or, from 2^20 on, the number of elements of one tensor.
The floor of float16 counts 2 bytes also for parameters and moments, which have 4. The
operator serves patch_mindspore alone.
"""

import functools

import mindspore
import numpy as np
from mindspore import Tensor, nn

from card import calls_of_specs
from msops.operators import optimizer
from test_optimizer import KEYS, NUMBERS, Optimizer as Card

from ..benchmark import Benchmark, Sizes, power
from ..figures import Target, best_peer, share

WIDTH, KEYS_WIDTH, INNER = 576, 192, 1536
LAYER = (
    *((WIDTH,), (WIDTH, WIDTH), (KEYS_WIDTH, WIDTH), (KEYS_WIDTH, WIDTH), (WIDTH, WIDTH)),
    *((WIDTH,), (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)),
)
ADAM = dict(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def shapes_of(size):
    return [(size,)] if size >= 2**20 else [*LAYER * size]


class Scaled(nn.Cell):
    """Multiplies tensors by one operator for each."""

    def construct(self, *tensors):
        return tuple([x * 0.75 for x in tensors])


class ScaledAtOnce(nn.Cell):
    def __init__(self, tensors):
        super().__init__()
        self.scale = optimizer.scale.primitive(tensors)
        self.up, self.down = (Tensor(value, mindspore.float32) for value in (0.75, 1.0))

    def construct(self, *tensors):
        return self.scale(*tensors, self.up, self.down)


class Optimizer(Benchmark):
    card = Card()
    sizes = {
        "GPU": [Sizes(named=(8, 2**28), sweep=(1, 2**20), ragged={2**28 + 1: 2**28})],
        "CPU": [Sizes(named=(2, 2**22), sweep=(1,))],
    }
    trains = compiled = False
    targets = {
        "GPU": [
            Target("72 tensors", "share 0.9", 0.9, share("72 tensors: adam", dtype="float32")),
            Target("2^28", "share 0.95", 0.95, share("2^28: adam", dtype="float32")),
            Target("72 tensors", "not slower than the best peer", 1, best_peer("72 tensors: adam", dtype="float32")),
            Target("2^28", "not slower than the best peer", 1, best_peer("2^28: adam", dtype="float32")),
        ]
    }

    def describe(self, size):
        return power(size) if size >= 2**20 else f"{len(LAYER) * size} tensors"

    def inputs(self, size):
        shapes = shapes_of(size)
        return [*shapes, *[()] * len(KEYS["adam"]), *shapes * 3]

    def contents(self, name, size):
        if name in NUMBERS:
            return NUMBERS[name]
        if name.startswith("v"):  # its root is taken
            return np.random.default_rng(0).random(shapes_of(size)[int(name[1:])], np.float32)
        return None

    def cases(self, size):
        shapes, count = shapes_of(size), len(shapes_of(size))
        moved = shapes * 3  # a step writes the parameters and the moments, also where they are
        for name, operator, inputs, results in (
            ("adam", optimizer.adam(count), self.inputs(size), moved),
            ("squares", optimizer.squares(count), shapes, [()]),
            ("scale", optimizer.scale(count), [*shapes, (), ()], shapes),
        ):
            calls_of_specs([operator], inputs)  # requires that they fit
            case = self.case("forward", size, operator, inputs, results)
            yield case._replace(name=f"{case.name}: {name}")

    def numpy_formula(self, case):
        rule = case.name.rpartition(" ")[2]
        formula = functools.partial(self.card.formula, rule=rule)

        def step(*inputs):
            moved = formula(*inputs)
            for x, after in zip(inputs[-len(moved) :], moved):
                x[...] = after
            return (np.float32(1),)

        return step if rule == "adam" else formula

    def torch_formula(self, case):
        return None  # its optimizers are objects, which are prepared below

    def prepared_peers(self, case, like):
        import torch

        count, rule = len(shapes_of(case.size)), case.name.rpartition(" ")[2]

        def adam(inputs, **how):
            parameters = [torch.nn.Parameter(x.clone()) for x in inputs[count + len(KEYS["adam"]) :][:count]]
            for parameter, gradient in zip(parameters, inputs):
                parameter.grad = gradient.to(parameter.dtype)
            step = torch.optim.AdamW(parameters, **ADAM, **how).step
            step()
            return step

        def scale(inputs):
            factor = torch.tensor(0.75, device=like.device)
            return lambda: torch._foreach_mul(inputs[:count], factor)

        def squares(inputs):
            return lambda: torch.stack(torch._foreach_norm(inputs[:count])).norm()

        if rule != "adam":
            return {"torch foreach": lambda *inputs: (scale if rule == "scale" else squares)(list(inputs))}
        hows = {"torch fused": {"fused": True}, "torch foreach": {"foreach": True}}
        return {name: functools.partial(lambda how, *inputs: adam(inputs, **how), how) for name, how in hows.items()}

    def on_line(self, case):
        return case.endswith("adam")

    def cell_inputs(self, size):
        return shapes_of(size)

    def networks(self, size, dtype, device):
        return {"msops": ScaledAtOnce(len(shapes_of(size))), "MindSpore": Scaled()}
