"""`python -m services.cli`. The first import works on any Python, to say which one is needed."""

import sys

from shared.process import check_machine

if __name__ == "__main__":
    check_machine(0)
    from services.cli.commands import app

    sys.exit(app())
