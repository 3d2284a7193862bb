"""`python -m services.cli`. The first import works on any Python, to say which one is needed."""

import signal
import sys

from shared.process import check_machine

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while nothing runs yet, Ctrl-C just ends this
    check_machine(0)
    from services.cli.commands import app

    sys.exit(app(prog_name="tandem"))
