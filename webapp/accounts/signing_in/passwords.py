"""Refuses passwords that are long and yet soon guessed: the account's name repeated, a row of digits or keys.

Beside Django's own rules (length, its list of 20,000 common ones). Not a measure of strength: it counts the characters that do
not follow from what stands before them.
"""

from typing import Any

from django.core.exceptions import ValidationError

MIN_FREE_CHARACTERS = 8
"""Characters of a password that do not follow from the account's name, from a repetition or from the character before."""
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm", "qwertzuiop", "1234567890")
_PROGRAM_NAME = "headroom"
_SHORTEST_NAME = 3


class GuessablePasswordValidator:
    """One of ``AUTH_PASSWORD_VALIDATORS``."""

    def validate(self, password: str, user: Any = None) -> None:
        """Raises ValidationError that says how many characters count and how many must."""
        name = user.get_username() if user is not None else ""
        num_free = count_free_characters(password, names=(name, _PROGRAM_NAME))
        if num_free < MIN_FREE_CHARACTERS:
            raise ValidationError(
                f"Too much of this password follows from your name, from a repetition or from a sequence: {num_free} of its "
                f"{len(password)} characters count; at least {MIN_FREE_CHARACTERS} must.",
                code="password_guessable",
            )

    def get_help_text(self) -> str:
        return "Your password can’t be mostly your name, repetitions or sequences such as 12345 or qwerty."


def count_free_characters(password: str, *, names: tuple[str, ...]) -> int:
    """Characters left without the names, without repetitions of the whole, and with each sequence counted once."""
    rest = password.casefold()
    for name in sorted(filter(_is_name, names), key=len, reverse=True):
        rest = rest.replace(name.casefold(), "")
    rest = _repeated_part(rest)
    return sum(not _follows(one, before) for one, before in zip(rest, " " + rest, strict=False))


def _is_name(name: str) -> bool:
    return len(name) >= _SHORTEST_NAME


def _repeated_part(text: str) -> str:
    """The shortest text of which this is a repetition, the last one perhaps cut."""
    lengths = range(1, len(text))
    return next((text[:length] for length in lengths if (text[:length] * len(text))[: len(text)] == text), text)


def _follows(character: str, before: str) -> bool:
    if abs(ord(character) - ord(before)) <= 1:
        return True
    pair = before + character
    return any(pair in row or pair[::-1] in row for row in _ROWS)
