"""Calls entries on the GPU in torch's memory, without MindSpore's GPU backend."""

import importlib.util

import numpy as np

from card import cards, follow, names_of
from msops.testing.entry import has_gpu_code, outputs_of, prepare_operator

BIG = 2**31 + 4099  # elements, which take more than 4 GiB in float16
GUARD = 16  # elements around each array, which leave room to shift it off the alignment of packs


def is_there():
    """Tells whether torch has a GPU, and the libraries have code for it."""
    if not has_gpu_code("add") or importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def unwritten(dtype):
    """Returns what fills arrays before a call: NaN, -1 for whole numbers, or 99 for those without a sign."""
    return {"f": np.nan, "u": 99}.get(np.dtype(dtype).kind, -1)


class Guarded:
    """Holds an array of a device between guard elements."""

    def __init__(self, device, shape, dtype, shift, values=None):
        size = int(np.prod(shape, dtype=np.int64))
        self.memory = device.full(size + 2 * GUARD, 7, dtype)
        self.array = self.memory[GUARD + shift : GUARD + shift + size].reshape(shape)
        self.array[...] = unwritten(dtype) if values is None else device.array(values)
        self.before, self.after = self.memory[: GUARD + shift], self.memory[GUARD + shift + size :]

    def untouched(self):
        guard = self.memory[0]
        return bool((self.before == guard).all() and (self.after == guard).all())


def compare_with_cpu(device, call, dtype, shift):
    """Requires an entry on a device to give what it gives on the CPU, and to write nowhere else.

    The device has `full` and `array`, which make arrays, `numpy`, which reads one, `shapes_of_scratch`, which a call
    needs, and `status`, which calls an entry.
    """
    what = f"{call.operator.entry.name}, shifted by {shift}"
    inputs = [Guarded(device, x.shape, x.dtype.name, shift, x) for x in call.inputs]
    shapes = [x.shape for x in call.results] + device.shapes_of_scratch(call)
    outputs = [Guarded(device, shape, x.dtype.name, shift) for shape, x in zip(shapes, [*call.results, *call.scratch])]
    assert device.status(call.operator, [g.array for g in [*inputs, *outputs]]) == 0, what
    for x, g in zip(call.inputs, inputs):
        np.testing.assert_array_equal(device.numpy(g.array), x, f"{what}: an input was changed")
    assert all(g.untouched() for g in [*inputs, *outputs]), what
    for name, want, g in zip(names_of(call.operator).results, call.results, outputs):
        if want.dtype.kind != "f":
            np.testing.assert_array_equal(device.numpy(g.array), want, f"{what}: {name}")
            continue
        # A sum of many terms may happen to be small, but its error is as large as if it had the usual size.
        terms = max(x.size for x in call.inputs) / max(1, want.size)
        scale = max(np.max(np.abs(want), initial=0, where=np.isfinite(want)), terms**0.5)
        tolerance = {"float16": 2e-3, "float32": 5e-6, "float64": 1e-13}[dtype]
        np.testing.assert_allclose(
            device.numpy(g.array), want, rtol=tolerance, atol=tolerance * scale, err_msg=f"{what}: {name}"
        )


# Cases of attention -> what in the last input, a mask or a bias, hides a key.
HIDING = {
    "bias of each pair": -np.inf,
    "bias of keys alone": -np.inf,
    "mask of queries": True,
    "mask of queries of heads, more features": True,
    "mask, window to the left": True,
}


def set_for_first_query(x, value):
    """Sets a mask or a bias for every seventh query, from the first on; or, if it is of keys alone, of the keys that
    the first query sees, and some more, in a causal case."""
    x[(..., slice(None, None, 7), slice(None)) if x.shape[-2] > 1 else (..., slice(140))] = value


def calls_with_hidden_queries(monkeypatch, name, value, dtype):
    """Returns the calls of a case of attention in which some queries see no key."""
    [card] = [card for card in cards() if card.name() == "flash_attention"]
    shapes, settings = card.entry_cases()[name]
    inputs_of = card.inputs

    def hidden(*arguments, **others):
        *inputs, last = inputs_of(*arguments, **others)
        set_for_first_query(last, value)
        return [*inputs, last]

    monkeypatch.setattr(card, "inputs", hidden)
    calls = card.entry_calls(shapes, settings, dtype)
    out, lse = calls[0].results
    assert np.isneginf(lse[..., 0]).all()
    assert not out[np.isneginf(lse)].any()
    return calls


# (case of attention, dtype) -> a bias on all keys of a query, beside which lse has no digits of the sum of its weights,
# or in float16 few.
FAR = {
    ("bias of each pair", "float16"): -6e4,
    ("bias of each pair", "float32"): -1e9,
    ("bias of pairs of heads", "float16"): -1e9,
    ("bias of pairs of heads", "float32"): 1e9,
    ("bias of keys alone", "float16"): -6e4,
    ("bias of keys of heads", "float16"): -1e9,
}


def calls_with_far_bias(monkeypatch, name, dtype):
    """Returns the calls of a case of attention in which some queries have a bias far from 0 on all keys."""
    [card] = [card for card in cards() if card.name() == "flash_attention"]
    shapes, settings = card.entry_cases()[name]
    inputs_of = card.inputs

    def far(*arguments, **others):
        *inputs, bias = inputs_of(*arguments, **others)
        set_for_first_query(bias, FAR[name, dtype])
        return [*inputs, bias]

    monkeypatch.setattr(card, "inputs", far)
    return card.entry_calls(shapes, settings, dtype)


def calls_with(card, inputs, douts, settings):
    """Returns the calls of a card's entries with these inputs and gradients of the results."""

    def compute(operator, inputs):
        outputs = [np.empty(*output) for output in outputs_of(operator, inputs)]
        assert prepare_operator(operator, [*inputs, *outputs])() == 0
        return outputs, douts

    return list(follow(card.operators([x.shape for x in inputs], **settings), inputs, compute))


def calls_that_grow(dtype):
    """Returns the calls of selective_scan in which states, and then gradients, grow beyond all numbers over a part of
    the steps, had they anything to grow from."""
    [card] = [card for card in cards() if card.name() == "selective_scan"]
    return calls_with(card, *card.growing(dtype))


def calls_with_unused(name, dtype):
    """Returns the calls of a case of grouped_matmul with NaN where no group has rows."""
    [card] = [card for card in cards() if card.name() == "grouped_matmul"]
    return calls_with(card, *card.unused(name, dtype))


def calls_with_ties(name, dtype):
    """Returns the calls of topk_gating for logits of which many are equal, or NaN."""
    [card] = [card for card in cards() if card.name() == "topk_gating"]
    return calls_with(card, *card.tied(name, dtype))


def calls_with_wrong_columns(monkeypatch, name, dtype):
    """Returns calls of a case of softmax along axis 1 whose columns hold NaN, infinity, or nothing but -infinity."""
    [card] = [card for card in cards() if card.name() == "softmax"]
    shapes, settings = card.entry_cases()[name]
    inputs_of = card.inputs

    def changed(*arguments, **others):
        [x] = inputs_of(*arguments, **others)
        _, length, inner = x.shape
        x[-1, length // 2, 0] = np.nan
        x[-1, length - 1, inner // 2] = np.inf
        x[0, :, inner - 1] = -np.inf
        return [x]

    monkeypatch.setattr(card, "inputs", changed)
    calls = card.entry_calls(shapes, settings, dtype)
    (y,) = calls[0].results
    assert np.isnan(y[-1, :, [0, shapes[0][2] // 2]]).all()
    assert np.isnan(y[0, :, -1]).all()
    return calls


# Raw decays of wkv7: a column stays, a chunk's product of decays is too small for tensor cores, a column vanishes.
DECAYS = (-100.0, 3.0, np.inf)


def calls_with_decay(monkeypatch, raw):
    """Returns the calls of wkv7 with float16 in which a decay in the second chunk of steps of a head is this one."""
    [card] = [card for card in cards() if card.name() == "wkv7"]
    inputs_of = card.inputs

    def changed(*arguments, **others):
        inputs = inputs_of(*arguments, **others)
        inputs[1][1, 16:32, 0, 5] = raw
        return inputs

    monkeypatch.setattr(card, "inputs", changed)
    return card.entry_calls([(2, 53, 2, 64)] * 6, {}, "float16")


class Gpu:
    """Gives tests `torch`, and what they do with it on the GPU."""

    def __init__(self, torch):
        self.torch = torch

    def full(self, size, value, dtype):
        return self.torch.full((size,), value, dtype=getattr(self.torch, dtype), device="cuda")

    def array(self, values):
        return self.torch.from_numpy(values).cuda()

    def numpy(self, array):
        return array.cpu().numpy()

    def shapes_of_scratch(self, call):
        return [x.shape for x in call.scratch]

    def status(self, operator, arrays):
        status = prepare_operator(operator, arrays)()
        self.torch.cuda.synchronize()
        return status

    def random(self, *shape):
        torch = self.torch
        return torch.randint(-8, 9, shape, dtype=torch.int8, device="cuda").to(torch.float16) / 4

    def run(self, operator, *inputs):
        """Calls an entry and returns its outputs."""
        outputs = [
            self.torch.full(shape, unwritten(d), dtype=getattr(self.torch, d), device="cuda")
            for shape, d in outputs_of(operator, inputs)
        ]
        assert self.status(operator, [*inputs, *outputs]) == 0
        return outputs

    def assert_close(self, got, want):
        assert self.torch.allclose(got.float(), want.float(), rtol=2e-3, atol=2e-3)

    def assert_equal(self, got, want):
        assert self.torch.equal(got, want)

    def assert_sums(self, got, want):
        """Compares sums, rounded to float16, with sums in float64. Sums beyond the range of float16 are infinite."""
        scale = want.abs().max().item()
        want = want.to(self.torch.float16).double()
        assert self.torch.allclose(got.double(), want, rtol=2e-3, atol=1e-6 * scale)

    def sum(self, array, axes=0, chunk=2**20):
        """Returns the sums over some axes in float64. The first axis must be one of them."""
        return sum(part.sum(axes, dtype=self.torch.float64) for part in array.split(chunk))

    def check_parts(self, operator, inputs, outputs, n, width, check):
        """Requires that the first and the last of `n` samples have the results that they have alone. The last ones lie
        past 2^31 elements.

        An axis of n elements is the axis of the samples; all samples share inputs without one. Outputs without one, or
        None in their place, are not compared.
        """

        def cut(array, part):
            if n not in array.shape:
                return array
            axis = list(array.shape).index(n)
            return array[(slice(None),) * axis + (part,)].contiguous()

        for part in (slice(0, width), slice(n - width, n)):
            alone = self.run(operator, *(cut(x, part) for x in inputs))
            for big, small in zip(outputs, alone):
                if big is not None and n in big.shape:
                    check(cut(big, part), small)
