"""Prices each setup that people write by hand as they would set it up: with the largest micro-batch that fits, or a smaller one
where that is faster, and of those that do not fit the one that takes the least memory.

A plan's tensors are priced; what its processes take beside them, which takes a hundred times as long, is worked out where that
could matter: of plans that could be the answer, and of each setup's fastest way if it takes little longer than that.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from optimizer.base.errors import InvalidPlan, InvalidWorkload
from optimizer.estimate.prediction import Prediction
from optimizer.plan.devices.layout import DeviceLayout, RankShare
from optimizer.plan.plan import Plan
from optimizer.search.check.card_fit import ACCEPTED
from optimizer.search.problem import OuterPlan, PricedPlan, SearchProblem, divisors
from optimizer.search.questions.by_hand.setups import (
    PARTS,
    RECOMPUTES,
    SETUPS,
    Recompute,
    Setup,
    most_chunks,
    recomputing,
)

_SHOWN: Final = 0.1
"""Share by which a setup may be slower than the answer for its processes' memory to be worked out."""
_LIGHTER: Final = 0.99
"""Share of what a plan's tensors take under which another is worth working out where the plan's processes had no room."""
_FEWEST: Final[dict[Recompute, int]] = {"none": 0, "full": PARTS, "some": 0}
"""Eighths of the blocks that are recomputed at least."""


@dataclass(frozen=True, kw_only=True)
class Team:
    """Devices that share the work."""

    num_devices: int
    ranks: tuple[RankShare, ...] = ()
    """Their kinds; empty where all are alike."""
    words: str = ""
    """Names the devices, after a comma; empty for all that there are."""
    replicas: int = 1
    """Replicas of what they share that fit inside a machine each, of the fewest that do."""

    @property
    def is_hybrid(self) -> bool:
        """True if several machines have two devices and more each."""
        return 1 < self.replicas < self.num_devices


@dataclass(frozen=True, kw_only=True)
class SetupQuestion:
    """Setups to price, and the devices that they are on."""

    num_blocks: int
    whole: Team
    """All devices."""
    dealing: Team | None
    """Devices that each can have as many sequences of a step, for setups that deal it out; None where there are none."""
    formats: OuterPlan
    """Whose number formats and kernels every setup has, so that layout and memory alone differ."""
    pose: Callable[[DeviceLayout], SearchProblem]
    """The problem of a layout, with its prices. Raises InvalidPlan, InvalidWorkload."""
    num_sequences: int
    """Sequences of a step."""
    known: Mapping[Plan, PricedPlan] = field(default_factory=dict)
    """Plans whose processes' memory was worked out already."""

    def team_of(self, setup: Setup) -> Team:
        """Raises InvalidPlan where no devices can have as many sequences each, or can share blocks."""
        if setup.sharing == "blocks" and self.whole.ranks:
            raise InvalidPlan(
                "devices that share each block are alike; these are of several kinds",
                field="plan.layout.tensor",
                value=self.whole.num_devices,
                allowed="devices of one kind",
            )
        if not setup.deals_out:
            return self.whole
        if self.dealing is None:
            number = self.whole.num_devices
            raise InvalidPlan(
                f"{self.num_sequences} sequences cannot be dealt out evenly to {number} devices",
                field="workload.global_batch_size",
                value=self.num_sequences,
                allowed=f"a multiple of {number}",
            )
        return self.dealing


@dataclass(frozen=True, kw_only=True)
class PricedSetup:
    """A setup with one way to recompute, and what became of it."""

    setup: Setup
    way: Recompute | None = None
    """None where it cannot be carried out in any way."""
    on: str = ""
    """Names its devices, after a comma; empty for all that there are."""
    priced: PricedPlan | None = None
    """Its fastest plan that fits; of those that do not the one that takes the least memory; None if it cannot be carried out."""
    why: str = ""
    """Why it cannot be carried out; empty where it has a price."""
    problem: SearchProblem | None = None
    """Whose prices it has, where it has any."""

    @property
    def label(self) -> str:
        """Its name, such as ``fsdp_recompute``."""
        return self.setup.label + ("" if self.way is None else RECOMPUTES[self.way][0])

    @property
    def words(self) -> str:
        """The setup, its devices and its way to recompute."""
        return f"{self.setup.words}{self.on}" + ("" if self.way is None else f"; {RECOMPUTES[self.way][1]}")

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step; infinite where it does not fit."""
        fits = self.priced is not None and self.priced.verdict in ACCEPTED
        return self.priced.prediction.step_ms if self.priced is not None and fits else math.inf

    @property
    def may_be_chosen(self) -> bool:
        """True if it fits, with all that its processes take, and the goal allows it."""
        if self.priced is None or self.problem is None or self.step_ms == math.inf:
            return False
        is_whole = self.problem.detail is None or self.priced.prediction.memory is not None
        return is_whole and self.problem.permits(self.priced.plan)


def price_setups(question: SetupQuestion, *, best_ms: float = math.inf) -> list[PricedSetup]:
    """Every setup with each way to recompute; one that cannot be carried out once. best_ms: milliseconds of a step of the best
    plan that is known.
    """
    return [
        found
        for setup in SETUPS
        if not setup.is_hybrid or (question.dealing is not None and question.dealing.is_hybrid)
        for found in price_setup(question, setup, best_ms=best_ms)
    ]


def price_setup(question: SetupQuestion, setup: Setup, *, best_ms: float = math.inf) -> list[PricedSetup]:
    """The ways to recompute of one setup; itself once where it cannot be carried out. best_ms: as above."""
    try:
        team = question.team_of(setup)
        layout = setup.layout(
            num_devices=team.num_devices, num_blocks=question.num_blocks, ranks=team.ranks, replicas=team.replicas
        )
        tries = _Tries(setup=setup, layout=layout, problem=question.pose(layout), question=question)
        ways = {way: tries.list_choices(way) for way in RECOMPUTES}
    except (InvalidPlan, InvalidWorkload) as error:
        return [PricedSetup(setup=setup, why=error.message)]
    ways["some"] = [*ways["some"], *ways["none"], *ways["full"]]
    found = {way: tries.settle(way, choices, most_ms=best_ms) for way, choices in ways.items()}
    while True:
        fastest = min(found, key=lambda way: _time_of(found[way]))
        if not tries.is_open(found[fastest]) or _time_of(found[fastest]) > best_ms * (1 + _SHOWN):
            break
        found[fastest] = tries.settle(fastest, ways[fastest], most_ms=math.inf)
    return [
        PricedSetup(
            setup=setup,
            way=way,
            on=team.words,
            priced=replace(tries.whole.get(priced.plan, priced), label=setup.label + RECOMPUTES[way][0]),
            problem=tries.problem,
        )
        for way, priced in found.items()
    ]


def _time_of(priced: PricedPlan) -> float:
    return priced.prediction.step_ms if priced.verdict in ACCEPTED else math.inf


class _Choice(NamedTuple):
    """Decisions that a setup leaves open."""

    place: int
    """Place of the micro-batch's size among those that can be carried out."""
    eighths: int
    """Eighths of the blocks that are recomputed."""
    is_chunked: bool = True
    """True for a loss in chunks, never all logits at once."""


@dataclass(kw_only=True)
class _Tries:
    """The plans of one setup that are looked at."""

    setup: Setup
    layout: DeviceLayout
    problem: SearchProblem
    question: SetupQuestion
    _known: dict[Plan, Prediction] = field(default_factory=dict)

    @cached_property
    def whole(self) -> dict[Plan, PricedPlan]:
        """Plans with all that their processes take."""
        return dict(self.question.known)

    @cached_property
    def sizes(self) -> list[int]:
        """Sizes of micro-batches that can be carried out, ascending. Raises InvalidPlan where there is none."""
        sizes = divisors(self.problem.workload.global_batch_size)
        conflicts = {size: self.problem.find_conflict(self._plan(size, 0, num_chunks=1)) for size in sizes}
        found = [size for size in sizes if conflicts[size] is None]
        if not found and (conflict := conflicts[sizes[0]]) is not None:
            raise conflict
        return found

    @cached_property
    def may_chunk(self) -> bool:
        """Report whether the loss may be cut into chunks."""
        return self.problem.find_conflict(self._plan(self.sizes[0], 0, num_chunks=2)) is None

    def plan(self, choice: _Choice) -> Plan:
        size = self.sizes[choice.place]
        chunks = most_chunks(size, self.problem.workload.sequence_length) if choice.is_chunked and self.may_chunk else 1
        return self._plan(size, choice.eighths, num_chunks=chunks)

    def _plan(self, size: int, eighths: int, *, num_chunks: int) -> Plan:
        count = self.problem.workload.global_batch_size // size
        setting = self.setup.setting(self.question.formats, self.layout, size=size, count=count, num_chunks=num_chunks)
        return setting.plan(recomputing(self.layout.stage_blocks or (self.problem.num_blocks,), eighths))

    def price(self, choice: _Choice) -> Prediction:
        """Raises InvalidPlan where the model cannot be shared so."""
        plan = self.plan(choice)
        if plan not in self._known:
            self._known[plan] = self.problem.price(plan)
        return self._known[plan]

    def list_choices(self, way: Recompute) -> list[_Choice]:
        """Choices whose tensors fit; none where none do. From the largest micro-batch that fits on to smaller ones, as long as
        these are faster, with the loss in chunks; of the fastest also with all logits at once. Raises InvalidPlan as ``price``
        does.
        """
        found: list[_Choice] = []
        eighths = PARTS if way == "some" else _FEWEST[way]
        for index in range(self._largest(eighths), -1, -1):
            found.append(self._lightest_of(way, _Choice(index, eighths)))
            if len(found) > 1 and self._step_ms(found[-1]) >= self._step_ms(found[-2]):
                break
            eighths = found[-1].eighths
        if found and self.may_chunk:
            fastest = min(found, key=self._step_ms)
            whole = fastest._replace(eighths=PARTS if way == "some" else _FEWEST[way], is_chunked=False)
            if self._fits(whole):
                found.append(self._lightest_of(way, whole))
        return found

    def settle(self, way: Recompute, choices: list[_Choice], *, most_ms: float) -> PricedPlan:
        """The fastest of the choices; of those that take no more than ``most_ms`` the fastest whose processes have room, or of
        choices that take a little less memory. The setup's lightest plan where none has.
        """
        least_bytes = math.inf
        waiting = [(self._step_ms(choice), choice) for choice in dict.fromkeys(choices)]
        heapify(waiting)
        while waiting:
            step_ms, choice = heappop(waiting)
            plan, found = self.plan(choice), self.price(choice)
            if found.device_peak_bytes < least_bytes * _LIGHTER:
                if plan not in self.whole and step_ms > most_ms:
                    return self.problem.priced("", plan, found, in_detail=False)
                if plan not in self.whole:
                    self.whole[plan] = self.problem.priced("", plan, found)
                if self.whole[plan].verdict in ACCEPTED:
                    return self.whole[plan]
                least_bytes = found.device_peak_bytes
            lighter = self._lighter(way, choice)
            if lighter is not None and all(lighter != other for _, other in waiting):
                heappush(waiting, (self._step_ms(lighter), lighter))
        last = _Choice(0, _FEWEST[way] if way != "some" else PARTS)
        plan, found = self.plan(last), self.price(last)
        if plan not in self.whole and least_bytes == math.inf:
            return self.problem.priced("", plan, found, in_detail=False)
        return self.whole.setdefault(plan, self.whole.get(plan) or self.problem.priced("", plan, found))

    def is_open(self, priced: PricedPlan) -> bool:
        """Report whether nobody has looked at a plan's processes, whose tensors fit."""
        return priced.verdict in ACCEPTED and priced.plan not in self.whole

    def _lighter(self, way: Recompute, choice: _Choice) -> _Choice | None:
        """The next choice that takes less memory: an eighth more of the blocks recomputed, or a smaller micro-batch."""
        if way == "some" and choice.eighths < PARTS:
            return choice._replace(eighths=choice.eighths + 1)
        if not choice.place:
            return None
        return self._lightest_of(way, choice._replace(place=choice.place - 1))

    def _lightest_of(self, way: Recompute, choice: _Choice) -> _Choice:
        """The choice, of whose blocks with ``some`` no more are recomputed than have to be. It fits as it is."""
        if way != "some":
            return choice
        low, high = -1, choice.eighths
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(choice._replace(eighths=middle)):
                high = middle
            else:
                low = middle
        return choice._replace(eighths=high)

    def _largest(self, eighths: int) -> int:
        """The place of the largest size that fits; -1 where none does."""
        low, high = -1, len(self.sizes)
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(_Choice(middle, eighths)):
                low = middle
            else:
                high = middle
        return low

    def _fits(self, choice: _Choice) -> bool:
        return self.problem.fits(self.price(choice))

    def _step_ms(self, choice: _Choice) -> float:
        return self.price(choice).step_ms
