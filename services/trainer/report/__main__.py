"""`python -m services.trainer.report runs/<job>`: the report in a process of its own.

The conductor runs it so: drawing takes seconds of CPU and 100 MB that its event loop shall not pay.
"""

import sys
from pathlib import Path

from services.trainer.report import write_report

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m services.trainer.report RUN_DIRECTORY")
    write_report(Path(sys.argv[1]))
