"""What a page first gets of a run: bounded, read once, nothing but steps thinned."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.trainer.report.overview import Overviews, thinned


def line(name: str, at_s: float = 0.0, **fields: Any) -> str:
    return json.dumps({"name": name, "at_s": at_s, "fields": fields}) + "\n"


def test_single_groups_are_left_out_but_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(
        line("job_started")
        + line("group_sampled", group_id="a", tokens=3)
        + line("group_dropped", group_id="a", reason="surplus") * 2
    )
    page = Overviews().document(path)
    assert page["after"] == 4
    assert [event["name"] for event in page["events"]] == ["job_started"]
    assert page["counts"] == {"job_started": 1, "group_sampled": 1, "group_dropped": 2}
    assert page["dropped"] == {"surplus": 1}  # a restart told it twice


def test_only_what_was_added_is_read_again(tmp_path: Path) -> None:
    path, overviews = tmp_path / "events.jsonl", Overviews()
    assert overviews.document(path)["after"] == 0  # no file yet
    path.write_text(line("step", 1.0, step=1, loss=0.5) + '{"name": "st')
    assert overviews.document(path)["after"] == 1
    content = path.read_text()
    path.write_text("#" * (len(content) - 12) + content[-12:])  # were it read again, it would show
    with path.open("a") as file:
        file.write('ep", "at_s": 2.0, "fields": {"step": 2}}\n')
    page = overviews.document(path)
    assert (page["after"], page["num_steps"]) == (2, 2)


def test_a_replayed_step_and_a_repeated_evaluation_count_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    told = [line("step", step=1, loss=loss) for loss in (0.5, 0.4)]
    told += [line("eval_finished", suite="a", policy_version=0, seconds=s) for s in (1, 2)]
    path.write_text("".join(told) + "torn\n")
    page = Overviews().document(path)
    fields = [event["fields"] for event in page["events"]]
    assert [one.get("loss", one.get("seconds")) for one in fields] == [0.4, 2]


def test_ten_thousand_steps_become_a_thousand_means() -> None:
    steps = [
        {
            "at_s": number,
            "fields": {
                "step": number, "loss": float(number), "groups": 2, "lag_max": number % 10,
                "lag_tokens": {"0": 1, str(number % 2): 3}, "seconds": {"wait": 1.0},
                "backlog": {"prompts": 6, "groups": number % 2},
                "kl": None, "policy_version": number,
            },
        }
        for number in range(1, 10_001)
    ]  # fmt: skip
    found = thinned(steps, 1000)
    assert len(found) == 1000
    first = found[0]["fields"]
    assert (first["step"], first["num_steps"], first["policy_version"]) == (10, 10, 10)
    assert first["loss"] == pytest.approx(5.5)
    assert (first["groups"], first["lag_max"], first["kl"]) == (20, 9, None)
    assert first["lag_tokens"] == {"0": 20, "1": 15}
    assert first["seconds"] == {"wait": 1.0}
    assert first["backlog"] == {"prompts": 6, "groups": 0.5}  # what waits is no sum
    assert sum(one["fields"]["groups"] for one in found) == 20_000
    assert thinned(steps[:1000], 1000) == steps[:1000]
