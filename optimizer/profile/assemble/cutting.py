"""Cuts a traced micro-batch into parts, and books every change of bytes where it happens. Torch-free.

What several blocks share (``sharing.py``) is left out of the changes and listed beside them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from optimizer.base.categories import Category, Tier
from optimizer.profile.assemble.sharing import PROLOGUE, Birth, Births, PartKey
from optimizer.profile.events import Allocated, Began, Event, Freed, Moved, Ran, Viewed


@dataclass(kw_only=True)
class RawChange:
    at: int
    tier: Tier
    category: Category
    num_bytes: int
    made_by: str
    """Op that allocated the storage."""
    storage: "Storage"


@dataclass(kw_only=True)
class RawPart:
    ops: list[Ran] = field(default_factory=list)
    changes: list[RawChange] = field(default_factory=list)
    num_views: int = 0


@dataclass(kw_only=True, eq=False)
class Storage:
    num_bytes: int
    tier: Tier
    category: Category
    made_by: str
    freed_in: PartKey | None = None
    freed_at: int = -1


@dataclass(kw_only=True)
class Raw:
    """One micro-batch, cut into parts, at one shape."""

    parts: dict[PartKey, RawPart]
    shared: list[Storage]
    """Storages in order of birth."""
    holds: dict[int, dict[int, int]]
    """The op of the block's backward until which it holds a storage, by block and index in ``shared``."""


def cut(events: Iterable[Event], held: Mapping[Birth, frozenset[int]]) -> Raw:
    """Cut a micro-batch into parts and book every change of bytes; shared storages are left out of the changes."""
    parts: dict[PartKey, RawPart] = {}
    storages: dict[int, Storage] = {}
    births = Births()
    part, key = RawPart(), PROLOGUE
    shared: dict[int, Storage] = {}
    for event in events:
        if isinstance(event, Began):
            key = (event.phase, event.block)
            part = parts.setdefault(key, RawPart())
        elif isinstance(event, Ran):
            part.ops.append(event)
        elif isinstance(event, Viewed):
            part.num_views += 1
        elif isinstance(event, Allocated):
            storages[event.storage] = Storage(
                num_bytes=event.num_bytes,
                tier=event.tier,
                category=event.category,
                made_by=part.ops[-1].name if part.ops else "",
            )
            if births.name(key, event) in held:
                shared[event.storage] = storages[event.storage]
            part.changes.append(_change_in(part, storages[event.storage], sign=1))
        elif isinstance(event, Moved) and event.storage in storages:
            storage = storages[event.storage]
            part.changes.append(_change_in(part, storage, sign=-1))
            storage.category = event.category
            part.changes.append(_change_in(part, storage, sign=1))
        elif isinstance(event, Freed) and event.storage in storages:
            storage = storages[event.storage]
            storage.freed_in, storage.freed_at = key, len(part.ops) - 1
            if event.storage not in shared:
                part.changes.append(_change_in(part, storage, sign=-1))
    return Raw(
        parts=parts,
        shared=list(shared.values()),
        holds=_hold_until(list(shared.values()), list(held.values()), parts),
    )


def _hold_until(
    shared: Sequence[Storage], holders: Sequence[frozenset[int]], parts: Mapping[PartKey, RawPart]
) -> dict[int, dict[int, int]]:
    """The block that lets go last shows when within its backward; the others are taken to hold to their end."""
    holds: dict[int, dict[int, int]] = {}
    for index, (storage, blocks) in enumerate(zip(shared, holders, strict=True)):
        for block in blocks:
            backward: PartKey = ("backward", block)
            is_last = storage.freed_in == backward
            until = storage.freed_at if is_last else len(parts[backward].ops) - 1
            holds.setdefault(block, {})[index] = until
    return holds


def _change_in(part: RawPart, storage: Storage, *, sign: int) -> RawChange:
    """A storage that comes (sign 1) or goes (-1) with the latest op of a part."""
    return RawChange(
        at=len(part.ops) - 1,
        tier=storage.tier,
        category=storage.category,
        num_bytes=sign * storage.num_bytes,
        made_by=storage.made_by,
        storage=storage,
    )
