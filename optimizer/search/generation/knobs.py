"""Prices what each decision of a generation's plan would buy and cost: its neighbours, each one change away, priced beside it.

As ``search/answer/knobs.py`` does it of training. What cannot be carried out, what the machine cannot do and what the
goal forbids is left out; what changes the numbers is listed and marked.
"""

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from optimizer.base.errors import InvalidPlan
from optimizer.base.serialize import WithJson
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.prediction import Verdict
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.pins.generation_knobs import generation_knobs, knob_value, with_knob
from optimizer.plan.techniques import KNOBS
from optimizer.search.generation.problem import GenerationProblem

_OF_THE_PROCESS: Final = "allocator."
"""Changes nothing of the tensors, which alone are priced here."""
_PREFILL_TOKENS: Final = (None, 8, 2)


@dataclass(frozen=True, kw_only=True)
class GenerationKnob(WithJson):
    """One change of a plan, with what it would make of peak and time. Differences are new minus old."""

    knob: str
    """Its path in the plan: ``kv_cache.place``."""
    change: str
    """For people: ``keys and values in int8``."""
    plan: GenerationPlan
    """With the change."""
    verdict: Verdict
    """Verdict on that plan, against the goal's budgets."""
    is_lossless: bool
    device_peak_bytes: int
    """Upper end, which the budget is held to; of that plan, as is ``total_s``."""
    device_change_bytes: int
    host_change_bytes: int
    disk_change_bytes: int
    remote_change_bytes: int
    total_s: float
    total_change_s: float


def list_generation_knobs(problem: GenerationProblem, plan: GenerationPlan) -> tuple[GenerationKnob, ...]:
    """Those that apply to the plan and change its bytes or its time, the largest saving of device memory first."""
    here, seen, knobs = problem.price(plan), {plan}, []
    for path, value, other in _neighbours(problem, plan):
        if other not in seen and _is_possible(problem, other):
            seen.add(other)
            found = _priced(problem, path, _words(path, value, before=knob_value(plan, path)), other, here)
            knobs += [found] if _changes_anything(found) else []
    return tuple(sorted(knobs, key=lambda knob: (knob.device_change_bytes, knob.total_change_s, knob.change)))


def _is_possible(problem: GenerationProblem, plan: GenerationPlan) -> bool:
    excluded = problem.unavailable | set(problem.goal.forbid)
    return problem.find_conflict(plan) is None and not any(name in excluded for name in plan.techniques)


def _changes_anything(knob: GenerationKnob) -> bool:
    """Packed keys and values that are too short to be packed change nothing, nor does a place that nothing is fetched from."""
    elsewhere = (knob.host_change_bytes, knob.disk_change_bytes, knob.remote_change_bytes)
    return any((knob.device_change_bytes, *elsewhere, knob.total_change_s))


def _priced(
    problem: GenerationProblem, path: str, change: str, plan: GenerationPlan, here: GenerationPrediction
) -> GenerationKnob:
    there = problem.price(plan)
    return GenerationKnob(
        knob=path,
        change=change,
        plan=plan,
        verdict=problem.verdict(there),
        is_lossless=plan.is_lossless,
        device_peak_bytes=there.device_peak_high_bytes,
        device_change_bytes=there.device_peak_high_bytes - here.device_peak_high_bytes,
        host_change_bytes=there.host_peak_bytes - here.host_peak_bytes,
        disk_change_bytes=there.disk_peak_bytes - here.disk_peak_bytes,
        remote_change_bytes=there.remote_peak_bytes - here.remote_peak_bytes,
        total_s=there.total_s,
        total_change_s=there.total_s - here.total_s,
    )


def _neighbours(problem: GenerationProblem, plan: GenerationPlan) -> Iterator[tuple[str, Any, GenerationPlan]]:
    for path, kind in generation_knobs().items():
        if path.startswith(_OF_THE_PROCESS):
            continue
        for value in _values(problem, plan, path, kind):
            try:
                yield path, value, with_knob(plan, path, value)
            except InvalidPlan:
                continue  # Out of the knob's own range, or against another decision.


def _values(problem: GenerationProblem, plan: GenerationPlan, path: str, kind: Any) -> tuple[Any, ...]:
    before = knob_value(plan, path)
    if path == "batch_size":
        return (before // 2, before * 2, problem.workload.num_sequences)
    if path == "prefill_tokens":
        return _PREFILL_TOKENS if problem.can_cut_prompts else ()
    if path == "kv_cache.prefix_tokens":
        longest = problem.longest_prefix
        return tuple(value for value in (0, before // 2, before * 2, longest // 2, longest) if value <= longest)
    if path.endswith(".prefetch"):
        comes = knob_value(plan, path.replace(".prefetch", ".place")) != "device"
        if path == "kv_cache.prefetch":
            comes &= plan.kv_cache.attention == "device"
        return (before - 1, before + 1) if comes and problem.has_copies_beside else ()
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    is_whole = kind is int or (isinstance(kind, types.UnionType) and int in typing.get_args(kind))
    return (before // 2, before * 2) if is_whole and before else ()


def _words(path: str, value: Any, *, before: Any) -> str:
    """For people; of a knob that declares no words its path and value."""
    face = KNOBS[path].generation
    declared = face.describe(value, before=before) if face else ""
    return declared or f"{path.replace('.', ' ').replace('_', ' ')} {value} instead of {before}"
