"""Several devices of one machine: the best plan of each layout, and the best of all of them.

Each layout (how many devices, what each keeps to itself) is a search of its own, with what layouts found before it in mind: one
whose bound is no better than a plan that is known is not searched, and the answer says so.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from optimizer.base.errors import InvalidPlan, NoFeasiblePlan
from optimizer.base.units import format_bytes, format_slowdown
from optimizer.goal import Goal
from optimizer.plan.devices.layout import DATA_PARALLEL, DeviceLayout
from optimizer.profile.profile import Profile
from optimizer.search.check.card_fit import ACCEPTED, Outpaced
from optimizer.search.core import explain_choice, find_chosen, search
from optimizer.search.cut_model import describe_cut_plan, least_cut_ms
from optimizer.search.problem import PricedPlan, SearchProblem
from optimizer.search.questions.answers import LayoutOption, ObjectiveAnswer, Pose, answer_with
from optimizer.search.questions.by_hand.like_devices import price_like_setups
from optimizer.search.questions.by_hand.pricing import PricedSetup
from optimizer.search.questions.by_hand.sentences import explain_sharing, list_options
from optimizer.search.questions.layout_list import (
    SHOWN_MS,
    WORTH_LOCAL,
    describe_layout,
    list_cuts,
    list_layouts,
    list_local,
    list_shared,
    settle_local,
)
from optimizer.search.result import SearchResult
from optimizer.search.solver.pricebook import remembering
from optimizer.workload import TrainingWorkload

PoseOn = Callable[[DeviceLayout], Pose]
"""The question on a layout."""
AnswerOne = Callable[[Pose, Profile, TrainingWorkload], ObjectiveAnswer]
"""Answers the question on one layout: ``objectives.answer_goal``."""
_SHOWN: Final = 0.25
"""Share by which a layout's best plan may be slower than the best of all, and still be looked for to be shown beside it."""
_SAME: Final = 1e-6
"""Share by which times are the same."""
_WAITS: Final = 0.05
"""Share of a step for which compute waits for copies and for other devices, from which on several stages on each are tried."""
_WORTH: Final = 0.005
"""Share by which a plan must be faster for more to be shared out, or more devices used: predictions are no finer."""


def answer_layouts(
    pose_on: PoseOn,
    profile: Profile,
    workload: TrainingWorkload,
    goal: Goal,
    *,
    answer_one: AnswerOne,
    num_within: int = 1,
) -> ObjectiveAnswer:
    """The best plan on at most ``goal.num_devices`` devices, with what each layout comes to. num_within: as of the machine.

    Raises as ``answer_goal`` does, and InvalidPlan where no layout is allowed.
    """
    if goal.objective in ("fastest_step", "cheapest_run"):
        return _fastest(pose_on, profile, workload, goal, num_within=num_within)
    return _most(pose_on, profile, workload, goal, answer_one)


# The fastest step.


@dataclass(kw_only=True)
class _Searched:
    """One layout on its way to an answer."""

    problem: SearchProblem
    least_ms: float
    best: PricedPlan | None = None
    result: SearchResult | None = None
    """The best plan and all that is shown beside it; unless the model is cut, worked out for the layout that is chosen alone."""
    error: NoFeasiblePlan | InvalidPlan | None = None
    is_left_out: bool = False
    is_outpaced: bool = False
    """Its plans are known to be slower than is of use."""
    outpaced: PricedPlan | None = None
    """Its best plan without regard to the card, where that is slower than one that is known."""

    @property
    def layout(self) -> DeviceLayout:
        return self.problem.layout if self.best is None else self.best.plan.layout


def _fastest(
    pose_on: PoseOn, profile: Profile, workload: TrainingWorkload, goal: Goal, *, num_within: int
) -> ObjectiveAnswer:
    cuts, local = list_cuts(goal, profile, workload), list_local(goal, workload)
    layouts = list_layouts(
        goal, workload, cuts=cuts, local=local, shared=list_shared(goal, profile), num_within=num_within
    )
    asked = [_ask(pose_on, layout, profile, workload) for layout in layouts]
    for each in sorted(asked, key=_in_turn):
        best = _best_of(asked)
        if best is not None and _cannot_win(each, best, asked):
            each.is_left_out = True
            continue
        try:
            _search(each, most_ms=_most_ms(each, best), goal=goal, workload=workload)
        except Outpaced as outpaced:
            each.least_ms, each.outpaced, each.is_outpaced = outpaced.least, outpaced.best, True
        except (NoFeasiblePlan, InvalidPlan) as error:
            each.error = error
    best = _best_of(asked)
    setups = price_like_setups(
        profile,
        workload,
        goal,
        pose=lambda layout: remembering(pose_on(layout)(profile, workload)),
        problems=[each.problem for each in asked],
        best=None if best is None else best.best,
    )
    for each in asked:
        _take_setup(each, setups)
    best = _best_of(asked)
    if best is None or best.best is None:
        raise _least_wrong([each.error for each in asked if each.error is not None])
    result = _settled(best.problem, _result_of(best, best.best), goal, workload)
    best.best = result.chosen
    result = replace(
        result,
        baselines=result.baselines | {each.label: each.priced for each in setups if each.priced is not None},
        explanation=(*result.explanation, *explain_sharing(setups, result.chosen)),
    )
    options = tuple(
        LayoutOption(layout=each.layout, best=each.best, least_step_ms=each.least_ms, sentence=_describe(each, best))
        for each in asked
    )
    answer = answer_with(best.problem, profile, result)
    return replace(answer, layouts=options, setups=list_options(setups, result.chosen))


def _result_of(found: _Searched, best: PricedPlan) -> SearchResult:
    """The best plan of a layout, with all that is shown beside it."""
    if found.result is not None:
        return found.result
    if found.layout.is_cut:
        return describe_cut_plan(found.problem, best)
    result = search(found.problem, known=[best.plan])
    if result.chosen.prediction.step_ms <= best.prediction.step_ms:
        return result
    # By its tensors another was better, for whose processes there is no room.
    sentences = explain_choice(found.problem, best, result.baselines["keep_all"], result.left_out)
    return replace(result, chosen=replace(best, label="chosen"), explanation=tuple(sentences))


def _search(each: _Searched, *, most_ms: float, goal: Goal, workload: TrainingWorkload) -> None:
    """Raises as ``search`` does."""
    if each.layout.is_cut:
        each.result = search(each.problem, most_ms=most_ms)
        each.best = each.result.chosen
    else:
        each.best = _settle(each.problem, find_chosen(each.problem, most_ms=most_ms), goal, workload)


def _in_turn(each: _Searched) -> tuple[int, float, int]:
    """First what could be fastest, cuts after the rest, which are searched sooner. Steps alone behind them: how fast they have to
    be, the others say; and last what is of use where the best of the others waits.
    """
    layout = each.layout
    return layout.is_cut + 2 * layout.steps_alone + 4 * (layout.num_rounds > 1), each.least_ms, -layout.num_devices


def _settle(problem: SearchProblem, found: PricedPlan, goal: Goal, workload: TrainingWorkload) -> PricedPlan:
    """The plan with as many steps between synchronizations as it gains by."""
    if not problem.layout.steps_alone:
        return found
    plan, prediction = settle_local(found.plan, goal, workload, price=problem.price)
    if problem.verdict(prediction) not in ACCEPTED:
        return found
    return problem.priced(found.label, plan, prediction, in_detail=True)


def _settled(problem: SearchProblem, result: SearchResult, goal: Goal, workload: TrainingWorkload) -> SearchResult:
    """The result with its plan settled so, and explained."""
    settled = _settle(problem, result.chosen, goal, workload)
    if settled is result.chosen:
        return result
    sentences = explain_choice(problem, settled, result.baselines["keep_all"], result.left_out)
    return replace(result, chosen=settled, explanation=tuple(sentences))


def _ask(pose_on: PoseOn, layout: DeviceLayout, profile: Profile, workload: TrainingWorkload) -> _Searched:
    problem = remembering(pose_on(layout)(profile, workload))
    if layout.is_cut:
        return _Searched(problem=problem, least_ms=least_cut_ms(problem))
    relax = problem.relax
    least_ms = 0.0 if relax is None else min((relax.base_ms(base) for base in problem.settings()), default=0.0)
    return _Searched(problem=problem, least_ms=least_ms)


def _most_ms(each: _Searched, best: _Searched | None) -> float:
    """A layout of as many devices as the best one is of no use where it takes much longer; one of fewer devices may cost less."""
    if best is None or best.best is None or each.layout.num_devices < best.layout.num_devices:
        return math.inf
    return best.best.prediction.step_ms * (1 + _SHOWN)


def _best_of(asked: Sequence[_Searched]) -> _Searched | None:
    """The fastest so far; of those as fast that with the fewest devices, which shares the least out."""
    found = [(each, each.best.prediction.step_ms) for each in asked if each.best is not None]
    shared_ms = min((step_ms for each, step_ms in found if not each.layout.steps_alone), default=math.inf)
    most_ms = shared_ms * (1 - WORTH_LOCAL)
    found = [(each, step_ms) for each, step_ms in found if not each.layout.steps_alone or step_ms <= most_ms]
    fastest_ms = min((step_ms for _, step_ms in found), default=0.0)
    as_fast = (each for each, step_ms in found if step_ms <= fastest_ms * (1 + _WORTH))
    return min(
        as_fast,
        key=lambda each: (
            each.layout.num_devices,
            each.layout.is_cut,
            each.layout.shares_blocks,
            DATA_PARALLEL.index(each.layout.data),
        ),
        default=None,
    )


def _cannot_win(each: _Searched, best: _Searched, asked: Sequence[_Searched]) -> bool:
    """Report whether no plan of a layout is faster than one that is known, or likely none.

    ZeRO-2 does what ZeRO-1 does and exchanges more often where there are several micro-batches, so it is of use only where the
    best plan of ZeRO-1 has several because memory is short.
    """
    assert best.best is not None
    if each.least_ms >= best.best.prediction.step_ms * (1 - _gain_of(each)):
        return True
    if _gains_little(each, best):
        return True
    if each.layout.data != "zero2":
        return False
    plain = next((one for one in asked if one.layout == replace(each.layout, data="zero1")), None)
    plan = None if plain is None else plain.best or plain.outpaced
    return plan is not None and plan.plan.batch.accumulation_steps == 1


def _gains_little(each: _Searched, best: _Searched) -> bool:
    """Report whether several stages on each device could save little: they make compute wait less for copies and for others, and
    hold more activations.
    """
    assert best.best is not None
    if each.layout.num_rounds == 1 or each.problem.goal.pins.layout.schedule is not None:
        return False
    found = best.best.prediction
    return found.exposed_copy_ms + found.exposed_ms.get("network", 0.0) < _WAITS * found.step_ms


def _gain_of(each: _Searched) -> float:
    """Share by which a layout's plans must be faster than the others' to be of use."""
    return WORTH_LOCAL if each.layout.steps_alone else _SAME


def _least_wrong(errors: Sequence[NoFeasiblePlan | InvalidPlan]) -> NoFeasiblePlan | InvalidPlan:
    """The error of the layout that comes closest to fitting."""
    short = [error for error in errors if isinstance(error, NoFeasiblePlan)]
    return min(short, key=lambda error: int(error.fields["smallest_feasible_bytes"])) if short else errors[0]


def _take_setup(each: _Searched, setups: Sequence[PricedSetup]) -> None:
    """Make the fastest setup that may be chosen a layout's best plan, where it is faster than what was found."""
    of_layout = [
        one.priced for one in setups if one.priced is not None and one.may_be_chosen and _is_alike(one.priced.plan.layout, each)
    ]
    fastest = min(of_layout, key=lambda priced: priced.prediction.step_ms, default=None)
    known_ms = math.inf if each.best is None else each.best.prediction.step_ms
    if fastest is not None and fastest.prediction.step_ms < known_ms:
        each.best, each.result = replace(fastest, label="chosen"), None


def _is_alike(layout: DeviceLayout, each: _Searched) -> bool:
    """Report whether a layout is one of those that a search looks at, wherever it cuts the model."""
    other = each.problem.layout
    if len(layout.stage_blocks) != len(other.stage_blocks):
        return False
    return replace(layout, stage_blocks=()) == replace(other, stage_blocks=())


def _describe(each: _Searched, best: _Searched) -> str:
    """A comparison of a layout with the best, in a sentence."""
    assert best.best is not None
    name, step_ms = describe_layout(each.layout), best.best.prediction.step_ms
    if each.layout.is_cut and each.best is None:
        name = f"{each.layout.num_devices} devices, the model cut{' into several stages on each' * (each.layout.num_rounds > 1)}"
    if each is best:
        return f"{name}: chosen{_describe_best(best, best.best)}"
    if each.best is None:
        if each.is_left_out:
            return f"{name}: not searched, since {_why_left_out(each, step_ms)}"
        if each.is_outpaced:
            return f"{name}: no plan of it with room on the card takes less than {each.least_ms:.1f} ms"
        if isinstance(each.error, NoFeasiblePlan):
            return f"{name}: {each.error.in_short}"
        return f"{name}: {each.error.message if each.error is not None else 'not searched'}"
    found = each.best.prediction
    slower = format_slowdown(found.step_ms / step_ms)
    saved_bytes = best.best.prediction.device_peak_bytes - found.device_peak_bytes
    room = f"; its peak is {format_bytes(saved_bytes)} lower, which is not needed" if saved_bytes > 0 else ""
    waits_ms = found.exposed_ms.get("network", 0.0)
    waits = f"; compute waits {waits_ms:.1f} ms a step for the network" if waits_ms >= SHOWN_MS else ""
    return f"{name}: {slower}{room}{waits}"


def _why_left_out(each: _Searched, step_ms: float) -> str:
    if each.least_ms >= step_ms * (1 - _gain_of(each)):
        return f"no plan of it takes less than {each.least_ms:.1f} ms"
    if each.layout.num_rounds > 1:
        return "compute hardly waits in the best of the others"
    return "gradients need no sharing out beside the state"


def _describe_best(best: _Searched, chosen: PricedPlan) -> str:
    if best.layout.is_cut:
        waits_ms = chosen.prediction.exposed_ms.get("network", 0.0)
        return f"; the fullest device waits {waits_ms:.1f} ms a step for the others"
    if best.layout.num_devices == 1:
        return "; more devices would wait for each other for longer than they save"
    return "" if chosen.prediction.exposed_ms.get("network", 0.0) >= SHOWN_MS else "; its exchanges hide behind compute"


# The most that fits.


def _most(
    pose_on: PoseOn, profile: Profile, workload: TrainingWorkload, goal: Goal, answer_one: AnswerOne
) -> ObjectiveAnswer:
    """The layout on which the most fits; of equals the fastest."""
    found: list[tuple[DeviceLayout, ObjectiveAnswer]] = []
    errors: list[NoFeasiblePlan | InvalidPlan] = []
    # Steps alone need no more memory than shared ones on the device, and fit no more.
    local = list_local(goal, workload) if goal.pins.layout.sync_every is not None else ()
    # Of larger batches each rank would have the whole, and of deeper models no part was traced.
    shared = list_shared(goal, profile) if goal.objective == "longest_sequence" else ()
    for layout in list_layouts(goal, None if goal.objective == "largest_batch" else workload, local=local, shared=shared):
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
