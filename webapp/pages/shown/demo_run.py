"""The demo's run, for the first page: the newest that this service made, else the one recorded in ``demo/recorded.json``.

A run is a small document: what plain training and Headroom's plan need at the peak, by category and in bytes, against the
budget in bytes; validation loss before and after; which machine, and when.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from webapp.jobs.models import Attempt, Job, State
from webapp.jobs.queries import jobs_visible_to
from webapp.pages.presentation import StackedBar, stacked_bar

RECORDED_FILE: Final = Path(__file__).parents[3] / "demo" / "recorded.json"
TUNED, REFUSED = "chat-demo", "chat-demo-plain-too-small"
"""Names that ``headroom demo`` gives its jobs: one with the chosen plan, one with no memory saved."""


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """Two bars on one scale, and the figures of the sentence under them."""

    document: Mapping[str, Any]
    plain: StackedBar
    headroom: StackedBar
    job_id: str
    """Id of the job to look at; empty for the recorded run."""


def demo_run(user: Any) -> DemoRun:
    """Raises nothing: a service without runs shows the recorded one."""
    job = jobs_visible_to(user).filter(name=TUNED, state=State.SUCCEEDED).order_by("-pk").first()
    document = demo_document(job) if job else None
    return draw(document, job_id=job.pk) if job and document else draw(recorded(), job_id="")


@cache
def recorded() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(RECORDED_FILE.read_text())
    return document


def demo_document(tuned: Job) -> dict[str, Any] | None:
    """None where the run of plain training, or one of the measurements, is not in the record."""
    same_data = Job.objects.filter(project_id=tuned.project_id, dataset_id=tuned.dataset_id)
    refused = same_data.filter(name=REFUSED).order_by("-pk").first()
    attempts = Attempt.objects.filter(job=tuned).exclude(measured=None).order_by("-number")
    measured = attempts.values_list("measured", flat=True).first()
    plain_bytes = (refused.prediction or {}).get("device_bytes_by_category") if refused else None
    headroom_bytes = (measured or {}).get("device_bytes_by_category")
    if not plain_bytes or not headroom_bytes or tuned.machine is None or tuned.finished_at is None:
        return None
    return {
        "model": tuned.model.name,
        "dataset": tuned.dataset.name if tuned.dataset else "",
        "budget_bytes": tuned.spec["goal"]["device_budget_bytes"],
        "plain_bytes": plain_bytes,
        "headroom_bytes": headroom_bytes,
        "predicted_bytes": (tuned.prediction or {}).get("device_peak_bytes"),
        "loss": [tuned.summary.get("validation_loss_start"), tuned.summary.get("validation_loss")],
        "machine": tuned.machine.document["device"]["name"],
        "finished_on": tuned.finished_at.date().isoformat(),
    }


def draw(document: Mapping[str, Any], *, job_id: str) -> DemoRun:
    budget_bytes, plain, headroom = document["budget_bytes"], document["plain_bytes"], document["headroom_bytes"]
    widest_bytes = max(sum(plain.values()), sum(headroom.values()))
    return DemoRun(
        document=document,
        plain=stacked_bar(plain, budget_bytes=budget_bytes, widest_bytes=widest_bytes),
        headroom=stacked_bar(headroom, budget_bytes=budget_bytes, widest_bytes=widest_bytes),
        job_id=job_id,
    )
