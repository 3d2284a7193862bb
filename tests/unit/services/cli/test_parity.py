"""What `parity` says of files that are not there, or are something else."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.commands import app

RELEASE = str(Path(__file__).parents[4] / "assets" / "tiny-dsv4")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{nothing}", RELEASE], "{nothing}: No such file or directory"),
        ([RELEASE, "{nothing}"], "{nothing}: No such file or directory"),
        ([RELEASE, RELEASE, "--tokens", "{nothing}"], "{nothing}: No such file or directory"),
        (
            [RELEASE, RELEASE, "--tokens", __file__],
            f"{__file__}: expected JSON, found none: Extra data: line 1 column 3 (char 2)",
        ),
        ([RELEASE], "Name two checkpoints, or none to compare the running services."),
    ],
)
def test_what_is_missing_is_named_once(arguments: list[str], said: str, tmp_path: Path) -> None:
    nothing = str(tmp_path / "nothing")
    given = [argument.format(nothing=nothing) for argument in arguments]
    result = CliRunner().invoke(app, ["parity", *given])
    assert result.exit_code == 1
    assert result.stderr == said.format(nothing=nothing) + "\n"


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_report_without_a_folder_is_refused_before_the_work(option: str, tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "report"
    result = CliRunner().invoke(app, ["parity", RELEASE, RELEASE, option, str(path)])
    assert result.exit_code == 1
    assert result.stderr == f"{path}: expected a file to write in a folder that exists\n"


def test_tokens_nested_without_end_are_no_json(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    result = CliRunner().invoke(app, ["parity", RELEASE, RELEASE, "--tokens", str(path)])
    assert result.exit_code == 1
    assert f"{path}: expected JSON, found none: " in result.stderr
