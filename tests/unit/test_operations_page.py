"""The planner's output in the docs is what the planner prints."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.commands import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
SHOWN = re.findall(r"```\n\$ tandem (plan .+?)\n(.+?)\n```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("command", "text"), SHOWN, ids=["fits", "does not fit"])
def test_the_page_shows_what_the_planner_says(
    command: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    output = CliRunner(env={"COLUMNS": "80"}).invoke(app, shlex.split(command)).output
    said = "\n".join(line.rstrip() for line in output.splitlines())
    assert text in said
