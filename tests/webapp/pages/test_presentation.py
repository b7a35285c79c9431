"""Bars, rows and words from documents."""

import pytest

from optimizer.categories import CATEGORIES
from optimizer.units import MIB
from tests.webapp.pages import rows
from webapp.pages.presentation import block_strip, comparisons, plan_rows, signed_error, stacked_bar
from webapp.pages.pricing import block_letters


def test_a_bar_stacks_the_categories_in_their_fixed_order():
    bar = stacked_bar(dict(reversed(rows.PEAK.items())), budget_bytes=None)
    assert [segment.category for segment in bar.segments] == [name for name in CATEGORIES if name in rows.PEAK]


def test_the_segments_of_a_bar_meet_without_gaps():
    bar = stacked_bar(rows.PEAK, budget_bytes=480 * MIB)
    ends = [float(part.start_percent[:-1]) + float(part.width_percent[:-1]) for part in bar.segments]
    starts = [float(part.start_percent[:-1]) for part in bar.segments]
    assert starts[0] == 0
    assert starts[1:] == pytest.approx(ends[:-1], abs=0.002)  # three decimals are written
    assert ends[-1] == pytest.approx(409 / (480 * 1.04) * 100, abs=0.01)


def test_a_bar_over_its_budget_keeps_the_budget_line_inside():
    bar = stacked_bar({"weights": 200}, budget_bytes=100)
    assert bar.budget_percent == "48.077%"


def test_an_empty_bar_is_a_sentence_too():
    assert stacked_bar({}, budget_bytes=None).summary == "0 B: nothing yet"


def test_the_plan_table_leaves_out_what_the_job_does_not_have():
    table = plan_rows(rows.make_plan().to_json(), prediction=rows.make_prediction().to_json(), measured=None)
    assert [row.category for row in table] == [name for name in CATEGORIES if name != "kv_cache"]
    assert table[-1].lifetime == "counted, not decided"


def test_blocks_are_numbered_from_one_with_letter_and_meaning():
    strip = block_strip(rows.make_plan().to_json())
    assert (strip[0].number, strip[0].letter, strip[-1].letter) == (1, "R", "K")


def test_runs_of_blocks_are_shortened():
    assert block_letters(rows.BLOCKS) == "R6 O4 K2"


@pytest.mark.parametrize(
    ("predicted", "measured", "words"), [(99.3, 100, "−0.7 %"), (110, 100, "+10.0 %"), (1, None, ""), (1, 0, "")]
)
def test_an_error_is_relative_to_the_measurement(predicted, measured, words):
    assert signed_error(predicted, measured=measured) == words


def test_a_comparison_waits_for_its_measurement():
    first, _ = comparisons(rows.make_prediction().to_json(), measured=None)
    assert (first.predicted, first.measured, first.error) == ("409 MiB", "not yet", "")
