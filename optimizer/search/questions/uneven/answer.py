"""Several kinds of devices, in one machine or in several that a network joins: who takes part, how much each takes of a step, and
its own way with activations.

What is the same on all ranks (number formats, where gradients, state and weights live, chunks) is taken from the best plans of
single kinds; with that decided, a kind's step is a small search of its own for any number of sequences, and ``shares.py`` deals
those out. Beside it stand the devices of each kind alone, those of each machine, and equal shares on all, so that the answer also
says when not to share, and the model cut over the devices (``cuts.py``), each of which then has some of its blocks.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from optimizer.base.errors import InvalidInput, InvalidPlan, InvalidWorkload, NoFeasiblePlan
from optimizer.base.units import format_bytes, format_slowdown
from optimizer.estimate.card.training_memory import add_memory
from optimizer.estimate.job.shortfalls import Shortfall
from optimizer.estimate.prediction import Prediction, RankPrediction
from optimizer.estimate.training import estimate_training
from optimizer.goal import Goal
from optimizer.hardware.machine import DeviceKind, Machine, host_name
from optimizer.plan.activations import BlockChoice
from optimizer.plan.devices.layout import DeviceLayout, RankShare
from optimizer.plan.devices.stages import describe_cut
from optimizer.plan.explain.training import explain_common
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.search.arrangements import keep_everything
from optimizer.search.check.card_fit import ACCEPTED, Outpaced
from optimizer.search.core import find_best, find_chosen, search
from optimizer.search.problem import OuterPlan, PricedPlan, SearchProblem
from optimizer.search.questions.answers import LayoutOption, ObjectiveAnswer, answer_with
from optimizer.search.questions.by_hand.pricing import PricedSetup
from optimizer.search.questions.by_hand.sentences import explain_sharing, list_options
from optimizer.search.questions.layout_list import (
    SHOWN_MS,
    WORTH_LOCAL,
    describe_layout,
    list_cuts,
    list_hybrid_modes,
    list_layouts,
    list_local,
    settle_local,
)
from optimizer.search.questions.uneven.bounds import LeastTime, least_alone_ms, least_shared
from optimizer.search.questions.uneven.cuts import find_cut, pose_orders
from optimizer.search.questions.uneven.options import Found, Known, Option
from optimizer.search.questions.uneven.parts import find_shared
from optimizer.search.questions.uneven.question import UnevenQuestion, not_searched, speed_of
from optimizer.search.questions.uneven.replicas import list_together
from optimizer.search.questions.uneven.setups import option_of, price_uneven_setups
from optimizer.search.questions.uneven.spared import spared_by_kind
from optimizer.search.result import SearchResult
from optimizer.search.solver.floors import is_over_floor
from optimizer.search.solver.guided import MIN_GAIN
from optimizer.search.solver.pricebook import remembering
from optimizer.workload import TrainingWorkload

_WORTH: Final = 0.005
"""Share by which more devices must be faster to be used."""
_ROUNDING: Final = 1 + 2 * MIN_GAIN
"""Factor of a limit within which searches pass over gains that they do not look for."""
_OUTPACED: Final = "not searched to the end, since others are faster"
UNEVEN_BASELINES: Final[Mapping[str, bool]] = {"shares_by_speed": False, "equal_shares": True}
"""By label, whether all devices take the same share; with shared state or gradients ``_zero1`` or ``_zero2`` follows, within
replicas ``_hybrid_zero2`` and its like, with steps between synchronizations ``_local``."""


def answer_uneven(
    profile: Profile,
    workload: TrainingWorkload,
    goal: Goal,
    *,
    machine: Machine,
    make_problem: Callable[..., SearchProblem],
    calibration: Mapping[str, Any] | None = None,
    shortfalls: Sequence[Shortfall] = (),
) -> ObjectiveAnswer:
    """The fastest plan on any of the machine's devices, at most ``goal.num_devices`` of them, with what others come to.

    make_problem: ``training_problem`` of ``search/training.py``. shortfalls: shown by attempts at this work, for which devices
    leave room; hosts do by the goal (``with_less_elsewhere``). Raises InvalidInput for an objective other than the fastest step
    or the cheapest run, NoFeasiblePlan and InvalidPlan where no devices can do the work.
    """
    if goal.objective not in ("fastest_step", "cheapest_run"):
        raise InvalidInput(
            f"objective {goal.objective} is asked of devices of several kinds; allowed: fastest_step, cheapest_run",
            field="goal.objective",
            value=goal.objective,
            allowed=["fastest_step", "cheapest_run"],
            hint="Ask for the devices of one kind: --devices '2x RTX 3060'.",
        )
    listed = list_cuts(goal, profile, workload)
    # Several stages on each device are tried where devices are alike, or where that is pinned.
    cuts = {layout.num_devices: layout for layout in listed if layout.num_rounds == 1 or goal.pins.layout.schedule is not None}
    local = list_local(goal, workload, is_even=False)
    layouts = [layout for layout in list_layouts(goal, None, cuts=[*cuts.values()], local=local) if not layout.is_cut]
    shared = [layout for layout in layouts if not layout.steps_alone]

    def price(plan: Plan) -> Prediction:
        return estimate_training(profile, plan=plan, workload=workload, machine=machine, calibration=calibration)

    def estimate(plan: Plan) -> Prediction:
        return add_memory(price(plan), profile, plan=plan, workload=workload, machine=machine)

    question = UnevenQuestion(
        profile=profile,
        workload=workload,
        goal=goal,
        machine=machine,
        calibration=calibration,
        make_problem=make_problem,
        price=price,
        estimate=estimate,
        settle=lambda plan: settle_local(plan, goal, workload, price=price),
        find_best=find_best,
        spared_bytes=spared_by_kind(machine, shortfalls),
        data_modes=tuple(
            dict.fromkeys(
                layout.data for layout in shared if layout.num_devices > 1 and layout.replicas == 1 and not layout.shares_weights
            )
        ),
        hybrid_modes=list_hybrid_modes(goal),
    )
    kinds = sorted(machine.kinds, key=lambda kind: -speed_of(kind))
    allowed = {layout.num_devices for layout in layouts}
    question.leave_out_what_shares_little()
    several = [[kind] for kind in kinds if kind.num_devices in cuts]
    options = _search_each(
        [
            *(option for team in _teams(machine, kinds, allowed) for option in _together(question, team, local)),
            *(option for kind in kinds for option in _alone(question, kind, shared)),
            *(
                _cut(question, team, cuts[sum(kind.num_devices for kind in team)])
                for team in (*several, *_teams(machine, kinds, set(cuts)))
            ),
        ]
    )
    best = _best_of(options)
    setups = price_uneven_setups(question, best=None if best is None else best.best)
    taken = _best_of([*options, *(option_of(setup) for setup in setups if setup.may_be_chosen)])
    if taken is None or taken.best is None:
        raise _nothing_fits(question, kinds, options)
    return _answer(question, options if taken in options else [*options, taken], taken, setups=setups)


def _search_each(options: Sequence[Option]) -> list[Option]:
    """The options with their plans, in the same order. Those that could be fastest are searched first, so that most others are
    known to be slower without a search; last those that take steps alone, which must be faster by more.
    """
    found: dict[int, Option] = {}
    known = dict[Hashable, Known]()

    def turn(index: int) -> tuple[bool, float, int]:
        option = options[index]
        return option.layout.steps_alone, option.least.step_ms, option.num_devices

    for index in sorted(range(len(options)), key=turn):
        most_ms = _most_ms([*found.values()], is_local=options[index].layout.steps_alone)
        option = options[index]
        is_passed = option.least.step_ms >= most_ms
        found[index] = replace(option, why=_passed_over(option.least)) if is_passed else option.searched(most_ms, known)
    return [found[index] for index in range(len(options))]


def _passed_over(least: LeastTime) -> str:
    waits = f", {least.network_ms:.1f} ms of it for the network" * (least.network_ms >= SHOWN_MS)
    return not_searched(least.step_ms) + waits


def _most_ms(found: Sequence[Option], *, is_local: bool) -> float:
    """Milliseconds that a plan must beat to be chosen before all that was found. is_local: of ranks that take steps alone."""
    best = _best_of(found)
    if best is None:
        return math.inf
    shared_ms = min((option.step_ms for option in _accepted(found) if not _steps_alone(option)), default=math.inf)
    return min(best.step_ms * (1 + _WORTH), shared_ms * (1 - WORTH_LOCAL) if is_local else math.inf)


def _teams(machine: Machine, kinds: Sequence[DeviceKind], allowed: set[int]) -> Iterator[list[DeviceKind]]:
    """The fastest kinds together, two of them and more, with all their devices: of each machine, then of all. Kinds of one
    machine stand beside each other, so that a ring of ranks comes to each machine once.
    """
    inside = [[kind for kind in kinds if host_name(kind.device.name) == host.name] for host in machine.hosts]
    seen = list[set[str]]()
    for among in (*inside, list(kinds)):
        for number in range(2, len(among) + 1):
            team, names = list(among[:number]), [kind.device.name for kind in among[:number]]
            if set(names) in seen or sum(kind.num_devices for kind in team) not in allowed:
                continue
            seen.append(set(names))
            hosts = [host_name(name) for name in names]
            yield sorted(team, key=lambda kind: hosts.index(host_name(kind.device.name)))


# Devices of one kind.


def _alone(question: UnevenQuestion, kind: DeviceKind, shared: Sequence[DeviceLayout]) -> Iterator[Option]:
    """One device of a kind, and all of them. shared: layouts of ranks that share every step."""
    for num_devices in sorted({1, kind.num_devices}):
        for layout in shared:
            is_tried = num_devices == 1 or layout.shares_weights or layout.data in question.data_modes
            if layout.num_devices != num_devices or not is_tried:
                continue
            ending = _ending(layout)
            name = kind.device.name if num_devices == 1 else f"{num_devices}x {kind.device.name}"
            yield Option(
                label=f"{num_devices}x {kind.device.name}{ending}",
                words=f"{name} alone{ending}",
                num_devices=num_devices,
                layout=layout,
                least=LeastTime(_least_alone_ms(question, kind, layout)),
                search=partial(_find_alone, question, kind, layout),
                team=[kind],
                likeness=("alone", question.likeness(kind), layout),
            )


def _pose_alone(question: UnevenQuestion, kind: DeviceKind, layout: DeviceLayout) -> SearchProblem:
    """Raises InvalidWorkload where the batch cannot be dealt out."""
    return question.pose(kind, layout, num_sequences=question.workload.of_rank(layout.num_devices).global_batch_size)


def _least_alone_ms(question: UnevenQuestion, kind: DeviceKind, layout: DeviceLayout) -> float:
    key = (question.likeness(kind), layout)
    if key not in question.alone_ms:
        question.alone_ms[key] = 0.0
        with suppress(InvalidPlan, InvalidWorkload):  # which the search reports
            question.alone_ms[key] = least_alone_ms(_pose_alone(question, kind, layout))
    return question.alone_ms[key]


def _find_alone(question: UnevenQuestion, kind: DeviceKind, layout: DeviceLayout, most_ms: float) -> Found:
    question.budgets.clear()
    try:
        problem = _pose_alone(question, kind, layout)
        if is_over_floor(problem):
            return Found(None, "nothing fits, whatever its blocks do")
        plan = find_chosen(remembering(problem), most_ms=most_ms * _ROUNDING).plan
    except Outpaced:
        return Found(None, _OUTPACED)
    except NoFeasiblePlan as error:
        return Found(None, error.in_short)
    except (InvalidPlan, InvalidWorkload) as error:
        return Found(None, error.message)
    ranks = (RankShare(device=kind.device.name),) * layout.num_devices
    return Found(question.priced("chosen", replace(plan, layout=replace(layout, ranks=ranks))))


# Devices of several kinds.


def _together(question: UnevenQuestion, team: list[DeviceKind], local: Sequence[DeviceLayout]) -> Iterator[Option]:
    """Shares by speed, and equal ones. local: layouts whose ranks take steps alone."""
    names = " and ".join(f"{kind.num_devices}x {kind.device.name}" for kind in team)
    for layout in list_together(question, team, local):
        suffix = "_local" if layout.steps_alone else "" if layout.data == "replicated" else f"_{layout.data}"
        suffix = f"_hybrid{suffix}" if layout.replicas > 1 and layout.shares_state else suffix
        for label, is_equal in UNEVEN_BASELINES.items():
            if is_equal and len({question.likeness(kind, team) for kind in team}) == 1:
                continue  # Those by speed are equal.
            words = f"{names}, {label.replace('_', ' ')}"
            yield Option(
                label=f"{label}{suffix}",
                words=f"{words}{_ending(layout)}",
                num_devices=layout.num_devices,
                layout=layout,
                least=least_shared(question, team, layout, is_equal=is_equal),
                search=partial(_find_shared, question, team, layout, is_equal=is_equal),
                team=team,
                likeness=("shared", question.likeness_of(team), layout, is_equal),
                names_of=partial(_shared_names, words),
            )


def _ending(layout: DeviceLayout) -> str:
    """Words in which layouts of the same devices differ."""
    if layout.steps_alone:
        return f", each alone for {layout.sync_every} steps, differences sent in {layout.sync_format}"
    within = f" in each of {layout.replicas} replicas" * (layout.replicas > 1)
    return "" if layout.data == "replicated" else f" ({layout.data}{within})"


def _shared_names(words: str, found: Found) -> dict[str, Any]:
    return {} if found.best is None else {"words": f"{words}{_ending(found.best.plan.layout)}"}


def _find_shared(
    question: UnevenQuestion, team: Sequence[DeviceKind], layout: DeviceLayout, most_ms: float, *, is_equal: bool
) -> Found:
    try:
        best = find_shared(question, team, layout, is_equal=is_equal, most_ms=most_ms)
    except Outpaced as outpaced:
        return Found(None, f"{_OUTPACED}: its first shares take {outpaced.least:.1f} ms")
    return Found(None, "no such shares fit") if best is None else Found(best)


def _cut(question: UnevenQuestion, team: Sequence[DeviceKind], asked: DeviceLayout) -> Option:
    """The model cut over the devices of these kinds."""
    orders = pose_orders(question, team, asked)

    def search(most_ms: float) -> Found:
        found = find_cut(question, orders, most_ms=most_ms)
        return Found(found.best, found.why, found.layout)

    found = Found(None, layout=orders[0].layout)
    return Option(
        **_cut_names(found),
        num_devices=asked.num_devices,
        least=LeastTime(orders[0].least_ms),
        search=search,
        team=team,
        likeness=("cut", question.likeness_of(team), asked),
        names_of=_cut_names,
    )


def _cut_names(found: Found) -> dict[str, Any]:
    """Label, words and layout of an option that cuts the model in this order of devices."""
    layout, best = found.layout, found.best
    assert layout is not None
    counts = Counter(share.device for share in layout.ranks)
    names = " and ".join(f"{count}x {name}" for name, count in counts.items())
    cut = f" into {describe_cut(layout.stage_blocks, layout.num_devices)}" if best is not None else ""
    return {"label": f"cut, {names}", "words": f"{names}, the model cut{cut}", "layout": layout}


# The answer.


def _best_of(options: Sequence[Option]) -> Option | None:
    """The fastest; of those as fast the one with the fewest devices."""
    found = _accepted(options)
    shared_ms = min((option.step_ms for option in found if not _steps_alone(option)), default=math.inf)
    most_ms = shared_ms * (1 - WORTH_LOCAL)
    found = [option for option in found if not _steps_alone(option) or option.step_ms <= most_ms]
    fastest_ms = min((option.step_ms for option in found), default=0.0)
    as_fast = [option for option in found if option.step_ms <= fastest_ms * (1 + _WORTH)]
    return min(as_fast, key=lambda option: (option.num_devices, option.step_ms), default=None)


def _accepted(options: Sequence[Option]) -> list[Option]:
    return [option for option in options if option.best is not None and option.best.verdict in ACCEPTED]


def _steps_alone(option: Option) -> bool:
    return option.best is not None and option.best.plan.layout.steps_alone


def _nothing_fits(
    question: UnevenQuestion, kinds: Sequence[DeviceKind], options: Sequence[Option]
) -> NoFeasiblePlan | InvalidPlan:
    """The error of the device with the most memory, which comes closest."""
    largest = max(kinds, key=lambda kind: kind.device.memory_bytes)
    try:
        search(question.pose(largest, DeviceLayout(), num_sequences=question.workload.global_batch_size))
    except (NoFeasiblePlan, InvalidPlan) as error:
        return error
    said = "; ".join(f"{option.words}: {option.why}" for option in options if option.why)
    return InvalidPlan(f"no devices can do the work: {said}", field="goal.pins.layout", value=None, allowed="other pins")


def _answer(
    question: UnevenQuestion, options: Sequence[Option], best: Option, *, setups: Sequence[PricedSetup]
) -> ObjectiveAnswer:
    assert best.best is not None
    chosen = replace(best.best, label="chosen")
    name = chosen.plan.layout.ranks[0].device
    kind = next(kind for kind in question.machine.kinds if kind.device.name == name)
    problem = question.pose(kind, DeviceLayout(), num_sequences=question.workload.global_batch_size)
    baselines = {option.label: replace(option.best, label=option.label) for option in options if option.best is not None}
    by_hand = {setup.label: setup.priced for setup in setups if setup.priced is not None}
    unlimited = chosen.plan
    with suppress(InvalidPlan):
        unlimited = _keeping_all(chosen.plan)
    result = SearchResult(
        chosen=chosen,
        baselines=baselines | by_hand,
        frontier=_frontier([*baselines.values()]),
        bound_step_ms=None,
        unlimited_step_ms=min(chosen.prediction.step_ms, question.priced("unlimited", unlimited).prediction.step_ms),
        explanation=(
            *explain_ranks(chosen.plan, chosen.prediction),
            *explain_common(chosen.plan, prediction=chosen.prediction),
            *explain_sharing(setups, chosen),
        ),
    )
    listed = tuple(
        LayoutOption(
            layout=option.layout if option.best is None else option.best.plan.layout,
            best=option.best,
            least_step_ms=option.least.step_ms,
            sentence=_compare(option, best, question.machine),
        )
        for option in options
    )
    answer = answer_with(problem, question.profile, result)
    return replace(answer, workload=question.workload, layouts=listed, setups=list_options(setups, chosen))


def _keeping_all(plan: Plan) -> Plan:
    """The same plan if memory were no matter: every rank keeps its activations."""
    kept = OuterPlan.of(plan).plan(keep_everything(len(plan.activations.per_block)))
    ranks = tuple(replace(share, per_block=None) for share in plan.layout.ranks)
    return replace(kept, layout=replace(plan.layout, ranks=ranks))


def _frontier(plans: Sequence[PricedPlan]) -> tuple[PricedPlan, ...]:
    """Plans of which no other is both smaller, on its fullest device, and faster; from small to fast."""
    found: list[PricedPlan] = []
    for priced in sorted(plans, key=lambda each: (each.prediction.device_peak_high_bytes, each.prediction.step_ms)):
        if not found or priced.prediction.step_ms < found[-1].prediction.step_ms:
            found.append(priced)
    return tuple(found)


def _compare(option: Option, best: Option, machine: Machine) -> str:
    if option.best is None:
        return f"{option.words}: {option.why}"
    waits_ms = option.best.prediction.exposed_ms.get("network", 0.0)
    is_joined = bool(machine.among({share.device for share in option.best.plan.layout.ranks}).hosts)
    waits = f"; compute waits {waits_ms:.1f} ms a step for the network between machines" * (is_joined and waits_ms >= SHOWN_MS)
    if option.best.plan.layout.is_cut:
        waits = f"; the fullest device waits {waits_ms:.1f} ms a step for the others" * (waits_ms >= SHOWN_MS)
    if option is best:
        others = "devices of other machines" if machine.hosts and best.num_devices > 1 else "more devices"
        alone = best.num_devices == 1 or (bool(machine.hosts) and not is_joined)
        return f"{option.words}: chosen{waits}" + f"; {others} would wait for each other for longer than they save" * alone
    slower = format_slowdown(option.step_ms / best.step_ms)
    more = option.num_devices - best.num_devices
    return f"{option.words}: {slower}" + (f", with {more} more device{'s' * (more > 1)}" if more > 0 else "") + waits


def explain_ranks(plan: Plan, prediction: Prediction) -> Iterator[str]:
    """Sentences without a final stop: what each rank does, which is the fullest and which the slowest."""
    layout = plan.layout
    yield describe_layout(layout.without_ranks) + (", of unequal shares" if len(set(plan.rank_sequences)) > 1 else "")
    for rank, (own, found) in enumerate(zip(plan.of_ranks(), prediction.ranks, strict=True)):
        yield f"rank {rank} on {found.device} " + (_stage_words if layout.is_cut else _share_words)(own, found, rank)
    fullest, slowest = prediction.fullest_rank, prediction.slowest_rank
    if len(prediction.ranks) > 1 and fullest is not None and slowest is not None:
        yield (
            f"rank {fullest} ({prediction.ranks[fullest].device}) has the least room left, and its peak falls in "
            f"{prediction.peak_moment}; rank {slowest} ({prediction.ranks[slowest].device}) is the slowest, and all wait for it"
        )


def _share_words(own: Plan, found: RankPrediction, rank: int) -> str:
    batch, number = own.batch, found.num_sequences
    return (
        f"takes {number} sequence{'s' * (number > 1)} of a step in {batch.accumulation_steps} "
        f"micro-batch{'es' * (batch.accumulation_steps > 1)} of {batch.micro_batch_size} "
        f"({_count_choices(own.activations.per_block)}): {_bytes_of(found)}, {found.step_ms:.1f} ms"
    )


def _stage_words(own: Plan, found: RankPrediction, rank: int) -> str:
    stages = own.layout.rank_stages[rank]
    choices = stages.pick(own.activations.per_block)
    return f"has {stages.words} ({_count_choices(choices)}): {_bytes_of(found)}, at work for {found.step_ms:.1f} ms of a step"


def _bytes_of(found: RankPrediction) -> str:
    return f"{format_bytes(found.peak_bytes)} of {format_bytes(found.memory_bytes)}"


def _count_choices(choices: Sequence[BlockChoice]) -> str:
    return ", ".join(f"{choices.count(choice)} blocks {choice.replace('_', ' ')}" for choice in dict.fromkeys(choices))
