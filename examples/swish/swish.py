from pathlib import Path

from mindspore import nn

import msops

_library = msops.load("swish", Path(__file__).with_name("swish.cu"))
_swish_backward = msops.custom_op(_library.SwishBackward, "x, dy -> dx")
_swish = msops.custom_op(_library.SwishForward, "x -> y", gradient=_swish_backward)


def swish(x):
    """x / (1 + e^-x) of each element, for a Tensor of float16, float32 or float64."""
    return _swish(x)


class Swish(nn.Cell):
    """See :func:`swish`."""

    def construct(self, x):
        return _swish(x)
