"""One real run as an operator sees it: its profile, its folder, its logs, what it told others.

The reward service is slow on purpose: the profile has to name it.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.cli.document import read_job
from services.cli.stack import choose_ports, stack_programs
from services.client import TandemClient
from shared.local_stack import Program, running
from tests.browser.pages import CHROMIUM
from tests.browser.perfetto import opened
from tests.observability import ADDED, Asked, queries

ROOT = Path(__file__).parents[2]
PROFILED_STEPS = 2
SLOW_S = 0.6
SECRET = "a-secret-that-nobody-may-read"
SECRETS = {"HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET, "ROLLOUT_SGLANG__TOKEN": SECRET}
JOB = (
    "steps=200",
    "sampling.groups_per_step=3",
    "sampling.samples_per_prompt=4",
    "sampling.dynamic=false",
    "preflight.enabled=false",
    "tracking.tensorboard=true",
)
PROCESSES = {"trainer", "rank0", "rollout-0", "reward-0", "evaluator"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@dataclass(frozen=True, slots=True)
class Seen:
    """What is left of the run. `result` is what `profile --json` printed, `metrics` the labels of
    each metric that a service answered while the job ran."""

    job_id: str
    run_dir: Path
    log_dir: Path
    result: dict[str, Any]
    trace: dict[str, Any]
    metrics: dict[str, set[str]]

    def of(self, process: str) -> dict[str, Any]:
        return next(one for one in self.result["processes"] if one["process"] == process)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return asyncio.run(_run(tmp_path_factory.mktemp("operated")))


async def _run(tmp_path: Path) -> Seen:
    ports = choose_ports(num_rollout=1, num_reward=1, base=0)
    programs = stack_programs(ports, data_dir=tmp_path / "stack", runs_dir=tmp_path / "runs")
    document = read_job(ROOT / "configs" / "demo.toml", JOB)
    document["eval"] |= {"every_steps": 2, "max_problems": 1, "samples_per_problem": 1}
    log_dir, out = tmp_path / "logs", tmp_path / "trace.json"
    async with (
        asyncio.timeout(220),
        running([_changed(one) for one in programs], log_dir=log_dir),
        TandemClient(ports.trainer_url, patience_s=60) as client,
    ):
        job_id = (await client.submit(document)).job_id
        async for numbered in client.events(job_id):
            if numbered.event.name == "step":
                break
        options = ["--out", str(out), "--trainer", ports.trainer_url]
        told = await _cli("profile", job_id, "--steps", str(PROFILED_STEPS), *options, "--json")
        metrics = await _scraped([*ports.by_name().values()][1:])
        await client.command(job_id, "cancel")
        async for _ in client.events(job_id):
            pass  # until it has ended
    run_dir = tmp_path / "runs" / job_id
    return Seen(job_id, run_dir, log_dir, json.loads(told), json.loads(out.read_text()), metrics)


async def _scraped(ports: list[int]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    async with httpx.AsyncClient(timeout=30) as http:
        for port in ports:
            answer = await http.get(f"http://127.0.0.1:{port}/metrics")
            for family in text_string_to_metric_families(answer.text):
                for one in family.samples:
                    found.setdefault(one.name, set()).update(one.labels)
    return found


def _changed(entry: Any) -> Any:
    """Secrets for all, and a slow reward service."""
    if not isinstance(entry, Program):
        return [_changed(one) for one in entry]
    entry = replace(entry, env={**entry.env, **SECRETS})
    if entry.name != "reward-0":
        return entry
    argv = [sys.executable, "-m", "tests.e2e.slow_reward", *entry.argv[3:]]
    return replace(entry, argv=argv, cwd=ROOT, env={**entry.env, "SLOW_REWARD_S": str(SLOW_S)})


async def _cli(*argv: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", *argv,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said, complaint = await process.communicate()
    assert process.returncode == 0, complaint.decode()
    return said.decode()


# The profile


def test_the_slow_service_is_the_one_waited_for(seen: Seen) -> None:
    assert seen.result["most_waited_for"] == "reward-0"
    assert seen.result["sentences"][-1] == "Most waited for: reward-0."
    for process in ("rank 0", "trainer"):
        assert next(iter(seen.of(process)["waits_for"])) == "reward-0", process
    # Not the engine: what it takes up next may not be drawn within so short a window.
    assert seen.of("reward-0")["works"] > 0.5


def test_shares_of_every_process_add_up(seen: Seen) -> None:
    result = seen.result
    assert (result["steps"], result["missing"], result["dropped_spans"]) == (
        PROFILED_STEPS,
        [],
        {},
    )
    names = {one["process"] for one in result["processes"]}
    assert names == {
        "trainer", "rank 0", "rollout-0", "rollout-0 engine", "reward-0", "evaluator",
    }  # fmt: skip
    for one in result["processes"]:
        assert one["works"] + one["waits"] + one["nothing_to_do"] == pytest.approx(1, abs=1e-6)
        assert sum(one["waits_for"].values()) == pytest.approx(one["waits"], abs=1e-9)


def test_the_time_line_is_a_trace_of_all_processes(seen: Seen) -> None:
    names = _process_names(seen)
    spans = [one for one in seen.trace["traceEvents"] if one["ph"] == "X"]
    assert len(names) == 1 + len(seen.result["processes"])  # the window has its own
    assert {one["pid"] for one in spans} == names.keys()
    rows: dict[tuple[int, int], list[Any]] = {}
    for one in spans:
        assert one["dur"] >= 0
        rows.setdefault((one["pid"], one["tid"]), []).append(one)
    for row in rows.values():
        ordered = sorted(row, key=lambda one: one["ts"])
        assert all(one["ts"] + one["dur"] <= two["ts"] + 1e-3 for one, two in pairwise(ordered))


def test_the_table_is_what_the_time_line_shows(seen: Seen) -> None:
    """A rank works while it is in an operation: added up by hand within the window."""
    rank, engine = (_pid(seen, name) for name in ("rank 0", "rollout-0 engine"))
    spans = [one for one in seen.trace["traceEvents"] if one["ph"] == "X"]
    (window,) = (one for one in spans if one["cat"] == "window")
    assert window["dur"] == pytest.approx(seen.result["seconds"] * 1e6)
    begin_us, end_us = window["ts"], window["ts"] + window["dur"]
    inside = [
        max(0.0, min(one["ts"] + one["dur"], end_us) - max(one["ts"], begin_us))
        for one in spans
        if one["pid"] == rank and one["cat"] == "operations"
    ]
    assert sum(inside) / window["dur"] == pytest.approx(seen.of("rank 0")["works"], abs=1e-3)
    names = {pid: {one["name"] for one in spans if one["pid"] == pid} for pid in (rank, engine)}
    assert names[rank] >= {"train_step", "forward_backward", "optimizer", "export"}
    assert names[engine] >= {"step", "load", "restore", "probe", "switch"}


@pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}")
async def test_perfetto_reads_all_of_the_time_line(seen: Seen) -> None:
    spans = [one for one in seen.trace["traceEvents"] if one["ph"] == "X"]
    async with opened(seen.trace) as perfetto:
        assert await perfetto.complaints() == []
        assert await perfetto.ask("select count(*) from slice") == [[len(spans)]]
        assert await perfetto.ask("select count(*) from slice where depth > 0") == [[0]]
        named = await perfetto.ask("select name from process where name is not null")
        assert {name for (name,) in named} == set(_process_names(seen).values())


def test_groups_go_through_the_services_in_order(seen: Seen) -> None:
    """One clock for all: what was not sampled yet cannot be graded."""
    sampled, graded = (_groups(seen, name) for name in ("rollout-0", "reward-0"))
    both = sampled.keys() & graded.keys()
    assert len(both) >= PROFILED_STEPS
    assert all(sampled[group] < graded[group] for group in both)


def _groups(seen: Seen, process: str) -> dict[str, float]:
    """When each group begins there."""
    pid = _pid(seen, process)
    return {
        one["args"]["group"]: one["ts"]
        for one in seen.trace["traceEvents"]
        if one["ph"] == "X" and one["pid"] == pid and one["cat"] == "groups"
    }


def _pid(seen: Seen, process: str) -> int:
    return next(
        pid for pid, name in _process_names(seen).items() if name.startswith(f"{process} (")
    )


def _process_names(seen: Seen) -> dict[int, str]:
    return {
        one["pid"]: one["args"]["name"]
        for one in seen.trace["traceEvents"]
        if one["name"] == "process_name"
    }


# The metrics


@pytest.mark.parametrize("asked", queries(), ids=lambda one: one.where)
def test_services_have_what_board_and_rules_ask_for(seen: Seen, asked: Asked) -> None:
    metrics = seen.metrics | {"up": set(), "ALERTS": {"alertname", "alertstate"}}  # Prometheus' own
    assert asked.metrics.keys() <= metrics.keys()
    for name, labels in asked.metrics.items():
        assert labels <= metrics[name] | ADDED
    had = set[str]().union(*(metrics[name] for name in asked.metrics))
    assert asked.kept <= had | ADDED


# The run folder


def test_the_folder_says_what_every_process_ran_with(seen: Seen) -> None:
    found = {
        path.stem: json.loads(path.read_text())
        for path in (seen.run_dir / "environment").glob("*.json")
    }
    assert found.keys() == PROCESSES
    for process in found.values():
        assert process["python"].startswith("3.")
        assert process["packages"]["pydantic"]
    assert found["rank0"]["packages"]["megatron-core"]
    assert found["rank0"]["packages"]["torch"] == found["rollout-0"]["engine"]["packages"]["torch"]
    for name in PROCESSES - {"rank0"}:
        assert found[name]["machine"]["cores"] == len(os.sched_getaffinity(0))
        assert found[name]["machine"]["available_memory_bytes"] > 0
        assert found[name]["settings"]["replica"] == name
    assert found["rank0"]["variables"]["OMP_NUM_THREADS"]


def test_no_secret_is_written_anywhere(seen: Seen) -> None:
    for folder in (seen.run_dir, seen.log_dir):
        for path in folder.rglob("*"):
            if path.is_file():
                assert SECRET.encode() not in path.read_bytes(), path


def test_the_folder_has_job_events_metrics_and_report(seen: Seen) -> None:
    job = json.loads((seen.run_dir / "job.json").read_text())
    assert job["algorithm"]["correction"]  # defaults are resolved
    events = [json.loads(line) for line in _text_lines(seen, "events.jsonl")]
    told = [one["fields"] for one in events if one["name"] == "step"]
    metrics = [json.loads(line) for line in _text_lines(seen, "metrics.jsonl")]
    assert [one["step"] for one in metrics] == [one["step"] for one in told]
    for line, fields in zip(metrics, told, strict=True):
        assert line["reward_raw"] == fields["reward_raw"]
        assert line["seconds.wait"] == fields["seconds"]["wait"]
    for name in ("summary.json", "report.html"):
        assert (seen.run_dir / name).is_file()


def test_tensorboard_reads_the_same_numbers(seen: Seen) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (path,) = (seen.run_dir / "tensorboard").iterdir()
    found = {
        event.step: value.tensor.float_val[0]
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tag == "train/reward_raw"
    }
    metrics = [json.loads(line) for line in _text_lines(seen, "metrics.jsonl")]
    assert found == pytest.approx({one["step"]: one["reward_raw"] for one in metrics}, abs=1e-6)


def _text_lines(seen: Seen, name: str) -> list[str]:
    return (seen.run_dir / name).read_text().splitlines()


# The logs


def test_every_line_says_who_wrote_it(seen: Seen) -> None:
    for name in PROCESSES - {"rank0"}:
        for line in _lines(seen.log_dir / f"{name}.log"):
            assert {"event", "level", "timestamp", "service", "replica"} <= line.keys(), line
            assert line["replica"] == name, line


def test_lines_carry_the_job_while_there_is_one(seen: Seen) -> None:
    for name, first in (
        ("rollout-0", "engine_started"),
        ("reward-0", "job_followed"),
        ("evaluator", "evaluation_finished"),
        ("trainer", "job_begins"),
    ):
        lines = _lines(seen.log_dir / f"{name}.log")
        during = _from(lines, first)
        assert during[0]["job_id"] == seen.job_id, name
    for line in _lines(seen.log_dir / "rollout-0.log"):
        if line["service"] == "rollout-engine":
            assert line["job_id"] == seen.job_id, line


def test_lines_of_a_group_name_it(seen: Seen) -> None:
    for name, event in (("rollout-0", "group_sampled"), ("reward-0", "group_graded")):
        groups = [one for one in _lines(seen.log_dir / f"{name}.log") if one["event"] == event]
        assert groups
        assert all(one["group_id"].startswith(f"{seen.job_id}.g") for one in groups)


def test_ranks_say_which_one_they_are(seen: Seen) -> None:
    lines = [one for one in _lines(seen.run_dir / "ranks.log") if one.get("service") == "trainer"]
    assert {one["rank"] for one in lines} == {0}
    assert all(one["replica"] == "rank0" for one in lines)
    assert all(one["job_id"] == seen.job_id for one in _from(lines, "first_weights_loaded"))


def _lines(path: Path) -> list[dict[str, Any]]:
    """Every line of a service is JSON; torchrun, which starts ranks, writes its own."""
    lines = path.read_text().splitlines()
    if path.name == "ranks.log":
        lines = [line for line in lines if line.startswith("{")]
    return [json.loads(line) for line in lines]


def _from(lines: list[dict[str, Any]], event: str) -> Iterator[dict[str, Any]] | Any:
    at = next(place for place, line in enumerate(lines) if line["event"] == event)
    return lines[at:]
