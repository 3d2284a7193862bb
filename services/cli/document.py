"""A job document from a TOML file with values replaced by `--set section.key=value`."""

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.errors import ConfigInvalid
from shared.job import load_job_file

PROJECT_ROOT = Path(__file__).parents[2]


def read_job(path: Path, changes: Sequence[str]) -> dict[str, Any]:
    """Unchecked: the trainer checks it. Raises `ConfigInvalid` when it cannot be read."""
    path = in_project(path)
    try:
        document = dict(load_job_file(path))
    except OSError as err:
        raise ConfigInvalid(f"Cannot read the job {path}: {err.strerror}.") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise ConfigInvalid(f"{path} is not valid TOML: {err}.") from err
    change_document(document, changes)
    return document


def in_project(path: Path) -> Path:
    """What is not found from here may be a file of the project, from wherever it is called."""
    at_root = PROJECT_ROOT / path
    return at_root if not path.exists() and at_root.exists() else path


def change_document(document: dict[str, Any], changes: Sequence[str]) -> None:
    """In place."""
    for change in changes:
        _apply(document, change)


def check_variables(document: Mapping[str, Any]) -> None:
    """`ConfigInvalid` for a path with a variable that is not set here.

    For commands that start the trainer themselves: it would refuse the job minutes later.
    """
    for key, path in _paths(document):
        if "$" in os.path.expandvars(path):
            raise ConfigInvalid(
                f'{key} = "{path}": a variable in it is not set; set it before the command, as in '
                "DATA_ROOT=/path/to/files make real-data."
            )


def _paths(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{key}.")
        elif isinstance(value, list):
            for at, one in enumerate(value):
                if isinstance(one, Mapping):
                    yield from _paths(one, f"{key}.{at}.")
        elif isinstance(value, str) and (name == "path" or name.endswith("_checkpoint")):
            yield key, value


def _apply(document: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise ConfigInvalid(f"--set {change}: write it as section.key=value.")
    *sections, name = key.strip().split(".")
    table = document
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigInvalid(f"--set {change}: {section} is a value, not a section.")
    table[name] = _value(text.strip())


def _value(text: str) -> Any:
    """As TOML where it is TOML (`3`, `true`, `[1, 2]`), else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
