"""The package's operators, one module each."""

from .add import Add, add
from .depthwise_conv2d import DepthwiseConv2d, depthwise_conv2d
from .lltm import LLTM, LLTMCell, lltm, lltm_cell
from .sigmoid import Sigmoid, sigmoid
from .trilinear_interpolation import TrilinearInterpolation, trilinear_interpolation

__all__ = [
    "LLTM",
    "Add",
    "DepthwiseConv2d",
    "LLTMCell",
    "Sigmoid",
    "TrilinearInterpolation",
    "add",
    "depthwise_conv2d",
    "lltm",
    "lltm_cell",
    "sigmoid",
    "trilinear_interpolation",
]
