"""Cursor pages, newest first. Ids sort by creation time, so an id is the whole cursor and a page costs one index scan."""

from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlencode

from django.db.models import Model as DjangoModel
from django.db.models import QuerySet
from django.http import HttpRequest

from optimizer.base.errors import InvalidInput

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 200

R = TypeVar("R", bound=DjangoModel)


def page_of(
    request: HttpRequest, rows: "QuerySet[R]", document: Callable[[list[R]], list[dict[str, Any]]]
) -> dict[str, Any]:
    """``{"results", "next", "previous"}``; the links are whole addresses, or None at an end."""
    size = _page_size(request.GET.get("page_size"))
    direction, mark = _read_cursor(request.GET.get("cursor"))
    if direction == "p":
        found = _rows(rows, rows.filter(pk__gt=mark).order_by("pk")[: size + 1])
        has_more, shown = len(found) > size, list(reversed(found[:size]))
        before, after = has_more, bool(shown)
    else:
        found = _rows(rows, (rows.filter(pk__lt=mark) if mark else rows).order_by("-pk")[: size + 1])
        has_more, shown = len(found) > size, found[:size]
        before, after = bool(mark and shown), has_more
    return {
        "results": document(shown),
        "next": _link(request, f"n.{shown[-1].pk}") if after and shown else None,
        "previous": _link(request, f"p.{shown[0].pk}") if before and shown else None,
    }


def _rows(rows: "QuerySet[R]", page: "QuerySet[R]") -> list[R]:
    """The ids are looked up first, which an index can do alone; the rows, some with large documents, are read by them."""
    ids = list(page.values_list("pk", flat=True))
    found = rows.in_bulk(ids)
    return [found[pk] for pk in ids if pk in found]


def _page_size(text: str | None) -> int:
    if text is None:
        return DEFAULT_PAGE_SIZE
    if not (text.isascii() and text.isdigit() and len(text) < 10) or not 1 <= int(text) <= MAX_PAGE_SIZE:
        raise InvalidInput(
            f"page_size is {text[:20]!r}; allowed: 1 to {MAX_PAGE_SIZE}",
            field="page_size",
            value=text[:20],
            allowed={"minimum": 1, "maximum": MAX_PAGE_SIZE},
        )
    return int(text)


def _read_cursor(text: str | None) -> tuple[str, str]:
    if not text:
        return "n", ""
    direction, _, mark = text.partition(".")
    if direction not in ("n", "p") or not mark or len(mark) > 60:
        raise InvalidInput(
            f"cursor is {text[:40]!r}; allowed: one from next or previous",
            field="cursor",
            value=text[:40],
            allowed="from next or previous",
        )
    return direction, mark


def _link(request: HttpRequest, cursor: str) -> str:
    query = {key: value for key, value in request.GET.items() if key != "cursor"}
    return request.build_absolute_uri(f"{request.path}?{urlencode({**query, 'cursor': cursor})}")
