"""`explain` on a run folder: a recorded sample's log-probabilities come out again, or why not."""

import asyncio
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from services.cli.explain import Explanation
from services.rollout.engine.embedded import EmbeddedEngine
from services.rollout.engine.requests import EngineSpec, GroupRequest
from services.rollout.engine.weights import build_version
from services.trainer.books import BOOKS_FILE, Books
from services.trainer.recorded import NotRecorded, find_sample
from services.trainer.recording import RECORDING_FILE, Recording
from shared.job import Job
from shared.messages import (
    Rollout,
    RolloutGroup,
    SamplingParams,
    ScoredGroup,
    TrainingBatch,
    TrainingSample,
    Unparseable,
    VersionSpan,
)
from tests.integration.rollout_world import (
    canonical_weights,
    job_document,
    make_prompt,
    write_checkpoint,
    write_version,
)
from tests.tiny_deepseek_v4 import DEMO

ROOT = Path(__file__).parents[2]
JOB_ID = "test-0000"
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose sampler changed from version 0 to 1 in the middle of a completion."""
    folder = tmp_path_factory.mktemp("runs")
    run_dir = folder / JOB_ID
    job = Job.model_validate(job_document(write_checkpoint(folder / "tiny")))
    run_dir.mkdir()
    (run_dir / "job.json").write_text(job.model_dump_json())
    for version in (0, 1):
        write_version(run_dir / "weights" / f"v{version:08d}", canonical_weights(version), version)
    books = Books(run_dir / BOOKS_FILE)
    books.commit_batch(1, body=batch_of(job).pack(), group_ids=[], policy_version=2, batch_facts={})
    books.close()
    return folder


def batch_of(job: Job) -> TrainingBatch:
    """Sampled by the engine as a server would: decoding, with an update in between."""
    arch = DEMO.with_format("fp8")
    engine = EmbeddedEngine(EngineSpec(arch, 4, 64, True, 1))
    versions = [build_version(v, arch, canonical_weights(v)) for v in (0, 1)]
    engine.scheduler.switch(versions[0], "in_place")
    prompt = np.array([5, 6, 7, 8], np.int32)
    sampling = SamplingParams(temperature=TEMPERATURE, max_response_tokens=20)
    engine.scheduler.add(GroupRequest("r", prompt, [0, 1], sampling, seed=3))
    done: list[object] = []
    for _ in range(8):
        done += engine.scheduler.step()
    engine.scheduler.switch(versions[1], "in_place")
    while not done:
        done += engine.scheduler.step()
    ((_, completions),) = done  # type: ignore[misc]
    samples = [
        TrainingSample(
            rollout_id=f"{JOB_ID}.g000000.{i}",
            group_id=f"{JOB_ID}.g000000",
            token_ids=np.concatenate([prompt, one.token_ids]),
            num_prompt_tokens=len(prompt),
            sampler_logprobs=one.logprobs,
            advantage=1.0,
            reward=1.0,
            oldest_version=0,
            version_spans=[
                VersionSpan(policy_version=v, num_tokens=n) for v, n in one.version_spans
            ],
        )
        for i, one in enumerate(completions)
    ]
    return TrainingBatch(
        job_id=JOB_ID,
        step=1,
        policy_version=1,
        temperature=TEMPERATURE,
        samples=samples,
        group_ids=[],
    )


async def test_log_probabilities_of_two_versions_come_out_again(runs: Path) -> None:
    code, out, err = await explain(f"{JOB_ID}.g000000.1", runs, "--json")
    assert (code, err) == (0, "")
    found = Explanation.model_validate_json(out)
    assert found.policy_versions == [0, 1]
    assert len(found.recorded) == 20
    assert found.largest_difference == 0
    code, out, _ = await explain(f"{JOB_ID}.g000000.0", runs)
    assert code == 0
    assert "20 tokens of version 0, 1, trained in step 1" in out
    assert "the same log-probabilities" in out
    assert "sums in another order move this sample by up to" in out


async def test_recorded_group_that_no_step_trained_is_found(runs: Path) -> None:
    batch = recorded_batch(runs)
    sample = batch.samples[0]
    num = sample.num_prompt_tokens
    prompt = make_prompt(7, prompt_token_ids=sample.token_ids[:num], num_samples=1).model_copy(
        update={"sampling": SamplingParams(temperature=TEMPERATURE, max_response_tokens=20)}
    )
    rollout = Rollout(
        rollout_id=f"{prompt.group_id}.0",
        response_token_ids=sample.token_ids[num:],
        logprobs=sample.sampler_logprobs,
        version_spans=sample.spans,
        finish_reason="length",
        text="",
    )
    group = RolloutGroup(
        prompt=prompt, replica="r", rollouts=[rollout], sampled_at_s=0.0, sampling_s=0.0
    )
    recording = Recording(runs / JOB_ID / RECORDING_FILE)
    recording.keep_group(ScoredGroup(group=group, outcomes=[Unparseable()], grading_s=0.0))
    recording.close()
    code, out, err = await explain(rollout.rollout_id, runs)
    assert (code, err) == (0, "")
    assert "recorded, reward None" in out


def recorded_batch(runs: Path) -> TrainingBatch:
    books = Books(runs / JOB_ID / BOOKS_FILE)
    body = books.redo_body(1)
    books.close()
    return TrainingBatch.unpack(body)


def test_a_run_without_a_recording_says_how_to_have_one(runs: Path, tmp_path: Path) -> None:
    shutil.copy(runs / JOB_ID / BOOKS_FILE, tmp_path)
    with pytest.raises(NotRecorded, match="submitted with --record keeps every sample"):
        find_sample(tmp_path, f"{JOB_ID}.g000099.0")
    Recording(tmp_path / RECORDING_FILE).close()
    with pytest.raises(NotRecorded, match=r"which holds samples of steps 1 to 1$"):
        find_sample(tmp_path, f"{JOB_ID}.g000099.0")


async def test_what_is_gone_is_named(runs: Path) -> None:
    code, _, err = await explain(f"{JOB_ID}.g000099.0", runs)
    assert code == 1
    assert "which holds samples of steps 1 to 1" in err
    code, _, err = await explain("nowhere.g000000.0", runs)
    assert (code, "is no run" in err) == (1, True)
    manifest = runs / JOB_ID / "weights" / "v00000000" / "manifest.json"
    hidden = manifest.rename(manifest.with_suffix(".hidden"))
    try:
        code, _, err = await explain(f"{JOB_ID}.g000000.0", runs)
    finally:
        hidden.rename(manifest)
    assert (code, "version 0 is gone; versions held: 1" in err) == (1, True)


async def explain(rollout_id: str, runs: Path, *more: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "explain", rollout_id),
        *("--runs-dir", str(runs), *more),
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 50)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, out.decode(), err.decode()
