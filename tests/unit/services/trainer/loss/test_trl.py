"""Agreement with TRL's own GRPO loss on the same inputs: loss and gradient."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.loss.aggregation import token_coefficients
from services.trainer.loss.objective import TokenBatch, policy_loss
from shared.job_algorithm import AlgorithmSection

ROWS, LENGTH = 6, 9
NONE = {"correction": {"kind": "none"}}
GSPO = {
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "epsilon_low": 3e-4,
    "epsilon_high": 4e-4,
}
KL = {"loss_type": "grpo", "beta": 0.2}
UNBIASED = {"kl": {"coefficient": 0.2, "estimator": "unbiased"}}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": (NONE, {"loss_type": "grpo"}),
    "dapo": ({"name": "dapo", **NONE}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dr_grpo": ({"name": "dr_grpo", **NONE}, {"loss_type": "dr_grpo"}),
    "gspo": ({"name": "gspo", **NONE}, GSPO),
    "gspo_tis": ({"name": "gspo"}, {**GSPO, "tis_cap": 2.0, "of_sequences": True}),
    "gspo_k3": ({"name": "gspo", "kl": {"coefficient": 0.2}, **NONE}, {**GSPO, "beta": 0.2}),
    "cispo": (
        {"name": "cispo", "clip_high": 0.1, **NONE},
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "cispo_tis": (
        {"name": "cispo", "clip_high": 0.1},
        {"loss_type": "cispo", "epsilon_high": 1.1, "tis_cap": 2.0},
    ),
    "k3": ({"kl": {"coefficient": 0.2}, **NONE}, KL),
    "k3_tis": ({"kl": {"coefficient": 0.2}}, {**KL, "tis_cap": 2.0}),
    "unbiased": ({**UNBIASED, **NONE}, {**KL, "use_bias_correction_kl": True}),
    "tis": ({"name": "dapo", "clip_high": 0.2}, {"loss_type": "dapo", "tis_cap": 2.0}),
    "mis": (
        {"name": "dapo", "clip_high": 0.2, "correction": {"kind": "mis", "low": 0.5}},
        {"loss_type": "dapo", "mask_bounds": (0.5, 2.0)},
    ),
    "sequence_tis": (
        {"name": "dapo", "clip_high": 0.2, "correction": {"level": "sequence"}},
        {"loss_type": "dapo", "tis_cap": 2.0, "of_sequences": True},
    ),
    "entropy": (
        {"aggregation": "token_mean", "entropy_bonus": 0.3, **NONE},
        {"loss_type": "dapo", "entropy_coef": 0.3},
    ),
}


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)

    def noise() -> Tensor:
        return torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)

    new = -1 - noise().abs()
    lengths = torch.tensor([9, 4, 1, 7, 9, 3])
    return {
        "new": new,
        "old": new + 0.3 * noise(),
        "reference": new + 0.4 * noise(),
        "sampler": new + 0.6 * noise(),
        "entropy": noise().abs(),
        "advantages": torch.randn(ROWS, generator=generator, dtype=torch.float64),
        "mask": (torch.arange(LENGTH) < lengths[:, None]).long(),
    }


def trl_loss(given: dict[str, Tensor], new: Tensor, entropy: Tensor, **fields: Any) -> Tensor:
    """`GRPOTrainer._compute_loss`, on a trainer that is nothing but its settings."""
    from trl import GRPOTrainer  # heavy: only here

    correction, beta = trl_weights(given, fields), fields.pop("beta", 0.0)
    settings = {"delta": None, "use_bias_correction_kl": False} | fields
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, entropy, None),
        args=SimpleNamespace(**settings, steps_per_generation=1),
        accelerator=_Alone(),
        model=SimpleNamespace(training=True),
        _metrics={"train": _Anything()},
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=fields.get("importance_sampling_level", "token"),
        loss_type=fields["loss_type"],
        beta=beta,
        epsilon_low=fields.get("epsilon_low", 0.2),
        epsilon_high=fields.get("epsilon_high", 0.2),
        use_vllm=correction is not None,
        vllm_importance_sampling_correction=correction is not None,
        max_completion_length=LENGTH,
        _entropy_bonus_enabled="entropy_coef" in fields,
        use_adaptive_entropy=False,
        entropy_coef=fields.get("entropy_coef", 0.0),
    )
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    loss: Tensor = GRPOTrainer._compute_loss(
        trainer,
        None,
        {
            "prompt_ids": ids[:, :2],
            "prompt_mask": ids[:, :2] + 1,
            "completion_ids": ids,
            "completion_mask": given["mask"],
            "advantages": given["advantages"],
            "old_per_token_logps": given["old"],
            "ref_per_token_logps": given["reference"],
            "importance_sampling_ratio": correction,
            "num_items_in_batch": given["mask"].sum(),
        },
    )
    return loss


def trl_weights(given: dict[str, Tensor], fields: dict[str, Any]) -> Tensor | None:
    """What TRL hands its loss under the modes token_truncate, sequence_truncate (one column) and
    token_mask of `vllm_importance_sampling_mode`; its fields are taken out of `fields`."""
    cap, bounds = fields.pop("tis_cap", None), fields.pop("mask_bounds", None)
    log_ratio = (given["old"] - given["sampler"]) * given["mask"]
    if fields.pop("of_sequences", False):
        log_ratio = log_ratio.sum(-1, keepdim=True)
    ratio = log_ratio.exp()
    if bounds is not None:
        return ratio.where((ratio >= bounds[0]) & (ratio <= bounds[1]), 0.0)
    return None if cap is None else ratio.clamp(max=cap)


class _Alone(SimpleNamespace):
    """One process's accelerator."""

    num_processes = 1
    sync_gradients = False

    def gather(self, values: Tensor) -> Tensor:
        return values

    def reduce(self, values: Tensor, reduction: str) -> Tensor:
        return values


class _Anything(dict[str, list[float]]):
    """Its metrics go nowhere."""

    def __missing__(self, key: str) -> list[float]:
        return []


def our_loss(given: dict[str, Tensor], new: Tensor, entropy: Tensor, **fields: Any) -> Tensor:
    algorithm = AlgorithmSection.model_validate(fields)
    mask = given["mask"].bool()
    lengths = mask.sum(1)
    sample = torch.arange(ROWS).repeat_interleave(lengths)
    usable = torch.ones(len(sample), dtype=torch.bool)
    coefficients = token_coefficients(usable, lengths, algorithm.aggregation, max_tokens=LENGTH)
    batch = TokenBatch(
        given["old"][mask],
        given["sampler"][mask],
        given["advantages"][sample],
        coefficients.double(),
        sample,
        given["reference"][mask],
    )
    return policy_loss(new[mask], entropy[mask], batch, algorithm).total


Loss = Callable[[Tensor, Tensor], Tensor]


def loss_and_gradients(given: dict[str, Tensor], compute: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and what it pulls at of `new` and `entropy`."""
    new = given["new"].clone().requires_grad_()
    entropy = given["entropy"].clone().requires_grad_()
    loss = compute(new, entropy)
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad, torch.zeros(()) if entropy.grad is None else entropy.grad


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_trls(case: str) -> None:
    ours, theirs = CASES[case]
    given = inputs()
    our, our_new, our_entropy = loss_and_gradients(given, partial(our_loss, given, **ours))
    their, their_new, their_entropy = loss_and_gradients(given, partial(trl_loss, given, **theirs))
    torch.testing.assert_close(our, their, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(our_new, their_new, rtol=1e-6, atol=1e-8)
    if case == "entropy":
        torch.testing.assert_close(our_entropy, their_entropy, rtol=1e-6, atol=1e-8)


UNBOUNDED = 1e9
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # ours, TRL's, and the policy whose ratio to the new one ours has in the KL of each token
    "tis": (
        {**UNBIASED, "correction": {"high": UNBOUNDED}},
        {"loss_type": "grpo", "tis_cap": UNBOUNDED},
        "sampler",
    ),
    "gspo": ({"name": "gspo", **UNBIASED, **NONE}, GSPO, "old"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_the_unbiased_kl_differs_from_trls_where_trls_ratio_is_not_the_papers(case: str) -> None:
    """The paper's is the token's, to the policy that drew it. TRL takes the policy loss's: with a
    correction still to the old policy, with GSPO the whole response's. Ours is what TRL has for the
    policy loss alone, and for a KL alone where its old policy is the one that drew the tokens."""
    ours, theirs, drew = DIFFERENCES[case]
    given = inputs()
    papers = given | {"old": given[drew], "advantages": torch.zeros(ROWS, dtype=torch.float64)}
    kl = {**KL, "use_bias_correction_kl": True}

    def put_together(new: Tensor, entropy: Tensor) -> Tensor:
        return trl_loss(given, new, entropy, **theirs) + trl_loss(papers, new, entropy, **kl)

    found = loss_and_gradients(given, partial(our_loss, given, **ours))
    torch.testing.assert_close(
        found[:2], loss_and_gradients(given, put_together)[:2], rtol=1e-6, atol=1e-8
    )
    trls = loss_and_gradients(given, partial(trl_loss, given, **(kl | theirs)))
    assert (found[0] - trls[0]).abs() > 1e-4
    assert (found[1] - trls[1]).abs().max() > 1e-3
