"""Storages of a forward pass that more than one block decides about: who holds each for its backward, and where it goes.

Torch-free. Nearly every storage is the business of one block: it goes in that block's backward or forward, as that block's own
choice has it, and is booked where it goes. The others are shared. Their makers are the prologue (rotary tables, masks, a first
input that the model keeps a name of) or a block, with what runs after it and before the next: an encoder's output, which
every block of the decoder holds; position biases that a first block makes for its stack (T5).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from optimizer.plan.activations import BlockChoice
from optimizer.profile.events import Allocated, Began, Event, Freed, HeldStorage, Input, Ran, Trace

PartKey = tuple[str, int]
"""Phase as the runtime marks it, block or -1."""

FORWARD = "forward"
BACKWARD = "backward"
PROLOGUE: PartKey = (FORWARD, -1)


class Birth(NamedTuple):
    """Names a storage in every trace of a model: the part of the forward pass that makes it, and how many others on the device
    that part made before it.
    """

    part: PartKey
    ordinal: int


@dataclass(kw_only=True)
class _Life:
    input_of: set[int] = field(default_factory=set)
    given_to: set[int] = field(default_factory=set)
    """Blocks that hold it and were given it."""
    kept_by: set[int] = field(default_factory=set)
    """Blocks that hold it, given or not."""
    freed_in: PartKey | None = None
    freed_before: int = 0
    """Ops of the part that come after it went."""

    @property
    def freed_in_block(self) -> int | None:
        return None if self.freed_in is None else self.freed_in[1]


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Shared storages in one micro-batch of one choice, in the order of birth."""

    holders: Mapping[Birth, frozenset[int]]
    """Blocks that need it for their backward."""
    ends: Mapping[Birth, tuple[int, int]]
    """The place where it goes if no block of a plan holds it: the block in whose part of the forward pass, and how many
    of that part's ops come after. Left out where every choice has a holder, or where it goes after the blocks."""


class Births:
    """Counts storages as they come, so that each gets the name it has in the other traces."""

    def __init__(self) -> None:
        self._counts: dict[PartKey, int] = {}

    def name(self, part: PartKey, event: Allocated) -> Birth | None:
        """The name of a birth; None outside the forward pass and off the device."""
        if part[0] != FORWARD or event.tier != "device":
            return None
        ordinal = self._counts[part] = self._counts.get(part, -1) + 1
        return Birth(part, ordinal)


def find_sharing(whole: Mapping[BlockChoice, Trace]) -> dict[tuple[BlockChoice, str], Sharing]:
    """Find the shared storages of each choice and micro-batch (``first``, ``accumulate``)."""
    choices = tuple(whole)
    found: dict[tuple[BlockChoice, str], Sharing] = {}
    for which in ("first", "accumulate"):
        lives = {choice: _follow(getattr(whole[choice], which)) for choice in choices}
        holders = {choice: _holders(choice, lives) for choice in choices}
        shared = [
            birth
            for birth in lives["keep"]
            if (_is_shared_of_prologue if birth.part == PROLOGUE else _is_shared_of_block)(birth, lives, holders)
        ]
        ends = dict(_list_ends(shared, lives, holders))
        for choice in choices:
            found[choice, which] = Sharing(holders={birth: holders[choice][birth] for birth in shared}, ends=ends)
    return found


def _follow(events: Sequence[Event]) -> dict[Birth, _Life]:
    """Every storage on the device that the forward pass makes, in the order of birth."""
    births, lives = Births(), {}
    by_number: dict[int, _Life] = {}
    freed: list[tuple[_Life, int]] = []
    num_ops: dict[PartKey, int] = {}
    key = PROLOGUE
    for event in events:
        if isinstance(event, Began):
            key = (event.phase, event.block)
        elif isinstance(event, Ran):
            num_ops[key] = num_ops.get(key, 0) + 1
        elif isinstance(event, Allocated):
            birth = births.name(key, event)
            if birth is not None:
                lives[birth] = by_number[event.storage] = _Life()
        elif isinstance(event, Freed) and event.storage in by_number:
            life = by_number[event.storage]
            life.freed_in = key
            freed.append((life, num_ops.get(key, 0)))
        elif isinstance(event, Input) and event.storage in by_number:
            by_number[event.storage].input_of.add(event.block)
        elif isinstance(event, HeldStorage) and event.storage in by_number:
            life = by_number[event.storage]
            life.kept_by.add(event.block)
            if event.is_given:
                life.given_to.add(event.block)
    for life, position in freed:
        assert life.freed_in is not None
        life.freed_before = num_ops.get(life.freed_in, 0) - position
    return lives


def _holders(choice: BlockChoice, lives: Mapping[BlockChoice, Mapping[Birth, _Life]]) -> dict[Birth, frozenset[int]]:
    """An offloaded block holds what a kept one does of what it was given, but for its input: that, and what it makes, leaves
    as a copy.
    """
    if choice != "offload":
        return {birth: frozenset(life.kept_by) for birth, life in lives[choice].items()}
    return {birth: frozenset(life.given_to - life.input_of) for birth, life in lives["keep"].items()}


def _is_shared_of_prologue(
    birth: Birth,
    lives: Mapping[BlockChoice, Mapping[Birth, _Life]],
    holders: Mapping[BlockChoice, Mapping[Birth, frozenset[int]]],
) -> bool:
    everyone = frozenset[int]().union(*(holders[choice][birth] for choice in holders))
    kept, offloaded = lives["keep"][birth], lives.get("offload", {}).get(birth)
    # Held by the embedding's own backward, whatever the blocks do (GPT-2's position ids): nothing is shared about it.
    if not everyone or (not holders["keep"][birth] and kept.freed_in == (BACKWARD, 0)):
        return False
    # A first block's input of which the model keeps no name (GPT-2) goes as any other block's input does.
    is_handed_over = offloaded is not None and offloaded.freed_in == (FORWARD, 0)
    return not (everyone <= {0} and is_handed_over)


def _is_shared_of_block(
    birth: Birth,
    lives: Mapping[BlockChoice, Mapping[Birth, _Life]],
    holders: Mapping[BlockChoice, Mapping[Birth, frozenset[int]]],
) -> bool:
    """True where the choices disagree in which block it goes: more than one block decides."""
    blocks = {life[birth].freed_in_block for life in lives.values()}
    return len(blocks) > 1 and any(held[birth] for held in holders.values())


def _list_ends(
    shared: Iterable[Birth],
    lives: Mapping[BlockChoice, Mapping[Birth, _Life]],
    holders: Mapping[BlockChoice, Mapping[Birth, frozenset[int]]],
) -> Iterable[tuple[Birth, tuple[int, int]]]:
    for birth in shared:
        free = [lives[choice][birth] for choice in lives if not holders[choice][birth]]
        for life in free[:1]:
            if life.freed_in is not None and life.freed_in[0] == FORWARD and life.freed_in[1] >= 0:
                yield birth, (life.freed_in[1], life.freed_before)
