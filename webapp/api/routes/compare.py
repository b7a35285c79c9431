"""``/compare``: jobs side by side."""

from typing import Any, Literal

from django.http import HttpRequest
from ninja import Router, Schema

from webapp.planning.runs.comparing import Comparison, compare_jobs, read_jobs

router = Router()


class ComparedJob(Schema):
    """One of the jobs, in the order asked for."""

    id: str
    name: str
    state: str


class JobDifference(Schema):
    """One thing on which the jobs do not agree; values in their order."""

    group: Literal["setting", "plan"]
    name: str
    values: list[Any]


class JobOutcome(Schema):
    """One number of each job; null where it was not measured."""

    name: str
    unit: Literal["bytes", "ms", "s", "per_s", "number"]
    values: list[float | None]
    lower_is_better: bool | None


class JobDecisionCost(Schema):
    """The predicted effect of one decision of another job on the first job's plan."""

    job_index: int
    decision: str
    device_change_bytes: int
    step_change_ms: float
    tokens_per_s_change: float


class ComparisonAnswer(Schema):
    """Only what differs, what came of it, and what each decision cost."""

    jobs: list[ComparedJob]
    differences: list[JobDifference]
    outcomes: list[JobOutcome]
    costs: list[JobDecisionCost]
    unpriced: str


@router.get("/compare", response=ComparisonAnswer, tags=["jobs"])
def compare(request: HttpRequest, jobs: str = "") -> Comparison:
    """Two to ten of your jobs, as ids parted by commas; the first is what the others are held against."""
    return compare_jobs(read_jobs(request.user, [name for name in jobs.split(",") if name]))
