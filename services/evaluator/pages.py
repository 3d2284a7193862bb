"""What people look at: all evaluations, one of them, one problem's samples, two side by side."""

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from services.evaluator.archive import Finished
from services.evaluator.comparison import Change, Comparison, Pair, Verdict
from services.evaluator.html import (
    Cell,
    Raw,
    bar,
    interval,
    link,
    page,
    paragraph,
    percent,
    preformatted,
    table,
)
from services.evaluator.samples import GradedSample, Header, ProblemResult
from services.evaluator.trend import Trend, describe_trend
from shared.statistics import LEVEL, shown_ks

VERDICTS: dict[Verdict, str] = {
    "coverage": "wider coverage: problems are solved now that eight samples did not solve before",
    "sharpening": "sharpening: what could be solved is solved more often, and nothing more can be",
    "undecided": "undecided: neither wider coverage nor sharpening alone is shown",
}
HOW_CHANGES_ARE_CALLED = (
    "A change is called one where the p of Fisher's sign-flip test over problems is at most "
    f"{100 * LEVEL:g} %. The 95 % intervals beside it decide nothing."
)
HOW_RUNS_ARE_CALLED = (
    "Coverage is wider where pass@8 rose: problems are solved that were not. pass@1 alone rising "
    "is sharpening: the same problems, solved more surely. "
)


def index_page(
    found: Sequence[Finished],
    trends: dict[str, dict[str, tuple[list[Finished], Trend | None]]],
    verdicts: dict[str, dict[str, Verdict]],
) -> str:
    """All finished evaluations; of runs with several versions also where they are going."""
    if not found:
        return page("Evaluations", paragraph("No evaluation has finished yet."))
    form = "<form action='/evals/compare'><p><button>Compare the two chosen</button></p>"
    parts = [paragraph(HOW_RUNS_ARE_CALLED + HOW_CHANGES_ARE_CALLED, style="weak"), form]
    for job_id, suites in trends.items():
        parts.append(f'<h2 id="{_text(job_id)}">{_text(job_id)}</h2>')
        for suite, (versions, line) in suites.items():
            parts += [
                paragraph(_direction(suite, versions, line, verdicts[job_id].get(suite))),
                _evaluations(versions),
            ]
    return page("Evaluations", *parts, "</form>")


def evaluation_page(one: Finished, header: Header, results: Sequence[ProblemResult]) -> str:
    result = one.result
    title = f"{result['suite']}, version {result['policy_version']} of {one.job_id}"
    return page(
        title,
        paragraph(
            f"{result['num_problems']} problems, {header.samples_per_problem} samples each, all of "
            f"version {header.policy_version}; {result['skipped_problems']} problems skipped; "
            f"{result['seconds']:.0f} s; {result['eval_id']}",
            style="weak",
        ),
        _scores(result),
        _budgets(result.get("budgets", [])),
        "<h2>Problems</h2>",
        _problems(one, results),
    )


def problem_page(one: Finished, result: ProblemResult) -> str:
    title = f"{one.result['suite']}, row {result.row}: {result.num_correct}/{len(result.samples)}"
    parts = [
        Raw(f"<p>{link(f'/evals/{quote(one.name)}', one.name).html}, {_text(result.source)}</p>"),
        Raw("<h2>Prompt</h2>" + preformatted(result.prompt)),
        Raw(f"<p>Gold: <b>{_text(result.gold)}</b></p><h2>Samples</h2>"),
        *(Raw(_sample(number, sample)) for number, sample in enumerate(result.samples, 1)),
    ]
    return page(title, *(part.html for part in parts))


def comparison_page(before: Finished, after: Finished, found: Comparison) -> str:
    only = f"{found.num_only_before} only before, {found.num_only_after} only after"
    return page(
        f"{before.name} → {after.name}",
        paragraph(f"{len(found.pairs)} problems in both; {only}", style="weak"),
        *(_judged(before, after, found) if found.is_judged else [_unjudged(found)]),
        _pairs("All problems, by change", "", sorted(found.pairs, key=_rise), before, after),
    )


def _judged(before: Finished, after: Finished, found: Comparison) -> list[str]:
    return [
        Raw(f"<p><b>{_text(VERDICTS[found.verdict])}.</b></p>").html,
        _changes(found),
        paragraph(HOW_CHANGES_ARE_CALLED, style="weak"),
        _pairs("Gained", "solved at least once now, never before", found.gained, before, after),
        _pairs("Lost", "solved at least once before, never now", found.lost, before, after),
    ]


def _unjudged(found: Comparison) -> str:
    """Numbers alone: with more samples more is "gained", whatever the policy."""
    told = paragraph(
        f"Not asked alike: {', '.join(found.asked_differently)}. What changed may be the "
        "question's doing, not the policy's: nothing is called a change, a gain or a loss."
    )
    return told + _changes(found)


def _direction(
    suite: str, versions: Sequence[Finished], line: Trend | None, verdict: Verdict | None
) -> str:
    if len(versions) == 1:
        return suite
    told = f"{suite}: {describe_trend(line)}."
    return f"{told} First to last: {VERDICTS[verdict]}." if verdict else told


def _evaluations(found: Sequence[Finished]) -> str:
    head = (
        "before",
        "after",
        "evaluation",
        "#version",
        "#pass@1",
        "#95 % over problems",
        "#best k",
    )
    more = ("#truncated", "#unparseable", "#tokens", "#problems")
    return table((*head, *more), [_evaluation(one) for one in found])


def _evaluation(one: Finished) -> list[Cell]:
    result = one.result
    k, value = list(result["pass_at_k"].items())[-1]
    outcomes = result["outcomes"]
    total = max(sum(outcomes.values()), 1)
    return [
        _choice("before", one),
        _choice("after", one),
        link(f"/evals/{quote(one.name)}", one.stem, style="name"),
        result["policy_version"],
        percent(result["pass_at_k"]["1"]),
        interval(result["pass_at_1_ci"]),
        f"pass@{k} {value:.1%}",
        percent(result["truncated_share"]),
        percent(outcomes["unparseable"] / total),
        f"{result['response_tokens_mean']:.0f}",
        result["num_problems"],
    ]


def _choice(name: str, one: Finished) -> Raw:
    return Raw(f'<input type="radio" name="{name}" value="{_text(one.name)}" required>')


def _scores(result: dict[str, Any]) -> str:
    rows: list[Sequence[Cell]] = [
        (f"pass@{k}", percent(result["pass_at_k"][k]), interval(result["pass_at_k_ci"][k]))
        for k in map(str, shown_ks(result["samples_per_problem"]))
    ]
    sampling = interval(result["pass_at_1_sampling_ci"])
    quantiles = result["response_tokens_quantiles"]
    outcomes = ", ".join(f"{kind} {number}" for kind, number in result["outcomes"].items())
    lengths = ", ".join(f"{name} % {value:.0f}" for name, value in quantiles.items())
    rows += [
        ("pass@1, sampling alone", "", f"{sampling} (the same problems sampled again)"),
        ("truncated", percent(result["truncated_share"]), ""),
        ("pass@1 of the untruncated", percent(result["pass_at_1_untruncated"]), ""),
        ("outcomes", "", outcomes),
        ("response tokens", f"{result['response_tokens_mean']:.0f}", f"quantiles {lengths}"),
    ]
    return table(("", "#value", "95 % over problems"), rows)


def _budgets(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return ""
    head = ("#budget", "#pass@1", "#95 %", "#truncated", "#pass@1 of the untruncated", "#95 %")
    lines: list[Sequence[Cell]] = [
        (
            f"{row['budget']:,}",
            percent(row["pass_at_1"]),
            interval(row["pass_at_1_ci"]),
            percent(row["truncated_share"]),
            f"{percent(row['pass_at_1_untruncated'])} of {row['num_untruncated']}",
            interval(row["pass_at_1_untruncated_ci"]),
        )
        for row in rows
    ]
    return "<h2>Response budgets</h2>" + table(head, lines)


def _problems(one: Finished, results: Sequence[ProblemResult]) -> str:
    head = ("#row", "right", "", "gold", "answers", "#tokens", "#cut", "#unparseable", "prompt")
    return table(head, [_problem(one, result) for result in results])


def _problem(one: Finished, result: ProblemResult) -> list[Cell]:
    samples = result.samples
    num = max(len(samples), 1)
    kinds = Counter(sample.outcome.kind for sample in samples)
    return [
        link(f"/evals/{quote(one.name)}/{result.row}", str(result.row)),
        f"{result.num_correct}/{len(samples)}",
        bar(result.num_correct / num),
        _short(result.gold, 24),
        _answers(samples),
        f"{sum(len(sample.token_ids) for sample in samples) / num:.0f}",
        sum(sample.finish_reason == "length" for sample in samples),
        kinds["unparseable"],
        _short(result.prompt, 60),
    ]


def _answers(samples: Sequence[GradedSample]) -> str:
    """The most frequent ones."""
    counts = Counter(_short(_extracted(sample), 16) for sample in samples)
    return ", ".join(
        f"{answer} x{number}" if number > 1 else answer
        for answer, number in counts.most_common(3)
        if answer
    )


def _sample(number: int, sample: GradedSample) -> str:
    outcome = sample.outcome
    style = "good" if sample.is_correct else "bad"
    verdict = "right" if sample.is_correct else "wrong" if outcome.kind == "score" else outcome.kind
    facts = [
        f"answer {_extracted(sample)!r}" if _extracted(sample) else "no answer",
        str(getattr(outcome, "reason", "")),
        f"{len(sample.token_ids)} tokens",
        "cut off by the budget" if sample.finish_reason == "length" else sample.finish_reason,
        *(f"at {budget:,}: {_verdict_at(sample, budget)}" for budget in sorted(sample.cut)),
    ]
    told = " · ".join(fact for fact in facts if fact)
    return (
        f'<p><b class="{style}">{number}: {verdict}</b> <span class="weak">{_text(told)}</span></p>'
        + preformatted(sample.text, style=style)
    )


def _verdict_at(sample: GradedSample, budget: int) -> str:
    outcome, _ = sample.at(budget)
    return f"{outcome.value:g}" if outcome.kind == "score" else outcome.kind


def _extracted(sample: GradedSample) -> str:
    return str(getattr(sample.outcome, "extracted", ""))


def _changes(found: Comparison) -> str:
    head = ("", "#before", "#after", "#difference", "#95 % over problems")
    rows = [_change(change) for change in found.changes.values()]
    if not found.is_judged:
        return table(head, rows)
    judged = [[*row, *_call(one)] for row, one in zip(rows, found.changes.values(), strict=True)]
    return table((*head, "#p", f"p at most {LEVEL:g}?"), judged)


def _change(change: Change) -> list[Cell]:
    difference = change.difference
    return [
        f"pass@{change.k}",
        percent(change.before),
        percent(change.after),
        f"{difference.mean:+.1%}",
        interval((difference.low, difference.high), signed=True),
    ]


def _call(change: Change) -> list[Cell]:
    told = "changed" if change.is_significant else "no change is shown"
    return [
        f"{change.p_value:.4f}",
        Raw(f'<span class="{"good" if change.is_significant else "weak"}">{told}</span>'),
    ]


def _pairs(title: str, what: str, pairs: Sequence[Pair], before: Finished, after: Finished) -> str:
    if not pairs:
        return f"<h2>{_text(title)}: none</h2>"
    rows: list[Sequence[Cell]] = [
        (
            link(f"/evals/{quote(before.name)}/{pair.before.row}", _count(pair.before)),
            link(f"/evals/{quote(after.name)}/{pair.after.row}", _count(pair.after)),
            bar(pair.before.num_correct / max(len(pair.before.samples), 1)),
            bar(pair.after.num_correct / max(len(pair.after.samples), 1)),
            _short(pair.after.gold, 24),
            _short(pair.after.prompt, 80),
        )
        for pair in pairs
    ]
    told = paragraph(what, style="weak") if what else ""
    return f"<h2>{_text(title)}: {len(pairs)}</h2>{told}" + table(
        ("#before", "#after", "", "", "gold", "prompt"), rows
    )


def _count(result: ProblemResult) -> str:
    return f"{result.num_correct}/{len(result.samples)}"


def _rise(pair: Pair) -> float:
    """Least first: what got worse is looked for first."""
    after = pair.after.num_correct / max(len(pair.after.samples), 1)
    return after - pair.before.num_correct / max(len(pair.before.samples), 1)


def _short(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _text(value: object) -> str:
    return escape(str(value))
