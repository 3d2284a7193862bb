"""Finished evaluations over HTTP: pages for people, the same comparison as JSON."""

import asyncio
from typing import Annotated, Any, cast

from fastapi import APIRouter, HTTPException, Path, Query, Request
from fastapi.responses import HTMLResponse

from services.evaluator import pages
from services.evaluator.archive import Archive, Finished, NoEvaluation
from services.evaluator.compared import ComparedEvals, told
from services.evaluator.comparison import NotComparable, Verdict
from shared.answers import failures
from shared.rest_parameters import MAX_ID_CHARS, MAX_NUMBER, JobId

_UNKNOWN = failures({404: "no such evaluation"})
_PAIR = _UNKNOWN | failures({422: "a name is too long, or the two have no problem in common"})

Before = Annotated[
    str, Query(max_length=2 * MAX_ID_CHARS, description="the earlier one, as job/evaluation")
]
After = Annotated[
    str, Query(max_length=2 * MAX_ID_CHARS, description="the later one, as job/evaluation")
]
Stem = Annotated[
    str, Path(max_length=MAX_ID_CHARS, description="the evaluation's name within the job")
]
Row = Annotated[int, Path(ge=0, le=MAX_NUMBER, description="the problem's row in its data file")]

router = APIRouter(tags=["evaluations"])


@router.get("/evals", response_class=HTMLResponse)
async def index(request: Request) -> HTMLResponse:
    """All finished evaluations, their trends, and a choice of two to compare."""
    return await _page(_index, _archive(request))


@router.get("/evals/compare", response_class=HTMLResponse, responses=_PAIR)
async def compare(before: Before, after: After, request: Request) -> HTMLResponse:
    """Two evaluations, each named job/evaluation: what changed, what was gained and lost."""
    return await _page(_comparison, _archive(request), before, after)


@router.get("/evals/{job_id}/{stem}", response_class=HTMLResponse, responses=_UNKNOWN)
async def evaluation(job_id: JobId, stem: Stem, request: Request) -> HTMLResponse:
    """One evaluation: its numbers, and each problem with its samples."""
    return await _page(_evaluation, _archive(request), job_id, stem)


@router.get("/evals/{job_id}/{stem}/{row}", response_class=HTMLResponse, responses=_UNKNOWN)
async def problem(job_id: JobId, stem: Stem, row: Row, request: Request) -> HTMLResponse:
    """Every sample of one problem: text, extracted answer, verdict."""
    return await _page(_problem, _archive(request), job_id, stem, row)


@router.get("/v1/evals/compare", responses=_PAIR)
async def comparison(before: Before, after: After, request: Request) -> ComparedEvals:
    """The comparison's numbers; problems are named by their rows."""
    found = await _off_the_loop(_archive(request).compare, before, after)
    return told(found, before=before, after=after)


def _index(archive: Archive) -> str:
    found = archive.all()
    jobs = list(dict.fromkeys(one.job_id for one in found))
    trends = {job_id: archive.trends(job_id) for job_id in jobs}
    verdicts: dict[str, dict[str, Verdict]] = {
        job_id: {
            suite: archive.compare(versions[0].name, versions[-1].name).verdict
            for suite, (versions, line) in suites.items()
            if line is not None
        }
        for job_id, suites in trends.items()
    }
    return pages.index_page(found, trends, verdicts)


def _evaluation(archive: Archive, job_id: str, stem: str) -> str:
    header, results = archive.samples(job_id, stem)
    return pages.evaluation_page(archive.get(job_id, stem), header, results)


def _problem(archive: Archive, job_id: str, stem: str, row: int) -> str:
    for result in archive.samples(job_id, stem)[1]:
        if result.row == row:
            return pages.problem_page(archive.get(job_id, stem), result)
    raise NoEvaluation(f"{job_id}/{stem} has no row {row}")


def _comparison(archive: Archive, before: str, after: str) -> str:
    found = archive.compare(before, after)
    return pages.comparison_page(_named(archive, before), _named(archive, after), found)


def _named(archive: Archive, name: str) -> Finished:
    job_id, _, stem = name.partition("/")
    return archive.get(job_id, stem)


async def _page(render: Any, *given: Any) -> HTMLResponse:
    return HTMLResponse(await _off_the_loop(render, *given))


async def _off_the_loop(work: Any, *given: Any) -> Any:
    """Files are read and samples resampled in a thread; what is missing is a 404."""
    try:
        return await asyncio.to_thread(work, *given)
    except NoEvaluation as err:
        raise HTTPException(404, str(err)) from err
    except NotComparable as err:
        raise HTTPException(422, str(err)) from err


def _archive(request: Request) -> Archive:
    return cast(Archive, request.app.state.archive)
