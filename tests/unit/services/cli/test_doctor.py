"""Each finding of `doctor` and what it says to do."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import pytest

from services.cli import doctor
from shared.process import free_port


@pytest.mark.parametrize(
    ("settings", "version", "states"),
    [
        ({"appendonly": "yes", "maxmemory": "0", "maxmemory-policy": "x"}, "7.2.4", "ok ok ok"),
        (
            {"appendonly": "no", "maxmemory": "1000", "maxmemory-policy": "allkeys-lru"},
            "6.0.16",
            "bad warn bad",
        ),
    ],
)
def test_a_broker_is_judged(settings: dict[str, str], version: str, states: str) -> None:
    found = doctor.judge_broker(version, settings)
    assert [one.state for one in found] == states.split()
    assert all(bool(one.fix) == (one.state != "ok") for one in found)


async def test_a_broker_of_ours_is_well_and_none_is_bad(redis_url: str) -> None:
    assert {one.state for one in await doctor.check_broker(redis_url)} == {"ok"}
    (found,) = await doctor.check_broker(f"redis://127.0.0.1:{free_port()}/0")
    assert (found.name, found.state) == ("broker", "bad")


async def test_a_brokers_port_is_a_brokers_or_somebodys(redis_url: str) -> None:
    port = int(redis_url.rsplit(":", 1)[1].split("/")[0])
    assert (await doctor._port("broker", port)).state == "ok"
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, says nothing
        found = await doctor._port("broker", silent.getsockname()[1])
    assert found.state == "bad"


async def test_a_port_is_free_ours_or_somebodys() -> None:
    async def answer(status: str) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            writer.close()

        return await asyncio.start_server(serve, "127.0.0.1", 0)

    ours, others = await answer("200 OK"), await answer("404 Not Found")
    ports = [ours.sockets[0].getsockname()[1], others.sockets[0].getsockname()[1], free_port()]
    found = [await doctor._port("trainer", port) for port in ports]
    for server in (ours, others):
        server.close()
        await server.wait_closed()
    assert [one.state for one in found] == ["ok", "bad", "ok"]
    assert str(ports[1]) in found[1].fix


def test_packages_memory_kernel_and_disk_are_judged(tmp_path: Path) -> None:
    assert doctor.check_package("httpx", None).state == "ok"
    other = doctor.check_package("httpx", "0.0.1")
    assert (other.state, "httpx==0.0.1" in other.fix) == ("warn", True)
    assert doctor.check_package("no-such-package", "1").state == "bad"
    assert [doctor.check_memory(size).state for size in (10**8, 10**11)] == ["bad", "ok"]
    assert [doctor.check_kernel(one).state for one in ("5.4.0-1", "6.1.0-9")] == ["warn", "ok"]
    assert str(tmp_path) in doctor.check_disk(tmp_path / "not" / "yet").found


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "nvidia-smi"


def test_a_gpu_is_named_and_a_broken_driver_told(smi: Path) -> None:
    assert asyncio.run(doctor.check_gpu()).state == "ok"  # there is none
    smi.write_text("#!/bin/sh\necho 'H200, 143771 MiB'\n")
    smi.chmod(0o755)
    assert "H200, 143771 MiB" in asyncio.run(doctor.check_gpu()).found
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert asyncio.run(doctor.check_gpu()).state == "bad"


def test_an_amd_gpu_is_seen_and_has_to_be_opened(
    smi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "kfd"
    device.touch()
    monkeypatch.setattr(doctor, "AMD_DEVICE", device)
    assert not smi.exists()
    found = asyncio.run(doctor.check_gpu())
    assert found.found.startswith(f"AMD, by {device}")
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = asyncio.run(doctor.check_gpu())
    assert (found.state, "RENDER_GROUP" in found.fix) == ("bad", True)


def test_python_and_pins_of_this_environment_are_well() -> None:
    assert {one.state for one in doctor.check_versions() if one.name != "torch"} == {"ok"}
