"""Sections of a job that say what it proves, before its first step and at every other, and when it
stops instead of training on a broken policy."""

from pydantic import Field

from shared.section import Section


class BoundsSection(Section):
    """A job beyond its bounds is paused instead of trained on a broken policy."""

    max_mean_abs_delta_logprob: float = Field(1.0, gt=0)
    """Of one step, between sampler and trainer; a step above it pauses the job."""
    step_deadline_s: float = Field(1800.0, gt=0)
    """Longest wait for one step's groups; the error says which stage they are in."""


class AttributionSection(Section):
    """Where the difference between sampler and trainer comes from, asked of some samples."""

    every_steps: int = Field(10, ge=0)
    """0 never asks."""
    samples: int = Field(16, gt=0)
    """Of the step's batch, those that are scored on every rung."""


class PreflightSection(Section):
    """What a job proves before its first step; beyond these bounds it does not start."""

    enabled: bool = True
    """Prove it at all."""
    deadline_s: float = Field(300.0, gt=0)
    """Longest wait for a server to serve the first version, and for the comparison with it."""
    max_mean_abs_delta_logprob: float = Field(0.05, gt=0)
    """Between an embedded sampler and the ranks rounding alike: there a difference is a mistake. As
    the ranks train, and for other engines, `bounds.max_mean_abs_delta_logprob` holds."""
    walk: bool = True
    """Refuse also when a layer walk names a sub-module that departs."""
    max_memory_share: float = Field(0.95, gt=0)
    """Of the available memory that ranks and sampler may be planned to need."""
