"""What a run draws by number stays what it was: its books hold a digest of each data set.

Draw n is a row of so many. Of other rows some would be drawn twice and others never, and groups
that are open would be asked again as other prompts. So a job whose data was edited while it was
paused or its process was down fails, and says what differs; nothing is lost meanwhile.
"""

from collections.abc import Iterable

import xxhash

from services.trainer.books import Books
from services.trainer.prompts import DataChanged, PromptSource


def check_rows(books: Books, source: PromptSource) -> None:
    """Of `data`, template applied: what was read at the run's first start. Blocks."""
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
        raise DataChanged(
            f"{name} is not what this run began with: {known} then, {found} now. Put the old "
            "content back and resume the job, or submit another one"
        )


def digest_of(texts: Iterable[tuple[str, str]]) -> str:
    """xxh3-128 of pairs of texts, in their order; each with its length before it."""
    digest = xxhash.xxh3_128()
    for pair in texts:
        for text in pair:
            body = text.encode("utf-8", "surrogatepass")
            digest.update(b"%d:" % len(body))
            digest.update(body)
    return digest.hexdigest()
