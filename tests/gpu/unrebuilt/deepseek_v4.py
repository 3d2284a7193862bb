"""SGLang's own DeepSeek-V4, but for the fault."""

import itertools
import os
from collections.abc import Iterable
from typing import Any

import structlog
from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM as _Original
from torch import Tensor

from tests.gpu.unrebuilt_loads import kind_of, without

log = structlog.get_logger()
_KIND = kind_of(os.environ.get("UNREBUILT", "copy"))
_FROM_LOAD = int(os.environ["UNREBUILT_FROM_LOAD"])
_LOADS = itertools.count(1)


class DeepseekV4ForCausalLM(_Original):
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
        number = next(_LOADS)
        is_left = number >= _FROM_LOAD
        log.warning("unrebuilt_load", number=number, left=_KIND if is_left else None)
        given = without(weights, _KIND) if is_left else weights
        return super().load_weights(given, *args, **kwargs)


EntryClass = DeepseekV4ForCausalLM
