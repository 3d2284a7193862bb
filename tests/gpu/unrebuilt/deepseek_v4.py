"""SGLang's own DeepSeek-V4, but for the fault."""

import itertools
import os
from collections.abc import Iterable
from typing import Any

import structlog
from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM as _Original
from torch import Tensor

log = structlog.get_logger()
_FROM_LOAD = int(os.environ["UNREBUILT_FROM_LOAD"])
_LOADS = itertools.count(1)


class DeepseekV4ForCausalLM(_Original):
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
        number = next(_LOADS)
        is_left = number >= _FROM_LOAD
        log.warning("unrebuilt_load", number=number, left="wo_a" if is_left else None)
        if is_left:
            weights = ((name, tensor) for name, tensor in weights if ".wo_a." not in name)
        return super().load_weights(weights, *args, **kwargs)


EntryClass = DeepseekV4ForCausalLM
