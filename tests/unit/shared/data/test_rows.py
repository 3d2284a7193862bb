import json
import sys
from pathlib import Path

import pytest

from shared.data import DataError, load_rows
from shared.job_data import DataSection

FIXTURES = Path(__file__).parents[3] / "fixtures" / "data"


def write(path: Path, *lines: str | bytes) -> str:
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines))
    return str(path)


@pytest.mark.parametrize(
    ("name", "golds"),
    [
        ("dapo_chat_label", ["42", "100", "-13"]),
        ("dapo_chat_reward_model", ["9", "15"]),
        ("dapo_plain", ["6", "8"]),
        ("gsm8k", ["31", "1500", "-3"]),
        ("math500", [r"\frac{3}{4}", "2"]),
        ("aime", ["033", "081", "999"]),
        ("deepmath", ["3", r"k = \pm 2"]),
        ("plain", ["85", r"\{2,3\}"]),
    ],
)
def test_every_public_shape_is_detected_and_read(name: str, golds: list[str]) -> None:
    rows = load_rows(DataSection(path=str(FIXTURES / f"{name}.jsonl")))
    assert [row.gold for row in rows] == golds
    assert [row.index for row in rows] == list(range(len(golds)))
    assert all(row.problem and row.prompt == row.problem for row in rows)
    assert rows[1].source.endswith(f"{name}.jsonl, line 2")


def test_the_named_format_reads_the_same_rows() -> None:
    path = str(FIXTURES / "aime.jsonl")
    named = load_rows(DataSection(path=path, format="aime"))
    assert named == load_rows(DataSection(path=path))


def test_chat_messages_become_one_text() -> None:
    rows = load_rows(DataSection(path=str(FIXTURES / "dapo_chat_reward_model.jsonl")))
    assert rows[0].problem == "Be brief.\n\nHow many diagonals has a hexagon?"


def test_the_template_takes_problems_with_braces() -> None:
    section = DataSection(path=str(FIXTURES / "plain.jsonl"), prompt_template="Q: {problem}\nA:")
    rows = load_rows(section)
    assert rows[1].prompt == "Q: What is {2, 3} united with {3}?\nA:"
    assert rows[1].problem == "What is {2, 3} united with {3}?"


def test_max_rows_stops_before_a_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"prompt": "1+1=", "answer": "2"}', "{broken")
    assert len(load_rows(DataSection(path=path, max_rows=1))) == 1


def test_variables_in_the_path_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_ROOT", str(FIXTURES))
    assert len(load_rows(DataSection(path="$DATA_ROOT/plain.jsonl"))) == 2
    monkeypatch.delenv("DATA_ROOT")
    with pytest.raises(DataError, match=r"\$DATA_ROOT/plain.jsonl: a variable in it is not set"):
        load_rows(DataSection(path="$DATA_ROOT/plain.jsonl"))


def test_blank_lines_and_a_byte_order_mark_are_skipped(tmp_path: Path) -> None:
    row = json.dumps({"prompt": "1+1=", "answer": "2"}).encode()
    path = write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + row, b"", b"  ", row, b"")
    rows = load_rows(DataSection(path=path))
    assert [row.source.rpartition(" ")[2] for row in rows] == ["1", "4"]


GOOD = '{"prompt": "1+1=", "answer": "2"}'


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{broken", "line 2: malformed JSON at column 2"),
        ("[1, 2]", "line 2: expected an object, got list"),
        ("[" * 100_000, "line 2: unusable JSON"),
        ('{"prompt": "1+1="}', "line 2: a row without an answer"),
        ('{"prompt": "1+1=", "answer": null}', "line 2: a row without an answer"),
        ('{"prompt": "1+1=", "answer": "  "}', "line 2: a row without an answer"),
        ('{"answer": "2"}', "line 2: a row without a problem"),
        (r'{"prompt": "1\ud800", "answer": "2"}', "line 2: .ud800 at character 1 is half"),
        ('{"prompt": "1", "answer": NaN}', "line 2: unusable JSON: NaN is no JSON"),
        ('{"prompt": ', "line 2: malformed JSON at column 11"),
        (b'{"prompt": "\xff", "answer": "2"}', "line 2: not UTF-8 at byte 12"),
    ],
)
def test_a_bad_row_is_refused_with_file_and_line(
    tmp_path: Path, bad: str | bytes, message: str
) -> None:
    path = write(tmp_path / "rows.jsonl", GOOD, bad, GOOD)
    with pytest.raises(DataError, match=message) as caught:
        load_rows(DataSection(path=path))
    assert caught.value.line == 2
    assert str(caught.value).startswith(path)


@pytest.mark.parametrize(
    ("row_format", "row", "message"),
    [
        ("gsm8k", {"question": "q", "answer": "31"}, "behind '####'"),
        ("aime", {"problem": "q", "answer": "1000"}, "0 to 999"),
        ("aime", {"problem": "q", "answer": "1/2"}, "0 to 999"),
        (
            "auto",
            {"text": "q", "target": "1"},
            r"no known format has the keys \['target', 'text'\]",
        ),
    ],
)
def test_an_answer_that_a_format_forbids_is_refused(
    tmp_path: Path, row_format: str, row: dict[str, str], message: str
) -> None:
    path = write(tmp_path / "rows.jsonl", json.dumps(row))
    with pytest.raises(DataError, match=message):
        load_rows(DataSection.model_validate({"path": path, "format": row_format}))


@pytest.mark.parametrize("content", ["", "\n\n \n"])
def test_an_empty_data_set_is_refused(tmp_path: Path, content: str) -> None:
    path = write(tmp_path / "rows.jsonl", content)
    with pytest.raises(DataError, match=r"rows.jsonl: the data set is empty"):
        load_rows(DataSection(path=path))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.jsonl: no such file"):
        load_rows(DataSection(path=str(tmp_path / "none.jsonl")))
    with pytest.raises(DataError, match="not a file"):
        load_rows(DataSection(path=str(tmp_path)))


def test_parquet_reads_like_json_lines(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = (FIXTURES / "dapo_chat_reward_model.jsonl").read_text().splitlines()
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([json.loads(x) for x in lines]), path)
    rows = load_rows(DataSection(path=str(path)))
    assert [row.gold for row in rows] == ["9", "15"]
    assert rows[1].source.endswith("rows.parquet, line 2")


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", GOOD)
    with pytest.raises(DataError, match=r"rows.parquet.*not readable as parquet"):
        load_rows(DataSection(path=path))


def test_a_data_set_of_an_absent_hub_is_refused_with_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"no/such \(train\): cannot be loaded: no network"):
        load_rows(DataSection(dataset="no/such"), hub_deadline_s=40)


def test_a_slow_hub_ends_at_the_deadline() -> None:
    with pytest.raises(DataError, match="not downloaded within 0 s"):
        load_rows(DataSection(dataset="no/such"), hub_deadline_s=0.05)


def test_loading_needs_no_heavy_package() -> None:
    import subprocess

    check = "import shared.data, sys; print({'torch', 'pyarrow', 'datasets'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=90)
    assert done.stdout.strip() == "set()"
