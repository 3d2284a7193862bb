"""`python -m services.trainer.convert SOURCE TARGET --to FORMAT`: events as JSON lines on stdout.

People start it through `tandem convert`, which shows them.
"""

import argparse
import errno
import sys
from pathlib import Path
from typing import get_args

from shared.errors import TandemError
from shared.process import die_with_parent
from shared.telemetry import configure_logging
from shared.weights.conversion import ConversionEvent, ConversionTarget, Failed

_EXPECTED = {
    errno.ENOSPC: "Free some space and run it again: finished shards are kept.",
    errno.EACCES: "Choose another place, or change its permissions.",
    errno.EROFS: "Choose another place.",
    errno.ENOENT: "Check the path.",
}


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    configure_logging("convert", level="WARNING")

    from services.trainer.convert.conversion import Request, convert

    request = Request(
        source=arguments.source,
        target=arguments.target,
        to=arguments.to,
        like=arguments.like,
        wide=arguments.fp32,
        overwrite=arguments.overwrite,
        max_shard_bytes=arguments.max_shard_bytes,
    )
    try:
        convert(request, _report)
    except (TandemError, ValueError) as err:
        _report(Failed(error=str(err)))
    except OSError as err:
        if err.errno not in _EXPECTED:
            raise
        _report(
            Failed(
                error=f"{err.filename or request.target}: {err.strerror}. {_EXPECTED[err.errno]}"
            )
        )
    else:
        return 0
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m services.trainer.convert")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--to", choices=get_args(ConversionTarget), required=True)
    parser.add_argument("--like", type=Path)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--max-shard-bytes", type=int, default=4 << 30)
    parser.add_argument("--parent", type=int, help="end when this process ends")
    return parser


def _report(event: ConversionEvent) -> None:
    sys.stdout.write(event.model_dump_json() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
