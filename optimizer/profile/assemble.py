"""Turns traces at a few shapes into a Regime: cuts each into parts, follows every storage, fits the sizes. Torch-free.

A change of bytes is booked where it happens, whichever part made the storage. That is enough for plans that mix choices, because what
crosses from part to part is the same for every choice, but for two things: a block's input goes when its own choice lets it,
which is booked in that block; and what the prologue makes for all blocks goes with the last that holds it, which ``Hold`` says.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from optimizer.categories import Category, Tier
from optimizer.errors import InvalidModel
from optimizer.plan.activations import BlockChoice
from optimizer.profile.events import Allocated, Began, Event, Freed, Held, Input, Moved, Ran, Trace
from optimizer.profile.profile import (
    BLOCK_CHOICES,
    BlockTemplate,
    Change,
    Hold,
    Op,
    Part,
    Regime,
    Shared,
)
from optimizer.profile.ranges import ShapeRange
from optimizer.profile.sizes import Shape, Terms, fit_terms

PartKey = tuple[str, int]
"""Phase as the runtime marks it, block or -1."""

_PROLOGUE: PartKey = ("forward", -1)
_HEAD: PartKey = ("head and loss", -1)
_HEAD_BACKWARD: PartKey = ("backward of head and loss", -1)
_NORM_BACKWARD: PartKey = ("backward", -1)


@dataclass(kw_only=True)
class _RawChange:
    at: int
    tier: Tier
    category: Category
    num_bytes: int


@dataclass(kw_only=True)
class _RawPart:
    ops: list[Ran] = field(default_factory=list)
    changes: list[_RawChange] = field(default_factory=list)


@dataclass(kw_only=True)
class _Storage:
    num_bytes: int
    tier: Tier
    category: Category
    born: PartKey
    freed_in: PartKey | None = None
    freed_at: int = -1


@dataclass(kw_only=True)
class _Raw:
    """One micro-batch, cut into parts, at one shape."""

    parts: dict[PartKey, _RawPart]
    shared: list[_Storage]
    """In order of birth."""
    holds: dict[int, dict[int, int]]
    """By block and index in ``shared``: until which op of the block's backward."""


def assemble_regime(
    traces: Mapping[tuple[Shape, BlockChoice], Trace], *, place: ShapeRange, block_templates: tuple[int, ...]
) -> Regime:
    """Raises InvalidModel where the shapes disagree about anything but sizes, or a size fits no polynomial."""
    shapes = (*place.grid, place.verify_at)
    held = _held_storages(traces, shapes[0])
    raw = {
        (shape, choice, which): _cut(trace.first if which == "first" else trace.accumulate, held[choice, which])
        for (shape, choice), trace in traces.items()
        for which in ("first", "accumulate")
    }
    fit = _Fitter(place)

    def part(choice: BlockChoice, which: str, key: PartKey) -> Part:
        return fit.part({shape: raw[shape, choice, which].parts[key] for shape in shapes}, key)

    keep = raw[shapes[0], "keep", "first"]
    num_blocks = 1 + max(block for _, block in keep.parts)
    templates: dict[str, tuple[BlockTemplate, ...]] = {}
    for choice in BLOCK_CHOICES:
        templates[choice] = tuple(
            BlockTemplate(
                forward=part(choice, "first", ("forward", block)),
                backward_first=part(choice, "first", ("backward", block)),
                backward_accumulate=part(choice, "accumulate", ("backward", block)),
                holds=tuple(
                    Hold(index=index, until=until)
                    for index, until in sorted(raw[shapes[0], choice, "first"].holds.get(block, {}).items())
                ),
            )
            for block in range(num_blocks)
        )
    shared = tuple(
        Shared(
            num_bytes=fit.terms({shape: raw[shape, "keep", "first"].shared[index].num_bytes for shape in shapes}, "shared"),
            category=storage.category,
        )
        for index, storage in enumerate(keep.shared)
    )
    return Regime(
        micro_batch_low=place.micro_batch_low,
        micro_batch_high=place.micro_batch_high,
        sequence_low=place.sequence_low,
        sequence_high=place.sequence_high,
        parts={
            "prologue": part("keep", "first", _PROLOGUE),
            "head": part("keep", "first", _HEAD),
            "head_backward_first": part("keep", "first", _HEAD_BACKWARD),
            "head_backward_accumulate": part("keep", "accumulate", _HEAD_BACKWARD),
            "norm_backward_first": part("keep", "first", _NORM_BACKWARD),
            "norm_backward_accumulate": part("keep", "accumulate", _NORM_BACKWARD),
        },
        shared=shared,
        templates=templates,
        block_templates=block_templates,
    )


def _held_storages(
    traces: Mapping[tuple[Shape, BlockChoice], Trace], shape: Shape
) -> dict[tuple[BlockChoice, str], dict[int, set[int]]]:
    """For each choice and micro-batch: which storages of the prologue some block holds, and which blocks."""
    held: dict[tuple[BlockChoice, str], dict[int, set[int]]] = {}
    for which in ("first", "accumulate"):
        by_choice: dict[BlockChoice, dict[int, set[int]]] = {}
        for choice in BLOCK_CHOICES:
            events = getattr(traces[shape, "keep" if choice == "offload" else choice], which)
            by_choice[choice] = _holders(events, with_first_input=choice != "offload")
        everything = sorted({offset for holders in by_choice.values() for offset in holders})
        for choice in BLOCK_CHOICES:
            held[choice, which] = {offset: by_choice[choice].get(offset, set()) for offset in everything}
    return held


def _holders(events: Sequence[Event], *, with_first_input: bool) -> dict[int, set[int]]:
    """By number of the storage counted from the micro-batch's first, so that traces can be compared."""
    in_prologue: set[int] = set()
    first_number: int | None = None
    holders: dict[int, set[int]] = {}
    first_input: int | None = None
    key = _PROLOGUE
    for event in events:
        if isinstance(event, Began):
            key = (event.phase, event.block)
        elif isinstance(event, Allocated):
            first_number = event.storage if first_number is None else first_number
            if key == _PROLOGUE:
                in_prologue.add(event.storage)
        elif isinstance(event, Input) and event.block == 0:
            first_input = event.storage
        elif isinstance(event, Held) and event.storage in in_prologue:
            if event.storage == first_input and not with_first_input:
                continue
            holders.setdefault(event.storage - (first_number or 0), set()).add(event.block)
    return holders


def _cut(events: Iterable[Event], held: Mapping[int, set[int]]) -> _Raw:
    """Cut a micro-batch into parts and book every change of bytes; shared storages are left out of the changes."""
    parts: dict[PartKey, _RawPart] = {}
    storages: dict[int, _Storage] = {}
    first_number: int | None = None
    part, key = _RawPart(), _PROLOGUE
    shared: dict[int, _Storage] = {}
    for event in events:
        if isinstance(event, Began):
            key = (event.phase, event.block)
            part = parts.setdefault(key, _RawPart())
        elif isinstance(event, Ran):
            part.ops.append(event)
        elif isinstance(event, Allocated):
            first_number = event.storage if first_number is None else first_number
            storages[event.storage] = _Storage(
                num_bytes=event.num_bytes, tier=event.tier, category=event.category, born=key
            )
            if key == _PROLOGUE and event.storage - first_number in held:
                shared[event.storage] = storages[event.storage]
            _book(part, storages[event.storage], sign=1)
        elif isinstance(event, Moved):
            if (storage := storages.get(event.storage)) is not None:
                _book(part, storage, sign=-1)
                storage.category = event.category
                _book(part, storage, sign=1)
        elif isinstance(event, Freed):
            if (storage := storages.get(event.storage)) is not None:
                storage.freed_in, storage.freed_at = key, len(part.ops) - 1
                if event.storage not in shared:
                    _book(part, storage, sign=-1)
    return _Raw(
        parts=parts,
        shared=list(shared.values()),
        holds=_hold_until(list(shared.values()), list(held.values()), parts),
    )


def _hold_until(
    shared: Sequence[_Storage], holders: Sequence[set[int]], parts: Mapping[PartKey, _RawPart]
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


def _book(part: _RawPart, storage: _Storage, *, sign: int) -> None:
    part.changes.append(
        _RawChange(
            at=len(part.ops) - 1, tier=storage.tier, category=storage.category, num_bytes=sign * storage.num_bytes
        )
    )


class _Fitter:
    """Fits sizes over the shapes of one range, and remembers fits, of which most are alike."""

    def __init__(self, place: ShapeRange) -> None:
        self._place = place
        self._shapes = (*place.grid, place.verify_at)
        self._known: dict[tuple[int, ...], Terms] = {}

    def terms(self, values: Mapping[Shape, int], what: str) -> Terms:
        key = tuple(values[shape] for shape in self._shapes)
        if key not in self._known:
            fitted = fit_terms(values, verify_at=self._place.verify_at)
            if fitted is None:
                raise InvalidModel(
                    f"the model cannot be traced: a size in {what} is no polynomial in micro-batch and sequence length "
                    f"({', '.join(map(str, key))} at {', '.join(map(str, self._shapes))})",
                    field="config",
                )
            self._known[key] = fitted
        return self._known[key]

    def part(self, raw: Mapping[Shape, _RawPart], key: PartKey) -> Part:
        what = f"{key[0]} of block {key[1] + 1}" if key[1] >= 0 else key[0]
        outlines = {shape: _outline(part) for shape, part in raw.items()}
        first = outlines[self._shapes[0]]
        different = [shape for shape in self._shapes if outlines[shape] != first]
        if different:
            raise InvalidModel(
                f"the model cannot be traced: its operations in {what} at micro-batch {different[0][0]}, sequence length "
                f"{different[0][1]} are not those at {self._shapes[0][0]}, {self._shapes[0][1]}",
                field="config",
            )
        return Part(
            ops=tuple(self._op(raw, index, what) for index in range(len(raw[self._shapes[0]].ops))),
            changes=tuple(self._change(raw, index, what) for index in range(len(raw[self._shapes[0]].changes))),
        )

    def _op(self, raw: Mapping[Shape, _RawPart], index: int, what: str) -> Op:
        def over_shapes(read: Callable[[Ran], int]) -> Terms:
            return self.terms({shape: read(part.ops[index]) for shape, part in raw.items()}, what)

        sample = raw[self._shapes[0]].ops[index]
        return Op(
            name=sample.name,
            kind=sample.kind,
            flops=over_shapes(lambda op: op.flops),
            read_bytes=over_shapes(lambda op: op.read_bytes),
            written_bytes=over_shapes(lambda op: op.written_bytes),
        )

    def _change(self, raw: Mapping[Shape, _RawPart], index: int, what: str) -> Change:
        sample = raw[self._shapes[0]].changes[index]
        sizes = {shape: part.changes[index].num_bytes for shape, part in raw.items()}
        return Change(
            at=sample.at, tier=sample.tier, category=sample.category, num_bytes=self.terms(sizes, what)
        )


def _outline(part: _RawPart) -> tuple[tuple[str, ...], tuple[tuple[int, Tier, Category, bool], ...]]:
    changes = tuple((c.at, c.tier, c.category, c.num_bytes > 0) for c in part.changes)
    return tuple(op.name for op in part.ops), changes
