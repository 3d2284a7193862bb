"""One chain for our records and everybody else's."""

import json
import logging

import structlog

from shared.telemetry import bind_process, configure_logging, counter


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_json_lines_carry_identity_and_fields(capsys):
    configure_logging("reward", json=True, replica="r1")
    with structlog.contextvars.bound_contextvars(job_id="j"):
        structlog.get_logger().info("group_graded", tokens=7)
    logging.getLogger("library").warning("from %s", "stdlib")
    ours, theirs = lines(capsys)
    assert (
        ours.items()
        >= {
            "event": "group_graded",
            "level": "info",
            "service": "reward",
            "replica": "r1",
            "job_id": "j",
            "tokens": 7,
        }.items()
    )
    assert theirs.items() >= {"event": "from stdlib", "level": "warning", "replica": "r1"}.items()


def test_tracebacks_are_one_json_line(capsys):
    configure_logging("reward", json=True)
    try:
        int("lost")
    except ValueError:
        structlog.get_logger().exception("grading_failed")
    (line,) = lines(capsys)
    assert "ValueError: invalid literal" in line["exception"]


def test_console_is_for_people(capsys):
    configure_logging("reward", json=False)
    structlog.get_logger().info("group_graded", tokens=7)
    assert "group_graded" in (shown := capsys.readouterr().err)
    assert "tokens=7" in shown


def test_records_below_the_level_are_dropped(capsys):
    configure_logging("reward", json=True, level="WARNING")
    structlog.get_logger().info("quiet")
    logging.getLogger("library").info("quiet too")
    assert lines(capsys) == []


def test_metrics_of_one_name_are_one():
    assert counter("trial_total", "Trials.", ("kind",)) is counter(
        "trial_total", "Trials.", ("kind",)
    )


def test_ids_of_the_process_are_on_every_line_until_they_are_taken_away(capsys):
    configure_logging("trainer", json=True, replica="rank3", rank=3)
    bind_process(job_id="j-1")
    logging.getLogger("library").warning("busy")
    structlog.get_logger().info("step_finished", job_id="j-2")  # what a line says itself counts
    bind_process(job_id=None)
    structlog.get_logger().info("idle")
    theirs, own, idle = lines(capsys)
    assert (theirs["job_id"], theirs["rank"], theirs["replica"]) == ("j-1", 3, "rank3")
    assert own["job_id"] == "j-2"
    assert "job_id" not in idle
