"""bin/tandem before anything is installed."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_missing_python_is_told_with_the_command_that_installs_it() -> None:
    done = subprocess.run(
        [ROOT / "bin/tandem", "status"],
        env={"PATH": os.environ["PATH"], "TANDEM_PYTHON": "/nowhere/bin/python"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("/nowhere/bin/python is not there: run `make install` in ")
