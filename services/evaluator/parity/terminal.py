"""A parity report for a terminal: verdict, figures, worst tokens, and where the sides part."""

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from services.evaluator.parity.report import Figures, ParityReport, Worst
from shared.parity.offline_request import WalkResult

WORST_SHOWN = 5
POINTS_SHOWN = 8


def print_report(report: ParityReport, console: Console) -> None:
    for part in _parts(report):
        console.print(part, highlight=False, soft_wrap=not isinstance(part, Table))


def number(value: float | None) -> str:
    """Three digits, or a dash where there is no finite value."""
    return "–" if value is None else f"{value:.3g}"


def headline(report: ParityReport) -> str:
    version = "" if report.policy_version is None else f", version {report.policy_version}"
    return f"{report.ours} against {report.theirs}{version}"


def rows(report: ParityReport) -> list[tuple[str, str]]:
    """Name and value of every figure, in the order in which one reads them."""
    figures = report.figures
    shown = [
        ("tokens", f"{figures.num_tokens} in {figures.num_sequences} sequences"),
        *_deltas(figures),
        ("k1", number(figures.k1)),
        ("k3", number(figures.k3)),
    ]
    if figures.num_not_finite:
        shown.append(("not finite", str(figures.num_not_finite)))
    if report.argmax_agreement is not None:
        shown.append(("same best token", f"{report.argmax_agreement:.2%}"))
    if report.routing_agreement:
        layer, share = min(report.routing_agreement.items(), key=lambda item: item[1])
        shown.append(("same experts", f"{share:.2%} in layer {layer}, the lowest"))
    if report.decoding is not None:
        itself = f"mean {number(report.decoding.mean)}, max {number(report.decoding.max)}"
        shown.append(("sampler against its own score", itself))
    if not report.sampled_by_ours:
        shown.append(("note", "the first side did not sample these tokens: k1, k3 are no KL"))
    return shown


def _deltas(figures: Figures) -> list[tuple[str, str]]:
    named = (("mean", figures.mean), ("p50", figures.p50), ("p99", figures.p99))
    return [(f"|Δ log p| {name}", number(v)) for name, v in (*named, ("max", figures.max))]


def _parts(report: ParityReport) -> Iterator[RenderableType]:
    yield headline(report)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows(report):
        table.add_row(name, value)
    yield table
    yield _worst_table(report.worst[:WORST_SHOWN])
    if report.walk is not None:
        yield f"layer walk ({report.walk.mode}): {report.walk.verdict}"
        yield _walk_table(report.walk)
    yield from report.notes
    yield verdict(report)


def verdict(report: ParityReport) -> Text:
    if report.passed:
        return Text("PASS: within the bounds", style="green")
    return Text(f"FAIL: {'; '.join(report.violations)}", style="red")


def _worst_table(tokens: list[Worst]) -> Table:
    table = Table(title="worst tokens", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("Δ", "ours", "theirs", "sequence:position", "in context"):
        table.add_column(column, justify="left" if column == "in context" else "right")
    for token in tokens:
        place = f"{token.sequence}:{token.position}"
        values = (number(value) for value in (token.delta, token.ours, token.theirs))
        table.add_row(*values, place, context(token))
    return table


def context(token: Worst) -> Text:
    """The token among its neighbours, marked; ids where there is no text."""
    text = Text()
    text.append(_plain(token.before_text, token.before), style="dim")
    text.append(f"⟦{_plain(token.token_text, [token.token_id])}⟧", style="bold")
    text.append(_plain(token.after_text, token.after), style="dim")
    return text


def _plain(text: str | None, ids: list[int]) -> str:
    return " ".join(map(str, ids)) if text is None else repr(text)[1:-1]


def _walk_table(walk: WalkResult) -> Table:
    """The points that depart most, in order of computation."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    largest = sorted(walk.points, key=lambda point: -point.size)[:POINTS_SHOWN]
    for point in walk.points:
        if point in largest and point.size > 0:
            mark = " <- first" if point.label == walk.first else ""
            table.add_row(point.label, f"{point.size:.2g}", mark)
    return table
