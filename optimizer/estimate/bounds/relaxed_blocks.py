"""Bytes and time of a block of each kind by what it does, for bounds (``relaxation.py``). Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimizer.base.categories import CATEGORIES, LANES
from optimizer.estimate.bounds.lower_bounds import Form
from optimizer.estimate.categories.activations import TRACED_TRIP, trip_of
from optimizer.estimate.shape.compiled import PartRequest
from optimizer.estimate.step.part_prices import PartPrices
from optimizer.estimate.tasks.change import PartName
from optimizer.profile.extent import traced_choice

Numbers = NDArray[np.float64]
_GRADIENTS = CATEGORIES.index("gradients")


@dataclass(frozen=True, kw_only=True)
class RelaxedBlocks:
    """Bytes of blocks as [template, form], and milliseconds as [template, form, lane]."""

    held: Numbers
    forward_rise: Numbers
    first_rise: Numbers
    later_rise: Numbers
    left: Numbers
    """Bytes that are left after backward."""
    gradients: Numbers
    """The part of ``left`` that is gradients."""
    on_host: Numbers
    """Bytes that are on the host from forward to backward."""
    forward_ms: Numbers
    first_ms: Numbers
    later_ms: Numbers


def list_relaxed_blocks(prices: PartPrices, forms: Sequence[Form]) -> RelaxedBlocks:
    templates = range(max(prices.compiled.regime.block_templates) + 1)
    table = [[_list_block(prices, template, form) for form in forms] for template in templates]
    names = table[0][0]
    columns = {name: [[found[name] for found in row] for row in table] for name in names}
    return RelaxedBlocks(**{name: np.array(column, dtype=np.float64) for name, column in columns.items()})


def _list_block(prices: PartPrices, template: int, form: Form) -> dict[str, float | list[float]]:
    compiled = prices.compiled
    choice, compress = form
    trip = trip_of(choice, compress)
    later = "backward_accumulate" if prices.dropped is None else "backward_first"

    # Where copies go and how they are packed changes nothing on the device but for the packer's buffers.
    traced = None if trip is None else TRACED_TRIP

    def traced_part(which: str) -> PartName:
        return traced_choice(choice), template, which

    def lanes(which: str, *, is_first: bool = True) -> list[float]:
        lanes_ms = list(prices.time((choice, template, which), trip=trip).by_lane)
        if prices.leaves_gradients and which != "forward":
            part = traced_part(which)
            num_bytes = int(compiled.part_bytes(PartRequest(part, trip=traced)).net[_GRADIENTS])
            num_shared = compiled.num_shared_gradients(part)
            for lane, lane_ms in prices.gradients_legs(num_bytes, num_shared=num_shared, is_first=is_first):
                lanes_ms[LANES.index(lane)] += lane_ms
        return lanes_ms

    forward, first, again = (
        compiled.part_bytes(PartRequest(traced_part(which), trip=traced, dropped=prices.dropped))
        for which in ("forward", "backward_first", later)
    )
    return {
        "held": forward.net_bytes,
        "forward_rise": forward.rise,
        "first_rise": first.rise,
        "later_rise": again.rise,
        "left": forward.net_bytes + first.net_bytes,
        "gradients": int(first.net[_GRADIENTS]),
        "on_host": 0 if trip is None else max(0, compiled.part_bytes(PartRequest(traced_part("forward"), trip=trip)).host_net),
        "forward_ms": lanes("forward"),
        "first_ms": lanes("backward_first"),
        "later_ms": lanes(later, is_first=False),
    }
