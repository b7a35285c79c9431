"""Prices what each lever of a plan is worth, and finds the levers left out because they do not pay at this shape."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from optimizer.base.errors import InvalidPlan
from optimizer.base.serialize import WithJson
from optimizer.estimate.prediction import Prediction
from optimizer.plan.activations import OFFLOADING, BlockChoice
from optimizer.plan.explain.training import describe_left_out, describe_move_or_rebuild
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import Technique
from optimizer.search.answer.knobs import list_knobs
from optimizer.search.arrangements import PerBlock
from optimizer.search.problem import OuterPlan, SearchProblem, techniques_of

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
    setting, total, blocks = OuterPlan.of(plan), problem.workload.global_batch_size, plan.activations.per_block
    without: dict[Technique, tuple[OuterPlan, PerBlock]] = {
        "recompute": (setting, _kept(blocks, ("recompute", "selective"))),
        "offload": (setting, _kept(blocks, OFFLOADING)),
        "compress": (replace(setting, compress="none"), blocks),
        "accumulate": (replace(setting, micro_batch_size=total, accumulation_steps=1), blocks),
        "chunked_loss": (replace(setting, num_chunks=1), blocks),
        "consume_gradients": (replace(setting, gradients="keep"), blocks),
        "offload_gradients": (replace(setting, gradients="keep"), blocks),
        "offload_optimizer": (replace(setting, state_place="device"), blocks),
        "stream_weights": (replace(setting, weights_place="device"), blocks),
        "8bit_optimizer": (replace(setting, bits=32), blocks),
        "bf16": (replace(setting, dtype="fp32"), blocks),
        "fp16": (replace(setting, dtype="fp32"), blocks),
        "autocast": (replace(setting, autocast="off"), blocks),
        "quantize_frozen": (replace(setting, frozen="same"), blocks),
    }
    wanted = {technique: without[technique] for technique in techniques_of(plan) if technique in without}
    return {
        technique: problem.price(other)
        for technique, other in ((technique, _plan(problem, *changed)) for technique, changed in wanted.items())
        if other is not None
    }


def list_left_out(problem: SearchProblem, plan: Plan, prediction: Prediction) -> tuple[LeftOut, ...]:
    """Levers that would raise the peak, or the time and save nothing; one a technique, the worst of it first."""
    used = set(techniques_of(plan))

    def is_news(technique: Technique, other: Plan) -> bool:
        return technique not in used and technique in techniques_of(other) and problem.permits(other)

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
    used = set(techniques_of(plan))
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
    return plan if problem.is_known(plan.weights.representation) and problem.find_conflict(plan) is None else None
