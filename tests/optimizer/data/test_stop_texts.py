"""Stop texts: found as soon as they are written, however tokens part them, and looked for in the newest tokens alone."""

from collections.abc import Callable
from typing import Any

import pytest

from optimizer.data.prompt_tokens import PromptTokenizer
from optimizer.data.stop_texts import StopWatch, cut_at_stop

TOKENIZER = PromptTokenizer(None, vocab_size=4096)
TEXT = "In the beginning God created the heaven and the earth. Füße, 日本語 and 🙂🙂 ends. And the earth was without form, " * 6


def ids_of(text: str) -> list[int]:
    return TOKENIZER.loaded.tokenizer.encode(text).ids


def num_until_stop(ids: list[int], stops: tuple[str, ...], decode: Callable[..., Any] = TOKENIZER.decode) -> int | None:
    """Tokens up to the one that the watch calls the last; None where it calls none."""
    watch = StopWatch(stops, decode=decode)
    return next((count for count, token in enumerate(ids, 1) if watch(token)), None)


@pytest.mark.parametrize(
    "stop", ["ning God", "h. F", "üß", "語 a", "\N{SLIGHTLY SMILING FACE}\N{SLIGHTLY SMILING FACE} e", "without form", ", In"]
)
def test_a_stop_text_is_found_with_the_token_that_completes_it(stop: str) -> None:
    ids = ids_of(TEXT)
    expected = next(count for count in range(1, len(ids)) if stop in TOKENIZER.decode(ids[:count]))
    assert num_until_stop(ids, (stop,)) == expected
    assert num_until_stop(ids, ("not there", stop)) == expected


def test_a_stop_text_that_does_not_come_ends_nothing() -> None:
    assert num_until_stop(ids_of(TEXT), ("Genesis",)) is None


def test_a_long_stop_text_is_found_far_behind_the_beginning() -> None:
    stop = "🙂🙂 ends. And the earth was without form, In the beginning God created the heaven and the earth. Füße"
    ids = ids_of("word " * 300 + TEXT)
    expected = next(count for count in range(300, len(ids)) if stop in TOKENIZER.decode(ids[:count]))
    assert num_until_stop(ids, (stop,)) == expected


def test_half_a_character_is_no_text_to_stop_at() -> None:
    ids = ids_of("a 日本")
    assert "\N{REPLACEMENT CHARACTER}" in TOKENIZER.decode(ids[:-1])
    assert num_until_stop(ids, ("\N{REPLACEMENT CHARACTER}",)) is None


def test_a_token_costs_the_decoding_of_a_few_of_the_newest_however_long_the_text_is() -> None:
    lengths = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return TOKENIZER.decode(ids)

    num_until_stop(ids_of("In the beginning God created the heaven. " * 200), ("not there",), decode)
    assert max(lengths) < 60


def test_a_text_is_cut_before_the_first_of_its_stops() -> None:
    assert cut_at_stop("one, two; three", ("; ", ", ")) == ("one", True)
    assert cut_at_stop("one", (",",)) == ("one", False)
