"""Joins profiles of one model of which each was traced in part. Torch-free."""

from collections.abc import Sequence
from dataclasses import replace

from optimizer.profile.assemble.tables import PartTables
from optimizer.profile.ops import Part
from optimizer.profile.profile import BlockTemplate, Evaluation, Profile, Regime


def merge_profiles(*profiles: Profile) -> Profile:
    """Everything that any of them holds. Of a range that several hold, the one with the most choices is taken whole: what blocks
    share depends on which choices were traced together.

    All must be of the same model, adapters and versions.
    """
    whole = next((profile for profile in profiles if not profile.is_partial), None)
    if whole is not None or len(profiles) == 1:
        return whole or profiles[0]
    tables = PartTables()
    moved = [_with_parts_in(profile, tables) for profile in profiles]
    names = dict.fromkeys(name for profile in profiles for name in profile.regimes)
    regimes = {name: _merge([regime for found in moved for regime in found.get(name, ())]) for name in names}
    return replace(
        profiles[0],
        buffer_bytes={dtype: size for profile in profiles for dtype, size in profile.buffer_bytes.items()},
        frozen={name: frozen for profile in profiles for name, frozen in profile.frozen.items()},
        ops=tables.ops,
        changes=tables.changes,
        parts=tables.parts,
        regimes=regimes,
    )


def add_compiled(profile: Profile, compiled: Profile) -> Profile:
    """A profile with the compiled regimes of another trace of the same model; it stays whole if it was."""
    merged = merge_profiles(replace(profile, is_partial=True), replace(compiled, is_partial=True))
    return replace(merged, is_partial=profile.is_partial)


def _merge(regimes: Sequence[Regime]) -> tuple[Regime, ...]:
    by_range: dict[tuple[int, int], Regime] = {}
    for regime in regimes:
        key = (regime.sequence_low, regime.micro_batch_low)
        if key not in by_range or len(regime.templates) > len(by_range[key].templates):
            by_range[key] = regime
    return tuple(by_range[key] for key in sorted(by_range))


def _with_parts_in(profile: Profile, tables: PartTables) -> dict[str, tuple[Regime, ...]]:
    """The profile's regimes with their parts in ``tables``."""
    places = [_add(part, profile, tables) for part in profile.parts]

    def template(old: BlockTemplate) -> BlockTemplate:
        return replace(
            old,
            forward=places[old.forward],
            backward_first=places[old.backward_first],
            backward_accumulate=places[old.backward_accumulate],
        )

    def evaluation(old: Evaluation | None) -> Evaluation | None:
        if old is None:
            return None
        blocks = tuple(places[index] for index in old.blocks)
        return replace(old, prologue=places[old.prologue], blocks=blocks, head=places[old.head])

    return {
        name: tuple(
            replace(
                regime,
                parts={part: places[index] for part, index in regime.parts.items()},
                templates={choice: tuple(map(template, old)) for choice, old in regime.templates.items()},
                evaluation=evaluation(regime.evaluation),
            )
            for regime in regimes
        )
        for name, regimes in profile.regimes.items()
    }


def _add(part: Part, profile: Profile, tables: PartTables) -> int:
    changes = [(at, profile.changes[index]) for at, index in zip(part.changes_at, part.changes, strict=True)]
    return tables.add(
        [profile.ops[index] for index in part.ops], changes, storages=part.storages, num_views=part.num_views
    )
