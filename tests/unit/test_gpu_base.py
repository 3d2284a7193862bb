"""What an image must have to carry the GPU services, before anything is installed into it."""

import runpy
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / "docker" / "check_base.py"


def test_an_old_python_is_refused_with_bases_that_have_a_newer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 12))
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or newer; this base has 3\.10\."):
        runpy.run_path(str(CHECK), run_name="__main__")


def test_what_is_lacking_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"This base lacks torch, sglang\. Name another one"):
        runpy.run_path(str(CHECK), run_name="__main__")
