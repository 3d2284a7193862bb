"""Routes beside their groups' messages: they live as long as the message, or the group is lost."""

import json
from pathlib import Path

import pytest
from redis.asyncio import Redis

from shared import topology
from shared.dead_letters import dead_letters
from shared.errors import Rejected
from shared.job import Job
from shared.messages import RolloutGroup, StoredRoutes
from shared.route_store import (
    KEEP_S,
    RoutesLost,
    delete_all_routes,
    delete_routes,
    load_routes,
    store_routes,
)
from shared.routes import pack_routes
from tests.integration.conductor_world import (
    JOB_ID,
    make_job,
    run_to_end,
    running_world,
)
from tests.integration.test_conductor import check_books
from tests.tiny_deepseek_v4 import DEMO
from tests.unit.shared.test_routes import random_routes

GROUP = {"job_id": JOB_ID, "group_id": "g1"}


async def keys(redis: Redis) -> list[bytes]:
    return [key async for key in redis.scan_iter(match=topology.all_routes(JOB_ID))]


async def test_what_was_stored_comes_back_until_it_is_deleted(redis: Redis) -> None:
    stored = await store_routes(redis, **GROUP, blobs=[b"one", b""])
    (key,) = await keys(redis)
    assert 0 < await redis.ttl(key) <= KEEP_S
    assert stored.num_bytes == await redis.strlen(key)
    assert await load_routes(redis, stored, **GROUP, num_rollouts=2) == [b"one", b""]
    assert await store_routes(redis, **GROUP, blobs=[b"one", b""]) == stored
    other = await store_routes(redis, **GROUP, blobs=[b"two", b""])  # of another sampler
    await delete_routes(redis, stored, **GROUP)
    with pytest.raises(RoutesLost, match="is gone"):
        await load_routes(redis, stored, **GROUP, num_rollouts=2)
    assert await load_routes(redis, other, **GROUP, num_rollouts=2) == [b"two", b""]
    await store_routes(redis, job_id="other", group_id="g1", blobs=[b"one"])
    assert await delete_all_routes(redis, JOB_ID) == 1
    assert await redis.exists(*[key async for key in redis.scan_iter(match="*other*")]) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xc1", "1 bytes of routes with digest .*; 6 with .* were told"),
        (None, "routes of 1 rollouts, it has 2"),
    ],
)
async def test_values_that_are_not_what_the_message_told_are_refused(
    redis: Redis, body: bytes | None, message: str
) -> None:
    stored = await store_routes(redis, **GROUP, blobs=[b"one"])
    if body is not None:
        await redis.set(topology.routes(JOB_ID, "g1", stored.digest), body)
    with pytest.raises(Rejected, match=message):
        await load_routes(redis, stored, **GROUP, num_rollouts=2)


def test_a_message_cannot_name_any_other_key() -> None:
    with pytest.raises(ValueError, match="should match pattern"):
        StoredRoutes(digest="x" * 24 + ":current", num_bytes=1)


def replaying_job(folder: Path) -> Job:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(DEMO.to_config()))
    return make_job(
        model={"rollout_checkpoint": str(model)},
        actor={"replay": {"routing": True, "indexer": True}},
    )


class Recorder:
    """Stores routes of every group, but for draws that are to lose or spoil theirs."""

    def __init__(self, redis: Redis, *, lose: int = -1, spoil: int = -1, forget: int = -1) -> None:
        self._redis = redis
        self._lose, self._spoil, self._forget = lose, spoil, forget

    async def __call__(self, group: RolloutGroup) -> RolloutGroup:
        prompt, routes = group.prompt, []
        if prompt.draw == self._forget:
            return group
        for index, rollout in enumerate(group.rollouts):
            num_inputs = len(prompt.prompt_token_ids) + len(rollout.response_token_ids) - 1
            routes.append(random_routes(num_inputs, seed=index))
        if prompt.draw == self._spoil:
            assert routes[1].expert_ids is not None
            routes[1].expert_ids[3, 2, 1] = 200
        named = {"job_id": JOB_ID, "group_id": prompt.group_id}
        blobs = [pack_routes(one) for one in routes]
        stored = await store_routes(self._redis, **named, blobs=blobs)
        if prompt.draw == self._lose:
            await delete_routes(self._redis, stored, **named)
        return group.model_copy(update={"routes": stored})


@pytest.mark.parametrize(
    "crash_at", [[], ["packed", "committed", "trained", "acked"]], ids=["whole", "crashes"]
)
async def test_routes_reach_every_batch_and_no_key_is_left(
    redis: Redis, tmp_path: Path, crash_at: list[str]
) -> None:
    crashes = len(crash_at)
    async with running_world(redis, tmp_path / "run", job=replaying_job(tmp_path)) as world:
        world.complete = Recorder(redis)
        assert await run_to_end(world, crash_at=crash_at) == 1 + crashes
        check_books(world)
        assert {event["reason"] for event in world.events("group_dropped")} <= {
            "no_variance_all_wrong",
            "surplus",
        }
        steps = world.events("step")
        assert len(steps) == 4
        assert all(step["route_bytes"] > 6 * 100 for step in steps)  # six samples a step
    assert await keys(redis) == []


async def test_lost_routes_drop_their_group_and_another_is_drawn(
    redis: Redis, tmp_path: Path
) -> None:
    async with running_world(redis, tmp_path / "run", job=replaying_job(tmp_path)) as world:
        world.complete = Recorder(redis, lose=1)
        await run_to_end(world)
        check_books(world)
        lost = [e for e in world.events("group_dropped") if e["reason"] == "routes_lost"]
        assert [event["group_id"] for event in lost] == [f"{JOB_ID}.g000001"]
        assert lost[0]["reward_mean"] == 0.5


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("spoil", f"{JOB_ID}.g000001.1: expert 200 at token 3, layer 2; the model has 8"),
        ("forget", f"{JOB_ID}.g000001 has no routes, which actor.replay asks for"),
    ],
)
async def test_routes_that_cannot_be_right_bury_their_group(
    redis: Redis, tmp_path: Path, fault: str, reason: str
) -> None:
    async with running_world(redis, tmp_path / "run", job=replaying_job(tmp_path)) as world:
        world.complete = Recorder(redis, **{fault: 1})
        await run_to_end(world)
        check_books(world)
        (letter,) = await dead_letters(redis, topology.groups(JOB_ID))
        assert reason in letter.reason
        (buried,) = [e for e in world.events("group_dropped") if e["reason"] == "buried"]
        assert reason in buried["cause"]
