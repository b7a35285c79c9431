"""A short model shows every surrounding of a block that the deep one has."""

from optimizer.profile.trace.depth import shorten_blocks


def test_eighty_equal_blocks_are_shown_by_three() -> None:
    kinds, instances = shorten_blocks(["block"] * 80)
    assert kinds == ["block"] * 3
    assert instances == [0, *([1] * 78), 2]


def test_a_single_block_stays_single() -> None:
    assert shorten_blocks(["block"]) == (["block"], [0])


def test_alternating_kinds_keep_their_neighbours() -> None:
    whole = ["sliding", "full"] * 13
    kinds, instances = shorten_blocks(whole)
    assert len(kinds) <= 6
    assert [kinds[instance] for instance in instances] == whole
    assert instances[0] == 0
    assert instances[-1] == len(kinds) - 1
