"""report.html: one file with its figures inside, readable offline, in light and dark.

Everything that comes from a job or an event is escaped.
"""

from html import escape
from pathlib import Path
from urllib.parse import quote, urlencode

from services.trainer.report import proofs, sentences
from services.trainer.report.evaluations import Comparison, Evaluation, compare, shown_of
from services.trainer.report.markup import Row, figure, note, page, section, table, tiles
from services.trainer.report.sentences import number, percent, share, signed_share
from services.trainer.report.summary import Summary
from shared.statistics import LEVEL

# What a figure shows, for who sees it first; its legend has the rest.
CAPTIONS = {
    "pass_at_k": "pass@k: the share of held-out problems that at least one of k answers solves, "
    "each version on the same problems. Bars are 95 % intervals over problems.",
    "reward": "Mean reward of the samples that came for a step, with its moving average and a "
    "straight line through all steps. Training sees the grey curve's groups alone.",
    "delta_logprob": "How far the sampler's log-probability of each sampled token is from the "
    "trainer's: the mean over a step's tokens above, the worst one in a hundred below. The dotted "
    "line is what a job of such settings was measured to stay below; no job ends by it.",
    "step_seconds": "What the time of a step went into. Wait is the trainer waiting for groups; "
    "other is what no phase was timed for.",
    "lag": "How many versions behind the trained one a sample's sampler was.",
    "updates": "The last weight updates, phase by phase: sampling stands still in the pause alone, "
    "of which restore and probe are a part where SGLang samples. Below, the share of a version's "
    "bytes that servers pulled, and how far their probe was from the trainer.",
}


def render_page(summary: Summary, figures: dict[str, Path]) -> str:
    title = summary.job_id or "run without events"
    sections = [
        _tiles(summary),
        _warnings(summary),
        section("Before and after", sentences.evaluations(summary), _before_after(summary)),
        section(
            "Offline evaluation",
            _figure(figures, "pass_at_k"),
            _evaluations(summary),
            _pages(summary),
        ),
        section("Online reward", sentences.reward(summary), _figure(figures, "reward")),
        section("Preflight", proofs.preflight_sentence(summary.preflight), _preflight(summary)),
        section(
            "Sampler against trainer",
            sentences.delta_logprob(summary),
            _figure(figures, "delta_logprob"),
        ),
        *_attribution(summary),
        section(
            "Where the time goes",
            sentences.phases(summary),
            _figure(figures, "step_seconds"),
            _phases(summary),
        ),
        section("Staleness", sentences.lag(summary), _figure(figures, "lag")),
        section("The books", sentences.groups(summary), _books(summary)),
        section("Weight updates", _figure(figures, "updates"), _updates(summary)),
        _how(),
    ]
    return page(title, sentences.headline(summary), sections)


def _tiles(summary: Summary) -> str:
    change = summary.before_after
    shown = [
        ("state", summary.state),
        ("steps", f"{summary.steps} / {summary.steps_planned or '?'}"),
        ("time", sentences.duration(summary.wall_s)),
        ("groups trained", str(summary.groups.trained)),
        ("mean |Δ log p|", number(summary.delta_logprob.mean)),
    ]
    if change is not None:
        arrow = f"{share(change.pass_at_1_before)} → {share(change.pass_at_1_after)}"
        shown.insert(1, ("pass@1", arrow))
    return tiles(shown)


def _warnings(summary: Summary) -> str:
    items = "".join(f"<li>{escape(warning)}</li>" for warning in summary.warnings)
    return f'<ul class="warnings">{items}</ul>' if items else ""


def _figure(figures: dict[str, Path], name: str) -> str:
    return figure(figures, name, caption=CAPTIONS[name])


def _before_after(summary: Summary) -> str:
    if summary.before_after is None:
        return ""
    before, after = summary.evaluations[0], summary.evaluations[-1]
    ks = shown_of([before, after])
    rows: list[Row] = [(f"pass@{k}", _estimate(before, k), _estimate(after, k)) for k in ks]
    rows.append(("truncated", percent(before.truncated_share), percent(after.truncated_share)))
    rows.append(
        (
            "response tokens",
            number(before.response_tokens_mean),
            number(after.response_tokens_mean),
        )
    )
    change = summary.before_after
    verdict = "changed" if change.is_significant else "no change is shown"
    told = f"{_difference(change)}, p = {number(change.p_value)}: {verdict}"
    rows.append(("paired difference of pass@1", "", told))
    return table(("", f"version {before.policy_version}", f"version {after.policy_version}"), rows)


def _estimate(evaluation: Evaluation, k: str) -> str:
    value = evaluation.pass_at_k.get(k)
    if k not in evaluation.pass_at_k_ci:
        return share(value)
    low, high = evaluation.pass_at_k_ci[k]
    return f"{share(value)} [{share(low)}, {share(high)}]"


def _difference(change: Comparison) -> str:
    interval = f"[{signed_share(change.low)}, {signed_share(change.high)}]"
    return f"{signed_share(change.difference)} {interval}"


def _pages(summary: Summary) -> str:
    """In words: this page is also read as a file, from where no path leads to a trainer."""
    if not summary.evaluations:
        return ""
    first, last = (
        f"{summary.job_id}/v{one.policy_version:08d}"
        for one in (summary.evaluations[0], summary.evaluations[-1])
    )
    shown = {
        "all evaluations of this run": f"/evals#{quote(summary.job_id)}",
        "samples of the last one": f"/evals/{quote(last)}",
    }
    if first != last:
        pair = urlencode({"before": first, "after": last}, safe="/")
        shown["first and last compared"] = f"/evals/compare?{pair}"
    told = "; ".join(f"{what} <code>{escape(path)}</code>" for what, path in shown.items())
    return f"<p>At the trainer's address, while it and its evaluator run: {told}.</p>"


def _evaluations(summary: Summary) -> str:
    if not summary.evaluations:
        return ""
    first = summary.evaluations[0]
    ks = shown_of(summary.evaluations)
    head = ("version", "pass@1 − first", *(f"pass@{k}" for k in ks), "truncated", "skipped")
    rows: list[Row] = []
    for evaluation in summary.evaluations:
        change = None if evaluation is first else compare(first, evaluation)
        difference = "–" if change is None else _difference(change)
        rows.append(
            (
                evaluation.policy_version,
                difference,
                *(_estimate(evaluation, k) for k in ks),
                percent(evaluation.truncated_share),
                evaluation.skipped_problems,
            )
        )
    return table(head, rows)


def _phases(summary: Summary) -> str:
    total = sum(summary.seconds_per_phase.values())
    if total <= 0:
        return ""
    rows = [
        (name.replace("_", " "), number(seconds), percent(seconds / total))
        for name, seconds in summary.seconds_per_phase.items()
    ]
    return table(("phase", "seconds", "share"), rows)


def _books(summary: Summary) -> str:
    groups = summary.groups
    rows: list[Row] = [
        ("groups sampled", groups.sampled),
        ("groups graded", groups.graded),
        ("groups trained", groups.trained),
        *((f"dropped: {why.replace('_', ' ')}", num) for why, num in groups.dropped.items()),
        ("duplicates refused", groups.duplicates_refused),
        ("prompts skipped (too long)", groups.prompts_skipped),
        *((f"outcome: {kind}", num) for kind, num in summary.outcomes.items()),
        ("samples trained", summary.samples_trained),
        ("tokens trained", summary.tokens_trained),
        ("response tokens sampled", summary.response_tokens_sampled),
        *((name.replace("_", " "), num) for name, num in summary.restarts.items()),
    ]
    return table(("", "number"), rows)


def _preflight(summary: Summary) -> str:
    rows = proofs.preflight_rows(summary.preflight)
    return table(proofs.PREFLIGHT_HEAD, rows) + note(proofs.PREFLIGHT_COLUMNS) if rows else ""


def _attribution(summary: Summary) -> list[str]:
    """A section of its own, if any step was asked."""
    found = summary.attribution
    if not found:
        return []
    rows = table(proofs.attribution_head(found), proofs.attribution_rows(found))
    return [section("Where the drift comes from", proofs.attribution_sentence(found), rows)]


def _updates(summary: Summary) -> str:
    updates = summary.updates
    last = "–" if updates.last_version is None else updates.last_version
    rows: list[Row] = [
        ("versions published", updates.versions_published),
        ("last version", last),
        ("updates committed by servers", updates.committed),
        ("updates failed", updates.failed),
        ("seconds of an update, mean", number(updates.seconds_mean)),
        ("seconds that sampling paused, mean", number(updates.pause_s_mean)),
        ("MB per version, mean", number(updates.bytes_mean / 1e6)),
        ("share of them that servers pulled, mean", number(updates.pulled_share_mean)),
        ("probe's mean |Δ log p|, worst", number(updates.probe_mean_abs_delta_worst)),
    ]
    return table(("", ""), rows)


def _how() -> str:
    return section(
        "How these numbers were made",
        "Everything here is computed from this run's events.jsonl. Intervals are 95 %. Those of "
        "evaluations count problems, not samples; that of a paired difference is Student's over "
        "the differences of each problem, and whether there is a change at all is decided by "
        f"Fisher's sign-flip test of the same differences at {100 * LEVEL:g} %. "
        "Slopes are least squares; their error is the larger of "
        "the ordinary one and Newey and West's, because neighbouring steps are not independent. "
        "|Δ log p| compares the sampler's recorded log-probability of each sampled token with "
        "the trainer's, before the step. The mean and p99 of the whole run are means of the "
        "steps' values, weighted by tokens.",
    )
