"""The list of jobs as an address asks for it: filtered, sorted, grouped, a page at a time, without the large documents.

Specs, plans and predictions stay in the database: of a spec only the budget is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from django.db.models import F, FloatField, Q, QuerySet
from django.db.models.fields.json import KT
from django.db.models.functions import Cast
from django.http import QueryDict

from webapp.jobs.models import Job, Kind, Sample, State
from webapp.jobs.queries import LARGE_DOCUMENTS, LARGE_DOCUMENTS_OF_MODEL, rows_of_page

PAGE_SIZE: Final = 25
SPARK_POINTS: Final = 40
SORTS: Final[dict[str, Any]] = {
    "created": F("pk"),  # ids sort by creation time
    "name": F("name"),
    "state": F("state"),
    "peak": Cast(KT("summary__device_peak_bytes"), FloatField()),
    "speed": Cast(KT("summary__tokens_per_s"), FloatField()),
    "loss": Cast(KT("summary__loss"), FloatField()),
}
GROUPS: Final = {"model": "model__name", "dataset": "dataset__name", "state": "state"}
COLUMNS: Final = ("progress", "peak", "budget", "speed", "loss", "created")
STARTED_STATES: Final = {"running": (State.STARTING, State.RUNNING), "waiting": (State.QUEUED,)}
"""Words that name several states, or one by what people call it."""
_TRAINS: Final = (Kind.TRAIN,)


@dataclass(frozen=True, kw_only=True)
class View:
    """One view of the list, read from its address; what is not understood is left out."""

    query: str = ""
    state: str = ""
    tag: str = ""
    sort: str = "created"
    is_ascending: bool = False
    group: str = ""
    columns: tuple[str, ...] = COLUMNS
    before: str = ""
    """Id of the last job of the page before, where the newest come first."""
    page: int = 1
    """Number of the page, where they are sorted or grouped otherwise."""

    @property
    def is_by_creation(self) -> bool:
        return self.sort == "created" and not self.is_ascending and not self.group

    def parameters(self, **changes: Any) -> list[tuple[str, str]]:
        """The address's parameters, without pages unless they are among the changes."""
        sort = f"{'' if self.is_ascending else '-'}{self.sort}"
        known = {
            "q": self.query,
            "state": self.state,
            "tag": self.tag,
            "sort": "" if sort == "-created" else sort,
            "group": self.group,
        }
        pairs = [(name, str(text)) for name, text in (known | changes).items() if text]
        columns = [("columns", name) for name in self.columns] if self.columns != COLUMNS else []
        return pairs + columns


_FIELDS: Final = ("q", "state", "tag", "sort", "group", "before", "page")


def read_view(query: QueryDict) -> View:
    texts = {name: query.get(name, "").replace("\0", "").strip()[:200] for name in _FIELDS}
    sort = texts["sort"].removeprefix("-")
    columns = tuple(name for name in COLUMNS if name in query.getlist("columns"))
    return View(
        query=texts["q"],
        state=texts["state"] if texts["state"] in (*State.values, *STARTED_STATES) else "",
        tag=texts["tag"],
        sort=sort if sort in SORTS else "created",
        is_ascending=sort in SORTS and not texts["sort"].startswith("-"),
        group=texts["group"] if texts["group"] in GROUPS else "",
        columns=columns or COLUMNS,
        before=texts["before"],
        page=int(texts["page"]) if texts["page"].isdecimal() and len(texts["page"]) < 6 and int(texts["page"]) else 1,
    )


@dataclass(frozen=True, kw_only=True)
class Page:
    """Jobs of one page, and whether there are more."""

    jobs: Sequence[Job]
    has_more: bool
    sparks: Mapping[str, str] = field(default_factory=dict)
    """Points of a polyline in a box of 72 by 24, by job id."""


def read_page(visible: QuerySet[Job], view: View) -> Page:
    """Three queries: which jobs, their rows, and the losses for their sparklines."""
    large = (*LARGE_DOCUMENTS, *LARGE_DOCUMENTS_OF_MODEL, "dataset__columns", "dataset__facts", "notes")
    rows = visible.select_related("model", "dataset").defer(*large).annotate(budget=KT("spec__goal__device_budget_bytes"))
    found = _filtered(visible, view)
    order = SORTS[view.sort]
    ordered = order.asc(nulls_last=True) if view.is_ascending else order.desc(nulls_last=True)
    groups = [F(GROUPS[view.group]).asc(nulls_last=True)] if view.group else []
    found = found.order_by(*groups, ordered, "-pk")
    start = 0
    if view.is_by_creation and view.before:
        found = found.filter(pk__lt=view.before)
    elif not view.is_by_creation:
        start = (view.page - 1) * PAGE_SIZE
    jobs = rows_of_page(found[start : start + PAGE_SIZE + 1], rows)
    shown = jobs[:PAGE_SIZE]
    return Page(jobs=shown, has_more=len(jobs) > PAGE_SIZE, sparks=_sparks(shown) if "loss" in view.columns else {})


def _filtered(visible: QuerySet[Job], view: View) -> QuerySet[Job]:
    found = visible.select_related(None)
    if view.query:
        found = found.filter(Q(name__icontains=view.query) | Q(pk__iendswith=view.query))
    if view.state:
        found = found.filter(state__in=STARTED_STATES.get(view.state, (view.state,)))
    if view.tag:
        # a tag has no quote in it, so its JSON is found as text on every database
        found = found.filter(tags__icontains=f'"{view.tag}"')
    return found


def _sparks(jobs: Sequence[Job]) -> dict[str, str]:
    """Losses at evenly spread steps, in one query that the index of samples answers."""
    wanted = Q(pk__in=[])
    for job in jobs:
        if job.kind in _TRAINS and job.step > 1:
            stride = max(1, job.step // SPARK_POINTS)
            wanted |= Q(job_id=job.pk, step__in=range(1, job.step + 1, stride))
    losses: dict[str, list[float]] = {}
    points = Sample.objects.filter(wanted, kind="step", loss__isnull=False).order_by("job", "step", "attempt")
    for job_id, loss in points.values_list("job_id", "loss"):
        if loss is not None:
            losses.setdefault(job_id, []).append(loss)
    return {job_id: spark_points(values) for job_id, values in losses.items() if len(values) > 1}


def spark_points(values: Sequence[float]) -> str:
    """Points of an SVG polyline, 72 wide and 24 high; values that do not change lie in the middle."""
    low, high = min(values), max(values)
    height = [12.0 if high == low else 22 - 20 * (value - low) / (high - low) for value in values]
    return " ".join(f"{72 * index / (len(values) - 1):.1f},{y:.1f}" for index, y in enumerate(height))
