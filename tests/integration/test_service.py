"""A service process from outside: exit codes, draining, health."""

import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
SERVICE = textwrap.dedent("""
    import asyncio, contextlib, sys
    from fastapi import FastAPI
    from shared.service import health_router, serve
    from shared.telemetry import configure_logging

    mode, port, drain_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

    @contextlib.asynccontextmanager
    async def lifespan(app):
        if mode == "broken":
            raise RuntimeError("no checkpoint")
        if mode == "slow-start":
            print("starting", flush=True)
            await asyncio.sleep(60)
        app.state.greeting = "hello"
        yield
        print("closed", flush=True)

    app = FastAPI(lifespan=lifespan)
    app.include_router(health_router(lambda: "engine is loading" if mode == "unready" else None))

    async def good(stop):
        print(app.state.greeting, flush=True)
        await stop.wait()
        print("draining", flush=True)
        await asyncio.sleep({"good": 2.0, "stuck": 100}.get(mode, 0))
        print("drained", flush=True)

    async def bad(stop):
        await asyncio.sleep(0.1)
        raise RuntimeError("engine died")

    async def leaves(stop):
        return

    configure_logging("trial", json=True)
    workers = {"crash": [good, bad], "leave": [good, leaves]}.get(mode, [good])
    serve(app, host="127.0.0.1", port=port, workers=workers, drain_s=drain_s)
""")


@contextmanager
def service(mode: str, port: int, drain_s: float = 60.0) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", SERVICE, mode, str(port), str(drain_s)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(argv, cwd=ROOT, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(port: int, path: str, status: int) -> httpx.Response:
    deadline_s = time.monotonic() + 60
    while True:
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}{path}", timeout=2)
            if answer.status_code == status:
                return answer
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline_s, f"{path} never answered {status}"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_drains_then_exits_with_0(free_port, number):
    with service("good", free_port) as process:
        wait_for(free_port, "/readyz", 200)
        process.send_signal(number)
        assert wait_for(free_port, "/readyz", 503).json()["reason"] == "draining"
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.split() == ["hello", "draining", "drained", "closed"]


def test_crash_of_a_worker_ends_all_with_1(free_port):
    with service("crash", free_port) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out.split() == ["hello", "draining", "drained", "closed"]
    assert "engine died" in err
    assert '"worker_crashed"' in err


def test_worker_that_returns_unasked_is_a_crash(free_port):
    with service("leave", free_port) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "worker_returned_unasked" in err


def test_late_worker_is_cut_off_with_1(free_port):
    with service("stuck", free_port, drain_s=0.3) as process:
        wait_for(free_port, "/readyz", 200)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "tasks_late" in err


def test_port_in_use_is_one_sentence(free_port):
    with socket.create_server(("127.0.0.1", free_port)), service("good", free_port) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert err == (
        f"Cannot listen on 127.0.0.1:{free_port}: Address already in use. "
        "Choose another with --port.\n"
    )


def test_failed_start_exits_with_1(free_port):
    with service("broken", free_port) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "no checkpoint" in err


def test_stop_while_starting_is_bounded(free_port):
    with service("slow-start", free_port, drain_s=0.3) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starting\n"
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=50)


def test_health_names_the_reason(free_port):
    with service("unready", free_port):
        assert wait_for(free_port, "/readyz", 503).json() == {
            "status": "unready",
            "reason": "engine is loading",
        }
        health = wait_for(free_port, "/healthz", 200).json()
        assert health == {"status": "degraded", "reason": "engine is loading"}
        metrics = wait_for(free_port, "/metrics", 200)
        assert "python_info" in metrics.text
