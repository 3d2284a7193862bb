"""The job's `algorithm` section: a name fills in what is not given, and mixes that say nothing
sensible are refused. docs/algorithms.md has every formula and its source."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from shared.section import Section

AlgorithmName = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_plus_plus", "rloo"]
PolicyLoss = Literal["token_ratio", "sequence_ratio", "clipped_weight", "reinforce"]
Baseline = Literal["group_mean", "leave_one_out", "batch_mean", "none"]
Normalise = Literal["group_std", "batch_std", "none"]
Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]
KlEstimator = Literal["k1", "k2", "k3", "unbiased"]

# What a name stands for, where it differs from the fields' own defaults.
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"normalise": "none", "aggregation": "fixed_length"},
    "dapo": {"clip_high": 0.28, "aggregation": "token_mean"},
    "gspo": {
        "policy_loss": "sequence_ratio",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "correction": {"level": "sequence"},
    },
    "cispo": {
        "policy_loss": "clipped_weight",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "aggregation": "token_mean",
    },
    "reinforce_plus_plus": {
        "baseline": "batch_mean",
        "normalise": "batch_std",
        "aggregation": "token_mean",
        "kl": {"estimator": "k1", "place": "reward"},
    },
    "rloo": {
        "policy_loss": "reinforce",
        "baseline": "leave_one_out",
        "normalise": "none",
        "aggregation": "fixed_length",
        "kl": {"estimator": "k1", "place": "reward"},
    },
}
ICEPOP_BOUNDS = {"low": 0.5, "high": 5.0}  # Ring-1T, arXiv 2510.18855, section 3.1


class CorrectionSection(Section):
    """What is done about tokens that the sampler drew with other probabilities than the actor's."""

    kind: Literal["none", "tis", "mis", "icepop", "reject"] = "tis"
    """tis: ratios clamped to [low, high]. mis: ratios outside become 0. icepop: mis with both
    bounds (0.5 and 5 unless given), per token. reject: ratios outside become 0, inside 1."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Whose ratio: each token's, the product over its response, or the product's R-th root."""
    low: float = Field(0.0, ge=0, le=1)
    """Smallest ratio that is trusted; 0: none is too small."""
    high: float = Field(2.0, ge=1)
    """Largest ratio that is trusted."""
    veto: float | None = Field(None, gt=0, lt=1)
    """A response with a token whose ratio is below this is not trained on (1e-4 is usual)."""

    @model_validator(mode="before")
    @classmethod
    def _with_bounds(cls, given: Any) -> Any:
        is_icepop = isinstance(given, dict) and given.get("kind") == "icepop"
        return ICEPOP_BOUNDS | given if is_icepop else given

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if self.kind == "icepop" and (self.level != "token" or self.low == 0):
            raise ValueError(
                f"icepop masks tokens outside two bounds: level {self.level!r} and low {self.low:g}"
                " do not fit; use level 'token' and low above 0 (0.5), or kind 'mis'"
            )
        if self.kind == "none" and self.veto is not None:
            raise ValueError("veto does nothing with kind 'none'")
        return self


class KlSection(Section):
    """The distance to the frozen reference policy: the actor's first weights, or what the job's
    warm-up made of them."""

    coefficient: float = Field(0.0, ge=0)
    """0: no reference policy is kept; else one copy of each rank's weights in host memory."""
    estimator: KlEstimator = "k3"
    """Of the divergence, from one sample: k1, k2 or k3 (Schulman, "Approximating KL Divergence",
    2020), or k3 with the ratio that makes its gradient unbiased."""
    place: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken off each token's reward."""

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if self.coefficient and (self.estimator, self.place) == ("k1", "loss"):
            raise ValueError(
                "k1 in the loss pulls nowhere: its gradient does not contain the reference; "
                "use k2, k3 or unbiased, or place = 'reward'"
            )
        if self.coefficient and (self.estimator, self.place) == ("unbiased", "reward"):
            raise ValueError("unbiased is a form of the loss; in the reward use k1, k2 or k3")
        return self


class AlgorithmSection(Section):
    """How rewards become advantages, and advantages a loss."""

    name: AlgorithmName = "grpo"
    """Gives the fields below their defaults; each may be set by itself."""
    max_lag: int = Field(0, ge=0, le=64)
    """Versions a trained sample may be behind; 0 is strictly on-policy."""
    policy_loss: PolicyLoss = "token_ratio"
    """token_ratio: clipped per token. sequence_ratio: clipped per response (GSPO). clipped_weight:
    the ratio is a weight without gradient (CISPO). reinforce: no ratio."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """How far below 1 a ratio is trusted."""
    clip_high: float = Field(0.2, gt=0)
    """Trusted ratios are [1 - clip_low, 1 + clip_high]."""
    baseline: Baseline = "group_mean"
    """What is subtracted from a reward."""
    normalise: Normalise = "group_std"
    """What the rest is divided by. Statistics of the batch are over its tokens that train."""
    aggregation: Aggregation = "sequence_mean"
    """fixed_length divides by samples x sampling.max_response_tokens (Dr.GRPO)."""
    correction: CorrectionSection = CorrectionSection()
    """What is done about tokens that the sampler drew with other probabilities."""
    proximal: Literal["actor", "sampler"] = "actor"
    """Whose log-probabilities the ratio is against: the actor's own at the start of the step, or
    the recorded ones, which spares the correction and a pass."""
    kl: KlSection = KlSection()
    """The distance to the reference policy."""
    entropy_bonus: float = Field(0.0, ge=0)
    """Weight of the policy's mean entropy, which is added to what is maximised."""
    truncated: Literal["train", "leave_out"] = "train"
    """leave_out: a truncated response counts in its group's baseline and is not trained on."""
    updates_per_batch: int = Field(1, gt=0, le=16)
    """Optimiser steps on the groups of one step, each on its share of them."""
    max_bad_logprob_share: float = Field(0.05, ge=0, le=1)
    """A group with more unusable sampler log-probabilities (NaN, infinite, positive) than this is
    dropped when it arrives, and a step that has more all the same is refused."""

    @model_validator(mode="before")
    @classmethod
    def _as_named(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        name = given.get("name", "grpo")
        preset = PRESETS.get(name, {}) if isinstance(name, str) else {}
        filled = preset | given
        for key, value in preset.items():
            if isinstance(value, dict) and isinstance(given.get(key), dict):
                filled[key] = value | given[key]
        return filled

    @model_validator(mode="after")
    def _is_known_mix(self) -> Self:
        for is_wrong, why in self._contradictions():
            if is_wrong:
                raise ValueError(why)
        return self

    def _contradictions(self) -> list[tuple[bool, str]]:
        ratio_free = self.policy_loss == "reinforce"
        corrected = self.correction.kind != "none"
        return [
            (
                self.policy_loss == "sequence_ratio" and self.aggregation != "sequence_mean",
                "policy_loss 'sequence_ratio' is a loss per response: "
                f"aggregation {self.aggregation!r} does not fit, use 'sequence_mean'",
            ),
            (
                self.normalise == "group_std" and self.baseline != "group_mean",
                f"normalise 'group_std' needs baseline 'group_mean', not {self.baseline!r}",
            ),
            (
                self.normalise == "batch_std" and self.baseline not in ("group_mean", "batch_mean"),
                "normalise 'batch_std' needs baseline 'group_mean' or 'batch_mean', "
                f"not {self.baseline!r}",
            ),
            (
                ratio_free and self.updates_per_batch > 1,
                f"policy_loss 'reinforce' has no ratio: updates_per_batch {self.updates_per_batch} "
                "would train on what is no longer the policy, use 1",
            ),
            (
                ratio_free and self.proximal == "sampler",
                "policy_loss 'reinforce' has no ratio: proximal 'sampler' does nothing",
            ),
            (
                self.proximal == "sampler" and corrected,
                "proximal 'sampler' corrects for the sampler in the ratio: correction.kind "
                f"{self.correction.kind!r} would do it again, use 'none'",
            ),
        ]

    @property
    def uses_groups(self) -> bool:
        """Whether a sample's advantage depends on the others of its group."""
        return self.baseline in ("group_mean", "leave_one_out")

    @property
    def kl_in_reward(self) -> bool:
        return self.kl.coefficient > 0 and self.kl.place == "reward"

    @property
    def kl_in_loss(self) -> bool:
        return self.kl.coefficient > 0 and self.kl.place == "loss"


def beyond_its_name(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """What a resolved section says beyond its name: under another name, the rest is that one's."""
    name = resolved.get("name", "grpo")
    usual = AlgorithmSection(name=name).model_dump(mode="json")
    return {"name": name, **_differences(resolved, usual)}


def _differences(found: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in found.items():
        if isinstance(value, Mapping) and isinstance(usual.get(key), Mapping):
            if inner := _differences(value, usual[key]):
                result[key] = inner
        elif key not in usual or value != usual[key]:
            result[key] = value
    return result
