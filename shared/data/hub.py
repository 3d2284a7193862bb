"""A data set of the Hugging Face hub, read in a child process with a deadline.

`datasets` retries for a long time, starts threads and loads half of the scientific stack; a child
can be killed and takes all of that with it. It writes JSON lines, read like any other file.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from shared.data.errors import DataError
from shared.data.files import Record, records_of_file
from shared.process import die_with_parent, exit_with

COMMAND = [sys.executable, "-m", "shared.data.hub"]
PROBE_S = 5.0
POLL_S = 0.2  # how soon a download that nobody waits for any more ends


@contextmanager
def records_of_data_set(
    dataset: str,
    *,
    split: str,
    max_rows: int | None,
    deadline_s: float,
    left: threading.Event,
) -> Iterator[tuple[str, Iterator[Record]]]:
    """Name and records of `owner/name` or `owner/name:configuration`; `DataError` says why not."""
    name = f"Hugging Face data set {dataset} ({split})"
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rows.jsonl"
        _download(name, [dataset, split, str(max_rows or 0), str(target)], deadline_s, left)
        with records_of_file(target, name=name) as (_, records):
            yield name, records


def _download(name: str, arguments: list[str], deadline_s: float, left: threading.Event) -> None:
    ends_s = time.monotonic() + deadline_s
    with subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as child:
        complaint: str | None = None
        while complaint is None:
            try:
                _, complaint = child.communicate(timeout=POLL_S)
            except subprocess.TimeoutExpired:
                late = time.monotonic() > ends_s
                if late or left.is_set():
                    child.kill()
                    why = f"within {deadline_s:.0f} s" if late else "to the end: it was given up"
                    raise DataError(name, f"not downloaded {why}") from None
    if child.returncode != 0:
        last_words = complaint.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        raise DataError(name, last_words[0])


def main() -> None:
    die_with_parent()
    dataset, split, max_rows, target = sys.argv[1:]
    if not _hub_answers():
        os.environ["HF_HUB_OFFLINE"] = "1"  # what an earlier run has cached still loads
    try:
        import datasets
    except ImportError:
        exit_with("needs the package datasets")
    identifier, _, configuration = dataset.partition(":")
    try:
        rows = datasets.load_dataset(identifier, configuration or None, split=split)
    except (OSError, ValueError, RuntimeError) as err:  # what `datasets` derives its errors from
        reason = " ".join(str(err).split())[:300]
        offline = "no network and not cached: " if "HF_HUB_OFFLINE" in os.environ else ""
        exit_with(f"cannot be loaded: {offline}{reason}")
    with Path(target).open("w", encoding="utf-8") as file:
        for index, row in enumerate(rows):
            if index == int(max_rows) > 0:
                break
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


def _hub_answers() -> bool:
    """Whether the hub (or a proxy that would reach it) is there, found out in seconds."""
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return True
    from huggingface_hub.constants import ENDPOINT

    endpoint = urlsplit(ENDPOINT)
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=PROBE_S).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
