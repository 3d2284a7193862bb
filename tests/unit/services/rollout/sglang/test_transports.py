"""Transports that lack a setting say so before a server is started, and none of them waits."""

from pathlib import Path
from typing import cast

import pytest
import torch

from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.sglang.__main__ import started
from services.rollout.engine.sglang.server import Server
from services.rollout.engine.sglang.spec import ServerSpec
from services.rollout.engine.sglang.transports import NCCL_MEMORY, ProcessGroup, transport_of
from shared.errors import ConfigInvalid
from shared.models.deepseek_v4.architecture import Architecture

ARCH = Architecture.load(Path("assets/tiny-dsv4"))


class _Unstarted:
    """A server that must not be started."""

    is_ours = True

    async def start(self, model: Path) -> None:
        raise AssertionError("the server was started")


@pytest.mark.parametrize(("value", "shown"), [(None, "unset"), ("1", "'1'")])
async def test_nccl_without_its_setting_is_refused_before_the_server_starts(
    value: str | None, shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(NCCL_MEMORY, raising=False)
    if value is not None:
        monkeypatch.setenv(NCCL_MEMORY, value)
    spec = ServerSpec("/checkpoint", platform="cuda", transport="nccl")
    engine = EngineSpec(ARCH, 8, 64, True, 1, server=spec)
    with pytest.raises(ConfigInvalid, match=f"NCCL_CUMEM_ENABLE=0 .* it is {shown}, .* hang"):
        await started(engine, spec, cast(Server, _Unstarted()), tmp_path)


def test_with_its_setting_nccl_sends_a_bucket_in_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(NCCL_MEMORY, "0")
    transport = transport_of("nccl")
    assert isinstance(transport, ProcessGroup)
    bucket = [("wide", torch.arange(2)), ("narrow", torch.ones(3, dtype=torch.bfloat16))]
    (message,) = transport.messages(bucket)
    assert message.numel() == 2 * 8 + 3 * 2
    assert torch.equal(message[:16].view(torch.int64), bucket[0][1])


def test_gloo_needs_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NCCL_MEMORY, raising=False)
    assert isinstance(transport_of("gloo"), ProcessGroup)
