"""Turns traces at a few shapes into a Regime: cuts each into parts, follows every storage, fits the sizes. Torch-free.

A change of bytes is booked where it happens, whichever part made the storage. That is enough for plans that mix choices,
because what crosses from part to part is the same for every choice, but for two things: a block's input goes when its own
choice lets it, which is booked in that block; and what several blocks share (sharing.py) goes with the last that holds it,
which ``Hold`` says.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from optimizer.categories import Category, Tier
from optimizer.errors import InvalidModel
from optimizer.plan.activations import BlockChoice
from optimizer.profile.events import Allocated, Began, Event, Freed, Moved, Ran, Trace, Viewed
from optimizer.profile.profile import (
    BlockTemplate,
    Change,
    Evaluation,
    Hold,
    Op,
    Regime,
    Shared,
    tail_name,
)
from optimizer.profile.ranges import ShapeRange
from optimizer.profile.sharing import PROLOGUE, Birth, Births, PartKey, Sharing, find_sharing
from optimizer.profile.sizes import NO_TERMS, Shape, Terms, evaluate, fit_terms
from optimizer.profile.tables import PartTables

_STORAGE = "storage"
_OP_SIZES = ("flops", "read_bytes", "written_bytes")
_HEAD: PartKey = ("head and loss", -1)
_HEAD_BACKWARD: PartKey = ("backward of head and loss", -1)
_NORM_BACKWARD: PartKey = ("backward", -1)


@dataclass(kw_only=True)
class _RawChange:
    at: int
    tier: Tier
    category: Category
    num_bytes: int
    made_by: str
    """Op that allocated the storage."""
    storage: "_Storage"


@dataclass(kw_only=True)
class _RawPart:
    ops: list[Ran] = field(default_factory=list)
    changes: list[_RawChange] = field(default_factory=list)
    num_views: int = 0


@dataclass(kw_only=True, eq=False)
class _Storage:
    num_bytes: int
    tier: Tier
    category: Category
    made_by: str
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
    whole: Mapping[BlockChoice, Trace],
    growth: Mapping[Shape, Trace],
    *,
    evaluation: Mapping[Shape, Trace] | None = None,
    place: ShapeRange,
    block_templates: tuple[int, ...],
    tables: PartTables,
    has_tails: bool = False,
) -> Regime:
    """whole: two micro-batches under each choice wanted at ``place.shape``, ``keep`` among them; growth: one of the plain plan
    at each other shape; evaluation: a forward without gradients at each shape.

    Ops, changes and parts are added to ``tables``. has_tails: what follows the last block is held for each of its choices, as
    ``tail_name`` says; needed where code outside the blocks holds what they were given or return.

    Raises InvalidModel where the shapes disagree about anything but sizes, or a size fits no polynomial.
    """
    sharing = find_sharing(whole)
    raw = {
        (choice, which): _cut(trace.first if which == "first" else trace.accumulate, sharing[choice, which].holders)
        for choice, trace in whole.items()
        for which in ("first", "accumulate")
    }
    fit = _Fitter(place.shape, constants=frozenset[int]().union(*(trace.constants for trace in whole.values())))
    plain = raw["keep", "first"]
    others = {shape: _cut(trace.first, sharing["keep", "first"].holders) for shape, trace in growth.items()}
    fit.learn(plain, others)
    for unwatched in list(others.values())[:1]:
        _leave_out_watching(unwatched, raw["keep", "first"], raw["keep", "accumulate"])

    def part(choice: BlockChoice, which: str, key: PartKey) -> int:
        found = raw[choice, which].parts.get(key, _RawPart())  # no norm after the last block: no part of its own
        return fit.add_part(found, tables, adds_gradients=which == "accumulate")

    num_blocks = 1 + max(block for _, block in plain.parts)
    templates: dict[str, tuple[BlockTemplate, ...]] = {
        choice: tuple(
            BlockTemplate(
                forward=part(choice, "first", ("forward", block)),
                backward_first=part(choice, "first", ("backward", block)),
                backward_accumulate=part(choice, "accumulate", ("backward", block)),
                holds=tuple(
                    Hold(index=index, until=until)
                    for index, until in sorted(raw[choice, "first"].holds.get(block, {}).items())
                ),
            )
            for block in range(num_blocks)
        )
        for choice in whole
    }
    tails: tuple[BlockChoice, ...] = tuple(whole) if has_tails else ("keep",)
    return Regime(
        micro_batch_low=place.micro_batch_low,
        micro_batch_high=place.micro_batch_high,
        sequence_low=place.sequence_low,
        sequence_high=place.sequence_high,
        parts={
            name: part(choice, which, key)
            for choice in tails
            for name, which, key in _list_parts(choice)
        },
        shared=tuple(_list_shared(plain.shared, sharing["keep", "first"], fit, block_templates)),
        templates=templates,
        block_templates=block_templates,
        evaluation=None if evaluation is None else _assemble_evaluation(evaluation, place=place, tables=tables),
    )


def _list_parts(choice: BlockChoice) -> Iterator[tuple[str, str, PartKey]]:
    """What is no block, by name, with the micro-batch and the key it is traced under."""
    if choice == "keep":
        yield "prologue", "first", PROLOGUE
    yield tail_name("head", choice), "first", _HEAD
    for which in ("first", "accumulate"):
        yield tail_name(f"head_backward_{which}", choice), which, _HEAD_BACKWARD
        yield tail_name(f"norm_backward_{which}", choice), which, _NORM_BACKWARD


def _assemble_evaluation(traces: Mapping[Shape, Trace], *, place: ShapeRange, tables: PartTables) -> Evaluation:
    indices = assemble_forward(
        {shape: trace.first for shape, trace in traces.items()}, shape=place.shape, tables=tables
    )
    num_blocks = 1 + max(block for _, block in indices)
    return Evaluation(
        prologue=indices[PROLOGUE],
        blocks=tuple(indices["forward", block] for block in range(num_blocks)),
        head=indices[_HEAD],
    )


def _list_shared(
    storages: Sequence["_Storage"], sharing: Sharing, fit: "_Fitter", block_templates: Sequence[int]
) -> Iterator[Shared]:
    for storage, birth in zip(storages, sharing.holders, strict=True):
        ends_in, ends_before = sharing.ends.get(birth, (-1, 0))
        for block in (birth.part[1], ends_in):
            if block >= 0 and block_templates.count(block) != 1:
                raise InvalidModel(
                    f"the model cannot be traced: a tensor made in block {birth.part[1] + 1} of the shortened model is held by "
                    "other blocks, and several blocks of the model are like it",
                    field="config",
                )
        yield Shared(
            num_bytes=fit.terms(f"{storage.made_by} {_STORAGE}", storage.num_bytes),
            category=storage.category,
            ends_in=ends_in,
            ends_before=ends_before,
        )


def _leave_out_watching(unwatched: _Raw, first: _Raw, accumulate: _Raw) -> None:
    """Make the numbers of views in kept blocks those of a run that is not watched for what blocks hold."""
    for key, part in first.parts.items():
        num_extra = part.num_views - unwatched.parts[key].num_views
        part.num_views -= num_extra
        accumulate.parts[key].num_views -= num_extra


def _cut(events: Iterable[Event], held: Mapping[Birth, frozenset[int]]) -> _Raw:
    """Cut a micro-batch into parts and book every change of bytes; shared storages are left out of the changes."""
    parts: dict[PartKey, _RawPart] = {}
    storages: dict[int, _Storage] = {}
    births = Births()
    part, key = _RawPart(), PROLOGUE
    shared: dict[int, _Storage] = {}
    for event in events:
        if isinstance(event, Began):
            key = (event.phase, event.block)
            part = parts.setdefault(key, _RawPart())
        elif isinstance(event, Ran):
            part.ops.append(event)
        elif isinstance(event, Viewed):
            part.num_views += 1
        elif isinstance(event, Allocated):
            storages[event.storage] = _Storage(
                num_bytes=event.num_bytes,
                tier=event.tier,
                category=event.category,
                made_by=part.ops[-1].name if part.ops else "",
            )
            if births.name(key, event) in held:
                shared[event.storage] = storages[event.storage]
            _book(part, storages[event.storage], sign=1)
        elif isinstance(event, Moved) and event.storage in storages:
            storage = storages[event.storage]
            _book(part, storage, sign=-1)
            storage.category = event.category
            _book(part, storage, sign=1)
        elif isinstance(event, Freed) and event.storage in storages:
            storage = storages[event.storage]
            storage.freed_in, storage.freed_at = key, len(part.ops) - 1
            if event.storage not in shared:
                _book(part, storage, sign=-1)
    return _Raw(
        parts=parts,
        shared=list(shared.values()),
        holds=_hold_until(list(shared.values()), list(held.values()), parts),
    )


def _hold_until(
    shared: Sequence[_Storage], holders: Sequence[frozenset[int]], parts: Mapping[PartKey, _RawPart]
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
            at=len(part.ops) - 1,
            tier=storage.tier,
            category=storage.category,
            num_bytes=sign * storage.num_bytes,
            made_by=storage.made_by,
            storage=storage,
        )
    )


class _Fitter:
    """Learns from the plain plan how each size grows with the shape; then knows a size by its value at the first shape.

    Other plans and micro-batches are traced at that shape alone: what they move and make are the same tensors.
    """

    def __init__(self, shape: Shape, *, constants: frozenset[int] = frozenset()) -> None:
        self._shape = shape
        self._constants = constants
        self._known: dict[tuple[str, int], Terms] = {}
        self._scratch: dict[tuple[object, ...], tuple[Terms, tuple[Terms, ...]]] = {}

    def learn(self, plain: _Raw, others: Mapping[Shape, _Raw]) -> None:
        for key, part in plain.parts.items():
            self._learn_part(key, part, {shape: raw.parts.get(key, _RawPart()) for shape, raw in others.items()})

    def _learn_part(self, key: PartKey, part: _RawPart, others: Mapping[Shape, _RawPart]) -> None:
        what = f"{key[0]} of block {key[1] + 1}" if key[1] >= 0 else key[0]
        for shape, other in others.items():
            if _outline(part) != _outline(other):
                raise InvalidModel(
                    f"the model cannot be traced: its operations in {what} at micro-batch {shape[0]}, sequence length "
                    f"{shape[1]} are not those at {self._shape[0]}, {self._shape[1]}",
                    field="config",
                )
        for index, change in enumerate(part.changes):
            if change.num_bytes < 0:
                continue  # It came as something that was learnt then.
            sizes = {shape: other.changes[index].num_bytes for shape, other in others.items()}
            self._learn_size((f"{change.made_by} {_STORAGE}", change.num_bytes), sizes, what)
        for index, op in enumerate(part.ops):
            for name in _OP_SIZES:
                sizes = {shape: getattr(other.ops[index], name) for shape, other in others.items()}
                for label in (f"{_describe(op)} {name}", f"{op.name} {name}"):
                    self._learn_size((label, getattr(op, name)), sizes, what, decides_bytes=False)
            self._learn_scratch(op, {shape: other.ops[index] for shape, other in others.items()})

    def _learn_size(
        self, key: tuple[str, int], others: Mapping[Shape, int], what: str, *, decides_bytes: bool = True
    ) -> None:
        """decides_bytes: two sizes that are one at the first shape and grow apart cannot be told from each other. Of storages
        that would make wrong bytes. Of ops it would make the time of a few a little wrong, and the first is taken.
        """
        known = self._known.get(key)
        if known is not None and all(evaluate(known, shape) == size for shape, size in others.items()):
            return
        values = {self._shape: key[1], **others}
        fitted = fit_terms(values)
        if fitted is not None and known is not None and not decides_bytes:
            return
        if fitted is None or known is not None:
            listed = ", ".join(f"{size} at {shape}" for shape, size in values.items())
            raise InvalidModel(
                f"the model cannot be traced: a size in {what} ({key[0]}) is no polynomial in micro-batch and sequence "
                f"length ({listed})",
                field="config",
            )
        self._known[key] = fitted

    def _learn_scratch(self, op: Ran, others: Mapping[Shape, Ran]) -> None:
        """No polynomial is needed here, only a bound: no more than what the op writes, and the largest length seen."""
        key = _describe_scratch(op)
        if key in self._scratch or not (op.scratch_bytes or op.square):
            return
        traced = {self._shape: op, **others}
        scratch = fit_terms({shape: each.scratch_bytes for shape, each in traced.items()})
        sides = []
        for index in range(len(op.square)):
            lengths = {shape: each.square[index] for shape, each in traced.items()}
            sides.append(fit_terms(lengths) or _constant(max(lengths.values())))
        written = self.terms(f"{op.name} written_bytes", op.written_bytes)
        self._scratch[key] = (written if scratch is None else scratch, tuple(sides))

    def terms(self, what: str, value: int, *, adds_gradients: bool = False) -> Terms:
        """Of a storage or of an op's size; what an op moves that the plain plan lacks (a copy) is some storage's size.

        adds_gradients: an op that the first micro-batch lacks adds to a gradient, whose size does not change with the shape.
        """
        if value == 0:
            return NO_TERMS
        known = self._known.get((what, abs(value)))
        if known is None and (adds_gradients or abs(value) in self._constants):
            return _constant(value)
        known = known or self._any_storage(abs(value))
        if known is None:
            raise InvalidModel(
                f"the model cannot be traced: how {what} of {abs(value)} at {self._shape} grows is not known",
                field="config",
            )
        return known if value >= 0 else tuple(-term for term in known)  # type: ignore[return-value]

    def _any_storage(self, value: int) -> Terms | None:
        """Of a copy, which may be of any storage: one that grows, as what blocks save does, before one that does not."""
        found = [terms for (what, size), terms in self._known.items() if size == value and what.endswith(_STORAGE)]
        return max(found, key=lambda terms: any(terms[1:]), default=None)

    def add_part(self, raw: _RawPart, tables: PartTables, *, adds_gradients: bool) -> int:
        def size(op: Ran, name: str) -> Terms:
            # What blocks save is copied in every micro-batch, and grows with the shape in each.
            is_copy = op.kind in ("copy_out", "copy_in")
            known = self._known.get((f"{_describe(op)} {name}", getattr(op, name)))
            if known is not None:
                return known
            return self.terms(f"{op.name} {name}", getattr(op, name), adds_gradients=adds_gradients and not is_copy)

        def make(op: Ran) -> Op:
            # What the plain plan lacks, an op of another micro-batch alone, holds nothing that counts.
            scratch_bytes, square = self._scratch.get(_describe_scratch(op), (NO_TERMS, ()))
            return Op(
                name=op.name,
                kind=op.kind,
                flops=size(op, "flops"),
                read_bytes=size(op, "read_bytes"),
                written_bytes=size(op, "written_bytes"),
                scratch_bytes=scratch_bytes,
                square=square,
                dtype=op.dtype,
                form=op.form,
            )

        ops = (make(op) for op in raw.ops)
        changes = (
            (
                c.at,
                Change(tier=c.tier, category=c.category, num_bytes=self.terms(f"{c.made_by} {_STORAGE}", c.num_bytes)),
            )
            for c in raw.changes
        )
        return tables.add(ops, changes, storages=tuple(_number_storages(raw.changes)), num_views=raw.num_views)


def _number_storages(changes: Sequence[_RawChange]) -> Iterator[int]:
    """For each change its storage's number, in order of birth in the part; -1 for what was there before."""
    numbers: dict[_Storage, int] = {}
    before: set[_Storage] = set()
    for change in changes:
        storage = change.storage
        if storage not in numbers and storage not in before:
            if change.num_bytes > 0:
                numbers[storage] = len(numbers)
            else:
                before.add(storage)
        yield numbers.get(storage, -1)


def _describe(op: Ran) -> str:
    """Tells ops of one name apart that have one size in common."""
    return " ".join(str(value) for value in (op.name, *(getattr(op, name) for name in _OP_SIZES)))


def _describe_scratch(op: Ran) -> tuple[object, ...]:
    return _describe(op), op.scratch_bytes, op.square


def _constant(value: int) -> Terms:
    return (value, 0, 0, 0, 0, 0)


def _outline(part: _RawPart) -> tuple[tuple[str, ...], tuple[tuple[int, Tier, Category, bool], ...]]:
    """All but the sizes, and but what goes at the very end, which differs where another micro-batch follows."""
    changes = [(c.at, c.tier, c.category, c.num_bytes > 0) for c in part.changes]
    while changes and not changes[-1][-1]:
        changes.pop()
    return tuple(op.name for op in part.ops), tuple(changes)


# A forward pass alone.


def assemble_forward(
    runs: Mapping[Shape, Sequence[Event]], *, shape: Shape, tables: PartTables
) -> dict[tuple[str, int], int]:
    """The parts of one forward pass, traced without gradients at each of a few shapes, of which ``shape`` is the first.

    A release is booked where it happens, as there is no backward for which anything could be held. Ops, changes and parts are
    added to ``tables``; returned are indices in its parts, by the phase and block that began them.
    Raises InvalidModel where the shapes disagree about anything but sizes, or a size fits no polynomial.
    """
    raw = {each: _cut(events, {}) for each, events in runs.items()}
    fit = _Fitter(shape)
    fit.learn(raw[shape], {each: cut for each, cut in raw.items() if each != shape})
    return {key: fit.add_part(part, tables, adds_gradients=False) for key, part in raw[shape].parts.items()}
