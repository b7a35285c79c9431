"""Words for how devices share a plan."""

import pytest

from webapp.pages.words.plan_names import layout_words, steps_alone

TWO = {"num_devices": 2, "data": "replicated"}


@pytest.mark.parametrize(
    ("layout", "words", "are_alone"),
    [
        ({}, "", False),
        (TWO, "on 2 devices", False),
        ({**TWO, "sync_every": 1}, "on 2 devices", False),
        ({**TWO, "sync_every": 8}, "on 2 devices, synchronized every 8 steps", True),
        ({**TWO, "data": "zero1"}, "on 2 devices, optimizer state shared (ZeRO-1)", False),
    ],
)
def test_how_devices_share_a_plan_is_said(layout: dict[str, object], words: str, are_alone: bool) -> None:
    document = {"layout": layout}
    assert (layout_words(document), steps_alone(document)) == (words, are_alone)
