"""A module of the page, run by Node.js where there is one."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import services.trainer.dashboard as dashboard

ASSETS = Path(dashboard.__file__).parent / "assets"
NODE = shutil.which("node")


def evaluate(tmp_path: Path, name: str, script: str) -> Any:
    """The JSON value that the script's `answer` is left with; what `name` exports is in `page`."""
    module = tmp_path / f"{name}.mjs"  # a name by which every Node.js knows a module
    module.write_text((ASSETS / f"{name}.js").read_text())
    program = f'import * as page from "{module.as_uri()}"; let answer; {script};'
    program += "console.log(JSON.stringify(answer));"
    done = subprocess.run(
        [str(NODE), "--input-type=module", "-e", program],
        check=True, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    return json.loads(done.stdout)
