"""Reads JSON objects whose keys occur once each: two parsers that read the same file must not see two documents."""

from typing import Any


def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An ``object_pairs_hook`` of ``json.loads``. Raises ValueError that names the first key that occurs twice."""
    document = dict(pairs)
    if len(document) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {twice[:80]!r} occurs twice")
    return document
