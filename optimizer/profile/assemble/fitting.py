"""Says how every size of a micro-batch grows with the shape, and writes parts with sizes as polynomials. Torch-free."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from optimizer.base.categories import Category, Tier
from optimizer.base.errors import InvalidModel
from optimizer.profile.assemble.cutting import Raw, RawChange, RawPart, Storage
from optimizer.profile.assemble.ranges import ShapesDiffer
from optimizer.profile.assemble.sharing import PartKey
from optimizer.profile.assemble.tables import PartTables
from optimizer.profile.events import Ran
from optimizer.profile.ops import Change, Op
from optimizer.profile.sizes import NO_TERMS, Shape, Terms, evaluate, fit_terms

STORAGE: Final = "storage"
"""Names what an op made, among what is learnt of it."""
_OP_SIZES = ("flops", "read_bytes", "written_bytes")
_What: TypeAlias = tuple[object, ...]
"""Thing that has a size: a name and which size of it, or an op with all its sizes and which of them."""


class Fitter:
    """Learns from the plain plan how each size grows with the shape; then knows a size by its value at the first shape.

    Other plans and micro-batches are traced at that shape alone: what they move and make are the same tensors.
    """

    def __init__(self, shape: Shape, *, constants: frozenset[int] = frozenset()) -> None:
        self._shape = shape
        self._constants = constants
        self._known: dict[tuple[_What, int], Terms] = {}
        self._storages: dict[int, list[Terms]] = {}
        self._inputs: dict[int, Terms] = {}
        self._scratch: dict[tuple[object, ...], tuple[Terms, tuple[Terms, ...], tuple[Terms, ...]]] = {}

    def learn(self, plain: Raw, others: Mapping[Shape, Raw]) -> None:
        for key, part in plain.parts.items():
            self._learn_part(key, part, {shape: raw.parts.get(key, RawPart()) for shape, raw in others.items()})

    def learn_inputs(self, plain: Sequence[int], others: Mapping[Shape, Sequence[int]]) -> None:
        """Bytes of what comes from outside and is in no part; asked about where nothing else is of a size."""
        for terms, num_bytes in zip(_fit_each({self._shape: plain, **others}), plain, strict=True):
            self._inputs.setdefault(num_bytes, terms)

    def _learn_part(self, key: PartKey, part: RawPart, others: Mapping[Shape, RawPart]) -> None:
        what = f"{key[0]} of block {key[1] + 1}" if key[1] >= 0 else key[0]
        for shape, other in others.items():
            if _outline(part) != _outline(other):
                raise ShapesDiffer(
                    f"the model cannot be traced: its operations in {what} at micro-batch {shape[0]}, sequence length "
                    f"{shape[1]} are not those at {self._shape[0]}, {self._shape[1]}",
                    field="config",
                )
        for index, change in enumerate(part.changes):
            if change.num_bytes < 0:
                continue  # It came as something that was learnt then.
            sizes = {shape: other.changes[index].num_bytes for shape, other in others.items()}
            self._learn_size((change.made_by, STORAGE), change.num_bytes, sizes, part=what)
        for index, op in enumerate(part.ops):
            described = _describe(op)
            for name in _OP_SIZES:
                sizes = {shape: getattr(other.ops[index], name) for shape, other in others.items()}
                for label in ((*described, name), (op.name, name)):
                    self._learn_size(label, getattr(op, name), sizes, part=what, decides_bytes=False)
            self._learn_scratch(op, {shape: other.ops[index] for shape, other in others.items()})

    def _learn_size(
        self, what: _What, size: int, others: Mapping[Shape, int], *, part: str, decides_bytes: bool = True
    ) -> None:
        """Learn a size. decides_bytes: two sizes that are one at the first shape and grow apart cannot be separated. Of
        storages that would make wrong bytes. Of ops it would make the time of a few a little wrong, and the first is
        taken.
        """
        known = self._known.get((what, size))
        if known is not None and all(evaluate(known, shape) == other for shape, other in others.items()):
            return
        values = {self._shape: size, **others}
        fitted = fit_terms(values)
        if fitted is not None and known is not None and not decides_bytes:
            return
        if fitted is None or known is not None:
            listed = ", ".join(f"{value} at {shape}" for shape, value in values.items())
            raise ShapesDiffer(
                f"the model cannot be traced: a size in {part} ({what[0]} {what[-1]}) is no polynomial in micro-batch "
                f"and sequence length ({listed})",
                field="config",
            )
        self._known[what, size] = fitted
        if what[-1] == STORAGE:
            self._storages.setdefault(size, []).append(fitted)

    def _learn_scratch(self, op: Ran, others: Mapping[Shape, Ran]) -> None:
        """No polynomial is needed here, only a bound: no more than what the op writes, and the largest length seen."""
        key = _describe_scratch(op)
        if key in self._scratch or not (op.scratch_bytes or op.sides or op.convolution):
            return
        traced = {self._shape: op, **others}
        scratch = fit_terms({shape: each.scratch_bytes for shape, each in traced.items()})
        sides = _fit_each({shape: each.sides for shape, each in traced.items()})
        convolution = _fit_each({shape: each.convolution for shape, each in traced.items()})
        written = self.terms((op.name, "written_bytes"), op.written_bytes)
        self._scratch[key] = (written if scratch is None else scratch, sides, convolution)

    def terms(self, what: tuple[str, str], value: int, *, adds_gradients: bool = False) -> Terms:
        """Terms of a size; what an op moves that the plain plan lacks (a copy) is some storage's size.

        what: the op's name, and which of its sizes, or ``STORAGE`` for what it made.

        adds_gradients: an op that the first micro-batch lacks adds to a gradient, whose size does not change with the shape.
        """
        if value == 0:
            return NO_TERMS
        known = self._known.get((what, abs(value)))
        if known is None and (adds_gradients or abs(value) in self._constants):
            return _constant(value)
        known = known or self._any_storage(abs(value)) or self._inputs.get(abs(value))
        if known is None:
            raise InvalidModel(
                f"the model cannot be traced: how {' '.join(what)} of {abs(value)} at {self._shape} grows is not known",
                field="config",
            )
        return known if value >= 0 else tuple(-term for term in known)  # type: ignore[return-value]

    def _any_storage(self, value: int) -> Terms | None:
        """The size of a copy, which may be of any storage: one that grows, as what blocks save does, before one that does not."""
        return max(self._storages.get(value, ()), key=lambda terms: any(terms[1:]), default=None)

    def add_part(self, raw: RawPart, tables: PartTables, *, adds_gradients: bool) -> int:
        def size(op: Ran, described: _What, name: str) -> Terms:
            value: int = getattr(op, name)
            known = self._known.get(((*described, name), value))
            if known is not None:
                return known
            # What blocks save is copied in every micro-batch, and grows with the shape in each.
            is_copy = op.kind in ("copy_out", "copy_in")
            return self.terms((op.name, name), value, adds_gradients=adds_gradients and not is_copy)

        def make(op: Ran) -> Op:
            described = _describe(op)
            # What the plain plan lacks, an op of another micro-batch alone, holds nothing that counts.
            scratch_bytes, sides, convolution = self._scratch.get(_describe_scratch(op), (NO_TERMS, (), ()))
            return Op(
                name=op.name,
                kind=op.kind,
                flops=size(op, described, "flops"),
                read_bytes=size(op, described, "read_bytes"),
                written_bytes=size(op, described, "written_bytes"),
                scratch_bytes=scratch_bytes,
                sides=sides,
                convolution=convolution,
                dtype=op.dtype,
                form=op.form,
            )

        ops = (make(op) for op in raw.ops)
        changes = (
            (
                c.at,
                Change(tier=c.tier, category=c.category, num_bytes=self.terms((c.made_by, STORAGE), c.num_bytes)),
            )
            for c in raw.changes
        )
        return tables.add(ops, changes, storages=tuple(_number_storages(raw.changes)), num_views=raw.num_views)


def _number_storages(changes: Sequence[RawChange]) -> Iterator[int]:
    """Yield each change's storage's number, in order of birth in the part; -1 for what was there before."""
    numbers: dict[Storage, int] = {}
    before: set[Storage] = set()
    for change in changes:
        storage = change.storage
        if storage not in numbers and storage not in before:
            if change.num_bytes > 0:
                numbers[storage] = len(numbers)
            else:
                before.add(storage)
        yield numbers.get(storage, -1)


def _describe(op: Ran) -> _What:
    """Name an op so that ops of one name that have one size in common stay apart."""
    return op.name, op.flops, op.read_bytes, op.written_bytes


def _describe_scratch(op: Ran) -> tuple[object, ...]:
    return (*_describe(op), op.scratch_bytes, op.sides, op.convolution)


def _fit_each(values: Mapping[Shape, Sequence[int]]) -> tuple[Terms, ...]:
    """Place by place; the largest seen of what is no polynomial."""
    places = ({shape: each[index] for shape, each in values.items()} for index in range(len(next(iter(values.values())))))
    return tuple(fit_terms(sizes) or _constant(max(sizes.values())) for sizes in places)


def _constant(value: int) -> Terms:
    return (value, 0, 0, 0, 0, 0)


def _outline(part: RawPart) -> tuple[tuple[str, ...], tuple[tuple[int, Tier, Category, bool], ...]]:
    """A part without the sizes, and without what goes at the very end, which differs where another micro-batch follows."""
    changes = [(c.at, c.tier, c.category, c.num_bytes > 0) for c in part.changes]
    while changes and not changes[-1][-1]:
        changes.pop()
    return tuple(op.name for op in part.ops), tuple(changes)
