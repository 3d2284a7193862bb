"""Our class over SGLang's DeepSeek-V4, in the installed SGLang: found, and fit for its layers."""

import os
import subprocess

from services.rollout.engine.sglang.launch import GPU_PACKAGE
from services.rollout.engine.sglang.spec import python_path

FOUND = """
import torch
from torch import nn
from sglang.srt.models.deepseek_v4 import MQALayer
from sglang.srt.models.registry import ModelRegistry
from services.rollout.engine.sglang import sinks

found, name = ModelRegistry.resolve_model_cls(["DeepseekV4ForCausalLM"])
print("class", name, found.__module__)
layer = MQALayer.__new__(MQALayer)  # its kernels want a GPU, its sinks do not
nn.Module.__init__(layer)
layer.attn_sink, layer._attn_sink_local = nn.Parameter(torch.arange(64.0)), None
layer.attn_tp_size, layer.attn_tp_rank, layer.n_local_heads, layer.n_heads = 2, 1, 32, 64
with torch.inference_mode():
    captured = layer._local_attn_sink()
model = nn.ModuleList([layer])
layer.attn_sink.data += 0.5
stale = sinks.departure(model)
sinks.refresh(model)
is_same = captured.data_ptr() == layer._local_attn_sink().data_ptr()
is_new = torch.equal(captured[:32], layer.attn_sink[32:])
print("sinks", stale, sinks.departure(model), is_same, is_new)
"""


def test_the_registry_takes_our_class_and_the_layers_copies_are_refreshed(
    sglang_python: str,
) -> None:
    variables = {
        "PYTHONPATH": python_path(),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": GPU_PACKAGE,
    }
    found = subprocess.run(
        [sglang_python, "-c", FOUND],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    told = dict(line.split(" ", 1) for line in found.stdout.splitlines() if " " in line)
    assert told["class"] == f"DeepseekV4ForCausalLM {GPU_PACKAGE}.deepseek_v4"
    assert told["sinks"] == "0.5 0.0 True True"
