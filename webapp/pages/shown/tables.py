"""The table behind each chart, from the samples in the database: the same points, as rows and as CSV.

Where two attempts measured one step, the later attempt holds, as on the charts.
"""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from optimizer.base.categories import CATEGORIES, CATEGORY_LABELS, LANES, LINKS
from webapp.jobs.models import Job, Kind

SHOWN_ROWS = 500
Row = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    num_left_out: int = 0

    def newest(self, limit: int = SHOWN_ROWS) -> "Table":
        """The last ``limit`` rows; the number of the others is kept."""
        return Table(
            title=self.title,
            columns=self.columns,
            rows=self.rows[-limit:],
            num_left_out=max(0, len(self.rows) - limit),
        )

    def to_csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        return text.getvalue()


def build_table(job: Job, chart: str) -> Table:
    """Raises KeyError for a chart that does not exist."""
    return _BUILDERS[chart](job)


def samples(job: Job, kind: str) -> list[dict[str, Any]]:
    """One record a step, in order; ``Sample.Meta.ordering`` puts later attempts last, so they win."""
    by_step = {row["step"]: row["data"] for row in job.samples.filter(kind=kind).values("step", "data")}
    return [by_step[step] for step in sorted(by_step)]


def _points(job: Job) -> list[dict[str, Any]]:
    """Rows of the charts over the run; ``step`` counts tokens in a generate job."""
    return samples(job, "generate" if job.kind == Kind.GENERATE else "step")


def _memory(job: Job) -> Table:
    labels = tuple(f"{CATEGORY_LABELS[category]} (bytes)" for category in CATEGORIES)
    rows = []
    for sample in _points(job):
        found = sample.get("device_bytes") or {}
        rows.append(
            (sample["step"], sample.get("device_peak_bytes"), *(found.get(category, 0) for category in CATEGORIES))
        )
    return Table(title="Device memory over the run", columns=("step", "peak (bytes)", *labels), rows=tuple(rows))


def _timeline(job: Job) -> Table:
    labels = tuple(f"{CATEGORY_LABELS[category]} (bytes)" for category in CATEGORIES)
    records = samples(job, "timeline")
    rows = [
        (record["step"], offset_ms, *(found.get(category, 0) for category in CATEGORIES))
        for record in records[-1:]
        for offset_ms, found in record["points"]
    ]
    return Table(title="Device memory within a step", columns=("step", "offset (ms)", *labels), rows=tuple(rows))


def _host(job: Job) -> Table:
    rows = tuple((sample["step"], sample.get("host_bytes")) for sample in _points(job))
    return Table(title="Host memory over the run", columns=("step", "host (bytes)"), rows=rows)


def _loss(job: Job) -> Table:
    training = {sample["step"]: (sample.get("loss"), sample.get("learning_rate")) for sample in samples(job, "step")}
    validation = {sample["step"]: sample.get("validation_loss") for sample in samples(job, "eval")}
    rows = []
    for step in sorted({*training, *validation}):
        loss, rate = training.get(step, (None, None))
        rows.append((step, loss, validation.get(step), rate))
    return Table(title="Loss", columns=("step", "training loss", "validation loss", "learning rate"), rows=tuple(rows))


def _speed(job: Job) -> Table:
    rows = tuple((sample["step"], sample.get("tokens_per_s"), sample.get("step_ms")) for sample in _points(job))
    return Table(title="Speed", columns=("step", "tokens per second", "step (ms)"), rows=rows)


def _lanes(job: Job) -> Table:
    """The table of lanes, predictions first; a generate job's times run from its attempt's begin."""
    predicted = job.prediction or {}
    rows: list[Row] = []
    if busy := predicted.get("lane_busy_ms"):
        rows.append(("predicted", *_by_lane(busy, predicted.get("exposed_ms") or {}), None))
    for sample in _points(job):
        if "lane_ms" in sample:
            rows.append((sample["step"], *_by_lane(sample["lane_ms"], sample.get("stall_ms") or {}), sample.get("data_wait_ms")))
    names = [lane.replace("_", " ") for lane in LANES]
    waits = [f"waits for {name} (ms)" for name in (*names[1:], "data")]
    columns = ("step", *(f"{name} (ms)" for name in names), *waits)
    return Table(title="Lanes and stalls", columns=columns, rows=tuple(rows))


def _by_lane(busy: dict[str, float], waits: dict[str, float]) -> Row:
    return (*(busy.get(lane) for lane in LANES), *(waits.get(lane) for lane in LANES[1:]))


def _links(job: Job) -> Table:
    """Bytes moved by a step; of a generate job by its whole attempt."""
    rows = tuple(
        (sample["step"], *(sample["copied_bytes"].get(link) for link in LINKS))
        for sample in _points(job)
        if sample.get("copied_bytes")
    )
    columns = ("step", *(f"{link.replace('_', ' ')} (bytes)" for link in LINKS))
    return Table(title="Bytes between tiers", columns=columns, rows=rows)


_OF_CARD = {"use_percent": "use (%)", "power_w": "power (W)", "temperature_c": "temperature (°C)", "free_bytes": "free (bytes)"}


def _card(job: Job) -> Table:
    rows = tuple((sample["step"], *(sample["gpu"].get(key) for key in _OF_CARD)) for sample in _points(job) if sample.get("gpu"))
    return Table(title="The card", columns=("step", *_OF_CARD.values()), rows=rows)


_BUILDERS: dict[str, Callable[[Job], Table]] = {
    "memory": _memory,
    "timeline": _timeline,
    "host": _host,
    "loss": _loss,
    "speed": _speed,
    "lanes": _lanes,
    "links": _links,
    "card": _card,
}
CHARTS = tuple(_BUILDERS)
