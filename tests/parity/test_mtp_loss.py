"""The loss of MTP blocks: its value, its gradient, and that it reaches nothing but them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from services.trainer.engine.actor import Actor
from services.trainer.models.deepseek_v4.config import transformer_config
from services.trainer.models.deepseek_v4.head import TokenScores
from services.trainer.models.deepseek_v4.model import DeepSeekV4
from services.trainer.models.deepseek_v4.weights import load_weights
from shared.job import Job
from shared.messages import TrainingBatch
from shared.models.deepseek_v4.checkpoint import write_release
from shared.models.deepseek_v4.layout import check_layout
from shared.models.deepseek_v4.reference import Reference
from tests.parity.engines import GRADIENT_BOUND
from tests.parity.test_actor_step import batch, held, job
from tests.parity.test_gradients import actor_gradients
from tests.tiny_deepseek_v4 import DEMO, random_tokens, random_weights

# What torch says of the way Megatron calls it.
pytestmark = [
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:.*torch.distributed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The argument order of load:UserWarning"),
]

ONE = replace(DEMO, num_nextn_predict_layers=1, compress_ratios=(0, 4, 8, 4, 0), swiglu_limit=10.0)
TWO = replace(ONE, num_nextn_predict_layers=2, compress_ratios=(0, 4, 8, 4, 0, 0))
FIRST = (1, 9)  # tokens before a row's labels: one has hardly a prompt
LENGTH = 24
UNTRAINED = (".gate.weight", ".gate.bias")


def twin(arch, leaves: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Sum over blocks and labels of the log-probability of each label that a block can guess."""
    reference = Reference(leaves, arch)
    with torch.no_grad():
        streams = reference.forward(tokens).streams
    total = torch.zeros(())
    for depth in range(arch.num_nextn_predict_layers):
        following = torch.cat((tokens[:, 1 + depth :], tokens[:, : 1 + depth]), 1)
        output = reference.mtp(streams, following, depth=depth)
        streams, logprobs = output.streams, output.logits.log_softmax(-1)
        for row, first in enumerate(FIRST):
            for label in range(max(first, depth + 2), LENGTH):
                total = total + logprobs[row, label - 2 - depth, tokens[row, label]]
    return total


def actor_model(arch, weights: Mapping[str, Tensor], *, train_mtp: bool) -> DeepSeekV4:
    model = DeepSeekV4(transformer_config(arch), arch, train_mtp=train_mtp)
    load_weights(model, weights)
    return model


def scores(model: DeepSeekV4, tokens: Tensor) -> TokenScores:
    positions = [row * LENGTH + at - 1 for row, f in enumerate(FIRST) for at in range(f, LENGTH)]
    labels = torch.cat([tokens[row, first:] for row, first in enumerate(FIRST)])
    found = model(tokens, positions_N=torch.tensor(positions), labels_N=labels, temperature=0.7)
    assert isinstance(found, TokenScores)
    return found


@pytest.mark.parametrize("arch", [ONE, TWO], ids=["one block", "two blocks"])
def test_loss_and_gradients_equal_the_reference(arch) -> None:
    weights = random_weights(arch, seed=3)
    tokens = random_tokens(arch, rows=2, length=LENGTH)
    trained = [name for name in weights if name.startswith("mtp.") and "tid2eid" not in name]
    leaves = {n: w.clone().requires_grad_(n in trained) for n, w in weights.items()}
    theirs = twin(arch, leaves, tokens)
    theirs.backward()
    model = actor_model(arch, weights, train_mtp=True)
    found = scores(model, tokens).mtp_logprobs
    assert found is not None
    assert found.sum().item() == pytest.approx(theirs.item(), rel=1e-5)
    found.sum().backward()
    gradients, reached = actor_gradients(model), 0
    for name, leaf in leaves.items():
        if name not in trained or name.endswith(UNTRAINED):
            assert not gradients[name].any(), name
        elif leaf.grad is not None and leaf.grad.any():
            error = (gradients[name] - leaf.grad).norm() / leaf.grad.norm()
            assert error <= GRADIENT_BOUND, f"{name}: {error:.1e}"
            reached += 1
    assert reached > 20 * arch.num_nextn_predict_layers


def test_the_policys_gradient_is_the_same_to_the_bit() -> None:
    weights, tokens = random_weights(ONE, seed=3), random_tokens(ONE, rows=2, length=LENGTH)
    gradients = []
    for train_mtp in (False, True):
        model = actor_model(ONE, weights, train_mtp=train_mtp)
        found = scores(model, tokens)
        assert (found.mtp_logprobs is not None) == train_mtp
        loss = found.logprobs.sum()
        if found.mtp_logprobs is not None:
            loss = loss - 0.3 * found.mtp_logprobs.sum()
        loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    plain, with_mtp = gradients
    assert len(plain) > 20
    assert {name for name in with_mtp if not name.startswith("mtp.")} == plain.keys()
    for name, gradient in plain.items():
        assert torch.equal(gradient, with_mtp[name]), name


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy") / "release"
    write_release(path, ONE.with_format("fp32"), random_weights(ONE, seed=3, spread=0.5))
    return path


def new_actor(release: Path, weight: float, *, budget: int = 256) -> Actor:
    optimizer = {"learning_rate": 1e-3, "weight_decay": 0.1, "clip_grad": 1e9}
    actor = {"mtp_loss_weight": weight, "optimizer": optimizer}
    return Actor(job(release, budget=budget, actor=actor))


def test_a_step_trains_the_block_and_leaves_the_policys_step_alone(release: Path) -> None:
    plain, trained = new_actor(release, 0.0), new_actor(release, 0.1)
    before = held(trained)
    without, metrics = plain.train_step(batch()), trained.train_step(batch())
    assert "mtp_loss" not in without
    assert metrics["mtp_loss"] == pytest.approx(mean_guess(before, batch()), rel=1e-4)
    other, after = held(plain), held(trained)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    for name in after:
        if not name.startswith("mtp."):
            assert torch.equal(after[name], other[name]), name
        else:
            assert torch.equal(other[name], before[name]), name  # no weight decay either
            assert name.endswith(UNTRAINED) != (name in moved) or "experts" in name, name
    again = [trained.train_step(batch(step))["mtp_loss"] for step in (2, 3)]
    assert np.isfinite(again).all()
    assert trained.train_step(batch())["mtp_loss"] < metrics["mtp_loss"]


def mean_guess(weights: Mapping[str, Tensor], one: TrainingBatch) -> float:
    """Mean negative log-probability of the response tokens, sample by sample."""
    reference, values = Reference(weights, ONE), []
    for sample in one.samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        streams = reference.forward(ids).streams
        logits = reference.mtp(streams, ids.roll(-1, 1)).logits[0].log_softmax(-1)
        first = max(2, sample.num_prompt_tokens)
        values += [float(logits[at - 2, ids[0, at]]) for at in range(first, ids.shape[1])]
    return -float(np.mean(values))


def test_micro_batches_add_up(release: Path) -> None:
    losses = [new_actor(release, 0.1, budget=size).train_step(batch()) for size in (64, 512)]
    assert losses[0]["micro_batches"] > losses[1]["micro_batches"]
    assert losses[0]["mtp_loss"] == pytest.approx(losses[1]["mtp_loss"], rel=1e-5)
    assert losses[0]["grad_norm"] == pytest.approx(losses[1]["grad_norm"], rel=1e-4)


def test_a_model_without_a_block_is_refused(tmp_path: Path) -> None:
    write_release(tmp_path / "release", DEMO.with_format("fp32"), random_weights(DEMO, seed=3))
    with pytest.raises(ValueError, match=r"mtp_loss_weight 0.1: the model has no MTP block"):
        new_actor(tmp_path / "release", 0.1)


def test_a_layout_that_cuts_the_rows_is_refused(release: Path) -> None:
    document = job(release).model_dump()
    document["cluster"]["gpus_per_node"] = 2
    document["actor"] |= {"mtp_loss_weight": 0.1, "parallel": {"context": 2}}
    with pytest.raises(ValueError, match=r"needs actor.parallel.context 1, not 2"):
        check_layout(Job.model_validate(document), ONE)
