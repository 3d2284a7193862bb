"""Job documents and `--set`."""

from pathlib import Path
from typing import Any

import pytest

from services.cli.document import check_variables, read_job
from shared.errors import ConfigInvalid


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text('name = "demo"\nsteps = 60\n[data]\npath = "a.jsonl"\n')
    return path


@pytest.mark.parametrize(
    ("change", "section", "expected"),
    [
        ("steps=3", None, {"name": "demo", "steps": 3}),
        ("data.path=b.jsonl", "data", {"path": "b.jsonl"}),
        ("data.shuffle=false", "data", {"path": "a.jsonl", "shuffle": False}),
        ("algorithm.clip_low=1e-3", "algorithm", {"clip_low": 0.001}),
        ("data.prompt_template=a=b", "data", {"path": "a.jsonl", "prompt_template": "a=b"}),
    ],
)
def test_set_replaces_one_value(
    job: Path, change: str, section: str | None, expected: dict[str, Any]
) -> None:
    document = read_job(job, [change])
    found = document[section] if section else {k: document[k] for k in ("name", "steps")}
    assert found == expected


@pytest.mark.parametrize("change", ["steps", "=3", "steps.more=3"])
def test_a_change_that_cannot_be_made_is_refused(job: Path, change: str) -> None:
    with pytest.raises(ConfigInvalid, match="--set"):
        read_job(job, [change])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"gone\.toml"):
        read_job(tmp_path / "gone.toml", [])
    broken = tmp_path / "broken.toml"
    broken.write_text("steps = \n")
    with pytest.raises(ConfigInvalid, match=r"broken\.toml is not valid TOML"):
        read_job(broken, [])


def test_a_path_with_a_variable_that_is_not_set_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document = {
        "data": {"path": "$HERE/a.jsonl", "prompt_template": "$5 {problem}"},
        "eval": {"also": [{"data": {"path": "$NOWHERE/b.jsonl"}}]},
        "actor": {"env": {"NCCL_SOCKET_IFNAME": "$ELSEWHERE"}},
    }
    monkeypatch.setenv("HERE", "/x")
    monkeypatch.delenv("NOWHERE", raising=False)
    with pytest.raises(ConfigInvalid, match=r'eval\.also\.0\.data\.path = "\$NOWHERE/b\.jsonl"'):
        check_variables(document)
    monkeypatch.setenv("NOWHERE", "/y")
    check_variables(document)
