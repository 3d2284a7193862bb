"""The markup that pages of runs are made of: readable offline, in light and dark.

Everything that comes from a job or an event is escaped.
"""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

_STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")

Row = Iterable[object]


def page(title: str, headline: str, sections: Sequence[str]) -> str:
    """A whole document; sections are markup, title and headline are not."""
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · Tandem</title><style>{_STYLE}</style></head><body><main>"
        f"<header><h1>{escape(title)}</h1><p>{escape(headline)}</p></header>"
        f"{''.join(sections)}</main></body></html>\n"
    )


def tiles(shown: Iterable[tuple[str, str]]) -> str:
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in shown
    )
    return f'<dl class="tiles">{cells}</dl>'


def section(title: str, *parts: str) -> str:
    """Parts that are markup start with '<'; the others are sentences. Nothing without a part."""
    if not any(parts):
        return ""
    body = "".join(
        part if part.startswith("<") else f"<p>{escape(part)}</p>" for part in parts if part
    )
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def figure(figures: dict[str, Path], name: str, *, caption: str = "") -> str:
    """The caption is text; nothing for a figure that was not drawn."""
    if name not in figures:
        return ""
    encoded = base64.b64encode(figures[name].read_bytes()).decode("ascii")
    description = escape(caption or name.replace("_", " "))
    image = f'<img alt="{description}" src="data:image/png;base64,{encoded}">'
    return f"<figure>{image}</figure>{note(caption)}"


def note(text: str) -> str:
    """What is above it, for who sees it first."""
    return f'<p class="caption">{escape(text)}</p>' if text else ""


def table(head: Row, rows: Iterable[Row]) -> str:
    top = "".join(f"<th>{escape(str(cell))}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'
