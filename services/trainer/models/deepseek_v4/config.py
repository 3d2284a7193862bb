"""The Megatron configuration of a DeepSeek-V4 actor.

Only what Megatron's own classes read is set here; what the model computes stays in `Architecture`.
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from shared.models.deepseek_v4.architecture import Architecture

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    architecture: Architecture, *, dtype: str = "float32", initialise: bool = False
) -> TransformerConfig:
    """`dtype` is that of parameters and activations; FP32-only tensors keep theirs regardless.

    `initialise` fills new weights from N(0, initializer_range); loaders leave it off.
    """
    params_dtype = DTYPES[dtype]
    return TransformerConfig(
        num_layers=architecture.num_hidden_layers,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        ffn_hidden_size=architecture.moe_intermediate_size,
        num_moe_experts=architecture.n_routed_experts,
        moe_router_topk=architecture.num_experts_per_tok,
        layernorm_epsilon=architecture.rms_norm_eps,
        init_method_std=architecture.initializer_range,
        normalization="RMSNorm",
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=initialise,
        params_dtype=params_dtype,
        pipeline_dtype=params_dtype,
        bf16=params_dtype is torch.bfloat16,
        # The learner divides by global denominators itself.
        calculate_per_token_loss=True,
    )
