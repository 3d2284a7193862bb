"""What a request must be before the engine takes it; a ValueError names the value and its bound."""

import numpy as np

from services.rollout.engine.requests import EngineSpec, GroupRequest
from shared.messages import SamplingParams
from shared.models.deepseek_v4.architecture import Architecture
from shared.weights.protocol import Probe


def check_request(request: GroupRequest, arch: Architecture, max_tokens: int) -> None:
    check_tokens(request.prompt_token_ids, arch, max_tokens - 1, "prompt", least=1)
    if not request.samples:
        raise ValueError("num_samples 0 is below 1")


def check_no_penalties(sampling: SamplingParams) -> None:
    """A penalised distribution is no policy that a trainer could score."""
    if sampling.has_penalties:
        raise ValueError(
            f"frequency_penalty {sampling.frequency_penalty:g}, presence_penalty "
            f"{sampling.presence_penalty:g}, repetition_penalty {sampling.repetition_penalty:g}: "
            "the embedded engine has no penalties, an SGLang server has"
        )


def check_routes(request: GroupRequest) -> None:
    """An interrupted completion brings the routes of all that it has computed."""
    for index, partial in request.partial.items():
        if not len(partial.token_ids):
            continue
        expected = len(request.prompt_token_ids) + len(partial.token_ids) - 1
        found = 0 if partial.routes is None else partial.routes.num_tokens
        if found != expected:
            raise ValueError(f"sample {index} brings routes of {found} tokens, not {expected}")


def check_probe(probe: Probe | None, spec: EngineSpec) -> None:
    """Its sequences fit into the context."""
    for number, one in enumerate(probe.sequences if probe else ()):
        token_ids, what = np.array(one.token_ids, np.int64), f"probe sequence {number}"
        check_tokens(token_ids, spec.arch, spec.context_length, what)


def check_tokens(
    token_ids: np.ndarray, arch: Architecture, max_tokens: int, what: str, *, least: int = 2
) -> None:
    """There are `least` to `max_tokens` ids, all of the vocabulary."""
    if not least <= len(token_ids) <= max_tokens:
        raise ValueError(f"{what} has {len(token_ids)} tokens, allowed are {least} to {max_tokens}")
    for bad in (int(token_ids.min()), int(token_ids.max())):
        if not 0 <= bad < arch.vocab_size:
            raise ValueError(
                f"{what}: token id {bad} is outside the vocabulary of {arch.vocab_size}"
            )
