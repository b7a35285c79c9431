"""The best cut of a model under one setting: where it is cut, and what each rank's blocks do.

With all that is decided outside the blocks given, a rank's own blocks have one question: how many of them must run again, or
offload, so that the rank's peak honours the budget and, on unequal devices, its device's memory. So ranks are priced one by
one, each on its own device with the fewest such blocks, and run against each other; cuts start even, or on unequal devices by
their speed and by their memory, and move block by block as long as that makes the step shorter, or the fullest rank smaller
where one is too full.

*Not searched*: other cuts than these where a rank has several stages.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final

from optimizer.estimate.step.pipeline.schedule import RankPrice, least_step_ms
from optimizer.plan.activations import BlockChoice
from optimizer.plan.devices.stages import RankStages, deal_stages
from optimizer.plan.plan import Plan
from optimizer.search.arrangements import PerBlock, PlanLine, keep_everything
from optimizer.search.problem import OuterPlan, RankPrices, SearchProblem

Cut = tuple[int, ...]
UNLIMITED: Final = 2**62


@dataclass(frozen=True, kw_only=True)
class CutOfSetting:
    """One cut under one setting, with what each block does."""

    setting: OuterPlan
    cut: Cut
    per_block: PerBlock
    step_ms: float
    over_bytes: int
    """Bytes by which ranks are over the limit, all together; 0 where each fits."""
    hardest: int
    """The rank that takes the most time, or of those that do not fit the fullest."""

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


@dataclass(kw_only=True)
class Cutting:
    """The cuts of one setting. limits_bytes: of each rank's peak."""

    problem: SearchProblem
    setting: OuterPlan
    limits_bytes: Sequence[int]
    _ranks: dict[RankStages, tuple[RankPrice, PerBlock]] = field(default_factory=dict)

    def best(self, start: Cut | None = None) -> CutOfSetting:
        """start: a cut that was good under another setting."""
        pinned = self.problem.goal.pins.layout.stage_blocks
        if pinned is not None:
            return self.evaluate(tuple(pinned))
        starts = dict.fromkeys((*self._begin(), *([] if start is None else [start])))
        return min((self._climb(self.evaluate(cut)) for cut in starts), key=lambda found: found.value)

    def _begin(self) -> Iterator[Cut]:
        layout, num_blocks = self.problem.layout, self.problem.num_blocks
        if not layout.ranks:
            yield even_cut(num_blocks, len(layout.stage_blocks))
            return
        whole_ms = pricer_of(self.problem).whole_ms(self._plan(kept_by(self.problem)))
        yield shared_cut(num_blocks, [1 / each_ms for each_ms in whole_ms] * layout.num_rounds)
        yield shared_cut(num_blocks, [max(1, num_bytes) for num_bytes in self.limits_bytes] * layout.num_rounds)

    def evaluate(self, cut: Cut, *, most_ms: float = math.inf) -> CutOfSetting:
        """The cut with as few blocks that run again, or offload, as may be. A step that takes ``most_ms`` or more, or does not
        fit, is not run: its time is then the least that it takes.
        """
        ranks = deal_stages(cut, self.problem.layout.num_devices)
        priced = [self._rank(own) for own in ranks]
        prices = [price for price, _ in priced]
        over = [self._over_bytes(price, own) for price, own in zip(prices, ranks, strict=True)]
        measure: list[float] = [*over] if any(over) else [price.times.of_one_ms for price in prices]
        per_block = list(kept_by(self.problem))
        for own, (_, choices) in zip(ranks, priced, strict=True):
            _put(per_block, own, choices)
        step_ms = least_step_ms(prices)
        if not any(over) and step_ms < most_ms:
            step_ms = pricer_of(self.problem).step_ms(self._plan(kept_by(self.problem)), ranks, prices)
        return CutOfSetting(
            setting=self.setting,
            cut=cut,
            per_block=tuple(per_block),
            step_ms=step_ms,
            over_bytes=sum(over),
            hardest=measure.index(max(measure)),
        )

    def _climb(self, found: CutOfSetting) -> CutOfSetting:
        while self.problem.layout.num_rounds == 1:
            most_ms = math.inf if found.over_bytes else found.step_ms
            tried = (self.evaluate(cut, most_ms=most_ms) for cut in _moved(found))
            better = next((each for each in tried if each.value < found.value), None)
            if better is None:
                break
            found = better
        return found

    def _rank(self, own: RankStages) -> tuple[RankPrice, PerBlock]:
        """A rank with the fewest blocks that run again, or offload, with which it fits; with all of them where it does not."""
        if own not in self._ranks:
            self._ranks[own] = self._fit(own)
        return self._ranks[own]

    def _fit(self, own: RankStages) -> tuple[RankPrice, PerBlock]:
        pinned = self.problem.pinned_blocks
        if pinned is not None:
            choices = own.pick(pinned)
            return self._price(own, choices), choices
        line = PlanLine(num_blocks=own.num_blocks, steps=(*self.problem.rebuilding, "keep"))
        found = self._fit_line(own, line)
        if "offload" not in self.problem.offloading or (set(found[1]) == {"keep"} and not self._over_bytes(found[0], own)):
            return found
        moving = PlanLine(num_blocks=own.num_blocks, num_offload=None)
        if not self._over_bytes(found[0], own):
            one_moved = self._price(own, moving.per_block(moving.length - 1))
            if one_moved.times.of_one_ms >= found[0].times.of_one_ms:
                return found
        return min(found, self._fit_line(own, moving), key=lambda each: self._value(each[0], own))

    def _fit_line(self, own: RankStages, line: PlanLine) -> tuple[RankPrice, PerBlock]:
        """The rank with the heaviest plan of a line that fits; the lightest where none does."""
        low, high = 0, line.length
        heaviest = self._price(own, line.per_block(high))
        if not self._over_bytes(heaviest, own) or not high:
            return heaviest, line.per_block(high)
        best = self._price(own, line.per_block(0))
        if self._over_bytes(best, own):
            return best, line.per_block(0)
        while high - low > 1:
            middle = (low + high) // 2
            price = self._price(own, line.per_block(middle))
            if self._over_bytes(price, own):
                high = middle
            else:
                low, best = middle, price
        return best, line.per_block(low)

    def _over_bytes(self, price: RankPrice, own: RankStages) -> int:
        """Bytes by which a rank is over its limit on the device, and over its part of the host."""
        over_host = price.host_bytes - self.problem.host_budget_bytes
        return max(0, price.peak_bytes - self.limits_bytes[own.rank]) + max(0, over_host)

    def _value(self, price: RankPrice, own: RankStages) -> tuple[int, float]:
        return self._over_bytes(price, own), price.times.of_one_ms

    def _price(self, own: RankStages, choices: PerBlock) -> RankPrice:
        blocks = list(kept_by(self.problem))
        _put(blocks, own, choices)
        return pricer_of(self.problem).price_rank(self._plan(tuple(blocks)), own)

    def _plan(self, per_block: PerBlock) -> Plan:
        return self.setting.plan(per_block)


def _put(blocks: list[BlockChoice], own: RankStages, choices: PerBlock) -> None:
    for block, choice in zip(own.blocks, choices, strict=True):
        blocks[block] = choice


def _moved(found: CutOfSetting) -> Iterator[Cut]:
    """Cuts with some blocks less on the hardest rank, and more on another: the nearest first. Then the same of the first rank
    where the host updates weights: nothing of a step begins before its own are there, while other stages' are made meanwhile.
    """
    cut = found.cut
    for source in dict.fromkeys((found.hardest, *((0,) if found.setting.state_place != "device" else ()))):
        targets = sorted((stage for stage in range(len(cut)) if stage != source), key=lambda stage: abs(stage - source))
        for number, target in product((1, 2, 4), targets):
            if cut[source] > number:
                moved = list(cut)
                moved[source] -= number
                moved[target] += number
                yield tuple(moved)


def pricer_of(problem: SearchProblem) -> RankPrices:
    assert problem.rank_prices is not None
    return problem.rank_prices


def kept_by(problem: SearchProblem) -> PerBlock:
    return keep_everything(problem.num_blocks)
