"""Small pieces of HTML that the evaluator's pages are made of. What they are given is escaped."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root{color-scheme:light dark;--line:#8884;--good:#059669;--bad:#dc2626;--weak:#8a8f98}
body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:.2rem 0;overflow-wrap:anywhere}.wide{overflow-x:auto}
h2{font-size:1.15rem;margin:2rem 0 .3rem}
table{border-collapse:collapse;margin:.5rem 0 1.5rem;width:100%}
td,th{padding:.25rem .8rem .25rem 0;text-align:left;vertical-align:top}
th{font-weight:600;border-bottom:1px solid var(--line)}tr+tr td{border-top:1px solid var(--line)}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.name{display:inline-block;min-width:7rem;overflow-wrap:anywhere}
.good{color:var(--good)}.bad{color:var(--bad)}.weak{color:var(--weak)}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.3rem 0;padding:.6rem .8rem;
border-left:3px solid var(--line);background:#8881;font-size:.85rem;max-height:28rem;overflow:auto}
pre.good{border-color:var(--good);color:inherit}pre.bad{border-color:var(--bad);color:inherit}
code{font-size:.9em}a{color:#2563eb}
.bar{display:inline-block;height:.6rem;background:var(--good);vertical-align:middle}
.rest{display:inline-block;height:.6rem;background:#8883;vertical-align:middle}
@media(prefers-color-scheme:dark){a{color:#7aa5ff}}
"""


@dataclass(frozen=True, slots=True)
class Raw:
    """HTML that is HTML already."""

    html: str


Cell = str | int | float | Raw | None


def page(title: str, *parts: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="/assets/icon.svg">'  # the dashboard's, which passes these pages on
        f"<title>{escape(title)} · Tandem</title><style>{STYLE}</style></head>"
        "<body><p><a href='/'>dashboard</a> · <a href='/evals'>evaluations</a></p>"
        f"<h1>{escape(title)}</h1>"
        f"{''.join(parts)}</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Columns whose heads begin with '#' hold numbers and stand on the right."""
    numeric = [name.startswith("#") for name in head]
    names = "".join(_cell("th", name.lstrip("#"), n) for name, n in zip(head, numeric, strict=True))
    lines = "".join(
        f"<tr>{''.join(_cell('td', cell, n) for cell, n in zip(row, numeric, strict=True))}</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{names}</tr>{lines}</table></div>'


def link(address: str, text: str, *, style: str = "") -> Raw:
    return Raw(f'<a class="{style}" href="{escape(address)}">{escape(text)}</a>')


def paragraph(text: str, *, style: str = "") -> str:
    return f'<p class="{style}">{escape(text)}</p>'


def preformatted(text: str, *, style: str = "") -> str:
    return f'<pre class="{style}">{escape(text)}</pre>'


def bar(share: float, *, width_rem: float = 6.0) -> Raw:
    filled = max(0.0, min(share, 1.0)) * width_rem
    return Raw(
        f'<span class="bar" style="width:{filled:.2f}rem"></span>'
        f'<span class="rest" style="width:{width_rem - filled:.2f}rem"></span>'
    )


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def interval(bounds: Sequence[float] | None, *, signed: bool = False) -> str:
    if bounds is None:
        return ""
    sign = "+" if signed else ""
    return f"[{bounds[0]:{sign}.1%}, {bounds[1]:{sign}.1%}]"


def _cell(tag: str, value: Cell, is_number: bool) -> str:
    text = value.html if isinstance(value, Raw) else escape("" if value is None else str(value))
    return f'<{tag} class="n">{text}</{tag}>' if is_number else f"<{tag}>{text}</{tag}>"
