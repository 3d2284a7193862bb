"""The README leads where it says: every file that it names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def test_every_link_and_path_of_the_readme_exists() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in link]
    paths = re.findall(r"`((?:services|shared|scripts|tests|configs|assets)/[\w./-]+)`", TEXT)
    assert len(links) > 2
    assert len(paths) > 5
    missing = [path for path in {*links, *paths} if not (ROOT / path).exists()]
    assert missing == []


def test_files_named_beside_a_path_are_in_the_same_folder() -> None:
    for row in re.findall(r"^\|.*`services/.*\|$", TEXT, re.MULTILINE):
        folder = None
        for name in re.findall(r"`([\w./]+)`", row):
            if "/" in name.rstrip("/"):
                folder = (ROOT / name).parent if name.endswith(".py") else ROOT / name
                continue
            assert folder is not None, row
            assert (folder / name).exists(), f"{name} of {row}"


def test_pages_and_jobs_name_commands_as_the_readme_does() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "configs").glob("*.toml")]
    assert len(pages) > 10
    assert [page.name for page in pages if "python -m services.cli" in page.read_text()] == []
