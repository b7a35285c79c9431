"""Finds the next plan of a generate job that ran out of memory or disk, as ``replanning`` does for training.

The spec is frozen, and finished prompts stay. The search is asked again under smaller budgets, so that the bytes by which an
attempt was predicted too low stay free; never for a plan that ran out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from optimizer.base.errors import NoFeasiblePlan
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.job.causes import missing_bytes
from optimizer.estimate.job.shortfalls import held_on_host
from optimizer.goal import GenerationGoal
from optimizer.plan.explain.diff import describe_generation_change
from optimizer.plan.generation import GenerationPlan
from webapp.jobs.documents import fills_disk
from webapp.jobs.models import PLAN_REASONS, Attempt, Job, Reason
from webapp.jobs.specs.generation import read_generate_spec
from webapp.planning.replanning import NextPlan
from webapp.planning.search.generation import (
    GenerationQuestion,
    asked_by_generation,
    find_generation,
    problem_of_generation,
)
from webapp.planning.search.profile_requests import ready_profile
from webapp.planning.search.resolve import place_of

_LADDER: Final = ((1.25, False), (2.5, False), (5.0, False), (None, False), (None, True))
"""Missing is likely so many times what was seen of it; the larger ones where the search finds a plan that ran out. None: as much
as was seen, where no plan leaves more. True: after the host's killer the smaller part of what was in its memory shrinks, in
passes; loading is held to the job's own budgets then, since it takes what it takes for a moment under any plan."""
_AFTER_KILL: Final = 0.85
"""Share of the memory that was predicted, after the host ended the process without a word of how much was missing."""
_MOST_AFTER_KILL: Final = 0.97
"""The same where no plan takes so little."""


def find_next_generation_plan(job: Job) -> NextPlan | None:
    """None while the model's profile is being made. Raises NoFeasiblePlan, ProfileFailed, InvalidInput."""
    spec = read_generate_spec(job.owner, job.spec)
    asked = asked_by_generation(spec)
    profile = ready_profile(asked.need)
    ended = job.attempts.select_related("machine").filter(outcome__in=PLAN_REASONS).order_by("number")
    attempts = [each for each in ended if each.outcome != Reason.DISK_FULL or fills_disk(each.error, each.prediction)]
    machine = (attempts[-1].machine if attempts else None) or job.machine
    if profile is None or machine is None or job.plan is None:
        return None
    [question] = asked.complete(profile, [place_of(machine)])
    tried = [GenerationPlan.from_json(attempt.plan) for attempt in attempts if attempt.plan]
    ran = GenerationPlan.from_json(job.plan)
    on_cpu = question.place.machine.device.kind == "cpu"

    smallest: dict[str, Any] = {}
    fits_more = True
    for margin, smaller in _LADDER:
        if margin is not None and not fits_more:
            continue
        goal = _with_room(spec.goal, attempts, margin=margin, on_cpu=on_cpu, smaller=smaller)
        asks = replace(question, goal=goal)
        answer = find_generation(_of_passes_alone(asks) if smaller else asks)
        if answer.chosen is None:
            fits_more = False
            smallest = answer.nothing_fits.error().fields if answer.nothing_fits else {}
        elif answer.chosen.plan not in tried and problem_of_generation(question).may_load(answer.chosen.plan):
            load = problem_of_generation(question).find_load(answer.chosen.plan)
            return NextPlan(
                plan=answer.chosen.plan.to_json(),
                prediction=replace(answer.chosen.prediction, load=load).to_json(),
                machine=machine,
                change=describe_generation_change(ran, answer.chosen.plan),
            )
    raise NoFeasiblePlan(
        budget_bytes=spec.goal.device_budget_bytes,
        smallest_feasible_bytes=int(smallest.get("smallest_feasible_bytes", spec.goal.device_budget_bytes)),
        bytes_by_category=smallest.get("bytes_by_category", {}),
    )


def _of_passes_alone(question: GenerationQuestion) -> GenerationQuestion:
    """The same question, whatever loading takes."""
    profile = replace(question.profile, base=None)
    return replace(question, profile=profile, profile_sha256=f"{question.profile_sha256} without its load")


def _with_room(
    goal: GenerationGoal, attempts: Sequence[Attempt], *, margin: float | None, on_cpu: bool, smaller: bool
) -> GenerationGoal:
    """The same goal with budgets such that a plan may be predicted too low by as much as those that ran out, and more.

    Each further attempt on a tier is taken to have shown twice as much. margin: None leaves no more than what was seen to be
    missing. on_cpu: the device is the processor, whose memory is the host's. smaller: as ``_LADDER`` has it.
    """
    limits: dict[str, list[int]] = {"device": [goal.device_budget_bytes], "host": [], "disk": []}
    num_before = {"device": 0, "host": 0}
    if goal.host_budget_bytes is not None:
        limits["host"].append(goal.host_budget_bytes)
    if goal.disk_budget_bytes is not None:
        limits["disk"].append(goal.disk_budget_bytes)
    for attempt in attempts:
        fields: dict[str, Any] = (attempt.error or {}).get("fields") or {}
        if attempt.prediction is None:
            continue
        prediction = GenerationPrediction.from_json(attempt.prediction)
        # A device's budget is of each copy of the model, the host's of all of them.
        copies = {"device": 1, "host": prediction.num_replicas, "disk": 1}
        if fields.get("cause") == "host_killed":
            share = _MOST_AFTER_KILL if margin is None else _AFTER_KILL
            left = _left_after_kill(prediction, share=share, on_cpu=on_cpu, smaller=smaller)
        elif attempt.outcome == Reason.DISK_FULL:
            left = _left_on_disk(fields, prediction)
        else:
            tier = "host" if fields.get("tier") == "host" else "device"
            seen_bytes = max(1, missing_bytes(fields))
            likely_bytes = seen_bytes if margin is None else math.ceil(margin * seen_bytes * 2 ** num_before[tier])
            num_before[tier] += 1
            predicted = {"device": prediction.device_peak_bytes, "host": prediction.host_peak_bytes}
            if fields.get("stage") == "load" and prediction.load is not None:
                predicted = {"device": prediction.load.device_peak_bytes, "host": prediction.load.host_peak_bytes}
            left = {tier: predicted[tier] - likely_bytes}
        for tier, num_bytes in left.items():
            limits[tier].append(copies[tier] * num_bytes)
    return replace(
        goal,
        device_budget_bytes=max(1, min(limits["device"])),
        host_budget_bytes=max(0, min(limits["host"])) if limits["host"] else None,
        disk_budget_bytes=max(0, min(limits["disk"])) if limits["disk"] else None,
    )


def _left_on_disk(fields: Mapping[str, Any], prediction: GenerationPrediction) -> dict[str, int]:
    """Bytes that the disk had room for, of all copies of the model together; fewer than those of the plan that ran."""
    scratch_bytes = prediction.num_replicas * prediction.disk_peak_bytes
    held_bytes = prediction.num_replicas * int(fields.get("in_use_bytes", 0))
    return {"disk": min(held_bytes + int(fields["free_bytes"]), scratch_bytes - 1)}


def _left_after_kill(prediction: GenerationPrediction, *, share: float, on_cpu: bool, smaller: bool) -> dict[str, int]:
    """Bytes of a copy by tier, of which the larger in the host's memory shrinks, or the smaller, and the other does not grow.
    Where the larger shrinks, loading keeps its room on the host.
    """
    held = {"host": held_on_host(prediction.host_peak_bytes, prediction.memory)}
    load_bytes = 0 if prediction.load is None or smaller else prediction.load.host_peak_bytes
    peaks = {"host": max(held["host"], load_bytes)}
    if on_cpu:
        held["device"] = peaks["device"] = prediction.device_peak_high_bytes
    less = (min if smaller else max)(held, key=lambda tier: held[tier])
    if not any(held.values()):
        return {}
    return {
        tier: num_bytes - math.ceil((1 - share) * held[tier]) if tier == less else num_bytes for tier, num_bytes in peaks.items()
    }
