"""Calls entries on the GPU in torch's memory, without MindSpore's GPU backend."""

import numpy as np

from msops.testing.entry import outputs_of, prepare_operator

BIG = 2**31 + 4099  # elements, which take more than 4 GiB in float16
GUARD = 16  # elements around each array, which leave room to shift it off the alignment of packs


class Guarded:
    """Holds a torch array between guard elements."""

    def __init__(self, torch, shape, dtype, shift, values=None):
        size = int(np.prod(shape, dtype=np.int64))
        self.memory = torch.full((size + 2 * GUARD,), -7.0, dtype=getattr(torch, dtype), device="cuda")
        self.array = self.memory[GUARD + shift : GUARD + shift + size].view(shape)
        if values is None:
            self.array.fill_(float("nan"))
        else:
            self.array.copy_(torch.from_numpy(values))
        self.before, self.after = self.memory[: GUARD + shift], self.memory[GUARD + shift + size :]
        self.guard = torch.full((1,), -7.0, dtype=self.memory.dtype, device="cuda")

    def untouched(self):
        return bool((self.before == self.guard).all() and (self.after == self.guard).all())


class Gpu:
    """Gives tests `torch`, and what they do with it on the GPU."""

    def __init__(self, torch):
        self.torch = torch

    def random(self, *shape):
        torch = self.torch
        return torch.randint(-8, 9, shape, dtype=torch.int8, device="cuda").to(torch.float16) / 4

    def run(self, operator, *inputs):
        """Calls an entry and returns its outputs."""
        outputs = [
            self.torch.full(shape, float("nan"), dtype=getattr(self.torch, d), device="cuda")
            for shape, d in outputs_of(operator, inputs)
        ]
        assert prepare_operator(operator, [*inputs, *outputs])() == 0
        self.torch.cuda.synchronize()
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
