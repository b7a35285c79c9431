"""Devices that could do the work, as options: the bound on their plans, the search for the best, and what it found.

What was found on some devices holds of others that are alike, under their names: like machines are searched once.
"""

import math
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from optimizer.hardware.machine import DeviceKind
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.search.problem import PricedPlan
from optimizer.search.questions.uneven.bounds import LeastTime


class Found(NamedTuple):
    """The best plan of some devices, or why there is none."""

    best: PricedPlan | None
    why: str = ""
    layout: DeviceLayout | None = None
    """The cut that was found, with the devices in their order; None of a model that is not cut."""

    def on(self, names: Mapping[str, str]) -> "Found":
        """The same on other devices that are alike. names: of those, by these."""
        layout = None if self.layout is None else _renamed(self.layout, names)
        if self.best is None:
            return self._replace(layout=layout)
        plan, prediction = self.best.plan, self.best.prediction
        ranks = tuple(replace(rank, device=names[rank.device]) for rank in prediction.ranks)
        best = replace(
            self.best, plan=replace(plan, layout=_renamed(plan.layout, names)), prediction=prediction.changed(ranks=ranks)
        )
        return self._replace(best=best, layout=layout)


def _renamed(layout: DeviceLayout, names: Mapping[str, str]) -> DeviceLayout:
    return replace(layout, ranks=tuple(replace(share, device=names[share.device]) for share in layout.ranks))


Known = tuple[Sequence[DeviceKind], Found]
"""Devices, and what was found on them."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """Devices that could do the work, and their best plan."""

    label: str
    words: str
    num_devices: int
    layout: DeviceLayout
    least: LeastTime
    """No plan of them takes less."""
    search: Callable[[float], Found]
    """Finds the best plan, given the milliseconds under which one is of use."""
    team: Sequence[DeviceKind]
    likeness: Hashable
    """The same where devices of the same kinds, elsewhere, are asked for the same: what one finds holds of the other."""
    names_of: Callable[[Found], Mapping[str, Any]] = lambda _: {}
    """Label, words and layout once something is found."""
    best: PricedPlan | None = None
    """None where nothing fits."""
    why: str = ""
    """Why nothing was found."""

    @property
    def step_ms(self) -> float:
        return math.inf if self.best is None else self.best.prediction.step_ms

    def searched(self, most_ms: float, known: MutableMapping[Hashable, Known]) -> "Option":
        """The option with its best plan. known: by likeness, what was found and on what devices."""
        if self.likeness not in known:
            known[self.likeness] = self.team, self.search(most_ms)
        team, found = known[self.likeness]
        found = found.on({one.device.name: other.device.name for one, other in zip(team, self.team, strict=True)})
        return replace(self, best=found.best, why=found.why, **self.names_of(found))
