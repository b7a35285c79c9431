"""Reads JSON bodies strictly: what JSON lacks (NaN) and what no database keeps (NUL, half characters) is refused here.

So is an object with a key twice, and a body of more keys than any question needs: naming them in a refusal would take seconds.
So nothing behind the API has to ask whether a text can be stored, or whether a number can be written again as JSON.
"""

import json
from typing import Any, cast

from django.http import HttpRequest
from ninja.parser import Parser

from optimizer.base.unique_keys import refuse_duplicates

MAX_KEYS = 20_000
"""Counted over all objects of a body; an upload of 1,100 files has 4,400."""
MAX_KEYS_EACH = 1_000


class JsonParser(Parser):
    """Raises ValueError that says what is wrong; ninja answers 400 with it."""

    def parse_body(self, request: HttpRequest) -> dict[str, Any]:
        try:
            document = json.loads(request.body, parse_constant=_refuse_constant, object_pairs_hook=_KeyCounter())
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        except ValueError as error:
            if "integer string conversion" not in str(error):
                raise
            raise ValueError("a number has more than 4,300 digits") from None
        _check_texts(document)
        return cast(dict[str, Any], document)


class _KeyCounter:
    """An ``object_pairs_hook`` for one body."""

    def __init__(self) -> None:
        self._num_keys = 0

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._num_keys += len(pairs)
        if len(pairs) > MAX_KEYS_EACH:
            raise ValueError(f"an object has {len(pairs):,} keys; allowed: at most {MAX_KEYS_EACH:,}")
        if self._num_keys > MAX_KEYS:
            raise ValueError(f"its objects have more than {MAX_KEYS:,} keys")
        return refuse_duplicates(pairs)


def is_storable(text: str) -> bool:
    """Report whether a database takes the text: no NUL, and only characters that UTF-8 has."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check_texts(document: Any) -> None:
    """Without recursion, since the document may be as deep as its reader allowed."""
    waiting = [document]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str) and not is_storable(item):
            raise ValueError(f"the text {item!a:.80} holds a NUL or half a character")
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            waiting += item
