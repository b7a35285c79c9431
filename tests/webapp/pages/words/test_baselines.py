"""Words for the plans that people write by hand."""

from optimizer.search.answer.baselines import BASELINES
from optimizer.search.generation.baselines import GENERATION_BASELINES
from optimizer.search.questions.by_hand.setups import list_labels
from optimizer.search.questions.uneven.answer import UNEVEN_BASELINES
from webapp.pages.words.baselines import BASELINE_WORDS


def test_every_plan_written_by_hand_has_words_and_no_other_has() -> None:
    endings = ("", "_zero1", "_zero2", "_hybrid_zero1", "_hybrid_zero2", "_hybrid_zero3", "_local")
    uneven = {f"{shares}{ending}" for shares in UNEVEN_BASELINES for ending in endings}
    setups = {label for label, _ in list_labels()}
    assert set(BASELINE_WORDS) == set(BASELINES) | set(GENERATION_BASELINES) | uneven | setups
