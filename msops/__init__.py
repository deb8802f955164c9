"""Custom CUDA operators for MindSpore, on the GPU and, where there is none, on the CPU."""

from .add import Add, add
from .check import Spec
from .custom import Operator, custom_op, once
from .depthwise_conv2d import DepthwiseConv2d, depthwise_conv2d
from .library import CompileError, Entry, Library, get_include, load
from .lltm import LLTMCell, lltm_cell
from .rules import broadcast, scratch
from .sigmoid import Sigmoid, sigmoid
from .signature import Signature
from .trilinear_interpolation import TrilinearInterpolation, trilinear_interpolation

__all__ = [
    "Add",
    "CompileError",
    "DepthwiseConv2d",
    "Entry",
    "LLTMCell",
    "Library",
    "Operator",
    "Sigmoid",
    "Signature",
    "Spec",
    "TrilinearInterpolation",
    "add",
    "broadcast",
    "custom_op",
    "depthwise_conv2d",
    "get_include",
    "lltm_cell",
    "load",
    "once",
    "scratch",
    "sigmoid",
    "trilinear_interpolation",
]
__version__ = "0.1.0"
