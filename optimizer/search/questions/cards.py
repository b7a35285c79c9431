"""Cards ranked for one job: each with its best plan, tokens per second, and what a million tokens cost on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from optimizer.base.errors import InvalidInput, NoFeasiblePlan
from optimizer.base.serialize import WithJson
from optimizer.base.units import format_bytes
from optimizer.goal import Budgets, Goal
from optimizer.hardware.devices import Beside, known_devices, table_machine
from optimizer.hardware.machine import Machine
from optimizer.hardware.rental import Cost, PriceList, price_run
from optimizer.search.answer.frontier import plan_label
from optimizer.search.core import find_chosen
from optimizer.search.generation.problem import PricedGenerationPlan
from optimizer.search.problem import PricedPlan, SearchProblem
from optimizer.workload import TrainingWorkload

Order = Literal["speed", "money"]
Found = tuple[PricedPlan | PricedGenerationPlan, str]
"""A card's best plan, and what it does in a few words."""
Progress = Callable[[int, int, str], None]
"""Called with how many are done, of how many, and what is next."""
ALL = "all"
MAX_CARDS_AT_ONCE = 100


@dataclass(frozen=True, kw_only=True)
class CardAnswer(WithJson):
    """One card."""

    card: str
    memory_bytes: int
    """Usable by one job."""
    chosen: PricedPlan | PricedGenerationPlan | None
    """None where nothing fits."""
    what: str
    """The plan in a few words; where nothing fits, the smallest peak."""
    tokens_per_s: float | None
    costs: tuple[Cost, ...]
    """Costs of the whole run: to rent, and in energy; empty where no price is known."""

    @property
    def rented_per_million_tokens(self) -> float | None:
        """In the currency of its price; None where no price is known."""
        return next((cost.per_million_tokens for cost in self.costs if cost.kind == "rented"), None)


def beside_in(goal: Budgets) -> Beside:
    """The host and the disk beside a card of the table, where a goal has budgets for them: then that is what is there."""
    found: Beside = {}
    if goal.host_budget_bytes is not None:
        found["host_memory_bytes"] = goal.host_budget_bytes
    if goal.disk_budget_bytes is not None:
        found["disk_bytes"] = goal.disk_budget_bytes
    return found


def read_cards(names: Sequence[str], *, beside: Beside | None = None) -> list[Machine]:
    """``all`` for the whole table, each with the same machine around it.

    Raises InvalidInput for a name that is not in it, and for too many.
    """
    wanted = list(known_devices()) if list(names) == [ALL] else list(names)
    if not 1 <= len(wanted) <= MAX_CARDS_AT_ONCE:
        raise InvalidInput(
            f"{len(wanted)} cards are named; allowed: 1 to {MAX_CARDS_AT_ONCE}, or {ALL!r}",
            field="gpus",
            value=len(wanted),
            allowed={"minimum": 1, "maximum": MAX_CARDS_AT_ONCE},
        )
    cards = [table_machine(name, **(beside or {})) for name in wanted]
    return list({card.name: card for card in cards}.values())


def rank_cards(
    pose: Callable[[Goal, Machine], SearchProblem],
    cards: Sequence[Machine],
    *,
    goal: Goal,
    workload: TrainingWorkload,
    prices: PriceList,
    order: Order = "speed",
    progress: Progress | None = None,
) -> tuple[CardAnswer, ...]:
    """Best first, those on which nothing fits last. The goal's budget holds on every card, as far as the card has so much.

    order: by tokens per second, or by the rent of a million tokens, cards without a price after those with one. progress: called
    with each card before it is looked at.
    """

    def find(budget_bytes: int, card: Machine) -> Found:
        chosen = find_chosen(pose(replace(goal, device_budget_bytes=budget_bytes), card))
        return chosen, plan_label(chosen.plan)

    num_tokens = workload.num_steps * workload.tokens_per_step
    most_bytes = goal.device_budget_bytes
    return rank(find, cards, most_bytes=most_bytes, num_tokens=num_tokens, prices=prices, order=order, progress=progress)


def rank(
    find: Callable[[int, Machine], Found],
    cards: Sequence[Machine],
    *,
    most_bytes: int,
    num_tokens: int,
    prices: PriceList,
    order: Order,
    progress: Progress | None,
) -> tuple[CardAnswer, ...]:
    """Rank cards for either kind of work. find: the best plan for a budget on a card and a few words on it; or NoFeasiblePlan."""
    answers = []
    for index, card in enumerate(cards):
        if progress is not None:
            progress(index, len(cards), card.device.name)
        answers.append(_answer(find, card, most_bytes=most_bytes, num_tokens=num_tokens, prices=prices))
    return in_order(answers, order)


def in_order(answers: Sequence[CardAnswer], order: Order) -> tuple[CardAnswer, ...]:
    """Best first, those on which nothing fits last."""
    return tuple(sorted(answers, key=_key_of[order]))


def _answer(
    find: Callable[[int, Machine], Found], card: Machine, *, most_bytes: int, num_tokens: int, prices: PriceList
) -> CardAnswer:
    name, memory_bytes = card.device.name, card.device.memory_bytes
    try:
        chosen, what = find(min(most_bytes, memory_bytes), card)
    except NoFeasiblePlan as error:
        smallest_bytes = int(error.fields["smallest_feasible_bytes"])
        what = f"needs {format_bytes(smallest_bytes)} at least"
        return CardAnswer(card=name, memory_bytes=memory_bytes, chosen=None, what=what, tokens_per_s=None, costs=())
    return CardAnswer(
        card=name,
        memory_bytes=memory_bytes,
        chosen=chosen,
        what=what,
        tokens_per_s=chosen.prediction.tokens_per_s,
        costs=price_run(
            prices,
            device=name,
            total_s=chosen.prediction.total_s,
            interval_s=chosen.prediction.total_interval_s,
            num_tokens=num_tokens,
        ),
    )


def _by_speed(answer: CardAnswer) -> tuple[bool, float, str]:
    return answer.chosen is None, -(answer.tokens_per_s or 0.0), answer.card


def _by_money(answer: CardAnswer) -> tuple[bool, bool, str, float, float]:
    """Prices of different currencies are not compared: one currency after the other."""
    money = answer.rented_per_million_tokens
    currency = next((cost.currency for cost in answer.costs if cost.kind == "rented"), "")
    return answer.chosen is None, money is None, currency, money or 0.0, -(answer.tokens_per_s or 0.0)


_key_of: dict[Order, Callable[[CardAnswer], tuple[Any, ...]]] = {"speed": _by_speed, "money": _by_money}
