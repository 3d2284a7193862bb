"""What a run began with stays what it was: its books hold digests of data sets and checkpoints.

Draw n is a row of so many. Of other rows some would be drawn twice and others never, and groups
that are open would be asked again as other prompts; by another tokenizer they would be other
tokens, from other first weights a replay would train other steps, and versions that are evaluated
by other problems are not compared. So a job whose inputs were edited while it was paused or its
process was down fails, and says what differs; nothing is lost meanwhile.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import xxhash

from services.trainer.books import Books
from services.trainer.prompts import DataChanged, PromptSource
from shared.data import DataError, load_rows
from shared.job import Job, expand_path
from shared.job_data import DataSection

CHECKPOINT_SUFFIXES = (".json", ".safetensors", ".distcp", ".metadata")
WHOLE_BYTES = 2**20  # up to here the digest of weights is of all of them
SAMPLE_BYTES = 64 * 2**10
NUM_SAMPLES = 8  # of a larger file: training moves every tensor


def check_inputs(books: Books, source: PromptSource) -> None:
    """Raises `DataChanged` unless they are those of the run's first start. Blocks."""
    check_rows(books, source)
    _check_evaluation(books, source.job)
    model = source.job.model
    _check_checkpoint(books, "model.rollout_checkpoint", model.rollout_checkpoint)
    if model.actor_checkpoint is not None:
        _check_checkpoint(books, "model.actor_checkpoint", model.actor_checkpoint)


def check_rows(books: Books, source: PromptSource) -> None:
    """Of `data`, template applied."""
    data = source.job.data
    if source.rows:  # a recording has its prompts with it
        texts = ((row.prompt, row.gold) for row in source.rows)
        name = f"data.path {data.path}" if data.path else f"data.dataset {data.dataset}"
        check_same(books, name, f"{len(source.rows)} rows, xxh3 {digest_of(texts)}")


def check_same(books: Books, name: str, found: str) -> None:
    """Keep what was found under `name`, or compare it with what was; raises `DataChanged`."""
    known = books.read_note(name)
    if known is None:
        books.keep_note(name, found)
    elif known != found:
        raise _changed(name, known, found)


def digest_of(texts: Iterable[tuple[str, str]]) -> str:
    """xxh3-128 of pairs of texts, in their order; each with its length before it."""
    digest = xxhash.xxh3_128()
    for pair in texts:
        for text in pair:
            body = text.encode("utf-8", "surrogatepass")
            digest.update(b"%d:" % len(body))
            digest.update(body)
    return digest.hexdigest()


def _check_evaluation(books: Books, job: Job) -> None:
    """Of every suite that is a file; a data set of the hub is named by its owner and its name."""
    if job.eval is None:
        return
    keys = ["eval.data", *(f"eval.also.{place}.data" for place in range(len(job.eval.also)))]
    for key, suite in zip(keys, job.eval.suites, strict=True):
        if suite.data.path is not None:
            check_same(books, f"{key}.path {suite.data.path}", _rows_of(suite.data))


def _rows_of(data: DataSection) -> str:
    try:
        rows = load_rows(data)
    except DataError as err:  # it was readable when the job was submitted
        return str(err)
    return f"{len(rows)} rows, xxh3 {digest_of((row.prompt, row.gold) for row in rows)}"


def _check_checkpoint(books: Books, key: str, folder: str) -> None:
    """File by file, so that the error names one."""
    found, name = files_of(expand_path(folder)), f"files of {key}"
    known = books.read_note(name)
    if known is None:
        books.keep_note(name, json.dumps(found))
        return
    begun: dict[str, str] = json.loads(known)
    for file in sorted({*begun, *found}):
        then, now = begun.get(file, "no such file"), found.get(file, "no such file")
        if then != now:
            raise _changed(f"{key} {Path(folder) / file}", then, now)


def files_of(folder: Path) -> dict[str, str]:
    """Size and digest of every file of a checkpoint, by name. Blocks."""
    files = (path for path in folder.glob("*") if path.name.endswith(CHECKPOINT_SUFFIXES))
    return {path.name: _digest_of_file(path) for path in sorted(files) if path.is_file()}


def _digest_of_file(path: Path) -> str:
    """Of all of it, or for many weights of samples, evenly spread from first to last byte."""
    size, digest = path.stat().st_size, xxhash.xxh3_128()
    with path.open("rb") as file:
        if path.suffix == ".json" or size <= WHOLE_BYTES:
            digest.update(file.read())
            return f"{size} bytes, xxh3 {digest.hexdigest()}"
        for place in range(NUM_SAMPLES):
            file.seek((size - SAMPLE_BYTES) * place // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return f"{size} bytes, xxh3 of {NUM_SAMPLES} samples {digest.hexdigest()}"


def _changed(name: str, then: str, now: str) -> DataChanged:
    return DataChanged(
        f"{name} is not what this run began with: {then} then, {now} now. Put the old content "
        "back and resume the job, or submit another one"
    )
