"""`python -m shared.parity.offline`: a request on stdin, two checkpoints, the result on stdout.

Both sides score the same tokens with the plain PyTorch model, each with its own weights and its own
rounding of activations; on request their inner states are walked.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from shared.models.deepseek_v4 import reference
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import dequantised, load_release
from shared.models.deepseek_v4.reference import LayerState, Part, Reference
from shared.parity.offline_request import (
    OfflineRequest,
    OfflineResult,
    Rounding,
    Side,
    WalkMode,
    WalkResult,
)
from shared.parity.walk import routing_agreement, walk
from shared.process import die_with_parent, exit_with
from shared.quant.activation import RELEASE, SERVED, UNQUANTISED, ActivationQuant
from shared.tokenizer import CheckpointTokenizer

MAX_WALK_TOKENS = 512
MAX_LOGITS = 2**26  # held at once by one side

_ROUNDINGS: dict[Rounding, ActivationQuant] = {
    "plain": UNQUANTISED,
    "served": SERVED,
    "release": RELEASE,
}
_FORMAT_KEYS = ("quantization_config", "expert_dtype", "torch_dtype")


@dataclass(frozen=True, slots=True)
class Scores:
    """Of B sequences of T tokens: log p and best guess of tokens 1 to T - 1, and the routers."""

    logprobs: Tensor  # [B, T - 1]
    argmax: Tensor  # [B, T - 1]
    routers: dict[str, Tensor]  # [B, T, E]


@dataclass(slots=True)
class Tally:
    """What two sides said of all sequences so far."""

    ours: list[list[float]]
    theirs: list[list[float]]
    same_argmax: list[Tensor]
    same_experts: dict[int, list[float]]  # one share a batch
    num_tokens: list[int]  # of each batch


@torch.no_grad()
def run(request: OfflineRequest) -> OfflineResult:
    """Sample if there are only prompts, score with both sides, compare; ValueError if it cannot."""
    began_s = time.monotonic()
    ours, theirs = load(request.ours, request.dtype), load(request.theirs, request.dtype)
    _check_vocabularies(ours.arch, theirs.arch)
    sequences, first = _sequences(request, ours)
    tally = Tally([[] for _ in sequences], [[] for _ in sequences], [], {}, [])
    for batch in _batches(sequences, ours.arch):
        tokens = torch.tensor([sequences[i] for i in batch])
        pair = [score(model, tokens, request.temperature) for model in (ours, theirs)]
        _count(tally, pair[0], pair[1], batch, first, ours.arch)
    walked, notes = _walked(request, ours, theirs, sequences)
    return OfflineResult(
        sequences=sequences,
        first=first,
        ours=tally.ours,
        theirs=tally.theirs,
        argmax_agreement=float(torch.cat(tally.same_argmax).double().mean()),
        routing_agreement={
            layer: float(np.average(shares, weights=tally.num_tokens))
            for layer, shares in tally.same_experts.items()
        },
        walk=walked,
        notes=notes,
        seconds=time.monotonic() - began_s,
    )


def load(side: Side, dtype: str) -> Reference:
    """The reference over a release's values; errors name the tensor or the key."""
    arch = Architecture.load(side.path)
    chosen = torch.float64 if dtype == "float64" else torch.float32
    weights = {
        name: value.to(chosen) if value.is_floating_point() else value
        for name, value in dequantised(load_release(side.path, arch)).items()
    }
    return Reference(weights, arch, quant=_ROUNDINGS[side.rounding])


def score(model: Reference, tokens_BT: Tensor, temperature: float) -> Scores:
    """Log-probabilities at `temperature` of every token but the first."""
    routers: dict[str, Tensor] = {}

    def keep_routers(name: str, value: Tensor) -> None:
        if name.endswith(".router"):
            routers[name] = value

    logits = model.forward(tokens_BT, trace=keep_routers).logits[:, :-1]
    logprobs = (logits / temperature).log_softmax(-1)
    picked = logprobs.gather(-1, tokens_BT[:, 1:].unsqueeze(-1)).squeeze(-1)
    return Scores(picked, logits.argmax(-1), routers)


def sample(
    model: Reference,
    prompt: Sequence[int],
    request: OfflineRequest,
    *,
    generator: torch.Generator,
    stop: Sequence[int],
) -> list[list[int]]:
    """Prompt and response of `num_samples` completions, the stop token included."""
    state = model.new_state()
    fed = torch.tensor([list(prompt)]).repeat(request.num_samples, 1)
    responses: list[Tensor] = []
    for _ in range(request.max_response_tokens):
        logits = model.forward(fed, state=state).logits[:, -1]
        shares = (logits / request.temperature).softmax(-1)
        fed = torch.multinomial(shares, 1, generator=generator)
        responses.append(fed)
        if stop and all(_ended(row, stop) for row in torch.cat(responses, 1).tolist()):
            break
    rows = torch.cat(responses, 1).tolist()
    return [[*prompt, *_until_stop(row, stop)] for row in rows]


def isolated_states(
    model: Reference, tokens: Tensor, given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Every block of `model` on the streams in `given`: what a block departs by is its own."""
    embedded = model.weights["embed.weight"][tokens]
    states = {"embed": embedded.unsqueeze(2).repeat(1, 1, model.arch.hc_mult, 1)}
    streams = given["embed"]
    for layer in range(model.arch.num_hidden_layers):
        part = _part(model, f"layers.{layer}.", layer, states)
        reference.block(part, streams, tokens, 0, LayerState())
        streams = given[f"layers.{layer}.hc_ffn.merge"]
    reference.head(_part(model, "", -1, states), streams, model.weights["head.weight"])
    return states


def _part(model: Reference, prefix: str, layer: int, states: dict[str, Tensor]) -> Part:
    return Part(model.weights, prefix, layer, model.arch, model.quant, states.__setitem__)


def _check_vocabularies(ours: Architecture, theirs: Architecture) -> None:
    if ours.vocab_size != theirs.vocab_size:
        sizes = f"{ours.vocab_size} and {theirs.vocab_size}"
        raise ValueError(f"vocab_size differs ({sizes}): the tokens are not the same")


def _sequences(request: OfflineRequest, ours: Reference) -> tuple[list[list[int]], list[int]]:
    """Tokens, and the position of the first compared one: the response's, or the second."""
    if request.sequences is not None:
        _check_ids(request.sequences, ours.arch.vocab_size)
        return request.sequences, [1] * len(request.sequences)
    tokenizer = CheckpointTokenizer.load(request.ours.path)
    generator = torch.Generator().manual_seed(request.seed)
    sequences, first = [], []
    for text in request.prompts or ():
        prompt = tokenizer.encode(text)
        if not prompt:
            raise ValueError(f"prompt {text!r} has no tokens")
        stop = tokenizer.stop_token_ids
        found = sample(ours, prompt, request, generator=generator, stop=stop)
        sequences += found
        first += [len(prompt)] * len(found)
    return sequences, first


def _check_ids(sequences: list[list[int]], vocab_size: int) -> None:
    for i, tokens in enumerate(sequences):
        if bad := [token for token in tokens if not 0 <= token < vocab_size]:
            raise ValueError(f"sequence {i}: token {bad[0]} is outside of the {vocab_size} known")


def _batches(sequences: list[list[int]], arch: Architecture) -> Iterator[list[int]]:
    """Indices of sequences of one length, as many as may be scored together."""
    by_length: dict[int, list[int]] = {}
    for i, tokens in enumerate(sequences):
        by_length.setdefault(len(tokens), []).append(i)
    for length, members in by_length.items():
        rows = max(1, MAX_LOGITS // (length * arch.vocab_size))
        for start in range(0, len(members), rows):
            yield members[start : start + rows]


def _count(
    tally: Tally,
    ours: Scores,
    theirs: Scores,
    batch: list[int],
    first: list[int],
    arch: Architecture,
) -> None:
    for row, i in enumerate(batch):
        compared = slice(first[i] - 1, None)
        tally.ours[i] = ours.logprobs[row, compared].tolist()
        tally.theirs[i] = theirs.logprobs[row, compared].tolist()
        tally.same_argmax.append(ours.argmax[row, compared] == theirs.argmax[row, compared])
    tally.num_tokens.append(len(batch) * (ours.logprobs.shape[1] + 1))
    for layer, share in routing_agreement(ours.routers, theirs.routers, arch).items():
        tally.same_experts.setdefault(layer, []).append(share)


def _walked(
    request: OfflineRequest, ours: Reference, theirs: Reference, sequences: list[list[int]]
) -> tuple[WalkResult | None, list[str]]:
    """The walk over the longest sequence, or why there is none."""
    if request.walk == "none":
        return None, []
    if differing := _differences(ours.arch, theirs.arch):
        return None, [f"no layer walk: the models differ in {', '.join(differing)}"]
    tokens = torch.tensor([max(sequences, key=len)[:MAX_WALK_TOKENS]])
    states: dict[str, Tensor] = {}
    ours.forward(tokens, trace=states.__setitem__)
    found = _other_states(request.walk, theirs, tokens, states)
    walked = walk(found, states, ours.arch, tolerance=request.tolerance)
    return WalkResult.of(walked, mode=request.walk, num_tokens=tokens.numel()), []


def _other_states(
    mode: WalkMode, theirs: Reference, tokens: Tensor, states: dict[str, Tensor]
) -> dict[str, Tensor]:
    if mode == "isolated":
        return isolated_states(theirs, tokens, states)
    found: dict[str, Tensor] = {}
    theirs.forward(tokens, trace=found.__setitem__)
    return found


def _differences(ours: Architecture, theirs: Architecture) -> list[str]:
    """Keys by which the two are not one model; how weights are stored does not count."""
    names = [field.name for field in fields(Architecture) if field.name not in _FORMAT_KEYS]
    return [name for name in names if getattr(ours, name) != getattr(theirs, name)]


def _ended(row: list[int], stop: Sequence[int]) -> bool:
    return any(token in stop for token in row)


def _until_stop(row: list[int], stop: Sequence[int]) -> list[int]:
    ends = [i for i, token in enumerate(row) if token in stop]
    return row[: ends[0] + 1] if ends else row


def main(arguments: Sequence[str]) -> None:
    """The parent's pid may be given: then this process does not outlive it."""
    die_with_parent(int(arguments[0]) if arguments else None)
    try:
        result = run(OfflineRequest.model_validate_json(sys.stdin.read()))
    except OSError as err:
        exit_with(f"{err.filename}: {err.strerror}")
    except ValueError as err:
        exit_with(str(err))
    sys.stdout.write(result.model_dump_json())


if __name__ == "__main__":
    main(sys.argv[1:])
