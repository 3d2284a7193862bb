"""The Megatron configuration of a DeepSeek-V4 actor.

Only what Megatron's own classes read is set here; what the model computes stays in `Architecture`.
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from shared.models.deepseek_v4.architecture import Architecture
from shared.parallel import Layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    architecture: Architecture,
    *,
    dtype: str = "float32",
    initialise: bool = False,
    layout: Layout | None = None,
) -> TransformerConfig:
    """`dtype` is that of parameters and activations; FP32-only tensors keep theirs regardless.

    `initialise` fills new weights from N(0, initializer_range); loaders leave it off.
    """
    params_dtype = DTYPES[dtype]
    layout = Layout() if layout is None else layout
    parts = layout.stage_sizes(architecture.num_hidden_layers)
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
        use_cpu_initialization=True,  # the model moves to its device as a whole
        perform_initialization=initialise,
        params_dtype=params_dtype,
        pipeline_dtype=params_dtype,
        bf16=params_dtype is torch.bfloat16,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        num_layers_in_first_pipeline_stage=parts[0] if layout.pipeline > 1 else None,
        num_layers_in_last_pipeline_stage=parts[-1] if layout.pipeline > 1 else None,
        # Stages tell each other the shape of what they send: `[T, streams, width]`.
        variable_seq_lengths=layout.pipeline > 1,
        moe_token_dispatcher_type="alltoall",  # noqa: S106
        # The learner divides by global denominators itself.
        calculate_per_token_loss=True,
    )
