"""Sizes as people write them, and where they are refused."""

import pytest

from optimizer.base.units import format_slowdown, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("12 GiB", 12 * 2**30),
        ("1.5KiB", 1536),
        ("7 B", 7),
        (7, 7),
        ("0", 0),
        ("3000000", 3_000_000),
        ("2 MB", 2_000_000),
        ("9007199254740993 B", 2**53 + 1),
    ],
)
def test_a_size_is_read_exactly(text: int | str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("five", "is not understood"),
        ("8", "has no unit; 8 GiB?"),
        ("1048575", "has no unit"),
        ("6e9", "is not understood"),
        (-1, "is negative"),
        (-(10**400), "is negative"),
        ("9" * 400 + " GiB", "has 400 digits"),
        ("99999999 TiB", "over 2^60 bytes"),
        (10**400, "over 2^60 bytes"),
    ],
)
def test_a_text_that_is_no_size_is_refused_in_few_words(text: int | str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason.replace("^", r"\^")) as found:
        parse_bytes(text)
    assert len(str(found.value)) < 200


@pytest.mark.parametrize(
    ("times", "words"),
    [(0.99, "as fast"), (1.004, "as fast"), (1.32, "32 % slower"), (2.46, "2.5 times as long"), (14.4, "14 times as long")],
)
def test_a_slowdown_is_a_share_until_it_is_a_multiple(times: float, words: str) -> None:
    assert format_slowdown(times) == words
