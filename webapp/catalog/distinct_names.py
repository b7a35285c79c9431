"""Names for lists to choose from, in which no two rows read alike: a name, and where it is ambiguous its project, time or id."""

from collections import Counter
from collections.abc import Callable, Iterable

from django.utils import timezone

from webapp.catalog.models import Dataset, Model


def distinct_names(rows: Iterable[Model | Dataset]) -> dict[str, str]:
    """By id. Rows should come with ``project`` selected."""
    listed = list(rows)
    names = {row.pk: row.name for row in listed}
    for add in _PARTS:
        counted = Counter(names.values())
        ambiguous = [row for row in listed if counted[names[row.pk]] > 1]
        names |= {row.pk: f"{names[row.pk]} · {add(row)}" for row in ambiguous}
    return names


def _project(row: Model | Dataset) -> str:
    return row.project.name if row.project else "bundled"


def _added(row: Model | Dataset) -> str:
    return f"added {timezone.localtime(row.created_at):%Y-%m-%d %H:%M}"


def _id_end(row: Model | Dataset) -> str:
    return f"…{row.pk[-6:]}"


_PARTS: tuple[Callable[[Model | Dataset], str], ...] = (_project, _added, _id_end)
"""Each is added only where the names before it leave two rows alike."""
