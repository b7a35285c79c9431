"""The tables of distinct ops, changes and parts that a profile's regimes point into, as they fill."""

from collections.abc import Iterable

from optimizer.profile.ops import Change, Op, Part


class PartTables:
    """The distinct ops, changes and parts of a profile, in order of first use."""

    def __init__(self) -> None:
        self._ops: dict[Op, int] = {}
        self._changes: dict[Change, int] = {}
        self._parts: dict[Part, int] = {}

    @property
    def ops(self) -> tuple[Op, ...]:
        return tuple(self._ops)

    @property
    def changes(self) -> tuple[Change, ...]:
        return tuple(self._changes)

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(self._parts)

    def add(
        self,
        ops: Iterable[Op],
        changes: Iterable[tuple[int, Change]],
        *,
        storages: tuple[int, ...],
        num_views: int = 0,
    ) -> int:
        """Add a part. changes: each with the number of its op. storages: as ``Part``'s. Returns the index of the part."""
        placed = list(changes)
        part = Part(
            ops=tuple(self._ops.setdefault(op, len(self._ops)) for op in ops),
            changes=tuple(self._changes.setdefault(change, len(self._changes)) for _, change in placed),
            changes_at=tuple(at for at, _ in placed),
            num_views=num_views,
            storages=storages,
        )
        return self._parts.setdefault(part, len(self._parts))
