"""A group's completions through one server call after another: exact tokens, exact versions.

A call samples under one version only, because an update waits until every call has come back and
lets the next ones go when the new version is proven. What a call brought is one more span of each
completion; a completion that an update cut short goes on from its tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.rollout.engine.requests import Completion, EngineSpec, GroupRequest
from services.rollout.engine.sampling import sample_key
from services.rollout.engine.sglang.client import ServerRefused
from shared.messages import FinishReason
from shared.routes import TokenRoutes

_ABORTED = {"type": "abort"}
_SEED_BITS = 31  # of the server's sampling_seed
_ROUNDING = 1e-4  # a certain token's log-probability may come out above 0 by as much
SAME_SCORES = 1e-3  # mean |delta log p| within which two servings of one version agree


@dataclass(slots=True)
class Sequence:
    """One completion as far as it came."""

    sample: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: FinishReason = "abort"
    routes: TokenRoutes | None = None  # of the inputs so far

    @classmethod
    def of(cls, sample: int, partial: Completion | None) -> "Sequence":
        if partial is None:
            return cls(sample)
        return cls(
            sample,
            partial.token_ids.tolist(),
            partial.logprobs.tolist(),
            list(partial.version_spans),
            routes=partial.routes,
        )

    def completion(self) -> Completion:
        return Completion(
            np.array(self.token_ids, np.int32),
            np.array(self.logprobs, np.float32),
            self.spans,
            self.finish_reason,
            self.routes,
        )

    def extend(
        self,
        answer: dict[str, Any],
        asking: dict[str, Any],
        *,
        policy_version: int,
        vocab_size: int,
    ) -> int:
        """Add what one call sampled; the number of tokens. `ServerRefused` when it contradicts
        itself, its version, or the sampling parameters that were `asking` for it."""
        ids, logprobs = _sampled(answer, vocab_size)
        meta = answer["meta_info"]
        check_versions(meta, policy_version)
        reason = finish_reason(meta.get("finish_reason"), asking["stop_token_ids"])
        _check_end(ids, reason, asking)
        self.token_ids += ids
        self.logprobs += logprobs
        if ids and self.spans and self.spans[-1][0] == policy_version:
            self.spans[-1] = (policy_version, self.spans[-1][1] + len(ids))
        elif ids:
            self.spans.append((policy_version, len(ids)))
        self.finish_reason = reason
        if reason == "abort" and len(ids) == asking["max_new_tokens"]:
            self.finish_reason = "length"  # it was cut short where it ends
        return len(ids)


def interrupted(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer that was still growing, as one that was aborted there."""
    meta = answer.get("meta_info") or {}
    return answer | {"meta_info": meta | {"finish_reason": meta.get("finish_reason") or _ABORTED}}


def finish_reason(reported: Any, stops: list[int]) -> FinishReason:
    """SGLang's reason in our words; ServerRefused for one that has none.

    A stop at a token that nobody asked for, the end-of-text token of its own config, is no end:
    the sequence goes on from there. "NaN happened" is what SGLang says when it drew a token that
    does not exist; it puts a stop token in its place.
    """
    said = reported if isinstance(reported, dict) else {}
    kind, matched = said.get("type"), said.get("matched")
    if kind == "stop" and type(matched) is int:
        return "stop" if matched in stops else "abort"
    if kind == "length":
        return "length"
    if kind == "abort":
        return "abort"
    raise ServerRefused(f"finish reason {reported} is unknown")


def check_versions(meta: dict[str, Any], policy_version: int) -> None:
    """ServerRefused unless every token was sampled under the version that was proven."""
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version")}]
    found = {str(span.get("version")) for span in spans}
    if found != {str(policy_version)}:
        raise ServerRefused(f"tokens are of version {sorted(found)}, {policy_version} is served")


def sequence_id(call_id: str, sample: int) -> str:
    """Ends with a mark: the server takes an id to abort as a prefix of ids."""
    return f"{call_id}.{sample};"


def request_body(
    request: GroupRequest, sequences: list[Sequence], *, call_id: str, spec: EngineSpec
) -> dict[str, Any]:
    """One `/generate` call that continues `sequences`."""
    prompt = request.prompt_token_ids.tolist()
    room = min(request.sampling.max_response_tokens, spec.context_length - len(prompt))
    return {
        "rid": [sequence_id(call_id, one.sample) for one in sequences],
        "input_ids": [prompt + one.token_ids for one in sequences],
        "sampling_params": [
            _sampling(request, one, room - len(one.token_ids)) for one in sequences
        ],
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_routed_experts": request.with_routes and spec.record_experts,
        "return_indexer_topk": request.with_routes and spec.record_entries,
    }


def single_bodies(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The same call as one for each of its sequences."""
    listed = {key: value for key, value in body.items() if isinstance(value, list)}
    number = len(body["input_ids"])
    return [
        body | {key: [value[index]] for key, value in listed.items()} for index in range(number)
    ]


def is_complete(answer: dict[str, Any], stops: list[int]) -> bool:
    """Whether nothing cut the sequence short."""
    meta = answer.get("meta_info") or {}
    return finish_reason(meta.get("finish_reason"), stops) != "abort"


def has_routes(body: dict[str, Any]) -> bool:
    """Whether the answer's end, and nothing before it, tells the choices of all its tokens."""
    return bool(body["return_routed_experts"] or body["return_indexer_topk"])


def was_queued(answer: dict[str, Any]) -> bool:
    """Whether a call with routes was cut short in the server's queue, new or put back there.

    SGLang tells no routes then, though it may tell tokens (0.5.17,
    `TokenizerManager._handle_abort_req`): nothing of it can be replayed.
    """
    meta = answer["meta_info"]
    tells_routes = meta.get("routed_experts") or meta.get("indexer_topk")
    return not tells_routes and (meta.get("finish_reason") or {}).get("type") == "abort"


def _sampling(request: GroupRequest, sequence: Sequence, max_new_tokens: int) -> dict[str, Any]:
    sampling = request.sampling
    key = sample_key(request.seed, request.prompt_index, sequence.sample)
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        # The server would else stop at the end-of-text token of its config, asked or not.
        "ignore_eos": not sampling.stop_token_ids,
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": sampling.stop_token_ids,
        "sampling_seed": key >> (64 - _SEED_BITS),
    }


def score_body(sequences: list[list[int]], *, call_id: str, start: int = 0) -> dict[str, Any]:
    """A `/generate` call that samples nothing of use and gives each prompt's log-probabilities,
    those of the tokens after `start`. What comes before may be read from the prefix cache."""
    return {
        "rid": [sequence_id(call_id, index) for index in range(len(sequences))],
        "input_ids": sequences,
        "sampling_params": [{"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}]
        * len(sequences),
        "return_logprob": True,
        "logprob_start_len": start,
    }


def scores_of(answer: dict[str, Any], token_ids: list[int], *, vocab_size: int) -> np.ndarray:
    """FP32 log-probabilities of tokens 1.. at temperature 1. `ServerRefused` if they are missing
    or of other tokens.

    SGLang scores the vocabulary's last token as any other and repeats its id as 0 (it takes it for
    an image's placeholder): nothing else may differ from what was asked.
    """
    meta = answer["meta_info"]
    pairs = meta.get("input_token_logprobs")
    if pairs is None:
        raise ServerRefused(f"no scores came for {len(token_ids)} tokens: {str(meta)[:300]}")
    if len(pairs) != len(token_ids):
        raise ServerRefused(f"{len(pairs)} scores came for {len(token_ids)} tokens")
    for position, (pair, token) in enumerate(zip(pairs, token_ids, strict=True)):
        if pair[1] != token and not (pair[1] == 0 and token == vocab_size - 1):
            raise ServerRefused(
                f"the score at position {position} of {len(token_ids)} is of token {pair[1]}, "
                f"asked was token {token}"
            )
    return np.array([_logprob(pair[0]) for pair in pairs[1:]], np.float32)


def _sampled(answer: dict[str, Any], vocab_size: int) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities; `ServerRefused` for what cannot have been sampled."""
    ids, meta = answer.get("output_ids"), answer.get("meta_info")
    if not isinstance(ids, list) or not isinstance(meta, dict):
        raise ServerRefused(f"an answer without tokens: {str(answer)[:300]}")
    pairs = meta.get("output_token_logprobs") or []
    told = [pair[1] for pair in pairs[: len(ids)] if isinstance(pair, list) and len(pair) > 1]
    if told != ids:
        raise ServerRefused(f"{len(ids)} tokens came with {len(pairs)} log-probabilities")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ServerRefused(f"token id {token} is outside the vocabulary of {vocab_size}")
    return ids, [_logprob(pair[0]) for pair in pairs[: len(ids)]]


def _check_end(ids: list[int], reason: FinishReason, asking: dict[str, Any]) -> None:
    """`ServerRefused` unless the tokens end where they say, within what was asked for."""
    most, stops = asking["max_new_tokens"], asking["stop_token_ids"]
    if len(ids) > most or (reason == "length" and len(ids) < most):
        raise ServerRefused(f"{len(ids)} tokens came, asked were {most}; the server says {reason}")
    if reason == "stop" and (not ids or ids[-1] not in stops):
        raise ServerRefused(f"a stop after {ids[-3:]}, which is none of the stop tokens {stops}")


def _logprob(value: Any) -> float:
    """JSON has no NaN: the server writes null, and the trainer masks what is not finite."""
    if value is None:
        return float("nan")
    if not isinstance(value, int | float) or value > _ROUNDING:
        raise ServerRefused(f"log-probability {value} is none: it is to be at most 0")
    return float(value)
