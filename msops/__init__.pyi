# This is the only list of the public names and their modules. `msops/__init__.py`, type checkers and editors read it.
from .checkpoints import convert_bfloat16 as convert_bfloat16
from .core.build import CompileError as CompileError, load as load
from .core.compiled import once as once
from .core.factory import Operators as Operators, custom_op as custom_op
from .core.fast_calls import use_fast_calls as use_fast_calls
from .core.library import Entry as Entry, Library as Library, get_include as get_include
from .core.operator import Operator as Operator
from .core.rules import broadcast as broadcast
from .core.signature import Signature as Signature
from .core.spec import Spec as Spec
from .graphs.cuda_graph import cuda_graph as cuda_graph
from .mixture_of_experts import MixtureOfExperts as MixtureOfExperts
from .operators.add import Add as Add, add as add
from .operators.add_rms_norm import AddRMSNorm as AddRMSNorm, add_rms_norm as add_rms_norm
from .operators.ball_query import BallQuery as BallQuery, ball_query as ball_query
from .operators.causal_conv1d import CausalConv1d as CausalConv1d, causal_conv1d as causal_conv1d
from .operators.composite_rays import CompositeRays as CompositeRays, composite_rays as composite_rays
from .operators.cross_entropy import CrossEntropyLoss as CrossEntropyLoss, cross_entropy as cross_entropy
from .operators.decoder_stack import DecoderStack as DecoderStack, decoder_stack as decoder_stack
from .operators.depthwise_conv2d import DepthwiseConv2d as DepthwiseConv2d, depthwise_conv2d as depthwise_conv2d
from .operators.embedding import Embedding as Embedding, embedding as embedding
from .operators.flash_attention import (
    FlashAttention as FlashAttention,
    flash_attention as flash_attention,
    flash_attention_varlen as flash_attention_varlen,
)
from .operators.furthest_point_sample import (
    FurthestPointSample as FurthestPointSample,
    furthest_point_sample as furthest_point_sample,
)
from .operators.gather_points import GatherPoints as GatherPoints, gather_points as gather_points
from .operators.geglu import GeGLU as GeGLU, geglu as geglu
from .operators.gelu import GELU as GELU, gelu as gelu
from .operators.gguf_dequantize import gguf_dequantize as gguf_dequantize
from .operators.gguf_embedding import gguf_embedding as gguf_embedding
from .operators.gguf_matmul import GGUFMatmul as GGUFMatmul, gguf_matmul as gguf_matmul
from .operators.group_norm import GroupNorm as GroupNorm, group_norm as group_norm
from .operators.group_points import (
    GroupAll as GroupAll,
    GroupPoints as GroupPoints,
    QueryAndGroup as QueryAndGroup,
    group_points as group_points,
)
from .operators.grouped_matmul import GroupedMatmul as GroupedMatmul, grouped_matmul as grouped_matmul
from .operators.hash_encoding import HashEncoding as HashEncoding, hash_encoding as hash_encoding
from .operators.int8_matmul import int8_matmul as int8_matmul
from .operators.knn import KNN as KNN, knn as knn
from .operators.layer_norm import LayerNorm as LayerNorm, layer_norm as layer_norm
from .operators.linear_argmax import LinearArgmax as LinearArgmax, linear_argmax as linear_argmax
from .operators.linear_cross_entropy import (
    LinearCrossEntropyLoss as LinearCrossEntropyLoss,
    linear_cross_entropy as linear_cross_entropy,
)
from .operators.linear_scan import LinearScan as LinearScan, linear_scan as linear_scan
from .operators.lltm import LLTM as LLTM, lltm as lltm
from .operators.lltm_cell import LLTMCell as LLTMCell, lltm_cell as lltm_cell
from .operators.march_rays import MarchRays as MarchRays, march_rays as march_rays
from .operators.moe_permute import MoEPermute as MoEPermute, moe_permute as moe_permute
from .operators.moe_unpermute import MoEUnpermute as MoEUnpermute, moe_unpermute as moe_unpermute
from .operators.ms_deform_attn import MSDeformAttn as MSDeformAttn, ms_deform_attn as ms_deform_attn
from .operators.paged_attention import PagedAttention as PagedAttention, paged_attention as paged_attention
from .operators.quantize_rows import quantize_rows as quantize_rows
from .operators.ray_aabb import RayAABB as RayAABB, ray_aabb as ray_aabb
from .operators.rms_norm import RMSNorm as RMSNorm, rms_norm as rms_norm
from .operators.rotary_embedding import RotaryEmbedding as RotaryEmbedding, rotary_embedding as rotary_embedding
from .operators.selective_scan import SelectiveScan as SelectiveScan, selective_scan as selective_scan
from .operators.sigmoid import Sigmoid as Sigmoid, sigmoid as sigmoid
from .operators.silu import SiLU as SiLU, silu as silu
from .operators.softmax import Softmax as Softmax, softmax as softmax
from .operators.spherical_harmonics import (
    SphericalHarmonics as SphericalHarmonics,
    spherical_harmonics as spherical_harmonics,
)
from .operators.swiglu import SwiGLU as SwiGLU, swiglu as swiglu
from .operators.three_interpolate import ThreeInterpolate as ThreeInterpolate, three_interpolate as three_interpolate
from .operators.three_nn import ThreeNN as ThreeNN, three_nn as three_nn
from .operators.topk_gating import TopKGating as TopKGating, topk_gating as topk_gating
from .operators.trilinear_interpolation import (
    TrilinearInterpolation as TrilinearInterpolation,
    trilinear_interpolation as trilinear_interpolation,
)
from .operators.weight_quant_matmul import (
    WeightQuantMatmul as WeightQuantMatmul,
    weight_quant_matmul as weight_quant_matmul,
)
from .operators.wkv4 import WKV4 as WKV4, wkv4 as wkv4
from .operators.wkv7 import WKV7 as WKV7, wkv7 as wkv7
from .operators.write_cache import write_cache as write_cache
from .parallel import average_gradients as average_gradients
from .patch.patch import patch_mindspore as patch_mindspore
from .quantization import dequantize_weight as dequantize_weight, quantize_weight as quantize_weight
from .quantized_checkpoints import (
    convert_awq as convert_awq,
    convert_gguf as convert_gguf,
    convert_gptq as convert_gptq,
    convert_nf4 as convert_nf4,
)

__version__: str
