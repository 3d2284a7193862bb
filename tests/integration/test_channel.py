"""A parent's event loop and a plain child process, over the real socket."""

import asyncio
import sys
import textwrap
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.channel import SyncChannel, listening
from shared.errors import ChannelClosed, DeadlineExceeded, Rejected, RemoteError

ROOT = Path(__file__).parents[2]
CHILD = textwrap.dedent("""
    import os, sys, time
    from shared.channel import SyncChannel
    from shared.errors import Rejected
    from shared.process import die_with_parent

    class EngineBroken(Exception): ...

    die_with_parent()
    channel = SyncChannel.connect(sys.argv[1])
    channel.notify("started", {"pid": os.getpid()})
    waiting = []
    while True:
        request = channel.recv(timeout_s=0.1)
        if request is None:
            continue
        if request.op == "echo":
            channel.reply(request.id, request.payload)
        elif request.op == "later":
            waiting.append(request.id)
        elif request.op == "release":
            for number in reversed(waiting):
                channel.reply(number, {"was": number})
            channel.reply(request.id)
        elif request.op == "reject":
            channel.fail(request.id, Rejected("prompt of 99 tokens exceeds 64"))
        elif request.op == "break":
            channel.fail(request.id, EngineBroken("lost its cache"))
        elif request.op == "exit":
            os._exit(3)
        elif request.op == "huge":
            channel.reply(request.id, {"x": bytes(3 * 2**20)})
""")


@asynccontextmanager
async def child(**how):
    async with listening(**how) as listener:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, listener.address, cwd=ROOT
        )
        try:
            yield await listener.accept(timeout_s=20)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def test_requests_are_answered_and_bytes_stay_bytes():
    payload = {"text": "é", "tokens": b"\x00\xff", "nested": {"list": [1, 2.5, None]}}
    async with child() as channel:
        assert await channel.request("echo", payload, timeout_s=5) == payload
        large = {"x": bytes(range(256)) * 2**15}  # 8 MiB
        assert await channel.request("echo", large, timeout_s=10) == large


async def test_overlapping_requests_are_matched_by_id():
    async with child() as channel:
        late = [asyncio.create_task(channel.request("later", timeout_s=5)) for _ in range(3)]
        await asyncio.sleep(0)
        assert (await channel.request("echo", {"n": 1}, timeout_s=5)) == {"n": 1}
        await channel.request("release", timeout_s=5)
        numbers = [answer["was"] for answer in await asyncio.gather(*late)]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 3


async def test_childs_errors_are_raised_here():
    async with child() as channel:
        with pytest.raises(Rejected, match="prompt of 99 tokens exceeds 64"):
            await channel.request("reject", timeout_s=5)
        with pytest.raises(RemoteError, match="EngineBroken: lost its cache") as caught:
            await channel.request("break", timeout_s=5)
        assert caught.value.kind == "EngineBroken"


async def test_silent_child_is_a_deadline_and_its_late_answer_is_dropped():
    async with child() as channel:
        with pytest.raises(DeadlineExceeded, match=r"waited 0.2 s for the child to answer later"):
            await channel.request("later", timeout_s=0.2)
        await channel.request("release", timeout_s=5)
        assert await channel.request("echo", {"still": True}, timeout_s=5) == {"still": True}


async def test_death_of_the_child_ends_all_pending_requests():
    async with child() as channel:
        waiting = asyncio.create_task(channel.request("later", timeout_s=30))
        with pytest.raises(ChannelClosed):
            await channel.request("exit", timeout_s=30)
        with pytest.raises(ChannelClosed):
            await waiting
        await asyncio.wait_for(channel.closed.wait(), 60)
        with pytest.raises(ChannelClosed, match="echo: the child is gone"):
            await channel.request("echo", timeout_s=5)


async def test_events_reach_the_callback_from_the_first_on():
    events = []
    async with child() as channel:
        channel.on_event = lambda name, payload: events.append((name, payload))
        await channel.request("echo", timeout_s=5)
    assert [name for name, _ in events] == ["started"]
    assert events[0][1]["pid"] > 0


async def test_frames_are_bounded_on_both_sides():
    async with child(max_frame_bytes=2**20) as channel:
        with pytest.raises(ValueError, match="exceeds 1048576"):
            await channel.request("echo", {"x": bytes(2**21)}, timeout_s=5)
        with pytest.raises(ChannelClosed, match="at most 1048576"):
            await channel.request("huge", timeout_s=5)


async def test_nobody_to_accept_is_a_deadline():
    async with listening() as listener:
        with pytest.raises(DeadlineExceeded, match="a child to connect"):
            await listener.accept(timeout_s=0.1)


def test_nobody_to_connect_to_is_a_deadline(tmp_path):
    with pytest.raises(DeadlineExceeded, match="the parent to listen on"):
        SyncChannel.connect(str(tmp_path / "none.sock"), timeout_s=0.1)
