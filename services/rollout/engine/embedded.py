"""The embedded engine: a model, its scheduler, and the version that both serve.

A new version is built and proven beside the one that is served (`prepare`, safe in a thread) and
then takes its place between two steps (`switch`), or leaves it as it was.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from services.rollout.engine.probing import Proven, next_anchor, prove
from services.rollout.engine.requests import Completion, EngineSpec
from services.rollout.engine.routes import Recording
from services.rollout.engine.scheduler import Limits, Scheduler
from services.rollout.engine.state_check import StateCheck
from services.rollout.engine.weights import (
    Candidate,
    LoadedVersion,
    Stopwatch,
    build_version,
    check_effective,
    check_expected,
    first_departing,
    read_canonical,
)
from services.rollout.models.deepseek_v4 import Sampler
from services.rollout.models.deepseek_v4_trace import traced_states
from services.rollout.models.deepseek_v4_weights import derive
from shared.errors import WeightsCorrupt
from shared.models.deepseek_v4.checkpoint import load_release
from shared.parity.trace import Traced, TraceRequest
from shared.quant.activation import ActivationQuant, embedded_rounding
from shared.spans import span
from shared.weights.manifest import MANIFEST_FILE, Manifest
from shared.weights.protocol import CommitUpdate, Probe

log = structlog.get_logger()


class EmbeddedEngine:
    """The operations of the channel, without the channel: tests call them directly."""

    def __init__(self, spec: EngineSpec) -> None:
        torch.set_num_threads(spec.num_threads)
        self.spec = spec
        self.paused = False
        self.scheduler = Scheduler(
            Sampler(spec.arch, rounding_of(spec)),
            limits=Limits(max_running=spec.max_running_requests, max_tokens=spec.context_length),
            recording=Recording(spec.record_experts, spec.record_entries),
        )
        self._build = derive
        self._anchor: Proven | None = None  # of the probes

    @property
    def policy_version(self) -> int | None:
        version = self.scheduler.version
        return None if version is None else version.policy_version

    def activate(
        self, manifest: Manifest, folder: Path, commit: CommitUpdate
    ) -> tuple[dict[str, Any], list[tuple[str, list[Completion]]]]:
        """Serve a staged version, or raise `WeightsCorrupt` and serve on as before.

        Gives the fields of a CommitResult, and requests that the pause mode ended.
        """
        return self.switch(self.prepare(manifest, folder, commit), commit)

    def prepare(self, manifest: Manifest, folder: Path, commit: CommitUpdate) -> Candidate:
        """Build and prove a staged version beside what is served; safe in a thread of its own."""
        watch = Stopwatch()
        with span("load", "updates", policy_version=manifest.policy_version):
            canonical = read_canonical(manifest, folder)
        watch.lap("load_s")
        with span("restore", "updates"):
            version = build_version(
                manifest.policy_version, self.spec.arch, canonical, build=self._build
            )
        watch.lap("restore_s")
        with span("probe", "updates"):
            proven = self._prove(version, commit)
        watch.lap("probe_s")
        # From here on nobody needs what it was derived from.
        return Candidate(replace(version, canonical={}), watch.seconds, proven)

    def rehearse(self, manifest: Manifest, folder: Path, commit: CommitUpdate) -> dict[str, Any]:
        """What `activate` would give, with nothing switched."""
        return _result(self.prepare(manifest, folder, commit), {"pause_s": 0.0})

    def switch(
        self, candidate: Candidate, commit: CommitUpdate
    ) -> tuple[dict[str, Any], list[tuple[str, list[Completion]]]]:
        """Serve a proven version from here on: all that happens in the pause.

        `PrefixKept` when state of the old version would be used; the old one serves on.
        """
        watch, version = Stopwatch(), candidate.version
        check = StateCheck(self.scheduler, candidate.proven)
        with span("switch", "updates", policy_version=version.policy_version):
            ended = self.scheduler.switch(version, commit.pause_mode)
            check.after_switch(ended)
        watch.lap("pause_s")
        self._anchor = next_anchor(self._anchor, candidate.proven)
        log.info("version_active", policy_version=version.policy_version, **candidate.seconds)
        return _result(candidate, watch.seconds), ended

    def load(self, source: Path, policy_version: int) -> str:
        """Serve a release directory, or a version's folder, of this disk; its checksum.

        `WeightsCorrupt` or `CheckpointInvalid` names the tensor or the shard that is off.
        """
        manifest = source / MANIFEST_FILE
        if manifest.is_file():
            found = Manifest.model_validate_json(manifest.read_bytes())
            canonical = read_canonical(found, source)
        else:
            canonical = load_release(source, self.spec.arch)
        version = build_version(policy_version, self.spec.arch, canonical, build=self._build)
        check_effective(self.spec.arch, version)
        self.scheduler.switch(version, "in_place")
        return version.checksum

    def score(
        self, sequences: list[list[int]], temperature: float, policy_version: int | None
    ) -> tuple[int, list[np.ndarray]]:
        """The version that scored, and FP32 log-probabilities of tokens 1.. of each sequence."""
        version = self.scheduler.require(
            policy_version if policy_version is not None else self.policy_version or 0
        )
        arrays = [np.array(sequence, np.int64) for sequence in sequences]
        return version.policy_version, self.scheduler.score(arrays, temperature, version=version)

    def trace(self, request: TraceRequest) -> Traced:
        """Inner states of given sequences under the version that is served."""
        wanted = request.policy_version
        version = self.scheduler.require(self.policy_version or 0 if wanted is None else wanted)
        states = traced_states(self.scheduler.model, version.derived, request)
        return Traced(policy_version=version.policy_version, states=states)

    def _prove(self, version: LoadedVersion, commit: CommitUpdate) -> Proven | None:
        proven = None
        if commit.probe is not None and commit.probe.sequences:
            proven = self._probed(version, commit.probe)
        check_effective(self.spec.arch, version)
        check_expected(version, commit.effective_checksum)
        return proven

    def _probed(self, version: LoadedVersion, probe: Probe) -> Proven:
        """WeightsCorrupt also names the first tensor that is not what was published, if one is."""
        sequences = [np.array(one.token_ids, np.int32) for one in probe.sequences]
        scores = self.scheduler.prober().score(sequences, 1.0, version=version)
        try:
            return prove(version.policy_version, probe, scores, anchor=self._anchor)
        except WeightsCorrupt as err:
            name = first_departing(self.spec.arch, version)
            told = "all tensors are" if name is None else f"{name} is not"
            raise WeightsCorrupt(f"{err}; {told} what was published") from err


def _result(candidate: Candidate, pause: dict[str, float]) -> dict[str, Any]:
    """The fields of a CommitResult, before anybody knows when sampling goes on."""
    return {
        "version": candidate.version.policy_version,
        **candidate.seconds,
        **pause,
        "resume_s": 0.0,
        "probe_mean_abs_delta": candidate.proven and candidate.proven.mean_abs_delta,
        "effective_checksum": candidate.version.checksum,
    }


def rounding_of(spec: EngineSpec) -> ActivationQuant:
    return embedded_rounding(spec.arch.weight_format, activations=spec.quantise_activations)
