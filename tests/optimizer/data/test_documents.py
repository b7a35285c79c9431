"""Dataset files are streamed as documents; what is not text is refused by line or row."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def _texts(path: Path) -> list[str]:
    return [document.text for document in read_documents(path)]


def _refusal(path: Path) -> InvalidDataset:
    with pytest.raises(InvalidDataset) as caught:
        list(read_documents(path))
    assert caught.value.fields["allowed"]
    return caught.value


def test_two_blank_lines_part_documents_and_one_stays(write: Write) -> None:
    assert _texts(write("a\nb\n\nc\n\n\nd\n")) == ["a\nb\n\nc", "d"]


def test_a_separator_line_parts_documents(write: Write) -> None:
    assert _texts(write("a\n<|endoftext|>\nb\n<|endoftext|>\n")) == ["a", "b"]


def test_blank_lines_around_and_windows_line_ends_change_nothing(write: Write) -> None:
    assert _texts(write("\ufeff\r\n\r\n\r\na\r\nb\r\n  \r\n\r\n\r\n\r\nc")) == ["a\nb", "c"]


def test_an_empty_file_has_no_documents(write: Write) -> None:
    assert _texts(write("")) == []


def test_a_long_document_comes_in_pieces_that_join_to_the_whole(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_PIECE_CHARACTERS", 10)
    text = "one two\nthree four\n\nfive six seven\neight\n\nnine ten eleven"
    pieces = list(read_documents(write(f"{text}\n\n\nnext")))
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
        assert _texts(Path(file.name)) == texts


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
    error = _refusal(write(content))
    assert error.fields["field"] == f"dataset.{where}"
    assert error.fields["value"] == found
    assert str(error).startswith(f"dataset, {where}: {found}; allowed: ")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataset, match="there is no file nothing.txt"):
        read_documents(tmp_path / "nothing.txt")
