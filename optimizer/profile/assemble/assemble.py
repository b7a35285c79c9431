"""Turns traces at a few shapes into a Regime: each cut into parts (``cutting.py``), sizes fitted (``fitting.py``). Torch-free.

A change of bytes is booked where it happens, whichever part made the storage. That is enough for plans that mix choices,
because what crosses from part to part is the same for every choice, but for two things: a block's input goes when its own
choice lets it, which is booked in that block; and what several blocks share (sharing.py) goes with the last that holds it,
which ``Hold`` says.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from optimizer.base.errors import InvalidModel
from optimizer.plan.activations import BlockChoice
from optimizer.profile.assemble.cutting import Raw, RawPart, Storage, cut
from optimizer.profile.assemble.fitting import STORAGE, Fitter
from optimizer.profile.assemble.ranges import ShapeRange
from optimizer.profile.assemble.sharing import PROLOGUE, PartKey, Sharing, find_sharing
from optimizer.profile.assemble.tables import PartTables
from optimizer.profile.events import Event, Trace
from optimizer.profile.profile import BlockTemplate, Evaluation, Hold, Regime, Shared, tail_name
from optimizer.profile.sizes import Shape


class LikeBlocksShare(InvalidModel):
    """Blocks that are alike each make a tensor that others hold: only a model that was not shortened shows which."""


_HEAD: PartKey = ("head and loss", -1)
_HEAD_BACKWARD: PartKey = ("backward of head and loss", -1)
_NORM_BACKWARD: PartKey = ("backward", -1)


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
    """Assemble a regime from traces. whole: two micro-batches under each choice wanted at ``place.shape``, ``keep``
    among them; growth: one of the plain plan at each other shape; evaluation: a forward without gradients at each
    shape.

    Ops, changes and parts are added to ``tables``. has_tails: what follows the last block is held for each of its choices, as
    ``tail_name`` says; needed where code outside the blocks holds what they were given or return.

    Raises InvalidModel where the shapes disagree about anything but sizes, or a size fits no polynomial.
    """
    sharing = find_sharing(whole)
    raw = {
        (choice, which): cut(trace.first if which == "first" else trace.accumulate, sharing[choice, which].holders)
        for choice, trace in whole.items()
        for which in ("first", "accumulate")
    }
    fit = Fitter(place.shape, constants=frozenset[int]().union(*(trace.constants for trace in whole.values())))
    plain = raw["keep", "first"]
    others = {shape: cut(trace.first, sharing["keep", "first"].holders) for shape, trace in growth.items()}
    fit.learn(plain, others)
    fit.learn_inputs(whole["keep"].inputs, {shape: trace.inputs for shape, trace in growth.items()})
    for unwatched in list(others.values())[:1]:
        plain, kept = raw["keep", "first"], raw["keep", "accumulate"]
        num_extra = {key: part.num_views - unwatched.parts[key].num_views for key, part in plain.parts.items()}
        raw = {
            **raw,
            ("keep", "first"): _without_views(plain, num_extra),
            ("keep", "accumulate"): _without_views(kept, num_extra),
        }

    def part(choice: BlockChoice, which: str, key: PartKey) -> int:
        found = raw[choice, which].parts.get(key, RawPart())  # no norm after the last block: no part of its own
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
    """Parts that are no block, by name, with the micro-batch and the key it is traced under."""
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
    storages: Sequence[Storage], sharing: Sharing, fit: Fitter, block_templates: Sequence[int]
) -> Iterator[Shared]:
    for storage, birth in zip(storages, sharing.holders, strict=True):
        ends_in, ends_before = sharing.ends.get(birth, (-1, 0))
        for block in (birth.part[1], ends_in):
            if block >= 0 and block_templates.count(block) != 1:
                raise LikeBlocksShare(
                    f"the model cannot be traced: a tensor made in block {birth.part[1] + 1} of the shortened model is held by "
                    "other blocks, and several blocks of the model are like it",
                    field="config",
                )
        yield Shared(
            num_bytes=fit.terms((storage.made_by, STORAGE), storage.num_bytes),
            category=storage.category,
            ends_in=ends_in,
            ends_before=ends_before,
        )


def _without_views(raw: Raw, num_extra: Mapping[PartKey, int]) -> Raw:
    """The same micro-batch with so many fewer views in each part: those that only watching what blocks hold adds."""
    parts = {key: replace(part, num_views=part.num_views - num_extra.get(key, 0)) for key, part in raw.parts.items()}
    return replace(raw, parts=parts)


# A forward pass alone.


def assemble_forward(
    runs: Mapping[Shape, Sequence[Event]], *, shape: Shape, tables: PartTables
) -> dict[tuple[str, int], int]:
    """The parts of one forward pass, traced without gradients at each of a few shapes, of which ``shape`` is the first.

    A release is booked where it happens, as there is no backward for which anything could be held. Ops, changes and parts are
    added to ``tables``; returned are indices in its parts, by the phase and block that began them.
    Raises InvalidModel where the shapes disagree about anything but sizes, or a size fits no polynomial.
    """
    raw = {each: cut(events, {}) for each, events in runs.items()}
    fit = Fitter(shape)
    fit.learn(raw[shape], {each: other for each, other in raw.items() if each != shape})
    return {key: fit.add_part(part, tables, adds_gradients=False) for key, part in raw[shape].parts.items()}
