"""Several devices of one machine: the best plan of each layout, and the best of all of them.

Each layout (how many devices, what each keeps to itself) is a search of its own, with what layouts found before it in mind: one
whose bound is no better than a plan that is known is not searched, and the answer says so.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from optimizer.base.errors import InvalidPlan, NoFeasiblePlan
from optimizer.base.units import format_bytes, format_slowdown
from optimizer.estimate.step.pipeline.stage_costs import check_cut, find_obstacle
from optimizer.goal import Goal
from optimizer.plan.layout import DATA_PARALLEL, DeviceLayout, check_depth
from optimizer.plan.stages import PipelineSchedule
from optimizer.profile.profile import Profile
from optimizer.search.answer.baselines import keep_all, recompute_all
from optimizer.search.core import search
from optimizer.search.cut_model import even_cut, least_cut_ms
from optimizer.search.problem import PricedPlan, SearchProblem
from optimizer.search.questions.answers import LayoutOption, ObjectiveAnswer, Pose, answer_with
from optimizer.search.result import SearchResult
from optimizer.search.solver.pricebook import remembering
from optimizer.workload import TrainingWorkload

PoseOn = Callable[[DeviceLayout], Pose]
"""The question on a layout."""
AnswerOne = Callable[[Pose, Profile, TrainingWorkload], ObjectiveAnswer]
"""Answers the question on one layout: ``objectives.answer_goal``."""
_LABELS: Final[Mapping[str, str]] = {"replicated": "ddp", "zero1": "zero1", "zero2": "zero2", "zero3": "zero3"}
_WORDS: Final[Mapping[str, str]] = {
    "replicated": "each keeps everything",
    "zero1": "optimizer state shared out (ZeRO-1)",
    "zero2": "optimizer state and gradients shared out (ZeRO-2)",
    "zero3": "optimizer state, gradients and weights shared out (ZeRO-3)",
}
_SAME: Final = 1e-6
"""Share by which times are the same."""
_WORTH: Final = 0.005
"""Share by which a plan must be faster for more to be shared out, or more devices used: predictions are no finer."""
_SHOWN_MS: Final = 0.05
"""Shortest wait that is worth a word."""


def list_layouts(
    goal: Goal, workload: TrainingWorkload | None, *, cuts: Sequence[DeviceLayout] = ()
) -> list[DeviceLayout]:
    """Layouts that the goal allows, one device first. workload: whose batch is dealt out evenly; None where that is open. cuts:
    those that cut the model.

    Raises InvalidPlan where pins and what is forbidden leave none.
    """
    pins = goal.pins.layout
    if pins.stage_blocks:
        return list(cuts) or _require_cut(pins.stage_blocks)
    found = list[DeviceLayout]()
    for num_devices in range(1, goal.num_devices + 1):
        if workload is not None and workload.global_batch_size % num_devices:
            continue
        for data in DATA_PARALLEL[: 1 if num_devices == 1 else None]:
            layout = DeviceLayout(num_devices=num_devices, data=data)
            is_pinned = pins.num_devices in (None, num_devices) and pins.data in (None, data)
            if is_pinned and not any(technique in goal.forbid for technique in _techniques(layout)):
                found.append(layout)
    found = sorted([*found, *cuts], key=lambda layout: layout.num_devices)
    if found:
        return found
    raise InvalidPlan(
        f"no layout of up to {goal.num_devices} devices keeps the pins and what is forbidden, and deals the batch out evenly",
        field="goal.pins.layout",
        value=[pins.num_devices, pins.data],
        allowed=f"1 to {goal.num_devices} devices; replicated on one",
        hint="Leave out the pin, permit more, or take a batch that the devices can share.",
    )


def list_cuts(goal: Goal, profile: Profile, workload: TrainingWorkload) -> list[DeviceLayout]:
    """Layouts that cut the model, with an even cut in the place of the one that is looked for. Raises InvalidPlan where a cut is
    pinned that cannot be carried out.
    """
    pins, obstacle = goal.pins.layout, find_obstacle(profile)
    if pins.stage_blocks is None and (obstacle or "cut_model" in goal.forbid or pins.data is not None):
        return []
    if pins.stage_blocks == () or (workload.objective != "next_token" and not pins.stage_blocks):
        return []
    schedule = pins.schedule or "1f1b"
    if pins.stage_blocks:
        check_depth(pins.stage_blocks, profile.num_blocks)
        check_cut(profile)
        return [_pinned_cut(goal, pins.stage_blocks, schedule)]
    most = min(goal.num_devices, profile.num_blocks)
    return [
        DeviceLayout(num_devices=number, stage_blocks=even_cut(profile.num_blocks, number), schedule=schedule)
        for number in range(2, most + 1)
        if pins.num_devices in (None, number) and workload.global_batch_size > 1
    ]


def _pinned_cut(goal: Goal, cut: tuple[int, ...], schedule: PipelineSchedule) -> DeviceLayout:
    shown = ", ".join(map(str, cut))
    if len(cut) > goal.num_devices:
        raise InvalidPlan(
            f"goal.pins.layout.stage_blocks is {shown}, {len(cut)} stages; goal.num_devices is {goal.num_devices}",
            field="goal.pins.layout.stage_blocks",
            value=shown,
            allowed=f"2 to {goal.num_devices} stages",
            hint="Permit as many devices as there are stages, or cut into fewer.",
        )
    return DeviceLayout(num_devices=len(cut), data=goal.pins.layout.data or "replicated", stage_blocks=cut, schedule=schedule)


def _require_cut(cut: tuple[int, ...]) -> list[DeviceLayout]:
    shown = ", ".join(map(str, cut))
    raise InvalidPlan(
        f"goal.pins.layout.stage_blocks is {shown}; models are cut for the fastest step and the cheapest run alone",
        field="goal.pins.layout.stage_blocks",
        value=shown,
        allowed="objective fastest_step or cheapest_run",
        hint="Leave out the pin, or ask for the fastest step.",
    )


def _techniques(layout: DeviceLayout) -> list[str]:
    used = {
        "data_parallel": layout.num_devices > 1,
        "shard_state": layout.shares_state,
        "shard_gradients": layout.reduces_each_micro_batch,
        "shard_weights": layout.shares_weights,
    }
    return [name for name, is_used in used.items() if is_used]


def answer_layouts(
    pose_on: PoseOn, profile: Profile, workload: TrainingWorkload, goal: Goal, *, answer_one: AnswerOne
) -> ObjectiveAnswer:
    """The best plan on at most ``goal.num_devices`` devices, with what each layout comes to.

    Raises as ``answer_goal`` does, and InvalidPlan where no layout is allowed.
    """
    if goal.objective in ("fastest_step", "cheapest_run"):
        return _fastest(pose_on, profile, workload, goal)
    return _most(pose_on, profile, workload, goal, answer_one)


# The fastest step.


@dataclass(kw_only=True)
class _Searched:
    """One layout on its way to an answer."""

    problem: SearchProblem
    least_ms: float
    result: SearchResult | None = None
    error: NoFeasiblePlan | InvalidPlan | None = None
    is_left_out: bool = False

    @property
    def layout(self) -> DeviceLayout:
        return self.problem.layout if self.best is None else self.best.plan.layout

    @property
    def best(self) -> PricedPlan | None:
        return None if self.result is None else self.result.chosen


def _fastest(pose_on: PoseOn, profile: Profile, workload: TrainingWorkload, goal: Goal) -> ObjectiveAnswer:
    layouts = list_layouts(goal, workload, cuts=list_cuts(goal, profile, workload))
    asked = [_ask(pose_on, layout, profile, workload) for layout in layouts]
    for each in sorted(asked, key=lambda each: (each.least_ms, -each.layout.num_devices)):
        best = _best_of(asked)
        if best is not None and _cannot_win(each, best, asked):
            each.is_left_out = True
            continue
        try:
            each.result = search(each.problem)
        except (NoFeasiblePlan, InvalidPlan) as error:
            each.error = error
    best = _best_of(asked)
    if best is None or best.result is None:
        raise _least_wrong([each.error for each in asked if each.error is not None])
    result = best.result
    result = replace(result, baselines={**result.baselines, **_price_shared_baselines(asked)})
    options = tuple(
        LayoutOption(layout=each.layout, best=each.best, least_step_ms=each.least_ms, sentence=_describe(each, best))
        for each in asked
    )
    return replace(answer_with(best.problem, profile, result), layouts=options)


def _ask(pose_on: PoseOn, layout: DeviceLayout, profile: Profile, workload: TrainingWorkload) -> _Searched:
    problem = remembering(pose_on(layout)(profile, workload))
    if layout.is_cut:
        return _Searched(problem=problem, least_ms=least_cut_ms(problem))
    relax = problem.relax
    least_ms = 0.0 if relax is None else min((relax.base_ms(base) for base in problem.settings()), default=0.0)
    return _Searched(problem=problem, least_ms=least_ms)


def _best_of(asked: Sequence[_Searched]) -> _Searched | None:
    """The fastest so far; of those as fast that with the fewest devices, which shares the least out."""
    found = [(each, each.best.prediction.step_ms) for each in asked if each.best is not None]
    fastest_ms = min((step_ms for _, step_ms in found), default=0.0)
    as_fast = (each for each, step_ms in found if step_ms <= fastest_ms * (1 + _WORTH))
    return min(
        as_fast,
        key=lambda each: (each.layout.num_devices, each.layout.is_cut, DATA_PARALLEL.index(each.layout.data)),
        default=None,
    )


def _cannot_win(each: _Searched, best: _Searched, asked: Sequence[_Searched]) -> bool:
    """Report whether no plan of a layout is faster than one that is known.

    ZeRO-2 does what ZeRO-1 does and exchanges more often where there are several micro-batches, so it is of use only where the
    best plan of ZeRO-1 has several because memory is short.
    """
    assert best.best is not None
    if each.least_ms >= best.best.prediction.step_ms * (1 - _SAME):
        return True
    if each.layout.data != "zero2":
        return False
    plain = next((one for one in asked if one.layout == replace(each.layout, data="zero1")), None)
    return plain is not None and plain.best is not None and plain.best.plan.batch.accumulation_steps == 1


def _least_wrong(errors: Sequence[NoFeasiblePlan | InvalidPlan]) -> NoFeasiblePlan | InvalidPlan:
    """The error of the layout that comes closest to fitting."""
    short = [error for error in errors if isinstance(error, NoFeasiblePlan)]
    return min(short, key=lambda error: int(error.fields["smallest_feasible_bytes"])) if short else errors[0]


def _price_shared_baselines(asked: Sequence[_Searched]) -> dict[str, PricedPlan]:
    """Plain data parallel training and ZeRO on the most devices, with all kept and all recomputed, by label."""
    most = max(each.layout.num_devices for each in asked)
    found: dict[str, PricedPlan] = {}
    for each in asked:
        if each.layout.num_devices != most or most == 1 or each.layout.is_cut:
            continue
        for ending, baseline in (("", keep_all), ("_recompute", recompute_all)):
            label = _LABELS[each.layout.data] + ending
            setting, per_block = baseline(each.problem)
            with suppress(InvalidPlan):
                prediction = each.problem.price(setting.plan(per_block))
                may_fit = each.problem.verdict(prediction) != "does_not_fit"
                found[label] = each.problem.priced(label, setting.plan(per_block), prediction, in_detail=may_fit)
    return found


def describe_layout(layout: DeviceLayout) -> str:
    """Words for a layout: ``2 devices, optimizer state shared out (ZeRO-1)``."""
    if layout.is_cut:
        return f"{layout.num_devices} devices, the model cut into {' + '.join(map(str, layout.stage_blocks))} blocks"
    return "one device" if layout.num_devices == 1 else f"{layout.num_devices} devices, {_WORDS[layout.data]}"


def _describe(each: _Searched, best: _Searched) -> str:
    """A comparison of a layout with the best, in a sentence."""
    assert best.best is not None
    name, step_ms = describe_layout(each.layout), best.best.prediction.step_ms
    if each.layout.is_cut and each.best is None:
        name = f"{each.layout.num_devices} devices, the model cut"
    if each is best:
        return f"{name}: chosen{_describe_best(best, best.best)}"
    if each.best is None:
        if each.is_left_out:
            return f"{name}: not searched, since {_why_left_out(each, step_ms)}"
        if isinstance(each.error, NoFeasiblePlan):
            smallest_bytes = int(each.error.fields["smallest_feasible_bytes"])
            return f"{name}: nothing fits; the smallest peak is {format_bytes(smallest_bytes)}"
        return f"{name}: {each.error.message if each.error is not None else 'not searched'}"
    found = each.best.prediction
    slower = format_slowdown(found.step_ms / step_ms)
    saved_bytes = best.best.prediction.device_peak_bytes - found.device_peak_bytes
    room = f"; its peak is {format_bytes(saved_bytes)} lower, which is not needed" if saved_bytes > 0 else ""
    waits_ms = found.exposed_ms.get("network", 0.0)
    waits = f"; compute waits {waits_ms:.1f} ms a step for the network" if waits_ms >= _SHOWN_MS else ""
    return f"{name}: {slower}{room}{waits}"


def _why_left_out(each: _Searched, step_ms: float) -> str:
    if each.least_ms >= step_ms * (1 - _SAME):
        return f"no plan of it takes less than {each.least_ms:.1f} ms"
    return "gradients need no sharing out beside the state"


def _describe_best(best: _Searched, chosen: PricedPlan) -> str:
    if best.layout.is_cut:
        waits_ms = chosen.prediction.exposed_ms.get("network", 0.0)
        return f"; the fullest device waits {waits_ms:.1f} ms a step for the others"
    if best.layout.num_devices == 1:
        return "; more devices would wait for each other for longer than they save"
    return "" if chosen.prediction.exposed_ms.get("network", 0.0) >= _SHOWN_MS else "; its exchanges hide behind compute"


# The most that fits.


def _most(
    pose_on: PoseOn, profile: Profile, workload: TrainingWorkload, goal: Goal, answer_one: AnswerOne
) -> ObjectiveAnswer:
    """The layout on which the most fits; of equals the fastest."""
    found: list[tuple[DeviceLayout, ObjectiveAnswer]] = []
    errors: list[NoFeasiblePlan | InvalidPlan] = []
    for layout in list_layouts(goal, None if goal.objective == "largest_batch" else workload):
        # So that the question itself can be posed; the batch is what is looked for.
        whole = replace(workload, global_batch_size=layout.num_devices) if goal.objective == "largest_batch" else workload
        try:
            found.append((layout, answer_one(pose_on(layout), profile, whole)))
        except (NoFeasiblePlan, InvalidPlan) as error:
            errors.append(error)
    if not found:
        raise _least_wrong(errors)
    best = max((answer for _, answer in found), key=_size)
    options = tuple(
        LayoutOption(
            layout=layout,
            best=answer.result.chosen,
            least_step_ms=answer.result.bound_step_ms or 0.0,
            sentence=f"{describe_layout(layout)}: {'chosen; ' * (answer is best)}{_reason(answer)}",
        )
        for layout, answer in found
    )
    return replace(best, layouts=options)


def _size(answer: ObjectiveAnswer) -> tuple[int, int, int, float]:
    speed = answer.result.chosen.prediction.tokens_per_s
    return answer.num_blocks, answer.workload.sequence_length, answer.workload.global_batch_size, speed


def _reason(answer: ObjectiveAnswer) -> str:
    return "as it was asked for" if answer.limit is None else answer.limit.reason
