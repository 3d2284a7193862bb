"""What an environment lacks of requirement files, as pins: python missing.py CONSTRAINTS FILE...

What is installed stays at its version, whatever our constraints say of it; only the rest is ours.
"""

import json
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path


def main() -> None:
    constraints, *requirements = sys.argv[1:]
    installed = {
        _plain(found.metadata["Name"]): found.version for found in metadata.distributions()
    }
    pins = [f"{name}=={version}" for name, version in installed.items()]
    ours = Path(constraints).read_text().splitlines()
    pins += [line for line in ours if _plain(line.partition("==")[0]) not in installed]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pins))
        file.flush()
        added = _would_install(file.name, requirements)
    sys.stdout.writelines(f"{name}=={version}\n" for name, version in added)


def _would_install(constraints: str, requirements: list[str]) -> list[tuple[str, str]]:
    files = [word for name in requirements for word in ("-r", name)]
    argv = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-"]
    done = subprocess.run(
        [*argv, "-c", constraints, *files], stdout=subprocess.PIPE, text=True, check=True
    )
    found = [one["metadata"] for one in json.loads(done.stdout)["install"]]
    return sorted((one["name"], one["version"]) for one in found)


def _plain(name: str) -> str:
    """A distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


if __name__ == "__main__":
    main()
