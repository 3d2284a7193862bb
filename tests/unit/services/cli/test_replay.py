"""A recorded job as one that trains its recording, with other values where they are asked for."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from services.cli.replay import replay_document, same_weights
from services.trainer.recording import RECORDING_FILE
from shared.errors import ConfigInvalid
from shared.job import Job
from shared.job_algorithm import AlgorithmName, AlgorithmSection


def recorded(run_dir: Path, **algorithm: Any) -> Job:
    job = Job.model_validate(
        {
            "name": "test",
            "steps": 2,
            "record": True,
            "model": {"rollout_checkpoint": "/nowhere"},
            "data": {"path": "/nowhere"},
            "sampling": {"context_length": 32, "max_response_tokens": 8},
            "algorithm": algorithm,
        }
    )
    (run_dir / "job.json").write_text(job.model_dump_json())
    (run_dir / RECORDING_FILE).touch()
    return job


def replayed(run_dir: Path, *changes: str) -> Job:
    return Job.model_validate(replay_document(run_dir, list(changes)))


@pytest.mark.parametrize("name", get_args(AlgorithmName))
def test_without_changes_the_algorithm_is_the_recorded_one(tmp_path: Path, name: str) -> None:
    kl = {"coefficient": 0.1, "estimator": "k2", "place": "loss"}
    job = recorded(tmp_path, name=name, max_lag=3, kl=kl, correction={"high": 3.0})
    again = replayed(tmp_path)
    assert again.algorithm == job.algorithm
    assert (again.mode, again.recording, again.record) == ("train_only", str(tmp_path), False)
    assert again.name == "test-replay"


def test_another_name_brings_its_own_fields_and_keeps_what_was_said_beyond_the_old_one(
    tmp_path: Path,
) -> None:
    recorded(tmp_path, max_lag=3, correction={"high": 3.0})
    found = replayed(tmp_path, "algorithm.name=dapo").algorithm
    assert found == AlgorithmSection.model_validate(
        {"name": "dapo", "max_lag": 3, "correction": {"high": 3.0}}
    )
    assert (found.clip_high, found.aggregation) == (0.28, "token_mean")
    assert replayed(tmp_path, "algorithm.name=gspo").algorithm.policy_loss == "sequence_ratio"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"is no run folder: .*job\.json: No such file"):
        replay_document(tmp_path, [])


def test_a_run_that_was_not_recorded_says_how_to_record_one(tmp_path: Path) -> None:
    recorded(tmp_path)
    (tmp_path / RECORDING_FILE).unlink()
    with pytest.raises(ConfigInvalid, match=r"was not recorded.*Run the job again with `--record`"):
        replay_document(tmp_path, [])


def test_a_replay_may_ask_for_lag_that_the_recorded_job_had_not(tmp_path: Path) -> None:
    assert recorded(tmp_path).deterministic
    assert not replayed(tmp_path, "algorithm.max_lag=4").deterministic


def publish(run_dir: Path, version: int, **checksums: str) -> None:
    folder = run_dir / "weights" / f"v{version:08d}"
    folder.mkdir(parents=True)
    tensors = [
        {
            "name": name, "shape": [1], "dtype": "F32", "shard": 0, "offset": 4 * at,
            "num_bytes": 4, "checksum": digit * 32,
        }
        for at, (name, digit) in enumerate(checksums.items())
    ]  # fmt: skip
    size = 4 * len(tensors)
    shards = [{"index": 0, "num_bytes": size, "checksum": "0" * 32, "part": 0}]
    document = {"format": 1, "job_id": run_dir.name, "policy_version": version}
    manifest = document | {"shards": shards, "tensors": tensors}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_the_weights_of_a_replay_are_held_against_the_runs(tmp_path: Path) -> None:
    run, again, other = tmp_path / "run", tmp_path / "run-replay", tmp_path / "other"
    assert "no published version in common" in same_weights(run, again)
    publish(run, 0, a="0", b="0")
    publish(again, 0, a="0", b="0")
    assert "no published version in common" in same_weights(run, again)
    publish(run, 1, a="1", b="2")
    publish(run, 2, a="3", b="4")
    publish(again, 2, a="3", b="4")
    publish(other, 2, a="3", b="5")
    assert (
        same_weights(run, again) == "Weights v00000002 are those of run: all 2 tensors are equal."
    )
    assert "1 of 2 tensors differ, b among them" in same_weights(run, other)
