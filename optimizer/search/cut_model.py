"""A model that is cut over devices: where it is cut, how many micro-batches follow each other, and what each stage's blocks do.

With all that is decided outside the blocks given, a stage's own blocks have one question: how many of them must run again so that
the stage's peak honours the budget and, on unequal devices, its device's memory. So stages are priced one by one, each on its own
device with the fewest such blocks, and run against each other; cuts start even, or on unequal devices by their speed and by their
memory, and move block by block as long as that makes the step shorter, or the fullest stage smaller where one is too full.
Micro-batches and number formats that cannot be faster than what is known are passed over.

*Not searched*: GPipe's order, which takes the time of 1F1B and more memory, and is carried out where it is pinned; blocks that
run again in the midst of a stage; state and gradients away from the devices; number formats and chunks that would be no
faster than what is known if they came as near to their bound as what takes the least memory.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from optimizer.base.errors import InvalidPlan, NoFeasiblePlan
from optimizer.estimate.prediction import MEMORY_MARGIN, Prediction, RankPrediction
from optimizer.estimate.step.pipeline.schedule import StagePrice
from optimizer.plan.activations import BlockChoice
from optimizer.plan.explain.training import explain_plan
from optimizer.plan.plan import Plan
from optimizer.plan.stages import StageOfModel, list_stages
from optimizer.search.answer.frontier import plan_label
from optimizer.search.answer.pareto import pick_frontier
from optimizer.search.arrangements import PerBlock, PlanLine, keep_everything
from optimizer.search.check.card_fit import ACCEPTED, Outpaced
from optimizer.search.check.verify import VerificationFailed, verify_plan
from optimizer.search.problem import OuterPlan, PricedPlan, SearchProblem, StagePrices
from optimizer.search.result import SearchResult
from optimizer.search.solver.grid import with_chunks

Cut = tuple[int, ...]
_MAX_TIGHTER = 6
"""Times that less than the budget is aimed at, where a card takes more than its tensors."""
_TIGHTER, _LOOSER = 0.98, 0.8
"""Largest share of what was aimed at before, and on unequal devices the smallest."""
_UNLIMITED = 2**62
_WORTH = 0.002
"""Share by which a setting must be faster than what is known to be looked at."""
_NUM_SHOWN = 6
"""Micro-batches and formats whose best plan is shown on the frontier."""


@dataclass(frozen=True, kw_only=True)
class _Found:
    """One cut under one setting, with what each block does."""

    setting: OuterPlan
    cut: Cut
    per_block: PerBlock
    step_ms: float
    over_bytes: int
    """Bytes by which stages are over the limit, all together; 0 where each fits."""
    hardest: int
    """The stage that takes the most time, or of those that do not fit the fullest."""

    @property
    def plan(self) -> Plan:
        layout = replace(self.setting.layout, stage_blocks=self.cut)
        return replace(self.setting, layout=layout).plan(self.per_block)

    @property
    def value(self) -> tuple[int, float]:
        return self.over_bytes, self.step_ms


def even_cut(num_blocks: int, num_stages: int) -> Cut:
    """Give each device as many blocks, and one more first to those in the middle, whose neighbours have embedding and head."""
    each, more = divmod(num_blocks, num_stages)
    order = sorted(range(num_stages), key=lambda stage: (stage in (0, num_stages - 1), stage))
    return tuple(each + (stage in order[:more]) for stage in range(num_stages))


def shared_cut(num_blocks: int, weights: Sequence[float]) -> Cut:
    """Give each device as many blocks as its weight asks for, and at least one. weights: by stage, above 0."""
    found = [1] * len(weights)
    for _ in range(num_blocks - len(weights)):
        shares = [number / weight for number, weight in zip(found, weights, strict=True)]
        found[shares.index(min(shares))] += 1
    return tuple(found)


def least_cut_ms(problem: SearchProblem) -> float:
    """No plan of the problem is faster."""
    pricer = _pricer_of(problem)
    return min((pricer.least_ms(setting.plan(_kept(problem))) for setting in problem.settings()), default=0.0)


def search_cut(problem: SearchProblem) -> SearchResult:
    """The fastest plan that is cut over the problem's devices, in their order, and fits, with others beside it. Raises
    NoFeasiblePlan, InvalidPlan where pins leave none.
    """
    return _result(problem, *_find_fitting(problem))


def find_cut_plan(problem: SearchProblem, *, most_ms: float = math.inf) -> PricedPlan:
    """The plan that ``search_cut`` would choose, and nothing beside it. Raises as that does.

    most_ms: a plan must beat it to be of use. Raises Outpaced once it is clear that none does.
    """
    return _find_fitting(problem, most_ms=most_ms)[1]


def _find_fitting(
    problem: SearchProblem, *, most_ms: float = math.inf
) -> tuple[list[OuterPlan], PricedPlan, list[_Found]]:
    """All settings, the fastest plan whose processes have room, and the best of the settings that were looked at."""
    settings = [
        chunked for base in problem.settings() for chunked in with_chunks(problem, base) if _keeps_pins(problem, chunked)
    ]
    if not settings:
        raise InvalidPlan(
            "no plan of a model that is cut keeps the goal's pins; it takes 2 micro-batches or more, and keeps weights, "
            "gradients and optimizer state on the devices",
            field="goal.pins",
            value="",
            allowed="a batch of 2 sequences or more; weights.place device, gradients.choice keep",
        )
    shares = (1.0,) * problem.layout.num_devices
    for _ in range(_MAX_TIGHTER):
        found = _find_all(problem, settings, limits_bytes=_limits_of(problem, shares), most_ms=most_ms)
        if not found:
            break
        if found[0].step_ms >= most_ms:
            raise Outpaced(problem.priced("chosen", found[0].plan, in_detail=False), least=found[0].step_ms)
        tighter = list[tuple[float, ...]]()
        fastest = {each.setting.micro_batch_size: each for each in reversed(found)}
        for each in sorted(fastest.values(), key=lambda each: each.step_ms):
            priced = _verified(problem, each)
            if priced.verdict in ACCEPTED:
                return settings, priced, found
            tighter.append(_tighter(problem, priced.prediction))
        shares = tuple(share * factor for share, factor in zip(shares, max(tighter, key=min), strict=True))
    raise _nothing_fits(problem, settings)


def _keeps_pins(problem: SearchProblem, setting: OuterPlan) -> bool:
    """Report whether pins allow it with everything on the devices; those of the cut are for ``_Cutting``."""
    return problem.goal.pins.broken_by(setting.plan(_kept(problem))) in (None, "layout.stage_blocks", "activations.per_block")


def _find_all(
    problem: SearchProblem, settings: Sequence[OuterPlan], *, limits_bytes: Sequence[int], most_ms: float = math.inf
) -> list[_Found]:
    """The best of settings that may be the best of all, the fastest first. most_ms: a plan must beat it to be of use.

    By size of the micro-batch, the setting that takes the least memory comes first: others are taken to be at least as many times
    slower than their bound as it is.
    """
    pricer, kept, found = _pricer_of(problem), _kept(problem), list[_Found]()

    def needed_ms() -> float:
        return min([most_ms, *(each.step_ms for each in found)]) * (1 - _WORTH)

    def look_at(setting: OuterPlan) -> float:
        """Milliseconds of the setting's best cut; infinite where none fits."""
        start = min(found, key=lambda each: each.step_ms).cut if found else None
        best = _Cutting(problem=problem, setting=setting, limits_bytes=limits_bytes).best(start)
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
    half = list_stages(even_cut(problem.num_blocks, 2))[0]
    plan = replace(setting, num_chunks=1).plan(_kept(problem))
    return _pricer_of(problem).price_stage(plan, half).peak_bytes, -setting.num_chunks, repr(setting)


@dataclass(kw_only=True)
class _Cutting:
    """The cuts of one setting. limits_bytes: of each stage's peak."""

    problem: SearchProblem
    setting: OuterPlan
    limits_bytes: Sequence[int]
    _stages: dict[StageOfModel, tuple[StagePrice, PerBlock]] = field(default_factory=dict)

    def best(self, start: Cut | None = None) -> _Found:
        """start: a cut that was good under another setting."""
        pinned = self.problem.goal.pins.layout.stage_blocks
        if pinned is not None:
            return self.evaluate(tuple(pinned))
        starts = dict.fromkeys((*self._begin(), *([] if start is None else [start])))
        return min((self._climb(self.evaluate(cut)) for cut in starts), key=lambda found: found.value)

    def _begin(self) -> Iterator[Cut]:
        layout, num_blocks = self.problem.layout, self.problem.num_blocks
        if not layout.ranks:
            yield even_cut(num_blocks, layout.num_devices)
            return
        whole_ms = _pricer_of(self.problem).whole_ms(self._plan(_kept(self.problem)))
        yield shared_cut(num_blocks, [1 / each_ms for each_ms in whole_ms])
        yield shared_cut(num_blocks, [max(1, num_bytes) for num_bytes in self.limits_bytes])

    def evaluate(self, cut: Cut) -> _Found:
        stages = list_stages(cut)
        priced = [self._stage(stage) for stage in stages]
        prices = [price for price, _ in priced]
        over = [max(0, price.peak_bytes - limit) for price, limit in zip(prices, self.limits_bytes, strict=True)]
        measure: list[float] = [*over] if any(over) else [price.times.forward_ms + price.times.accumulate_ms for price in prices]
        return _Found(
            setting=self.setting,
            cut=cut,
            per_block=tuple(choice for _, own in priced for choice in own),
            step_ms=_pricer_of(self.problem).step_ms(self._plan(_kept(self.problem)), stages, prices),
            over_bytes=sum(over),
            hardest=measure.index(max(measure)),
        )

    def _climb(self, found: _Found) -> _Found:
        while True:
            better = next(
                (tried for cut in _moved(found) if (tried := self.evaluate(cut)).value < found.value), None
            )
            if better is None:
                return found
            found = better

    def _stage(self, stage: StageOfModel) -> tuple[StagePrice, PerBlock]:
        """A stage with the fewest blocks that run again with which it fits; with the most where it does not."""
        if stage not in self._stages:
            self._stages[stage] = self._fit(stage)
        return self._stages[stage]

    def _fit(self, stage: StageOfModel) -> tuple[StagePrice, PerBlock]:
        pinned = self.problem.pinned_blocks
        if pinned is not None:
            own = pinned[stage.blocks.start : stage.blocks.stop]
            return self._price(stage, own), own
        limit_bytes = self.limits_bytes[stage.index]
        line = PlanLine(num_blocks=stage.num_blocks, steps=(*self.problem.rebuilding, "keep"))
        low, high = 0, line.length
        heaviest = self._price(stage, line.per_block(high))
        if heaviest.peak_bytes <= limit_bytes or not high:
            return heaviest, line.per_block(high)
        best = self._price(stage, line.per_block(0))
        if best.peak_bytes > limit_bytes:
            return best, line.per_block(0)
        while high - low > 1:
            middle = (low + high) // 2
            price = self._price(stage, line.per_block(middle))
            if price.peak_bytes <= limit_bytes:
                low, best = middle, price
            else:
                high = middle
        return best, line.per_block(low)

    def _price(self, stage: StageOfModel, own: PerBlock) -> StagePrice:
        blocks: list[BlockChoice] = list(_kept(self.problem))
        blocks[stage.blocks.start : stage.blocks.stop] = own
        return _pricer_of(self.problem).price_stage(self._plan(tuple(blocks)), stage)

    def _plan(self, per_block: PerBlock) -> Plan:
        return self.setting.plan(per_block)


def _moved(found: _Found) -> Iterator[Cut]:
    """Cuts with some blocks less on the hardest stage, and more on another: the nearest first."""
    source, cut = found.hardest, found.cut
    targets = sorted((stage for stage in range(len(cut)) if stage != source), key=lambda stage: abs(stage - source))
    for number in (1, 2, 4):
        for target in targets:
            if cut[source] > number:
                moved = list(cut)
                moved[source] -= number
                moved[target] += number
                yield tuple(moved)


def _verified(problem: SearchProblem, found: _Found) -> PricedPlan:
    """The plan in detail, with what a card takes beside the tensors. Raises VerificationFailed, a fault of ours."""
    priced = problem.priced("chosen", found.plan)
    if priced.verdict in ACCEPTED:
        wrong = verify_plan(problem, plan=found.plan, prediction=problem.price(found.plan))
        if wrong:
            raise VerificationFailed(wrong)
    return priced


def _tighter(problem: SearchProblem, prediction: Prediction) -> tuple[float, ...]:
    """By stage, the share of what was aimed at to aim at next, as a plan's process has no room: all alike on equal devices."""
    budget_bytes, memory = problem.goal.device_budget_bytes, prediction.memory
    if not prediction.ranks:
        taken_bytes = max(prediction.device_peak_high_bytes, 0 if memory is None else memory.allocated.high)
        return (min(_TIGHTER, budget_bytes / taken_bytes),) * problem.layout.num_devices
    return tuple(
        1.0 if rank.verdict(budget_bytes) in ACCEPTED else min(_TIGHTER, max(_LOOSER, _room_share(rank, budget_bytes)))
        for rank in prediction.ranks
    )


def _room_share(rank: RankPrediction, budget_bytes: int) -> float:
    """The part of a rank's bytes that there is room for."""
    allowed_bytes, memory = min(budget_bytes, rank.memory_bytes), rank.memory
    needed_bytes = rank.peak_high_bytes if memory is None else max(rank.peak_high_bytes, memory.allocated.high)
    if memory is not None and memory.total_bytes:
        needed_bytes = max(needed_bytes, allowed_bytes + memory.process.high - memory.total_bytes)
    return allowed_bytes / needed_bytes


def _result(
    problem: SearchProblem, settings: Sequence[OuterPlan], chosen: PricedPlan, found: Sequence[_Found]
) -> SearchResult:
    baselines = _price_baselines(problem, settings)
    shown: dict[Plan, Prediction] = {chosen.plan: chosen.prediction}
    for plan in (*(each.plan for each in found[:_NUM_SHOWN]), *(each.plan for each in baselines.values())):
        if plan not in shown and problem.permits(plan):
            shown[plan] = problem.price(plan)
    points = pick_frontier([(plan, each) for plan, each in shown.items() if problem.fits_elsewhere(each)], best=chosen.plan)
    pricer = _pricer_of(problem)
    quickest = min(settings, key=lambda setting: pricer.least_ms(setting.plan(_kept(problem))))
    no_limits = (_UNLIMITED,) * problem.layout.num_devices
    unlimited = _find_all(problem, [quickest, OuterPlan.of(chosen.plan)], limits_bytes=no_limits)
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
    cut = problem.goal.pins.layout.stage_blocks or even_cut(problem.num_blocks, problem.layout.num_devices)
    setting = replace(smallest, layout=replace(problem.layout, stage_blocks=tuple(cut)))
    choices: dict[str, BlockChoice] = {"keep_all": "keep", "recompute_all": "recompute"}
    return {
        label: problem.priced(label, setting.plan((choice,) * problem.num_blocks), in_detail=False)
        for label, choice in choices.items()
    }


def _nothing_fits(problem: SearchProblem, settings: Sequence[OuterPlan]) -> NoFeasiblePlan:
    """The error to raise, with the smallest peak that was found."""
    smallest: Prediction | None = None
    sizes = {setting.micro_batch_size for setting in settings}
    for setting in settings:
        if setting.micro_batch_size == min(sizes):
            limits_bytes = (0,) * problem.layout.num_devices
            tried = problem.price(_Cutting(problem=problem, setting=setting, limits_bytes=limits_bytes).best().plan)
            if smallest is None or tried.device_peak_high_bytes < smallest.device_peak_high_bytes:
                smallest = tried
    assert smallest is not None
    return NoFeasiblePlan(
        budget_bytes=problem.goal.device_budget_bytes,
        smallest_feasible_bytes=smallest.device_peak_high_bytes,
        bytes_by_category=smallest.device_bytes_by_category,
    )


def _limits_of(problem: SearchProblem, shares: Sequence[float]) -> tuple[int, ...]:
    """By stage, bytes of tensors with which its upper end honours the budget, or a share of them."""
    pricer = _pricer_of(problem)
    limits_bytes, margin = pricer.limits_bytes(problem.goal.device_budget_bytes), MEMORY_MARGIN[pricer.device_kind]
    return tuple(math.floor(share * each / (1 + margin)) for share, each in zip(shares, limits_bytes, strict=True))


def _pricer_of(problem: SearchProblem) -> StagePrices:
    assert problem.stages is not None
    return problem.stages


def _kept(problem: SearchProblem) -> PerBlock:
    return keep_everything(problem.num_blocks)

