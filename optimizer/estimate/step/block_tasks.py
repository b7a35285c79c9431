"""Tasks of a step's blocks, by what each block does: plans of one shape that treat gradients and copies alike share them.

Blocks that are alike differ in what waits for them alone, so all else of a task is worked out once for each kind of block.
Torch-free.
"""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Final

from optimizer.base.categories import CATEGORIES, Lane, Tier
from optimizer.estimate.categories.activations import trip_of
from optimizer.estimate.memo import Table
from optimizer.estimate.shape.compiled import PartRequest
from optimizer.estimate.shape.completed import OthersGradients
from optimizer.estimate.shape.shared import Release
from optimizer.estimate.step.part_prices import PartPrices, with_gradients
from optimizer.estimate.step.update import update_key
from optimizer.estimate.tasks.change import Arrival, PartName
from optimizer.estimate.tasks.parts import PartTime
from optimizer.estimate.tasks.tasks import Task, add_legs
from optimizer.estimate.tasks.transfers import Legs, Transfer
from optimizer.plan.activations import OFFLOADING, REBUILDING, BlockChoice, Compression

FORWARD: Final = "forward"
FIRST: Final = "backward_first"
_GRADIENTS = CATEGORIES.index("gradients")
_STORES: dict[Tier, Lane | None] = {"host": None, "disk": "disk", "remote": "network"}
"""The lane between the host and a place."""
_OFFLOADING: Final = frozenset(OFFLOADING)
_BLOCK_TASKS: Final[Table[tuple[PartPrices, Compression, OthersGradients | None], "BlockTasks"]] = Table()


class BlockTasks:
    """Tasks of one shape's blocks, made when first asked for."""

    def __init__(self, prices: PartPrices, *, compress: Compression, others: OthersGradients | None = None) -> None:
        """others: gradients that go in backward because other ranks own their tensors; None where all stay, or go alike."""
        self._prices, self._compress, self._others = prices, compress, others
        self._templates = prices.compiled.regime.block_templates
        self._by_block: dict[tuple[str, bool], list[dict[Hashable, Task]]] = {}
        self._alike: dict[Hashable, Task] = {}
        self._legs: dict[Hashable, Legs] = {}

    @classmethod
    def find(
        cls, prices: PartPrices, *, compress: Compression, others: OthersGradients | None = None
    ) -> "BlockTasks":
        return _BLOCK_TASKS.obtain(
            prices.compiled, (prices, compress, others), lambda: cls(prices, compress=compress, others=others)
        )

    def list_forward(self, choices: Sequence[BlockChoice], released: dict[int, tuple[Release, ...]]) -> list[Task]:
        """List the tasks of forward. released: by block, storages shared by blocks that go in it."""
        tasks: list[Task] = []
        known = self._known(FORWARD, is_first=True)
        for block, choice in enumerate(choices):
            key: Hashable = (choice, released[block]) if block in released else choice
            task = known[block].get(key)
            if task is None:
                task = known[block][key] = self._make(FORWARD, block, choice, releases=released.get(block, ()), is_first=True)
            tasks.append(task)
        return tasks

    def list_backward(
        self, choices: Sequence[BlockChoice], released: dict[int, tuple[Release, ...]], which: str, *, is_first: bool
    ) -> list[Task]:
        """List the tasks of backward in the order of the blocks, though the last comes first. Each offloaded block
        begins what the one before it saved.
        """
        tasks: list[Task] = []
        known = self._known(which, is_first=is_first)
        ahead, ahead_choice = -1, choices[0]
        for block, choice in enumerate(choices):
            key: Hashable = choice
            begun = -1
            if choice in _OFFLOADING:
                begun, begun_choice = ahead, ahead_choice
                key = choice, begun, begun_choice
                ahead, ahead_choice = block, choice
            if block in released:
                key = key, released[block]
            task = known[block].get(key)
            if task is None:
                task = known[block][key] = self._make(
                    which,
                    block,
                    choice,
                    releases=released.get(block, ()),
                    ahead=(begun, begun_choice) if begun >= 0 else None,
                    is_first=is_first,
                )
            tasks.append(task)
        return tasks

    def _known(self, which: str, *, is_first: bool) -> list[dict[Hashable, Task]]:
        known = self._by_block.get((which, is_first))
        if known is None:
            known = self._by_block[which, is_first] = [{} for _ in self._templates]
        return known

    def _make(
        self,
        which: str,
        block: int,
        choice: BlockChoice,
        *,
        releases: tuple[Release, ...],
        is_first: bool,
        ahead: tuple[int, BlockChoice] | None = None,
    ) -> Task:
        """Make the task of a block. ahead: the offloaded block before this one, which comes back next."""
        template = self._templates[block]
        own = self._others.own(block) if self._others is not None and which != FORWARD else ()
        key = (which, template, choice, releases, is_first, own)
        alike = self._alike.get(key)
        if alike is None:
            alike = self._alike[key] = self._make_alike(
                which, template, choice, releases=releases, is_first=is_first, block=block
            )
        if which == FORWARD:
            return alike.in_block(block, waits_for=(update_key(block),))
        return alike.in_block(
            block,
            arrives=(self._fetch_transfer(block, choice, which),) if choice in _OFFLOADING else (),
            begins=(self._fetch_transfer(*ahead, which),) if ahead is not None else (),
        )

    def _make_alike(
        self, which: str, template: int, choice: BlockChoice, *, releases: tuple[Release, ...], is_first: bool, block: int
    ) -> Task:
        """Make a task without what differs from block to block. block: any of those for which it is made."""
        prices, compiled = self._prices, self._prices.compiled
        trip = trip_of(choice, self._compress)
        part: PartName = (choice, template, which)
        time = prices.time(part, trip=trip)
        is_backward = which != FORWARD
        leaves: list[Legs] = []
        if trip is not None and not is_backward:
            leaves.append(_legs(time, "copy_out", _STORES[trip.place]))
        gradient_bytes = num_shared = 0
        own, gone = self._find_others(block, part) if is_backward else ((), ())
        if is_backward and prices.leaves_gradients and gone:
            gradient_bytes, is_first = -sum(num_bytes for _, _, num_bytes in gone), True
            num_shared = compiled.num_shared_gradients((choice, template, FIRST))
        elif is_backward and prices.leaves_gradients:
            gradient_bytes = int(compiled.part_bytes(PartRequest(part, releases, trip, own=own)).net[_GRADIENTS])
            num_shared = compiled.num_shared_gradients(part, own=own)
        gradients = prices.gradients_legs(gradient_bytes, num_shared=num_shared, is_first=is_first)
        leaves.append(gradients)
        request = PartRequest(part, releases, trip, prices.dropped, gone, own)
        return Task(
            phase="backward" if is_backward else "forward",
            block=-1,
            name="",
            bytes=compiled.part_bytes(request),
            time=add_legs(time, gradients),
            copied=with_gradients(compiled.part_copies(part, trip=trip), gradient_bytes),
            leaves=tuple(legs for legs in leaves if legs),
            moves=partial(compiled.part_moves, request),
            allocated_rise=partial(compiled.part_rise, request),
            num_random_states=(-1 if is_backward else 1) if choice in REBUILDING else 0,
        )

    def _find_others(self, block: int, part: PartName) -> tuple[tuple[bool, ...], tuple[Arrival, ...]]:
        """For the gradients that are new in a part whether they are the rank's own, and what goes of those that were there."""
        if self._others is None or isinstance(part, str):
            return (), ()
        choice, template, which = part
        if which == FIRST:
            return self._others.own(block), ()
        return (), self._others.gone(block, first=(choice, template, FIRST), accumulate=part)

    def _fetch_transfer(self, block: int, choice: BlockChoice, which: str) -> Transfer:
        """The transfer of what an offloaded block saved, on its way back."""
        part: PartName = (choice, self._templates[block], which)
        legs = self._legs.get(part)
        if legs is None:
            trip = trip_of(choice, self._compress)
            assert trip is not None
            legs = self._legs[part] = _legs(self._prices.time(part, trip=trip), _STORES[trip.place], "copy_in")
        return Transfer(key=("saved", block), legs=legs)


def _legs(time: PartTime, *lanes: Lane | None) -> Legs:
    """A part's copies, in the order of the lanes."""
    return tuple((lane, getattr(time, f"{lane}_ms")) for lane in lanes if lane is not None)
