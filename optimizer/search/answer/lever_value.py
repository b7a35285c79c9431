"""Prices what each lever of a plan is worth, and finds the levers left out because they do not pay at this shape."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

from optimizer.base.errors import InvalidPlan
from optimizer.base.serialize import WithJson
from optimizer.estimate.prediction import Prediction
from optimizer.plan.activations import OFFLOADING, REBUILDING, BlockChoice
from optimizer.plan.explain.training import describe_left_out, describe_move_or_rebuild
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import DECLARATIONS, Technique, knobs_of
from optimizer.search.answer.knobs import list_knobs
from optimizer.search.arrangements import PerBlock
from optimizer.search.problem import OUTER_FIELDS, OuterPlan, SearchProblem

MIN_SHARE = 0.01
"""Share of the peak, or of the step, below which a lever is not mentioned."""


@dataclass(frozen=True, kw_only=True)
class LeftOut(WithJson):
    """A technique that the goal allows and the plan does without, because here it would cost and save nothing."""

    technique: Technique
    sentence: str
    device_change_bytes: int
    """Change of the peak, were the lever added to the plan."""
    step_change_ms: float


def price_without(problem: SearchProblem, plan: Plan) -> dict[Technique, Prediction]:
    """The plan's price with one of its levers left out, where the others can stand without it."""
    setting, blocks = OuterPlan.of(plan), plan.activations.per_block
    without: dict[Technique, tuple[OuterPlan, PerBlock]] = {}
    for technique in plan.techniques:
        changed, per_block = _left_out(technique, plan, setting), blocks
        if technique in _BLOCK_CHOICES:
            per_block = _kept(blocks, _BLOCK_CHOICES[technique])
        if (changed, per_block) != (setting, blocks):
            without[technique] = (changed, per_block)
    return {
        technique: problem.price(other)
        for technique, other in ((technique, _plan(problem, *changed)) for technique, changed in without.items())
        if other is not None
    }


_BLOCK_CHOICES: Final[dict[Technique, tuple[BlockChoice, ...]]] = {"recompute": REBUILDING, "offload": OFFLOADING}


def _left_out(technique: Technique, plan: Plan, setting: OuterPlan) -> OuterPlan:
    """The setting with every knob plain that uses the technique; a place is not left out as a whole."""
    if DECLARATIONS[technique].group == "Places":
        return setting
    if technique == "accumulate":
        return replace(setting, micro_batch_size=plan.batch.global_batch_size, accumulation_steps=1)
    plain = {
        OUTER_FIELDS[path]: value
        for knob in knobs_of("training")
        if knob.path in OUTER_FIELDS
        and any(use.technique == technique and use.asks(attrgetter(knob.path)(plan)) for use in knob.uses)
        for path, value in {knob.path: knob.plain, **knob.brings.get(knob.plain, {})}.items()
    }
    return replace(setting, **plain)


def list_left_out(problem: SearchProblem, plan: Plan, prediction: Prediction) -> tuple[LeftOut, ...]:
    """Levers that would raise the peak, or the time and save nothing; one a technique, the worst of it first."""
    used = set(plan.techniques)

    def is_news(technique: Technique, other: Plan) -> bool:
        return technique not in used and technique in other.techniques and problem.permits(other)

    found: dict[Technique, LeftOut] = {}
    for knob in list_knobs(problem, plan, prediction=prediction, is_wanted=is_news):
        saves_bytes = knob.device_change_bytes < -MIN_SHARE * prediction.highest_peak_bytes
        raises_bytes = knob.device_change_bytes > MIN_SHARE * prediction.highest_peak_bytes
        takes_time = knob.step_change_ms > MIN_SHARE * prediction.step_ms
        if saves_bytes or not (raises_bytes or takes_time) or knob.step_change_ms < 0:
            continue
        found.setdefault(
            knob.technique,
            LeftOut(
                technique=knob.technique,
                sentence=describe_left_out(
                    knob.change,
                    device_change_bytes=knob.device_change_bytes if raises_bytes else 0,
                    percent=100 * knob.step_change_ms / prediction.step_ms,
                ),
                device_change_bytes=knob.device_change_bytes,
                step_change_ms=knob.step_change_ms,
            ),
        )
    for left_out in _move_or_rebuild(problem, plan, prediction):
        found[left_out.technique] = left_out
    return tuple(found.values())


def _move_or_rebuild(problem: SearchProblem, plan: Plan, prediction: Prediction) -> Iterator[LeftOut]:
    """The cost of a block done the other way, if that is more, where blocks do one of the two."""
    used = set(plan.techniques)
    if ("recompute" in used) == ("offload" in used) or problem.pinned_blocks is not None:
        return
    choices: dict[str, BlockChoice] = {"offload": "offload", "recompute": "recompute"}
    if not all(problem.allows(technique) for technique in ("offload", "recompute")):
        return
    setting = replace(OuterPlan.of(plan), compress="none")
    away, rebuilt, kept = (
        problem.price(setting.plan((choice,) * problem.num_blocks)) for choice in (*choices.values(), "keep")
    )
    moved_bytes = away.copied_bytes.get("device_to_host", 0) - kept.copied_bytes.get("device_to_host", 0)
    times = problem.num_blocks * plan.batch.accumulation_steps
    waits_ms, rebuild_ms = (found.step_ms - kept.step_ms for found in (away, rebuilt))
    move_ms = max(away.lane_busy_ms.get(lane, 0.0) - kept.lane_busy_ms.get(lane, 0.0) for lane in ("copy_out", "copy_in"))
    left_out: Technique = "offload" if "recompute" in used else "recompute"
    if moved_bytes <= 0 or (waits_ms <= rebuild_ms) == (left_out == "offload"):
        return
    other = away if left_out == "offload" else rebuilt
    yield LeftOut(
        technique=left_out,
        sentence=describe_move_or_rebuild(
            left_out,
            num_bytes=moved_bytes // times,
            move_ms=move_ms / times,
            waits_ms=max(0.0, waits_ms) / times,
            rebuild_ms=rebuild_ms / times,
        ),
        device_change_bytes=other.highest_peak_bytes - prediction.highest_peak_bytes,
        step_change_ms=other.step_ms - prediction.step_ms,
    )


def _kept(per_block: PerBlock, choices: tuple[BlockChoice, ...]) -> PerBlock:
    return tuple("keep" if choice in choices else choice for choice in per_block)


def _plan(problem: SearchProblem, setting: OuterPlan, per_block: PerBlock) -> Plan | None:
    """None where it contradicts itself, or was not profiled."""
    try:
        plan = setting.plan(per_block)
    except InvalidPlan:
        return None
    return plan if problem.is_known(plan.representation) and problem.find_conflict(plan) is None else None
