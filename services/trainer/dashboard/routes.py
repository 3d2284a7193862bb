"""The page and its assets. Only files named here are served, whatever a path says."""

from pathlib import Path

from fastapi import APIRouter, HTTPException
from fastapi.responses import FileResponse

_ASSETS = Path(__file__).parent / "assets"
_FILES = {
    "app.js": "text/javascript",
    "run.js": "text/javascript",
    "axes.js": "text/javascript",
    "charts.js": "text/javascript",
    "plots.js": "text/javascript",
    "form.js": "text/javascript",
    "samples.js": "text/javascript",
    "tables.js": "text/javascript",
    "wishes.js": "text/javascript",
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
    "vendor/uPlot.iife.min.js": "text/javascript",
    "vendor/uPlot.min.css": "text/css",
    "vendor/uPlot.LICENSE": "text/plain",
}
# Scripts and styles of ours only: text from a job or an event can never become code.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> FileResponse:
    return FileResponse(_ASSETS / "page.html", media_type="text/html", headers=_HEADERS)


@router.get("/samples")
async def samples() -> FileResponse:
    return FileResponse(_ASSETS / "samples.html", media_type="text/html", headers=_HEADERS)


@router.get("/assets/{name:path}")
async def asset(name: str) -> FileResponse:
    if name not in _FILES:
        raise HTTPException(404, f"no asset {name!r}")
    return FileResponse(_ASSETS / name, media_type=_FILES[name], headers=_HEADERS)
