"""Records of a local file: JSON lines (`.jsonl`, `.json`) or parquet, one dictionary per row."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shared.data.errors import DataError

MAX_LINE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Record:
    line: int  # counts from 1; the row number in a parquet file
    fields: dict[str, Any]


@contextmanager
def records_of_file(
    path: Path, *, name: str | None = None
) -> Iterator[tuple[str, Iterator[Record]]]:
    """The file's name for messages and its records; the file is open within the context."""
    name = name or str(path)
    if not path.exists():
        raise DataError(name, "no such file")
    if not path.is_file():
        raise DataError(name, "not a file")
    try:
        with path.open("rb") as file:
            yield name, _parquet(name, file) if path.suffix == ".parquet" else _lines(name, file)
    except OSError as err:
        raise DataError(name, f"cannot be read: {err.strerror or err}") from err


def _lines(name: str, file: BinaryIO) -> Iterator[Record]:
    line = 0
    while body := file.readline(MAX_LINE_BYTES + 1):
        line += 1
        if len(body) > MAX_LINE_BYTES:
            raise DataError(name, f"longer than {MAX_LINE_BYTES} bytes", line=line)
        if body.strip(b" \t\r\n\xef\xbb\xbf"):
            yield Record(line, _object(name, line, body))


def _object(name: str, line: int, body: bytes) -> dict[str, Any]:
    try:
        text = body.decode("utf-8-sig" if line == 1 else "utf-8")
        value = json.loads(text.rstrip(), parse_constant=_no_number)
    except UnicodeDecodeError as err:
        raise DataError(name, f"not UTF-8 at byte {err.start} of the line", line=line) from err
    except json.JSONDecodeError as err:
        problem = f"malformed JSON at column {err.colno}: {err.msg}"
        raise DataError(name, problem, line=line) from err
    except (ValueError, RecursionError) as err:  # a number of 5,000 digits, nesting
        raise DataError(name, f"unusable JSON: {err}", line=line) from err
    if not isinstance(value, dict):
        raise DataError(name, f"expected an object, got {type(value).__name__}", line=line)
    return value


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _parquet(name: str, file: BinaryIO) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as err:
        raise DataError(name, "parquet needs the package pyarrow") from err
    line = 0
    try:
        for batch in ParquetFile(file).iter_batches():
            for fields in batch.to_pylist():
                line += 1
                yield Record(line, fields)
    except (ArrowException, UnicodeDecodeError) as err:
        raise DataError(name, f"not readable as parquet: {err}", line=line + 1) from err
