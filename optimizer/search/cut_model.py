"""A model that is cut over devices: where it is cut, how many micro-batches follow each other, and what each stage's blocks do.

``cutting.py`` finds the best cut of one setting. Micro-batches and number formats that cannot be faster than what is known are
passed over. Gradients, state and weights are first all on the devices. They are tried on the host where nothing fits so, or where
a setting would be faster than what is known if memory did not count.

*Not searched*: GPipe's order, which takes the time of 1F1B and more memory, and is carried out where it is pinned; blocks that
run again in the midst of a stage; stages of which some blocks run again and others offload; compression of what is offloaded;
number formats and chunks that would be no faster than what is known if they came as near to their bound as what takes the least
memory.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from optimizer.base.errors import InvalidPlan, NoFeasiblePlan
from optimizer.estimate.prediction import MEMORY_MARGIN, CardMemory, Prediction
from optimizer.plan.activations import BlockChoice
from optimizer.plan.devices.stages import deal_stages
from optimizer.plan.explain.training import explain_plan
from optimizer.plan.plan import Plan
from optimizer.search.answer.frontier import plan_label
from optimizer.search.answer.nothing_fits import list_short_of
from optimizer.search.answer.pareto import pick_frontier
from optimizer.search.check.card_fit import ACCEPTED, Outpaced
from optimizer.search.check.verify import VerificationFailed, verify_plan
from optimizer.search.cut_settings import CutSettings, home_of, is_near, list_cut_settings, list_finer
from optimizer.search.cutting import UNLIMITED, Cut, CutOfSetting, Cutting, even_cut, kept_by, pricer_of
from optimizer.search.problem import OuterPlan, PricedPlan, SearchProblem
from optimizer.search.result import SearchResult

_MAX_TIGHTER = 6
"""Times that less than the budget is aimed at, where a card takes more than its tensors."""
_TIGHTER, _LOOSER = 0.98, 0.8
"""Largest and smallest share of what was aimed at before."""
_WORTH = 0.002
"""Share by which a setting must be faster than what is known to be looked at."""
_NUM_SHOWN = 6
"""Micro-batches and formats whose best plan is shown on the frontier."""


def least_cut_ms(problem: SearchProblem) -> float:
    """No plan of the problem is faster."""
    pricer = pricer_of(problem)
    return min((pricer.least_ms(setting.plan(kept_by(problem))) for setting in problem.settings()), default=0.0)


def search_cut(problem: SearchProblem, *, most_ms: float = math.inf) -> SearchResult:
    """The fastest plan that is cut over the problem's devices, in their order, and fits, with others beside it. Raises
    NoFeasiblePlan, InvalidPlan where pins leave none, and Outpaced as ``find_cut_plan`` does.
    """
    return _result(problem, *_find_fitting(problem, most_ms=most_ms))


def describe_cut_plan(problem: SearchProblem, chosen: PricedPlan) -> SearchResult:
    """The result with a plan that fits as the chosen one, and with what stands beside it. Raises VerificationFailed, a fault of
    ours.
    """
    settings = list_cut_settings(problem)
    wrong = verify_plan(problem, plan=chosen.plan, prediction=problem.price(chosen.plan))
    if wrong:
        raise VerificationFailed(wrong)
    return _result(problem, [*(settings.near or settings.away)], chosen, [])


def find_cut_plan(problem: SearchProblem, *, most_ms: float = math.inf) -> PricedPlan:
    """The plan that ``search_cut`` would choose, and nothing beside it. Raises as that does.

    most_ms: a plan must beat it to be of use. Raises Outpaced once it is clear that none does.
    """
    return _find_fitting(problem, most_ms=most_ms)[1]


def _find_fitting(
    problem: SearchProblem, *, most_ms: float = math.inf
) -> tuple[list[OuterPlan], PricedPlan, list[CutOfSetting]]:
    """All settings, the fastest plan whose processes have room, and the best of the settings that were looked at."""
    settings = list_cut_settings(problem)
    if not settings.all:
        raise InvalidPlan(
            "no plan of a model that is cut keeps the goal's pins; it takes 2 micro-batches or more, and keeps weights, "
            "gradients and optimizer state on the devices or on the host",
            field="goal.pins",
            value="",
            allowed="a batch of 2 sequences or more; weights.place device or host, gradients.choice keep or host",
        )
    if problem.lacks_disk:
        raise _nothing_fits(problem, settings)
    shares, no_room = (1.0,) * problem.layout.num_devices, set[OuterPlan]()
    accepted: tuple[PricedPlan, list[CutOfSetting]] | None = None
    for _ in range(_MAX_TIGHTER):
        limits_bytes = _limits_of(problem, shares)
        found = _find_all(problem, settings.without(no_room), limits_bytes=limits_bytes, most_ms=most_ms)
        if not found or (accepted is not None and found[0].step_ms >= most_ms):
            break
        if found[0].step_ms >= most_ms:
            raise Outpaced(problem.priced("chosen", found[0].plan, in_detail=False), least=found[0].step_ms)
        tighter = list[tuple[float, ...]]()
        for each in _list_fastest(found, most_ms=most_ms):
            priced = _verified(problem, each)
            if priced.verdict in ACCEPTED:
                accepted, most_ms = (priced, found), each.step_ms
                break
            if problem.fits_elsewhere(priced.prediction):
                tighter.append(_tighter(problem, priced.prediction, limits_bytes))
                break
            # Less on the devices leaves the host and the disk no more room.
            no_room.add(each.setting)
        if accepted is not None and accepted[0].plan == found[0].plan:
            break
        if tighter:
            # What is faster than a plan that has room may have room too if it is given less.
            shares = tuple(share * factor for share, factor in zip(shares, max(tighter, key=min), strict=True))
    if accepted is None:
        raise _nothing_fits(problem, settings)
    return [*(settings.near or settings.away)], *accepted


def _list_fastest(found: Sequence[CutOfSetting], *, most_ms: float) -> list[CutOfSetting]:
    """The fastest of each size of the micro-batch and each home that takes less than ``most_ms``, in order."""
    fastest = {(each.setting.micro_batch_size, home_of(each.setting)): each for each in reversed(found)}
    return sorted((each for each in fastest.values() if each.step_ms < most_ms), key=lambda each: each.step_ms)


def _find_all(
    problem: SearchProblem, settings: CutSettings, *, limits_bytes: Sequence[int], most_ms: float = math.inf
) -> list[CutOfSetting]:
    """The best of settings that may be the best of all, the fastest first. most_ms: a plan must beat it to be of use."""
    found = _find_near(problem, settings.near, limits_bytes=limits_bytes, most_ms=most_ms)
    away = _list_worth(problem, settings.away, found)
    by_size: dict[int, list[OuterPlan]] = defaultdict(list)
    for setting in away:
        by_size[setting.micro_batch_size].append(setting)
    for listed in by_size.values():
        found = _find_away(problem, listed, found, limits_bytes=limits_bytes, most_ms=most_ms)
    if found and not is_near(found[0].setting):
        best = found[0]
        for setting in list_finer(problem, best.setting):
            found = _add(found, Cutting(problem=problem, setting=setting, limits_bytes=limits_bytes).best(best.cut))
    return found


def _list_worth(problem: SearchProblem, away: Sequence[OuterPlan], found: Sequence[CutOfSetting]) -> list[OuterPlan]:
    """Settings with something on the host that may be faster than what was found, those first that compute for less. They are
    taken to be at least as many times slower than their bound as the fastest that was found of their micro-batch, or of any,
    would be if memory did not count.
    """
    least_ms = {setting: _least_ms(problem, setting) for setting in away}
    in_order = sorted(away, key=lambda setting: least_ms[setting])
    if not found:
        return in_order
    fastest = {each.setting.micro_batch_size: each for each in reversed(found)}
    above = {
        size: _roomy_ms(problem, each.setting, each.cut) / _least_ms(problem, each.setting) for size, each in fastest.items()
    }
    others, needed_ms = above[found[0].setting.micro_batch_size], found[0].step_ms * (1 - _WORTH)
    return [setting for setting in in_order if least_ms[setting] * above.get(setting.micro_batch_size, others) < needed_ms]


def _find_away(
    problem: SearchProblem,
    listed: Sequence[OuterPlan],
    found: list[CutOfSetting],
    *,
    limits_bytes: Sequence[int],
    most_ms: float,
) -> list[CutOfSetting]:
    """Add the best of settings of one micro-batch that have something on the host to what was found. None of them fits where the
    one does not that takes the least memory.
    """
    lightest = min(listed, key=lambda setting: _weight(problem, setting))
    even = even_cut(problem.num_blocks, len(problem.layout.stage_blocks))
    light = Cutting(problem=problem, setting=lightest, limits_bytes=limits_bytes).best()
    if light.over_bytes:
        return found
    found = _add(found, light)
    for setting in listed:
        if setting is lightest:
            continue
        cut = found[0].cut if found else even
        needed_ms = min([most_ms, *(each.step_ms for each in found[:1])]) * (1 - _WORTH)
        if _least_ms(problem, setting) < needed_ms and _roomy_ms(problem, setting, cut) < needed_ms:
            found = _add(found, Cutting(problem=problem, setting=setting, limits_bytes=limits_bytes).best(cut))
    return found


def _add(found: Sequence[CutOfSetting], other: CutOfSetting) -> list[CutOfSetting]:
    """Add another to what was found, where it fits; the fastest first."""
    return sorted([*found, *([] if other.over_bytes else [other])], key=lambda each: each.step_ms)


def _roomy_ms(problem: SearchProblem, setting: OuterPlan, cut: Cut, *, most_ms: float = math.inf) -> float:
    """The time of a setting's step where the model is cut so and memory does not count; the least that it takes where that is
    ``most_ms`` or more.
    """
    no_limits = (UNLIMITED,) * problem.layout.num_devices
    return Cutting(problem=problem, setting=setting, limits_bytes=no_limits).evaluate(cut, most_ms=most_ms).step_ms


def _least_ms(problem: SearchProblem, setting: OuterPlan) -> float:
    """No cut of the setting is faster, wherever it keeps its parts."""
    return pricer_of(problem).least_ms(setting.base.plan(kept_by(problem)))


def _find_near(
    problem: SearchProblem, settings: Sequence[OuterPlan], *, limits_bytes: Sequence[int], most_ms: float
) -> list[CutOfSetting]:
    """The best of settings that may be the best of all, the fastest first. most_ms: a plan must beat it to be of use.

    By size of the micro-batch, the setting that takes the least memory comes first: others are taken to be at least as many times
    slower than their bound as it is.
    """
    pricer, kept, found = pricer_of(problem), kept_by(problem), list[CutOfSetting]()

    def needed_ms() -> float:
        return min([most_ms, *(each.step_ms for each in found)]) * (1 - _WORTH)

    def look_at(setting: OuterPlan) -> float:
        """Milliseconds of the setting's best cut; infinite where none fits."""
        start = min(found, key=lambda each: each.step_ms).cut if found else None
        best = Cutting(problem=problem, setting=setting, limits_bytes=limits_bytes).best(start)
        if best.over_bytes:
            return math.inf
        found.append(best)
        return best.step_ms

    by_size: dict[int, list[tuple[float, OuterPlan]]] = defaultdict(list)
    for setting in settings:
        by_size[setting.micro_batch_size].append((pricer.least_ms(setting.plan(kept)), setting))
    for bounded in sorted((sorted(each, key=_least_first) for each in by_size.values()), key=lambda each: each[0][0]):
        if bounded[0][0] >= needed_ms():
            break
        light_ms, lightest = min(bounded, key=lambda each: _weight(problem, each[1]))
        above = look_at(lightest) / light_ms
        for least_ms, setting in bounded:
            if setting is not lightest and least_ms * above < needed_ms():
                look_at(setting)
    return sorted(found, key=lambda each: each.step_ms)


def _least_first(bounded: tuple[float, OuterPlan]) -> tuple[float, str]:
    return bounded[0], repr(bounded[1])


def _weight(problem: SearchProblem, setting: OuterPlan) -> tuple[int, int, str]:
    """Less for a setting that takes less memory: on a stage with half of the blocks, then in the head."""
    half = deal_stages(even_cut(problem.num_blocks, 2 * problem.layout.num_rounds), 2)[0]
    plan = replace(setting, num_chunks=1).plan(kept_by(problem))
    return pricer_of(problem).price_rank(plan, half).peak_bytes, -setting.num_chunks, repr(setting)


def _verified(problem: SearchProblem, found: CutOfSetting) -> PricedPlan:
    """The plan in detail, with what a card takes beside the tensors. Raises VerificationFailed, a fault of ours."""
    priced = problem.priced("chosen", found.plan)
    if priced.verdict in ACCEPTED:
        wrong = verify_plan(problem, plan=found.plan, prediction=problem.price(found.plan))
        if wrong:
            raise VerificationFailed(wrong)
    return priced


def _tighter(problem: SearchProblem, prediction: Prediction, limits_bytes: Sequence[int]) -> tuple[float, ...]:
    """By stage, the share of what was aimed at to aim at next, as a plan's process has no room: all alike on equal devices. It is
    below what the plan took, which would be found again.
    """
    budget_bytes = problem.goal.device_budget_bytes
    if not prediction.ranks:
        share = _room_share(budget_bytes, high_bytes=prediction.device_peak_high_bytes, memory=prediction.memory)
        return (share * min(1.0, prediction.device_peak_bytes / limits_bytes[0]),) * problem.layout.num_devices
    return tuple(
        1.0
        if rank.verdict(budget_bytes) in ACCEPTED
        else _room_share(min(budget_bytes, rank.memory_bytes), high_bytes=rank.peak_high_bytes, memory=rank.memory)
        * min(1.0, rank.peak_bytes / limit_bytes)
        for rank, limit_bytes in zip(prediction.ranks, limits_bytes, strict=True)
    )


def _room_share(allowed_bytes: int, *, high_bytes: int, memory: CardMemory | None) -> float:
    """The part of a device's bytes that there is room for, within what is taken off at once."""
    needed_bytes = high_bytes if memory is None else max(high_bytes, memory.allocated.high)
    if memory is not None and memory.total_bytes:
        needed_bytes = max(needed_bytes, allowed_bytes + memory.process.high - memory.total_bytes)
    return min(_TIGHTER, max(_LOOSER, allowed_bytes / needed_bytes))


def _result(
    problem: SearchProblem, settings: Sequence[OuterPlan], chosen: PricedPlan, found: Sequence[CutOfSetting]
) -> SearchResult:
    baselines = _price_baselines(problem, settings)
    shown: dict[Plan, Prediction] = {chosen.plan: chosen.prediction}
    for plan in (*(each.plan for each in found[:_NUM_SHOWN]), *(each.plan for each in baselines.values())):
        if plan not in shown and problem.permits(plan):
            shown[plan] = problem.price(plan)
    points = pick_frontier([(plan, each) for plan, each in shown.items() if problem.fits_elsewhere(each)], best=chosen.plan)
    pricer = pricer_of(problem)
    quickest = min(settings, key=lambda setting: pricer.least_ms(setting.plan(kept_by(problem))))
    no_limits = (UNLIMITED,) * problem.layout.num_devices
    unlimited = _find_near(problem, [quickest, OuterPlan.of(chosen.plan)], limits_bytes=no_limits, most_ms=math.inf)
    return SearchResult(
        chosen=chosen,
        baselines=baselines,
        frontier=tuple(problem.priced(plan_label(plan), plan, each, in_detail=False) for plan, each in points),
        bound_step_ms=least_cut_ms(problem),
        unlimited_step_ms=min(chosen.prediction.step_ms, *(each.step_ms for each in unlimited)),
        explanation=tuple(
            explain_plan(chosen.plan, prediction=chosen.prediction, baseline=baselines["keep_all"].prediction)
        ),
    )


def _price_baselines(problem: SearchProblem, settings: Sequence[OuterPlan]) -> dict[str, PricedPlan]:
    """An even cut with one sequence in each micro-batch, or as few as may be, and every block alike."""
    smallest = min(settings, key=lambda setting: setting.micro_batch_size)
    cut = problem.goal.pins.layout.stage_blocks or even_cut(problem.num_blocks, len(problem.layout.stage_blocks))
    setting = replace(smallest, layout=replace(problem.layout, stage_blocks=tuple(cut)))
    choices: dict[str, BlockChoice] = {"keep_all": "keep", "recompute_all": "recompute"}
    return {
        label: problem.priced(label, setting.plan((choice,) * problem.num_blocks), in_detail=False)
        for label, choice in choices.items()
    }


def _nothing_fits(problem: SearchProblem, settings: CutSettings) -> NoFeasiblePlan:
    """The error to raise, with the smallest peak that was found."""
    smallest: Prediction | None = None
    sizes = {setting.micro_batch_size for setting in settings.all}
    away = [setting for setting in settings.away if setting.micro_batch_size == min(sizes)]
    lightest = [min(away, key=lambda setting: _weight(problem, setting))] if away else []
    for setting in (*settings.near, *lightest):
        if setting.micro_batch_size == min(sizes):
            limits_bytes = (0,) * problem.layout.num_devices
            best = Cutting(problem=problem, setting=setting, limits_bytes=limits_bytes).best().plan
            tried = problem.price(best)
            if smallest is None or tried.device_peak_high_bytes < smallest.device_peak_high_bytes:
                plan, smallest = best, tried
    assert smallest is not None
    short_of = list_short_of(problem, problem.priced("smallest", plan, smallest).prediction)
    return NoFeasiblePlan(
        budget_bytes=problem.goal.device_budget_bytes,
        smallest_feasible_bytes=smallest.device_peak_high_bytes,
        bytes_by_category=smallest.device_bytes_by_category,
        short_of=short_of,
    )


def _limits_of(problem: SearchProblem, shares: Sequence[float]) -> tuple[int, ...]:
    """By stage, bytes of tensors with which its upper end honours the budget, or a share of them."""
    pricer = pricer_of(problem)
    limits_bytes, margin = pricer.limits_bytes(problem.goal.device_budget_bytes), MEMORY_MARGIN[pricer.device_kind]
    return tuple(math.floor(share * each / (1 + margin)) for share, each in zip(shares, limits_bytes, strict=True))
