"""`python -m services.rollout.rescore`: a job's sampler, without a service, scores a completion.

A request on stdin, log-probabilities on stdout. Every version that is asked for is loaded from its
folder, as a server loads what it has staged.
"""

import sys
from functools import lru_cache

import numpy as np

from services.rollout.config import RolloutConfig
from services.rollout.engine.checks import check_tokens
from services.rollout.engine.embedded import EmbeddedEngine
from services.rollout.engine.resampling import Resampler
from services.rollout.engine.weights import LoadedVersion, build_version, read_canonical
from services.rollout.serving import engine_spec
from shared.errors import WeightsCorrupt
from shared.job import expand_path
from shared.models.deepseek_v4.architecture import Architecture
from shared.parity.rescore_request import RescoreRequest, RescoreResult
from shared.process import die_with_parent, exit_with
from shared.weights.manifest import MANIFEST_FILE, Manifest


def run(request: RescoreRequest) -> RescoreResult:
    """ValueError or WeightsCorrupt for what cannot be scored."""
    arch = Architecture.load(expand_path(request.job.model.rollout_checkpoint))
    engine = EmbeddedEngine(engine_spec(request.job, arch, RolloutConfig()))
    scheduler, tokens = engine.scheduler, np.array(request.token_ids, np.int64)
    spans = [(span.policy_version, span.num_tokens) for span in request.spans]
    check_tokens(tokens, arch, scheduler.limits.max_tokens, "the sample")
    if (num := sum(num for _, num in spans)) >= len(tokens):
        raise ValueError(f"{num} sampled tokens of {len(tokens)} leave no prompt")

    @lru_cache(maxsize=1)
    def load(version: int) -> LoadedVersion:
        folder = request.folders[version]
        manifest = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
        return build_version(version, engine.spec.arch, read_canonical(manifest, folder))

    resampler = Resampler(
        scheduler.model,
        max_tokens=scheduler.limits.max_tokens,
        chunk_tokens=scheduler.limits.chunk_tokens,
    )
    temperature, mode = request.temperature, request.job.update.pause_mode
    scored = resampler.score(tokens, spans, temperature=temperature, load=load, pause_mode=mode)
    prefilled, end = [], len(tokens) - num
    for version, count in spans:
        (scores,) = scheduler.score([tokens], temperature, version=load(version))
        prefilled += scores[end - 1 : end - 1 + count].tolist()
        end += count
    return RescoreResult(logprobs=scored.tolist(), prefilled=prefilled)


def main(arguments: list[str]) -> None:
    """The parent's pid may be given: then this process does not outlive it."""
    die_with_parent(int(arguments[0]) if arguments else None)
    try:
        result = run(RescoreRequest.model_validate_json(sys.stdin.read()))
    except (ValueError, OSError, WeightsCorrupt) as err:
        exit_with(str(err))
    sys.stdout.write(result.model_dump_json())


if __name__ == "__main__":
    main(sys.argv[1:])
