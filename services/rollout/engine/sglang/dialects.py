"""The three ways in which SGLang servers let their weights be replaced while they run.

    session       begin_weight_update  -> tensors -> end_weight_update         (upstream, 0.5.21 on)
    post_process  restore before load  -> tensors -> post-process quantisation (the fork of miles)
    bare          tensors alone                                                (older upstream)

Which one it is, the server's own list of endpoints says; a version string would lie about forks.
A load from disk is post-processed by the call itself, and a second time would permute the weights
of layouts that are shuffled: upstream it stands alone, in the fork the restoring before it is ours.
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Literal

import structlog

from services.rollout.engine.sglang.client import ServerRefused, SGLangClient
from shared.errors import HttpFailed

log = structlog.get_logger()

_CLOSE_S = 10.0  # of a session that is given up
Dialect = Literal["session", "post_process", "bare"]


def dialect_of(endpoints: set[str]) -> Dialect:
    """What a server speaks that has these endpoints."""
    if {"/begin_weight_update", "/end_weight_update"} <= endpoints:
        return "session"
    if "/post_process_weights" in endpoints:
        return "post_process"
    log.warning("sglang_has_no_post_processing", relies_on="probe by log-probabilities")
    return "bare"


@contextlib.asynccontextmanager
async def loading(
    client: SGLangClient, dialect: Dialect, *, is_disk: bool = False, timeout_s: float
) -> AsyncIterator[None]:
    """Tensors may be sent inside; leaving rebuilds the quantised state, once.

    An error inside leaves the server half loaded, which is the caller's to undo; a session is
    closed all the same, since a server with an open one begins no other.
    """
    if dialect == "session" and not is_disk:
        async with _session(client, timeout_s):
            yield
        return
    path = "/post_process_weights"
    if dialect == "post_process":
        await client.change(path, {"restore_weights_before_load": True}, timeout_s=timeout_s)
    yield
    if dialect == "post_process" and not is_disk:
        await client.change(path, {"post_process_quantization": True}, timeout_s=timeout_s)


async def rebuild(client: SGLangClient, dialect: Dialect, *, timeout_s: float) -> bool:
    """Have the server derive anew what it keeps beside its weights. False where it has no call for
    that. Of the attention sinks of tensor parallel ranks it helps with our class of model, or
    SGLang's own since 0.5.23, which every load refreshes by itself."""
    if dialect == "session":
        async with _session(client, timeout_s):
            pass  # one without a load ends with the model's own work after loading
    elif dialect == "post_process":
        body = {"post_load_weights": True}
        await client.change("/post_process_weights", body, timeout_s=timeout_s)
    return dialect != "bare"


@contextlib.asynccontextmanager
async def _session(client: SGLangClient, timeout_s: float) -> AsyncIterator[None]:
    try:
        await client.change("/begin_weight_update", {"selector": "all"}, timeout_s=timeout_s)
    except ServerRefused as err:
        log.warning("sglang_session_left_open", error=str(err))  # by an update that broke
        await client.change("/end_weight_update", {}, timeout_s=timeout_s)
        await client.change("/begin_weight_update", {"selector": "all"}, timeout_s=timeout_s)
    try:
        yield
    except BaseException:
        with contextlib.suppress(ServerRefused, HttpFailed):
            await client.change("/end_weight_update", {}, timeout_s=_CLOSE_S)
        raise
    await client.change("/end_weight_update", {}, timeout_s=timeout_s)
