"""Which server answers: asked at every start, for an attached one may come back as another."""

from dataclasses import asdict, dataclass
from typing import Any

import structlog

from services.rollout.engine.sglang.client import ServerRefused, SGLangClient
from services.rollout.engine.sglang.dialects import Dialect, dialect_of
from services.rollout.engine.sglang.kernels import release_numbers
from services.rollout.engine.sglang.launch import GPU_PACKAGE
from services.rollout.engine.sglang.server import Server
from shared.errors import WeightsCorrupt

log = structlog.get_logger()

TESTED_VERSIONS = ("0.5.17", "0.5.23")
_COPIES_SINKS = "DeepseekV4ForCausalLM"
_FIRST_THAT_REFRESHES = (0, 5, 23)


@dataclass(frozen=True, slots=True)
class Served:
    """What a server speaks, and whether its class of model tells of the sinks that it keeps."""

    dialect: Dialect
    tells_sinks: bool = False

    async def check_sinks(self, client: SGLangClient) -> None:
        """WeightsCorrupt where a rank attends with other sinks than its weights have."""
        if self.tells_sinks and (found := await client.sinks_departure()) != 0:
            raise WeightsCorrupt(
                "a rank attends with a copy of other attention sinks than its weights have: "
                f"largest difference {found}"
            )


async def identify(server: Server, *, architecture: str) -> Served:
    """ServerRefused when it has loaded another class of model, or one that would go on attending
    with the sinks of old weights.

    An untested version may well work; the log says that nobody has seen it.
    """
    client = server.client
    loaded = await client.architectures()
    if not loaded:
        log.warning("sglang_model_without_a_name", url=client.url)
    elif loaded != {architecture}:
        raise ServerRefused(
            f"{client.url} serves {', '.join(sorted(loaded))}; "
            f"{architecture} is what this job's versions fit"
        )
    info = await client.info()
    version = str(info.get("version", "unknown"))
    if version not in TESTED_VERSIONS:
        log.warning("sglang_version_untested", found=version, tested=TESTED_VERSIONS)
    dialect = dialect_of(await client.endpoints())
    shares = architecture == _COPIES_SINKS and attention_ranks(info) > 1
    told = await client.sinks_departure() if shares else None
    if shares and told is None:
        _check_refreshed(client.url, version, dialect, is_ours=server.is_ours)
    served = Served(dialect, tells_sinks=told is not None)
    log.info("sglang_serves", version=version, architecture=architecture, **asdict(served))
    return served


def attention_ranks(info: dict[str, Any]) -> int:
    """Ranks that share the heads of one attention layer."""
    ranks = int(info.get("tp_size") or 1)
    return ranks // int(info.get("dp_size") or 1) if info.get("enable_dp_attention") else ranks


def _check_refreshed(url: str, version: str, dialect: Dialect, *, is_ours: bool) -> None:
    """ServerRefused unless SGLang's own class is known to refresh its copies at every load."""
    if is_ours:
        raise ServerRefused(
            f"SGLang {version} did not load the model of {GPU_PACKAGE}, which it is told to where "
            "rollout.sglang.tensor_parallel, no argument of its own, says that it has several ranks"
        )
    if dialect == "session" and release_numbers(version) >= _FIRST_THAT_REFRESHES:
        log.warning("sglang_sinks_are_not_told", url=url, relies_on=f"SGLang {version} and probe")
        return
    raise ServerRefused(
        f"{url}: SGLang {version} at tensor parallel above 1 may attend with copies of the first "
        "weights' sinks after every update, which no checksum shows, and no probe if small. "
        f"Start it with SGLANG_EXTERNAL_MODEL_PACKAGE={GPU_PACKAGE} and this tree on PYTHONPATH, "
        "or take 0.5.23 or later, tensor parallel 1, or a server that Tandem starts"
    )
