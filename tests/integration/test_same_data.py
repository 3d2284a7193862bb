"""What a run began with: an input that was edited is named; written otherwise it is the same."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.trainer import same_data
from services.trainer.books import Books
from services.trainer.prompts import DataChanged, PromptSource
from services.trainer.same_data import check_inputs
from tests.integration.conductor_world import make_job, make_source


@pytest.fixture
def source(tmp_path: Path) -> PromptSource:
    for folder in ("policy", "actor"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text('{"vocab_size": 8}')
    (tmp_path / "policy" / "tokenizer.json").write_text("{}")
    (tmp_path / "policy" / "model.safetensors").write_bytes(bytes(range(256)) * 4)
    for name in ("held", "also"):
        row = {"problem": f"{name} 1+1=", "answer": "2"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    suite = {"samples_per_problem": 1, "max_response_tokens": 8}
    section = {
        **suite, "suite": "held", "data": {"path": str(tmp_path / "held.jsonl")},
        "also": [{**suite, "suite": "also", "data": {"path": str(tmp_path / "also.jsonl")}}],
    }  # fmt: skip
    model = {"rollout_checkpoint": str(tmp_path / "policy")}
    model |= {"actor_checkpoint": str(tmp_path / "actor")}
    return make_source(make_job(model=model, eval=section))


@pytest.fixture
def books(tmp_path: Path, source: PromptSource):
    books = Books(tmp_path / "books.sqlite")
    check_inputs(books, source)
    yield books
    books.close()


def rewrite(name: str, old: bytes, new: bytes) -> Callable[[Path], object]:
    def act(root: Path) -> None:
        path = root / name
        assert old in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(old, new, 1))

    return act


EDITS: list[tuple[Callable[[Path], object], str]] = [
    (rewrite("held.jsonl", b'"2"', b'"3"'), r"eval\.data\.path .*held\.jsonl is .*1 rows, .*now"),
    (rewrite("also.jsonl", b"1+1", b"1+2"), r"eval\.also\.0\.data\.path .*also\.jsonl is "),
    (lambda root: (root / "held.jsonl").unlink(), r"eval\.data\.path .* then, .*held\.jsonl.* now"),
    (rewrite("policy/tokenizer.json", b"{}", b"{ }"), r"policy/tokenizer\.json is .*2 bytes, xxh3"),
    (rewrite("policy/config.json", b"8", b"9"), r"model\.rollout_checkpoint .*/config\.json is "),
    (rewrite("policy/model.safetensors", b"\x80", b"\x81"), r"policy/model\.safetensors is "),
    (rewrite("actor/config.json", b"8", b"9"), r"model\.actor_checkpoint .*actor/config\.json is "),
    (lambda root: (root / "policy" / "config.json").unlink(), "then, no such file now"),
    (lambda root: (root / "actor" / "b.distcp").touch(), "b.distcp is .* no such file then"),
]


@pytest.mark.parametrize(("edit", "message"), EDITS)
def test_an_input_that_was_edited_is_named(
    books: Books, source: PromptSource, tmp_path: Path, edit: Callable[[Path], object], message: str
) -> None:
    edit(tmp_path)
    with pytest.raises(DataChanged, match=message):
        check_inputs(books, source)


def test_what_says_the_same_is_the_same(books: Books, source: PromptSource, tmp_path: Path) -> None:
    """Copied files, JSON written otherwise, and notes beside a checkpoint."""
    shutil.copytree(tmp_path / "policy", tmp_path / "copy")
    (tmp_path / "policy").rename(tmp_path / "gone")
    (tmp_path / "copy").rename(tmp_path / "policy")
    rewrite("held.jsonl", b": ", b":  ")(tmp_path)
    (tmp_path / "policy" / "README.md").write_text("what it is")
    check_inputs(books, source)
    with pytest.raises(DataChanged, match=r"data\.path /nowhere/rows\.jsonl is .* 9 rows"):
        check_inputs(books, replace(source, rows=source.rows[:-1]))


def test_of_a_large_file_samples_are_enough(
    books: Books, source: PromptSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another policy of the same shape: every tensor differs, no size does."""
    monkeypatch.setattr(same_data, "WHOLE_BYTES", 512)
    monkeypatch.setattr(same_data, "SAMPLE_BYTES", 8)
    file = tmp_path / "policy" / "model.safetensors"
    begun = same_data.files_of(tmp_path / "policy")
    assert begun["model.safetensors"].startswith("1024 bytes, xxh3 of 8 samples ")
    old = file.read_bytes()
    for changed in (range(1024), range(4), range(1020, 1024)):  # all, the first, the last bytes
        file.write_bytes(bytes(b ^ (i in changed) for i, b in enumerate(old)))
        assert same_data.files_of(tmp_path / "policy") != begun
