"""One shape for "this value of a config is wrong": the field, the value cut to what an answer can carry, what is allowed."""

from typing import Any

from optimizer.base.errors import InvalidModel

MAX_SHOWN_CHARACTERS = 80


def refusal(field: str, value: Any, *, allowed: Any) -> InvalidModel:
    """The error to raise; its facts are JSON-able and short, whatever was submitted."""
    listed = ", ".join(map(str, allowed)) if isinstance(allowed, list) else allowed
    found = "missing" if value is None else _as_written(value)
    return InvalidModel(f"{field} is {found}; allowed: {listed}", field=field, value=_fact(value), allowed=allowed)


def shown(value: Any) -> str:
    """A value for an error's text, cut so that a hostile one cannot flood the page."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[: MAX_SHOWN_CHARACTERS - 3]}..."


def _as_written(value: Any) -> str:
    """A text that reads as something else stands in quotes."""
    if not isinstance(value, str):
        return shown(value)
    is_word = value.strip().lower() in ("", "true", "false", "null", "none")
    return f"the text {shown(value)!r}" if is_word or _is_number(value) else shown(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _fact(value: Any) -> Any:
    """The value itself where JSON and a browser can hold it, else its text."""
    is_plain = value is None or isinstance(value, bool)
    is_number = isinstance(value, int | float) and abs(value) < 2**53  # false for NaN
    return value if is_plain or is_number else shown(value)
