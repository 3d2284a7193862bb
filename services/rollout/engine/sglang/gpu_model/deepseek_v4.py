"""SGLang's own DeepSeek-V4, whose copies of the attention sinks follow every load.

It takes the place of the class of the same name: SGLang chooses settings by that name. Loads from
disk, of tensors and through a group all end in `load_weights`; an empty session of an update ends
in `post_load_weights`.
"""

from typing import Any

from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM as _Original

from services.rollout.engine.sglang import sinks
from services.rollout.engine.sglang.spec import SINKS_DEPARTURE


class DeepseekV4ForCausalLM(_Original):
    def load_weights(self, *args: Any, **kwargs: Any) -> Any:
        loaded = super().load_weights(*args, **kwargs)
        sinks.refresh(self)
        return loaded

    def post_load_weights(self, *args: Any, **kwargs: Any) -> None:
        super().post_load_weights(*args, **kwargs)
        sinks.refresh(self)

    def get_weights_by_name(self, name: str, *args: Any, **kwargs: Any) -> list[float]:
        """The departure of this rank's copies; so a server says over HTTP which class it loaded."""
        if name != SINKS_DEPARTURE:
            raise ValueError(f"{name}: only {SINKS_DEPARTURE} is told")
        return [sinks.departure(self)]


EntryClass = DeepseekV4ForCausalLM
