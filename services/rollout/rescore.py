"""`python -m services.rollout.rescore`: a job's sampler, without a service, scores given tokens.

A request on stdin, log-probabilities on stdout. Every version that is asked for is loaded from its
folder, as a server loads what it has staged.
"""

import sys

import numpy as np

from services.rollout.config import RolloutConfig
from services.rollout.engine.embedded import EmbeddedEngine
from services.rollout.engine.weights import build_version, read_canonical
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
    tokens = np.array(request.token_ids, np.int64)
    scored = {}
    for version, folder in request.folders.items():
        manifest = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
        loaded = build_version(version, engine.spec.arch, read_canonical(manifest, folder))
        scores = engine.scheduler.score([tokens], request.temperature, version=loaded)
        scored[version] = scores[0].tolist()
    return RescoreResult(logprobs=scored)


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
