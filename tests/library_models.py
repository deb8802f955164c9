"""Lists the models of mindone and mindformers that tests/libraries.py compares, with their sizes and inputs."""

from typing import NamedTuple

import numpy as np

RNG = np.random.default_rng(0)


def numbers(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def tokens(*shape):
    return RNG.integers(3, 99, shape).astype(np.int32)


class Model(NamedTuple):
    """A class of both libraries, its configuration, and its inputs. Models of transformers have a class of
    configurations, and a loss of their own; the first output of the others is trained towards random numbers."""

    name: str
    config: str
    settings: dict
    inputs: dict
    library: str = "mindone"
    most: tuple = (2e-5, 1e-4, 2e-4)  # errors of the loss, the gradients and the losses of the steps
    by_msops: bool = False  # whether PointNet2 samples and groups points by msops' operators

    @property
    def has_loss(self):
        return bool(self.config) or self.library != "mindone"


SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
DECODER = dict(**SIZES, num_key_value_heads=2, vocab_size=100, max_position_embeddings=64)
ENCODER = dict(**SIZES, vocab_size=100, max_position_embeddings=64)
IMAGES = dict(**SIZES, image_size=32, patch_size=8)
TEXT = tokens(2, 16)
NEXT = dict(input_ids=TEXT, labels=TEXT, use_cache=False)
PADDED = (np.arange(16) < np.array([[16], [11]])).astype(np.int32)
TRANSLATED = dict(input_ids=TEXT, labels=tokens(2, 9))
KINDS = dict(num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
OF_TEXT = dict(**KINDS, **ENCODER)
KIND_OF_TEXT = dict(input_ids=TEXT, attention_mask=PADDED, labels=np.array([1, 4], np.int32))
KIND_OF_IMAGE = dict(pixel_values=numbers(2, 3, 32, 32), labels=np.array([1, 4], np.int32))
BOTH = dict(
    d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=96, decoder_ffn_dim=96, vocab_size=100, max_position_embeddings=64, dropout=0.0,
)  # fmt: skip
OF_T5 = dict(
    d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=100, dropout_rate=0.0, decoder_start_token_id=0
)  # fmt: skip
EXPERTS = dict(
    moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
    first_k_dense_replace=1,
)  # fmt: skip
BLOCKS = dict(block_out_channels=(32, 64), norm_num_groups=8, layers_per_block=1)
JOINT = dict(
    attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, patch_size=1
)
PROMPT = dict(encoder_hidden_states=numbers(2, 7, 32))
PLACES = np.stack((np.zeros(16), *np.divmod(np.arange(16), 4)), 1).astype(np.float32)

POINTS = np.concatenate((RNG.uniform(-0.6, 0.6, (4, 1024, 3)), numbers(4, 1024, 3)), -1).astype(np.float32)
SWITCHES = (2e-5, 1e-2, 3e-2)
HALF = (2e-5, 2e-3, 2e-4)  # attention is in float16
POINTS = dict(points=POINTS, labels=np.array([1, 4, 7, 7], np.int32))

MODELS = {
    "Llama": Model("LlamaForCausalLM", "LlamaConfig", DECODER, NEXT),
    "Qwen2": Model("Qwen2ForCausalLM", "Qwen2Config", DECODER, NEXT),
    "Qwen3": Model("Qwen3ForCausalLM", "Qwen3Config", dict(head_dim=16, **DECODER), NEXT),
    "Qwen3 with experts": Model(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        dict(head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, **DECODER),
        NEXT,
    ),
    "Gemma 2": Model(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=8, **DECODER),
        NEXT,
    ),
    "GPT-2": Model(
        "GPT2LMHeadModel",
        "GPT2Config",
        dict(
            n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=64, tie_word_embeddings=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ),
        NEXT,
    ),
    "BERT": Model(
        "BertForSequenceClassification",
        "BertConfig",
        dict(num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **ENCODER),
        dict(input_ids=TEXT, attention_mask=PADDED, labels=np.array([1, 4], np.int32)),
    ),
    "T5": Model(
        "T5ForConditionalGeneration",
        "T5Config",
        dict(feed_forward_proj="gated-gelu", **OF_T5),
        dict(input_ids=TEXT, labels=tokens(2, 9)),
    ),
    "Whisper": Model(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        dict(
            vocab_size=100, num_mel_bins=16, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_source_positions=32,
            max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        ),
        dict(input_features=numbers(2, 16, 64), labels=tokens(2, 9)),
    ),
    "CLIP": Model(
        "CLIPModel",
        "CLIPConfig",
        dict(text_config=dict(**ENCODER, eos_token_id=99), vision_config=IMAGES, projection_dim=32),
        dict(input_ids=TEXT, pixel_values=numbers(2, 3, 32, 32), return_loss=True),
    ),
    "Mistral": Model("MistralForCausalLM", "MistralConfig", dict(sliding_window=None, **DECODER), NEXT),
    "Mixtral": Model(
        "MixtralForCausalLM", "MixtralConfig", dict(sliding_window=None, num_local_experts=4, **DECODER), NEXT
    ),
    "Gemma": Model("GemmaForCausalLM", "GemmaConfig", dict(head_dim=16, **DECODER), NEXT),
    "Phi": Model("PhiForCausalLM", "PhiConfig", DECODER, NEXT),
    "Phi 3": Model("Phi3ForCausalLM", "Phi3Config", dict(pad_token_id=0, **DECODER), NEXT),
    "OLMo": Model("OlmoForCausalLM", "OlmoConfig", DECODER, NEXT),
    "OLMo 2": Model("Olmo2ForCausalLM", "Olmo2Config", DECODER, NEXT),
    "OLMoE": Model("OlmoeForCausalLM", "OlmoeConfig", dict(num_experts=4, num_experts_per_tok=2, **DECODER), NEXT),
    "Qwen2 with experts": Model(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        dict(
            moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
            **DECODER,
        ),
        NEXT,
    ),
    "Granite": Model("GraniteForCausalLM", "GraniteConfig", DECODER, NEXT),
    "StarCoder 2": Model(
        "Starcoder2ForCausalLM",
        "Starcoder2Config",
        dict(sliding_window=None, residual_dropout=0.0, embedding_dropout=0.0, **DECODER),
        NEXT,
    ),
    "Cohere": Model("CohereForCausalLM", "CohereConfig", DECODER, NEXT),
    "GLM": Model("GlmForCausalLM", "GlmConfig", dict(head_dim=16, pad_token_id=0, **DECODER), NEXT),
    "GLM 4": Model("Glm4ForCausalLM", "Glm4Config", dict(head_dim=16, pad_token_id=0, **DECODER), NEXT),
    "SmolLM3": Model("SmolLM3ForCausalLM", "SmolLM3Config", dict(pad_token_id=0, **DECODER), NEXT),
    "Nemotron": Model("NemotronForCausalLM", "NemotronConfig", DECODER, NEXT),
    "Falcon": Model(
        "FalconForCausalLM",
        "FalconConfig",
        dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100),
        NEXT,
    ),
    "GPT-NeoX": Model("GPTNeoXForCausalLM", "GPTNeoXConfig", ENCODER, NEXT),
    "GPT-J": Model(
        "GPTJForCausalLM",
        "GPTJConfig",
        dict(
            n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=64, vocab_size=100, tie_word_embeddings=False
        ),
        NEXT,
    ),
    "OPT": Model(
        "OPTForCausalLM",
        "OPTConfig",
        dict(
            hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=100,
            max_position_embeddings=64, word_embed_proj_dim=64, dropout=0.0,
        ),
        NEXT,
    ),
    "Mamba": Model(
        "MambaForCausalLM",
        "MambaConfig",
        dict(hidden_size=64, num_hidden_layers=2, vocab_size=100, state_size=8),
        NEXT,
    ),
    "RoBERTa": Model("RobertaForSequenceClassification", "RobertaConfig", OF_TEXT, KIND_OF_TEXT),
    "XLM-RoBERTa": Model("XLMRobertaForSequenceClassification", "XLMRobertaConfig", OF_TEXT, KIND_OF_TEXT),
    "ELECTRA": Model(
        "ElectraForSequenceClassification",
        "ElectraConfig",
        dict(embedding_size=32, **KINDS, **ENCODER),
        KIND_OF_TEXT,
    ),
    "ALBERT": Model(
        "AlbertForSequenceClassification",
        "AlbertConfig",
        dict(embedding_size=32, classifier_dropout_prob=0.0, **KINDS, **ENCODER),
        KIND_OF_TEXT,
    ),
    "DistilBERT": Model(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        dict(
            num_labels=5, dim=64, hidden_dim=96, n_layers=2, n_heads=4, vocab_size=100, max_position_embeddings=64,
            dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
        ),
        KIND_OF_TEXT,
    ),
    "DeBERTa 2": Model(
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        dict(relative_attention=True, pos_att_type=["c2p", "p2c"], **KINDS, **ENCODER),
        KIND_OF_TEXT,
    ),
    "MPNet": Model("MPNetForSequenceClassification", "MPNetConfig", OF_TEXT, KIND_OF_TEXT),
    "BART": Model("BartForConditionalGeneration", "BartConfig", BOTH, TRANSLATED),
    "mBART": Model("MBartForConditionalGeneration", "MBartConfig", BOTH, TRANSLATED),
    "Pegasus": Model("PegasusForConditionalGeneration", "PegasusConfig", BOTH, TRANSLATED),
    "mT5": Model(
        "MT5ForConditionalGeneration",
        "MT5Config",
        OF_T5,
        TRANSLATED,
    ),
    "DeiT": Model("DeiTForImageClassification", "DeiTConfig", dict(**KINDS, **IMAGES), KIND_OF_IMAGE),
    "DINOv2": Model(
        "Dinov2ForImageClassification",
        "Dinov2Config",
        dict(
            num_labels=5, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
        ),
        KIND_OF_IMAGE,
    ),
    "ConvNeXt": Model(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        dict(num_labels=5, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], image_size=32),
        KIND_OF_IMAGE,
    ),
    "SegFormer": Model(
        "SegformerForImageClassification",
        "SegformerConfig",
        dict(
            hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2], drop_path_rate=0.0,
            **KINDS,
        ),
        KIND_OF_IMAGE,
    ),
    "StableLM": Model(
        "StableLmForSequenceClassification", "StableLmConfig", dict(num_labels=5, pad_token_id=0, **DECODER),
        KIND_OF_TEXT
    ),
    "GPT-Neo": Model(
        "GPTNeoForCausalLM", "GPTNeoConfig", dict(hidden_size=64, num_layers=2, num_heads=4,
        attention_types=[[["global", "local"], 1]], vocab_size=100, max_position_embeddings=64,
        resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0), NEXT
    ),
    "CodeGen": Model(
        "CodeGenForCausalLM", "CodeGenConfig", dict(n_embd=64, n_layer=2, n_head=4, rotary_dim=8,
        n_positions=64, vocab_size=100, tie_word_embeddings=False), NEXT
    ),
    "Persimmon": Model(
        "PersimmonForCausalLM", "PersimmonConfig", dict(**SIZES, vocab_size=100, max_position_embeddings=64),
        NEXT
    ),
    "BioGPT": Model(
        "BioGptForCausalLM", "BioGptConfig", dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        activation_dropout=0.0, layerdrop=0.0, **ENCODER), NEXT
    ),
    "Helium": Model("HeliumForCausalLM", "HeliumConfig", dict(head_dim=16, pad_token_id=0, **DECODER), NEXT),
    "Cohere 2": Model("Cohere2ForCausalLM", "Cohere2Config", dict(head_dim=16, **DECODER), NEXT),
    "ModernBERT": Model(
        "ModernBertForMaskedLM", "ModernBertConfig", dict(pad_token_id=0, cls_token_id=1, sep_token_id=2,
        bos_token_id=1, eos_token_id=2, reference_compile=False, global_rope_theta=10000.0, **ENCODER),
        dict(input_ids=TEXT, labels=TEXT)
    ),
    "CamemBERT": Model("CamembertForSequenceClassification", "CamembertConfig", OF_TEXT, KIND_OF_TEXT),
    "XLM-RoBERTa-XL": Model("XLMRobertaXLForSequenceClassification", "XLMRobertaXLConfig", OF_TEXT, KIND_OF_TEXT),
    "DeBERTa": Model(
        "DebertaForSequenceClassification", "DebertaConfig", dict(relative_attention=True, pos_att_type=["c2p",
        "p2c"], **KINDS, **ENCODER), KIND_OF_TEXT
    ),
    "MegatronBERT": Model("MegatronBertForSequenceClassification", "MegatronBertConfig", OF_TEXT, KIND_OF_TEXT),
    "MobileBERT": Model(
        "MobileBertForSequenceClassification", "MobileBertConfig", dict(embedding_size=32,
        intra_bottleneck_size=32, true_hidden_size=32, **KINDS, **ENCODER), KIND_OF_TEXT
    ),
    "RoFormer": Model("RoFormerForSequenceClassification", "RoFormerConfig", OF_TEXT, KIND_OF_TEXT),
    "Blenderbot": Model("BlenderbotForConditionalGeneration", "BlenderbotConfig", BOTH, TRANSLATED),
    "Swin": Model(
        "SwinForImageClassification", "SwinConfig", dict(num_labels=5, image_size=32, patch_size=4,
        embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, drop_path_rate=0.0), KIND_OF_IMAGE
    ),
    "ResNet": Model(
        "ResNetForImageClassification", "ResNetConfig", dict(num_labels=5, embedding_size=16, hidden_sizes=[16,
        32], depths=[1, 1], layer_type="basic"), KIND_OF_IMAGE
    ),
    "RegNet": Model(
        "RegNetForImageClassification", "RegNetConfig", dict(num_labels=5, embedding_size=16, hidden_sizes=[16,
        32], depths=[1, 1], groups_width=8), KIND_OF_IMAGE
    ),
    "BEiT": Model(
        "BeitForImageClassification", "BeitConfig", dict(drop_path_rate=0.0, **KINDS, **IMAGES), KIND_OF_IMAGE
    ),
    "ConvNeXt 2": Model(
        "ConvNextV2ForImageClassification", "ConvNextV2Config", dict(num_labels=5, hidden_sizes=[16, 32, 48,
        64], depths=[1, 1, 1, 1], image_size=32), KIND_OF_IMAGE
    ),
    "LongT5": Model("LongT5ForConditionalGeneration", "LongT5Config", dict(**OF_T5, local_radius=7), TRANSLATED),
    "Switch Transformers": Model(
        "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", dict(**OF_T5, num_experts=4,
        num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, router_jitter_noise=0.0),
        TRANSLATED
    ),
    "DiffLlama": Model("DiffLlamaForCausalLM", "DiffLlamaConfig", DECODER, NEXT),
    "Arcee": Model("ArceeForCausalLM", "ArceeConfig", DECODER, NEXT),
    "Seed-OSS": Model(
        "SeedOssForCausalLM", "SeedOssConfig", dict(head_dim=16, attention_dropout=0.0, residual_dropout=0.0,
        **DECODER), NEXT
    ),
    "Exaone 4": Model(
        "Exaone4ForCausalLM", "Exaone4Config", dict(sliding_window=8, sliding_window_pattern=2, **DECODER), NEXT
    ),
    "ERNIE 4.5": Model("Ernie4_5ForCausalLM", "Ernie4_5Config", dict(head_dim=16, **DECODER), NEXT),
    "ERNIE 4.5 with experts": Model(
        "Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig", dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=32,
        moe_layer_start_index=1, **DECODER), NEXT
    ),
    "HunYuan": Model("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", dict(head_dim=16, **DECODER), NEXT),
    "OLMo 3": Model("Olmo3ForCausalLM", "Olmo3Config", dict(sliding_window=8, **DECODER), NEXT),
    "Ministral": Model("MinistralForCausalLM", "MinistralConfig", dict(head_dim=16, sliding_window=8, **DECODER), NEXT),
    "VaultGemma": Model(
        "VaultGemmaForCausalLM", "VaultGemmaConfig", dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=8,
        **DECODER), NEXT
    ),
    "Gemma 3": Model(
        "Gemma3ForCausalLM", "Gemma3TextConfig", dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=8,
        **DECODER), NEXT
    ),
    "Phi 3.5 with experts": Model(
        "PhimoeForCausalLM", "PhimoeConfig", dict(num_local_experts=4, router_jitter_noise=0.0,
        input_jitter_noise=0.0, sliding_window=None, **DECODER), NEXT
    ),
    "Dots 1": Model("Dots1ForCausalLM", "Dots1Config", dict(head_dim=16, **EXPERTS, **DECODER), NEXT),
    "GLM 4.5": Model("Glm4MoeForCausalLM", "Glm4MoeConfig", dict(head_dim=16, **EXPERTS, **DECODER), NEXT),
    "XGLM": Model(
        "XGLMForCausalLM", "XGLMConfig", dict(vocab_size=100, max_position_embeddings=64, d_model=64, ffn_dim=96,
        num_layers=2, attention_heads=4, dropout=0.0, attention_dropout=0.0), NEXT
    ),
    "LayoutLM": Model("LayoutLMForSequenceClassification", "LayoutLMConfig", OF_TEXT, KIND_OF_TEXT),
    "SqueezeBERT": Model(
        "SqueezeBertForSequenceClassification", "SqueezeBertConfig", dict(embedding_size=64, q_groups=1, k_groups=1,
        v_groups=1, post_attention_groups=1, intermediate_groups=1, output_groups=1, **OF_TEXT), KIND_OF_TEXT
    ),
    "RemBERT": Model(
        "RemBertForSequenceClassification", "RemBertConfig", dict(input_embedding_size=32, output_embedding_size=32,
        classifier_dropout_prob=0.0, **OF_TEXT), KIND_OF_TEXT
    ),
    "Nyströmformer": Model(
        "NystromformerForSequenceClassification", "NystromformerConfig", dict(num_landmarks=8,
        segment_means_seq_len=16, **OF_TEXT), KIND_OF_TEXT
    ),
    "ConvBERT": Model(
        "ConvBertForSequenceClassification", "ConvBertConfig", dict(embedding_size=64, head_ratio=2, **OF_TEXT),
        KIND_OF_TEXT
    ),
    "ERNIE": Model("ErnieForSequenceClassification", "ErnieConfig", OF_TEXT, KIND_OF_TEXT),
    "Data2VecText": Model("Data2VecTextForSequenceClassification", "Data2VecTextConfig", OF_TEXT, KIND_OF_TEXT),
    "RoBERTa with norms first": Model(
        "RobertaPreLayerNormForSequenceClassification", "RobertaPreLayerNormConfig", OF_TEXT, KIND_OF_TEXT
    ),
    "RoCBert": Model(
        "RoCBertForSequenceClassification", "RoCBertConfig", dict(enable_pronunciation=False, enable_shape=False,
        **OF_TEXT), KIND_OF_TEXT
    ),
    "XLNet": Model(
        "XLNetForSequenceClassification", "XLNetConfig", dict(vocab_size=100, d_model=64, n_layer=2, n_head=4,
        d_inner=96, dropout=0.0, summary_last_dropout=0.0, num_labels=5), KIND_OF_TEXT
    ),
    "Small Blenderbot": Model("BlenderbotSmallForConditionalGeneration", "BlenderbotSmallConfig", BOTH, TRANSLATED),
    "PLBart": Model("PLBartForConditionalGeneration", "PLBartConfig", dict(attention_dropout=0.0, **BOTH), TRANSLATED),
    "M2M100": Model(
        "M2M100ForConditionalGeneration", "M2M100Config", dict(attention_dropout=0.0, encoder_layerdrop=0.0,
        decoder_layerdrop=0.0, **BOTH), TRANSLATED
    ),
    "ViT-MSN": Model("ViTMSNForImageClassification", "ViTMSNConfig", dict(**KINDS, **IMAGES), KIND_OF_IMAGE),
    "PoolFormer": Model(
        "PoolFormerForImageClassification", "PoolFormerConfig", dict(num_labels=5, hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1], drop_path_rate=0.0), KIND_OF_IMAGE
    ),
    "ImageGPT": Model(
        "ImageGPTForImageClassification", "ImageGPTConfig", dict(vocab_size=100, n_positions=64, n_embd=64, n_layer=2,
        n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, num_labels=5), dict(input_ids=TEXT,
        labels=np.array([1, 4], np.int32))
    ),
    "I-JEPA": Model("IJepaForImageClassification", "IJepaConfig", dict(**KINDS, **IMAGES), KIND_OF_IMAGE),
    "PVT 2": Model(
        "PvtV2ForImageClassification", "PvtV2Config", dict(num_labels=5, image_size=32, depths=[1, 1, 1, 1],
        hidden_sizes=[16, 32, 48, 64], num_attention_heads=[1, 2, 3, 4], drop_path_rate=0.0), KIND_OF_IMAGE
    ),
    "FocalNet": Model(
        "FocalNetForImageClassification", "FocalNetConfig", dict(num_labels=5, image_size=32, patch_size=4,
        embed_dim=16, depths=[1, 1], hidden_sizes=[16, 32], focal_levels=[1, 1], focal_windows=[3, 3],
        drop_path_rate=0.0), KIND_OF_IMAGE
    ),
    "U-Net without text": Model(
        "UNet2DModel", "", dict(down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8, sample_size=16, **BLOCKS),
        dict(sample=numbers(2, 3, 16, 16), timestep=np.array([10, 500]))
    ),
    "Stable Diffusion's VAE": Model(
        "AutoencoderKL",
        "",
        dict(
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4,
            **BLOCKS,
        ),
        dict(sample=numbers(1, 3, 32, 32)),
    ),
    "Stable Diffusion's U-Net": Model(
        "UNet2DConditionModel",
        "",
        dict(
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=32, attention_head_dim=8, sample_size=16, **BLOCKS,
        ),
        dict(sample=numbers(2, 4, 16, 16), timestep=np.array([10, 500]), **PROMPT),
    ),
    "Stable Diffusion 3": Model(
        "SD3Transformer2DModel",
        "",
        dict(
            sample_size=16, in_channels=4, out_channels=4, num_layers=2, caption_projection_dim=32,
            pos_embed_max_size=16, **JOINT,
        ),
        dict(
            hidden_states=numbers(2, 4, 8, 8), timestep=np.array([300, 700]), pooled_projections=numbers(2, 32),
            **PROMPT,
        ),
    ),
    "FLUX": Model(
        "FluxTransformer2DModel",
        "",
        dict(
            in_channels=16, num_layers=1, num_single_layers=1, guidance_embeds=False, axes_dims_rope=(4, 4, 8), **JOINT
        ),
        dict(
            hidden_states=numbers(2, 16, 16), timestep=np.array([0.3, 0.7], np.float32), img_ids=PLACES,
            txt_ids=np.zeros((7, 3), np.float32), pooled_projections=numbers(2, 32), **PROMPT,
        ),
    ),
    "AuraFlow": Model(
        "AuraFlowTransformer2DModel",
        "",
        dict(
            sample_size=8, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1,
            attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=32,
            out_channels=4, pos_embed_max_size=64,
        ),
        dict(hidden_states=numbers(2, 4, 8, 8), timestep=np.array([0.3, 0.7], np.float32), **PROMPT),
    ),
    "Sana": Model(
        "SanaTransformer2DModel",
        "",
        dict(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
            num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=32,
            sample_size=8,
        ),
        dict(hidden_states=numbers(2, 4, 8, 8), timestep=np.array([300, 700]), **PROMPT),
    ),
    "Llama of mindformers": Model("LlamaForCausalLM", "LlamaConfig", DECODER, NEXT, "mindformers"),
    "Qwen3 of mindformers, for training": Model(
        "Qwen3ForCausalLM", "Qwen3Config", dict(head_dim=16, **DECODER), NEXT, "mindformers.parallel_core", HALF
    ),
    "Qwen3 with experts of mindformers, for training": Model(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        dict(
            head_dim=16, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, **DECODER
        ),
        NEXT,
        "mindformers.parallel_core",
        HALF,
    ),
    "PointNet2 of the model zoo": Model(
        "PointNet2", "", dict(classes=40), POINTS, "src.pointnet2", SWITCHES
    ),
    "PointNet2 of the model zoo, with msops' operators": Model(
        "PointNet2", "", dict(classes=40), POINTS, "src.pointnet2", SWITCHES, by_msops=True
    ),
}  # fmt: skip
