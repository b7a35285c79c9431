"""Finds the next plan of a generate job that ran out of memory, as ``replanning`` does for training.

The spec is frozen, and finished prompts stay. The search is asked again under smaller budgets, so that the bytes by which an
attempt was predicted too low stay free; never for a plan that ran out.
"""

import math
from dataclasses import replace
from typing import Any, Final

from optimizer.base.errors import NoFeasiblePlan
from optimizer.estimate.job.causes import missing_bytes
from optimizer.goal import GenerationGoal
from optimizer.plan.explain.diff import describe_generation_change
from optimizer.plan.generation import GenerationPlan
from webapp.jobs.models import MEMORY_REASONS, Attempt, Job
from webapp.jobs.specs.generation import read_generate_spec
from webapp.planning.replanning import NextPlan
from webapp.planning.search.generation import asked_by_generation, find_generation
from webapp.planning.search.profile_requests import ready_profile
from webapp.planning.search.resolve import place_of

_MARGINS: Final = (1.25, 2.5, 5.0)
"""Missing is likely so many times what was seen of it; the larger ones where the search finds a plan that ran out."""
_AFTER_KILL: Final = 0.85
"""Share of the host memory that was predicted, after the host ended the process without a word of how much was missing."""


def find_next_generation_plan(job: Job) -> NextPlan | None:
    """None while the model's profile is being made. Raises NoFeasiblePlan, ProfileFailed, InvalidInput."""
    spec = read_generate_spec(job.owner, job.spec)
    asked = asked_by_generation(spec)
    profile = ready_profile(asked.need)
    attempts = list(job.attempts.select_related("machine").filter(outcome__in=MEMORY_REASONS).order_by("number"))
    machine = (attempts[-1].machine if attempts else None) or job.machine
    if profile is None or machine is None or job.plan is None:
        return None
    [question] = asked.complete(profile, [place_of(machine)])
    tried = [GenerationPlan.from_json(attempt.plan) for attempt in attempts if attempt.plan]
    ran = GenerationPlan.from_json(job.plan)
    smallest: dict[str, Any] = {}
    for margin in _MARGINS:
        goal = _with_room(spec.goal, attempts, margin=margin)
        answer = find_generation(replace(question, goal=goal))
        if answer.chosen is None:
            smallest = answer.nothing_fits.error().fields if answer.nothing_fits else {}
            break
        if answer.chosen.plan not in tried:
            return NextPlan(
                plan=answer.chosen.plan.to_json(),
                prediction=answer.chosen.prediction.to_json(),
                machine=machine,
                change=describe_generation_change(ran, answer.chosen.plan),
            )
    raise NoFeasiblePlan(
        budget_bytes=spec.goal.device_budget_bytes,
        smallest_feasible_bytes=int(smallest.get("smallest_feasible_bytes", spec.goal.device_budget_bytes)),
        bytes_by_category=smallest.get("bytes_by_category", {}),
    )


def _with_room(goal: GenerationGoal, attempts: list[Attempt], *, margin: float) -> GenerationGoal:
    """The same goal with budgets such that a plan may be predicted too low by as much as those that ran out, and more.

    Each further attempt on a tier is taken to have shown twice as much.
    """
    limits: dict[str, list[int]] = {"device": [goal.device_budget_bytes], "host": []}
    num_before = {"device": 0, "host": 0}
    if goal.host_budget_bytes is not None:
        limits["host"].append(goal.host_budget_bytes)
    for attempt in attempts:
        fields: dict[str, Any] = (attempt.error or {}).get("fields") or {}
        tier = "host" if fields.get("tier") == "host" or fields.get("cause") == "host_killed" else "device"
        predicted_bytes = int((attempt.prediction or {}).get(f"{tier}_peak_bytes", 0))
        if fields.get("cause") == "host_killed":
            limits[tier].append(int(_AFTER_KILL * predicted_bytes))
        else:
            likely_bytes = math.ceil(margin * max(1, missing_bytes(fields)) * 2 ** num_before[tier])
            num_before[tier] += 1
            limits[tier].append(predicted_bytes - likely_bytes)
    return replace(
        goal,
        device_budget_bytes=max(1, min(limits["device"])),
        host_budget_bytes=max(0, min(limits["host"])) if limits["host"] else None,
    )
