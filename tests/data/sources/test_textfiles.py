"""Reading your own files: where documents begin and end, and the messages for files that cannot be read."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat.common import UserError
from nanochat.data.sources import textfiles
from nanochat.data.sources.listing import files_of
from nanochat.data.sources.textfiles import documents


def read(path: Path, content: str | bytes, column: str = "text") -> list[str]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(documents([path], column))


def test_json_lines_give_a_document_each(tmp_path, capsys):
    records = [{"text": "one", "n": 1}, {"text": "二"}, {"text": " \n"}, {"text": None}]
    content = "\ufeff" + "\n".join(json.dumps(record) for record in records) + "\n\n"
    assert read(tmp_path / "a.jsonl", content) == ["one", "二"]
    assert "skipped 2 documents without text" in capsys.readouterr().out
    assert read(tmp_path / "a.jsonl", '{"正文": "x"}\n', "正文") == ["x"]


def test_a_text_file_is_split_at_marks_and_where_it_grows_long(tmp_path, monkeypatch):
    assert read(tmp_path / "a.txt", "one\n\nstill one\n") == ["one\n\nstill one"]
    assert read(tmp_path / "a.md", "# one\n\nstill one\n") == ["# one\n\nstill one"]
    assert read(tmp_path / "a.txt", "one\n<|endoftext|>\ntwo\n<|endoftext|>\n") == ["one", "two"]
    monkeypatch.setattr(textfiles, "LONG_TXT", 5)
    assert read(tmp_path / "a.txt", "abc\ndef\n\nghi\n\njkl\n") == ["abc\ndef", "ghi\n\njkl"]


def test_parquet_files_give_a_document_a_row(tmp_path):
    pq.write_table(pa.table({"body": ["one", "二", None], "n": [1, 2, 3]}), tmp_path / "a.parquet")
    assert list(documents([tmp_path / "a.parquet"], "body")) == ["one", "二"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": \n', r"a\.jsonl line 2: this is not JSON"),
        (
            "a.jsonl",
            '{"body": "x", "n": 1}',
            r"a\.jsonl line 1 has no field 'text'; its fields: body, n\. .*--text_column",
        ),
        ("a.jsonl", "[1]", r"line 1, item 1 has no field 'text'; its fields: none"),
        ("a.jsonl", '{"text": 5}', r"line 1: 'text' must be text, got int 5"),
        ("a.jsonl", '{"text": "a\\ud800"}', r"line 1: the text is not valid Unicode, it has half of a surrogate pair"),
        ("a.txt", "中文\n这是一个文件".encode("gb18030"), r"a\.txt is not UTF-8 .*iconv -f GB18030"),
        ("a.txt", "好\n".encode() + "中文".encode("gb18030"), r"a\.txt line 2: bytes that are not UTF-8"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}', mtime=0)[:-9], r"a\.jsonl\.gz is damaged"),
        ("a.csv", "text\nx\ny,z\n", r"a\.csv line 3: it needs 1 cells"),
        ("a.parquet", b"PAR1 nonsense", r"a\.parquet cannot be read"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(tmp_path, name, content, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path / name, content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", gzip.compress(b'{"text": "one"}\n{"text": "two"}\n', mtime=0)),
        ("a.json", json.dumps([{"text": "one"}, {"text": "two"}], indent=1)),
        ("a.JSON", json.dumps({"data": [{"text": "one"}, {"text": "two"}]})),
        ("a.csv", "id,text\n1,one\n2,two\n"),
        ("a.csv", ",text\n0,one\n1,two\n"),  # as pandas writes it
        ("a.TXT", "one\n<|endoftext|>\ntwo\n"),
        ("a.txt.gz", gzip.compress(b"one\n<|endoftext|>\ntwo\n", mtime=0)),
        ("a.txt", "one\n<|endoftext|>\ntwo\n".encode("utf-16")),
    ],
)
def test_texts_are_read_from_every_usual_form(tmp_path, name, content):
    assert read(tmp_path / name, content) == ["one", "two"]


def test_all_bad_lines_are_counted_and_may_be_left_out(tmp_path, capsys):
    content = b'{"text": "one"}\n' + b"{\n" * 8 + b'{"text": "a\\ud800"}\n\xff\n{"text": "two"}\n'
    with pytest.raises(UserError, match="10 lines") as refused:
        read(tmp_path / "a.jsonl", content)
    shown = str(refused.value)
    assert "line 2" in shown and "5 more" in shown and "--skip_bad_lines" in shown
    assert list(documents([tmp_path / "a.jsonl"], "text", skip_bad_lines=True)) == ["one", "two"]
    assert "10 lines" in capsys.readouterr().err


@pytest.mark.parametrize("first", ['{"text": "x"},', '{"text": ' + "1" * 5000 + "}"], ids=["comma", "digits"])
def test_a_bad_first_line_leaves_the_others(tmp_path, first):
    content = "\n".join([first, *('{"text": "one"}' for _ in range(20))])
    with pytest.raises(UserError, match=r"a\.jsonl line 1: this is not JSON"):
        read(tmp_path / "a.jsonl", content)
    assert list(documents([tmp_path / "a.jsonl"], "text", skip_bad_lines=True)) == ["one"] * 20


def test_a_parquet_file_without_the_column_names_those_it_has(tmp_path):
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has no field 'text'; its fields: body, n"):
        list(documents([tmp_path / "a.parquet"], "text"))


@pytest.mark.parametrize("column", ["parts", "meta", "n"])
@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_a_column_that_holds_no_text_is_named_with_those_that_do(tmp_path, column, ending):
    rows = [{"body": "x", "title": "y", "parts": ["a", "b"], "meta": {"a": "b"}, "n": 1}]
    path = tmp_path / f"a.{ending}"
    pq.write_table(pa.Table.from_pylist(rows), path)
    if ending == "jsonl":
        path.write_text(json.dumps(rows[0]))
    with pytest.raises(UserError) as refused:
        list(documents([path], column))
    text = str(refused.value)
    kind = {"parts": "list", "meta": "struct" if ending == "parquet" else "dict", "n": "int"}[column]
    assert refused.value.exit_code == 2 and "--text_column" in text
    assert all(word in text for word in (str(path), f"'{column}'", kind, "body, title"))
    assert "parts, meta" not in text


def test_the_texts_of_a_folder_are_found_in_any_case_without_hidden_files(tmp_path, capsys):
    for name in ("a.TXT", "deep/b.Jsonl.GZ", "._a.txt", ".git/c.md", "d.docx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [path.name for path in files_of(str(tmp_path), textfiles.READERS)]
    assert names == ["a.TXT", "b.Jsonl.GZ"]
    assert "2 hidden files" in capsys.readouterr().out
