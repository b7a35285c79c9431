"""Cuts of a model over devices of several kinds: in which order the stages are on them, and the best cut of each order.

The first stage has the embeddings and holds what most micro-batches saved, the last has the head; so every order of few kinds is
tried that keeps those of one machine beside each other, since hidden states then cross between machines once.

*Not searched*: orders in which devices of one kind are not neighbours; fewer devices than a team has.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, permutations
from typing import Final, NamedTuple

from optimizer.base.errors import InvalidPlan, InvalidWorkload, NoFeasiblePlan
from optimizer.base.units import format_bytes
from optimizer.hardware.machine import DeviceKind, host_name
from optimizer.plan.layout import DeviceLayout, RankShare
from optimizer.search.cut_model import even_cut, find_cut_plan, least_cut_ms
from optimizer.search.problem import PricedPlan
from optimizer.search.questions.uneven_parts import UnevenQuestion

_MOST_KINDS: Final = 3
"""Kinds of which every order is tried; of more the fastest first and the fastest last."""


class FoundCut(NamedTuple):
    """The best cut over a team of devices, or why there is none."""

    layout: DeviceLayout
    best: PricedPlan | None
    why: str = ""


def find_cut(
    question: UnevenQuestion, team: Sequence[DeviceKind], asked: DeviceLayout, *, fastest_ms: float = math.inf
) -> FoundCut:
    """The best plan over all devices of these kinds. asked: its number of devices, order of micro-batches, and cut where that is
    pinned. fastest_ms: of a plan that it must beat to be searched.
    """
    found, best_ms = list[FoundCut](), fastest_ms
    for order in list_orders(team):
        each = _find_in_order(question, order, asked, fastest_ms=best_ms)
        found.append(each)
        if each.best is not None:
            best_ms = min(best_ms, each.best.prediction.step_ms)
    fitting = [each for each in found if each.best is not None]
    return min(fitting, key=lambda each: each.best.prediction.step_ms if each.best else math.inf, default=found[0])


def _find_in_order(
    question: UnevenQuestion, order: Sequence[DeviceKind], asked: DeviceLayout, *, fastest_ms: float
) -> FoundCut:
    ranks = tuple(RankShare(device=kind.device.name) for kind in order for _ in range(kind.num_devices))
    cut = question.goal.pins.layout.stage_blocks or even_cut(question.profile.num_blocks, len(ranks))
    layout = DeviceLayout(num_devices=len(ranks), ranks=ranks, stage_blocks=cut, schedule=asked.schedule)
    try:
        problem = question.pose_cut(layout)
        least_ms = least_cut_ms(problem)
        if least_ms >= fastest_ms:
            return FoundCut(layout, None, f"not searched, since no plan of it takes less than {least_ms:.1f} ms")
        plan = find_cut_plan(problem).plan
    except NoFeasiblePlan as error:
        smallest_bytes = int(error.fields["smallest_feasible_bytes"])
        return FoundCut(layout, None, f"nothing fits; the smallest peak is {format_bytes(smallest_bytes)}")
    except (InvalidPlan, InvalidWorkload) as error:
        return FoundCut(layout, None, error.message)
    return FoundCut(plan.layout, question.priced("chosen", plan))


def list_orders(team: Sequence[DeviceKind]) -> Iterator[tuple[DeviceKind, ...]]:
    """The orders of kinds along the stages that are tried."""
    orders = permutations(team) if len(team) <= _MOST_KINDS else iter((tuple(team), tuple(reversed(team))))
    for order in orders:
        hosts = [host for host, _ in groupby(order, key=lambda kind: host_name(kind.device.name))]
        if len(hosts) == len(set(hosts)):
            yield order
