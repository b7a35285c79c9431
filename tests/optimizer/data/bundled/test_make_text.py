"""The bundled text is laid out as its maker says."""

import pytest

from optimizer.data.bundled import TEXT_FILE
from optimizer.data.bundled.make_text import format_text


def test_verses_chapters_and_books_are_laid_out() -> None:
    lines = ["Ge1:1 In the  beginning", "Ge1:2 And", "Ge2:1 Thus", "Exo1:1 Now"]
    assert list(format_text(lines)) == [
        "Genesis", "", "1:1 In the beginning", "1:2 And", "", "2:1 Thus", "", "", "Exodus", "", "1:1 Now",
    ]  # fmt: skip


def test_a_line_that_is_no_verse_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a verse: 'nonsense'"):
        list(format_text(["nonsense"]))


def test_the_bundled_text_is_whole_and_plain() -> None:
    content = TEXT_FILE.read_bytes()
    assert len(content) > 1_000_000
    assert content.isascii()
    lines = content.decode().splitlines()
    assert sum(line[:1].isdigit() and ":" in line[:8] for line in lines) == 31_102
    assert lines[-1].startswith("22:21 The grace of our Lord Jesus Christ")
