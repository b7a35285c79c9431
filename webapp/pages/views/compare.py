"""Runs side by side: their curves over each other, what differs, what came of it, what each decision cost."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from optimizer.base.errors import InvalidInput
from webapp.jobs.models import Job, Kind
from webapp.pages.templatetags.headroom import setting_value
from webapp.planning.runs.comparing import MAX_JOBS, MIN_JOBS, Comparison, Outcome, compare_jobs, read_jobs

LETTERS = "ABCDEFGHIJ"
_FIELDS = "loss,device_peak_bytes,tokens_per_s"
"""Fields of each step that the curves need."""


@dataclass(frozen=True, kw_only=True)
class ComparedJob:
    """One job with the letter it is called by on this page."""

    letter: str
    job: Job


@require_GET
@login_required
def compare_page(request: HttpRequest) -> HttpResponse:
    wanted = request.GET.getlist("job")
    try:
        comparison = compare_jobs(read_jobs(request.user, wanted))
    except InvalidInput as error:
        context = {"trouble": str(error) if wanted else "", "least": MIN_JOBS, "most": MAX_JOBS}
        return render(request, "jobs/compare.html", context, status=422 if wanted else 200)
    return render(request, "jobs/compare.html", _context(comparison))


def _context(comparison: Comparison) -> dict[str, Any]:
    runs = [ComparedJob(letter=letter, job=job) for letter, job in zip(LETTERS, comparison.jobs, strict=False)]
    outcomes = [_marked(outcome) for outcome in comparison.outcomes]
    return {
        "runs": runs,
        "differences": list(_priced(comparison)),
        "outcomes": outcomes,
        "unpriced": comparison.unpriced,
        "step_word": "token" if comparison.jobs[0].kind == Kind.GENERATE else "step",
        "has_loss": any(job.kind != Kind.GENERATE for job in comparison.jobs),
        "facts": {
            "runs": [
                {
                    "letter": run.letter,
                    "name": run.job.name,
                    "metrics": f"/api/v1/jobs/{run.job.pk}/metrics?max_points=1200&fields={_FIELDS}",
                }
                for run in runs
            ],
            "settings": [
                {"name": each.name, "unit": _unit(each.name), "values": list(each.values)}
                for each in comparison.differences
                if all(_is_number(value) for value in each.values)
            ],
            "outcomes": [
                {"name": each.name, "unit": each.unit, "values": list(each.values)} for each in comparison.outcomes
            ],
        },
    }


def _priced(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Each difference with what every run's value would cost the first; of a decision with several rows the first has it."""
    costs = {(cost.decision, cost.job_index): cost for cost in comparison.costs}
    for difference in comparison.differences:
        thing = difference.name.partition(",")[0] if difference.group == "plan" else difference.name
        cells = [
            {"value": value, "cost": costs.pop((thing, index), None)} for index, value in enumerate(difference.values)
        ]
        # an empty list and nothing at all read alike
        if len({setting_value(difference.name, value) for value in difference.values}) > 1:
            yield {"name": difference.name, "cells": cells}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unit(name: str) -> str:
    return "bytes" if name.endswith("_bytes") else "number"


def _marked(outcome: Outcome) -> dict[str, Any]:
    """With the best value marked, where one is and not all are alike."""
    known = [value for value in outcome.values if value is not None]
    best = None
    if outcome.lower_is_better is not None and len(set(known)) > 1:
        best = min(known) if outcome.lower_is_better else max(known)
    cells = [{"value": value, "is_best": value is not None and value == best} for value in outcome.values]
    return {"name": outcome.name, "unit": outcome.unit, "cells": cells}
