"""Input that people and programs send by mistake: values of every wrong kind, and JSON documents with one thing changed."""

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

Path = tuple[str | int, ...]
JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**40, 0.0, -0.5, 1e-320, 1e308, float("nan"), float("inf"),
    "", " ", "1", "NaN", "llama", "\0", "\ud800", "ä" * 300, [], [1], [None], ["x"] * 40, [[[[]]]], {}, {"": 1}, {"a": {"b": []}},
)  # fmt: skip
junk = st.sampled_from(JUNK)
numbers = st.sampled_from([0, 1, -1, 2, 3, 5, 7, 2**16, 2**31, 10**40])


def with_changes(document: Any, *, values: st.SearchStrategy[Any] = junk, most: int = 2) -> st.SearchStrategy[Any]:
    """The document with a value or two replaced, left out, or a key added."""
    paths = list(list_paths(document))
    kinds = st.sampled_from(["replace", "replace", "replace", "leave out", "add"])
    changes = st.lists(st.tuples(kinds, st.sampled_from(paths), values), min_size=1, max_size=most)
    return changes.map(lambda drawn: change_document(document, drawn))


def list_paths(document: Any, path: Path = ()) -> Iterator[Path]:
    items: Any = ()
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = list(enumerate(document))[:3]
    for key, value in items:
        yield (*path, key)
        yield from list_paths(value, (*path, key))


def change_document(document: Any, changes: list[tuple[str, Path, Any]]) -> Any:
    changed = copy.deepcopy(document)
    for kind, path, value in changes:
        holder = changed
        try:
            for key in path[:-1]:
                holder = holder[key]
            if kind == "replace":
                holder[path[-1]] = copy.deepcopy(value)
            elif kind == "leave out":
                del holder[path[-1]]
            elif isinstance(holder, dict):
                holder["unknown"] = copy.deepcopy(value)
        except (KeyError, IndexError, TypeError):
            continue  # An earlier change took the place away.
    return changed
