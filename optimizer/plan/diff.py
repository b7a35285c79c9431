"""Where two plans differ, and nothing else: for the page that compares offers and for the record of a re-plan."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from optimizer.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One decision on which the plans disagree."""

    path: str
    """Dotted, as in the JSON; neighbouring blocks are one: ``activations.per_block[0:8]``, the end not included."""
    a: Any
    b: Any


def diff_plans(a: Plan, b: Plan) -> list[Difference]:
    """All differences, in the order of the JSON. Plans of different depth differ in the whole of ``per_block``."""
    return list(_differences(a.to_json(), b.to_json(), path=""))


def _differences(a: Any, b: Any, *, path: str) -> Iterator[Difference]:
    if a == b:
        return
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            yield from _differences(a.get(key), b.get(key), path=f"{path}.{key}" if path else key)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        yield from _runs(a, b, path=path)
    else:
        yield Difference(path=path, a=a, b=b)


def _runs(a: list[Any], b: list[Any], *, path: str) -> Iterator[Difference]:
    """Neighbours that differ in the same way become one difference."""
    for (left, right), group in groupby(enumerate(zip(a, b, strict=True)), key=lambda item: item[1]):
        indices = [index for index, _ in group]
        if left != right:
            first, last = indices[0], indices[-1]
            where = f"[{first}]" if first == last else f"[{first}:{last + 1}]"
            yield Difference(path=f"{path}{where}", a=left, b=right)
