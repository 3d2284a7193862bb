"""Read the events, compute, draw, and write summary.json, the PNGs and report.html."""

import json
from pathlib import Path

from services.trainer.report.curves import step_curves
from services.trainer.report.evaluations import finished_evaluations
from services.trainer.report.events import EVENTS_FILE, read_events
from services.trainer.report.page import render_page
from services.trainer.report.summary import summarise
from services.trainer.report.updates import committed_updates

SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"


def write_report(run_dir: Path) -> Path:
    """Write summary.json, PNGs and report.html of a finished or unfinished run; returns the page.

    Takes seconds of CPU: not for an event loop.
    """
    # Here and not above: matplotlib costs half a second and 60 MB, which a process that only reads
    # events through this package shall not pay.
    from services.trainer.report.figures import draw_figures

    run = read_events(run_dir / EVENTS_FILE)
    curves = step_curves(run)
    summary = summarise(run, curves, finished_evaluations(run))
    document = json.dumps(summary.document(), indent=2, allow_nan=False)
    _replace(run_dir / SUMMARY_FILE, document + "\n")
    figures = draw_figures(
        curves,
        summary.evaluations,
        committed_updates(run),
        run_dir,
        drift_bound=summary.delta_logprob.bound,
    )
    return _replace(run_dir / REPORT_FILE, render_page(summary, figures))


def _replace(path: Path, text: str) -> Path:
    """A reader sees the old file or the new one, never half of it."""
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    return unfinished.replace(path)
