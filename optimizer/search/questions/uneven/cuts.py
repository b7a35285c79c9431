"""Cuts of a model over devices of several kinds: in which order the stages are on them, and the best cut of each order.

The first stage has the embeddings and holds what most micro-batches saved, the last has the head; so every order of few kinds is
tried that keeps those of one machine beside each other, since hidden states then cross between machines once.

*Not searched*: orders in which devices of one kind are not neighbours; fewer devices than a team has.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby, permutations
from typing import Final, NamedTuple

from optimizer.base.errors import InvalidPlan, InvalidWorkload, NoFeasiblePlan
from optimizer.hardware.machine import DeviceKind, host_name
from optimizer.plan.devices.layout import DeviceLayout, RankShare
from optimizer.search.check.card_fit import Outpaced
from optimizer.search.cut_model import find_cut_plan, least_cut_ms
from optimizer.search.cutting import even_cut
from optimizer.search.problem import PricedPlan, SearchProblem
from optimizer.search.questions.uneven.question import UnevenQuestion, not_searched

_MOST_KINDS: Final = 3
"""Kinds of which every order is tried; of more the fastest first and the fastest last."""


class Order(NamedTuple):
    """An order of devices along the stages, asked for as the even cut."""

    layout: DeviceLayout
    problem: SearchProblem | None
    """None where no such cut can be asked for."""
    least_ms: float
    """No cut of it takes less."""
    why: str = ""
    """Why there is no problem."""


class FoundCut(NamedTuple):
    """The best cut over a team of devices, or why there is none."""

    layout: DeviceLayout
    best: PricedPlan | None
    why: str = ""


def pose_orders(question: UnevenQuestion, team: Sequence[DeviceKind], asked: DeviceLayout) -> list[Order]:
    """The orders that are tried, first the one that could be fastest; of orders of like devices one. asked: its number of
    devices, order of micro-batches, and cut where that is pinned.
    """
    orders: dict[Hashable, Sequence[DeviceKind]] = {}
    for order in list_orders(team):
        orders.setdefault(tuple((question.likeness(kind, team), kind.num_devices) for kind in order), order)
    return sorted((_pose(question, order, asked) for order in orders.values()), key=lambda order: order.least_ms)


def _pose(question: UnevenQuestion, order: Sequence[DeviceKind], asked: DeviceLayout) -> Order:
    ranks = tuple(RankShare(device=kind.device.name) for kind in order for _ in range(kind.num_devices))
    cut = question.goal.pins.layout.stage_blocks or even_cut(question.profile.num_blocks, len(ranks) * asked.num_rounds)
    layout = DeviceLayout(num_devices=len(ranks), ranks=ranks, stage_blocks=cut, schedule=asked.schedule)
    try:
        problem = question.pose_cut(layout)
        return Order(layout, problem, least_cut_ms(problem))
    except (InvalidPlan, InvalidWorkload) as error:
        return Order(layout, None, 0.0, error.message)


def find_cut(question: UnevenQuestion, orders: Sequence[Order], *, most_ms: float = math.inf) -> FoundCut:
    """The best plan of these orders. most_ms: what a plan must beat to be of use."""
    found = list[FoundCut]()
    for order in orders:
        each = _find_in_order(question, order, most_ms=most_ms)
        found.append(each)
        if each.best is not None:
            most_ms = min(most_ms, each.best.prediction.step_ms)
    fitting = [each for each in found if each.best is not None]
    return min(fitting, key=lambda each: each.best.prediction.step_ms if each.best else math.inf, default=found[0])


def _find_in_order(question: UnevenQuestion, order: Order, *, most_ms: float) -> FoundCut:
    if order.problem is None:
        return FoundCut(order.layout, None, order.why)
    if order.least_ms >= most_ms:
        return FoundCut(order.layout, None, not_searched(order.least_ms))
    try:
        plan = find_cut_plan(order.problem, most_ms=most_ms).plan
    except NoFeasiblePlan as error:
        return FoundCut(order.layout, None, error.in_short)
    except Outpaced as outpaced:
        why = f"not searched to the end, since others are faster than its first cut, which takes {outpaced.least:.1f} ms"
        return FoundCut(outpaced.best.plan.layout, None, why)
    except (InvalidPlan, InvalidWorkload) as error:
        return FoundCut(order.layout, None, error.message)
    return FoundCut(plan.layout, question.priced("chosen", plan))


def list_orders(team: Sequence[DeviceKind]) -> Iterator[tuple[DeviceKind, ...]]:
    """The orders of kinds along the stages that are tried."""
    orders = permutations(team) if len(team) <= _MOST_KINDS else iter((tuple(team), tuple(reversed(team))))
    for order in orders:
        hosts = [host for host, _ in groupby(order, key=lambda kind: host_name(kind.device.name))]
        if len(hosts) == len(set(hosts)):
            yield order
