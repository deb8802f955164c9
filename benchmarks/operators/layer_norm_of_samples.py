"""Benchmarks layer normalization with parameters of each sample, which serves patch_mindspore alone. A size is
(samples, rows of each, columns): those of Stable Diffusion 3 and FLUX."""

from mindspore import ops

from msops.operators.layer_norm_of_samples import layer_norm_of_samples
from test_layer_norm_of_samples import LayerNormOfSamples as Card

from ..benchmark import Benchmark, OfFunction, Sizes


def composed(x, weight, bias):
    centred = x - x.mean(-1, keep_dims=True)
    normal = centred * ops.rsqrt((centred * centred).mean(-1, keep_dims=True) + 1e-5)
    return normal * weight.expand_dims(1) + bias.expand_dims(1)


class LayerNormOfSamples(Benchmark):
    card = Card()
    sizes = {
        "GPU": [Sizes(named=((4, 4096, 1536), (4, 1024, 3072)), sweep=((16, 256, 1152),))],
        "CPU": [Sizes(named=((2, 512, 512),))],
    }

    def inputs(self, size):
        parameters = (size[0], size[-1])
        return [size, parameters, parameters]

    def torch_formula(self, case):
        from torch.nn.functional import layer_norm

        return lambda x, weight, bias: layer_norm(x, x.shape[-1:]) * weight[:, None] + bias[:, None]

    def networks(self, size, dtype, device):
        return {"msops": OfFunction(layer_norm_of_samples), "MindSpore": OfFunction(composed)}
