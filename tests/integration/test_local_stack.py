"""Real processes: readiness, restarts, and nothing left behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from shared.broker import broker, broker_url
from shared.errors import StackFailed
from shared.local_stack import Program, running
from shared.readiness import http_ready, port_ready
from shared.redis import create_redis

ROOT = Path(__file__).parents[2]
LISTEN = (
    "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1])));"
    "print('listening', flush=True); time.sleep(1000)"
)


def python(name: str, code: str, *args: str, **how) -> Program:
    return Program(name, [sys.executable, "-c", code, *args], **{"cwd": ROOT, **how})


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(pids, within_s=60.0):
    async with asyncio.timeout(within_s):
        while any(is_alive(pid) for pid in pids):  # noqa: ASYNC110  other processes, no event
            await asyncio.sleep(0.05)


async def test_killed_program_is_restarted_and_all_stop(tmp_path, free_port):
    listener = python("listener", LISTEN, str(free_port), ready=port_ready("127.0.0.1", free_port))
    async with running([listener], log_dir=tmp_path) as stack:
        first = stack.pids["listener"]
        os.kill(first, signal.SIGKILL)
        await gone([first])
        async with asyncio.timeout(60):
            while stack.restarts["listener"] == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await stack.ready("listener", 60)
        second = stack.pids["listener"]
        assert second != first
    assert not is_alive(second)
    assert stack.log_path("listener").read_text() == "listening\n" * 2


async def test_groups_start_in_order_and_stop_in_reverse(tmp_path):
    note = "import sys, signal, time, pathlib\nf = pathlib.Path(sys.argv[1])\n"
    code = note + textwrap.dedent("""
        def stop(*_):
            f.open("a").write(f"-{sys.argv[2]} "); sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        f.open("a").write(f"+{sys.argv[2]} ")
        time.sleep(100)
    """)
    journal = tmp_path / "journal"

    def noted(name):
        async def ready():
            wrote = journal.exists() and f"+{name} " in journal.read_text()
            return None if wrote else "nothing written"

        return python(name, code, str(journal), name, ready=ready)

    async with running([noted("a"), [noted("b"), noted("b2")], noted("c")], log_dir=tmp_path):
        pass
    words = journal.read_text().split()
    assert words[0] == "+a"
    assert set(words[1:3]) == {"+b", "+b2"}
    assert words[3:5] == ["+c", "-c"]
    assert set(words[5:7]) == {"-b", "-b2"}
    assert words[7:] == ["-a"]


async def test_stop_is_not_cut_short(tmp_path):
    code = textwrap.dedent("""
        import pathlib, signal, sys, time
        def stop(*_):
            (here / "asked").touch(); time.sleep(0.5); (here / "drained").touch(); sys.exit(0)
        here = pathlib.Path(sys.argv[1])
        signal.signal(signal.SIGTERM, stop)
        (here / "up").touch()
        time.sleep(100)
    """)

    async def ready():
        return None if (tmp_path / "up").exists() else "nothing there"

    async def run():
        slow = python("slow", code, str(tmp_path), ready=ready)
        async with running([slow], log_dir=tmp_path):
            pass

    task = asyncio.create_task(run())
    async with asyncio.timeout(60):
        while not (tmp_path / "asked").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (tmp_path / "drained").exists()


async def test_late_program_is_named_with_what_was_missing(tmp_path, free_port):
    code = "import time; print('loading weights', flush=True); time.sleep(100)"
    slow = python(
        "rollout-0", code, ready=http_ready(f"http://127.0.0.1:{free_port}/readyz"), ready_s=0.8
    )
    with pytest.raises(StackFailed) as caught:
        async with running([slow], log_dir=tmp_path):
            pytest.fail("must not come up")
    text = str(caught.value)
    assert text.startswith(f"rollout-0 was not ready after 0.8 s: GET http://127.0.0.1:{free_port}")
    assert text.endswith("loading weights")


async def test_program_that_dies_at_start_fails_the_stack_with_its_words(tmp_path):
    async def never():
        return "never"

    bad = python("trainer", "import sys; sys.exit('no such checkpoint: x')", ready=never)
    fine = python("sleeper", "import time; time.sleep(100)")
    with pytest.raises(StackFailed) as caught:
        async with running([fine, bad], log_dir=tmp_path):
            pytest.fail("must not come up")
    assert "trainer died 3 times while starting (exit code 1)" in str(caught.value)
    assert str(caught.value).endswith("no such checkpoint: x")


async def test_failure_later_cancels_the_body(tmp_path):
    flag = tmp_path / "broken"
    code = "import sys, time, os\nif os.path.exists(sys.argv[1]): sys.exit(3)\ntime.sleep(100)"

    async def run():
        async with running([python("fragile", code, str(flag))], log_dir=tmp_path) as stack:
            flag.touch()
            os.kill(stack.pids["fragile"], signal.SIGKILL)
            await asyncio.sleep(30)

    with pytest.raises(StackFailed, match=r"fragile died 3 times while starting \(exit code 3\)"):
        await run()


async def test_missing_executable_is_one_sentence(tmp_path):
    with pytest.raises(StackFailed, match=r"ghost cannot be started: .*No such file"):
        async with running([Program("ghost", ["/nonexistent/ghost"])], log_dir=tmp_path):
            pytest.fail("must not come up")


async def test_port_in_use_is_one_sentence(tmp_path, free_port):
    with socket.create_server(("127.0.0.1", free_port)), pytest.raises(StackFailed) as caught:
        async with running([broker(tmp_path / "data", free_port)], log_dir=tmp_path):
            pytest.fail("must not come up")
    assert str(caught.value) == (
        f"broker cannot be started: port {free_port} on 127.0.0.1 is in use."
    )


async def test_child_with_a_session_of_its_own_is_swept_up(tmp_path):
    code = textwrap.dedent("""
        import subprocess, sys, time
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        print(child.pid, flush=True); time.sleep(100)
    """)
    async with running([python("agent", code)], log_dir=tmp_path) as stack:
        first = int(stack.log_path("agent").read_text())
        os.kill(stack.pids["agent"], signal.SIGKILL)
        await gone([first])
        async with asyncio.timeout(60):
            while stack.log_path("agent").read_text().count("\n") < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        second = int(stack.log_path("agent").read_text().split()[1])
        assert is_alive(second)
    await gone([second])


def test_nothing_survives_a_killed_parent(tmp_path, free_port):
    script = textwrap.dedent(f"""
        import asyncio, pathlib, sys
        from shared.broker import broker
        from shared.local_stack import Program, running
        from shared.telemetry import configure_logging

        async def main():
            folder = pathlib.Path({str(tmp_path)!r})
            sleeper = Program("sleeper", [sys.executable, "-c", "import time; time.sleep(300)"])
            async with running([broker(folder / "b", {free_port}), sleeper], log_dir=folder) as s:
                print(*s.pids.values(), flush=True)
                await asyncio.sleep(300)

        configure_logging("parent", level="ERROR")
        asyncio.run(main())
    """)
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE
    ) as parent:
        try:
            assert parent.stdout is not None
            pids = [int(word) for word in parent.stdout.readline().split()]
            assert len(pids) == 2
            assert all(is_alive(pid) for pid in pids)
        finally:
            parent.kill()
    asyncio.run(gone(pids))


async def test_broker_keeps_its_data_when_killed(tmp_path, free_port):
    async with running([broker(tmp_path / "data", free_port)], log_dir=tmp_path) as stack:
        redis = create_redis(broker_url(free_port), process="test")
        await redis.set("key", "kept")
        os.kill(stack.pids["broker"], signal.SIGKILL)
        assert await redis.get("key") == b"kept"  # the client waits until the broker is back
        assert stack.restarts["broker"] == 1
        await redis.aclose()


async def test_lines_are_shown_while_they_are_kept(tmp_path):
    lines = []
    code = "import time; print('one\\ntwo', flush=True); time.sleep(100)"
    async with running(
        [python("talker", code)], log_dir=tmp_path, on_line=lambda *line: lines.append(line)
    ):
        pass
    assert lines == [("talker", "one"), ("talker", "two")]


async def test_stubborn_program_is_killed_after_its_stop_time(tmp_path):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
    async with running([python("stubborn", code, stop_s=0.3)], log_dir=tmp_path) as stack:
        pid = stack.pids["stubborn"]
        began = time.monotonic()
    assert not is_alive(pid)
    assert time.monotonic() - began < 30  # of the 100 that it would sleep
