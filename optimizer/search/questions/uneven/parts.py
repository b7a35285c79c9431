"""Plans of ranks on devices of several kinds: what all of them do alike, and each kind's best for any number of sequences.

Memory is first that of tensors; where a process then has no room on its card, segments are let grow, and after that the kind's
budget is lowered by what was too much.
"""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Final

from optimizer.base.errors import InvalidPlan, NoFeasiblePlan
from optimizer.base.serialize import from_json, to_json
from optimizer.estimate.prediction import Prediction, RankPrediction
from optimizer.hardware.machine import DeviceKind
from optimizer.plan.allocator import AllocatorPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.devices.layout import DeviceLayout, RankShare
from optimizer.plan.pins.training import Pins
from optimizer.plan.plan import Plan
from optimizer.search.check.card_fit import ACCEPTED, Outpaced
from optimizer.search.problem import OUTER_FIELDS, PricedPlan, SearchProblem
from optimizer.search.questions.uneven.question import UnevenQuestion, speed_of
from optimizer.search.questions.uneven.shares import first_ms, share_out
from optimizer.search.solver.floors import is_over_floor
from optimizer.search.solver.pricebook import PriceBook, remembering

_TRIES: Final = 4
"""Times that shares are dealt out again where a process has no room on its card."""
_NUM_LIKELY: Final = 3
"""Plans of a kind of device near which another is looked for."""
_POLISHED: Final = 0.05
"""Share by which a plan that was found in half of the time may still become faster."""


def common_decisions(question: UnevenQuestion, team: Sequence[DeviceKind], layout: DeviceLayout) -> list[Pins]:
    """Decisions that all ranks have in common, as each kind would have them for its share of the work, slower kinds first. Equal
    shares and those by speed ask for the same.
    """
    key = (question.likeness_of(team), layout)
    if key not in question.decisions:
        question.decisions[key] = _common_decisions(question, team, layout)
    return question.decisions[key]


def _common_decisions(question: UnevenQuestion, team: Sequence[DeviceKind], layout: DeviceLayout) -> list[Pins]:
    whole = sum(kind.num_devices * speed_of(kind) for kind in team)
    found: list[Pins] = []
    for kind in {question.likeness(kind, team): kind for kind in team[::-1]}.values():
        sequences = max(1, round(question.workload.global_batch_size * speed_of(kind) / whole))
        problem = question.pose(kind, layout, num_sequences=sequences, team=team)
        best = _best_plan(question, kind, problem, polishes=False)
        pins = None if best is None else _pins_of(question.goal.pins, best[0])
        if pins is not None and pins not in found:
            found.append(pins)
    return found


def _pins_of(pins: Pins, plan: Plan) -> Pins:
    """Pin what a plan decides outside its blocks and its batch, beside what is pinned already. Where gradients are summed after
    each micro-batch, all ranks have as many.
    """
    document: dict[str, dict[str, Any]] = to_json(pins)
    for path in OUTER_FIELDS:
        category, _, knob = path.partition(".")
        if category != "batch":
            document[category][knob] = attrgetter(path)(plan)
    if plan.gradients.choice != "keep" or plan.layout.reduces_each_micro_batch:
        document["batch"]["accumulation_steps"] = plan.batch.accumulation_steps
    return from_json(Pins, document, path="goal.pins")


def _best_plan(
    question: UnevenQuestion, kind: DeviceKind, problem: SearchProblem, *, polishes: bool
) -> tuple[Plan, Prediction] | None:
    """The best plan by its tensors' bytes; None where nothing fits. It is looked for first near the latest that were found for
    the same kind. polishes: False for nearly the best, in half of the time.
    """
    book = PriceBook(remembering(problem))
    latest = question.latest.setdefault(question.likeness(kind), deque(maxlen=_NUM_LIKELY))
    with suppress(InvalidPlan, NoFeasiblePlan):
        if not book.problem.settings() or is_over_floor(book.problem):
            return None
        likely = [carried for plan in latest if (carried := carry_over(plan, problem)) is not None]
        if question.find_best(book, likely=likely, polishes=polishes) and book.best is not None:
            latest.appendleft(book.best[0])
            return book.best
    return None


def carry_over(plan: Plan, problem: SearchProblem) -> Plan | None:
    """The plan for another number of sequences and among other ranks; None where it is not permitted there."""
    sequences = problem.workload.global_batch_size
    size = math.gcd(plan.batch.micro_batch_size, sequences)
    batch = BatchPlan(micro_batch_size=size, accumulation_steps=sequences // size)
    carried = replace(plan, layout=problem.layout, batch=batch)
    return carried if problem.permits(carried) else None


def find_shared(
    question: UnevenQuestion,
    team: Sequence[DeviceKind],
    layout: DeviceLayout,
    *,
    is_equal: bool,
    most_ms: float = math.inf,
) -> PricedPlan | None:
    """The plan with shares by speed, or with equal ones, whose processes all have room on their cards; None if none is found.

    Of what ranks can do alike, that is taken whose first shares are quickest. Ranks that take steps alone do so for as many as
    they gain by. Raises Outpaced once it is clear that the plan takes ``most_ms`` or more.
    """
    if is_equal and question.workload.global_batch_size % layout.num_devices:
        return None
    question.budgets.clear()
    several = [
        _Parts(question=question, team=team, layout=layout, pins=pins) for pins in common_decisions(question, team, layout)
    ]
    if len(several) > 1:
        several.sort(key=lambda parts: parts.first_ms(is_equal=is_equal))
    found = (_find_with(parts, is_equal=is_equal, most_ms=most_ms) for parts in several)
    best = next((each for each in found if each is not None), None)
    if best is None or is_equal:
        return best
    return _decided_again(question, team, best, known=[parts.pins for parts in several])


def _decided_again(
    question: UnevenQuestion, team: Sequence[DeviceKind], best: PricedPlan, *, known: Sequence[Pins]
) -> PricedPlan:
    """The plan with what all ranks do alike as a kind would have it for the share that it got, where that is faster: before, its
    share was guessed by speed.
    """
    layout = replace(best.plan.layout, ranks=())
    tried = list(known)
    for kind in {question.likeness(kind, team): kind for kind in team}.values():
        dealt = zip(best.plan.layout.ranks, best.plan.rank_sequences, strict=True)
        share = max(number for rank, number in dealt if rank.device == kind.device.name)
        problem = question.pose(kind, layout, num_sequences=share, team=team)
        wanted = _best_plan(question, kind, problem, polishes=False)
        pins = None if wanted is None else _pins_of(question.goal.pins, wanted[0])
        if pins is None or pins in tried:
            continue
        tried.append(pins)
        parts = _Parts(question=question, team=team, layout=layout, pins=pins)
        with suppress(Outpaced):
            best = _find_with(parts, is_equal=False, most_ms=best.prediction.step_ms) or best
    return best


def _find_with(parts: "_Parts", *, is_equal: bool, most_ms: float) -> PricedPlan | None:
    """The plan of ranks that have these decisions in common. Raises as ``find_shared`` does."""
    question = parts.question
    grows = False
    for _ in range(_TRIES):
        shares = parts.equal_shares if is_equal else parts.share_out()
        if shares is not None and most_ms < (least_ms := parts.slowest_ms(shares)) * (1 - _POLISHED) < math.inf:
            raise Outpaced(None, least=least_ms)
        plan = None if shares is None else parts.plan(shares)
        if plan is None:
            break
        plan, quick = question.settle(plan)
        if quick.step_ms >= most_ms:
            raise Outpaced(None, least=quick.step_ms)
        growing = replace(plan, allocator=AllocatorPlan(expandable_segments=True))
        priced = question.priced("shared", growing if grows else plan)
        over = [rank for rank in priced.prediction.ranks if rank.verdict(question.goal.device_budget_bytes) not in ACCEPTED]
        if not over:
            return priced
        if not grows and question.goal.pins.allocator.expandable_segments is None:
            grows = True
            priced = question.priced("shared", growing)
            over = [rank for rank in priced.prediction.ranks if rank.verdict(question.goal.device_budget_bytes) not in ACCEPTED]
            if not over:
                return priced
        for rank in over:
            known = question.budgets.get(rank.device, question.allowed_bytes(rank.device, rank.memory_bytes))
            question.budgets[rank.device] = max(1, min(known, rank.peak_high_bytes) - _too_many(rank))
    question.budgets.clear()
    return None


def _too_many(rank: RankPrediction) -> int:
    """Bytes by which the process is over its card."""
    if rank.memory is None or not rank.memory.total_bytes:
        return max(1, rank.peak_high_bytes - rank.memory_bytes)
    return max(1, rank.memory.process.high - rank.memory.total_bytes)


@dataclass(kw_only=True)
class _Parts:
    """The best plan of each kind for each number of sequences, once what all do alike is decided."""

    question: UnevenQuestion
    team: Sequence[DeviceKind]
    layout: DeviceLayout
    pins: Pins

    @property
    def counts(self) -> list[int]:
        return [kind.num_devices for kind in self.team]

    @property
    def equal_shares(self) -> list[list[int]]:
        return [[self._total // self.layout.num_devices] * count for count in self.counts]

    def share_out(self) -> list[list[int]] | None:
        """In steps of as many sequences as all ranks have micro-batches, where those are as many on each; to all ranks of a
        replica alike, where they run the same blocks at once.
        """
        unit, number = self._unit, self._num_alike
        if self._total % (unit * number):
            return None
        shares = share_out(
            self._total // (unit * number), counts=self._dealt_counts, time_of=self._units_ms, least_of=self._least_units_ms
        )
        return None if shares is None else [[unit * size for size in sizes for _ in range(number)] for sizes in shares]

    def first_ms(self, *, is_equal: bool) -> float:
        """Milliseconds of a step of the first shares; infinite where none fit."""
        if is_equal:
            return max(self._time_ms(kind, sizes[0]) for kind, sizes in enumerate(self.equal_shares))
        together = self._unit * self._num_alike
        if self._total % together:
            return math.inf
        return first_ms(self._total // together, counts=self._dealt_counts, time_of=self._units_ms)

    def slowest_ms(self, shares: Sequence[Sequence[int]]) -> float:
        """Milliseconds of the slowest rank's step; infinite where a share does not fit its device."""
        return max(self._time_ms(kind, size) for kind, sizes in enumerate(shares) for size in dict.fromkeys(sizes))

    def plan(self, shares: Sequence[Sequence[int]]) -> Plan | None:
        """The plan of all ranks; None where a share does not fit its device."""
        ranks, plans = [], []
        for index, sizes in enumerate(shares):
            for size in sizes:
                found = self._best(index, size, polishes=True)
                if found is None:
                    return None
                plan = found[0]
                plans.append(plan)
                ranks.append(
                    RankShare(
                        device=self.team[index].device.name,
                        micro_batch_size=plan.batch.micro_batch_size,
                        accumulation_steps=plan.batch.accumulation_steps,
                        per_block=plan.activations.per_block,
                    )
                )
        packing = max((plan.activations.compress for plan in plans), key=lambda compress: compress != "none")
        first = replace(plans[0], activations=replace(plans[0].activations, compress=packing))
        return replace(first, layout=replace(self.layout, ranks=tuple(ranks)))

    @cached_property
    def _likenesses(self) -> list[Hashable]:
        return [self.question.likeness(kind, self.team) for kind in self.team]

    @property
    def _total(self) -> int:
        return self.question.workload.global_batch_size

    @property
    def _unit(self) -> int:
        return self.pins.batch.accumulation_steps or 1

    @property
    def _num_alike(self) -> int:
        """Neighbouring ranks that all take as many sequences."""
        return self.layout.num_sharing if self.layout.shares_weights else 1

    @property
    def _dealt_counts(self) -> list[int]:
        return [count // self._num_alike for count in self.counts]

    def _units_ms(self, kind: int, size: int) -> float:
        return self._time_ms(kind, self._unit * size)

    def _least_units_ms(self, kind: int, size: int) -> float:
        return self.question.least_sequence_ms(self.team[kind]) * self._unit * size

    def _time_ms(self, kind: int, size: int) -> float:
        found = self._best(kind, size, polishes=False)
        return math.inf if found is None else found[1].step_ms

    def _best(self, kind: int, size: int, *, polishes: bool) -> tuple[Plan, Prediction] | None:
        known, name = self.question.known, self.team[kind].device.name
        key = (self._likenesses[kind], self.question.budgets.get(name), size, self.layout, self.pins, polishes)
        if key not in known:
            problem = self.question.pose(self.team[kind], self.layout, num_sequences=size, pins=self.pins, team=self.team)
            known[key] = _best_plan(self.question, self.team[kind], problem, polishes=polishes)
        return known[key]
