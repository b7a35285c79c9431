"""A deep model's plan cut short, for what is too slow to work out block by block and grows evenly with alike blocks. Torch-free.

Blocks that follow each other, are alike and take the same choice form a run. Each run is cut to two lengths, both with the whole
model's proportions as nearly as whole blocks allow; what was found at both is carried on in a straight line.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from optimizer.plan.plan import Plan
from optimizer.profile.deeper import take_blocks
from optimizer.profile.profile import Profile

SHORT_LENGTHS = (8, 14)
"""Blocks of the two cut models, if all are in one run."""
MIN_RUN = 3
"""Runs are cut no shorter: a first, a last and one between them."""
MIN_SAVED = 12
"""Blocks that cutting must leave out to be worth while."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A plan for fewer blocks."""

    profile: Profile
    plan: Plan
    kept: tuple[int, ...]
    """The whole model's blocks that are left."""


def cut_short(profile: Profile, plan: Plan) -> tuple[Cut, Cut] | None:
    """The shorter one first; None where that saves too little, since the blocks differ too much or are few."""
    if plan.optimizer_state.fraction != 1.0:
        # Which tensors leave depends on all of them.
        return None
    kept = keep_blocks(_list_runs(profile, plan), num_blocks=profile.num_blocks)
    return None if kept is None else (_cut(profile, plan, kept[0]), _cut(profile, plan, kept[1]))


def keep_blocks(runs: Sequence[Sequence[int]], *, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The blocks of both cut models; None as above. runs: as ``list_alike`` gives them."""
    shorter, longer = (_keep_blocks(runs, length / num_blocks) for length in SHORT_LENGTHS)
    if len(longer) + MIN_SAVED > num_blocks or len(shorter) == len(longer):
        return None
    return shorter, longer


def list_alike(kinds: Sequence[object]) -> list[list[int]]:
    """Runs of blocks whose kinds are equal."""
    return [list(blocks) for _, blocks in groupby(range(len(kinds)), key=lambda block: kinds[block])]


def carry_on(shorter: int, longer: int, *, lengths: tuple[int, int], num_blocks: int) -> int:
    """Carry two lengths on to the whole, in a straight line."""
    slope = (longer - shorter) / (lengths[1] - lengths[0])
    return round(longer + slope * (num_blocks - lengths[1]))


def _list_runs(profile: Profile, plan: Plan) -> list[list[int]]:
    templates = [regime.block_templates for regimes in profile.regimes.values() for regime in regimes]

    def kind_of(block: int) -> tuple[object, ...]:
        alike = tuple(of_block[block] for of_block in templates)
        return profile.tensors.block_kinds[block], alike, plan.activations.per_block[block]

    return list_alike([kind_of(block) for block in range(profile.num_blocks)])


def _keep_blocks(runs: Sequence[Sequence[int]], share: float) -> tuple[int, ...]:
    """Keep the first blocks but one of each run, and its last."""
    kept: list[int] = []
    for run in runs:
        length = min(len(run), max(MIN_RUN, round(len(run) * share)))
        kept += [*run[: length - 1], run[-1]]
    return tuple(kept)


def _cut(profile: Profile, plan: Plan, kept: tuple[int, ...]) -> Cut:
    per_block = tuple(plan.activations.per_block[block] for block in kept)
    return Cut(
        profile=take_blocks(profile, kept),
        plan=replace(plan, activations=replace(plan.activations, per_block=per_block)),
        kept=kept,
    )
