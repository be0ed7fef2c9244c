"""Records of JSONL, CSV and Parquet; what is none of them is a problem of its own record or names the file."""

import sys
from pathlib import Path
from typing import Any

import pytest

from deployments.cli.score_files.reader import InputError, InputFile


def source(tmp_path: Path, name: str, data: bytes) -> InputFile:
    path = tmp_path / name
    path.write_bytes(data)
    return InputFile(path)


def fields(found: InputFile, first: int = 0) -> list[Any]:
    return [(record.index, record.problem or record.fields) for record in found.records(first)]


def test_jsonl_with_a_mark_blank_lines_and_no_last_line_end(tmp_path: Path) -> None:
    found = source(
        tmp_path, "a.jsonl", b'\xef\xbb\xbf{"item": "\xc3\xa9"}\r\n\n  \n{"item": [1, 2]}\n{"item": "\\ud800"}'
    )
    assert found.count() == 3
    assert fields(found) == [(0, {"item": "é"}), (1, {"item": [1, 2]}), (2, {"item": "\ud800"})]
    assert fields(found, 2) == [(2, {"item": "\ud800"})]
    assert fields(found, 9) == []


@pytest.mark.parametrize("line", [b"{", b"\xff", b"[1]", b"null", b"[" * 100_000])
def test_a_bad_line_is_the_problem_of_its_record(tmp_path: Path, line: bytes) -> None:
    found = source(tmp_path, "a.jsonl", b'{"item": "a"}\n' + line + b'\n{"item": "b"}\n')
    [first, bad, last] = found.records()
    assert (first.problem, last.problem, last.index) == (None, None, 2)
    assert bad.problem is not None and "Line 2 must be a JSON object" in bad.problem


def test_a_column_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.csv must name each column once\. Twice: 'item'\."):
        list(source(tmp_path, "a.csv", b"query,item,item\nq,a,b\n").records())


def test_csv_with_quotes_and_line_ends_in_a_field(tmp_path: Path) -> None:
    found = source(tmp_path, "a.csv", b'\xef\xbb\xbfquery,item\r\nq,"a ""b""\nc, d"\r\n\r\nq,\r\nq,1,2\r\n')
    assert found.count() == 3
    assert fields(found) == [
        (0, {"query": "q", "item": 'a "b"\nc, d'}),
        (1, {"query": "q", "item": ""}),
        (2, "A CSV row must have 2 fields. Given: 3."),
    ]


@pytest.mark.parametrize("wrong", [b"q,\xff\n", b'q,"a"b\n', b'q,"open'])
def test_what_is_no_csv_names_the_file_and_the_line(tmp_path: Path, wrong: bytes) -> None:
    data = b"query,item\nq,a\n" + wrong + (b"" if wrong.endswith(b"open") else b"q,b\n")
    with pytest.raises(InputError, match=r"a\.csv must be CSV in UTF-8 .* at line 3\."):
        list(source(tmp_path, "a.csv", data).records())


def test_parquet_reads_text_and_token_ids(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    table = pyarrow.table({"query": ["q"] * 3000, "item": [[i, 7] for i in range(3000)]})
    parquet.write_table(table, path, row_group_size=700)
    found = InputFile(path)
    assert found.count() == 3000
    assert fields(found, 2998) == [(i, {"query": "q", "item": [i, 7]}) for i in (2998, 2999)]
    path.write_bytes(b"words")
    with pytest.raises(InputError, match="must be a Parquet file"):
        list(found.records())


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"a\.parquet can be read only with pyarrow: pip install"):
        source(tmp_path, "a.parquet", b"").count()


@pytest.mark.parametrize(("name", "words"), [("a.txt", "must end in .jsonl"), ("none.csv", "nothing there")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(InputError, match=words):
        InputFile(tmp_path / name)


def test_the_fingerprint_is_of_the_bytes(tmp_path: Path) -> None:
    one = source(tmp_path, "a.jsonl", b'{"item": "a"}\n').fingerprint()
    assert one == source(tmp_path, "b.jsonl", b'{"item": "a"}\n').fingerprint()
    assert one != source(tmp_path, "a.jsonl", b'{"item": "a"}').fingerprint()
