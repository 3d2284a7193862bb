"""Runs micro-batches through Megatron's schedule and puts per-token results back in batch order.

One place for scoring and training, so that both see the same rows in the same order. Each rank runs
its own micro-batches; what they found is summed over ranks, so that all of them know all tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import (
    get_context_parallel_group,
    get_context_parallel_rank,
    get_tensor_model_parallel_rank,
    is_pipeline_last_stage,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.utils import get_model_config
from torch import Tensor

from services.trainer.engine.replay import replayed
from services.trainer.loss.objective import TokenBatch, policy_loss
from services.trainer.megatron import cpu
from services.trainer.megatron.stages import stage_transfers
from services.trainer.models.deepseek_v4.head import TokenScores
from services.trainer.packing import MicroBatch
from shared.job_algorithm import AlgorithmSection
from shared.models.deepseek_v4.architecture import Architecture
from shared.quant.activation import UNQUANTISED, ActivationQuant
from shared.spans import span


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What a pass saw of every response token of the batch, FP32 `[R]`; the two that are claims,
    bool `[R]`."""

    logprobs: Tensor
    entropy: Tensor
    clipped: Tensor
    weights: Tensor
    corrected: Tensor
    mtp_logprobs: Tensor  # zero where no MTP block is trained

    @classmethod
    def empty(cls, num_tokens: int) -> "TokenRecord":
        def zeros(dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(num_tokens, dtype=dtype)

        return cls(zeros(), zeros(), zeros(torch.bool), zeros(), zeros(torch.bool), zeros())

    def put(self, places: Tensor, values: "TokenRecord") -> None:
        for name in self.__slots__:
            getattr(self, name)[places] = getattr(values, name).cpu()


def score(
    model: Any,
    micro_batches: Sequence[MicroBatch],
    architecture: Architecture,
    *,
    num_tokens: int,
    temperature: float,
    quant: ActivationQuant = UNQUANTISED,
) -> TokenRecord:
    """Log-probabilities and entropies of all scored tokens, without gradients."""

    def nothing_to_learn(micro: MicroBatch, scores: TokenScores) -> tuple[Tensor, TokenRecord]:
        ones = torch.ones_like(scores.logprobs)
        none = ones > 1
        record = TokenRecord(scores.logprobs, scores.entropy, none, ones, none, 0 * ones)
        return torch.zeros(()), record

    with torch.no_grad():
        inputs = _Pass(model, micro_batches, architecture, num_tokens, temperature, quant)
        _, record = _run(inputs, nothing_to_learn, forward_only=True)
    return record


def forward_backward(
    model: Any,
    micro_batches: Sequence[MicroBatch],
    architecture: Architecture,
    tokens: TokenBatch,
    *,
    temperature: float,
    algorithm: AlgorithmSection,
    quant: ActivationQuant = UNQUANTISED,
    mtp_coefficient: float = 0.0,
) -> tuple[float, TokenRecord]:
    """Accumulate the gradient of the policy loss of all micro-batches; -> the loss, the record.

    MTP blocks that are trained add `mtp_coefficient` times the negative log-probability of each
    label; the policy's gradient is the same without them.
    """

    def learn(micro: MicroBatch, scores: TokenScores) -> tuple[Tensor, TokenRecord]:
        mtp = scores.mtp_logprobs
        guessed = torch.zeros_like(scores.logprobs) if mtp is None else mtp
        if not len(micro.places):  # other ranks still work, and the gradient of nothing is awaited
            nothing = scores.logprobs.sum() + scores.entropy.sum() + guessed.sum()
            return 0 * nothing, TokenRecord.empty(0)
        here = tokens.at(torch.from_numpy(micro.places), scores.logprobs.device)
        result = policy_loss(scores.logprobs, scores.entropy, here, algorithm)
        record = TokenRecord(
            scores.logprobs.detach(),
            scores.entropy.detach(),
            result.clipped,
            result.weights,
            result.corrected,
            guessed.detach(),
        )
        return result.total - mtp_coefficient * guessed.sum(), record

    num_tokens = len(tokens.sampler)
    inputs = _Pass(model, micro_batches, architecture, num_tokens, temperature, quant)
    return _run(inputs, learn, forward_only=False)


@dataclass(frozen=True, slots=True)
class _Pass:
    """Of all micro-batches through one model."""

    model: Any
    micro_batches: Sequence[MicroBatch]
    architecture: Architecture
    num_tokens: int
    temperature: float
    quant: ActivationQuant


_Judge = Callable[[MicroBatch, TokenScores], tuple[Tensor, TokenRecord]]


def _run(inputs: _Pass, judge: _Judge, *, forward_only: bool) -> tuple[float, TokenRecord]:
    record = TokenRecord.empty(inputs.num_tokens)
    if not inputs.micro_batches:  # on no rank, then
        return 0.0, record

    def step(batches: Iterator[MicroBatch], stage: Any) -> tuple[Any, Any]:
        micro = next(batches)
        with span("forward", "micro_batches"):  # as the host sees it: a device may lag behind
            output = _forward(stage, micro, inputs)
        return output, partial(_loss, judge, micro, record)

    losses = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(inputs.micro_batches),
        model=[inputs.model],
        num_microbatches=len(inputs.micro_batches),
        seq_length=1,  # stages tell each other shapes instead
        micro_batch_size=1,
        forward_only=forward_only,
        **stage_transfers(get_model_config(inputs.model)),
    )
    return _everywhere(sum(losses), record)


def _everywhere(loss: float, record: TokenRecord) -> tuple[float, TokenRecord]:
    """The sums over ranks. Every token was scored in one place, and copies of it are left out."""
    if dist.get_world_size() == 1:
        return loss, record
    copies = get_tensor_model_parallel_rank() + get_context_parallel_rank()
    counts = is_pipeline_last_stage() and copies == 0
    device = cpu.device()
    values = [getattr(record, name).double() for name in record.__slots__]
    flat = torch.cat([torch.tensor([loss], dtype=torch.float64), *values]) * counts
    flat = flat.to(device)
    dist.all_reduce(flat)
    total, *parts = flat.cpu().split([1, *[len(value) for value in values]])
    found = dict(zip(record.__slots__, parts, strict=True))
    return total.item(), TokenRecord(
        **{name: part.to(getattr(record, name).dtype) for name, part in found.items()}
    )


def _forward(stage: Any, micro: MicroBatch, inputs: _Pass) -> Any:
    device = next(stage.parameters()).device
    return stage(
        tuple(torch.from_numpy(slab.token_ids).to(device) for slab in micro.slabs),
        positions_N=torch.from_numpy(micro.positions).to(device),
        labels_N=torch.from_numpy(micro.labels).to(device),
        temperature=inputs.temperature,
        quant=inputs.quant,
        routes=replayed(micro, inputs.architecture, device),
    )


def _loss(
    judge: _Judge, micro: MicroBatch, record: TokenRecord, scores: TokenScores
) -> tuple[Tensor, Tensor, float]:
    total, values = judge(micro, _whole(micro, scores))
    record.put(torch.from_numpy(micro.places), values)
    # Three values: the schedule then leaves the loss as it is (`calculate_per_token_loss`).
    return total, torch.zeros((), dtype=torch.int), total.item()


def _whole(micro: MicroBatch, scores: TokenScores) -> TokenScores:
    """Scores of all positions of rows that context-parallel ranks share: a loss may need whole
    samples. Each rank computes the same loss and sends back the gradient of its own scores."""
    if micro.scored is None:
        return scores
    places = torch.from_numpy(micro.scored).to(scores.logprobs.device)
    own = torch.stack((scores.logprobs, scores.entropy))
    total = own.new_zeros(2, len(micro.places)).index_copy(1, places, own)
    total = reduce_from_tensor_model_parallel_region(total, group=get_context_parallel_group())
    return TokenScores(total[0], total[1])
