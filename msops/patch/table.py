"""Lists what `patch_mindspore` replaces: a row for each name of MindSpore.

A row names the innermost function, operator or primitive that Python can replace, so that all that MindSpore builds on
it changes, too: functions, Cells, and what a program imported before the patch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import attention, transformer
from .mint import shape

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# These names of mindspore.ops are replaced wherever in MindSpore the objects stand for which they stand.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "rms_norm": transformer.rms_norm,
    "auto_generate.rms_norm_impl": transformer.rms_norm,
    "auto_generate.RmsNorm": transformer.RmsNorm,
    "add_rms_norm": transformer.add_rms_norm,
    "auto_generate.add_rms_norm_op": transformer.add_rms_norm,
    "auto_generate.AddRmsNorm": transformer.AddRmsNorm,
    "swiglu": transformer.swiglu,
    "auto_generate.swiglu_op": transformer.swiglu,
    "auto_generate.Swiglu": transformer.Swiglu,
    "flash_attention_score": attention.flash_attention_score,
    "rotary_position_embedding": transformer.rotary_position_embedding,
    "auto_generate.rotary_position_embedding_op": transformer.rotary_position_embedding,
    "auto_generate.RotaryPositionEmbedding": transformer.RotaryPositionEmbedding,
}

# mindspore.mint calls these primitives, with these names, which have no kernels on GPU or CPU. What replaces one takes
# the arguments of the primitive's call.
PRIMITIVES: dict[str, Callable[..., Any]] = {
    "Clone": shape.clone,
    "StackExt": shape.stack,
    "TransposeExtView": shape.transpose,
}

# mindspore.mint also calls these functions of mindspore.ops, whose C++ chooses a primitive.
MINT: dict[str, Callable[..., Any]] = {}
