"""From a job's data section to rows: read, detect the format, check every row, apply the template.

All rows are read and checked at once, so a bad one is refused when a job is submitted and not at
step 300. Order is the file's; `order.draw_order` says which row a draw takes.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice

from shared.data.errors import DataError
from shared.data.files import Record, records_of_file
from shared.data.formats import detect_format, read_fields
from shared.data.hub import records_of_data_set
from shared.job import expand_path
from shared.job_data import DataFormat, DataSection

HUB_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Row:
    """One problem. Example source: 'aime24.jsonl, line 3'."""

    index: int  # position in the loaded list
    problem: str  # as the data set has it
    prompt: str  # what the policy is asked: the template applied
    gold: str  # the answer as the data set writes it, zero padding included
    source: str


def load_rows(
    source: DataSection,
    *,
    hub_deadline_s: float = HUB_DEADLINE_S,
    left: threading.Event | None = None,
) -> list[Row]:
    """Every row of a data set, in its own order; blocks, so keep it off an event loop. Setting
    `left` breaks a download off.

    Raises `DataError`, naming file and line, for a missing file, an empty data set, malformed JSON,
    text that is not UTF-8 and a row without a problem or an answer.
    """
    left = left or threading.Event()
    with _records(source, hub_deadline_s, left) as (name, records):
        rows = list(_rows(name, islice(records, source.max_rows), source))
    if not rows:
        raise DataError(name, "the data set is empty")
    return rows


def _records(
    source: DataSection, hub_deadline_s: float, left: threading.Event
) -> AbstractContextManager[tuple[str, Iterator[Record]]]:
    if source.path is not None:
        try:
            return records_of_file(expand_path(source.path))
        except ValueError as err:
            raise DataError(source.path, "a variable in it is not set") from err
    assert source.dataset is not None  # DataSection has checked it
    return records_of_data_set(
        source.dataset,
        split=source.split,
        max_rows=source.max_rows,
        deadline_s=hub_deadline_s,
        left=left,
    )


def _rows(name: str, records: Iterator[Record], source: DataSection) -> Iterator[Row]:
    row_format: DataFormat = source.format
    for index, record in enumerate(records):
        try:
            if row_format == "auto":
                row_format = detect_format(record.fields)
            problem, gold = read_fields(record.fields, row_format)
        except ValueError as err:
            raise DataError(name, str(err), line=record.line) from err
        prompt = source.prompt_template.replace("{problem}", problem)
        yield Row(index, problem, prompt, gold, f"{name}, line {record.line}")
