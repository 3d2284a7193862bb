"""A parity report as one HTML file with its plots inside, readable offline, in light and dark.

Everything that comes from a model or a request is escaped.
"""

import base64
import io
from collections.abc import Callable, Iterable
from html import escape

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from services.evaluator.parity.report import ParityReport, Worst
from services.evaluator.parity.terminal import headline, number, rows
from shared.parity.offline_request import WalkResult

_BLUE, _ORANGE, _GREY = "#2563eb", "#d97706", "#94a3b8"
_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;width:100%;margin:.5rem 0 1.5rem}
td,th{padding:.25rem .75rem .25rem 0;text-align:left;vertical-align:top}
tr+tr td{border-top:1px solid #8884}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
code{font-size:.9em}mark{background:#f59e0b55;color:inherit}
.pass{color:#059669}.fail{color:#dc2626}
img{max-width:100%;background:#fff;border-radius:6px}
.bar{background:#2563eb88;height:.6rem;display:inline-block}
"""


def render_page(report: ParityReport) -> str:
    title = escape(headline(report))
    state = "pass" if report.passed else "fail"
    verdict = "within the bounds" if report.passed else "; ".join(report.violations)
    notes = "".join(f"<p>{escape(note)}</p>" for note in report.notes)
    parts = [
        f'<h1>{title}</h1><p class="{state}"><b>{state.upper()}</b>: {escape(verdict)}</p>',
        _table(rows(report)),
        f"{_image(_histogram(report))}{_image(_by_position(report))}",
        f"<h2>Worst tokens</h2>{_worst(report.worst)}",
        _routing(report.routing_agreement),
        _walk(report.walk),
        notes,
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>parity: {title}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _table(cells: Iterable[tuple[str, str]]) -> str:
    lines = (f"<tr><td>{escape(n)}</td><td>{escape(v)}</td></tr>" for n, v in cells)
    return f"<table>{''.join(lines)}</table>"


def _worst(tokens: list[Worst]) -> str:
    lines = (
        f'<tr><td class="n">{number(t.delta)}</td><td class="n">{number(t.ours)}</td>'
        f'<td class="n">{number(t.theirs)}</td><td class="n">{t.sequence}:{t.position}</td>'
        f"<td><code>{_context(t)}</code></td></tr>"
        for t in tokens
    )
    names = ("Δ", "ours", "theirs", "sequence:position")
    head = "".join(f'<th class="n">{name}</th>' for name in names)
    return f"<table><tr>{head}<th>in context</th></tr>{''.join(lines)}</table>"


def _context(token: Worst) -> str:
    before = _plain(token.before_text, token.before)
    chosen = _plain(token.token_text, [token.token_id])
    return f"{before} <mark>{chosen}</mark> {_plain(token.after_text, token.after)}"


def _plain(text: str | None, ids: list[int]) -> str:
    return escape(" ".join(map(str, ids)) if text is None else repr(text)[1:-1])


def _routing(shares: dict[int, float] | None) -> str:
    if not shares:
        return ""
    lines = ((f"layer {layer}", f"{share:.2%}") for layer, share in shares.items())
    return f"<h2>Tokens sent to the same experts</h2>{_table(lines)}"


def _walk(walk: WalkResult | None) -> str:
    if walk is None:
        return ""
    top = max((p.size for p in walk.points if np.isfinite(p.size)), default=0.0)
    lines = "".join(
        f"<tr><td>{_marked(p.label, walk.first)}</td>"
        f'<td class="n">{p.size:.2g}</td><td class="n">{p.share:.1%}</td><td style="width:40%">'
        f'<span class="bar" style="width:{_share(p.size, top):.0f}%"></span></td></tr>'
        for p in walk.points
    )
    rows = f", of up to {walk.row_share:.0%} of rows" if walk.row_share else ""
    told = (
        f"<p>{escape(walk.verdict)} ({walk.num_tokens} tokens, tolerance {walk.tolerance:g}{rows})"
        "</p><p>Columns: the largest departure, and the share of rows beyond the tolerance.</p>"
    )
    return f"<h2>Layer walk, {escape(walk.mode)}</h2>{told}<table>{lines}</table>"


def _marked(label: str, first: str | None) -> str:
    return f"<mark>{escape(label)}</mark>" if label == first else escape(label)


def _share(departure: float, top: float) -> float:
    """Percent of the longest bar; what is not finite fills it."""
    if not np.isfinite(departure):
        return 100.0
    return 100 * departure / top if top > 0 else 0.0


def _histogram(report: ParityReport) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        edges, counts = np.array(report.histogram.edges), report.histogram.counts
        axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=_BLUE, edgecolor="white")
        axes.set_xscale("log")
        axes.set(xlabel="|Δ log p|", ylabel="tokens", title="Tokens by difference")
        if report.figures.mean:
            axes.axvline(report.figures.mean, color=_ORANGE, label="mean")
            axes.legend(frameon=False)

    return draw


def _by_position(report: ParityReport) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        at = [(part.start + part.stop - 1) / 2 for part in report.by_position]
        largest = [part.max or 0.0 for part in report.by_position]
        mean = [part.mean or 0.0 for part in report.by_position]
        axes.plot(at, largest, ".-", color=_GREY, linewidth=1, label="largest")
        axes.plot(at, mean, ".-", color=_BLUE, label="mean")
        axes.set(xlabel="position in the sequence", ylabel="|Δ log p|", title="By position")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)

    return draw


def _image(draw: Callable[[Axes], None]) -> str:
    figure = Figure(figsize=(8, 3.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    draw(axes)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    data = base64.b64encode(file.getvalue()).decode()
    return f'<p><img alt="{escape(axes.get_title())}" src="data:image/png;base64,{data}"></p>'
