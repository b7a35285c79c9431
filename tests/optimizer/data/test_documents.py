"""Dataset files are streamed as documents; what is not text is refused by line or row."""

import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from optimizer.base.errors import InvalidDataset
from optimizer.data import documents
from optimizer.data.documents import read_documents

Write = Callable[[bytes | str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(content: bytes | str) -> Path:
        path = tmp_path / "dataset"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def _texts(path: Path, format: Any) -> list[str]:
    return [document.text for document in read_documents(path, format=format)]


def _refusal(path: Path, format: Any) -> InvalidDataset:
    with pytest.raises(InvalidDataset) as caught:
        list(read_documents(path, format=format))
    assert caught.value.fields["allowed"]
    return caught.value


def test_two_blank_lines_part_documents_and_one_stays(write: Write) -> None:
    assert _texts(write("a\nb\n\nc\n\n\nd\n"), "txt") == ["a\nb\n\nc", "d"]


def test_a_separator_line_parts_documents(write: Write) -> None:
    assert _texts(write("a\n<|endoftext|>\nb\n<|endoftext|>\n"), "txt") == ["a", "b"]


def test_blank_lines_around_and_windows_line_ends_change_nothing(write: Write) -> None:
    assert _texts(write("\ufeff\r\n\r\n\r\na\r\nb\r\n  \r\n\r\n\r\n\r\nc"), "txt") == ["a\nb", "c"]


def test_an_empty_file_has_no_documents(write: Write) -> None:
    assert _texts(write(""), "txt") == []
    assert _texts(write(""), "jsonl") == []


def test_a_long_document_comes_in_pieces_that_join_to_the_whole(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_PIECE_CHARACTERS", 10)
    text = "one two\nthree four\n\nfive six seven\neight\n\nnine ten eleven"
    pieces = list(read_documents(write(f"{text}\n\n\nnext"), format="txt"))
    assert len(pieces) > 3
    assert "".join(piece.text for piece in pieces[:-1]) == text
    assert [piece.continues for piece in pieces[-2:]] == [False, False]
    assert all(piece.continues for piece in pieces[:-2])


@settings(deadline=None)
@given(
    parts=st.lists(
        st.lists(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1), min_size=1), max_size=5
    )
)
def test_documents_written_with_two_blank_lines_between_are_read_back(parts: list[list[str]]) -> None:
    texts = ["\n".join(lines) for lines in parts]
    with tempfile.NamedTemporaryFile() as file:
        file.write("\n\n\n".join(texts).encode())
        file.flush()
        assert _texts(Path(file.name), "txt") == texts


@pytest.mark.parametrize(
    ("content", "where", "found"),
    [
        (b"fine\nbad \xff byte\n", "line 2", "byte 0xff at column 5"),
        (b"fine\n\nhalf \xc3", "line 3", "byte 0xc3 at column 6"),
        ("text".encode("utf-16"), "line 1", "byte 0xff at column 1"),
        (b"nul \0 here\n", "line 1", "a NUL character"),
        (b"ok\n" + b"x" * 1_000_001, "line 2", "longer than allowed"),
    ],
)
def test_what_is_not_text_is_refused_by_line(content: bytes, where: str, found: str, write: Write) -> None:
    error = _refusal(write(content), "txt")
    assert error.fields["field"] == f"dataset.{where}"
    assert error.fields["value"] == found
    assert str(error).startswith(f"dataset, {where}: {found}; allowed: ")


def test_jsonl_gives_texts_and_messages_and_passes_over_empty_ones(write: Write) -> None:
    lines = [
        {"text": "one", "other": 1},
        {"text": ""},
        {"messages": [{"role": "user", "content": "hi", "extra": 1}, {"role": "assistant", "content": "there"}]},
    ]
    read = list(read_documents(write("\n".join(map(json.dumps, lines)) + "\n\n"), format="jsonl"))
    assert [document.text for document in read] == ["one", ""]
    assert read[1].messages == ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"})
    assert [document.where for document in read] == ["line 1", "line 3"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{bad", "not JSON"),
        ("[1]", "a JSON list"),
        ("{}", "no text"),
        ('{"text": 7}', "text is 7"),
        ('{"text": "a\\u0000b"}', "text holds a NUL character"),
        ('{"text": "\\ud800"}', "text holds half a surrogate pair"),
        ('{"messages": []}', "messages is not a list with entries"),
        ('{"messages": ["hi"]}', "messages[0] is not an object"),
        ('{"messages": [{"role": "user"}]}', "no messages[0].content"),
        ('{"messages": [{"role": 1, "content": "x"}]}', "messages[0].role is 1"),
        ('{"text": "x", "deep": ' + "[" * 40 + "]" * 40 + "}", "nested deeper than 32"),
        ('{"deep": ' + "[" * 200_000, "not JSON"),
        ('{"number": ' + "9" * 10_000 + "}", "not JSON"),
    ],
)
def test_a_bad_line_of_jsonl_is_refused_by_number(line: str, found: str, write: Write) -> None:
    error = _refusal(write('{"text": "fine"}\n' + line + "\n"), "jsonl")
    assert error.fields["field"] == "dataset.line 2"
    assert found in str(error)


def test_parquet_gives_its_text_column(tmp_path: Path) -> None:
    path = tmp_path / "dataset.parquet"
    parquet.write_table(pa.table({"id": list(range(200)), "text": [f"text {row}" for row in range(199)] + [""]}), path)
    assert _texts(path, "parquet") == [f"text {row}" for row in range(199)]


@pytest.mark.parametrize(
    ("columns", "where", "found"),
    [
        ({"body": ["x"]}, "the file", "columns body"),
        ({"text": [1, 2]}, "the file", "column text of int64"),
        ({"text": [["nested"]]}, "the file", "column text of list<"),
        ({"text": ["x", None]}, "row 2", "no text"),
        ({"text": ["x", "a\0b"]}, "row 2", "text holds a NUL character"),
        ({"text": ["x" * 1_000_001]}, "row 1", "text of 1,000,001 characters"),
        ({f"c{index}": [1] for index in range(1_001)}, "the file", "1,001 columns"),
    ],
)
def test_bad_parquet_is_refused_by_row_or_column(
    columns: dict[str, Any], where: str, found: str, tmp_path: Path
) -> None:
    path = tmp_path / "dataset.parquet"
    parquet.write_table(pa.table(columns), path)
    error = _refusal(path, "parquet")
    assert error.fields["field"] == f"dataset.{where}"
    assert found in str(error)


def test_too_many_row_groups_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "dataset.parquet"
    parquet.write_table(pa.table({"text": ["x"] * 10_001}), path, row_group_size=1)
    assert "10,001 row groups; allowed: at most 10,000" in str(_refusal(path, "parquet"))


def test_what_is_no_parquet_at_all_is_refused(write: Write) -> None:
    assert "not readable as parquet" in str(_refusal(write(b"PAR1 and nothing else"), "parquet"))


@settings(deadline=None, max_examples=60)
@given(position=st.integers(0, 100_000), value=st.integers(0, 255))
def test_a_broken_parquet_is_read_or_refused_but_never_crashes(position: int, value: int) -> None:
    with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        parquet.write_table(
            pa.table({"text": [f"text {row}" for row in range(50)]}), file.name, write_page_checksum=True
        )
        content = bytearray(Path(file.name).read_bytes())
        content[position % len(content)] = value
        Path(file.name).write_bytes(content)
        with contextlib.suppress(InvalidDataset):
            read = list(read_documents(file.name, format="parquet"))
            assert all(isinstance(document.text, str) for document in read)


def test_an_unknown_format_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataset, match="dataset format 'csv' is not known; allowed: txt, jsonl, parquet"):
        read_documents(tmp_path, format="csv")
    with pytest.raises(InvalidDataset, match="there is no file nothing.txt"):
        read_documents(tmp_path / "nothing.txt", format="txt")
