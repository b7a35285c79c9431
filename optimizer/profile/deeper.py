"""A profile with more blocks, or fewer, of the kinds that it has: what a model of another depth would be traced to. Torch-free.

Blocks between the first and the last repeat with some period (1 where all are alike, 6 where five local ones follow each global
one); depths differ by whole periods. What is made of it prices as the trace of such a model does.
"""

from collections.abc import Sequence
from dataclasses import replace

from optimizer.base.errors import InvalidModel
from optimizer.profile.profile import Profile

_ENDS = 2
"""The first block's backward is joined with the embedding's, the last one's forward with the final norm's."""


def depth_period(profile: Profile) -> int:
    """Depths can differ by multiples of this. Raises InvalidModel where the blocks do not repeat."""
    inner = _inner_kinds(profile)
    if profile.tensors.between:
        raise _not_repeated("an encoder and a decoder each have a depth of their own")
    for period in range(1, len(inner) // 2 + 1):
        if all(inner[index] == inner[index + period] for index in range(len(inner) - period)):
            return period
    if len(inner) == 1:
        return 1
    raise _not_repeated(f"no pattern of its {profile.num_blocks} blocks repeats")


def with_depth(profile: Profile, num_blocks: int) -> Profile:
    """Raises InvalidModel for a depth that is not whole periods away, or holds less than one."""
    period = depth_period(profile)
    if num_blocks < _ENDS + period or (num_blocks - profile.num_blocks) % period:
        raise InvalidModel(
            f"a depth of {num_blocks} is not to be had of {profile.num_blocks} blocks that repeat after {period}",
            field="num_blocks",
            value=num_blocks,
            allowed=f"{profile.num_blocks} more or less a multiple of {period}, at least {_ENDS + period}",
        )
    inner = [1 + index % period for index in range(num_blocks - _ENDS)]
    taken = (0, *inner, profile.num_blocks - 1)
    return replace(take_blocks(profile, taken), model_fingerprint=f"{profile.model_fingerprint} with {num_blocks} blocks")


def take_blocks(profile: Profile, taken: Sequence[int]) -> Profile:
    """The profile with these of its blocks alone, in this order; a block may come more than once."""
    kinds = profile.tensors.block_kinds
    return replace(
        profile,
        num_blocks=len(taken),
        tensors=replace(profile.tensors, block_kinds=tuple(kinds[block] for block in taken)),
        regimes={
            name: tuple(
                replace(regime, block_templates=tuple(regime.block_templates[block] for block in taken)) for regime in regimes
            )
            for name, regimes in profile.regimes.items()
        },
    )


def _inner_kinds(profile: Profile) -> Sequence[tuple[int, ...]]:
    """A mark of each block but the first and the last that sets it apart from others in weights and in every regime."""
    of_blocks = [profile.tensors.block_kinds, *(regime.block_templates for found in profile.regimes.values() for regime in found)]
    return list(zip(*of_blocks, strict=True))[1:-1]


def _not_repeated(why: str) -> InvalidModel:
    return InvalidModel(f"the model has no other depths: {why}", field="objective", value="largest_model")
