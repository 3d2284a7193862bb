"""Which server answers: asked at every start, for an attached one may come back as another."""

import structlog

from services.rollout.engine.sglang.client import ServerRefused, SGLangClient
from services.rollout.engine.sglang.dialects import Dialect, dialect_of

log = structlog.get_logger()

TESTED_VERSIONS = ("0.5.17", "0.5.23")


async def identify(client: SGLangClient, *, architecture: str) -> Dialect:
    """What the server speaks. ServerRefused when it has loaded another class of model.

    An untested version may well work; the log says that nobody has seen it.
    """
    loaded = await client.architectures()
    if not loaded:
        log.warning("sglang_model_without_a_name", url=client.url)
    elif loaded != {architecture}:
        raise ServerRefused(
            f"{client.url} serves {', '.join(sorted(loaded))}; "
            f"{architecture} is what this job's versions fit"
        )
    version = str((await client.info()).get("version", "unknown"))
    if version not in TESTED_VERSIONS:
        log.warning("sglang_version_untested", found=version, tested=TESTED_VERSIONS)
    dialect = dialect_of(await client.endpoints())
    log.info("sglang_serves", version=version, dialect=dialect, architecture=architecture)
    return dialect
