"""Runs side by side: their curves over each other, what differs, what came of it, what each decision cost."""

from dataclasses import dataclass
from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from optimizer.errors import InvalidInput
from webapp.jobs.comparing import MAX_JOBS, MIN_JOBS, Comparison, Outcome, compare_jobs, read_jobs
from webapp.jobs.models import Job

LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True, kw_only=True)
class Run:
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
    runs = [Run(letter=letter, job=job) for letter, job in zip(LETTERS, comparison.jobs, strict=False)]
    outcomes = [_marked(outcome) for outcome in comparison.outcomes]
    return {
        "runs": runs,
        "differences": comparison.differences,
        "outcomes": outcomes,
        "costs": [
            {"cost": cost, "letter": runs[cost.job_index].letter, "decision": cost.decision.replace("_", " ")}
            for cost in comparison.costs
        ],
        "unpriced": comparison.unpriced,
        "facts": {
            "runs": [
                {
                    "letter": run.letter,
                    "name": run.job.name,
                    "metrics": f"/api/v1/jobs/{run.job.pk}/metrics?max_points=2000",
                }
                for run in runs
            ],
            "outcomes": [
                {"name": each.name, "unit": each.unit, "values": list(each.values)} for each in comparison.outcomes
            ],
        },
    }


def _marked(outcome: Outcome) -> dict[str, Any]:
    """With the best value marked, where one is and not all are alike."""
    known = [value for value in outcome.values if value is not None]
    best = None
    if outcome.lower_is_better is not None and len(set(known)) > 1:
        best = min(known) if outcome.lower_is_better else max(known)
    cells = [{"value": value, "is_best": value is not None and value == best} for value in outcome.values]
    return {"name": outcome.name, "unit": outcome.unit, "cells": cells}
