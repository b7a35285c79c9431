"""Texts that end a continuation: looked for as its tokens come, and cut off when it is over. Torch-free.

A stop text may begin in the middle of one token and end in that of another, and a character may be spread over several tokens. So
what is searched is text as the tokenizer writes it: that of the newest tokens, and, where a stop is in it, that of all of them.
"""

from collections.abc import Callable, Sequence
from typing import Final

_HALF_CHARACTER: Final = "\N{REPLACEMENT CHARACTER}"
"""The character that stands for one whose bytes have not all come."""
_BEFORE_CHARACTERS: Final = 32
"""Kept before what may be the beginning of a stop text: a decoder may write its first tokens otherwise than later ones."""


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first of the stops in it, and whether there was one."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


class StopWatch:
    """Watches one continuation: call it with each token. A token costs the decoding of the newest ones, however many
    there were."""

    def __init__(self, stops: Sequence[str], *, decode: Callable[[Sequence[int]], str]) -> None:
        """stops: none empty. decode: the text of tokens, without special ones."""
        self._stops = tuple(stops)
        self._decode = decode
        self._kept_characters = max(map(len, stops)) + _BEFORE_CHARACTERS
        self._ids: list[int] = []
        self._start = 0
        """Index of the first token that is still looked at."""

    def __call__(self, token: int) -> bool:
        """Report whether a stop text is there, now that this token is."""
        self._ids.append(token)
        newest = self._written(self._start)
        if self._is_in(newest):
            # A decoder may write a text's beginning otherwise; all of it is what is cut in the end.
            return self._is_in(self._written(0))
        if len(newest) >= 2 * self._kept_characters:
            self._forget()
        return False

    def _written(self, start: int) -> str:
        return self._decode(self._ids[start:]).rstrip(_HALF_CHARACTER)

    def _is_in(self, text: str) -> bool:
        return any(stop in text for stop in self._stops)

    def _forget(self) -> None:
        """Look at the later half of the tokens alone, if they are enough."""
        middle = (self._start + len(self._ids)) // 2
        if len(self._written(middle)) >= self._kept_characters:
            self._start = middle
