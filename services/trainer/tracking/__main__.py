"""`python -m services.trainer.tracking runs/JOB`: follow a run until SIGTERM, then write the rest.

Run by hand after a job it writes what a process that died left out.
"""

import json
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import structlog

from services.trainer.tracking.follow import follow
from services.trainer.tracking.writers import writers_of
from shared.job import JOB_FILE, Job
from shared.telemetry import bind_process, configure_logging

log = structlog.get_logger()
LOOK_S = 0.5


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m services.trainer.tracking RUN_DIRECTORY [--follow]")
    run_dir = Path(sys.argv[1]).resolve()
    configure_logging("tracking")
    bind_process(job_id=run_dir.name)
    stopped = threading.Event()

    def stop(_: int, __: FrameType | None) -> None:
        stopped.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    if "--follow" not in sys.argv:
        stopped.set()
    job = Job.model_validate(json.loads((run_dir / JOB_FILE).read_text()))
    writers = writers_of(job.tracking, run_dir, document=job.model_dump(mode="json"))
    try:
        lines = follow(run_dir, writers, wait=lambda: not stopped.wait(LOOK_S))
    finally:
        for writer in writers:
            writer.close()
    log.info("tracking_ended", lines=lines)


if __name__ == "__main__":
    main()
