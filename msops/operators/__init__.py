"""The package's operators, one module each."""

from msops.operators.add import Add, add
from msops.operators.depthwise_conv2d import DepthwiseConv2d, depthwise_conv2d
from msops.operators.lltm import LLTMCell, lltm_cell
from msops.operators.lltm_sequence import LLTM, lltm
from msops.operators.sigmoid import Sigmoid, sigmoid
from msops.operators.trilinear_interpolation import TrilinearInterpolation, trilinear_interpolation

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
