"""Tasks of the parts around a step's blocks: the embedding, head and loss, and their backward. Torch-free."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Final

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.memo import Table
from optimizer.estimate.shape.compiled import PartRequest
from optimizer.estimate.shape.completed import OthersGradients
from optimizer.estimate.shape.logits_and_loss import ChunkedHead, Product, estimate_chunked_head
from optimizer.estimate.step.part_prices import PartPrices, with_gradients
from optimizer.estimate.step.update import update_key
from optimizer.estimate.tasks.change import Arrival, Change, Move
from optimizer.estimate.tasks.dropped import Dropped, drop_gradients
from optimizer.estimate.tasks.parts import sum_changes
from optimizer.estimate.tasks.tasks import Task, add_legs, as_moves
from optimizer.hardware.machine import Processor
from optimizer.plan.activations import BlockChoice
from optimizer.plan.plan import Plan
from optimizer.profile.extent import traced_choice
from optimizer.profile.profile import Profile, tail_name

_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
_GRADIENTS, _LOGITS = _SLOT["gradients"], _SLOT["logits_and_loss"]
_PLACES: Final[Mapping[str, tuple[str, str, int | None]]] = {
    "prologue": ("forward", "embedding", -1),
    "head": ("forward", "head and loss", 0),
    "head_backward_first": ("backward", "backward of head and loss", None),
    "head_backward_accumulate": ("backward", "backward of head and loss", None),
    "norm_backward_first": ("backward", "backward", None),
    "norm_backward_accumulate": ("backward", "backward", None),
}
"""Phase, name, and below 0 where it waits for the update of what is before the blocks, 0 of what is behind them."""
_HEADS: Final[Table[tuple[int, str], ChunkedHead | None]] = Table()
"""Chunked heads by the number of chunks, and rates."""
_OUTSIDE_TASKS: Final[Table[tuple[PartPrices, int, OthersGradients | None], "OutsideTasks"]] = Table()


class OutsideTasks:
    """Tasks around the blocks of one shape at one count of chunks, made when first asked for."""

    def __init__(
        self, profile: Profile, prices: PartPrices, *, plan: Plan, others: OthersGradients | None = None
    ) -> None:
        """others: as ``BlockTasks`` has it."""
        self._prices, self._others = prices, others
        compiled, machine = prices.compiled, prices.machine
        self._parts = compiled.regime.parts
        self._num_blocks = len(compiled.regime.block_templates)
        self._head = _HEADS.obtain(
            compiled,
            (plan.logits_and_loss.num_chunks, prices.rates_key),
            lambda: estimate_chunked_head(profile, compiled, plan=plan, machine=machine),
        )
        self._tasks: dict[tuple[str, bool], Task] = {}

    @classmethod
    def find(
        cls, profile: Profile, prices: PartPrices, *, plan: Plan, others: OthersGradients | None = None
    ) -> "OutsideTasks":
        """The tasks outside the blocks. plan: of which only the number of chunks is looked at; its shape and dtypes are
        those of the prices.
        """
        key = (prices, plan.logits_and_loss.num_chunks, others)
        return _OUTSIDE_TASKS.obtain(prices.compiled, key, lambda: cls(profile, prices, plan=plan, others=others))

    @property
    def loss_bytes(self) -> int | None:
        """Bytes of the loss of chunks, which goes after the traced parts; None where the loss is traced with them."""
        return None if self._head is None else self._head.loss_bytes

    def task(self, part: str, last: BlockChoice, *, is_first: bool = True) -> Task:
        """The task of one of PART_NAMES. last: what the last block does."""
        tail = tail_name(part, traced_choice(last))
        key = (tail if tail in self._parts else part, is_first)
        if key not in self._tasks:
            self._tasks[key] = self._make(*_PLACES[part], key[0], which=part, is_first=is_first)
        return self._tasks[key]

    def _make(self, phase: str, name: str, block: int | None, part: str, *, which: str, is_first: bool) -> Task:
        """which: the part as PART_NAMES has it."""
        prices, compiled, head = self._prices, self._prices.compiled, self._head
        own, gone = self._find_others(part, which)
        dropped = prices.dropped
        moves: Callable[[], Sequence[Move]]
        allocated_rise: Callable[[Processor], int] | None
        if head is not None and part in head.bytes:
            part_bytes, time = head.bytes[part], head.time[part]
            changes: list[Change] = [
                ("device", _SLOT[category], num_bytes) for category, num_bytes in head.changes[part]
            ]
            kept_net = part_bytes.net
            num_shared = compiled.count_shared_gradients(changes)
            if own:
                kept_net = sum_changes(list(_drop(changes, None, own))).net
                num_shared = compiled.count_shared_gradients(_list_own(changes, own))
            if dropped is not None or own or gone:
                changes = [*_drop(changes, dropped, own), *(("device", _GRADIENTS, size) for _, _, size in gone)]
                part_bytes = sum_changes(changes)
            moves = partial(as_moves, changes)
            allocated_rise = partial(_highest_product, head.products) if part == "head" else None
        else:
            time = prices.time(part)
            request = PartRequest(part, dropped=dropped, arrivals=gone, own=own)
            part_bytes = compiled.part_bytes(request)
            kept_net = compiled.part_bytes(PartRequest(part, own=own)).net
            num_shared = compiled.num_shared_gradients(part, own=own)
            moves = partial(compiled.part_moves, request)
            allocated_rise = partial(compiled.part_rise, request)
        gradient_bytes = int(kept_net[_GRADIENTS]) if prices.leaves_gradients and phase == "backward" else 0
        if prices.leaves_gradients and gone:
            gradient_bytes, is_first = -sum(num_bytes for _, _, num_bytes in gone), True
            num_shared = compiled.num_shared_gradients(part.replace("accumulate", "first"))
        leaving = prices.gradients_legs(gradient_bytes, num_shared=num_shared, is_first=is_first)
        return Task(
            phase=phase,
            block=-1,
            name=name,
            bytes=part_bytes,
            time=add_legs(time, leaving),
            copied=with_gradients({}, gradient_bytes),
            waits_for=() if block is None else (update_key(block if block < 0 else self._num_blocks),),
            leaves=(leaving,) if leaving else (),
            moves=moves,
            allocated_rise=allocated_rise,
        )


    def _find_others(self, part: str, which: str) -> tuple[tuple[bool, ...], tuple[Arrival, ...]]:
        """For the gradients that are new in a part whether they are the rank's own, and what goes of those that were there."""
        place, _, form = which.partition("_backward_")
        if self._others is None or not form:
            return (), ()
        if form == "first":
            return self._others.own(place), ()
        return (), self._others.gone(place, first=part.replace("accumulate", "first"), accumulate=part)


def _drop(changes: Sequence[Change], dropped: Dropped | None, own: tuple[bool, ...]) -> Iterator[Change]:
    """The changes of a chunked head where gradients meet their fate; own: empty where the rank owns all of them."""
    flags = iter(own or repeat(object=True))
    for change in changes:
        is_complete = change[1] == _GRADIENTS and change[2] > 0
        fate = dropped if not is_complete or next(flags) else Dropped()
        yield from [change] if fate is None else drop_gradients([change], fate, region=_LOGITS)


def _list_own(changes: Sequence[Change], own: tuple[bool, ...]) -> list[Change]:
    """The gradients of a chunked head that are the rank's own."""
    completed = [change for change in changes if change[1] == _GRADIENTS and change[2] > 0]
    return [change for change, is_own in zip(completed, own, strict=True) if is_own]


def _highest_product(products: Sequence[Product], processor: Processor) -> int:
    return max(product.allocated_bytes(processor) for product in products)
