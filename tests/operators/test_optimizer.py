"""This operator serves patch_mindspore alone: msops has no public name for it.

The card has the updates that leave their inputs as they are. Tests below compare those in place with them.
"""

import numpy as np
import pytest

from card import Card, lengths, results_of, unwritten
from msops.operators import optimizer
from msops.testing.entry import prepare_operator

NUMBERS = {
    "rate": 0.1,
    "beta1": 0.75,
    "beta2": 0.9,
    "rest1": 0.25,
    "rest2": 0.125,
    "eps": 0.25,
    "decay": 0.25,
    "first": 0.5,
    "second": 0.625,
    "scale": 0.5,
    "momentum": 0.75,
    "share": 0.5,
    "up": 0.75,
    "down": 1.25,
}
KEYS = {"adam": optimizer._ADAM, "momentum": optimizer._MOMENTUM, "scale": ("up", "down"), "squares": ()}
KINDS = {"momentum": 2, "scale": 0, "squares": 0}  # arrays of each tensor beside the first


def kinds_of(rule, amsgrad):
    return 3 + amsgrad if rule == "adam" else KINDS[rule]


def adam(g, p, states, n, correction, decoupled, nesterov, maximize):
    m, v, *most = states
    g = ((-g if maximize else g) + (0 if decoupled else n["decay"] * p)) * n["scale"]
    m, v = n["beta1"] * m + n["rest1"] * g, n["beta2"] * v + n["rest2"] * g * g
    most = [np.maximum(each, v) for each in most]
    top, root = n["beta1"] * m + n["rest1"] * g if nesterov else m, np.sqrt(most[0] if most else v)
    rate = n["rate"]
    if correction == optimizer.GIVEN:
        top, root = top / n["first"], root / np.sqrt(n["second"])
    elif correction == optimizer.POWERS:
        rate = rate * np.sqrt(1 - n["second"]) / (1 - n["first"])
    shrink = n["rate"] * n["decay"] * p if decoupled else 0
    return p - rate * top / (root + n["eps"]) - shrink, m, v, *most


def momentum(g, p, states, n, buffered, nesterov, maximize):
    g = ((-g if maximize else g) + n["decay"] * p) * n["scale"]
    a = n["momentum"] * states[0] + n["share"] * g if buffered else states[0]
    move = g if not buffered else g + n["momentum"] * a if nesterov else a
    return p - n["rate"] * move, a


def case(rule, *shapes, kinds=None, **settings):
    """Returns the shapes of all inputs of a call for tensors of these shapes, and its settings."""
    kinds = kinds_of(rule, settings.get("amsgrad", False)) if kinds is None else kinds
    return [*shapes, *[()] * len(KEYS[rule]), *shapes * kinds], {"rule": rule, **settings}


class Optimizer(Card):
    """Moves parameters by the rule that the setting names, adds up squares, or multiplies tensors."""

    RAGGED, FEW = ((5,), (2, 3), (), (0,), (1, 129)), ((5,), (2, 3))
    cases = {
        "adam": case("adam", *RAGGED),
        "one tensor": case("adam", (7,), correction=optimizer.POWERS, decoupled=False),
        "without elements": case("adam", (0, 3), (0,)),
        "nesterov": case("adam", *FEW, correction=optimizer.POWERS, decoupled=False, nesterov=True),
        "amsgrad": case("adam", *FEW, correction=optimizer.GIVEN, amsgrad=True, maximize=True),
        "ragged amsgrad": case("adam", *RAGGED, amsgrad=True),
        "momentum": case("momentum", *FEW),
        "ragged momentum": case("momentum", *RAGGED),
        "momentum, nesterov": case("momentum", *FEW, nesterov=True, maximize=True),
        "descent": case("momentum", *FEW, buffered=False),
        "squares": case("squares", *FEW),
        "ragged squares": case("squares", *RAGGED),
        "squares of nothing": case("squares", (0,)),
        "scale": case("scale", *FEW),
        "ragged scale": case("scale", *RAGGED),
    }
    further = {
        "several pieces": case("adam", (3,), (16384 * 2 + 5,), (0,), (16384,)),
        "momentum, several pieces": case("momentum", (16385,), (2,)),
        "squares of several pieces": case("squares", (3,), (16384 * 2 + 5,), (0,), (16384,)),
        "scale of several pieces": case("scale", (3,), (16384 + 5,)),
        # The first one makes them so large that test_valid_calls, which took a minute for 360 inputs, leaves them out.
        "as many tensors as one launch takes": case(
            "adam", (8192,), *((i % 7,) for i in range(1, optimizer.MOST)), amsgrad=True
        ),
    }
    small = "one tensor"
    hostile = ("one tensor", "amsgrad", "momentum", "squares", "scale")
    right_numbers = {}

    def operators(self, shapes=(), rule="adam", **settings):
        kinds = kinds_of(rule, settings.get("amsgrad", False))
        tensors = max(1, (len(shapes) - len(KEYS[rule])) // (1 + kinds))
        if rule in ("adam", "momentum"):
            settings["in_place"] = False
        return [getattr(optimizer, rule)(tensors, **settings)]

    def formula(self, *inputs, rule="adam", **settings):
        numbers = KEYS[rule]
        kinds = kinds_of(rule, settings.get("amsgrad", False))
        count = (len(inputs) - len(numbers)) // (1 + kinds)
        first, rest = inputs[:count], inputs[count + len(numbers) :]
        named = {name: x.astype(x.dtype) for name, x in zip(numbers, inputs[count:])}
        if rule == "squares":
            return (sum((x * x).sum() for x in first) + 0 * first[0].dtype.type(0),)
        if rule == "scale":
            return tuple([x * named["up"] / named["down"] for x in first])
        defaults = {"maximize": False, "nesterov": False}
        defaults |= {"correction": 0, "decoupled": True} if rule == "adam" else {"buffered": True}
        settings = {**defaults, **settings}
        settings.pop("amsgrad", None)
        parameters, *states = (rest[i * count : (i + 1) * count] for i in range(kinds))
        compute = adam if rule == "adam" else momentum
        results = [compute(g, p, of, named, **settings) for g, p, of in zip(first, parameters, zip(*states))]
        return tuple([x for kind in zip(*results) for x in kind])

    formulas = property(lambda self: (self.formula,))

    def random_case(self, random):
        rule = random.choice(list(KEYS))
        shapes = [lengths(random) for _ in range(random.randrange(1, 5))]
        flags = {"adam": ("decoupled", "nesterov", "amsgrad", "maximize"), "momentum": ("buffered", "nesterov")}
        settings = {name: random.random() < 0.5 for name in flags.get(rule, ())}
        if rule == "adam":
            settings["correction"] = random.randrange(3)
        return case(rule, *shapes, **settings)

    def inputs(self, shapes, dtype, seed=1, rule="adam", **settings):
        numbers, wide = KEYS[rule], np.float64 if dtype == "float64" else np.float32
        count = (len(shapes) - len(numbers)) // (1 + kinds_of(rule, settings.get("amsgrad", False)))
        drawn = super().inputs(shapes, dtype, seed)
        values = [np.array(NUMBERS[name], np.float32) for name in numbers]
        arrays = [x.astype(wide) for x in drawn[count + len(numbers) :]]
        # Squares are positive, and so large that their roots do not magnify roundings.
        arrays[2 * count :] = [np.abs(x) + wide(0.25) for x in arrays[2 * count :]]
        return [*drawn[:count], *values, *arrays]


CARD = Optimizer()
UPDATES = [name for name, (_, settings) in CARD.entry_cases().items() if settings["rule"] in ("adam", "momentum")]


def in_place(name, dtype, call=None, shift=0):
    """Returns the parameters and states after a step in place, and those of the step that leaves its inputs."""
    shapes, settings = CARD.entry_cases()[name]
    [want] = CARD.entry_calls(shapes, settings, dtype)
    update = getattr(optimizer, settings["rule"])
    named = {key: value for key, value in settings.items() if key != "rule"}
    count = want.operator.attributes["tensors"]
    operator = update(count, **named)
    copies = []
    for x in want.inputs:
        memory = unwritten((x.size + shift,), x.dtype)[shift if x.size else 0 :]
        memory = memory[: x.size].reshape(x.shape)
        memory[...] = x
        copies.append(memory)
    arrays = [*copies, np.zeros((), np.float32)]
    assert (call or (lambda o, a: prepare_operator(o, a)()))(operator, arrays) == 0
    moved = copies[count + len(KEYS[settings["rule"]]) :]
    for before, after in zip(want.inputs[: len(copies) - len(moved)], copies):  # gradients and numbers stay
        np.testing.assert_array_equal(before, after)
    return moved, want.results, arrays[-1]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", UPDATES)
def test_steps_in_place(name, dtype):
    for shift in (0, 1):
        moved, want, done = in_place(name, dtype, shift=shift)
        assert any(x.size for x in moved) == bool(done)
        for got, expected in zip(moved, want):
            np.testing.assert_array_equal(got, expected)


def test_largest_square_that_is_not_a_number():
    """A NaN stays, in whichever of both squares it is."""
    shapes, settings = CARD.cases["amsgrad"]
    for kind in (-1, -3):  # the largest squares, and the squares, each of two tensors
        [call] = CARD.entry_calls(shapes, settings, "float32")
        call.inputs[kind][1, 2] = np.nan
        results = results_of(call.operator, *call.inputs)
        for i in (1, -1):  # the parameter, and the largest square
            assert np.argwhere(np.isnan(results[i])).tolist() == [[1, 2]]


def test_too_many_tensors():
    operator = optimizer.squares(optimizer.MOST + 1)
    arrays = [np.zeros(1, np.float32)] * (optimizer.MOST + 1)
    assert prepare_operator(operator, [*arrays, np.zeros((), np.float32), np.zeros(1, np.float32)])() != 0
