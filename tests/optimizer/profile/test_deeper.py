"""Profiles of other depths: there and back, what every depth has, and depths that are not to be had."""

from dataclasses import replace

import pytest

from optimizer.base.errors import InvalidModel
from optimizer.profile.deeper import depth_period, take_blocks, with_depth
from optimizer.profile.profile import Profile


@pytest.fixture(scope="module")
def alternating(llama_profile: Profile) -> Profile:
    """Six blocks, of which the inner ones have two kinds in turn."""
    deep = with_depth(llama_profile, 6)
    kinds = (0, 1, 0, 1, 0, 1)
    return replace(deep, tensors=replace(deep.tensors, by_block=deep.tensors.by_block[:1] * 2, block_kinds=kinds))


def test_more_blocks_and_as_many_fewer_give_the_profile_back(llama_profile: Profile) -> None:
    there_and_back = with_depth(with_depth(llama_profile, llama_profile.num_blocks + 3), llama_profile.num_blocks)
    assert there_and_back.tensors == llama_profile.tensors
    assert there_and_back.regimes == llama_profile.regimes


def test_blocks_are_taken_in_the_order_asked_for_and_more_than_once(alternating: Profile) -> None:
    taken = take_blocks(alternating, (0, 3, 3, 2))
    assert taken.num_blocks == 4
    assert taken.tensors.block_kinds == (0, 1, 1, 0)


def test_each_block_more_adds_its_own_tensors_and_nothing_else(llama_profile: Profile) -> None:
    counts = [sum(size.num_elements for size in with_depth(llama_profile, depth).tensors.in_order()) for depth in (4, 5, 6)]
    assert counts[2] - counts[1] == counts[1] - counts[0] > 0


def test_another_depth_is_another_model(llama_profile: Profile) -> None:
    depths = range(llama_profile.num_blocks + 1, llama_profile.num_blocks + 4)
    made = {with_depth(llama_profile, depth).model_fingerprint for depth in depths}
    assert len(made | {llama_profile.model_fingerprint}) == 4


def test_kinds_in_turn_repeat_after_all_of_them(alternating: Profile) -> None:
    assert depth_period(alternating) == 2
    assert with_depth(alternating, 8).tensors.block_kinds == (0, 1, 0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize("num_blocks", [2, 5, 7])
def test_a_depth_that_is_no_whole_period_away_is_refused_with_those_that_are(
    alternating: Profile, num_blocks: int
) -> None:
    with pytest.raises(InvalidModel, match=f"a depth of {num_blocks} is not to be had of 6 blocks") as caught:
        with_depth(alternating, num_blocks)
    fields = caught.value.fields
    assert (fields["field"], fields["value"]) == ("num_blocks", num_blocks)
    assert fields["allowed"] == "6 more or less a multiple of 2, at least 4"


def test_blocks_that_do_not_repeat_have_no_other_depth(alternating: Profile) -> None:
    tensors = replace(alternating.tensors, block_kinds=(0, 0, 0, 0, 1, 1))
    with pytest.raises(InvalidModel, match="no pattern of its 6 blocks repeats"):
        depth_period(replace(alternating, tensors=tensors))
