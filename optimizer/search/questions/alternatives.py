"""Nothing fits here: what would fit elsewhere, or if less were asked for. Every way out has been priced.

Of each kind the nearest: the longest sequence that is shorter, the largest batch that is smaller, choices that change the
numbers, adapters instead of every weight, the cheapest card of the table. A way out names a plan that fits, which need not be
the fastest: a search there finds that.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from optimizer.base.errors import InvalidInput, NoFeasiblePlan
from optimizer.base.serialize import WithJson
from optimizer.base.units import format_bytes
from optimizer.goal import Goal
from optimizer.hardware.devices import known_devices, table_machine
from optimizer.hardware.machine import Machine
from optimizer.hardware.rental import PriceList
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.search.answer.smallest import price_floor
from optimizer.search.problem import PricedPlan, SearchProblem, divisors
from optimizer.search.solver.pricebook import PriceBook
from optimizer.workload import Adapter, TrainingWorkload

Pose = Callable[[Profile, TrainingWorkload, Goal, Machine], SearchProblem]
Obtain = Callable[[TrainingWorkload, Goal], Profile | None]
"""The model's profile, as far as this work and this goal need it; None where it is not to be had now."""
Kind = Literal["shorter_sequence", "smaller_batch", "lossy", "adapters", "another_card"]
NUM_HALVINGS = 3
"""Share of the gap between a sequence that fits and one that does not."""
SEQUENCE_STEP = 128
ADAPTER = Adapter(rank=16)
"""Alternatives looked at where every weight is trained."""
MAX_CARDS = 12
"""Priced, from the cheapest: the next larger memory each time."""


@dataclass(frozen=True, kw_only=True)
class WayOut(WithJson):
    """One change of the request, and a plan that then fits."""

    kind: Kind
    sentence: str
    change: dict[str, Any]
    """The change to ask for, in the words of a job spec: ``{"workload": {"sequence_length": 512}}``, ``{"gpu": "L4"}``."""
    plan: Plan
    device_peak_bytes: int
    """Upper end of that plan's peak."""
    step_ms: float


def add_ways_out(
    error: NoFeasiblePlan,
    pose: Pose,
    *,
    obtain: Obtain,
    workload: TrainingWorkload,
    goal: Goal,
    machine: Machine,
    prices: PriceList,
) -> NoFeasiblePlan:
    """The same error with ``fields["ways_out"]`` and ``fields["largest_part"]``, and its hint naming them.

    prices: to say which card is cheapest.
    """
    asker = _Asker(pose=pose, obtain=obtain, workload=workload, goal=goal, machine=machine)
    ways = [
        *_shorter(asker),
        *_smaller_batch(asker),
        *_lossy(asker),
        *_adapters(asker),
        *_another_card(asker, prices),
    ]
    error.fields["largest_part"] = largest_part(error.fields["bytes_by_category"])
    error.fields["ways_out"] = [way.to_json() for way in ways]
    if ways:
        error.hint = f"{error.hint.rstrip('.')}. What would fit: {'; '.join(way.sentence for way in ways)}."
    return error


@dataclass(frozen=True, kw_only=True)
class _Asker:
    """The question, and a way to ask another."""

    pose: Pose
    obtain: Obtain
    workload: TrainingWorkload
    goal: Goal
    machine: Machine

    def ask(self, *, goal: Goal | None = None, machine: Machine | None = None, **work: Any) -> PricedPlan | None:
        """A plan that fits where the workload's fields, the goal or the machine are others."""
        workload, goal = replace(self.workload, **work), goal or self.goal
        profile = self.obtain(workload, goal)
        return None if profile is None else _fitting(self.pose(profile, workload, goal, machine or self.machine))


def largest_part(bytes_by_category: dict[str, int]) -> str:
    """The category that holds most at the smallest peak."""
    return max(bytes_by_category, key=lambda name: bytes_by_category[name])


def _shorter(asker: _Asker) -> Iterator[WayOut]:
    whole = asker.obtain(asker.workload, asker.goal)
    step = max(SEQUENCE_STEP, 1 if whole is None else whole.sequence_multiple)
    over, found = asker.workload.sequence_length, None
    length = over // 2 // step * step
    while length >= step and found is None:
        found = asker.ask(sequence_length=length)
        if found is None:
            over, length = length, length // 2 // step * step
    if found is None:
        return
    for _ in range(NUM_HALVINGS):
        middle = (length + over) // 2 // step * step
        if middle in (length, over):
            break
        nearer = asker.ask(sequence_length=middle)
        found, length, over = (found, length, middle) if nearer is None else (nearer, middle, over)
    yield _way(
        "shorter_sequence", f"sequences of {length:,} tokens", found, {"workload": {"sequence_length": length}}
    )


def _smaller_batch(asker: _Asker) -> Iterator[WayOut]:
    for size in reversed(divisors(asker.workload.global_batch_size)[:-1]):
        found = asker.ask(global_batch_size=size)
        if found is not None:
            yield _way("smaller_batch", f"a batch of {size}", found, {"workload": {"global_batch_size": size}})
            return


def _lossy(asker: _Asker) -> Iterator[WayOut]:
    if asker.goal.allow_lossy and asker.goal.most_loss == "any":
        return
    change: dict[str, Any] = {"most_loss": "any"} if asker.goal.allow_lossy else {"allow_lossy": True}
    found = asker.ask(goal=replace(asker.goal, **change))
    if found is not None and not found.plan.is_lossless:
        words = ", ".join(_lossy_words(found.plan))
        yield _way("lossy", f"choices that change the numbers ({words})", found, {"goal": change})


def _lossy_words(plan: Plan) -> Iterator[str]:
    weights = plan.weights
    if weights.autocast != "off":
        yield f"autocast to {weights.autocast}"
    if weights.dtype != "fp32":
        yield f"{weights.dtype} weights"
    if weights.frozen != "same":
        yield f"frozen weights in {weights.frozen}"
    if plan.optimizer_state.bits != 32:
        yield f"state in {plan.optimizer_state.bits} bits"
    if plan.activations.compress != "none":
        yield f"copies in {plan.activations.compress}"


def _adapters(asker: _Asker) -> Iterator[WayOut]:
    if asker.workload.adapter is not None:
        return
    try:
        found = asker.ask(adapter=ADAPTER)
    except InvalidInput:
        return  # A model that adapters cannot be put beside has one way out less.
    if found is not None:
        what = f"adapters of rank {ADAPTER.rank} beside frozen weights (LoRA)"
        yield _way("adapters", what, found, {"workload": {"adapter": {"rank": ADAPTER.rank}}})


def _another_card(asker: _Asker, prices: PriceList) -> Iterator[WayOut]:
    """Cards with more memory than the budget, by the price of an hour, and after them those without a price by memory."""
    tried_bytes = 0
    for name, price in _cards(prices, more_than_bytes=asker.goal.device_budget_bytes)[:MAX_CARDS]:
        card = table_machine(name, host_memory_bytes=asker.machine.host_memory_bytes)
        if card.device.memory_bytes <= tried_bytes:
            continue
        tried_bytes = card.device.memory_bytes
        found = asker.ask(goal=replace(asker.goal, device_budget_bytes=card.device.memory_bytes), machine=card)
        if found is not None:
            yield _way("another_card", f"{name}{price}", found, {"gpu": name})
            return


def _cards(prices: PriceList, *, more_than_bytes: int) -> list[tuple[str, str]]:
    rented, unpriced = [], []
    for spec in known_devices().values():
        if spec.usable_bytes <= more_than_bytes:
            continue
        rental = prices.rental(spec.name)
        if rental is None:
            unpriced.append((spec.usable_bytes, spec.name))
        else:
            words = f" ({rental.currency} {rental.price_per_hour:g}/h, {rental.provider}, price of {rental.date})"
            rented.append((rental.price_per_hour, spec.name, words))
    return [*((name, words) for _, name, words in sorted(rented)), *((name, "") for _, name in sorted(unpriced))]


def _fitting(problem: SearchProblem) -> PricedPlan | None:
    """The fastest of the smallest plans that fits with all that a process takes, or else the smallest."""
    book = price_floor(PriceBook(problem))
    feasible = book.feasible()
    if not feasible:
        return None
    smallest = min(feasible, key=lambda pair: pair[1].device_peak_high_bytes)
    for plan, prediction in (feasible[0], smallest):
        priced = problem.priced("way out", plan, prediction)
        if priced.verdict in ("fits", "unknown"):
            return priced
    return None


def _way(kind: Kind, what: str, found: PricedPlan, change: dict[str, Any]) -> WayOut:
    high_bytes = found.prediction.device_peak_high_bytes
    return WayOut(
        kind=kind,
        sentence=f"{what}, at most {format_bytes(high_bytes)}",
        change=change,
        plan=found.plan,
        device_peak_bytes=high_bytes,
        step_ms=found.prediction.step_ms,
    )
