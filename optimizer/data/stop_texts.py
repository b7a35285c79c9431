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


class TextStream:
    """The text of a continuation, piece by piece, as far as it is certain.

    Held back: characters whose bytes have not all come, and an end that may become a stop text. A token costs the decoding of
    the newest ones.
    """

    def __init__(self, stops: Sequence[str], *, decode: Callable[[Sequence[int]], str]) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        self._ids: list[int] = []
        self._context = 0
        """Index of the first token that is decoded with new ones: some decoders write the first token otherwise."""
        self._num_written = 0
        self._held = ""
        self.is_stopped = False
        """True once a stop text has come; what follows it is dropped."""

    def add(self, token: int) -> str:
        """The characters that are certain now."""
        if self.is_stopped:
            return ""
        self._ids.append(token)
        return self._release(self._newest(), is_last=False)

    def end(self) -> str:
        """The rest, when no token comes any more."""
        if self.is_stopped:
            return ""
        before = self._decode(self._ids[self._context : self._num_written])
        return self._release(self._decode(self._ids[self._context :])[len(before) :], is_last=True)

    def _newest(self) -> str:
        before = self._decode(self._ids[self._context : self._num_written])
        text = self._decode(self._ids[self._context :])
        if text.endswith(_HALF_CHARACTER) or len(text) <= len(before):
            return ""
        self._context, self._num_written = self._num_written, len(self._ids)
        return text[len(before) :]

    def _release(self, newest: str, *, is_last: bool) -> str:
        text, self._held = self._held + newest, ""
        text, self.is_stopped = cut_at_stop(text, self._stops)
        if self.is_stopped or is_last:
            return text
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        kept = len(text) - num_held
        self._held = text[kept:]
        return text[:kept]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` with which ``stop`` begins."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
