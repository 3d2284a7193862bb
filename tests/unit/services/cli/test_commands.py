"""What holds for every command: JSON for machines, and completion for shells."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

from services.cli.commands import app

TANDEM = Path(__file__).parents[4] / "bin" / "tandem"


def commands(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
    for word, one in (inner or {}).items():
        yield from commands(one, f"{name} {word}".strip())


ALL = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("name", ALL)
def test_every_command_speaks_json_and_says_what_it_is_for(name: str) -> None:
    options = {option for one in ALL[name].params for option in one.opts}
    assert "--json" in options
    assert ALL[name].help


@pytest.mark.parametrize(("shell", "words"), [("bash", "complete -o"), ("zsh", "#compdef tandem")])
def test_completion_of_a_shell_is_written(shell: str, words: str) -> None:
    without_looking = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    told = tandem("--show-completion", shell, **without_looking).stdout
    assert words in told
    assert "_TANDEM_COMPLETE=complete_" in told


def test_help_begins_with_what_people_need_first() -> None:
    names = list(dict.fromkeys(name.split()[0] for name in ALL))
    assert names[:6] == ["up", "demo", "submit", "status", "watch", "pause"]


def test_a_shell_is_told_the_commands() -> None:
    asked = {"_TANDEM_COMPLETE": "complete_bash", "COMP_WORDS": "tandem doc", "COMP_CWORD": "1"}
    assert tandem(**asked).stdout.strip() == "doctor"


def tandem(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(TANDEM), *arguments],
        env={**os.environ, **variables, "TANDEM_PYTHON": sys.executable},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
