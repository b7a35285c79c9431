"""Ranges of shapes in which a model is traced."""

import pytest

from optimizer.base.errors import InvalidModel
from optimizer.profile.assemble.ranges import plan_ranges


def test_the_ranges_cover_every_shape_once() -> None:
    ranges = plan_ranges(max_sequence_length=8192, sequence_limits=[4096])
    for shape in ((1, 8), (1, 4096), (1, 4097), (2, 8), (64, 8192)):
        batch, length = shape
        covering = [
            place
            for place in ranges
            if place.micro_batch_low <= batch <= place.micro_batch_high
            and place.sequence_low <= length <= place.sequence_high
        ]
        assert len(covering) == 1, shape


def test_every_traced_shape_lies_in_its_range() -> None:
    for place in plan_ranges(max_sequence_length=131, sequence_limits=[48]):
        for batch, length in (place.shape, *place.more_shapes):
            assert place.micro_batch_low <= batch <= place.micro_batch_high
            assert place.sequence_low <= length <= place.sequence_high


def test_too_short_a_position_table_is_named() -> None:
    with pytest.raises(InvalidModel, match="only 3 sequence lengths, 8 to 10"):
        plan_ranges(max_sequence_length=10, sequence_limits=[])
