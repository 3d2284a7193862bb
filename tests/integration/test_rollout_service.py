"""A real rollout process on a real broker: jobs, versions, prompts, holds, and deaths."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from shared import topology
from shared.messages import Event, RolloutGroup
from shared.parity.trace import Traced, TraceRequest
from shared.registry import live_replicas
from shared.route_store import load_routes
from shared.routes import unpack_routes
from shared.streams import entries_of, publish
from tests.integration.rollout_world import (
    JOB_ID,
    Server,
    Trainer,
    announce_job,
    announce_version,
    canonical_weights,
    eventually,
    job_document,
    make_prompt,
    probe_of,
    published_groups,
    rollout_process,
    serving_trainer,
    write_checkpoint,
    write_version,
)
from tests.tiny_deepseek_v4 import DEMO

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("versions")
    for version in range(4):
        write_version(folder / str(version), canonical_weights(version % 2), version)
    return {version: folder / str(version) for version in range(4)}


@pytest_asyncio.fixture
async def trainer(versions: dict[int, Path]) -> AsyncIterator[Trainer]:
    async with serving_trainer() as trainer:
        trainer.versions = dict(versions)
        yield trainer


async def serve_version(
    server: Server, redis: Redis, trainer: Trainer, version: int, probe: Any = None
) -> None:
    await eventually(lambda: server.has(state="waiting_for_weights"), "an engine")
    await announce_version(redis, trainer, version)
    committed = await server.update(trainer, version, probe=probe)
    assert committed.status_code == 200, committed.text


async def test_prompts_become_groups_once_weights_are_there(
    redis: Redis, redis_url: str, free_port: int, tmp_path: Path, checkpoint: Path, trainer: Trainer
) -> None:
    async with rollout_process(redis_url, free_port, tmp_path) as server:
        assert (await server.http.get(f"{server.url}/readyz")).status_code == 200
        await announce_job(redis, trainer, job_document(checkpoint))
        for draw in range(6):
            await publish(redis, topology.prompts(JOB_ID), make_prompt(draw).pack())
        await eventually(lambda: server.has(state="waiting_for_weights"), "an engine")
        unready = await server.http.get(f"{server.url}/readyz")
        assert unready.status_code == 503
        assert unready.json()["reason"] == "waiting for weights"
        assert await published_groups(redis) == []

        await serve_version(server, redis, trainer, 0)
        groups = await groups_published(redis, 6)
        assert {group.prompt.draw for group in groups} == set(range(6))
        for group in groups:
            check_group(group, version=0)
        await eventually(lambda: is_empty(redis, topology.prompts(JOB_ID)), "acks")
        (record,) = await live_replicas(redis, "rollout")
        assert (record.state, record.policy_version, record.job_id) == ("serving", 0, JOB_ID)
        assert {event.fields["group_id"] for event in await sampled_events(redis, len(groups))} == {
            group.prompt.group_id for group in groups
        }


async def test_an_update_is_told_by_phase_with_its_probe(
    redis: Redis, redis_url: str, free_port: int, tmp_path: Path, checkpoint: Path, trainer: Trainer
) -> None:
    async with rollout_process(redis_url, free_port, tmp_path) as server:
        await announce_job(redis, trainer, job_document(checkpoint))
        probe = probe_of([[1, 2, 3]], [[-1.0, -1.0]], bound=100.0)
        await serve_version(server, redis, trainer, 0, probe)
        told = await metrics_of(server)
    phases = ("stage", "pause", "load", "restore", "probe", "resume")
    assert [told[f'rollout_update_seconds_count{{phase="{one}"}}'] for one in phases] == [1.0] * 6
    assert told['rollout_update_seconds_sum{phase="probe"}'] > 0
    assert told['rollout_updates_total{outcome="active"}'] == 1.0
    assert 0 < told["rollout_probe_delta"] <= 100.0
    assert told["rollout_policy_version"] == 0.0


async def metrics_of(server: Server) -> dict[str, float]:
    text = (await server.http.get(f"{server.url}/metrics")).text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


async def test_a_held_or_outdated_server_takes_nothing(
    redis: Redis, redis_url: str, free_port: int, tmp_path: Path, checkpoint: Path, trainer: Trainer
) -> None:
    async with rollout_process(redis_url, free_port, tmp_path) as server:
        await announce_job(redis, trainer, job_document(checkpoint))
        await serve_version(server, redis, trainer, 0)
        await redis.hset(topology.holds(JOB_ID), server.name, 0)
        await eventually(lambda: server.has(held_version=0), "the hold")
        await publish(redis, topology.prompts(JOB_ID), make_prompt(0).pack())
        await announce_version(redis, trainer, 1)
        await eventually(lambda: server.has(current_version=1), "the announcement")
        assert (await server.http.get(f"{server.url}/readyz")).status_code == 200
        assert (await metrics_of(server))["rollout_wanted_version"] == 0.0

        await redis.hdel(topology.holds(JOB_ID), server.name)
        await eventually(lambda: server.has(held_version=None), "the release")
        assert (await metrics_of(server))["rollout_wanted_version"] == 1.0
        unready = await server.http.get(f"{server.url}/readyz")
        assert unready.json()["reason"] == "serves version 0, version 1 is wanted"
        assert await published_groups(redis) == []

        assert (await server.update(trainer, 1)).status_code == 200
        (group,) = await groups_published(redis, 1)
        check_group(group, version=1)


async def test_a_lag_lets_a_server_sample_while_a_newer_version_is_on_its_way(
    redis: Redis, redis_url: str, free_port: int, tmp_path: Path, checkpoint: Path, trainer: Trainer
) -> None:
    async with rollout_process(redis_url, free_port, tmp_path) as server:
        lags = {"max_lag": 1}
        await announce_job(redis, trainer, job_document(checkpoint, algorithm=lags))
        await serve_version(server, redis, trainer, 0)
        await announce_version(redis, trainer, 1)
        await eventually(lambda: server.has(current_version=1), "the announcement")
        await publish(redis, topology.prompts(JOB_ID), make_prompt(0).pack())
        (group,) = await groups_published(redis, 1)
        check_group(group, version=0)

        newer = make_prompt(1).model_copy(update={"min_policy_version": 1})
        await publish(redis, topology.prompts(JOB_ID), newer.pack())
        assert (await server.update(trainer, 1)).status_code == 200
        (_, group) = await groups_published(redis, 2)
        check_group(group, version=1)


async def test_updates_in_mid_generation_keep_the_group_with_exact_spans(
    redis: Redis, redis_url: str, free_port: int, tmp_path: Path, checkpoint: Path, trainer: Trainer
) -> None:
    """Each pause mode once, all within the same four completions; their routes survive it, too."""
    document = job_document(
        checkpoint,
        sampling={"context_length": 1024, "max_response_tokens": 400},
        actor={"replay": {"routing": True, "indexer": True}},
    )
    async with rollout_process(redis_url, free_port, tmp_path) as server:
        await announce_job(redis, trainer, document)
        await serve_version(server, redis, trainer, 0)
        endless = make_prompt(0).sampling.model_copy(
            update={"max_response_tokens": 400, "stop_token_ids": []}
        )
        await publish(redis, topology.prompts(JOB_ID), make_prompt(0, sampling=endless).pack())
        for version, mode in enumerate(("in_place", "retract", "abort"), start=1):
            await eventually(lambda: server.has(running=4), "the group to run")
            result = await server.update(trainer, version, mode=mode)
            assert result.status_code == 200, result.text
        (group,) = await groups_published(redis, 1)
        for rollout in group.rollouts:
            assert [span.policy_version for span in rollout.version_spans] == [0, 1, 2, 3]
            assert len(rollout.response_token_ids) == 400
            assert rollout.finish_reason == "length"
        await check_routes(redis, group)


async def check_routes(redis: Redis, group: RolloutGroup) -> None:
    """They are in their key, of every input token, and as the trainer wants them."""
    assert group.routes is not None
    named = {"job_id": JOB_ID, "group_id": group.prompt.group_id}
    blobs = await load_routes(redis, group.routes, **named, num_rollouts=len(group.rollouts))
    for rollout, blob in zip(group.rollouts, blobs, strict=True):
        num_inputs = len(group.prompt.prompt_token_ids) + len(rollout.response_token_ids) - 1
        asked = {"routing": True, "indexer": True, "of": rollout.rollout_id}
        unpack_routes(blob, DEMO, num_inputs, **asked)
    (event,) = await sampled_events(redis, 1)
    assert event.fields["route_bytes"] == group.routes.num_bytes > 0


async def test_a_dead_engine_ends_the_process_and_loses_nothing(
    redis: Redis, redis_url: str, free_port: int, tmp_path: Path, checkpoint: Path, trainer: Trainer
) -> None:
    document = job_document(
        checkpoint, sampling={"context_length": 4096, "max_response_tokens": 4000}
    )
    async with rollout_process(redis_url, free_port, tmp_path) as server:
        await announce_job(redis, trainer, document)
        await serve_version(server, redis, trainer, 0)
        long = make_prompt(0).sampling.model_copy(
            update={"max_response_tokens": 4000, "stop_token_ids": []}
        )
        await publish(redis, topology.prompts(JOB_ID), make_prompt(0, sampling=long).pack())
        await eventually(lambda: server.has(running=4), "the group to run")
        os.kill((await server.get("/v1/info"))["engine_pid"], signal.SIGKILL)
        assert await asyncio.wait_for(server.process.wait(), 20) == 1
        assert await redis.xlen(topology.prompts(JOB_ID)) == 1

    short = job_document(checkpoint, sampling={"context_length": 64, "max_response_tokens": 16})
    await announce_job(redis, trainer, short)  # the context now bounds the response
    async with rollout_process(redis_url, free_port, tmp_path) as server:
        await serve_version(server, redis, trainer, 0)
        (group,) = await groups_published(redis, 1)
        assert [len(rollout.response_token_ids) for rollout in group.rollouts] == [60] * 4


async def test_sigterm_finishes_what_runs_and_exits_0(
    redis: Redis, redis_url: str, free_port: int, tmp_path: Path, checkpoint: Path, trainer: Trainer
) -> None:
    async with rollout_process(redis_url, free_port, tmp_path) as server:
        document = job_document(
            checkpoint, sampling={"context_length": 512, "max_response_tokens": 400}
        )
        await announce_job(redis, trainer, document)
        await serve_version(server, redis, trainer, 0)
        endless = make_prompt(0).sampling.model_copy(
            update={"max_response_tokens": 100, "stop_token_ids": []}
        )
        await publish(redis, topology.prompts(JOB_ID), make_prompt(0, sampling=endless).pack())
        await eventually(lambda: server.has(running=4), "the group to run")
        server.process.terminate()
        assert await asyncio.wait_for(server.process.wait(), 40) == 0
    (group,) = await published_groups(redis)
    assert [rollout.finish_reason for rollout in group.rollouts] == ["length"] * 4
    assert await is_empty(redis, topology.prompts(JOB_ID))
    assert await live_replicas(redis, "rollout") == []


async def test_bad_prompts_are_buried_and_a_killed_service_leaves_no_engine(
    redis: Redis, redis_url: str, free_port: int, tmp_path: Path, checkpoint: Path, trainer: Trainer
) -> None:
    async with rollout_process(redis_url, free_port, tmp_path) as server:
        await announce_job(redis, trainer, job_document(checkpoint))
        stream = topology.prompts(JOB_ID)
        await publish(redis, stream, b"\xc1 no message")
        await publish(redis, stream, make_prompt(1, prompt_token_ids=[5, 320]).pack())
        await publish(redis, stream, make_prompt(2, prompt_token_ids=[5] * 64).pack())
        await publish(redis, stream, make_prompt(4, num_samples=10**7).pack())
        await publish(redis, stream, make_prompt(3).pack())
        await serve_version(server, redis, trainer, 0)
        (group,) = await groups_published(redis, 1)
        assert group.prompt.draw == 3
        await eventually(lambda: is_empty(redis, stream), "the others to be buried")
        letters = entries_of(await redis.xread({topology.dead(stream): b"0"}))
        reasons = sorted(fields[b"reason"].decode() for _, fields in letters)
        assert any("token id 320 is outside the vocabulary of 320" in one for one in reasons)
        assert any("10000000 samples, the job asks for" in one for one in reasons)
        assert any("64 prompt tokens leave no room in a context of 64" in one for one in reasons)
        assert len(reasons) == 4

        engine_pid = (await server.get("/v1/info"))["engine_pid"]
        server.process.kill()

        async def engine_is_gone() -> bool:
            return not await asyncio.to_thread(Path(f"/proc/{engine_pid}/cmdline").exists)

        await eventually(engine_is_gone, "the engine to follow its service")


async def test_generate_and_score_over_http(
    redis: Redis, redis_url: str, free_port: int, tmp_path: Path, checkpoint: Path, trainer: Trainer
) -> None:
    async with rollout_process(redis_url, free_port, tmp_path) as server:
        assert (await server.post("/v1/score", {"sequences": [[1, 2]]})).status_code == 503
        await announce_job(redis, trainer, job_document(checkpoint))
        await serve_version(server, redis, trainer, 0)
        body = {
            "prompts": [{"text": "37+48="}, {"token_ids": [7, 8, 9]}],
            "num_samples": 3,
            "sampling": {"max_response_tokens": 8, "temperature": 0.7},
            "seed": 5,
            "policy_version": 0,
        }
        first = (await server.post("/v1/generate", body)).json()
        assert first["policy_version"] == 0
        assert first == (await server.post("/v1/generate", body)).json()
        sample = first["results"][1][2]
        assert first["results"][1][0] != first["results"][1][1]

        scored = await server.post(
            "/v1/score",
            {"sequences": [[7, 8, 9, *sample["token_ids"]]], "temperature": 0.7},
        )
        assert scored.json()["logprobs"][0][2:] == pytest.approx(sample["logprobs"], abs=1e-5)

        async def status(path: str, **fields: object) -> tuple[int, str]:
            answer = await server.post(path, body | fields if "generate" in path else fields)
            return answer.status_code, str(answer.json()["detail"])

        assert await status("/v1/generate", policy_version=3) == (
            409,
            "policy version 3 is not held; version 0 is",
        )
        code, text = await status("/v1/generate", prompts=[{"token_ids": [1, 999]}])
        assert (code, "token id 999 is outside the vocabulary of 320" in text) == (422, True)
        code, text = await status("/v1/generate", prompts=[{"token_ids": [1] * 64}])
        assert (code, "64 tokens, allowed are 1 to 63" in text) == (422, True)
        code, text = await status("/v1/generate", sampling=body["sampling"] | {"top_k": 2**63})
        assert (code, "2147483648" in text) == (422, True)
        stops = body["sampling"] | {"stop_token_ids": [1] * 1025}
        code, text = await status("/v1/generate", sampling=stops)
        assert (code, "1024" in text) == (422, True)
        code, _ = await status("/v1/generate", prompts=[{"token_ids": [1], "text": "x"}])
        assert code == 422
        code, text = await status("/v1/score", sequences=[[1, -1]])
        assert (code, "'sequences.0.1', 'value': -1" in text) == (422, True)
        code, text = await status("/v1/score", sequences=[[1, 2]], policy_version=1)
        assert code == 409

        rehearsed = await server.post("/v1/weights/updates/0/rehearse", {})
        assert rehearsed.status_code == 200, rehearsed.text
        served = (await server.get("/v1/info"))["effective_checksum"]
        assert rehearsed.json()["effective_checksum"] == served
        assert (await server.post("/v1/weights/updates/1/rehearse", {})).status_code == 409

        asked = TraceRequest(sequences=[[7, 8, 9]], points=["router"], policy_version=0)
        answer = await server.http.post(f"{server.url}/v1/trace", content=asked.pack())
        traced = Traced.unpack(answer.content)
        assert traced.states[0]["layers.0.router"].shape[0] == 3
        for changes, code in (({"policy_version": 9}, 409), ({"sequences": [[1, 9999]]}, 422)):
            wrong = asked.model_copy(update=changes | {}).pack()
            answer = await server.http.post(f"{server.url}/v1/trace", content=wrong)
            assert answer.status_code == code, answer.text
        answer = await server.http.post(f"{server.url}/v1/trace", content=b"\xc1")
        assert answer.status_code == 422


async def groups_published(redis: Redis, num: int) -> list[RolloutGroup]:
    async def enough() -> bool:
        return len(await published_groups(redis)) >= num

    await eventually(enough, f"{num} groups", 60)
    groups = await published_groups(redis)
    assert len(groups) == num
    return groups


async def is_empty(redis: Redis, stream: str) -> bool:
    return bool(await redis.xlen(stream) == 0)


async def sampled_events(redis: Redis, num: int) -> list[Event]:
    """The first `num`, each of which is written after its group."""
    found: list[Event] = []

    async def enough() -> bool:
        reply = await redis.xread({topology.events(JOB_ID): b"0"})
        events = [Event.unpack(fields[b"body"]) for _, fields in entries_of(reply)]
        found[:] = [event for event in events if event.name == "group_sampled"]
        return len(found) >= num

    await eventually(enough, f"{num} events of sampled groups")
    return found


def check_group(group: RolloutGroup, *, version: int) -> None:
    for rollout in group.rollouts:
        num = len(rollout.response_token_ids)
        assert [(s.policy_version, s.num_tokens) for s in rollout.version_spans] == [(version, num)]
        ended = 1 in rollout.response_token_ids.tolist()
        assert rollout.finish_reason == ("stop" if ended else "length")
        assert (rollout.logprobs < 0).all()
